"""The tree of the descriptor fake."""

from __future__ import annotations

from deepmd_ema.config.fields import plain
from deepmd_ema.interchange.dp.files import VARIABLES
from deepmd_ema.interchange.dp.networks import PartTree, array, precision_of


class FakeTree(PartTree):
    """Tree of fake: its options, parameters and buffers."""

    def write(self, part, config):
        variables = {name.replace(".", "_"): array(tensor) for name, tensor in part.state_dict().items()}
        options = {**plain(config.descriptor), "precision": precision_of(part.dtype)}
        return {"@class": "Descriptor", "@version": 1, **options, VARIABLES: variables}

    def unavailable(self, tree):
        return {}
