"""Compiles the models of a run before its first step, where that pays."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepmd_ema.batch import Batch
from deepmd_ema.config import RunConfig
from deepmd_ema.config.schema.training import AUTO_COMPILE
from deepmd_ema.dist.world import World
from deepmd_ema.errors import RankLostError, UserError, counted
from deepmd_ema.labels import ENERGY, FORCE, HESSIAN
from deepmd_ema.model.compile import Compiler, explained
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.filled import fill
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.ops.reference import REFERENCE, with_operations
from deepmd_ema.report.progress import duration
from deepmd_ema.train.task import TaskMixture

logger = logging.getLogger(__name__)

OPTION = "training.enable_compile"
# measured, benchmarks/results/2026-11-22-compile.md: 0.07 to 0.13 s of one core for each operation of an eager step
SECONDS_PER_OPERATION = 0.1
LARGEST_SHARE = 0.05  # of a run that "auto" spends on trying
TURNS = 5  # of measuring: the least time counts
FASTER = 0.97  # a step that takes less of an eager one's time is worth it

Steps = list[tuple[float, EnergyModel, Batch]]  # share of a task, its model, and a batch of it


def compile_models(
    config: RunConfig,
    models: ModelSet,
    tasks: TaskMixture,
    batches: Mapping[str, Batch],
    shares: Mapping[str, float],
    num_steps: int,
    world: World,
) -> RunConfig:
    """Let ``models`` be evaluated by compiled code if the run wants it, and return the config with what was decided.

    All ranks make their code from the same batch, so that those of one machine find it in the cache.

    Args:
        config: of the run.
        models: on the device they compute on, not yet shared out.
        tasks: with their losses.
        batches: one of each task, the same on all ranks and at every restart.
        shares: probability of each task.
        num_steps: of the whole run.
        world: the processes of the run.

    Raises:
        UserError: if they cannot be compiled and the input demands it.
    """
    wanted, infer = config.training.enable_compile, config.validating.compiled_infer
    if not wanted and not infer:
        return config
    steps = [(share, models.by_task[name].train(), batches[name]) for name, share in shares.items() if share]
    probe = None
    if wanted == AUTO_COMPILE:
        probe = world.broadcast_from_rank0(partial(_Probe.measure, steps))
        logger.info("%s = auto: %s", OPTION, probe.in_words(num_steps))
        wanted = probe.worth_trying(num_steps)
    infers = bool(wanted if infer is None else infer) and config.has_validation_data
    compiler = Compiler(config.training.compile_options, bool(wanted), infers)
    if wanted or infers:
        hessians = "; batches with Hessians are evaluated eagerly" * any(HESSIAN in t.loss.labels for t in tasks)
        logger.info("compiling with %s, which takes minutes the first time%s", compiler.options.backend, hessians)
    try:
        _make_code(compiler, models, batches, world)
        if probe is not None:
            _keep_what_is_faster(compiler, models, steps, world, chosen=infer is not None)
    except UserError as error:
        if probe is None:
            raise
        why = f"{OPTION}: another rank cannot compile" if isinstance(error, RankLostError) else str(error).rstrip(".")
        logger.warning("%s. The run goes on eagerly.", why)
        compiler.in_training = compiler.in_validation = False
    models.train()
    if compiler.in_training or compiler.in_validation:
        models.compiler = compiler
        logger.info("compiled: %s", compiler.in_words())
    return replace(
        config,
        training=replace(config.training, enable_compile=compiler.in_training),
        validating=replace(config.validating, compiled_infer=compiler.in_validation),
    )


def _make_code(compiler: Compiler, models: ModelSet, batches: Mapping[str, Batch], world: World) -> None:
    for is_used, training in ((compiler.in_training, True), (compiler.in_validation, False)):
        if is_used:
            _on_all_ranks(partial(_trace, compiler, models.train(training), batches), world)


def _keep_what_is_faster(compiler: Compiler, models: ModelSet, steps: Steps, world: World, chosen: bool) -> None:
    """Give up the code of training or of validation, unless it is ``chosen``, if it is measured not to be faster."""
    if compiler.in_training:
        models.train()
        compiler.in_training = world.broadcast_from_rank0(partial(_is_faster, compiler, steps))
    if compiler.in_validation and not chosen:
        models.eval()
        compiler.in_validation = world.broadcast_from_rank0(partial(_is_faster, compiler, steps))


def _on_all_ranks(make: Callable[[], None], world: World) -> None:
    """Call ``make`` on the first rank of each machine, then on the others, which find the code in the cache."""
    for is_turn in (world.local_rank == 0, world.local_rank != 0):
        with world.all_ranks_ok(world.long_timeout_group):
            if is_turn:
                make()


def _trace(compiler: Compiler, models: ModelSet, batches: Mapping[str, Batch]) -> None:
    with explained(OPTION, "Set it to false to train eagerly"):
        for name, model in models.by_task.items():
            compiler.trace(model, batches[name])


@dataclass(frozen=True)
class _Probe:
    """What is known before anything is compiled.

    Attributes:
        seconds: of an eager step, without its optimizer.
        operations: of one step of each graph; tasks that do the same in the same order share one.
    """

    seconds: float
    operations: int

    @classmethod
    def measure(cls, steps: Steps) -> _Probe:
        """Take some steps that change nothing."""
        graphs = set()
        for _, model, batch in steps:
            traced = with_operations(model, REFERENCE)
            with _Recorder() as recorder:
                _step(traced, fill(batch, model.layout).batch, traced)
            graphs.add(tuple(recorder.operations))
        return cls(min(_seconds(steps) for _ in range(TURNS)), sum(map(len, graphs)))

    @property
    def compile_seconds(self) -> float:
        """Estimate of the time that compiling takes."""
        return SECONDS_PER_OPERATION * self.operations

    def worth_trying(self, num_steps: int) -> bool:
        """Whether compiling is estimated to take a small part of the run."""
        return self.compile_seconds < LARGEST_SHARE * num_steps * self.seconds

    def in_words(self, num_steps: int) -> str:
        """Return the estimates and what follows from them."""
        run = num_steps * self.seconds
        follows = "it is tried" if self.worth_trying(num_steps) else "the run goes on eagerly"
        return (
            f"{counted(num_steps, 'step')} of {1000 * self.seconds:.1f} ms take {duration(run)} eagerly; compiling "
            f"{self.operations:,} operations is estimated at {duration(self.compile_seconds)}, "
            f"{100 * self.compile_seconds / run:.1f} % of it; up to {100 * LARGEST_SHARE:.0f} % are spent on trying: "
            f"{follows}"
        )


class _Recorder(TorchDispatchMode):
    """Notes the operations that torch carries out within it."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operations.append(str(function))
        return function(*args, **(kwargs or {}))


def _is_faster(compiler: Compiler, steps: Steps) -> bool:
    """Whether compiled code is measured to be faster in the mode in which the models are; both take turns."""
    purpose = "training" if steps[0][1].training else "validation"
    turns = [(_seconds(steps), _seconds(steps, compiler)) for _ in range(TURNS)]
    eager, compiled = map(min, zip(*turns))
    faster = compiled < FASTER * eager
    logger.info(
        "%s = auto: a batch takes %.1f ms eagerly and %.1f ms compiled: %s goes on %s", OPTION, 1000 * eager,
        1000 * compiled, purpose, "compiled" if faster else "eagerly",
    )  # fmt: skip
    return faster


def _seconds(steps: Steps, compiler: Compiler | None = None) -> float:
    """Return the seconds of a step, each task with its share."""
    total = 0.0
    for share, model, batch in steps:
        _wait(batch)
        began = time.perf_counter()
        _step(model, batch, model if compiler is None else partial(compiler, model))
        _wait(batch)
        total += share * (time.perf_counter() - began)
    return total


def _step(model: EnergyModel, batch: Batch, call: Callable[[Batch], Mapping[str, Any]]) -> None:
    """Evaluate a batch, and in training mode the gradient of something like a loss."""
    prediction = call(batch)
    if not model.training:
        return
    total = prediction[ENERGY].sum() + prediction[FORCE].square().sum()
    torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad], allow_unused=True)


def _wait(batch: Batch) -> None:
    if batch.vector.is_cuda:
        torch.cuda.synchronize(batch.vector.device)
