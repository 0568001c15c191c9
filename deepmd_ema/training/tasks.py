"""A task is a model with its loss and its frames; a run trains a mixture of them, of one in the simplest case."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.data.loader import PREFETCH, Loader, Pad
from deepmd_ema.data.run import build_sampler
from deepmd_ema.data.source import FrameSource
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.training.loss import EnergyLoss
from deepmd_ema.training.modes import pads
from deepmd_ema.training.prepare import PreparedRun, PreparedTask
from deepmd_ema.utils import seed_for, stream_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A model with its loss and its data.

    Attributes:
        name: the task's name; empty when there is only one.
        models: the models of the run, on the device they compute on; this task trains the one of its name.
        loss: the weighted loss.
        train_loader: training batches in their seeded order.
        accumulate: how many of them a step takes.
        display_loader: validation batches for the learning curve, or None.
        display_batches: how many of them one row of the learning curve uses.
        split: hash of the frames that were split off for validation; empty without.
    """

    name: str
    models: ModelSet
    loss: EnergyLoss
    train_loader: Loader
    accumulate: int = 1
    display_loader: Loader | None = None
    display_batches: int = 1
    split: str = ""

    def next_batches(self) -> list[Batch | PackedBatch]:
        """Return the training batches of the next step, in host memory."""
        return [next(self.train_loader) for _ in range(self.accumulate)]

    def frames_of_step(self, back: int) -> list[tuple[str, int]]:
        """Return the origin of the frames of the last step of this task (``back`` 1), or of one before it."""
        first = self.train_loader.position - back * self.accumulate
        return [frame for n in range(first, first + self.accumulate) for frame in self.train_loader.frames_at(n)]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that were consumed; their order is a function of the seed and of the data."""
        sampler = self.train_loader.sampler
        consumed: dict[str, Any] = {
            "frames": self.train_loader.position,
            "num_frames": sum(sampler.num_frames),
            # mean number, of all ranks together
            "frames_per_step": self.accumulate * sampler.frames_per_step,
        }
        if self.display_loader is not None:
            consumed["display_frames"] = self.display_loader.position
        if self.split:
            consumed["split"] = self.split
        return consumed

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the batches that ``state`` says were consumed."""
        if self.split and state.get("split", self.split) != self.split:
            logger.warning(
                "%svalidation_fraction splits off other frames than when the checkpoint was written, because the data "
                "have changed: the run may have been trained on frames that it is validated on now. Put the data back, "
                "or start a new run",
                f"task {self.name}: " * bool(self.name),
            )
        of_task = f" of task {self.name}" * bool(self.name)
        now = self.state_dict()
        before = {**now, **state}
        if before["num_frames"] != now["num_frames"]:
            logger.warning(
                "the training data%s have %d frames now and had %d when the checkpoint was written: they come in "
                "another order from here on",
                of_task, now["num_frames"], before["num_frames"],
            )  # fmt: skip
        if before["frames_per_step"] != now["frames_per_step"]:
            logger.warning(
                "a step%s has %.4g frames on average now, over all ranks together, and had %.4g when the checkpoint "
                "was written",
                of_task, now["frames_per_step"], before["frames_per_step"],
            )  # fmt: skip
        self.train_loader.seek(int(state["frames"]))
        if self.display_loader is not None:
            self.display_loader.seek(int(state.get("display_frames", 0)))

    def close(self) -> None:
        """Stop the background readers."""
        self.train_loader.close()
        if self.display_loader is not None:
            self.display_loader.close()


class TaskMixture:
    """Draws the task of each step, with given probabilities, as a function of the seed and the step.

    Args:
        prepared: models, frames and shares of the tasks of a run.
        world: the processes of the run.
    """

    def __init__(self, prepared: PreparedRun, world: World) -> None:
        config, self._seed = prepared.config, prepared.seed
        self._accumulate = config.training.accumulate
        self._tasks: list[Task] = []
        for name, task in prepared.tasks.items():
            make = partial(_build_loader, task, prepared.seed, world, self._accumulate)
            valid = task.config.displayed_data if config.training.disp_training else None
            pad, display_pad = pads(config, world, task.model.layout)
            self._tasks.append(
                Task(
                    name,
                    prepared.models,
                    EnergyLoss(task.config.loss, config.learning_rate.start_lr, world),
                    train_loader=make(task.train, task.config.training_data, "frames", pad),
                    accumulate=self._accumulate,
                    display_loader=make(task.valid, valid, "display frames", display_pad) if valid else None,
                    display_batches=valid.numb_btch if valid is not None else 1,
                    split=task.split,
                )
            )
        self._cumulative = np.cumsum([prepared.length.tasks[task.name].share for task in self._tasks])

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def draw(self, step: int) -> Task:
        """Return the task of ``step``."""
        if len(self._tasks) == 1:
            return self._tasks[0]
        # every rank draws the same task: the seed is shared, only frames differ between ranks
        number = np.random.default_rng(seed_for("task", self._seed, step)).random()
        return self._tasks[min(int(np.searchsorted(self._cumulative, number, side="right")), len(self._tasks) - 1)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in every task's frames."""
        return {task.name: task.state_dict() for task in self._tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue every task's frames; a checkpoint of other tasks is refused."""
        names = [task.name for task in self._tasks]
        if sorted(state) != sorted(names):
            raise CheckpointError(f"the checkpoint holds tasks {sorted(state)}, the input names {sorted(names)}")
        for task in self._tasks:
            task.load_state_dict(state[task.name])

    def close(self) -> None:
        """Stop the background readers of all tasks."""
        for task in self._tasks:
            task.close()


def _build_loader(
    task: PreparedTask,
    seed: int,
    world: World,
    accumulate: int,
    systems: Sequence[FrameSource],
    data: Any,
    stream: str,
    pad: Pad | None,
) -> Loader:
    seed = seed_for(stream_of(stream, task.config.name), seed)
    sampler = build_sampler(data, systems, seed=seed, rank=world.rank, world_size=world.size)
    pin, labels = world.device.type == "cuda", task.config.loss.labels
    # those of the next step are made beside a step
    ahead = max(PREFETCH, accumulate)
    return Loader(systems, sampler, task.model.layout, 0, ahead, pin, task.cache, labels, pad)
