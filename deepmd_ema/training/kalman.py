"""Training steps of the Kalman filter LKF: updates with energies, then with forces of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.config.labels import ENERGY, FORCE
from deepmd_ema.config.schema import optim as sections
from deepmd_ema.distributed.tensors import Take, on_device
from deepmd_ema.optim.lkf import LKF
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.training.prepare import PreparedRun
from deepmd_ema.training.step import Step, Updated
from deepmd_ema.training.tasks import Task
from deepmd_ema.utils import seed_for

# both as in DeePMD-kit
GROUPS = 4  # updates with forces in a step
GROUP_ATOMS = 6  # atoms of each frame in one of these updates

# F frames, A atoms, G atoms of a group


class KalmanStep(Step):
    """Fits energies and forces with the Kalman filter, as DeePMD-kit does.

    The terms of the loss say what is fitted, its weights do not matter. With F frames of N atoms,
    prediction y and label Y, an update takes in one number and its gradient, in which each
    prediction goes towards its label:

        energy:  e = sqrt(F) * mean |c (Y - y)| / N      H = c / N * sum_f sign(Y - y) dy/dw
        forces:  e = sqrt(F) * mean |c (Y - y)| / N      H = c / (3 G N) * sum sign(Y - y) dy/dw

    the latter over the components of G atoms of each frame, drawn at random with the seed of the
    run. The factor c goes from its start to its limit as ``start * (limit / start) ** (steps done /
    num_steps)``. Frames without a label do not count. Each update is made with new predictions.
    With several tasks it leaves weights and covariances that the task of the step does not have as
    they are; the memory factor is one for all.

    Args:
        prepared: models and config of the run.
        num_steps: length of the run.
    """

    skipped = "by that step after its first update that was not finite"
    remedy = "or lower optimizer.kf_start_pref_e and optimizer.kf_start_pref_f"

    def __init__(self, prepared: PreparedRun, num_steps: int) -> None:
        models, config = prepared.models, prepared.config.optimizer
        assert isinstance(config, sections.LKFConfig)
        super().__init__(
            models, build_schedule(prepared.config.learning_rate, num_steps)
        )
        self._filter = LKF(
            models.named_parameters(), config.kf_blocksize, models.tasks_of_parameters()
        )
        self._config = config
        self._num_steps = num_steps
        self._seed = prepared.seed

    def update(
        self,
        task: Task,
        batches: Sequence[Batch | PackedBatch],
        rate: float | Tensor,
        step: int | Tensor,
    ) -> Updated:
        """Update the weights with the only batch; ``rate`` is that of the displayed loss."""
        assert isinstance(step, int)  # CUDA graphs do not take these steps
        # the rules of the config allow one batch, which the trainer has put on the device
        batch = cast("Batch", batches[0])
        config = self._config
        energy_weight = self._between(
            config.kf_start_pref_e, config.kf_limit_pref_e, step
        )
        force_weight = self._between(
            config.kf_start_pref_f, config.kf_limit_pref_f, step
        )
        prediction = task.models(task.name, batch, need_virial=task.loss.need_virial)
        # the loss is displayed only: the filter fits measurements, not the loss
        with torch.no_grad():
            total, values = task.loss(prediction, batch, rate)
        ok = self._note(torch.isfinite(total), step)
        if "e" in task.loss.terms:
            measurement = measure_energy(prediction[ENERGY], batch, energy_weight)
            ok = self._measure(measurement, step, task.name)
            prediction = {}  # it is that of the weights before the update
        for numbers in (
            self._draws(step, total.device) if "f" in task.loss.terms else ()
        ):
            # the first prediction serves the first update of the step, each later one needs its own
            prediction = prediction or task.models(task.name, batch, need_virial=False)
            measurement = measure_force(prediction[FORCE], batch, force_weight, numbers)
            ok = self._measure(measurement, step, task.name)
            prediction = {}
        return Updated(values, ok)

    def state_dict(self, take: Take) -> dict[str, Any]:
        """Return the covariances of the filter."""
        return self._filter.state_dict(take)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the covariances of ``state``."""
        self._filter.load_state_dict(state)

    def _measure(self, measurement: Measurement, step: int, task: str) -> Tensor:
        """Take in one measurement; return 1 if it and all before it were finite, else 0."""
        parameters = self._filter.parameters_of(task)
        # forces do not depend on every parameter of the task, such as the bias of the last layer
        gradients = torch.autograd.grad(
            measurement.scalar, parameters, allow_unused=True, materialize_grads=True
        )
        error = measurement.error
        # a sum of norms is finite only if every gradient is; the host reads none of them
        norm = torch.stack(torch._foreach_norm(gradients)).sum()
        ok = self._note(torch.isfinite(norm) & torch.isfinite(error), step)
        self._filter.update(gradients, error, ok * measurement.has_label, task)
        return ok

    def _between(self, start: float, limit: float, step: int) -> float:
        return start * (limit / start) ** ((step - 1) / self._num_steps)

    def _draws(self, step: int, device: torch.device) -> Tensor:
        """Return numbers from 0 to 1, (groups, G), that choose the atoms of a step.

        One copy takes them to the device.
        """
        generator = np.random.default_rng(seed_for("kalman", self._seed, step))
        return on_device(
            torch.from_numpy(generator.random((GROUPS, GROUP_ATOMS))), device
        )


class Measurement(NamedTuple):
    """A number that the filter takes in, on the device.

    Attributes:
        scalar: its gradient is H.
        error: e.
        has_label: 1 if any frame has the label, else 0.
    """

    scalar: Tensor
    error: Tensor
    has_label: Tensor


def measure_energy(energy: Tensor, batch: Batch, weight: float) -> Measurement:
    """Return the measurement of the energies of a batch.

    Args:
        energy: (F,) eV.
        batch: frames with labels.
        weight: the factor c.
    """
    label, has_label = batch.labels[ENERGY], batch.has_label[ENERGY]  # (F,) each
    per_atom = weight * has_label / batch.num_atoms
    difference = label - energy.detach()
    return Measurement(
        (per_atom * _sign(difference) * energy).sum(),
        _error(per_atom * difference.abs(), has_label),
        has_label.max(),
    )


def measure_force(
    force: Tensor, batch: Batch, weight: float, numbers: Tensor
) -> Measurement:
    """Return the measurement of the forces on some atoms of each frame.

    Args:
        force: (A, 3) eV/angstrom.
        batch: frames with labels.
        weight: the factor c.
        numbers: (G,) from 0 to 1, on the device of the batch; number u is atom floor(u * N) of a
            frame of N atoms, in the order of the file.
    """
    has_label, sizes = batch.has_label[FORCE], batch.num_atoms
    # Atoms of a batch are sorted by type; in the order of the file the same numbers choose the same
    # atoms whatever the batch. An atom may be chosen twice.
    first = torch.cumsum(sizes, 0) - sizes
    chosen = first[:, None] + (numbers * sizes[:, None]).long()  # (F, G)
    predicted, label = (
        batch.in_file_order(values)[chosen] for values in (force, batch.labels[FORCE])
    )  # (F, G, 3) each
    per_atom = (weight * has_label / sizes)[:, None, None]
    difference = label - predicted.detach()
    measured = (per_atom * _sign(difference) * predicted).sum() / difference[0].numel()
    error = _error((per_atom * difference.abs()).mean((1, 2)), has_label)
    return Measurement(measured, error, has_label.max())


def _error(frame_errors: Tensor, has_label: Tensor) -> Tensor:
    """Return e of the errors (F,) of frames, which are 0 where a frame has no label."""
    count = has_label.sum().clamp(min=1)
    return count.sqrt() * frame_errors.sum() / count


def _sign(difference: Tensor) -> Tensor:
    """Return the sign of differences, 1 for 0, where ``torch.sign`` would lose the measurement."""
    return torch.where(difference < 0, -1.0, 1.0)
