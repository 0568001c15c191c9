"""Least squares for the output layer of a fitting network and the output bias.

Energies, forces and virials are linear in the weights of the output layer and in the output bias, so that the change x
of these numbers that fits labels best, all other weights fixed, is the solution of a linear system::

    minimize  sum_l p_l / n_l sum_i w_i (r_i - sum_j J_ij x_j)^2  +  ridge sum_j d_j x_j^2

r are labels minus predictions of the label l, J their derivatives by the unknowns, w and p the weights of the loss, n
the number of components, and d the diagonal of the matrix of the first term, which makes the ridge independent of the
scale of the unknowns. A large ridge leaves the weights as they were trained. It is one linear step of variable
projection (Golub and Pereyra, Inverse Problems 19, R1, 2003).

The ridge is the largest one that lowers the logarithm of the loss of frames kept apart by half of what the best one
lowers it by. The best one makes weights a hundred times as large as the trained ones; their terms cancel where there
are data, and molecular dynamics that leave the data fail (benchmarks/results/2026-11-25-physics_of_averages.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.model.energy import EnergyModel, outputs_of
from deepmd_ema.model.interface import HasLinearOutput, HiddenUnits

if TYPE_CHECKING:
    from deepmd_ema.model.interface import Vjp

# F frames, A atoms, T types, P unknowns, R equations

FITTED = (ENERGY, FORCE, VIRIAL)
RIDGES = tuple(10.0 ** (k / 2) for k in range(-24, 5))
"""Candidates, as parts of the diagonal; the smallest is what rounding in float64 leaves of it."""
KEPT_GAIN = 0.5  # part of the largest decrease of log(loss), on frames kept apart
SAMPLED_RIDGE = 1e-4  # of samples, see benchmarks/results/2026-11-24-uncertainty.md


@dataclass(eq=False)
class Equations:
    """The normal equations of labels, summed up over batches.

    Attributes:
        num_unknowns: P.
        sums: by label (P + 1, P + 1) float64, of the columns of J and, last, of r.
        counts: by label the number of components, a scalar.
    """

    num_unknowns: int
    sums: dict[str, Tensor] = field(init=False)
    counts: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        size = self.num_unknowns + 1
        self.sums = {name: torch.zeros(size, size, dtype=torch.float64) for name in FITTED}
        self.counts = {name: torch.zeros((), dtype=torch.float64) for name in FITTED}

    def add(self, name: str, columns: Tensor, residual: Tensor, weight: Tensor) -> None:
        """Add equations of a label.

        Args:
            name: of the label.
            columns: (R, P).
            residual: (R,) label minus prediction.
            weight: (R,) of each square; 0 where there is no label.
        """
        whole = torch.cat([columns, residual[:, None]], 1) * weight.sqrt()[:, None]
        self.sums[name] += (whole.T @ whole).cpu()
        self.counts[name] += (weight > 0).sum().cpu()

    def plus(self, other: Equations, sign: int = 1) -> Equations:
        """Return the equations of both, or those of this one without the other's where ``sign`` is -1."""
        found = Equations(self.num_unknowns)
        for name in FITTED:
            found.sums[name] = self.sums[name] + sign * other.sums[name]
            found.counts[name] = self.counts[name] + sign * other.counts[name]
        return found

    def reduced(self, all_reduce_sum: Callable[[Tensor], Tensor]) -> Equations:
        """Return the sums over all ranks. Must be called by every rank."""
        found = Equations(self.num_unknowns)
        for name in FITTED:
            found.sums[name], found.counts[name] = (all_reduce_sum(one[name]) for one in (self.sums, self.counts))
        return found

    def loss(self, prefactors: Mapping[str, float]) -> float:
        """Return the weighted mean of the squared residuals."""
        return float(self.weighted(prefactors)[-1, -1])

    def weighted(self, prefactors: Mapping[str, float]) -> Tensor:
        """Return the sums (P + 1, P + 1) of all labels; the last number is the loss."""
        total = torch.zeros_like(self.sums[ENERGY])
        for name, count in self.counts.items():
            if count:
                total += prefactors.get(name, 0.0) / count * self.sums[name]
        return total


@dataclass(frozen=True, eq=False)
class Solution:
    """A change of the unknowns.

    Attributes:
        change: (P,) float64, zeros where the trained weights are the best.
        ridge: of the change; infinite for zeros.
        kept_apart: loss of frames that are kept apart, each part of them once: as trained, and with the change.
        fitted: the same of all frames, with the change that fits all of them.
    """

    change: Tensor
    ridge: float
    kept_apart: tuple[float, float]
    fitted: tuple[float, float]


def num_unknowns(model: EnergyModel) -> int:
    """Return P: the weights of all output layers, and the output bias of each element."""
    return sum(weight.numel() for weight in output_weights(model)) + len(model.type_map)


def output_weights(model: EnergyModel) -> list[Tensor]:
    """Return the weights (H, 1) of the output layers; none where the energies are not linear in such weights."""
    return list(model.fitting.output_weights()) if isinstance(model.fitting, HasLinearOutput) else []


def equations(model: EnergyModel, batches: Iterable[Batch], intensive: bool, with_forces: bool = True) -> Equations:
    """Return the normal equations of labelled batches, which are on the device of the model.

    Forces and virials take a backward pass through the descriptor for each unknown; energies take none.

    Args:
        model: in evaluation mode.
        batches: with their labels.
        intensive: whether squares of energies and virials are divided by the square of the number of atoms.
        with_forces: whether forces and virials are fitted beside energies.
    """
    found = Equations(num_unknowns(model))
    with torch.no_grad():
        for batch in batches:
            columns = _columns(model, batch, with_forces)
            _add(found, model(batch), batch, intensive, columns)
    return found


def residuals(model: EnergyModel, batches: Iterable[Batch], intensive: bool, with_forces: bool = True) -> Equations:
    """Return the equations without unknowns, of a model as it is, in evaluation mode; the arguments as above."""
    found = Equations(0)
    with torch.no_grad():
        for batch in batches:
            predicted = model(batch)
            names = FITTED if with_forces else (ENERGY,)
            nothing = {name: predicted[name].new_zeros(predicted[name].numel(), 0) for name in names}
            _add(found, predicted, batch, intensive, nothing)
    return found


def solve(parts: Sequence[Equations], prefactors: Mapping[str, float], least: float = 0.0) -> Solution:
    """Return the change that fits all parts, with the largest ridge that has ``KEPT_GAIN`` of the gain of the best one.

    The gain is how much less the logarithm of the loss is, of each part with the change that fits the others.

    Args:
        parts: at least two, of different frames.
        prefactors: weights of the labels in the loss.
        least: smallest ridge.
    """
    total = reduce(Equations.plus, parts)
    losses: dict[float, float] = {}
    before = 0.0
    for part in parts:
        judged = part.weighted(prefactors)
        before += float(judged[-1, -1]) / len(parts)
        change_at = _solver(total.plus(part, -1).weighted(prefactors))
        for ridge in (r for r in RIDGES if r >= least):
            losses[ridge] = losses.get(ridge, 0.0) + _loss(judged, change_at(ridge)) / len(parts)
    whole = total.weighted(prefactors)
    best = min(losses.values(), default=before)
    enough = before ** (1 - KEPT_GAIN) * best**KEPT_GAIN
    ridge = max((r for r, loss in losses.items() if loss <= enough), default=math.inf) if best < before else math.inf
    kept_apart = losses.get(ridge, before)
    change = torch.zeros_like(whole[:-1, 0]) if math.isinf(ridge) else _solver(whole)(ridge)
    return Solution(change, ridge, (before, kept_apart), (float(whole[-1, -1]), _loss(whole, change)))


def sample_changes(
    found: Equations,
    prefactors: Mapping[str, float],
    number: int,
    random: torch.Generator,
    ridge: float = SAMPLED_RIDGE,
) -> Tensor:
    """Return samples (``number``, P) float64 of the change of the unknowns that equations leave open.

    They are normal, around zero, with the inverse of the matrix of the equations as covariance: the posterior of a
    Bayesian linear regression of the labels (last-layer prediction rigidity, Bigi et al., arXiv:2403.02251). Its factor
    is the one with which the mean square of the changes of the predictions is that of the residuals.

    Args:
        found: of all frames.
        prefactors: weights of the labels in the loss.
        number: of samples.
        random: on the CPU.
        ridge: smallest part of the diagonal to which a direction is known.
    """
    sums = found.weighted(prefactors)
    inverse, values, vectors = _normalized(sums)
    precision = values + ridge
    variance = sums[-1, -1] / (values / precision).sum() / precision
    normal = torch.randn(number, len(values), generator=random, dtype=torch.float64)
    return (normal * variance.sqrt()) @ vectors.T * inverse


def changed_tensors(model: EnergyModel, change: Tensor) -> dict[str, Tensor]:
    """Return the weights and the bias after a change (P,), by their names in the model, on the CPU."""
    names = {id(p): name for name, p in model.named_parameters()}
    parts = change.split([*(weight.numel() for weight in output_weights(model)), len(model.type_map)])
    out = {}
    for weight, part in zip(output_weights(model), parts):
        moved = weight.detach().cpu().to(torch.float64) + part.view(weight.shape)
        out[names[id(weight)]] = moved.to(weight.dtype)
    return out | {"out_bias": model.out_bias.cpu() + parts[-1].view(1, -1, 1)}


def _solver(sums: Tensor) -> Callable[[float], Tensor]:
    """Return a function from a ridge to the change (P,) that solves the equations with it."""
    inverse, values, vectors = _normalized(sums)
    projected = vectors.T @ (inverse * sums[:-1, -1])
    return lambda ridge: inverse * (vectors @ (projected / (values + ridge)))


def _normalized(sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scale (P,) that makes the diagonal of the equations one, and their eigenvalues and vectors with it."""
    matrix = sums[:-1, :-1]
    scale = matrix.diagonal().sqrt()
    inverse = torch.where(scale > 0, 1 / scale, 0.0)  # what no frame depends on stays as it is
    values, vectors = torch.linalg.eigh(inverse[:, None] * matrix * inverse)
    return inverse, values.clamp(min=0), vectors


def _loss(sums: Tensor, change: Tensor) -> float:
    """Return the loss after a change (P,)."""
    both = torch.cat([-change, change.new_ones(1)])
    return float(both @ sums @ both)


class _OneUnit:
    """A network whose energies are one hidden unit, the next one at each :meth:`advance`, and zero before the first."""

    def __init__(self, model: EnergyModel, with_forces: bool) -> None:
        self._model, self._with_forces = model, with_forces
        self._found: tuple[Tensor, Vjp, list[HiddenUnits]] | None = None
        self._chosen: tuple[HiddenUnits, int] | None = None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor, Vjp]:
        if self._found is None:  # the batch is the same each time
            features, vjp = self._model.descriptor(batch)
            self._found = features, vjp, cast("HasLinearOutput", self._model.fitting).hidden_units(features, batch)
        features, vjp, _ = self._found
        energy = torch.zeros(len(features), dtype=torch.float64, device=features.device)
        gradient = torch.zeros_like(features)
        if self._chosen is not None:
            units, index = self._chosen
            energy[units.atoms] = units.values[:, index].to(torch.float64)
            if self._with_forces:
                one = torch.zeros_like(units.values)
                one[:, index] = 1
                gradient[units.atoms] = units.vjp(one).to(gradient)
        return energy, gradient, vjp if self._with_forces else lambda _: torch.zeros_like(batch.vector)

    def advance(self) -> Iterator[None]:
        """Choose one unit after the other."""
        assert self._found is not None
        for units in self._found[2]:
            for index in range(units.values.shape[1]):
                self._chosen = units, index
                yield


def _columns(model: EnergyModel, batch: Batch, with_forces: bool) -> dict[str, Tensor]:
    """Return the derivatives of each label by the unknowns (R, P)."""
    network = _OneUnit(model, with_forces)

    def evaluate() -> dict[str, Tensor]:
        out = outputs_of(*model.with_short_range(batch, network), batch, need_virial=with_forces)
        return {name: out[name].flatten() for name in (FITTED if with_forces else (ENERGY,))}

    fixed = evaluate()  # energies that do not come from the network
    columns: dict[str, list[Tensor]] = {name: [] for name in fixed}
    for _ in network.advance():
        for name, value in evaluate().items():
            columns[name].append(value - fixed[name])
    counts = model.atoms_with_energy(batch)
    for name, value in fixed.items():
        columns[name] += list(counts.T) if name == ENERGY else [torch.zeros_like(value)] * counts.shape[1]
    return {name: torch.stack(found, 1) for name, found in columns.items()}


def _add(
    found: Equations, predicted: Mapping[str, Tensor], batch: Batch, intensive: bool, columns: Mapping[str, Tensor]
) -> None:
    """Add the equations of the labels for which there are columns."""
    for name in columns.keys() & batch.labels.keys():
        residual = (batch.labels[name] - predicted[name]).flatten()
        found.add(name, columns[name], residual, _weights(name, batch, intensive))


def _weights(name: str, batch: Batch, intensive: bool) -> Tensor:
    """Return the weight of each component of a label in the loss, without its prefactor."""
    has_label = batch.has_label[name].to(torch.float64)
    if name == FORCE:
        return has_label[batch.atom_frame].repeat_interleave(3)
    per_frame = has_label / batch.num_atoms ** (2 if intensive else 1)
    return per_frame if name == ENERGY else per_frame.repeat_interleave(9)
