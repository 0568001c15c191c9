"""The losses: weighted sums of the errors of energies and what follows from them, or of another
quantity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import huber_loss, l1_loss, mse_loss, smooth_l1_loss

from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.config.labels import (
    ATOM_ENERGY,
    ATOM_PREF,
    ATOM_WEIGHT,
    ENERGY,
    FORCE,
    HESSIAN,
    LABELS,
    VIRIAL,
)
from deepmd_ema.distributed.tensors import on_device
from deepmd_ema.distributed.world import World
from deepmd_ema.model.energy import frame_sums
from deepmd_ema.model.interface import label_weight
from deepmd_ema.model.quantity import SPREAD

if TYPE_CHECKING:
    from deepmd_ema.config import ModelConfig
    from deepmd_ema.config.schema.optim import EnerLossConfig, LossConfig, PropertyLossConfig

# F frames, A atoms, T terms

ROOT = "rmse"  # column of the root of the loss

Term: TypeAlias = "Callable[[Mapping[str, Tensor], Batch], _Sums]"
"""From predictions for a batch, and the batch, to the sums of one term."""


class Loss:
    """A weighted sum of errors whose weights follow the learning rate.

    The weight of a term is ``limit_pref + (start_pref - limit_pref) * lr / start_lr``. A term is
    active if its start or its limit prefactor is not zero, as in DeePMD-kit's ``pt_expt`` backend.
    (The ``pt`` backend requires both, and so drops a term that starts or ends at zero.)

    Means run over the frames of the batch that have the label, forces and atomic energies pooled
    over their atoms; that of a Hessian is taken in its frame first, so that large frames, with the
    square of the numbers, do not outweigh. A frame without the label adds nothing to the sum and
    nothing to the count; a batch without it adds zero.

    Weights of frames, where a batch holds them, multiply what frames add to the sums and not the
    counts, as in MACE's
    losses: with the errors x of the N frames that have the label, a term is ``1 / N * sum_f
    weight_f * term_weight_f * x_f``, where ``term_weight`` is ``energy_weight``, ``force_weight``
    (also of ``pf``) or ``virial_weight``, 1 for the other terms and where a frame has no weight.
    What a frame adds to the gradient hence does not depend on the weights of the frames beside it.
    Displayed errors are without weights, but for ``rmse``, the root of the loss.

    On several ranks the means run over the frames of all of them, so that the loss is that of one
    process with all these frames. A rank differentiates its own share times the number of ranks,
    because ranks average their gradients: the mean of these gradients is the gradient of the loss.

    Attributes:
        terms: the sums of each active term, by its name (``e``, ``f``, ...).
        labels: names of the labels to load.
        display_names: keys of the displayed values, in the order of the columns of ``lcurve.out``.
        need_virial: whether the model has to compute virials.
        world: the processes over whose frames means run.
    """

    labels: tuple[str, ...]
    display_names: tuple[str, ...]
    need_virial = False
    _is_plain = False  # whether means are displayed as they are, not their roots
    _prefix = ""  # of the displayed names of terms

    def __init__(
        self,
        weights: Mapping[str, tuple[float, float]],
        start_lr: float,
        world: World,
        terms: Mapping[str, Term],
    ) -> None:
        self.world = world
        self.terms = {name: terms[name] for name in weights}
        # on the device from the start: a step makes no tensor of host numbers
        vector = partial(torch.tensor, dtype=torch.float64, device=world.device)
        self._limits = vector([limit for _, limit in weights.values()])
        self._slopes = vector([(start - limit) / start_lr for start, limit in weights.values()])

    def __call__(
        self, prediction: Mapping[str, Tensor], batch: Batch, lr: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and what is displayed of it, all on the device of the batch.

        Args:
            prediction: what the model predicts for ``batch``, by the names in ``labels``.
            batch: the frames with their labels, on the device of the world.
            lr: learning rate of this step, a number or a float64 scalar on the device.

        Returns:
            The total to differentiate, a float64 scalar, and the displayed values: ``rmse`` is the
            root of the loss, the others are plain errors in eV per atom, eV/angstrom and
            eV/angstrom^2, nan where no frame has the label. They are detached, equal on all ranks,
            and nothing here synchronises with the device.
        """
        if not self.terms:
            return self._limits.sum(), {ROOT: self._limits.sum()}
        own, sums = self.sums(prediction, batch)
        # one exchange, and few operations on vectors of all terms in place of many on each of them
        values, errors, counts = self.world.all_reduce_sum(sums).unbind()
        coefficients = self.prefactors(lr) / counts.clamp(min=1)
        total = torch.dot(coefficients, own)
        loss = total.detach()
        if self.world.size > 1:
            total, loss = self.world.size * total, torch.dot(coefficients, values)
        return total, self.displayed(loss, errors, counts)

    def sums(self, prediction: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sums of a batch over its frames on this rank.

        Returns:
            The sum of each term, (T,), to differentiate; and, detached, (3, T) the sums of the
            terms, those of what is displayed of them (squared, unless mae), and the numbers of rows
            with the label.
        """
        value, shown, rows = zip(*[compute(prediction, batch) for compute in self.terms.values()])
        return torch.stack(value), torch.stack([*value, *shown, *rows]).detach().view(3, len(value))

    def displayed(self, loss: Tensor, errors: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Return the displayed values, by the names and in the order of ``display_names``, and the
        root of the loss.

        Args:
            loss: scalar, of all frames.
            errors: (T,) second row of :meth:`sums`, over all frames.
            counts: (T,) third row.
        """
        means = errors / counts  # 0 / 0 is nan where no frame has the label
        displayed = dict(
            zip(
                map(self._prefix.__add__, self.terms),
                (means if self._is_plain else means.sqrt()).unbind(),
            )
        )
        displayed[ROOT] = loss.sqrt()
        return {name: displayed[name] for name in dict.fromkeys((*self.display_names, ROOT))}

    def prefactors(self, lr: float | Tensor) -> Tensor:
        """Return the weight of each term at a learning rate, a number or a scalar on the device."""
        return self._limits + self._slopes * lr

    def needs(self, batch: Batch) -> dict[str, bool]:
        """Return the arguments of the model for quantities of ``batch`` beside energies and
        forces.
        """
        return {
            "need_virial": self.need_virial,
            "need_hessian": HESSIAN in self.labels and HESSIAN in batch.labels,
        }


class EnergyLoss(Loss):
    """The errors of energies, forces, virials, atomic energies and Hessians."""

    def __init__(
        self,
        config: EnerLossConfig,
        start_lr: float,
        world: World,
        model: ModelConfig | None = None,
    ) -> None:
        self.config, self.labels = config, config.labels(())
        self._mae = self._is_plain = config.loss_func == "mae"
        self._prefix = "mae_" if self._mae else "rmse_"
        self._size = partial(l1_loss if self._mae else mse_loss, reduction="none")
        # error**2 / 2 where |error| <= delta, and delta * (|error| - delta / 2) elsewhere
        self._huber = partial(huber_loss, reduction="none") if config.error == "huber" else None
        delta = config.huber_delta
        deltas = tuple(delta) if isinstance(delta, (list, tuple)) else (delta, delta, delta)
        terms: dict[str, Term] = {
            "e": partial(self._per_frame, ENERGY, deltas[0]),
            "f": partial(self._per_atom, FORCE, deltas[1]),
            "v": partial(self._per_frame, VIRIAL, deltas[2]),
            "ae": partial(self._per_atom, ATOM_ENERGY, deltas[0]),
            "pf": self._weighted_force,
            "h": self._hessian,
        }
        super().__init__(config.weights, start_lr, world, terms)
        self.display_names = tuple(sorted([ROOT, *(self._prefix + name for name in self.terms)]))
        self.need_virial = "v" in self.terms

    def _per_frame(
        self, name: str, delta: float, prediction: Mapping[str, Tensor], batch: Batch
    ) -> _Sums:
        """Return the sums of a quantity (F, ...) that grows with the number of atoms."""
        found, (label, has_label, weight) = prediction[name], _label(batch, name)
        shown_once = has_label / batch.num_atoms
        rows = has_label.sum()
        error = _of_rows(self._size(found, label))
        once = shown_once if weight is has_label else weight / batch.num_atoms
        if self._mae:
            value = torch.dot(once, error)
            return _Sums(value, value if once is shown_once else torch.dot(shown_once, error), rows)
        shown = torch.dot(shown_once / batch.num_atoms, error)
        if self._huber:
            per_atom = (found - label) / batch.num_atoms.view(-1, *[1] * (found.dim() - 1))
            value = torch.dot(
                weight, _of_rows(self._huber(per_atom, torch.zeros_like(per_atom), delta=delta))
            )
        elif self.config.intensive_ener_virial:
            value = shown if once is shown_once else torch.dot(once / batch.num_atoms, error)
        else:
            value = torch.dot(once, error)
        return _Sums(value, shown, rows)

    def _per_atom(
        self, name: str, delta: float, prediction: Mapping[str, Tensor], batch: Batch
    ) -> _Sums:
        """Return the sums of forces or of atomic energies."""
        found, label, has_label, weight = self._compared(name, prediction, batch)
        # the displayed mean square stays one of components, also when the norm is what is trained
        shown = self._size(found, label)
        if name == FORCE and self.config.f_use_norm:
            found = torch.linalg.vector_norm(found - label, dim=1)
            label = torch.zeros_like(found)
            shown = found if self._mae else shown
        value = self._huber(found, label, delta=delta) if self._huber else shown
        rows = has_label[batch.atom_frame]
        return _sums(value, shown, rows, rows if weight is has_label else weight[batch.atom_frame])

    def _weighted_force(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        found, label, has_force, weight = self._compared(FORCE, prediction, batch)
        pref, has_label, _ = _label(batch, ATOM_PREF)
        if self.config.use_default_pf:
            pref = pref.where(has_label[batch.atom_frame] > 0, 1.0)
            has_label = torch.ones_like(has_label)
        value = pref * _of_rows(self._size(found, label))
        rows = (has_label * has_force)[batch.atom_frame]
        return _sums(
            value,
            value,
            rows,
            rows if weight is has_force else (has_label * weight)[batch.atom_frame],
        )

    def _compared(
        self, name: str, prediction: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return predicted and labelled values of a quantity of atoms, which frames have the label,
        and weights.
        """
        found, (label, has_label, weight) = prediction[name], _label(batch, name)
        if name == FORCE and self.config.relative_f is not None:
            found = (found - label) / (
                torch.linalg.vector_norm(label, dim=1, keepdim=True) + self.config.relative_f
            )
            label = torch.zeros_like(found)
        return found, label, has_label, weight

    def _hessian(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        label, has_label, weight = _label(batch, HESSIAN)
        if HESSIAN not in prediction:
            nothing = torch.zeros_like(has_label)
            return _sums(nothing, nothing, nothing, nothing)
        size = self._size(prediction[HESSIAN], label)
        mean = torch.stack(
            [one.mean() for one in size.split([LABELS[HESSIAN].num_rows(n) for n in batch.sizes])]
        )
        return _sums(mean, mean, has_label, weight)


class QuantityLoss(Loss):
    """Squared errors of the values of frames (``global``) and of atoms (``local``) that a model
    predicts.

    Means run over frames, and over the atoms that have the quantity. Displayed errors of frames are
    divided by the number of these atoms. As DeePMD-kit's losses ``tensor`` and ``dos``.
    """

    def __init__(
        self, config: LossConfig, start_lr: float, world: World, model: ModelConfig
    ) -> None:
        self._of_frame, self._of_atom = model.fitting_net.labels
        self.labels, self._counted = config.labels(model.fitting_net.labels), _counted(model, world)
        terms = {name: partial(self._term, name) for name in config.weights}
        super().__init__(config.weights, start_lr, world, terms)
        quantity = f"_{model.fitting_net.type}" if config.type == "tensor" else ""
        self.display_names = tuple(sorted(name + quantity for name in self.terms))
        self.terms = {name + quantity: term for name, term in self.terms.items()}

    def _term(self, kind: str, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        name = self._of_atom if "local" in kind else self._of_frame
        label, has_label, weight = _label(batch, name)
        error = prediction[name] - label
        if kind.endswith("cdf"):
            error = error.cumsum(1)
        counted = self._counted[batch.atom_type]
        if name == self._of_atom:
            if ATOM_WEIGHT in self.labels and ATOM_WEIGHT in batch.labels:
                of_atoms, has_weight, _ = _label(batch, ATOM_WEIGHT)
                error = error * of_atoms.where(has_weight[batch.atom_frame] > 0, 1.0)[:, None]
            rows, squared = has_label[batch.atom_frame] * counted, error.square()
            return _sums(
                squared,
                squared,
                rows,
                rows if weight is has_label else weight[batch.atom_frame] * counted,
            )
        squared = _of_rows(error.square())
        return _sums(
            squared, squared / frame_sums(batch)(counted).clamp(min=1).square(), has_label, weight
        )


class PropertyLoss(Loss):
    """Errors of a property, of an extensive one per atom, in units of the spread of the data,
    summed over frames.

    A sum of frames is not divided by their number, on several ranks and batches neither. ``rmse``
    and ``mape`` are means; the latter, and what is displayed, are not in units of the spread. As
    DeePMD-kit's loss ``property``.
    """

    _is_plain = True

    def __init__(
        self, config: PropertyLossConfig, start_lr: float, world: World, model: ModelConfig
    ) -> None:
        self.config, self.labels = config, config.labels(model.fitting_net.labels)
        self._label, self._is_mean = model.fitting_net.labels[0], model.fitting_net.intensive
        terms = {name: partial(self._term, name) for name in config.weights}
        super().__init__(config.weights, start_lr, world, terms)
        self._counted = _counted(model, world)
        self.display_names = tuple(sorted(set(config.metric)))
        self._functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "smooth_mae": partial(smooth_l1_loss, reduction="none", beta=config.beta),
            "mae": partial(l1_loss, reduction="none"),
            "mse": partial(mse_loss, reduction="none"),
            "rmse": partial(mse_loss, reduction="none"),
            "mape": lambda found, label: ((label - found) / (label + 1e-3)).abs(),
        }

    def __call__(
        self, prediction: Mapping[str, Tensor], batch: Batch, lr: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and what is displayed of it."""
        total, displayed = super().__call__(prediction, batch, lr)
        if self.config.loss_func != "rmse":
            return total, displayed
        # the root of a mean over all ranks, of which this one differentiates its part
        mean = self.world.all_reduce_sum(total.detach() / self.world.size)
        return (mean + total - total.detach()).clamp(
            min=torch.finfo(mean.dtype).tiny
        ).sqrt(), displayed

    def displayed(self, loss: Tensor, errors: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """Return the displayed values, and the root of the loss under a name of its own."""
        means = dict(zip(self.terms, (errors / counts).unbind()))
        shown = {
            name: means[name].sqrt() if name == ROOT else means[name] for name in self.display_names
        }
        return {**shown, "loss": loss.sqrt()}

    def _term(self, kind: str, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        label, has_label, weight = _label(batch, self._label)
        found, function = prediction[self._label], self.config.loss_func if kind == "loss" else kind
        if not self._is_mean:
            size = frame_sums(batch)(self._counted[batch.atom_type]).clamp(min=1)[:, None]
            found, label = found / size, label / size
        if kind == "loss" and function != "mape":
            spread = prediction.get(SPREAD, torch.ones_like(label[:1]))
            # 0 in files of DeePMD-kit where all labels are equal: the unit is that of the labels
            spread = spread.where(spread > 0, 1.0)
            found, label = found / spread, label / spread
        error = self._functions[function](found, label)
        if kind == "loss" and function not in (
            "rmse",
            "mape",
        ):  # counted as one row, whatever the number of frames
            total = torch.dot(weight, error.sum(1))
            return _Sums(total, total, torch.zeros_like(total))
        return _sums(error, error, has_label, weight)


def _counted(model: ModelConfig, world: World) -> Tensor:
    """Return (T,) 0 for types whose atoms have nothing of what is predicted, else 1."""
    counted = [float(t not in model.excluded_types) for t in range(len(model.type_map))]
    return torch.tensor(counted, dtype=torch.float64, device=world.device)


LOSSES: Mapping[str, Callable[..., Loss]] = {
    "ener": EnergyLoss,
    "tensor": QuantityLoss,
    "dos": QuantityLoss,
    "property": PropertyLoss,
}


def constant_prediction(batch: Batch, bias: Tensor) -> dict[str, Tensor]:
    """Return the prediction without forces in which each atom of type t has the energy ``bias[t]``
    (T,), in eV.
    """
    names = (name for name, label in LABELS.items() if label.errors and name != HESSIAN)
    nothing = {name: torch.zeros_like(_label(batch, name)[0]) for name in names}
    return {
        **nothing,
        ENERGY: nothing[ENERGY].index_add(0, batch.atom_frame, bias[batch.atom_type]),
    }


def root_of(displayed: Mapping[str, Tensor]) -> Tensor:
    """Return the root of the loss among the displayed values."""
    return displayed["loss"] if "loss" in displayed else displayed[ROOT]


class LossOverBatches:
    """The loss of all frames of several batches together, and its gradient, from one batch after
    the other.

    Means run over the frames of all batches on all ranks, which are counted before the first is
    evaluated: the sum of the gradients of what :meth:`add` returns is, to rounding, that of one
    batch with all the frames. Must be made by every rank.

    Args:
        loss: of a batch.
        batches: with all its labels, in host memory or on the device of the world.
        lr: learning rate of the step, a number or a float64 scalar on the device.
    """

    def __init__(
        self, loss: Loss, batches: Sequence[Batch | PackedBatch], lr: float | Tensor
    ) -> None:
        self._loss, self._world = loss, loss.world
        unpacked = [
            made.view(made.data) if isinstance(made, PackedBatch) else made for made in batches
        ]
        # the numbers of rows do not depend on what is predicted: labels are as good
        counts = [
            [compute(batch.labels, batch).rows for compute in loss.terms.values()]
            for batch in unpacked
        ]
        total = torch.stack([torch.stack(of_batch) for of_batch in counts]).sum(0)
        total = on_device(total, self._world.device) if total.is_cpu else total
        self._coefficients = loss.prefactors(lr) / self._world.all_reduce_sum(total).clamp(min=1)
        self._sums = total.new_zeros(3, len(total))

    def add(self, prediction: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the share of a batch in the loss, a float64 scalar to differentiate.

        Args:
            prediction: what the model predicts for ``batch``.
            batch: one of the batches, on the device of the world.
        """
        own, sums = self._loss.sums(prediction, batch)
        self._sums = self._sums + sums
        return self._world.size * torch.dot(self._coefficients, own)

    def displayed(self) -> dict[str, Tensor]:
        """Return the displayed values of all batches. Must be called by every rank."""
        values, errors, counts = self._world.all_reduce_sum(self._sums).unbind()
        return self._loss.displayed(torch.dot(self._coefficients, values), errors, counts)


class _Sums(NamedTuple):
    """Of one term: what counts in the loss, what is displayed (squared, unless mae), and the rows
    with a label.

    A row is a frame or an atom; of its components the mean is taken.
    """

    value: Tensor
    shown: Tensor
    rows: Tensor


def _sums(value: Tensor, shown: Tensor, has_label: Tensor, weight: Tensor) -> _Sums:
    """Return the sums of ``value`` times ``weight``, and of ``shown`` (n, ...), over the rows with
    a label.
    """
    total, is_same = torch.dot(weight, _of_rows(value)), shown is value and weight is has_label
    return _Sums(
        total, total if is_same else torch.dot(has_label, _of_rows(shown.detach())), has_label.sum()
    )


def _of_rows(values: Tensor) -> Tensor:
    """Return the mean of each row of (n, ...) numbers."""
    return values if values.dim() == 1 else values.mean(1)


def _label(batch: Batch, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return a label and, per frame, whether the frame has it, 1 or 0, and its weight in the loss,
    0 without the label.

    Without the label in the batch all are zeros; without weights in the batch the last two are one
    tensor.
    """
    if name in batch.labels:
        return batch.labels[name], batch.has_label[name], label_weight(batch, name)
    has_label = torch.zeros(batch.num_frames, dtype=torch.float64, device=batch.num_atoms.device)
    label = LABELS[name]
    rows = len(batch.atom_type if label.per_atom else has_label)
    if label.per_pair:
        rows = sum(map(label.num_rows, batch.sizes))
    return has_label.new_zeros(()).expand(rows, *label.shape), has_label, has_label
