"""The ``ener`` loss: a weighted sum of the errors of energies, forces, virials, atomic energies and Hessians."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from deepmd_ema.batch import Batch
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.dist.world import World
from deepmd_ema.labels import ATOM_ENERGY, ATOM_PREF, ENERGY, FORCE, HESSIAN, LABELS, VIRIAL

# F frames, A atoms


class EnergyLoss:
    """A weighted sum of errors whose weights follow the learning rate.

    The weight of a term is ``limit_pref + (start_pref - limit_pref) * lr / start_lr``. A term is active if its start or
    its limit prefactor is not zero, as in DeePMD-kit's ``pt_expt`` backend. (The ``pt`` backend requires both, and so
    drops a term that starts or ends at zero.)

    Means run over the frames of the batch that have the label, forces and atomic energies pooled over their atoms; that
    of a Hessian is taken in its frame first, so that large frames, with the square of the numbers, do not outweigh. A
    frame without the label adds nothing to the sum and nothing to the count; a batch without it adds zero.

    On several ranks the means run over the frames of all of them, so that the loss is that of one process with all
    these frames. A rank differentiates its own share times the number of ranks, because ranks average their gradients:
    the mean of these gradients is the gradient of the loss.

    Attributes:
        labels: names of the labels to load.
        display_names: keys of the displayed values, in the order of the columns of ``lcurve.out``.
        need_virial: whether the model has to compute virials.
    """

    def __init__(self, config: EnerLossConfig, start_lr: float, world: World) -> None:
        self.config = config
        self._world = world
        self.start_lr = start_lr
        self._mae = config.loss_func == "mae"
        self._kind = "mae" if self._mae else "rmse"
        self._huber = config.use_huber and not self._mae
        delta = config.huber_delta
        self._delta = tuple(delta) if isinstance(delta, (list, tuple)) else (delta, delta, delta)
        compute = {
            ENERGY: self._energy,
            FORCE: self._force,
            VIRIAL: self._virial,
            ATOM_ENERGY: self._atom_energy,
            ATOM_PREF: self._weighted_force,
            HESSIAN: self._hessian,
        }
        terms = [_term(config, LABELS[name].symbol, function) for name, function in compute.items()]
        self.terms = tuple(term for term in terms if term.start or term.limit)
        names = {term.name for term in self.terms}
        self.labels: tuple[str, ...] = config.labels
        self.display_names: tuple[str, ...] = tuple(sorted(["rmse", *(f"{self._kind}_{name}" for name in names)]))
        self.need_virial: bool = "v" in names

    def __call__(self, prediction: Mapping[str, Tensor], batch: Batch, lr: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and what is displayed of it, all on the device of the batch.

        Args:
            prediction: what the model predicts for ``batch``, by the names in ``labels``.
            batch: the frames with their labels.
            lr: learning rate of this step.

        Returns:
            The total to differentiate, a float64 scalar, and the displayed values: ``rmse`` is the root of the loss,
            the others are plain errors in eV per atom, eV/angstrom and eV/angstrom^2, nan where no frame has the label.
            They are detached, equal on all ranks, and nothing here synchronises with the device.
        """
        total = torch.zeros((), dtype=torch.float64, device=batch.num_atoms.device)
        loss = total
        shown = {}
        errors = [term.compute(prediction, batch) for term in self.terms]
        everywhere = self._world.all_reduce_sum(torch.stack([error.sums() for error in errors])) if errors else ()
        for term, error, (value, size, count) in zip(self.terms, errors, everywhere):
            rows, prefactor = count.clamp(min=1), term.prefactor(lr / self.start_lr)
            total = total + prefactor * (self._world.size * error.value.sum / (rows * error.value.columns))
            loss = loss + prefactor * (value / (rows * error.value.columns))
            mean = size / (rows * error.shown.columns)
            shown[f"{self._kind}_{term.name}"] = (mean if self._mae else mean.sqrt()).where(count > 0, torch.nan)
        shown["rmse"] = loss.sqrt()
        return total, {name: shown[name] for name in self.display_names}

    def needs(self, batch: Batch) -> dict[str, bool]:
        """Return the arguments of the model for quantities of ``batch`` beside energies and forces."""
        return {"need_virial": self.need_virial, "need_hessian": HESSIAN in self.labels and HESSIAN in batch.labels}

    def _energy(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        label, has_label = _label(batch, ENERGY)
        return self._per_frame((prediction[ENERGY] - label).unsqueeze(1), has_label, batch, self._delta[0])

    def _virial(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        label, has_label = _label(batch, VIRIAL)
        return self._per_frame(prediction[VIRIAL] - label, has_label, batch, self._delta[2])

    def _per_frame(self, error: Tensor, has_label: Tensor, batch: Batch, delta: float) -> _Error:
        """Return the error of a quantity (F, components) that grows with the number of atoms."""
        size = batch.num_atoms.to(error.dtype).unsqueeze(1)
        per_atom = error / size
        shown = _sum(self._size(per_atom), has_label)
        if self._mae or (self.config.intensive_ener_virial and not self._huber):
            return _Error(shown, shown, has_label.sum())
        value = huber(per_atom, delta) if self._huber else per_atom.square() * size
        return _Error(_sum(value, has_label), shown, has_label.sum())

    def _force(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        error, has_label = self._force_error(prediction, batch)
        weight = has_label[batch.atom_frame]
        counted = torch.linalg.vector_norm(error, dim=1, keepdim=True) if self.config.f_use_norm else error
        # the displayed mean square stays one of components, also when the norm is what is trained
        shown = _sum(self._size(counted if self._mae else error), weight)
        value = _sum(huber(counted, self._delta[1]), weight) if self._huber else shown
        return _Error(value, shown, weight.sum())

    def _weighted_force(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        error, has_force = self._force_error(prediction, batch)
        pref, has_label = _label(batch, ATOM_PREF)
        if self.config.use_default_pf:
            pref = pref.where(has_label[batch.atom_frame] > 0, 1.0)
            has_label = torch.ones_like(has_label)
        weight = (has_label * has_force)[batch.atom_frame]
        value = _sum(pref.unsqueeze(1) * self._size(error), weight)
        return _Error(value, value, weight.sum())

    def _force_error(self, prediction: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        label, has_label = _label(batch, FORCE)
        error = prediction[FORCE] - label
        if self.config.relative_f is not None:
            error = error / (torch.linalg.vector_norm(label, dim=1, keepdim=True) + self.config.relative_f)
        return error, has_label

    def _atom_energy(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        label, has_label = _label(batch, ATOM_ENERGY)
        error = (prediction[ATOM_ENERGY] - label).unsqueeze(1)
        weight = has_label[batch.atom_frame]
        shown = _sum(self._size(error), weight)
        value = _sum(huber(error, self._delta[0]), weight) if self._huber else shown
        return _Error(value, shown, weight.sum())

    def _hessian(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        label, has_label = _label(batch, HESSIAN)
        if HESSIAN not in prediction:
            nothing = _sum(has_label.unsqueeze(1), torch.zeros_like(has_label))
            return _Error(nothing, nothing, torch.zeros_like(has_label).sum())
        size = self._size(prediction[HESSIAN] - label)
        mean = torch.stack([one.mean() for one in size.split([LABELS[HESSIAN].num_rows(n) for n in batch.sizes])])
        value = _sum(mean.unsqueeze(1), has_label)
        return _Error(value, value, has_label.sum())

    def _size(self, error: Tensor) -> Tensor:
        return error.abs() if self._mae else error.square()


def huber(error: Tensor, delta: float) -> Tensor:
    """Return ``error**2 / 2`` where ``|error| <= delta`` and ``delta * (|error| - delta / 2)`` elsewhere."""
    return huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)


class _Sum(NamedTuple):
    """The sum of numbers over rows of weight 1, and how many numbers a row has."""

    sum: Tensor
    columns: int


class _Error(NamedTuple):
    """One term: what counts in the loss, what is displayed (squared, unless mae), and how many rows are in them."""

    value: _Sum
    shown: _Sum
    rows: Tensor

    def sums(self) -> Tensor:
        """Return the sums to be added up over ranks, detached."""
        return torch.stack([self.value.sum.detach(), self.shown.sum.detach(), self.rows])


@dataclass(frozen=True)
class _Term:
    name: str
    start: float
    limit: float
    compute: Callable[[Mapping[str, Tensor], Batch], _Error]

    def prefactor(self, progress: float) -> float:
        return self.limit + (self.start - self.limit) * progress


def _term(config: EnerLossConfig, symbol: str, compute: Callable[[Mapping[str, Tensor], Batch], _Error]) -> _Term:
    start, limit = (getattr(config, f"{when}_pref_{symbol}") for when in ("start", "limit"))
    return _Term(symbol, start, limit, compute)


def _label(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """Return a label and, per frame, whether the frame has it; zeros if the batch does not hold the label."""
    if name in batch.labels:
        return batch.labels[name], batch.has_label[name]
    has_label = torch.zeros(batch.num_frames, dtype=torch.float64, device=batch.num_atoms.device)
    shape = LABELS[name].shape_of(*batch.sizes)
    return torch.zeros((), dtype=torch.float64, device=has_label.device).expand(shape), has_label


def _sum(values: Tensor, weight: Tensor) -> _Sum:
    """Return the sum of ``values`` (n, components) over the rows of weight 1 instead of 0."""
    return _Sum((weight.unsqueeze(1) * values).sum(), values.shape[1])
