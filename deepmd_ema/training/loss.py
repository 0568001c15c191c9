"""The losses: weighted sums of the errors of energies and their derivatives, or of a quantity."""

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
    from deepmd_ema.config.schema.optim import (
        EnerLossConfig,
        LossConfig,
        PropertyLossConfig,
    )

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
    counts, as in MACE's losses: with the errors x of the N frames that have the label, a term is
    ``1 / N * sum_f weight_f * term_weight_f * x_f``, where ``term_weight`` is ``energy_weight``,
    ``force_weight`` (also of ``pf``) or ``virial_weight``, 1 for the other terms and where a frame
    has no weight. What a frame adds to the gradient hence does not depend on the weights of the
    frames beside it. Displayed errors are without weights, but for ``rmse``, the root of the loss.

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
    _prefix = ""  # begins the displayed names of terms

    def __init__(
        self,
        weights: Mapping[str, tuple[float, float]],
        start_lr: float,
        world: World,
        terms: Mapping[str, Term],
    ) -> None:
        self.world = world
        self.terms = {name: terms[name] for name in weights}
        # (T,) each, on the device from the start: a step that is captured as a CUDA graph may not
        # make a tensor of host numbers
        vector = partial(torch.tensor, dtype=torch.float64, device=world.device)
        self._limits = vector([limit for _, limit in weights.values()])
        self._slopes = vector(
            [(start - limit) / start_lr for start, limit in weights.values()]
        )

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
        if not self.terms:  # zero, as the sum of no numbers
            return self._limits.sum(), {ROOT: self._limits.sum()}
        rank_sums, sums = self.sums(prediction, batch)
        # one exchange, and few operations on vectors of all terms in place of many on each of them
        totals = _Sums(*self.world.all_reduce_sum(sums).unbind())  # (T,) each
        # counts are those of all ranks, so that a rank with more frames counts more; a count of 0
        # meets a sum of 0
        coefficients = self.prefactors(lr) / totals.rows.clamp(min=1)
        total = torch.dot(coefficients, rank_sums)
        loss = total.detach()
        if self.world.size > 1:
            # times the number of ranks, because the backward pass averages gradients over them
            total, loss = self.world.size * total, torch.dot(coefficients, totals.value)
        return total, self.displayed(loss, totals.shown, totals.rows)

    def sums(
        self, prediction: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, Tensor]:
        """Return the sums of a batch over its frames on this rank.

        Returns:
            The sum of each term, (T,), to differentiate; and, detached, (3, T) the sums of the
            terms, those of what is displayed of them (squared, unless mae), and the numbers of rows
            with the label.
        """
        terms = [compute(prediction, batch) for compute in self.terms.values()]
        values = [term.value for term in terms]
        # all scalars in one kernel, where a stack of three stacks would take four
        scalars = [
            *values,
            *[term.shown for term in terms],
            *[term.rows for term in terms],
        ]
        return torch.stack(values), torch.stack(scalars).detach().view(3, len(values))

    def displayed(
        self, loss: Tensor, errors: Tensor, counts: Tensor
    ) -> dict[str, Tensor]:
        """Return the displayed values in the order of ``display_names``, and the root of the loss.

        Args:
            loss: scalar, of all frames.
            errors: (T,) second row of :meth:`sums`, over all frames.
            counts: (T,) third row.
        """
        means = errors / counts  # 0 / 0 is nan where no frame has the label
        roots = means if self._is_plain else means.sqrt()
        displayed = dict(zip(map(self._prefix.__add__, self.terms), roots.unbind()))
        displayed[ROOT] = loss.sqrt()
        return {
            name: displayed[name] for name in dict.fromkeys((*self.display_names, ROOT))
        }

    def prefactors(self, lr: float | Tensor) -> Tensor:
        """Return the weight of each term at a learning rate, a number or a scalar on the device."""
        return self._limits + self._slopes * lr

    def needs(self, batch: Batch) -> dict[str, bool]:
        """Return the arguments of the model for quantities beside energies and forces."""
        # a Hessian takes a backward pass per coordinate: only for batches that have the label
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
        self.config = config
        self.labels = config.labels(())
        self._mae = self._is_plain = config.loss_func == "mae"
        self._prefix = "mae_" if self._mae else "rmse_"
        self._size = partial(l1_loss if self._mae else mse_loss, reduction="none")
        # error**2 / 2 where |error| <= delta, and delta * (|error| - delta / 2) elsewhere
        self._huber = (
            partial(huber_loss, reduction="none") if config.error == "huber" else None
        )
        delta = config.huber_delta
        deltas = (
            tuple(delta) if isinstance(delta, (list, tuple)) else (delta, delta, delta)
        )
        terms: dict[str, Term] = {
            "e": partial(self._per_frame, ENERGY, deltas[0]),
            "f": partial(self._per_atom, FORCE, deltas[1]),
            "v": partial(self._per_frame, VIRIAL, deltas[2]),
            "ae": partial(self._per_atom, ATOM_ENERGY, deltas[0]),
            "pf": self._weighted_force,
            "h": self._hessian,
        }
        super().__init__(config.weights, start_lr, world, terms)
        self.display_names = tuple(
            sorted([ROOT, *(self._prefix + name for name in self.terms)])
        )
        self.need_virial = "v" in self.terms

    def _per_frame(
        self, name: str, delta: float, prediction: Mapping[str, Tensor], batch: Batch
    ) -> _Sums:
        """Return the sums of a quantity (F, ...) that grows with the number of atoms."""
        predicted, label = prediction[name], _label(batch, name)
        rows = label.present.sum()
        error = _row_means(self._size(predicted, label.values))  # (F,)
        # 1 / N of each frame that has the label, else 0: for the display, and with weights. Where
        # no frame has a weight the two are one tensor, and a sum is computed once (here and below).
        shown_once = label.present / batch.num_atoms
        once = (
            shown_once
            if label.weight is label.present
            else label.weight / batch.num_atoms
        )
        if self._mae:
            value = torch.dot(once, error)
            return _Sums(
                value,
                value if once is shown_once else torch.dot(shown_once, error),
                rows,
            )
        # displayed per atom, a squared error over N^2; the term itself is over N, as in DeePMD-kit
        shown = torch.dot(shown_once / batch.num_atoms, error)
        if self._huber:
            sizes = batch.num_atoms.view(
                -1, *[1] * (predicted.dim() - 1)
            )  # (F, 1, ...)
            per_atom = (predicted - label.values) / sizes
            penalty = self._huber(per_atom, torch.zeros_like(per_atom), delta=delta)
            value = torch.dot(label.weight, _row_means(penalty))
        elif self.config.intensive_ener_virial:
            value = (
                shown
                if once is shown_once
                else torch.dot(once / batch.num_atoms, error)
            )
        else:
            value = torch.dot(once, error)
        return _Sums(value, shown, rows)

    def _per_atom(
        self, name: str, delta: float, prediction: Mapping[str, Tensor], batch: Batch
    ) -> _Sums:
        """Return the sums of forces or of atomic energies."""
        predicted, label = self._compared(name, prediction, batch)
        target = label.values
        # the displayed mean square stays one of components, also when the norm is what is trained
        shown = self._size(predicted, target)  # (A, 3) or (A,)
        if name == FORCE and self.config.f_use_norm:
            predicted = torch.linalg.vector_norm(predicted - target, dim=1)
            target = torch.zeros_like(predicted)
            shown = predicted if self._mae else shown
        value = self._huber(predicted, target, delta=delta) if self._huber else shown
        # from frames to atoms, (A,)
        rows = label.present[batch.atom_frame]
        is_weighted = label.weight is not label.present
        return _sums(
            value, shown, rows, label.weight[batch.atom_frame] if is_weighted else rows
        )

    def _weighted_force(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        """Return the sums of squared force errors times the factors ``atom_pref`` of atoms."""
        predicted, force = self._compared(FORCE, prediction, batch)
        pref = _label(batch, ATOM_PREF)
        factor, has_pref = pref.values, pref.present
        if (
            self.config.use_default_pf
        ):  # frames without factors take part, with 1 for each atom
            factor = factor.where(has_pref[batch.atom_frame] > 0, 1.0)
            has_pref = torch.ones_like(has_pref)
        value = factor * _row_means(self._size(predicted, force.values))  # (A,)
        rows = (has_pref * force.present)[batch.atom_frame]
        is_weighted = force.weight is not force.present
        weight = (has_pref * force.weight)[batch.atom_frame] if is_weighted else rows
        return _sums(value, value, rows, weight)

    def _compared(
        self, name: str, prediction: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, _Label]:
        """Return predicted values of a quantity of atoms, and what they are compared with."""
        predicted, label = prediction[name], _label(batch, name)
        if name == FORCE and self.config.relative_f is not None:
            # the relative error, to be compared with zero
            length = torch.linalg.vector_norm(
                label.values, dim=1, keepdim=True
            )  # (A, 1)
            predicted = (predicted - label.values) / (length + self.config.relative_f)
            label = label._replace(values=torch.zeros_like(predicted))
        return predicted, label

    def _hessian(self, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        """Return the sums of Hessians: means in each frame, then over frames."""
        label = _label(batch, HESSIAN)
        if (
            HESSIAN not in prediction
        ):  # no frame of the batch has the label, so none was computed
            nothing = torch.zeros_like(label.present)
            return _sums(nothing, nothing, nothing, nothing)
        # pairs of atoms of all frames, one frame after the other
        size = self._size(prediction[HESSIAN], label.values)
        num_pairs = [LABELS[HESSIAN].num_rows(n) for n in batch.sizes]
        mean = torch.stack([frame.mean() for frame in size.split(num_pairs)])  # (F,)
        return _sums(mean, mean, label.present, label.weight)


class QuantityLoss(Loss):
    """Squared errors of a quantity of frames (``global``) and of atoms (``local``).

    Means run over frames, and over the atoms that have the quantity. Displayed errors of frames are
    divided by the number of these atoms. As DeePMD-kit's losses ``tensor`` and ``dos``.
    """

    def __init__(
        self, config: LossConfig, start_lr: float, world: World, model: ModelConfig
    ) -> None:
        self._frame_label, self._atom_label = model.fitting_net.labels
        self.labels = config.labels(model.fitting_net.labels)
        self._counted = _counted(model, world)
        terms = {name: partial(self._term, name) for name in config.weights}
        super().__init__(config.weights, start_lr, world, terms)
        # columns of lcurve.out are called as in DeePMD-kit, as `rmse_local_dipole`
        quantity = f"_{model.fitting_net.type}" if config.type == "tensor" else ""
        self.display_names = tuple(sorted(name + quantity for name in self.terms))
        self.terms = {name + quantity: term for name, term in self.terms.items()}

    def _term(self, kind: str, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        name = self._atom_label if "local" in kind else self._frame_label
        label = _label(batch, name)
        error = prediction[name] - label.values  # (F, n) or (A, n)
        if kind.endswith(
            "cdf"
        ):  # the integral of a density of states along its energies
            error = error.cumsum(1)
        counted = self._counted[
            batch.atom_type
        ]  # (A,) 1, or 0 for atoms without the quantity
        if name == self._atom_label:
            if ATOM_WEIGHT in self.labels and ATOM_WEIGHT in batch.labels:
                atom_weight = _label(batch, ATOM_WEIGHT)
                is_present = atom_weight.present[batch.atom_frame] > 0
                error = error * atom_weight.values.where(is_present, 1.0)[:, None]
            squared = error.square()
            rows = label.present[batch.atom_frame] * counted
            is_weighted = label.weight is not label.present
            weight = label.weight[batch.atom_frame] * counted if is_weighted else rows
            return _sums(squared, squared, rows, weight)
        squared = _row_means(error.square())
        num_counted = frame_sums(batch)(counted).clamp(min=1)  # (F,)
        return _sums(
            squared, squared / num_counted.square(), label.present, label.weight
        )


class PropertyLoss(Loss):
    """Errors of a property in units of the spread of the data, summed over frames.

    An extensive property counts per atom. A sum of frames is not divided by their number, on
    several ranks and batches neither. ``rmse`` and ``mape`` are means; the latter, and what is
    displayed, are not in units of the spread. As DeePMD-kit's loss ``property``.
    """

    _is_plain = True

    def __init__(
        self,
        config: PropertyLossConfig,
        start_lr: float,
        world: World,
        model: ModelConfig,
    ) -> None:
        self.config = config
        self.labels = config.labels(model.fitting_net.labels)
        self._label = model.fitting_net.labels[0]
        self._is_mean = model.fitting_net.intensive
        terms = {name: partial(self._term, name) for name in config.weights}
        super().__init__(config.weights, start_lr, world, terms)
        self._counted = _counted(model, world)
        self.display_names = tuple(sorted(set(config.metric)))
        self._functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "smooth_mae": partial(smooth_l1_loss, reduction="none", beta=config.beta),
            "mae": partial(l1_loss, reduction="none"),
            "mse": partial(mse_loss, reduction="none"),
            "rmse": partial(mse_loss, reduction="none"),
            # 1e-3 as in DeePMD-kit, against labels of zero
            "mape": lambda predicted, label: (
                (label - predicted) / (label + 1e-3)
            ).abs(),
        }

    def __call__(
        self, prediction: Mapping[str, Tensor], batch: Batch, lr: float | Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and what is displayed of it."""
        total, displayed = super().__call__(prediction, batch, lr)
        if self.config.loss_func != "rmse":
            return total, displayed
        # The root of a mean over all ranks, of which this one differentiates its part: the value of
        # `mean + total - total.detach()` is the mean, and its gradient is that of `total`. The
        # derivative of a root at zero is infinite, hence the smallest number.
        mean = self.world.all_reduce_sum(total.detach() / self.world.size)
        shifted = (mean + total - total.detach()).clamp(
            min=torch.finfo(mean.dtype).tiny
        )
        return shifted.sqrt(), displayed

    def displayed(
        self, loss: Tensor, errors: Tensor, counts: Tensor
    ) -> dict[str, Tensor]:
        """Return the displayed values, and the root of the loss under a name of its own."""
        means = dict(zip(self.terms, (errors / counts).unbind()))
        shown = {
            name: means[name].sqrt() if name == ROOT else means[name]
            for name in self.display_names
        }
        return {**shown, "loss": loss.sqrt()}

    def _term(self, kind: str, prediction: Mapping[str, Tensor], batch: Batch) -> _Sums:
        label = _label(batch, self._label)
        predicted, target = prediction[self._label], label.values  # (F, n) each
        function = self.config.loss_func if kind == "loss" else kind
        if not self._is_mean:
            size = frame_sums(batch)(self._counted[batch.atom_type]).clamp(min=1)[
                :, None
            ]
            predicted, target = predicted / size, target / size
        if kind == "loss" and function != "mape":
            spread = prediction.get(SPREAD, torch.ones_like(target[:1]))
            # 0 in files of DeePMD-kit where all labels are equal: the unit is that of the labels
            spread = spread.where(spread > 0, 1.0)
            predicted, target = predicted / spread, target / spread
        error = self._functions[function](predicted, target)
        if kind != "loss" or function in ("rmse", "mape"):
            return _sums(error, error, label.present, label.weight)
        # a sum of frames: without rows nothing is divided by their number (the count is at least 1)
        total = torch.dot(label.weight, error.sum(1))
        return _Sums(total, total, torch.zeros_like(total))


def _counted(model: ModelConfig, world: World) -> Tensor:
    """Return for each type (T,) 1, or 0 where its atoms have nothing of the quantity."""
    counted = [float(t not in model.excluded_types) for t in range(len(model.type_map))]
    return torch.tensor(counted, dtype=torch.float64, device=world.device)


LOSSES: Mapping[str, Callable[..., Loss]] = {
    "ener": EnergyLoss,
    "tensor": QuantityLoss,
    "dos": QuantityLoss,
    "property": PropertyLoss,
}


def constant_prediction(batch: Batch, bias: Tensor) -> dict[str, Tensor]:
    """Return the prediction of a model that has learned the energies of the elements only.

    Args:
        batch: frames.
        bias: (T,) eV, energy of an atom of each type; everything else is zero.
    """
    names = (name for name, label in LABELS.items() if label.errors and name != HESSIAN)
    nothing = {name: torch.zeros_like(_label(batch, name).values) for name in names}
    energy = nothing[ENERGY].index_add(
        0, batch.atom_frame, bias[batch.atom_type]
    )  # (F,)
    return {**nothing, ENERGY: energy}


def root_of(displayed: Mapping[str, Tensor]) -> Tensor:
    """Return the root of the loss among the displayed values."""
    return displayed["loss"] if "loss" in displayed else displayed[ROOT]


class LossOverBatches:
    """The loss of all frames of several batches, and its gradient, one batch after the other.

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
        self._loss = loss
        self._world = loss.world
        # packed batches are read where they are, in host memory: each goes to the device when it
        # is its turn
        unpacked = [
            batch.view(batch.data) if isinstance(batch, PackedBatch) else batch
            for batch in batches
        ]
        # the numbers of rows do not depend on what is predicted: labels serve as the prediction
        counts = [
            [compute(batch.labels, batch).rows for compute in loss.terms.values()]
            for batch in unpacked
        ]
        total = torch.stack([torch.stack(rows) for rows in counts]).sum(0)  # (T,)
        total = on_device(total, self._world.device) if total.is_cpu else total
        self._coefficients = loss.prefactors(lr) / self._world.all_reduce_sum(
            total
        ).clamp(min=1)
        self._sums = total.new_zeros(3, len(total))

    def add(self, prediction: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Return the share of a batch in the loss, a float64 scalar to differentiate.

        Args:
            prediction: what the model predicts for ``batch``.
            batch: one of the batches, on the device of the world.
        """
        rank_sums, sums = self._loss.sums(prediction, batch)
        self._sums = self._sums + sums
        # ranks average their gradients, as in `Loss.__call__`
        return self._world.size * torch.dot(self._coefficients, rank_sums)

    def displayed(self) -> dict[str, Tensor]:
        """Return the displayed values of all batches. Must be called by every rank."""
        totals = _Sums(*self._world.all_reduce_sum(self._sums).unbind())
        loss = torch.dot(self._coefficients, totals.value)
        return self._loss.displayed(loss, totals.shown, totals.rows)


class _Sums(NamedTuple):
    """Sums of one term over frames or atoms, scalars; or those of all terms, (T,) each.

    Attributes:
        value: what counts in the loss.
        shown: what is displayed, squared unless mae.
        rows: number of frames or atoms with the label; of the components of one a mean is taken.
    """

    value: Tensor
    shown: Tensor
    rows: Tensor


def _sums(value: Tensor, shown: Tensor, has_label: Tensor, weight: Tensor) -> _Sums:
    """Return the sums of ``value`` times ``weight``, and of ``shown``, over rows with a label.

    Args:
        value: (n, ...) or (n,), n frames or atoms.
        shown: the same for the display.
        has_label: (n,) 1 for a row with the label, else 0.
        weight: (n,) of the row in the loss; 0 without the label.
    """
    total = torch.dot(weight, _row_means(value))
    is_same = shown is value and weight is has_label
    shown_total = total if is_same else torch.dot(has_label, _row_means(shown.detach()))
    return _Sums(total, shown_total, has_label.sum())


def _row_means(values: Tensor) -> Tensor:
    """Return the mean of each row of (n, ...) numbers."""
    return values if values.dim() == 1 else values.mean(1)


class _Label(NamedTuple):
    """A label of the frames of a batch.

    Attributes:
        values: zeros where a frame does not have it.
        present: (F,) 1 for a frame that has it, else 0.
        weight: (F,) of the frame in the loss, 0 without the label. Without weights in the batch it
            is ``present`` itself, by which terms know that sums are the same.
    """

    values: Tensor
    present: Tensor
    weight: Tensor


def _label(batch: Batch, name: str) -> _Label:
    """Return a label of a batch; one that the batch lacks is zero in every frame."""
    if name in batch.labels:
        return _Label(
            batch.labels[name], batch.has_label[name], label_weight(batch, name)
        )
    absent = torch.zeros(
        batch.num_frames, dtype=torch.float64, device=batch.num_atoms.device
    )
    label = LABELS[name]
    rows = len(batch.atom_type if label.per_atom else absent)
    if label.per_pair:
        rows = sum(map(label.num_rows, batch.sizes))
    # one zero that is read for all elements: no memory for what has no content
    return _Label(absent.new_zeros(()).expand(rows, *label.shape), absent, absent)
