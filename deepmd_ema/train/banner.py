"""The lines that a run logs before its first step."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from deepmd_ema import __version__
from deepmd_ema.report.table import facts
from deepmd_ema.report.text import render
from deepmd_ema.train.averages import snapshot_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepmd_ema.dist.world import World
    from deepmd_ema.model.model_set import ModelSet
    from deepmd_ema.train.averages import Tracked
    from deepmd_ema.train.prepare import PreparedRun, PreparedTask
    from deepmd_ema.train.task import TaskMixture


SHARED = {
    0: "every rank holds everything",
    1: "moments are shared out over the ranks",
    2: "moments and gradients are shared out over the ranks",
    3: "moments, gradients and parameters are shared out over the ranks",
}


def start_lines(
    prepared: PreparedRun, tasks: TaskMixture, tracked: Sequence[Tracked], num_steps: int, world: World
) -> list[str]:
    """Return the start banner: device, ranks, models, data, batches, steps and epochs, averages.

    Args:
        prepared: inputs of the run.
        tasks: how they are drawn.
        tracked: averages.
        num_steps: of the whole run.
        world: the processes of the run.
    """
    config = prepared.config
    epochs = num_steps / tasks.batches_per_epoch
    several = world.size > 1 or config.training.zero_stage > 0
    each = f" of each rank, {_count(tasks.frames_per_step)} frames per step over all ranks" if several else ""
    learning, stage = config.learning_rate, config.training.zero_stage
    rates = f"{learning.type} from {learning.start_lr:g} to {learning.end_lr:g}"
    pairs = [
        ("device", _device(world.device)),
        ("ranks", f"{world.size}; zero_stage {stage}: {SHARED[stage]}" if several else ""),
        *(("model", f"{_named(name)}{_model(task)}") for name, task in prepared.tasks.items()),
        *(("data", f"{_named(name)}{_data(task)}{each}") for name, task in prepared.tasks.items()),
        ("length", f"{num_steps:,} steps = {epochs:.1f} epochs of {tasks.batches_per_epoch} batches"),
        ("learning", f"{config.optimizer.type}, {rates}" + "; used as given, whatever the number of ranks" * several),
        *([("average", t.profile.words()) for t in tracked] or [("average", "none (training.enable_ema)")]),
        *(("snapshots", line) for line in snapshot_lines(tracked, num_steps, _snapshot_bytes(prepared.models))),
    ]
    return render(facts(f"dp-ema {__version__}, torch {torch.__version__}, Python {platform.python_version()}", pairs))


def _named(task: str) -> str:
    return f"{task}: " if task else ""


def _model(task: PreparedTask) -> str:
    model = task.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    return (
        f"{task.config.model.descriptor.summary()}; {trained:,} trained parameters"
        f"{f' and {frozen:,} frozen' if frozen else ''} in {str(model.dtype).removeprefix('torch.')}"
    )


def _data(task: PreparedTask) -> str:
    frames = sum(system.num_frames for system in task.train)
    return f"{len(task.train)} systems, {frames} frames; batch_size {task.config.training_data.batch_size}"


def _snapshot_bytes(models: ModelSet) -> int:
    """Return the size of one kept copy of an average: trained parameters in float32, everything else as it is."""
    trained = {name for name, p in models.named_parameters() if p.requires_grad}
    return sum(t.numel() * (4 if name in trained else t.element_size()) for name, t in models.state_dict().items())


def _count(mean: float) -> str:
    return f"{mean:g}" if mean == round(mean) else f"{mean:.3g} (mean)"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)"
