"""Errors of energies, forces, virials and stresses that add up over frames, batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.config.labels import (
    ATOM_PREF,
    FORCE,
    HESSIAN,
    LABELS,
    METRICS,
    QUANTITIES,
    WEIGHTED_FORCE,
)
from deepmd_ema.config.schema.text_options import Metric
from deepmd_ema.model.quantity import COUNTED

# F frames, A atoms, Q quantities

Key = TypeVar("Key", bound=Hashable)


@dataclass
class FrameResult:
    """One evaluated frame, in host memory, atoms as in the files.

    Attributes:
        source: (system, frame number in the system).
        atom_type: (N,) types in the order of the model's type map.
        volume: angstrom^3, or None for an open frame.
        prediction: by the names in ``labels``: energy (), force (N, 3), virial (9,), atom_energy
            (N,), and hessian (9 N^2,) where it is requested.
        label: the same for the labels that the frame has.
        counted: (N,) bool, atoms that have what is predicted; None: all.
        force_weight: (N,) weights of the forces in the loss; None: the frame has none.
    """

    source: tuple[str, int]
    atom_type: np.ndarray
    volume: float | None
    prediction: dict[str, np.ndarray]
    label: dict[str, np.ndarray]
    counted: np.ndarray | None = None
    force_weight: np.ndarray | None = None

    @property
    def size(self) -> int:
        """Number of atoms that errors per atom are divided by."""
        return (
            len(self.atom_type)
            if self.counted is None
            else max(int(self.counted.sum()), 1)
        )

    @property
    def num_atoms(self) -> int:
        """Number of real atoms."""
        return len(self.atom_type)

    @cached_property
    def errors(self) -> Errors:
        """The errors of this frame alone."""
        # one frame: all of its rows have weight 1
        unit = torch.ones(1, dtype=torch.float64)
        errors = {}
        for name, label in self.label.items():
            error = torch.as_tensor(self.prediction[name] - label).view(
                LABELS[name].shape_of(self.num_atoms)
            )
            errors[name] = (error, unit.expand(len(error)))
            if LABELS[name].per_atom and self.counted is not None:
                errors[name] = (error, torch.as_tensor(self.counted).double())
        if FORCE in errors and self.force_weight is not None:
            errors[ATOM_PREF] = errors[FORCE][0], torch.as_tensor(self.force_weight)
        # an open frame has any volume but 0, and weight 0 in errors per volume
        volume = unit if self.volume is None else unit * self.volume
        periodic = torch.tensor([self.volume is not None])
        return Errors(
            _error_sums(errors, unit * self.size, (1, self.num_atoms), volume, periodic)
        )


@dataclass
class Errors:
    """Sums of absolute and squared errors and their counts, from which every MAE and RMSE follows.

    A frame without a label adds nothing to the sums of that label and nothing to their count.
    ``add`` does not synchronise with the device; ``summary`` and ``metric`` do.

    Attributes:
        sums: (Q + 1, 3) float64, per quantity the sum of absolute errors, of squared errors, and
            the number of components; the last row has the number of frames and of atoms.
        frames: the frames one by one, when they are collected.
        collect: whether ``add`` keeps them.
    """

    sums: Tensor = field(
        default_factory=lambda: torch.zeros(len(QUANTITIES) + 1, 3, dtype=torch.float64)
    )
    frames: list[FrameResult] = field(default_factory=list)
    collect: bool = False

    def add(self, prediction: Mapping[str, Tensor], batch: Batch) -> None:
        """Add the errors of a prediction for ``batch``, both on one device."""
        counted = prediction.get(COUNTED)  # (A,)
        size = batch.num_atoms  # (F,)
        # label to (error, weight of each row): (A, ...) and (A,), or (F, ...) and (F,)
        errors = {
            name: (prediction[name].to(torch.float64) - label, _weight(name, batch))
            for name, label in batch.labels.items()
            if name in prediction
        }
        # a label that weights the forces; its error is that of the forces
        if FORCE in errors and ATOM_PREF in batch.labels:
            error, weight = errors[FORCE]
            errors[ATOM_PREF] = (
                error,
                weight * _weight(ATOM_PREF, batch) * batch.labels[ATOM_PREF],
            )
        # quantities that some elements do not have: neither rows nor sizes count their atoms
        if counted is not None:
            numbers = counted.new_zeros(batch.num_frames).index_add(
                0, batch.atom_frame, counted
            )
            size = numbers.clamp(min=1)
            atom_errors = {
                name: pair for name, pair in errors.items() if LABELS[name].per_atom
            }
            errors |= {
                name: (error, weight * counted)
                for name, (error, weight) in atom_errors.items()
            }
        sums = _error_sums(errors, size, batch.num_real, _volume(batch), batch.periodic)
        # on the device of the batch from the first one on
        self.sums = self.sums.to(sums.device) + sums
        if self.collect:
            self.frames.extend(_frame_results(prediction, batch))

    def merge(self, other: Errors) -> None:
        """Add the sums and frames of ``other``."""
        self.sums = self.sums + other.sums.to(self.sums.device)
        self.frames.extend(other.frames)

    def summary(self) -> dict[str, float]:
        """Return every error by name, in the units of ``labels.QUANTITIES``, and counts.

        Names are ``mae_e``, ``rmse_e``, ``mae_e_peratom`` and so on; an error without any label is
        nan. ``num_frames`` and ``num_atoms`` count all frames, also those without labels.
        """
        # the one copy from the device
        *rows, (frames, atoms, _) = self.sums.tolist()
        out = {}
        for name, (absolute, squared, count) in zip(QUANTITIES, rows):
            out[f"mae_{name}"] = absolute / count if count else math.nan
            out[f"rmse_{name}"] = math.sqrt(squared / count) if count else math.nan
        return out | {"num_frames": frames, "num_atoms": atoms}

    def metric(self, name: str) -> float:
        """Return one error by a name such as ``E:MAE`` or ``F:RMSE``; nan without any label.

        The unit is that of ``labels.METRICS``.
        """
        metric = Metric(name)
        return self.summary()[f"{metric.error.lower()}_{METRICS[metric.quantity].name}"]


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch | PackedBatch],
    device: torch.device,
    progress: Callable[[int], Any] | None = None,
    collect: bool = False,
    hessian: bool = False,
) -> Errors:
    """Return the errors of ``model`` over all frames of ``batches``, in validation and in tests.

    Args:
        model: gives energies, forces and virials of a batch; it is in evaluation mode during the
            call.
        batches: labelled frames.
        device: where the model is.
        progress: called after each batch with the number of its frames.
        collect: whether to keep the frames one by one.
        hessian: whether second derivatives are computed where frames have them as a label.
    """
    errors = Errors(collect=collect)
    with evaluated(model):
        for batch in batches:
            moved = batch.to(device)
            wanted = hessian and HESSIAN in moved.labels
            prediction = model(moved, need_hessian=True) if wanted else model(moved)
            # padding keeps the collectives of all ranks equal in number and is not measured
            if not moved.padding:
                errors.add(
                    {name: value.detach() for name, value in prediction.items()}, moved
                )
            if progress is not None:
                progress(moved.num_real[0])
    return errors


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode within this context."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def group_frames(
    frames: Iterable[FrameResult], key: Callable[[FrameResult], Key]
) -> dict[Key, Errors]:
    """Return the errors of each group of frames by key.

    The key may be that of a system (``lambda f: f.source[0]``).
    """
    groups: dict[Key, Errors] = {}
    for frame in frames:
        groups.setdefault(key(frame), Errors()).merge(frame.errors)
    return groups


def worst_frames(
    frames: Iterable[FrameResult], metric: str = "F:RMSE", count: int = 10
) -> list[FrameResult]:
    """Return the ``count`` frames with the largest ``metric``, the worst first.

    Frames without the label are left out.
    """
    scored = [(frame.errors.metric(metric), frame) for frame in frames]
    scored = [(value, frame) for value, frame in scored if not math.isnan(value)]
    return [frame for _, frame in sorted(scored, key=lambda pair: -pair[0])[:count]]


def force_errors_by_type(frames: Iterable[FrameResult], num_types: int) -> list[Errors]:
    """Return, for each type, the errors of the forces on its atoms.

    ``num_atoms`` counts the atoms with a force.
    """
    per_type = [Errors() for _ in range(num_types)]
    # row of the forces in `Errors.sums`
    row = list(QUANTITIES).index("f")
    for frame in frames:
        if FORCE not in frame.label:
            continue
        # (N, 3), atoms as in the files
        error = torch.as_tensor(frame.prediction[FORCE] - frame.label[FORCE])
        types = torch.as_tensor(frame.atom_type)
        for kind in types.unique().tolist():
            chosen = error[types == kind]
            sums = torch.zeros_like(per_type[kind].sums)
            sums[row] = _sums(chosen, chosen.new_ones(len(chosen)))
            # one frame, and the atoms of this type
            sums[-1] = torch.tensor([1.0, len(chosen), 0.0])
            per_type[kind].merge(Errors(sums))
    return per_type


def _error_sums(
    errors: Mapping[str, tuple[Tensor, Tensor]],
    num_atoms: Tensor,
    num_real: tuple[int, int],
    volume: Tensor,
    periodic: Tensor,
) -> Tensor:
    """Return the sums (Q + 1, 3) of ``Errors``.

    Args:
        errors: (error, whether the frame of each row has the label) by label.
        num_atoms: (F,) atoms that errors per atom are divided by.
        num_real: numbers of frames and atoms for the last row.
        volume: (F,) angstrom^3, not 0.
        periodic: (F,) bool.
    """
    per_atom = 1 / num_atoms.to(torch.float64).unsqueeze(1)  # (F, 1)
    sums: dict[str, Tensor] = {}
    for name, (error, weight) in errors.items():
        # (rows, components)
        error = error.flatten(1) if error.dim() > 1 else error.unsqueeze(1)
        for quantity in LABELS[name].errors or [
            WEIGHTED_FORCE
        ]:  # atom_pref has none of its own
            if quantity.per == "atom":
                sums[quantity.name] = _sums(error * per_atom, weight)
            elif quantity.per == "volume":
                sums[quantity.name] = _sums(
                    error / volume.unsqueeze(1), weight * periodic
                )
            else:
                sums[quantity.name] = _sums(error, weight)
    nothing = torch.zeros(3, dtype=torch.float64, device=num_atoms.device)
    # adding a host number to a device tensor does not synchronise; a tensor made from a list would
    # be copied
    size = torch.stack([*(nothing[0] + number for number in num_real), nothing[0]])
    return torch.stack([*(sums.get(name, nothing) for name in QUANTITIES), size])


def _sums(error: Tensor, weight: Tensor) -> Tensor:
    """Return sums of absolute and squared errors (rows, components), and their number.

    Rows have weight 1 or 0, or that of ``atom_pref``.
    """
    # (rows, 1), for all components
    rows = weight.unsqueeze(1)
    count = weight.sum() * error.shape[1]
    return torch.stack(
        [(rows * error.abs()).sum(), (rows * error.square()).sum(), count]
    )


def _weight(name: str, batch: Batch) -> Tensor:
    """Return for each row of a label whether its frame has the label, 1 or 0."""
    has_label = batch.has_label[name]
    if LABELS[name].per_atom:
        return has_label[batch.atom_frame]
    if LABELS[name].per_pair:
        # the rows of a frame are its pairs of coordinates
        return torch.cat(
            [
                flag.expand(LABELS[name].num_rows(n))
                for flag, n in zip(has_label, batch.sizes)
            ]
        )
    return has_label


def _volume(batch: Batch) -> Tensor:
    """Return (F,) volumes in angstrom^3, 1 for open frames."""
    # volume a . (b x c) of the cell vectors
    a, b, c = batch.box.unbind(1)
    return (a * torch.linalg.cross(b, c)).sum(1).abs().where(batch.periodic, 1.0)


def _frame_results(prediction: Mapping[str, Tensor], batch: Batch) -> list[FrameResult]:
    """Split a batch into its frames; this synchronises with the device."""
    # the sizes of `split` must be on the host
    sizes = batch.num_atoms.tolist()
    predicted = _split(
        {name: value for name, value in prediction.items() if name in LABELS},
        batch,
        sizes,
    )
    labelled = _split(batch.labels, batch, sizes)
    types = batch.in_file_order(batch.atom_type).cpu().split(sizes)
    volume = _volume(batch).tolist()
    has_label = {name: flags.tolist() for name, flags in batch.has_label.items()}
    # by frame; None where the model or the frame has no such number
    counted: list[Any] = [None] * len(sizes)
    weights: list[Any] = [None] * len(sizes)
    if ATOM_PREF in labelled:
        pairs = zip(labelled[ATOM_PREF], has_label[ATOM_PREF])
        weights = [weight if is_there else None for weight, is_there in pairs]
    if COUNTED in prediction:
        split = batch.in_file_order(prediction[COUNTED]).cpu().split(sizes)
        counted = [part.numpy() > 0 for part in split]
    return [
        FrameResult(
            source=batch.frames[f],
            atom_type=types[f].numpy(),
            volume=volume[f] if periodic else None,
            prediction={name: value[f] for name, value in predicted.items()},
            label={
                name: value[f]
                for name, value in labelled.items()
                if name in predicted and has_label[name][f]
            },
            counted=counted[f],
            force_weight=weights[f],
        )
        # frames that fill up a batch are the last
        for f, periodic in enumerate(batch.periodic.tolist()[: batch.num_real[0]])
    ]


def _split(
    values: Mapping[str, Tensor], batch: Batch, sizes: list[int]
) -> dict[str, list[np.ndarray]]:
    out = {}
    for name, value in values.items():
        if LABELS[name].per_atom:
            out[name] = [
                part.numpy() for part in batch.in_file_order(value).cpu().split(sizes)
            ]
        elif LABELS[name].per_pair:
            out[name] = [
                part.numpy()
                for part in value.cpu().split([LABELS[name].num_rows(n) for n in sizes])
            ]
        else:
            out[name] = list(value.cpu().numpy())
    return out
