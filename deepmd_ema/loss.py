"""The ``ener`` loss: weighted errors of energies, forces, virials and atomic energies of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from deepmd_ema.dist.world import World
from deepmd_ema.labels import ATOM_ENERGY, ATOM_PREF, ENERGY, FORCE, VIRIAL

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from deepmd_ema.batch import Batch
    from deepmd_ema.config import EnerLossConfig

# F frames, A atoms


def build_loss(config: EnerLossConfig, start_lr: float, world: World | None = None) -> EnerLoss:
    """Return the loss that ``config`` describes; at the rate ``start_lr`` its start prefactors hold."""
    return EnerLoss(config, start_lr, world)


class EnerLoss:
    """A weighted sum of errors whose weights move with the learning rate.

    The weight of a term is ``limit_pref + (start_pref - limit_pref) * lr / start_lr``. A term is there when its start
    or its limit prefactor is not zero (DeePMD-kit's ``pt`` backend wants both, and drops a term that starts from or
    ends in zero; its ``pt_expt`` backend does as we do).

    Means run over the frames of the batch that have the label, forces and atomic energies pooled over their atoms. A
    frame without the label adds nothing to the sum and nothing to the count; a batch without it adds zero.

    On several ranks the means run over the frames of all of them, so that the loss is that of one process with all
    these frames. What a rank differentiates is its own share times the number of ranks: the mean of the ranks'
    gradients, which is what they exchange, is the gradient of the loss.

    Attributes:
        labels: names of the labels to load.
        display_names: keys of the displayed values, in the order of the columns of ``lcurve.out``.
        need_virial: whether the model has to compute virials.
    """

    def __init__(self, config: EnerLossConfig, start_lr: float, world: World | None = None) -> None:
        self.config = config
        self._world = world if world is not None else World()
        self.start_lr = start_lr
        self._mae = config.loss_func == "mae"
        self._kind = "mae" if self._mae else "rmse"
        self._huber = config.use_huber and not self._mae
        delta = config.huber_delta
        self._delta = tuple(delta) if isinstance(delta, (list, tuple)) else (delta, delta, delta)
        terms = (
            _Term("e", config.start_pref_e, config.limit_pref_e, self._energy),
            _Term("f", config.start_pref_f, config.limit_pref_f, self._force),
            _Term("v", config.start_pref_v, config.limit_pref_v, self._virial),
            _Term("ae", config.start_pref_ae, config.limit_pref_ae, self._atom_energy),
            _Term("pf", config.start_pref_pf, config.limit_pref_pf, self._weighted_force),
        )
        self.terms = tuple(term for term in terms if term.active)
        names = {term.name for term in self.terms}
        self.labels: tuple[str, ...] = config.labels
        self.display_names: tuple[str, ...] = tuple(sorted(["rmse", *(f"{self._kind}_{name}" for name in names)]))
        self.need_virial: bool = "v" in names

    def __call__(self, prediction: Mapping[str, Tensor], batch: Batch, lr: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and what is displayed of it, all on the device of the batch.

        Args:
            prediction: what the model says about ``batch``, by the names in ``keys``.
            batch: the frames with their labels.
            lr: learning rate of this step.

        Returns:
            The total to differentiate, a float64 scalar, and the displayed values: ``rmse`` is the root of the loss,
            the others are plain errors in eV per atom and eV/angstrom, nan where no frame has the label. They are
            detached, the same on all ranks, and nothing here waits for the device.
        """
        total = torch.zeros((), dtype=torch.float64, device=batch.num_atoms.device)
        loss = total
        shown = {}
        errors = [term.compute(prediction, batch) for term in self.terms]
        everywhere = self._world.all_reduce_sum(torch.stack([error.sums() for error in errors])) if errors else ()
        for term, error, (value, size, found) in zip(self.terms, errors, everywhere):
            rows, prefactor = found.clamp(min=1), term.prefactor(lr / self.start_lr)
            total = total + prefactor * (self._world.size * error.value.sum / (rows * error.value.columns))
            loss = loss + prefactor * (value / (rows * error.value.columns))
            mean = size / (rows * error.shown.columns)
            shown[f"{self._kind}_{term.name}"] = (mean if self._mae else mean.sqrt()).where(found > 0, torch.nan)
        shown["rmse"] = loss.sqrt()
        return total, {name: shown[name] for name in self.display_names}

    def prefactors(self, lr: float) -> dict[str, float]:
        """Return the weight of each term at a learning rate."""
        return {term.name: term.prefactor(lr / self.start_lr) for term in self.terms}

    def _energy(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        label, found = _label(batch, ENERGY)
        return self._per_frame((prediction[ENERGY] - label).unsqueeze(1), found, batch, self._delta[0])

    def _virial(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        label, found = _label(batch, VIRIAL)
        return self._per_frame(prediction[VIRIAL] - label, found, batch, self._delta[2])

    def _per_frame(self, error: Tensor, found: Tensor, batch: Batch, delta: float) -> _Error:
        """Return the error of a quantity (F, components) that grows with the number of atoms."""
        size = batch.num_atoms.to(error.dtype).unsqueeze(1)
        per_atom = error / size
        shown = _sum(self._size(per_atom), found)
        if self._mae or (self.config.intensive_ener_virial and not self._huber):
            return _Error(shown, shown, found.sum())
        value = huber(per_atom, delta) if self._huber else per_atom.square() * size
        return _Error(_sum(value, found), shown, found.sum())

    def _force(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        error, found = self._force_error(prediction, batch)
        weight = found[batch.atom_frame]
        counted = torch.linalg.vector_norm(error, dim=1, keepdim=True) if self.config.f_use_norm else error
        # the displayed mean square stays one of components, also when the norm is what is trained
        shown = _sum(self._size(counted if self._mae else error), weight)
        value = _sum(huber(counted, self._delta[1]), weight) if self._huber else shown
        return _Error(value, shown, weight.sum())

    def _weighted_force(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        error, found_force = self._force_error(prediction, batch)
        pref, found = _label(batch, ATOM_PREF)
        if self.config.use_default_pf:
            pref = pref.where(found[batch.atom_frame] > 0, 1.0)
            found = torch.ones_like(found)
        weight = (found * found_force)[batch.atom_frame]
        value = _sum(pref.unsqueeze(1) * self._size(error), weight)
        return _Error(value, value, weight.sum())

    def _force_error(self, prediction: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        label, found = _label(batch, FORCE)
        error = prediction[FORCE] - label
        if self.config.relative_f is not None:
            error = error / (torch.linalg.vector_norm(label, dim=1, keepdim=True) + self.config.relative_f)
        return error, found

    def _atom_energy(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Error:
        label, found = _label(batch, ATOM_ENERGY)
        error = (prediction[ATOM_ENERGY] - label).unsqueeze(1)
        weight = found[batch.atom_frame]
        shown = _sum(self._size(error), weight)
        value = _sum(huber(error, self._delta[0]), weight) if self._huber else shown
        return _Error(value, shown, weight.sum())

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
        """Return what must be added up over ranks, detached."""
        return torch.stack([self.value.sum.detach(), self.shown.sum.detach(), self.rows])


@dataclass(frozen=True)
class _Term:
    name: str
    start: float
    limit: float
    compute: Callable[[Mapping[str, Tensor], Batch], _Error]

    @property
    def active(self) -> bool:
        return self.start != 0 or self.limit != 0

    def prefactor(self, progress: float) -> float:
        return self.limit + (self.start - self.limit) * progress


def _label(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """Return a label and, per frame, whether it is there; zeros when the batch has never heard of it."""
    if name in batch.labels:
        return batch.labels[name], batch.has_label[name]
    nobody = torch.zeros(batch.num_frames, dtype=torch.float64, device=batch.num_atoms.device)
    return torch.zeros((), dtype=torch.float64, device=nobody.device).expand(_shape(batch, name)), nobody


def _shape(batch: Batch, name: str) -> tuple[int, ...]:
    atoms = batch.atom_type.shape[0]
    return {ENERGY: (batch.num_frames,), VIRIAL: (batch.num_frames, 9), FORCE: (atoms, 3)}.get(name, (atoms,))


def _sum(values: Tensor, weight: Tensor) -> _Sum:
    """Return the sum of ``values`` (n, components) over the rows of weight 1 instead of 0."""
    return _Sum((weight.unsqueeze(1) * values).sum(), values.shape[1])
