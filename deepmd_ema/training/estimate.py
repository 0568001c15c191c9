"""The cost of a run on this machine, from some of its steps, taken in a folder that is removed afterwards."""

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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepmd_ema.allocator import peak_memory
from deepmd_ema.config import RunConfig, to_dict
from deepmd_ema.config.outputs import Schedule
from deepmd_ema.config.paths import with_absolute_paths
from deepmd_ema.dist.launch import TURN_S
from deepmd_ema.errors import Interrupted, UserError
from deepmd_ema.training.run import TrainRequest, run_training
from deepmd_ema.training.trainer import Callback, Trainer

_FIRST = 2  # steps that prepare memory and caches, not counted
_NEW, _KNOWN = 12, 28  # steps whose frames are new, and then those with neighbors in the cache
_SHOWN_EVERY = 8  # steps between two rows, of which some must be measured
_NEVER = 10**9


@dataclass(frozen=True)
class Cost:
    """The measured cost of a run; times are in seconds.

    Attributes:
        num_steps: steps of the run.
        epoch_steps: steps of the first epoch.
        rows: rows of the learning curve in the run.
        validations: of all validation frames in the run.
        checkpoints: in the run.
        start: from the command to the first step, with the checks of the data.
        new_step: mean time of a step of the first epoch, in which neighbors are searched.
        step: mean time of a later step.
        row: mean time of a row.
        first_validation: time of the first validation, in which neighbors are searched; 0 if there is none.
        validation: time of a later one.
        checkpoint: mean time of a step that is spent on a checkpoint.
        end: after the last step, with the last checkpoint.
        memory: largest memory of the process, bytes; with the neighbors of all frames.
        gpu_memory: largest memory of a CUDA device, bytes; 0 on a CPU.
        measured: steps that were measured.
    """

    num_steps: int
    epoch_steps: int
    rows: int
    validations: int
    checkpoints: int
    start: float
    new_step: float
    step: float
    row: float
    first_validation: float
    validation: float
    checkpoint: float
    end: float
    memory: int
    gpu_memory: int
    measured: int

    @property
    def steps(self) -> float:
        """Seconds of all steps."""
        new = min(self.num_steps, self.epoch_steps)
        return new * self.new_step + (self.num_steps - new) * self.step

    @property
    def events(self) -> float:
        """Seconds of rows, validations and checkpoints but the last one, which is a part of ``end``."""
        validations = self.first_validation + (self.validations - 1) * self.validation if self.validations else 0.0
        return self.rows * self.row + validations + max(0, self.checkpoints - 1) * self.checkpoint

    @property
    def total(self) -> float:
        """Seconds of the run."""
        return self.start + self.steps + self.events + self.end


def measure_steps(config: RunConfig, device: str | None = None, seconds: float = 15.0) -> Cost:
    """Return the cost of a run, from steps, validations and a checkpoint of it in a process of its own.

    Counted are the start of the program, the checks of the data, statistics, compilation, steps with and without a
    search for neighbors, rows, validations, checkpoints, and the end; not TensorBoard and
    ``change_bias_after_training``. Nothing is written but to a temporary folder. The frames differ, so the mean of some
    steps has an error.

    Args:
        config: of the run.
        device: as for a run.
        seconds: after which no further step is measured; one is in any case.

    Raises:
        UserError: for mistakes in the data.
    """
    values = _with_files_in_here(with_absolute_paths(to_dict(config), "."))
    measure = partial(
        _measure, device=device, seconds=seconds, validates=Schedule(config, 1).validation is not None, path=sys.path
    )
    with tempfile.TemporaryDirectory(prefix="dp-ema-") as folder:
        Path(folder, "input.json").write_text(json.dumps(values))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            try:
                found = pool.submit(measure, folder, time.time()).result()
            except BrokenProcessPool:
                raise UserError(
                    "The process that measured the steps was killed, perhaps for lack of memory. Use a smaller "
                    "batch_size, or a machine with more memory."
                ) from None
    schedule = Schedule(config, found["num_steps"])
    return Cost(
        rows=schedule.rows.count(),
        validations=schedule.validation.count() if schedule.validation is not None else 0,
        checkpoints=schedule.checkpoint.count(),
        **found,
    )


def _with_files_in_here(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of an input whose run writes into the folder where it is started, and validates at its end only."""
    training, validating = values["training"], values["validating"]
    training = {name: value for name, value in training.items() if name not in ("save_dir", "cache_dir")}
    training = _without_writing_statistics(training) | {
        "save_ckpt": "model.ckpt",
        "disp_file": "lcurve.out",
        "disp_freq": _SHOWN_EVERY,
        "tensorboard": False,
        "loggers": [],
    }
    if "data_dict" in training:
        tasks = training["data_dict"].items()
        training["data_dict"] = {task: _without_writing_statistics(of) for task, of in tasks}
    validating = {name: value for name, value in validating.items() if name != "save_best_dir"}
    validating["full_val_file"] = "val.log"
    if validating.get("full_val_start") != 1:
        validating |= {"validation_freq": _NEVER, "full_val_start": 0.0}
    return {**values, "training": training, "validating": validating}


def _without_writing_statistics(section: dict[str, Any]) -> dict[str, Any]:
    if section.get("stat_file_mode") == "read":
        return section
    return {name: value for name, value in section.items() if not name.startswith("stat_file")}


class _Stopwatch(Callback):
    """Measures the parts of a run, and ends it.

    Args:
        seconds: after which no further step is taken.
        validates: whether to validate before the end.
    """

    def __init__(self, seconds: float, validates: bool) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.first_step = self.stopped = self.within = 0.0
        self.num_steps = self.epoch_steps = self.num_new = self.more_memory = 0
        self._seconds, self._validates = seconds, validates

    def on_start(self, trainer: Trainer) -> None:
        self.num_steps, self.epoch_steps = trainer.num_steps, math.ceil(trainer.prepared.length.steps_per["epochs"])
        self.first_step = time.perf_counter()

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        begin, before = time.perf_counter(), self.within
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            took = time.perf_counter() - begin
            own = took - (self.within - before)  # a step holds what is due after it
            self.within = before + took
            self.spent[phase].append(own)

    def during(self, trainer: Trainer, phase: str) -> Any:
        return self._measured(phase)

    def after_step(self, trainer: Trainer) -> None:
        step, spent = trainer.step, time.perf_counter() - self.first_step
        if step == min(_FIRST + _NEW, self.epoch_steps) and spent < self._seconds / 2:
            self.num_new = step
            _search_neighbors_ahead(trainer, _KNOWN)
        if step == trainer.num_steps or step >= _FIRST + _NEW + _KNOWN or (spent > self._seconds and step > _FIRST):
            while self._validates and len(self.spent["validation"]) < 2:
                with self._measured("validation"):
                    trainer.validator.run(step, trainer.saver, lambda: False, lambda weights: None)
                if self.spent["validation"][0] > self._seconds / 3:
                    break
            self.more_memory = _growth_of_cache(trainer)
            self.stopped = time.perf_counter()
            trainer.stop.request(signal.SIGTERM)


def _search_neighbors_ahead(trainer: Trainer, num_steps: int) -> None:
    """Have the neighbors of the next steps in the cache, as they are after the first epoch."""
    for task in trainer.tasks:
        loader, layout = task.train_loader, task.models.by_task[task.name].layout
        for number in range(loader.position, loader.position + num_steps * task.accumulate):
            for system, frame in loader.sampler.batch(number):
                loader.cache.get(loader.systems[system], frame, layout)


def _growth_of_cache(trainer: Trainer) -> int:
    """Return by how much the neighbors in memory will still grow during the run, bytes."""
    cache = next(iter(trainer.tasks)).train_loader.cache
    part = min(1.0, trainer.num_steps / trainer.prepared.length.steps_per["epochs"])
    frames = sum(part * sum(task.train_loader.sampler.num_frames) for task in trainer.tasks)
    frames += sum(source.num_frames for task in trainer.validator.tasks.values() for source in task.valid)
    if not len(cache):
        return 0
    whole = min(cache.max_bytes, cache.num_bytes * max(1.0, frames / len(cache)))
    return int(whole) - cache.num_bytes


def _measure(
    folder: str, began: float, device: str | None, seconds: float, validates: bool, path: list[str]
) -> dict[str, Any]:
    """Return the times and the memory of steps of an input in a folder; a process of its own runs this, silently.

    Args:
        folder: of the input.
        began: time of day when the process was started.
        device: as for a run.
        seconds: see :func:`measure_steps`.
        validates: whether the run validates all validation frames.
        path: in which modules are found.
    """
    loaded = time.time() - began
    entered = time.perf_counter()
    sys.path[:] = path
    os.chdir(folder)
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    sys.setswitchinterval(TURN_S)  # as `dp-ema train` does
    watch = _Stopwatch(seconds, validates)
    with suppress(Interrupted):
        run_training(TrainRequest("input.json", device=device), callback=watch)
    end = time.perf_counter() - watch.stopped
    steps, rows, validations = (watch.spent[phase] for phase in ("step", "display", "validation"))
    counted = steps[_FIRST:] or steps
    new, known = steps[_FIRST : watch.num_new], steps[watch.num_new :]
    is_known = 0 < len(new) < len(counted) and _mean(new) > _mean(known)
    mean = _mean(known if is_known else counted)
    new_step = _mean(new) if is_known else mean
    whole = loaded + watch.first_step - entered + sum(steps[:_FIRST]) - new_step * len(steps[:_FIRST])
    return {
        "num_steps": watch.num_steps,
        "epoch_steps": watch.epoch_steps,
        "start": max(whole, 0.0),
        "new_step": new_step,
        "step": mean,
        "row": _mean(rows[1:] or rows),
        "first_validation": _mean(validations[:1]),
        "validation": _mean(validations[1:] or validations),
        "checkpoint": _mean(watch.spent["checkpoint"]),
        "end": end,
        "memory": peak_memory() + watch.more_memory,
        "gpu_memory": torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0,
        "measured": len(counted),
    }


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
