"""The cost of a run on this machine, from some of its steps, taken in a folder that is removed afterwards."""

from __future__ import annotations

import json
import logging
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
from typing import Any

import torch

from deepmd_ema.allocator import peak_memory
from deepmd_ema.config import RunConfig, to_dict
from deepmd_ema.config.paths import with_absolute_paths
from deepmd_ema.errors import Interrupted, UserError, counted
from deepmd_ema.report.progress import duration
from deepmd_ema.training.loop.trainer import Callback, Trainer
from deepmd_ema.training.run import TrainRequest, run_training

_FIRST = 2  # steps that prepare memory and caches, not counted
_VALIDATED_EVERY = 4
_MAX_STEPS = 40


@dataclass(frozen=True)
class Cost:
    """The measured cost of a run.

    Attributes:
        num_steps: steps of the run.
        validations: of all validation frames in the run.
        checkpoints: in the run.
        start: seconds until the first step, with the checks of the data.
        step: mean seconds of a step.
        validation: mean seconds of a validation of all frames; 0 if there is none.
        checkpoint: mean seconds of a step that are spent on a checkpoint.
        memory: largest memory of the process, bytes.
        gpu_memory: largest memory of a CUDA device, bytes; 0 on a CPU.
        measured: steps that were measured.
    """

    num_steps: int
    validations: int
    checkpoints: int
    start: float
    step: float
    validation: float
    checkpoint: float
    memory: int
    gpu_memory: int
    measured: int

    @property
    def total(self) -> float:
        """Seconds of the run."""
        rest = self.validations * self.validation + self.checkpoints * self.checkpoint
        return self.start + self.num_steps * self.step + rest

    def lines(self) -> list[str]:
        """Return lines for the user."""
        parts = [f"{self.step:.2g} s a step", f"{self.start:.2g} s to the first"]
        if self.validations:
            parts.append(f"{counted(self.validations, 'validation')} of {self.validation:.2g} s")
        if self.checkpoint >= 0.01 * self.step:
            parts.append(f"{counted(self.checkpoints, 'checkpoint')} of {self.checkpoint:.2g} s")
        on_gpu = f", {self.gpu_memory / 1e9:.2g} GB of the GPU" if self.gpu_memory else ""
        return [
            f"Time: {duration(self.total)} for {counted(self.num_steps, 'step')} on this machine as it is now "
            f"({', '.join(parts)}; {counted(self.measured, 'step')} measured)",
            f"Memory measured: {self.memory / 1e9:.2g} GB{on_gpu}",
        ]


def measure_steps(config: RunConfig, device: str | None = None, seconds: float = 15.0) -> Cost:
    """Return the cost of a run, from steps, validations and a checkpoint of it in a process of its own.

    Nothing is written but to a temporary folder. The frames differ, so the mean of some steps has an error; where the
    first steps compile code, they are not counted.

    Args:
        config: of the run.
        device: as for a run.
        seconds: after which no further step is measured; four are in any case.

    Raises:
        UserError: for mistakes in the data.
    """
    values = _with_files_in_here(with_absolute_paths(to_dict(config), "."))
    with tempfile.TemporaryDirectory(prefix="dp-ema-") as folder:
        Path(folder, "input.json").write_text(json.dumps(values))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn) as pool:
            try:
                found = pool.submit(_measure, folder, device, seconds, sys.path).result()
            except BrokenProcessPool:
                raise UserError(
                    "The process that measured the steps was killed, perhaps for lack of memory. Use a smaller "
                    "batch_size, or a machine with more memory."
                ) from None
    steps, validating = found["num_steps"], config.validating
    start = validating.full_val_start
    validations = 0
    if start != 1 and config.fully_validated:
        validations = _times(int(start * steps) if start < 1 else int(start), validating.validation_freq, steps)
    return Cost(validations=validations, checkpoints=_times(0, config.training.save_freq, steps), **found)


def _times(first: int, every: int, steps: int) -> int:
    """Return the number of events that come every so many steps, from ``first`` on, and after the last step."""
    due = range(first or every, steps + 1, every) if every > 0 else ()
    return len(due) + (steps not in due)


def _with_files_in_here(values: dict[str, Any]) -> dict[str, Any]:
    """Return values of an input whose run writes into the folder where it is started, and validates early."""
    training, validating = values["training"], values["validating"]
    training = {name: value for name, value in training.items() if name not in ("save_dir", "cache_dir")}
    training = _without_writing_statistics(training) | {
        "save_ckpt": "model.ckpt",
        "disp_file": "lcurve.out",
        "tensorboard": False,
        "loggers": [],
    }
    if "data_dict" in training:
        tasks = training["data_dict"].items()
        training["data_dict"] = {task: _without_writing_statistics(of) for task, of in tasks}
    validating = {name: value for name, value in validating.items() if name != "save_best_dir"}
    validating["full_val_file"] = "val.log"
    if validating.get("full_val_start") != 1:
        validating |= {"validation_freq": _VALIDATED_EVERY, "full_val_start": 0.0}
    return {**values, "training": training, "validating": validating}


def _without_writing_statistics(section: dict[str, Any]) -> dict[str, Any]:
    if section.get("stat_file_mode") == "read":
        return section
    return {name: value for name, value in section.items() if not name.startswith("stat_file")}


class _Stopwatch(Callback):
    """Measures the parts of a run, and ends it."""

    def __init__(self, seconds: float) -> None:
        self.spent: dict[str, list[float]] = defaultdict(list)
        self.num_steps = 0
        self.first_step = 0.0
        self._seconds, self._within = seconds, 0.0

    def on_start(self, trainer: Trainer) -> None:
        self.num_steps, self.first_step = trainer.num_steps, time.perf_counter()

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        begin, before = time.perf_counter(), self._within
        try:
            yield
        finally:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            took = time.perf_counter() - begin
            own = took - (self._within - before)  # a step holds what is due after it
            self._within = before + took
            self.spent[phase].append(own)

    def during(self, trainer: Trainer, phase: str) -> Any:
        return self._measured(phase)

    def after_step(self, trainer: Trainer) -> None:
        late = time.perf_counter() - self.first_step > self._seconds
        if (late and trainer.step >= _VALIDATED_EVERY) or trainer.step >= _MAX_STEPS:
            trainer.stop.request(signal.SIGTERM)


def _measure(folder: str, device: str | None, seconds: float, path: list[str]) -> dict[str, Any]:
    """Return the times and the memory of steps of an input in a folder; a process of its own runs this, silently."""
    began = time.perf_counter()
    sys.path[:] = path
    os.chdir(folder)
    logging.disable()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    watch = _Stopwatch(seconds)
    with suppress(Interrupted):
        run_training(TrainRequest("input.json", device=device), callback=watch)
    steps = watch.spent["step"]
    counted = steps[_FIRST:] or steps
    mean = sum(counted) / len(counted)
    whole = watch.first_step - began + sum(steps[:_FIRST]) - mean * len(steps[:_FIRST])
    return {
        "num_steps": watch.num_steps,
        "start": max(whole, 0.0),
        "step": mean,
        "validation": _mean(watch.spent["validation"]),
        "checkpoint": _mean(watch.spent["checkpoint"]),
        "memory": peak_memory(),
        "gpu_memory": torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0,
        "measured": len(counted),
    }


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
