"""Input of a model: frames of any sizes on one flat atom axis, neighbors as a dense matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Bytes to which each tensor of a packed batch is aligned, as torch aligns tensors on a GPU: kernels
# choose faster instructions for aligned addresses.
ALIGNMENT = 256
# Fields on the host. Computations depend on these (loops over types, shapes of views), so that a
# captured or compiled step serves batches with equal ones only.
_HOST_FIELDS = ("type_counts", "slots", "type_slots", "inner", "sizes")
# Nothing on the device depends on these: they may differ between batches of one layout.
_MARKS = ("frames", "most", "padding", "num_dummies")
_MAPPINGS = ("labels", "has_label", "conditions")


@dataclass(frozen=True)
class NeighborLayout:
    """Neighbors that a model needs: which pairs, how many, in which order.

    Attributes:
        rcut: cutoff radius, angstrom.
        sel: maximum number of neighbors per section; the nearest are kept when there are more, of
            each type among the nearest ``sum(sel)`` of all types. One number per neighbor type
            (``by_type``), or one number for all.
        num_types: number of elements in the model's type map.
        by_type: whether slots come in one section per neighbor type, or in one section sorted by
            distance.
        excluded_pairs: pairs of types (both orders are excluded) removed after the nearest ``sel``
            were chosen.
        type_sel: maximum number of neighbors of each type, for parts of the model that read one
            list sorted by distance by type; empty where no part does.
        inner: cutoffs and maximum numbers of neighbors that parts of the model request from
            ``Batch.within``; one section only. These neighborhoods then have no more slots than the
            batch needs.
        nearest_first: whether a part of the model reads the first slots of a section only, in which
            the nearest neighbors must be.
    """

    rcut: float
    sel: tuple[int, ...]
    num_types: int
    by_type: bool = True
    excluded_pairs: frozenset[tuple[int, int]] = frozenset()
    type_sel: tuple[int, ...] = ()
    inner: tuple[tuple[float, int], ...] = ()
    nearest_first: bool = False

    def describe_dropped(self, most: Sequence[int]) -> str:
        """Return a warning if atoms have neighbors without a slot; empty without any.

        Args:
            most: per section, the most neighbors of an atom inside the cutoff.
        """
        if all(number <= limit for number, limit in zip(most, self.sel)):
            return ""
        return (
            f"an atom has up to {list(most)} neighbors within {self.rcut:g} angstrom, and the "
            f"model keeps {list(self.sel)} (sel): the farthest are dropped, which makes the energy "
            "jump. Train with a larger sel."
        )


@dataclass(frozen=True)
class Neighborhood:
    """A view of the neighbors of a batch: those within a cutoff, the nearest ones first.

    A atoms, K slots.

    Attributes:
        neighbor: (A, K) int64, flat atom index of each neighbor; ``A`` is none.
        vector: (A, K, 3) float64, angstrom, as in the batch, also where there is no neighbor.
        reverse: (A, M) int64, the flat slots ``i * K + k`` in which an atom is a neighbor; ``A *
            K`` is none. Sums over these slots replace additions at indices, whose order on a GPU,
            and so whose rounding, differs from run to run.
    """

    neighbor: Tensor
    vector: Tensor
    reverse: Tensor

    @property
    def mask(self) -> Tensor:
        """(A, K) bool, whether the slot holds a neighbor."""
        return self.neighbor < self.neighbor.shape[0]


@dataclass(frozen=True)
class Batch:
    """Frames of any sizes on one flat atom axis.

    F frames, A atoms, K neighbor slots, T types, M reverse slots.

    Atoms are sorted by type over all frames (then by frame, then by place in the frame), so that
    the atoms of one type are one slice. Virtual atoms (type -1 in mixed data) are not here. An
    empty slot holds the atom itself as its neighbor and a vector of length ``2 * rcut``: every
    switching function vanishes there with all its derivatives.

    Attributes:
        type_counts: atoms per type, T numbers that add up to A.
        slots: slots per section (trimmed to what the batch needs and rounded up); they add up to K.
        atom_type: (A,) int64.
        atom_frame: (A,) int64, the frame of each atom.
        atom_order: (A,) int64, place of each atom in the frames one after the other, as in the
            files.
        num_atoms: (F,) int64, real atoms of each frame.
        coord: (A, 3) float64, angstrom.
        box: (F, 3, 3) float64, angstrom, rows are cell vectors; zeros for an open frame.
        periodic: (F,) bool.
        neighbor: (A, K) int64, flat atom index of each neighbor.
        vector: (A, K, 3) float64, position of the neighbor (its image) minus that of the atom,
            angstrom.
        reverse: (A, M) int64, the flat slots ``i * K + k`` in which an atom is a neighbor; ``A *
            K`` is none.
        labels: name (see ``labels``) to tensor, zeros where a frame has no such label.
        has_label: label name to (F,) float64, 1 where the frame has the label.
        conditions: inputs of the energy beside positions and elements, by name (see ``labels``):
            float64, (F, ...) or (A, ...); a name that no frame has is absent.
        type_slots: slots per type that a view of the list by type needs, where the layout has a
            ``type_sel``.
        frames: origin of each frame, for messages: (system, frame number in the system).
        most: per section, the most neighbors of an atom, with those beyond ``sel``, for messages;
            empty where it is not known.
        inner: (cutoff, most, slots) of each inner neighborhood of the layout, trimmed like
            ``slots``.
        sizes: atoms of each frame, as ``num_atoms``, on the host: pairs of atoms are split by
            frames without waiting for the device.
        padding: whether the batch is computed only so that all ranks run the same collectives; it
            is excluded from losses and errors.
        num_dummies: frames, and atoms in them, with which the batch was filled up
            (``model.dummy_atoms``): the last in the order of the files, without labels. Predictions
            for them are not used.
    """

    type_counts: tuple[int, ...]
    slots: tuple[int, ...]
    atom_type: Tensor
    atom_frame: Tensor
    atom_order: Tensor
    num_atoms: Tensor
    coord: Tensor
    box: Tensor
    periodic: Tensor
    neighbor: Tensor
    vector: Tensor
    reverse: Tensor
    labels: Mapping[str, Tensor] = field(default_factory=dict)
    has_label: Mapping[str, Tensor] = field(default_factory=dict)
    conditions: Mapping[str, Tensor] = field(default_factory=dict)
    type_slots: tuple[int, ...] = ()
    frames: tuple[tuple[str, int], ...] = ()
    most: tuple[int, ...] = ()
    inner: tuple[tuple[float, int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    padding: bool = False
    num_dummies: tuple[int, int] = (0, 0)

    @property
    def num_frames(self) -> int:
        """Number of frames."""
        return self.num_atoms.shape[0]

    @property
    def num_real(self) -> tuple[int, int]:
        """Numbers of frames and of atoms without those with which the batch was filled up."""
        return self.num_frames - self.num_dummies[0], self.atom_type.shape[
            0
        ] - self.num_dummies[1]

    @property
    def occupied(self) -> Tensor:
        """(A, K) bool, whether the slot holds a neighbor, however far."""
        num_atoms, total = self.neighbor.shape
        # An atom can be its own neighbor, through an image, so that neighbor == atom does not mean
        # an empty slot. The slots of all neighbors are in `reverse`; the entry A * K is for none.
        flat = torch.zeros(
            num_atoms * total + 1, dtype=torch.bool, device=self.neighbor.device
        )
        return flat.index_fill(0, self.reverse.flatten(), True)[:-1].view(
            num_atoms, total
        )

    @property
    def first_type(self) -> Tensor:
        """(F,) int64, type of the first atom of each frame, in the order of the files."""
        return self.in_file_order(self.atom_type)[
            self.num_atoms.cumsum(0) - self.num_atoms
        ]

    @property
    def place_in_frame(self) -> Tensor:
        """(A,) int64, place of each atom in its frame, as in the files."""
        return (
            self.atom_order
            - (self.num_atoms.cumsum(0) - self.num_atoms)[self.atom_frame]
        )

    @property
    def neighbor_type(self) -> Tensor:
        """(A, K) int64, type of each neighbor; that of the atom itself where there is none."""
        return self.atom_type[self.neighbor]

    def within(
        self, rcut: float | None = None, most: int | None = None
    ) -> Neighborhood:
        """Return the nearest neighbors of each atom within a cutoff.

        One list of the largest cutoff serves all parts of a model: parts with a shorter cutoff take
        a prefix of its slots. Excluded pairs are not in the list and do not count for ``most``. For
        less than all neighbors the batch must hold one section sorted by distance
        (``by_type=False``); the result is differentiable by ``vector``.

        Args:
            rcut: cutoff, angstrom; None: that of the list.
            most: maximum number of neighbors; None: all.
        """
        assert len(self.slots) == 1 or rcut is most is None, (
            "a prefix by distance needs one section of neighbors"
        )
        num_atoms, total = self.neighbor.shape
        # a width that the layout announced was trimmed on the host when the batch was collated;
        # the number of occupied slots is not known here without waiting for the device
        trimmed = [
            slots
            for cutoff, number, slots in self.inner
            if (cutoff, number) == (rcut, most)
        ]
        if trimmed:
            width = trimmed[0]
        elif most is None:
            width = total
        else:
            width = min(most, total)
        vector = self.vector[:, :width]
        distance = torch.linalg.vector_norm(vector.detach(), dim=-1)
        # (A, width); empty slots are at 2 * rcut of the list, beyond any cutoff
        near = self.occupied[:, :width] if rcut is None else distance < rcut
        # `reverse` has slots of the list. For each of them, A * K included, `place` has the slot of
        # the neighborhood, or A * width, which is none, where it was cut off.
        none = num_atoms * width
        place = torch.arange(none, device=near.device).view(num_atoms, width)
        # Slots minus `none`, so that 0 means none: padding fills with 0, and torch.compile does not
        # take a fill value that depends on the size of the batch.
        place = (place - none) * near
        # (A + 1, K): columns that were cut off, and one row, whose first entry is that of A * K
        place = nn.functional.pad(place, (0, total - width, 0, 1)).flatten() + none
        return Neighborhood(
            neighbor=torch.where(near, self.neighbor[:, :width], num_atoms),
            vector=vector,
            reverse=place[self.reverse],
        )

    def with_slots(self, slot: Tensor, **changes: Any) -> Batch:
        """Return the batch with other slots.

        Args:
            slot: (A, V) flat slots ``i * K + k`` of this batch; ``A * K`` is none. Not used here:
                subclasses that store quantities per slot select them by it.
            **changes: fields of the new batch.
        """
        return replace(self, **changes)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; :meth:`pack` makes it one copy."""
        if self.vector.device == device:
            # Even a copy that does nothing is a call of torch, which releases the lock of Python.
            # The thread that collates the next batch would take it, and this one wait.
            return self
        return self._map(lambda t: t.to(device, non_blocking=True))

    def as_padding(self) -> Batch:
        """Return the batch with all labels marked as missing, without part in losses and errors."""
        has_label = {
            name: torch.zeros_like(flags) for name, flags in self.has_label.items()
        }
        return replace(self, has_label=has_label, padding=True)

    def pack(self, pin: bool = False) -> PackedBatch:
        """Return the batch in one buffer on its device.

        On the host it may be page-locked (``pin``), for a copy to a GPU that runs beside the step.
        """
        layout = PackedLayout.of(self)
        data = torch.empty(
            layout.num_bytes,
            dtype=torch.uint8,
            device=self.vector.device,
            pin_memory=pin,
        )
        targets = _tensors(layout.view(data))
        for (_, _, target), (_, _, source) in zip(targets, _tensors(self), strict=True):
            target.copy_(source)
        return PackedBatch(layout, data, {name: getattr(self, name) for name in _MARKS})

    def in_file_order(self, per_atom: Tensor) -> Tensor:
        """Return ``per_atom`` (A, ...) with frames and atoms in the order of the files."""
        out = torch.empty_like(per_atom)
        out[self.atom_order] = per_atom
        return out

    def _map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = move(value)
            elif isinstance(value, Mapping):
                changed[f.name] = {k: move(v) for k, v in value.items()}
        return replace(self, **changed)


class PackedTensor(NamedTuple):
    """The place of a tensor of a batch in a buffer.

    Attributes:
        field: field of the batch.
        key: key in the field where it is a mapping, else empty.
        dtype: type of its numbers.
        shape: shape of the tensor, which is contiguous.
        start: place of its first number, counted in numbers of this type.
    """

    field: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class PackedLayout:
    """Everything of a batch but the numbers on the device.

    Batches of one layout differ in their bytes only. It is hashable: buffers on the device and
    captured steps are stored by layout. The origins of frames and the marks of padding are not in
    it, because nothing on the device depends on them.

    Attributes:
        tensors: place of each tensor in the buffer.
        host: the fields of the batch that are numbers on the host, with their values.
        num_bytes: size of the buffer.
    """

    tensors: tuple[PackedTensor, ...]
    host: tuple[tuple[str, Any], ...]
    num_bytes: int

    @classmethod
    def of(cls, batch: Batch) -> PackedLayout:
        """Return the layout of ``batch``."""
        places = []
        end = 0
        for name, key, tensor in _tensors(batch):
            # `end` is a multiple of ALIGNMENT, and so of the size of any number
            size = tensor.element_size()
            places.append(
                PackedTensor(name, key, tensor.dtype, tuple(tensor.shape), end // size)
            )
            end += -(-tensor.numel() * size // ALIGNMENT) * ALIGNMENT  # rounded up
        host = tuple((name, getattr(batch, name)) for name in _HOST_FIELDS)
        return cls(tuple(places), host, end)

    def view(self, data: Tensor) -> Batch:
        """Return the batch whose tensors are views of ``data`` (num_bytes,) uint8."""
        # one view of the buffer per type of numbers, then one call per tensor: slices and reshapes
        # would be two or three
        typed = {
            dtype: data.view(dtype) for dtype in {place.dtype for place in self.tensors}
        }
        values: dict[str, Any] = {name: {} for name in _MAPPINGS}
        for name, key, dtype, shape, start in self.tensors:
            whole = typed[dtype]
            strides = tuple(prod(shape[k + 1 :]) for k in range(len(shape)))
            # as_strided counts from the begin of the storage, not of the view
            tensor = whole.as_strided(shape, strides, whole.storage_offset() + start)
            if key:
                values[name][key] = tensor
            else:
                values[name] = tensor
        return Batch(**values, **dict(self.host))


@dataclass(frozen=True)
class PackedBatch:
    """A batch in one buffer: one copy brings it to a device.

    Attributes:
        layout: layout of the buffer.
        data: (num_bytes,) uint8.
        marks: the fields of the batch that no computation depends on.
    """

    layout: PackedLayout
    data: Tensor
    marks: Mapping[str, Any]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on ``device``; the copy does not wait when the memory is page-locked."""
        return self.view(self.data.to(device, non_blocking=True))

    def view(self, data: Tensor) -> Batch:
        """Return the batch whose tensors are views of ``data``, a copy of the bytes of this one."""
        return replace(self.layout.view(data), **self.marks)

    def as_padding(self) -> PackedBatch:
        """Return the batch with all labels marked as missing."""
        return self.view(self.data).as_padding().pack(self.data.is_pinned())


def _tensors(batch: Batch) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the tensors of a batch with field and key, in an order that depends on names only."""
    for f in fields(batch):
        value = getattr(batch, f.name)
        if isinstance(value, Tensor):
            yield f.name, "", value
        elif isinstance(value, Mapping):
            yield from ((f.name, key, value[key]) for key in sorted(value))


def both_orders(pairs: Iterable[Sequence[int]]) -> frozenset[tuple[int, int]]:
    """Return pairs of types in both orders."""
    return frozenset((i, j) for a, b in pairs for i, j in ((a, b), (b, a)))
