"""Output bias or output layer of the weights of a run, fitted to its training frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from deepmd_ema.config import RunConfig
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import atoms_at_once, sequential_batches
from deepmd_ema.data.run import TaskData
from deepmd_ema.infer.solve import MAX_FRAMES, chosen_frames, fit_bias, loss_weights, solve_last_layer
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.tensors import prefix_of

LAYER, BIAS = "layer", "bias"
PARTS = {LAYER: "output layer and bias", BIAS: "output bias"}


@dataclass(frozen=True)
class Fit:
    """Fits a part of the models of a run to its training frames, all other weights fixed.

    Attributes:
        part: ``layer`` or ``bias``.
        config: of the run.
        data: of each task.
        models: of the run, on the device.
        cache: neighbor lists to share.
        num_steps: of the run, as planned.
        step: the last one.
        say: prints a text.
    """

    part: str
    config: RunConfig
    data: Mapping[str, TaskData]
    models: ModelSet
    cache: PairCache
    num_steps: int
    step: int
    say: Callable[[str], Any]

    def __call__(self, weights: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
        """Return the fitted tensors of all tasks by their names; none where no change is better.

        Args:
            weights: of all models.
            name: of the weights, for what is printed.
        """
        self.models.load_state_dict(weights)
        fitted: dict[str, Tensor] = {}
        for task in self.config.tasks.values():
            model, train = self.models.by_task[task.name], self.data[task.name].train
            frames = chosen_frames(task, train, self.config.training.seed or 0, MAX_FRAMES)
            if self.part == BIAS:
                most = atoms_at_once(model.out_bias.device)
                batches = sequential_batches(train, model.layout, self.cache, most, frames=frames)
                found = fit_bias(model, task.model, batches)
            else:
                prefactors = loss_weights(task.loss, self.config.learning_rate, self.num_steps, self.step)
                found = solve_last_layer(model, train, frames, prefactors, task.loss.intensive_ener_virial, self.cache)
            row = f"{task.name} {name}" if task.name else name
            self.say(f"{PARTS[self.part]} fitted with the weights {row}: {found.summary}")
            fitted |= {prefix_of(task.name) + key: tensor for key, tensor in found.tensors.items()}
        return fitted
