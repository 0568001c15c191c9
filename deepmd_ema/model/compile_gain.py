"""The gain of compiled training: seconds of compiling against seconds of gradients, eager and compiled."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.errors import counted
from deepmd_ema.labels import ENERGY, FORCE, VIRIAL
from deepmd_ema.model.compiler import Compiler
from deepmd_ema.model.energy import EnergyModel, run
from deepmd_ema.model.interpolation.interpolation import Interpolation

MAX_ROUNDS = 5
MAX_SHARE = 0.05  # of the time of compiling, for all rounds but the first


@dataclass(frozen=True)
class Gain:
    """Cost and gain of compiled training, as measured; times are in seconds.

    Attributes:
        seconds: of compiling, validation included.
        eager: of the gradients of a step by eager code.
        compiled: of the same by compiled code.
    """

    seconds: float
    eager: float
    compiled: float

    @property
    def break_even(self) -> float:
        """Number of steps whose gain is the time of compiling; infinite if compiled code is not faster."""
        saved = self.eager - self.compiled
        return math.ceil(self.seconds / saved) if saved > 0 else math.inf

    def describe(self) -> str:
        """Return the measured times and when compiling pays off."""
        after = self.break_even
        pays = f"pays off after {counted(int(after), 'step')}" if after < math.inf else "never pays off"
        return (
            f"gradients of a step take {self.compiled:.2g} s compiled and {self.eager:.2g} s eager, so that "
            f"{self.seconds:.3g} s of compiling {pays}"
        )

    def warning(self, num_steps: int) -> str:
        """Return a warning if compiling does not pay off in ``num_steps`` steps, or an empty string."""
        if num_steps >= self.break_even:
            return ""
        remedy = "Set it to false"
        if self.break_even < math.inf:
            remedy = f"{counted(num_steps, 'step')} will be taken. {remedy}, unless it is a trial of a longer one"
        return f"training.enable_compile = true: {self.describe()}. {remedy}."


class Work(NamedTuple):
    """The part of a task in a step.

    Attributes:
        batches: in a step, on average.
        model: in training mode.
        batch: on the device of the model, with labels, not filled up.
        need_virial: whether the loss has virials.
    """

    batches: float
    model: EnergyModel
    batch: Batch
    need_virial: bool


def measure_gain(compiler: Compiler, works: Iterable[Work]) -> Gain:
    """Return the gain of compiled steps of ``works``. Models stay as they are, and have no gradients.

    Each time is the shortest of some gradients, eager and compiled ones in turn, after one that is not counted. Torch
    may leave the backward pass of a graph to its first use, which is counted as time of compiling.
    """
    seconds = compiler.seconds
    eager = compiled = 0.0
    for work in works:
        rounds = _rounds(compiler, work, MAX_SHARE * compiler.seconds)
        best = [min(times) for times in zip(*rounds[1:])]
        seconds += max(0.0, rounds[0][1] - best[1])
        eager, compiled = eager + work.batches * best[0], compiled + work.batches * best[1]
    return Gain(seconds, eager, compiled)


def _rounds(compiler: Compiler, work: Work, most: float) -> list[list[float]]:
    """Return the seconds of eager and compiled gradients, round by round, at least two."""
    model = work.model
    padded = compiler.options.pad(model.layout)(work.batch)
    if work.batch.vector.device.type == "cuda":  # as from a loader
        padded = padded.pack().to(work.batch.vector.device)
    calls = (partial(run, model, work.batch, work.need_virial), partial(compiler, model, padded))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = [ENERGY, FORCE, *[VIRIAL] * work.need_virial]
    found: list[list[float]] = []
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, Interpolation):
                stack.enter_context(module.uncounted())
        while len(found) < 2 or (len(found) <= MAX_ROUNDS and sum(map(sum, found[1:])) < most):
            found.append([_seconds(call, names, parameters) for call in calls])
    return found


def _seconds(call: Callable[[], dict[str, Tensor]], names: Sequence[str], parameters: Sequence[Tensor]) -> float:
    """Return the seconds of a gradient of all predictions of these names."""
    began = time.perf_counter()
    with torch.autograd.set_multithreading_enabled(False):  # as in a step
        prediction = call()
        total = torch.stack([prediction[name].sum() for name in names]).sum()
        torch.autograd.grad(total, parameters, allow_unused=True)
    if total.device.type == "cuda":
        torch.cuda.synchronize(total.device)
    return time.perf_counter() - began
