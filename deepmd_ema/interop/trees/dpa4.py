"""The tree of the descriptor dpa4: options, and arrays by the names of DeePMD-kit's modules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from deepmd_ema.config.fields import plain
from deepmd_ema.config.schema.model import NetworkConfig
from deepmd_ema.interop.parts import (
    BACKENDS,
    PartTree,
    array,
    chosen,
    env_mat_tree,
    precision_of,
    tree_without_effect,
)
from deepmd_ema.interop.tree_files import VARIABLES, Tree
from deepmd_ema.model.families.dpa4.frames import OrderLinear, RadialMixer, pair_degrees
from deepmd_ema.model.families.dpa4.layers import (
    DegreeGate,
    DegreeLinear,
    DegreeNorm,
    OrderedNorm,
)
from deepmd_ema.model.families.dpa4.rotations import degrees, orders

if TYPE_CHECKING:
    from deepmd_ema.model.families.dpa4.module import DPA4Descriptor
    from deepmd_ema.model.families.dpa4.section import DPA4Config

_SEL = 256  # an option of DeePMD-kit, without effect
FIRST_VERSION = 1.0  # version of files without the entry


class DPA4Tree(PartTree):
    """Tree of dpa4.

    It holds index arrays as well, which DeePMD-kit requires and which follow from the options.
    """

    modules = dict.fromkeys(BACKENDS, ())
    defaults: ClassVar[Mapping[str, float]] = {"version_tensor": FIRST_VERSION}

    def write(self, part: DPA4Descriptor, config: NetworkConfig) -> Tree:
        """Return the tree of a descriptor."""
        section: Any = config.descriptor
        window = config.bridging
        options = {
            **tree_without_effect(section),
            **plain(section),
            "precision": precision_of(part.dtype),
        }
        del options["type"]
        trained = {
            _name(name): array(tensor) for name, tensor in part.state_dict().items()
        }
        return {
            "@class": "Descriptor",
            "type": "SeZM",
            "@version": float(part.version_tensor),
            "config": {
                "ntypes": part.num_types,
                "type_map": list(config.type_map),
                **options,
                "sel": [_SEL],
                "inner_clamp_r_inner": window and window.inner,
                "inner_clamp_r_outer": window and window.outer,
                "use_spin": None,
            },
            VARIABLES: {**trained, **dict(_constants(part, section))},
            "env_mat": env_mat_tree(section.rcut, section.rcut, section.eps),
        }

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


def _name(place: str) -> str:
    """Return the name of DeePMD-kit of a place in the module."""
    place = re.sub(r"\blayers\.", "blocks.", place)
    return re.sub(r"\bso2_conv\.(mixing|attention)\.", "so2_conv.", place)


def _constants(
    part: DPA4Descriptor, section: DPA4Config
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield arrays that DeePMD-kit keeps beside parameters.

    l is the degree, m the order of a coefficient.
    """
    dtype = precision_of(part.dtype)
    yield from (("mean", np.zeros(0, dtype)), ("stddev", np.zeros(0, dtype)))
    lmax = section.largest_degree + section.extra_node_l
    has_start = section.use_env_seed and lmax > 0
    rotations = ["wigner_calc"]
    if has_start and section.extra_node_l > 0:
        rotations.append("gie_zonal_wigner_calc")
    for rotation in rotations:
        sign = np.array([-1, -1, 1], dtype)  # from x, y, z to the order of harmonics
        yield f"{rotation}.l1_perm", np.array([1, 2, 0])
        yield f"{rotation}.l1_sign_outer", np.outer(sign, sign)
    if has_start:
        by_row = np.array(degrees(lmax)[1:])
        yield "gie.non_scalar_row_index", np.arange(1, len(by_row) + 1)
        yield "gie.zonal_m0_col_index_for_row", by_row * (by_row + 1)
        yield "gie.radial_slot_index_for_row", by_row - 1
    for place, module in part.named_modules():
        match = re.match(r"layers\.(\d+)\.", place)
        block = int(match[1]) if match else 0
        largest = (section.degrees[block], section.orders[block]) if match else (0, 0)
        for name, values in _constants_of(module, *largest, ".mixing." in place):
            yield f"{_name(place)}.{name}", np.array(values)


def _constants_of(
    module: Any, lmax: int, mmax: int, in_frames: bool
) -> Iterator[tuple[str, ArrayLike]]:
    """Yield the index arrays and weights of one module.

    Args:
        module: of a descriptor.
        lmax: largest degree in the frames of pairs of its block.
        mmax: largest order there.
        in_frames: whether the module is in these frames.
    """
    # degree and order of each coefficient in these frames
    frame_degrees = pair_degrees(lmax, mmax)
    order = np.repeat(orders(mmax), [lmax + 1 - abs(m) for m in orders(mmax)])
    if isinstance(module, DegreeLinear):
        yield "expand_index", degrees(len(module.weight) - 1)
    elif isinstance(module, DegreeNorm):
        yield "expand_index", degrees(len(module.adam_scale) - 1)
        yield "balance_weight", module._share.cpu().numpy()
    elif isinstance(module, OrderedNorm):
        yield "degree_index_m", frame_degrees
        yield "balance_weight", module._share.cpu().numpy()
    elif isinstance(module, DegreeGate):
        by_row = frame_degrees if in_frames else degrees(module.lmax)
        yield "expand_index", np.array(by_row)[1:] - 1
    elif isinstance(module, OrderLinear):
        yield "m0_idx", np.flatnonzero(order == 0)
        yield "pos_indices", np.flatnonzero(order > 0)
        yield "neg_indices", np.flatnonzero(order < 0)
    elif isinstance(module, RadialMixer):
        # There is a matrix between degrees for each |m|. Each of its entries has a place among all
        # entries, and a place in a whole matrix between coefficients, by the coefficient of the
        # neighbor first.
        compact, dense = [], []
        for m in orders(mmax):
            places = np.flatnonzero(order == m)
            compact.append(
                sum((lmax + 1 - k) ** 2 for k in range(abs(m)))
                + np.arange(len(places) ** 2)
            )
            dense.append(np.add.outer(places, len(order) * places).ravel())
        yield "kernel_compact_index", np.concatenate(compact)
        yield "kernel_dense_index", np.concatenate(dense)
