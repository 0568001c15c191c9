"""The tree of the descriptor fake."""

from deepmd_ema.config.fields import plain
from deepmd_ema.interop.parts import PartTree, array, precision_of
from deepmd_ema.interop.tree_files import VARIABLES


class FakeTree(PartTree):
    """Tree of fake: its options, parameters and buffers."""

    def write(self, part, config):
        variables = {
            name.replace(".", "_"): array(tensor)
            for name, tensor in part.state_dict().items()
        }
        options = {**plain(config.descriptor), "precision": precision_of(part.dtype)}
        return {"@class": "Descriptor", "@version": 1, **options, VARIABLES: variables}
