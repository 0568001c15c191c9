"""The table of a run that is logged before its first step."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from deepmd_ema import __version__
from deepmd_ema.config import config_summary
from deepmd_ema.report.table import Table, facts
from deepmd_ema.train.averages import snapshot_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deepmd_ema.averaging.profile import Profile
    from deepmd_ema.dist.world import World
    from deepmd_ema.train.prepare import PreparedRun
    from deepmd_ema.train.task import TaskMixture

SHARED = {
    0: "every rank holds everything",
    1: "moments are shared out over the ranks",
    2: "moments and gradients are shared out over the ranks",
    3: "moments, gradients and parameters are shared out over the ranks",
}


def start_table(
    prepared: PreparedRun, tasks: TaskMixture, averages: Sequence[Profile], num_steps: int, world: World
) -> Table:
    """Return what the input asks for, as ``dp-ema check`` shows it, with what is known once the run is assembled.

    Args:
        prepared: inputs of the run.
        tasks: how they are drawn.
        averages: of the run.
        num_steps: of the whole run.
        world: the processes of the run.
    """
    config, stage, device = prepared.config, prepared.config.training.zero_stage, world.device
    per_step = f"{tasks.frames_per_step:.6g} frames per step over all ranks"
    several = f"{world.size}; zero_stage {stage}: {SHARED[stage]}; {per_step}; learning rate used as given"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    pairs = [
        ("ranks", several if world.size > 1 or stage else ""),
        *config_summary(config, num_steps, tasks.steps_per),
    ]
    for task, made in prepared.tasks.items():
        of = f"{task}: " if task else ""
        trained = sum(p.numel() for p in made.model.parameters() if p.requires_grad)
        frozen = sum(p.numel() for p in made.model.parameters()) - trained
        words = f"{of}{trained:,} trained parameters" + f" and {frozen:,} frozen" * (frozen > 0)
        frames = sum(system.num_frames for system in made.train)
        pairs.append(("training", f"{words}, {frames:,} frames of {len(made.train)} systems"))
    pairs += [("average", f"{p.name}: updated when {p.settings()['should_update']} says so")
              for p in averages if p.should_update is not None]  # fmt: skip
    # a kept copy has its trained parameters in float32, everything else as it is
    parameters = {n for n, p in prepared.models.named_parameters() if p.requires_grad}
    state = prepared.models.state_dict()
    num_bytes = sum(t.numel() * (4 if name in parameters else t.element_size()) for name, t in state.items())
    pairs += [("snapshots", line) for line in snapshot_lines(config, averages, num_steps, num_bytes)]
    program = f"dp-ema {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    return facts(f"{program}, on {device} ({name})", pairs)
