"""What a run says before its first step: where, what, how much, and what will not matter."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

import torch

from deepmd_ema import __version__
from deepmd_ema.train.averages import snapshot_lines

if TYPE_CHECKING:
    from deepmd_ema.data.sampler import Sampler
    from deepmd_ema.model.energy import EnergyModel
    from deepmd_ema.train.parts import Plan


SHARED = {
    0: "every rank holds everything",
    1: "moments are shared out over the ranks",
    2: "moments and gradients are shared out over the ranks",
    3: "moments, gradients and parameters are shared out over the ranks",
}


def start_lines(plan: Plan, sampler: Sampler) -> list[str]:
    """Return the start banner: device, ranks, systems, parameters, batch, steps and epochs, averages."""
    config, world, model = plan.prepared.config, plan.world, plan.prepared.model
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    frames = sum(system.num_frames for system in plan.prepared.train)
    epochs = plan.num_steps / sampler.batches_per_epoch
    several = world.size > 1 or config.training.zero_stage > 0
    return [
        f"dp-ema {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"device      {_device(world.device)}",
        *(_ranks(world.size, config.training.zero_stage) if several else []),
        f"model       {config.model.descriptor.summary()}; "
        f"{trained:,} trained parameters{f' and {frozen:,} frozen' if frozen else ''} in {model.dtype}".replace(
            "torch.", ""
        ),
        f"data        {len(plan.prepared.train)} systems, {frames} frames; "
        f"batch_size {config.training.training_data.batch_size}"
        + (f" of each rank, {_count(sampler.frames_per_step)} frames per step over all ranks" if several else ""),
        f"length      {plan.num_steps:,} steps = {epochs:.1f} epochs of {sampler.batches_per_epoch} batches",
        f"learning    {config.optimizer.type}, {config.learning_rate.type} from {config.learning_rate.start_lr:g} "
        f"to {config.learning_rate.end_lr:g}" + ("; used as given, whatever the number of ranks" if several else ""),
        *([f"average     {t.profile.words()}" for t in plan.tracked] or ["average     none (training.enable_ema)"]),
        *(f"snapshots   {line}" for line in snapshot_lines(plan.tracked, plan.num_steps, _snapshot_bytes(model))),
    ]


def _ranks(number: int, stage: int) -> list[str]:
    return [f"ranks       {number}; zero_stage {stage}: {SHARED[stage]}"]


def _snapshot_bytes(model: EnergyModel) -> int:
    """Return the size of one kept copy of an average: trained parameters in float32, everything else as it is."""
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    return sum(t.numel() * (4 if name in trained else t.element_size()) for name, t in model.state_dict().items())


def _count(mean: float) -> str:
    return f"{mean:g}" if mean == round(mean) else f"{mean:.3g} (mean)"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({torch.get_num_threads()} threads)"
