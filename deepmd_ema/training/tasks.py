"""Tasks, each a model with its loss and its frames, and the mixture of them that a run trains.

A run of one task is a mixture with one entry.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepmd_ema.batch import Batch, PackedBatch
from deepmd_ema.config import RunConfig, TaskConfig
from deepmd_ema.config.schema.training import TrainingDataConfig, ValidationDataConfig
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.loader import PREFETCH, Loader
from deepmd_ema.data.run import TaskData, build_sampler
from deepmd_ema.data.source import FrameSource
from deepmd_ema.data.split import Split
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.training.loss import LOSSES, Loss
from deepmd_ema.utils import seed_for, stream_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """A model with its loss and its data.

    Attributes:
        name: of the task; empty when there is only one.
        config: its sections with ``sel`` resolved.
        train: training systems.
        valid: validation systems, empty without validation data.
        test: systems that are evaluated after the last step, maybe none.
        cache: neighbors found so far, of training and validation frames of all tasks.
        content: digest of the training data as they were opened.
        split: hash of the frames that were split off for validation; empty without.
        validated: digest of the validation data; empty where nothing compares it.
        models: the models of the run, through which that of the task is called: ranks may have
            sharded them as a whole.
        model: the one of its name, which it trains.
        loss: the weighted loss.
        accumulate: how many training batches a step takes.
        train_loader: training batches in their seeded order.
        display_loader: validation batches for the learning curve, or None.
    """

    name: str
    config: TaskConfig
    train: Sequence[FrameSource]
    valid: Sequence[FrameSource]
    test: Sequence[FrameSource]
    cache: PairCache
    content: str
    split: str
    validated: str
    models: ModelSet
    model: EnergyModel
    loss: Loss
    accumulate: int
    train_loader: Loader
    display_loader: Loader | None

    def next_display_batches(self) -> list[Batch | PackedBatch]:
        """Return the validation batches of the next row of the learning curve, maybe none.

        They are in host memory.
        """
        shown, loader = self.config.displayed_data, self.display_loader
        if loader is None or shown is None:
            return []
        return [next(loader) for _ in range(shown.numb_btch)]

    def frames_of_step(self, back: int) -> list[tuple[str, int]]:
        """Return system and index of the frames of a step of this task.

        Args:
            back: 1 for its last step, 2 for the one before it, ...
        """
        # the position counts batches; which frames a batch has is a function of its number, so that
        # nothing needs to be remembered in a step
        first = self.train_loader.position - back * self.accumulate
        return [
            frame
            for n in range(first, first + self.accumulate)
            for frame in self.train_loader.frames_at(n)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches that were consumed.

        Their order is a function of the seed and of the data.
        """
        sampler = self.train_loader.sampler
        consumed: dict[str, Any] = {
            "frames": self.train_loader.position,
            # the remaining ones show at a restart whether data and ranks are the same
            "num_frames": sum(sampler.num_frames),
            "content": self.content,
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
                "%svalidation_fraction splits off other frames than when the checkpoint was "
                "written, because the data have changed: the run may have been trained on frames "
                "that it is validated on now. Put the data back, or start a new run",
                (f"task {self.name}: " if self.name else ""),
            )
        suffix = f" of task {self.name}" if self.name else ""
        now = self.state_dict()
        before = {**now, **state}  # checkpoints of earlier versions lack some keys
        # the order of frames depends on their number: with another one the run continues, but not
        # with the frames that it would have had
        if before["num_frames"] != now["num_frames"]:
            logger.warning(
                "the training data%s have %d frames now and had %d when the checkpoint was "
                "written: they come in another order from here on",
                suffix,
                now["num_frames"],
                before["num_frames"],
            )
        if before["frames_per_step"] != now["frames_per_step"]:
            logger.warning(
                "a step%s has %.4g frames on average now, over all ranks together, and had %.4g "
                "when the checkpoint was written",
                suffix,
                now["frames_per_step"],
                before["frames_per_step"],
            )
        self.train_loader.seek(int(state["frames"]))
        if self.display_loader is not None:
            self.display_loader.seek(int(state.get("display_frames", 0)))

    def close(self) -> None:
        """Stop the background readers."""
        self.train_loader.close()
        if self.display_loader is not None:
            self.display_loader.close()


class TaskMixture:
    """Draws the task of each step with given probabilities, a function of the seed and the step.

    Args:
        tasks: in the order of the input.
        shares: of the steps of the run, in the same order.
        seed: of the run.
    """

    def __init__(
        self, tasks: Iterable[Task], shares: Iterable[float], seed: int
    ) -> None:
        self._tasks = tuple(tasks)
        self._seed = seed
        self._cumulative = np.cumsum(
            [*shares]
        )  # upper ends of the intervals of the tasks

    def __iter__(self) -> Iterator[Task]:
        return iter(self._tasks)

    def draw(self, step: int) -> Task:
        """Return the task of ``step``."""
        if len(self._tasks) == 1:
            return self._tasks[0]
        # every rank draws the same task: the seed is shared, only frames differ between ranks
        number = np.random.default_rng(seed_for("task", self._seed, step)).random()
        # the last end may be below 1 by rounding, and the number above it
        return self._tasks[
            min(
                int(np.searchsorted(self._cumulative, number, side="right")),
                len(self._tasks) - 1,
            )
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in every task's frames."""
        return {task.name: task.state_dict() for task in self._tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue every task's frames; a checkpoint of other tasks is refused."""
        names = [task.name for task in self._tasks]
        if sorted(state) != sorted(names):
            raise CheckpointError(
                f"the checkpoint holds tasks {sorted(state)}, the input names {sorted(names)}"
            )
        for task in self._tasks:
            task.load_state_dict(state[task.name])

    def close(self) -> None:
        """Stop the background readers of all tasks."""
        for task in self._tasks:
            task.close()


def build_task(
    config: RunConfig,
    name: str,
    data: TaskData,
    content: str,
    split: Split | None,
    validated: str,
    models: ModelSet,
    cache: PairCache,
    seed: int,
    world: World,
) -> Task:
    """Return a task of a run.

    Args:
        config: of the run, with ``sel`` resolved.
        name: of the task.
        data: its frames.
        content: digest of the training data.
        split: which of them were split off for validation; None: none.
        validated: digest of the validation data.
        models: those of the run.
        cache: neighbors of the frames of all tasks.
        seed: of the run.
        world: the processes that share each batch.
    """
    task = config.tasks[name]
    model = models.by_task[name]
    training = config.training
    shown = task.displayed_data if training.disp_training else None
    # all batches of the next step are made while a step runs; page-locked memory, from which a copy
    # to a GPU does not wait
    ahead, pin = max(PREFETCH, training.accumulate), world.device.type == "cuda"

    def loader(
        options: TrainingDataConfig | ValidationDataConfig,
        systems: Sequence[FrameSource],
        stream: str,
    ) -> Loader:
        """Return the loader of batches of some systems, in the order of a random stream."""
        # one seed on all ranks, over which the sampler distributes the frames of a step
        sampler = build_sampler(
            options,
            systems,
            seed=seed_for(stream_of(stream, name), seed),
            rank=world.rank,
            world_size=world.size,
        )
        return Loader(systems, sampler, model.layout, 0, ahead, pin, cache, task.labels)

    return Task(
        name,
        task,
        *data,
        cache,
        content,
        split.digest if split is not None else "",
        validated,
        models,
        model,
        LOSSES[task.loss.type](
            task.loss, config.learning_rate.start_lr, world, task.model
        ),
        training.accumulate,
        loader(task.data.training_data, data.train, "frames"),
        loader(shown, data.valid, "display frames") if shown is not None else None,
    )
