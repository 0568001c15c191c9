"""An energy model as a function of tensors: atoms, images of their neighbors, a neighbor list.

This is what is written to a ``.pt2`` file. Names, shapes and order of arguments and outputs are
those that DeePMD-kit gives to a file of kind ``nlist`` and takes from it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch
from deepmd_ema.config.labels import APARAM, FPARAM
from deepmd_ema.config.schema.common import MAX_SIZE
from deepmd_ema.model.descriptor.by_type import ByTypeDescriptor
from deepmd_ema.model.descriptor.env_statistics import has_equal_slots
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.ops.operations import REFERENCE, with_operations

# F frames, N atoms of a frame, E atoms of a frame and images of them, A = F N atoms, K slots, L
# slots as given, T types, P frame parameters, Q atom parameters

_ROUNDING = 1e-9  # angstrom, of two distances that are equal


@dataclass(frozen=True)
class ExtendedBatch(Batch):
    """A batch made inside of a graph.

    It is known which slots hold a neighbor. ``reverse`` is not known and has no columns.

    Attributes:
        occupied: (A, K) bool, whether the slot holds a neighbor.
        neighbor_type: (A, K) int64, type of each neighbor.
        first_type: (F,) int64, type of the first atom of each frame.
    """

    # fields before it have defaults
    occupied: Tensor = torch.zeros(0, 0, dtype=torch.bool)  # noqa: RUF009
    neighbor_type: Tensor = torch.zeros(0, 0, dtype=torch.int64)  # noqa: RUF009
    first_type: Tensor = torch.zeros(0, dtype=torch.int64)  # noqa: RUF009

    def with_slots(self, slot: Tensor, **changes: Any) -> Batch:
        """Return the batch with other slots."""
        is_none = slot == self.occupied.numel()
        place = torch.where(is_none, 0, slot)
        kind = torch.where(is_none, 0, self.neighbor_type.flatten()[place])
        return replace(
            self,
            occupied=~is_none & self.occupied.flatten()[place],
            neighbor_type=kind,
            **changes,
        )


class ExtendedModel(nn.Module):
    """Energies, forces and virials from extended coordinates.

    Args:
        model: in evaluation mode. Networks of absent elements are not left out.
    """

    def __init__(self, model: EnergyModel) -> None:
        super().__init__()
        self.model = with_operations(model, REFERENCE)
        self._keeps_order = not has_equal_slots(model)

    def forward(
        self,
        coord: Tensor,
        atype: Tensor,
        nlist: Tensor,
        mapping: Tensor,
        fparam: Tensor | None = None,
        aparam: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return energies and their derivatives.

        Args:
            coord: (F, E, 3) float64, angstrom; the first N of each frame are its atoms.
            atype: (F, E) int64.
            nlist: (F, N, L) int64, places of neighbors among the E, in any order, -1 is none.
                Neighbors beyond the cutoff and excluded pairs count for nothing.
            mapping: (F, E) int64, the atom that each is an image of; read only by models that pass
                messages.
            fparam: (F, P) float64.
            aparam: (F, N, Q) float64.

        Returns:
            ``energy`` (F, N, 1) of each atom and ``energy_redu`` (F, 1), eV; ``energy_derv_r`` (F,
            E, 1, 3) forces on atoms and images, eV/angstrom; ``energy_derv_c_redu`` (F, 1, 9)
            virials, eV; ``mask`` (F, N) int32, ones; ``energy_derv_c`` (F, E, 1, 9) of pairs at
            their neighbors, which add up to the virials.
        """
        frames, extended = atype.shape
        num_atoms = nlist.shape[1]
        batch, place = _batch(
            coord, atype, nlist, mapping, self.model, keeps_order=self._keeps_order
        )
        conditions = {} if fparam is None else {FPARAM: fparam}
        if aparam is not None:
            conditions[APARAM] = aparam.flatten(0, 1)[batch.atom_order]
        batch = replace(batch, conditions=conditions)
        with torch.no_grad():
            sorted_energy, pair = self.model.energy_and_gradient(batch)
        # (A,) in the order of the batch, then as in `atype`
        energy = batch.in_file_order(sorted_energy).view(frames, num_atoms)
        force = coord.new_zeros(frames * extended, 3)
        force = force.index_add(
            0, batch.atom_frame * extended + batch.atom_order % num_atoms, pair.sum(1)
        )
        force = force.index_add(0, place.flatten(), -pair.flatten(0, 1))
        # (A K, 9), all of a pair at its neighbor, as DeePMD-kit does it
        pair_virial = -(pair.unsqueeze(-1) * batch.vector.unsqueeze(-2)).reshape(-1, 9)
        virial = coord.new_zeros(frames * extended, 9).index_add(
            0, place.flatten(), pair_virial
        )
        virial = virial.view(frames, extended, 1, 9)
        return {
            "energy": energy[..., None],
            "mask": torch.ones_like(energy, dtype=torch.int32),
            "energy_redu": energy.sum(1, keepdim=True),
            "energy_derv_r": force.view(frames, extended, 1, 3),
            "energy_derv_c": virial,
            "energy_derv_c_redu": virial.sum(1),
        }


def _batch(
    coord: Tensor,
    atype: Tensor,
    nlist: Tensor,
    mapping: Tensor,
    model: EnergyModel,
    *,
    keeps_order: bool,
) -> tuple[ExtendedBatch, Tensor]:
    """Return a batch in the layout of the model, and the places (A, K) of its neighbors.

    Places count all F E atoms and images.

    Args:
        coord: (F, E, 3), angstrom.
        atype: (F, E).
        nlist: (F, N, L).
        mapping: (F, E).
        model: for its layout.
        keeps_order: whether neighbors at one distance stay in the order of ``nlist``.
    """
    layout = model.layout
    frames, extended = atype.shape
    num_atoms = nlist.shape[1]
    frame = torch.arange(frames, device=atype.device)
    # picked, not sliced: a graph depends on whether a slice is the whole, and would hold for one of
    # the cases only
    # (A,) places of the atoms among all F E atoms and images
    centre = (
        torch.arange(num_atoms, device=atype.device) + (frame * extended)[:, None]
    ).flatten()
    order, counts = _by_type(atype.flatten()[centre], model)
    centre = centre[order]
    # (A, L) the same of their neighbors, -1 where there is none
    listed = torch.where(nlist >= 0, nlist + (frame * extended)[:, None, None], -1)
    listed = listed.flatten(0, 1)[order]
    flat_coord, flat_type = coord.flatten(0, 1), atype.flatten()
    # the neighbors inside the cutoff, nearest first and by type where the layout wants it so
    is_near = listed >= 0
    place = torch.where(is_near, listed, centre[:, None])
    distance = torch.linalg.vector_norm(
        flat_coord[place] - flat_coord[centre][:, None], dim=-1
    )
    is_near = is_near & (distance < layout.rcut)
    distance = torch.where(is_near, distance, torch.inf)
    key, by_distance = torch.sort(distance, dim=1, stable=True)
    if keeps_order:
        # two images of the atom itself are at one distance, and rounding must not put them in
        # order. `roll` compares the first with the last, which is not nearer
        rank = (key - key.roll(1, 1) > _ROUNDING).cumsum(1)
        ranks_of_slots = torch.zeros_like(rank).scatter(1, by_distance, rank)
        by_distance = ranks_of_slots.argsort(dim=1, stable=True)
        key = distance.gather(1, by_distance)
    place = place.gather(1, by_distance)
    rank = torch.arange(place.shape[1], device=place.device)
    is_near = (key < layout.rcut) & (rank < sum(layout.sel))
    # (A, L) bool, for each section the neighbors that belong to it
    sections = (
        [is_near & (flat_type[place] == t) for t in range(len(layout.sel))]
        if layout.by_type
        else [is_near]
    )
    if layout.excluded_pairs:  # after the nearest were chosen, as everywhere
        near = [
            mine & (torch.cumsum(mine, 1) <= sel)
            for mine, sel in zip(sections, layout.sel)
        ]
        seen = torch.ones_like(is_near)
        for a, b in sorted(layout.excluded_pairs):
            seen = seen & ((flat_type[centre][:, None] != a) | (flat_type[place] != b))
        sections = [mine & seen for mine in near]
    # (A, L) number of a neighbor in its section, from 1; the last column has how many there are
    ordinals = [torch.cumsum(mine, 1) for mine in sections]
    # a descriptor that keeps all neighbors has as many slots as are listed
    slots = layout.sel if sum(layout.sel) < MAX_SIZE else (listed.shape[1],)
    if isinstance(
        model.descriptor, ByTypeDescriptor
    ):  # only as many slots as an atom needs
        slots = tuple(
            _most(ordinal[:, -1], sel) for ordinal, sel in zip(ordinals, layout.sel)
        )
    total = sum(slots)
    # (A, L) the slot that a neighbor goes to; K, one past the last, where it is not kept
    slot = torch.full_like(place, total)
    starts = accumulate(slots, initial=0)
    for start, width, mine, ordinal in zip(starts, slots, sections, ordinals):
        slot = torch.where(mine & (ordinal <= width), ordinal - 1 + start, slot)
    # the last column takes what is not kept, and is thrown away; split, not sliced: the graph knows
    # its size then
    empty = centre[:, None].expand(-1, total + 1)
    place, _ = empty.scatter(1, slot, place).split([total, 1], 1)
    filled = torch.zeros_like(empty, dtype=torch.bool).scatter(
        1, slot, torch.ones_like(is_near)
    )
    filled, _ = filled.split([total, 1], 1)
    vector = flat_coord[place] - flat_coord[centre][:, None]
    far = torch.tensor(
        [2 * layout.rcut, 0.0, 0.0], dtype=coord.dtype, device=coord.device
    )
    row = torch.arange(order.shape[0], device=atype.device)
    # only models that pass messages read `mapping`; in others an atom is its own neighbor here
    neighbor = row[:, None].expand(place.shape)
    if model.descriptor.passes_messages:
        row_of_atom = torch.empty_like(row).index_put((order,), row)
        atom = (mapping + (frame * num_atoms)[:, None]).flatten()[place]
        neighbor = torch.where(
            filled, row_of_atom[torch.where(filled, atom, 0)], neighbor
        )
    batch = ExtendedBatch(
        type_counts=counts,
        slots=slots,
        atom_type=flat_type[centre],
        atom_frame=frame.repeat_interleave(num_atoms)[order],
        atom_order=order,
        num_atoms=torch.full_like(frame, num_atoms),
        coord=flat_coord[centre],
        box=coord.new_zeros(frames, 3, 3),
        periodic=torch.zeros_like(frame, dtype=torch.bool),
        neighbor=neighbor,
        vector=torch.where(filled[..., None], vector, far),
        # no columns: ops/gather.py then adds by index. Forces stay on images
        reverse=row[:, None][:, :0],
        type_slots=layout.type_sel,
        inner=tuple(
            (rcut, most, min(most, place.shape[1])) for rcut, most in layout.inner
        ),
        occupied=filled,
        first_type=atype[:, 0],
        neighbor_type=torch.where(filled, flat_type[place], flat_type[centre][:, None]),
    )
    return batch, place


def _by_type(atype: Tensor, model: EnergyModel) -> tuple[Tensor, tuple[int, ...]]:
    """Return the order (A,) of the atoms by type and the number of each type.

    Where types stay mixed, the order is that of ``atype`` and all atoms are of one group.
    """
    layout = model.layout
    if not (layout.by_type or layout.type_sel):
        return torch.arange(atype.shape[0], device=atype.device), (atype.shape[0],)
    order = torch.argsort(atype, stable=True)
    counts: list[int] = []
    left = atype.shape[0]
    for t in range(layout.num_types - 1):
        count = cast("int", (atype == t).sum().item())  # a symbol in a graph
        # the sizes of slices must not be negative; a graph cannot derive that from a sum
        torch._check(count >= 0)
        torch._check(count <= left)
        counts.append(count)
        left = left - count
    return order, (*counts, left)


def _most(counts: Tensor, sel: int) -> int:
    """Return the largest of ``counts``, at most ``sel`` and at least 2 if ``sel`` is not less."""
    fewest = min(2, sel)  # a graph may take sizes that it does not know for more than 1
    most = cast("int", counts.amax().clamp(fewest, sel).item())
    # an operation of its own, which a graph keeps when it is traced again
    torch.sym_constrain_range(most, min=fewest, max=sel)
    return most
