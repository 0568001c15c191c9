"""One batch in the neighbor layout of a part of a model: a choice of its slots, in another order.

The parts of a model share one list of neighbors. A part that keeps fewer of them sees the first
slots, and one that wants them by type sees a permutation. `View.vjp` brings gradients back to the
slots of the list.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from deepmd_ema.batch import Batch, NeighborLayout
from deepmd_ema.model.ops.gather import gather_neighbors, sum_over_reverse

# A atoms, K slots of the list, V slots of the view, T types


@dataclass(frozen=True)
class View:
    """A batch as a part sees it, and the way back.

    Attributes:
        batch: with the slots of the part.
        slot: (A, V) int64, flat slot ``i * K + k`` of the list in each slot of the view; ``A * K``
            is none. None where the view is the list itself.
        place: (A * K, 1) int64, flat slot ``i * V + v`` of the view of each slot of the list; ``A *
            V`` is none.
    """

    batch: Batch
    slot: Tensor | None = None
    place: Tensor | None = None

    def vjp(self, grad_vector: Tensor) -> Tensor:
        """Return the gradient by the vectors of the list (A, K, 3) from that of the view (A, V, 3).

        Slots of the list that the view does not have get 0.
        """
        if self.slot is None or self.place is None:
            return grad_vector
        by_list = sum_over_reverse(grad_vector, self.slot, self.place)  # (A K, 3)
        return by_list.view(grad_vector.shape[0], -1, 3)


def view_of(
    batch: Batch, layout: NeighborLayout, part: NeighborLayout, inside: bool = False
) -> View:
    """Return a batch in ``layout`` as a part sees it.

    Args:
        batch: in ``layout``.
        layout: of the whole model: no shorter cutoff and no fewer slots than any part wants, by
            type only if every part wants its neighbors by type.
        part: of the part.
        inside: whether a part with a shorter cutoff sees only the neighbors inside of it.
    """
    num_atoms, total = batch.neighbor.shape
    device = batch.neighbor.device
    atom = torch.arange(num_atoms, device=device)[:, None]
    inside = inside and part.rcut < layout.rcut
    wanted = batch.type_slots if part.by_type and not layout.by_type else batch.slots
    slots = tuple(min(used, sel) for used, sel in zip(wanted, part.sel, strict=True))
    if inside and not part.by_type:
        requested = (part.rcut, sum(part.sel))
        # a batch may be trimmed to the neighbors inside of this cutoff
        trimmed = [
            used for rcut, most, used in batch.inner if (rcut, most) == requested
        ]
        slots = tuple(min([slots[0], *trimmed]) for _ in slots)
    if part.by_type == layout.by_type:
        # the list itself, without a copy
        if slots == batch.slots and not inside:
            return View(batch)
        starts = [end - used for end, used in zip(accumulate(batch.slots), batch.slots)]
        columns = torch.cat(
            [torch.arange(n, device=device) + start for n, start in zip(slots, starts)]
        )
        slot = atom * total + columns
    else:
        # sections by type, nearest first
        num_types = len(slots)
        # (A, K) sorted by type, empty slots last; a stable sort keeps the order by distance
        types = torch.where(batch.occupied, batch.neighbor_type, num_types)
        types, order = torch.sort(types, dim=1, stable=True)
        kinds = torch.arange(num_types, device=device).repeat(num_atoms, 1)
        # (A, T): where the section of each type ends and begins
        ends = torch.searchsorted(types, kinds, right=True)
        firsts = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1)
        sections = []
        for t, width in enumerate(slots):
            place = firsts[:, t : t + 1] + torch.arange(width, device=device)
            is_filled = place < ends[:, t : t + 1]
            flat = atom * total + order.gather(1, torch.where(is_filled, place, 0))
            sections.append(torch.where(is_filled, flat, num_atoms * total))
        slot = torch.cat(sections, 1)
    if inside:
        distance = torch.linalg.vector_norm(batch.vector.detach(), dim=-1).flatten()
        far = torch.nn.functional.pad(distance >= part.rcut, (0, 1))
        slot = torch.where(far[slot], num_atoms * total, slot)
    width = slot.shape[1]
    none = num_atoms * width
    place = torch.full((num_atoms * total + 1,), none, device=device)
    # each slot of the list occurs once. Only the last entry, for none, may be written several
    # times, and it is not read
    place = place.index_put(
        (slot,), torch.arange(none, device=device).view(num_atoms, width)
    )
    # torch.compile takes no filling but a number
    place = torch.nn.functional.pad(place[:-1] - none, (0, 1)) + none
    is_none = slot == num_atoms * total
    neighbor = torch.where(
        is_none, atom, batch.neighbor.flatten()[torch.where(is_none, 0, slot)]
    )
    vector = gather_neighbors(batch.vector.flatten(0, 1), slot, place[:-1, None])
    # a tensor made of a list would be waited for
    beyond = torch.nn.functional.pad(vector.new_full((1,), 2 * layout.rcut), (0, 2))
    seen = batch.with_slots(
        slot,
        slots=slots,
        type_slots=(),
        inner=tuple((rcut, most, min(used, width)) for rcut, most, used in batch.inner),
        neighbor=neighbor,
        vector=torch.where(is_none[..., None], beyond, vector),
        reverse=place[batch.reverse],
    )
    return View(seen, slot, place[:-1, None])
