"""The cost of a run on this machine, measured in some of its steps in a temporary folder."""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from deepmd_ema.config import RunConfig, to_dict
from deepmd_ema.config.outputs import Schedule, with_absolute_paths
from deepmd_ema.distributed.launch import TURN_S
from deepmd_ema.errors import Interrupted, UserError
from deepmd_ema.training.run import TrainRequest, run_training
from deepmd_ema.training.trainer import Callback, Trainer
from deepmd_ema.utils import peak_memory

_FIRST = 2  # steps that prepare memory and caches, not counted
# steps whose frames are new; as many follow with the same frames, whose neighbors are in the cache
_NEW = 14
_SHOWN_EVERY = 8  # steps between two rows, of which some must be measured


@dataclass(frozen=True)
class Cost:
    """The measured cost of a run, by the names in the document of ``dp-ema check --json``.

    Attributes:
        start_s: from the command to the first step, with the checks of the data.
        step_s: mean time of a step after the first epoch.
        row_s: mean time of a row.
        first_validation_s: time of the first validation, in which neighbors are searched; 0 if
            there is none.
        validation_s: time of a later one.
        checkpoint_s: mean time of a step that is spent on a checkpoint.
        end_s: after the last step, with the last checkpoint.
        rows: rows of the learning curve in the run.
        validations: of all validation frames in the run.
        checkpoints: in the run.
        steps: steps of the run.
        steps_of_first_epoch: those of the run, or more.
        step_of_first_epoch_s: mean time of a step of the first epoch, in which neighbors are
            searched.
        steps_measured: steps that were measured.
        memory_bytes: largest memory of the process, with the neighbors of all frames.
        gpu_memory_bytes: largest memory of a CUDA device; 0 on a CPU.
    """

    start_s: float
    step_s: float
    row_s: float
    first_validation_s: float
    validation_s: float
    checkpoint_s: float
    end_s: float
    rows: int
    validations: int
    checkpoints: int
    steps: int
    steps_of_first_epoch: int
    step_of_first_epoch_s: float
    steps_measured: int
    memory_bytes: int
    gpu_memory_bytes: int

    @property
    def events_s(self) -> float:
        """Time of rows, validations and checkpoints, without the last one, a part of ``end_s``."""
        validations_s = 0.0
        if self.validations:
            later_s = (self.validations - 1) * self.validation_s
            validations_s = later_s + self.first_validation_s
        checkpoints_s = max(0, self.checkpoints - 1) * self.checkpoint_s
        return self.rows * self.row_s + validations_s + checkpoints_s

    @property
    def total_s(self) -> float:
        """Time of the run."""
        new = min(self.steps, self.steps_of_first_epoch)
        times = (
            self.start_s
            + new * self.step_of_first_epoch_s
            + (self.steps - new) * self.step_s
        )
        return times + self.events_s + self.end_s


def measure_steps(
    config: RunConfig, device: str | None = None, seconds: float = 15.0
) -> Cost:
    """Return the cost of a run, measured in a process of its own.

    It takes steps, validations and a checkpoint of the run. Counted are the start of the program,
    the checks of the data, statistics, compilation, steps with and without a search for neighbors,
    rows, validations, checkpoints, and the end; not TensorBoard and ``change_bias_after_training``.
    Nothing is written but to a temporary folder. The frames differ, so the mean of some steps has
    an error.

    Args:
        config: of the run.
        device: as for a run.
        seconds: after which no further step is measured; one is in any case.

    Raises:
        UserError: for mistakes in the data.
    """
    # files of the run are written where it is started, statistics and runs of loggers not at all
    values = with_absolute_paths(to_dict(config), ".")
    training, validating = values["training"], values["validating"]
    for section in (training, *training.get("data_dict", {}).values()):
        if section.get("stat_file_mode") != "read":
            for name in [name for name in section if name.startswith("stat_file")]:
                del section[name]
    for section, name in (
        (training, "save_dir"),
        (training, "cache_dir"),
        (validating, "save_best_dir"),
    ):
        section.pop(name, None)
    # plain names, so that all files of the run are in the temporary folder
    training |= {
        "save_ckpt": "model.ckpt",
        "disp_file": "lcurve.out",
        "tensorboard": False,
        "loggers": [],
    }
    training["disp_freq"] = _SHOWN_EVERY
    validating |= {"full_val_file": "val.log"}
    if validating.get("full_val_start") != 1:
        # no validation among the steps: the stopwatch makes those that it measures
        validating |= {"validation_freq": 10**9, "full_val_start": 0.0}
    # a process of its own: its memory, threads and working folder are those of a run, and a run
    # that is killed for lack of memory does not take this one with it
    with tempfile.TemporaryDirectory(prefix="dp-ema-") as folder:
        Path(folder, "input.json").write_text(json.dumps(values))
        with ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            try:
                facts = pool.submit(
                    _measure, folder, time.time(), device, seconds, sys.path
                ).result()
            except BrokenProcessPool:
                raise UserError(
                    "The process that measured the steps was killed, perhaps for lack of memory. "
                    "Use a smaller batch_size, or a machine with more memory."
                ) from None
    schedule = Schedule(config, facts["steps"])
    validations = schedule.validation.count() if schedule.validation is not None else 0
    return Cost(
        rows=schedule.rows.count(),
        validations=validations,
        checkpoints=schedule.checkpoint.count(),
        **facts,
    )


class _Stopwatch(Callback):
    """Measures the parts of a run, and ends it after some ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.within = 0.0  # seconds of all phases that have ended
        self.num_new = 0  # steps before the same frames come again; 0: they do not
        self.spent: dict[str, list[float]] = defaultdict(list)  # by phase

    def on_start(self, trainer: Trainer) -> None:
        self.num_steps = trainer.num_steps
        self.epoch_steps = math.ceil(trainer.prepared.length.steps_per["epochs"])
        self.first_step = time.perf_counter()

    @contextmanager
    def during(self, trainer: Trainer, phase: str) -> Iterator[None]:
        begin, before = time.perf_counter(), self.within
        try:
            yield
        finally:
            if (
                torch.cuda.is_initialized()
            ):  # else the work of a phase would count in a later one
                torch.cuda.synchronize()
            took = time.perf_counter() - begin
            # a step contains the phases that are due after it: their time is not its own
            self.spent[phase].append(took - (self.within - before))
            self.within = before + took

    def after_step(self, trainer: Trainer) -> None:
        step, spent = trainer.step, time.perf_counter() - self.first_step
        if step == min(_NEW, self.epoch_steps) and spent < self.seconds / 2:
            self.num_new = step
            for task in trainer.tasks:
                task.train_loader.seek(0)  # the same frames, as in a later epoch
        is_enough = step >= 2 * _NEW or (spent > self.seconds and step > _FIRST)
        if step < trainer.num_steps and not is_enough:
            return
        # two validations, the second with neighbors in the cache, unless the first took too long
        while (
            trainer.validator.rows
            and trainer.schedule.validation
            and len(self.spent["validation"]) < 2
        ):
            with self.during(trainer, "validation"):
                trainer.validator.run(
                    step, trainer.saver, lambda: False, lambda weights: None
                )
            if self.spent["validation"][0] > self.seconds / 3:
                break
        # neighbors in memory will still grow during the run
        tasks, length = list(trainer.tasks), trainer.prepared.length
        cache = tasks[0].train_loader.cache  # all tasks share it
        part = min(
            1.0, trainer.num_steps / length.steps_per["epochs"]
        )  # share of an epoch
        frames = sum(part * sum(task.train_loader.sampler.num_frames) for task in tasks)
        frames += sum(
            source.num_frames
            for task in trainer.validator.tasks.values()
            for source in task.valid
        )
        growth = max(1.0, frames / len(cache)) if len(cache) else 1.0
        self.more_memory = (
            int(min(cache.max_bytes, cache.num_bytes * growth)) - cache.num_bytes
        )
        self.stopped = time.perf_counter()
        trainer.stop.request(signal.SIGTERM)


def _measure(
    folder: str, began: float, device: str | None, seconds: float, path: list[str]
) -> dict[str, Any]:
    """Return the times and the memory of steps of an input; run silently in its own process.

    Args:
        folder: of the input.
        began: time of day when the process was started.
        device: as for a run.
        seconds: see :func:`measure_steps`.
        path: in which modules are found.
    """
    # the start of the program by the time of day, the only clock that two processes share
    loaded, entered = time.time() - began, time.perf_counter()
    sys.path[:] = path
    os.chdir(folder)
    # libraries that are not written in Python write to stderr as well
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.setswitchinterval(TURN_S)  # as `dp-ema train` does
    watch = _Stopwatch(seconds)
    with suppress(Interrupted):
        run_training(TrainRequest("input.json", device=device), callback=watch)
    end = time.perf_counter() - watch.stopped

    def mean(times: list[float]) -> float:
        return fmean(times) if times else 0.0

    steps = watch.spent["step"]
    rows = watch.spent["display"]
    validations = watch.spent["validation"]
    counted = steps[_FIRST:] or steps
    step = new_step = mean(counted)
    # steps with and without a search for neighbors; the first ones of each part are not counted
    new = mean(steps[_FIRST : watch.num_new])
    later = mean(steps[watch.num_new :][_FIRST:])
    if new > later > 0:  # else there are too few steps, or it makes no difference
        step, new_step = later, new
    # the time that the first steps take longer than others is a part of the start
    longer = sum(steps[:_FIRST]) - new_step * len(steps[:_FIRST])
    start = loaded + watch.first_step - entered + longer
    return {
        "steps": watch.num_steps,
        "steps_of_first_epoch": watch.epoch_steps,
        "start_s": max(start, 0.0),
        "step_of_first_epoch_s": new_step,
        "step_s": step,
        "row_s": mean(rows[1:] or rows),
        "first_validation_s": mean(validations[:1]),
        "validation_s": mean(validations[1:] or validations),
        "checkpoint_s": mean(watch.spent["checkpoint"]),
        "end_s": end,
        "memory_bytes": peak_memory() + watch.more_memory,
        "gpu_memory_bytes": torch.cuda.max_memory_reserved()
        if torch.cuda.is_initialized()
        else 0,
        "steps_measured": len(counted),
    }
