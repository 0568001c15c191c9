"""The tree of the descriptor dpa4: its options, and its arrays by the names of DeePMD-kit's modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import NetworkConfig
from deepmd_ema.interop.parts import BACKENDS, PartTree, array, chosen, env_mat_tree, precision_of
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.families.dpa4.frames import OrderLinear, RadialMixer
from deepmd_ema.model.families.dpa4.layers import DegreeGate, DegreeLinear, DegreeNorm, OrderedNorm

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4.module import DPA4Descriptor
    from deepmd_ema.model.families.dpa4.section import DPA4Config

_SEL = 256  # of DeePMD-kit, without effect
FIRST_VERSION = 1.0  # of files that do not say which
# places in the module -> names of DeePMD-kit
_NAMES = ((r"\blayers\.", "blocks."), (r"\bso2_conv\.(mixing|attention)\.", "so2_conv."))


class DPA4Tree(PartTree):
    """Tree of dpa4. It holds index arrays as well, which DeePMD-kit requires and which follow from the options."""

    modules = dict.fromkeys(BACKENDS, ())
    defaults: ClassVar[Mapping[str, float]] = {"version_tensor": FIRST_VERSION}

    def write(self, part: DPA4Descriptor, config: NetworkConfig) -> Tree:
        """Return the tree of a descriptor."""
        section, window = cast("DPA4Config", config.descriptor), config.bridging
        options = {**plain(section), "precision": precision_of(part.dtype)}
        del options["type"]
        trained = {_name(name): array(tensor) for name, tensor in part.state_dict().items()}
        return {
            "@class": "Descriptor", "type": "SeZM", "@version": float(part.version_tensor),
            "config": {
                "ntypes": part.num_types, "type_map": list(config.type_map), **options, "sel": [_SEL],
                "inner_clamp_r_inner": window and window.inner, "inner_clamp_r_outer": window and window.outer,
                "use_spin": None,
            },
            VARIABLES: {**trained, **dict(_constants(part, section))},
            "env_mat": env_mat_tree(section.rcut, section.rcut, section.eps),
        }  # fmt: skip

    def section(self, tree: Mapping[str, Any]) -> Tree:
        """Return the options of the section ``model.descriptor``."""
        return {"type": "dpa4", **chosen(tree["config"], self._options), "sel": _SEL}

    def name_of(self, place: str, section: Any, backend: str) -> str:
        """Return the name of an array in checkpoints, which is that in the tree."""
        return place

    def upgraded(self, tree: Tree) -> Tree:
        """Return the tree with its version among the arrays."""
        version = np.array(float(tree.get("@version", FIRST_VERSION)))
        return {**tree, VARIABLES: {"version_tensor": version, **tree[VARIABLES]}}


def _name(name: str) -> str:
    for pattern, replacement in _NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _constants(part: DPA4Descriptor, section: DPA4Config) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays that DeePMD-kit keeps beside parameters; l is the degree, m the order of a coefficient."""
    dtype = precision_of(part.dtype)
    yield from (("mean", np.zeros(0, dtype)), ("stddev", np.zeros(0, dtype)))
    lmax = section.largest_degree + section.extra_node_l
    has_start = section.use_env_seed and lmax > 0
    for rotation in ("wigner_calc", *["gie_zonal_wigner_calc"] * (has_start and section.extra_node_l > 0)):
        sign = np.array([-1, -1, 1], dtype)  # from x, y, z to the order of harmonics
        yield f"{rotation}.l1_perm", np.array([1, 2, 0])
        yield f"{rotation}.l1_sign_outer", np.outer(sign, sign)
    if has_start:
        degrees = _degrees(lmax)[1:]
        yield "gie.non_scalar_row_index", np.arange(1, len(degrees) + 1)
        yield "gie.zonal_m0_col_index_for_row", degrees * (degrees + 1)
        yield "gie.radial_slot_index_for_row", degrees - 1
    for place, module in part.named_modules():
        found = re.match(r"layers\.(\d+)\.", place)
        block = int(found[1]) if found else 0
        of_pairs = (section.degrees[block], section.orders[block]) if found else (0, 0)
        for name, values in _constants_of(module, of_pairs, ".mixing." in place):
            yield f"{_name(place)}.{name}", values.astype(dtype) if values.dtype.kind == "f" else values


def _constants_of(module: Any, of_pairs: tuple[int, int], in_frames: bool) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the index arrays and weights of one module.

    Args:
        module: of a descriptor.
        of_pairs: largest degree and order in the frames of pairs of its block.
        in_frames: whether the module is in these frames.
    """
    reduced = np.array(_degrees_by_order(*of_pairs))
    if isinstance(module, DegreeLinear):
        yield "expand_index", _degrees(len(module.weight) - 1)
    elif isinstance(module, DegreeNorm):
        degrees, channels = _degrees(len(module.adam_scale) - 1), module.adam_scale.shape[-1]
        yield "expand_index", degrees
        yield "balance_weight", 1 / ((2 * degrees + 1) * (degrees[-1] + 1) * channels)
    elif isinstance(module, OrderedNorm):
        yield "degree_index_m", reduced
        kept = 2 * np.minimum(reduced, of_pairs[1]) + 1
        yield "balance_weight", 1 / (kept * (of_pairs[0] + 1) * module.adam_scale.shape[-1])
    elif isinstance(module, DegreeGate):
        yield "expand_index", (reduced if in_frames else _degrees(module.lmax))[1:] - 1
    elif isinstance(module, OrderLinear):
        groups = _groups(*of_pairs)
        yield "m0_idx", np.array(groups[0])
        yield "pos_indices", np.array([*chain(*groups[2::2])], np.int64)
        yield "neg_indices", np.array([*chain(*groups[1::2])], np.int64)
    elif isinstance(module, RadialMixer):
        compact, dense = zip(*_kernel_places(*of_pairs), strict=True)
        yield "kernel_compact_index", np.array(compact)
        yield "kernel_dense_index", np.array(dense)


def _degrees(lmax: int) -> np.ndarray:
    """Return the degree of each coefficient, those of a degree together."""
    return np.repeat(np.arange(lmax + 1), 2 * np.arange(lmax + 1) + 1)


def _groups(lmax: int, mmax: int) -> Sequence[list[int]]:
    """Return the places of the coefficients of m = 0, -1, 1, -2, 2, ... in the frames of pairs."""
    sizes = [lmax + 1, *(lmax + 1 - m for m in range(1, mmax + 1) for _ in range(2))]
    ends = np.cumsum(sizes).tolist()
    return [list(range(end - size, end)) for size, end in zip(sizes, ends)]


def _degrees_by_order(lmax: int, mmax: int) -> list[int]:
    """Return the degree of each coefficient in the frames of pairs, those of an order together."""
    return [lmax + 1 - len(group) + k for group in _groups(lmax, mmax) for k in range(len(group))]


def _kernel_places(lmax: int, mmax: int) -> Iterator[tuple[int, int]]:
    """Yield the place of each entry of a matrix between degrees among those that are kept, and in the whole matrix."""
    groups, start = _groups(lmax, mmax), 0
    width = groups[-1][-1] + 1
    for m in range(mmax + 1):
        size = lmax + 1 - m
        for group in groups[max(0, 2 * m - 1) : 2 * m + 1]:
            for i, j in np.ndindex(size, size):
                yield start + i * size + j, group[j] * width + group[i]
        start += size * size
