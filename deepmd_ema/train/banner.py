"""What a run says before its first step: where, what, how much, and what will not matter."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from deepmd_ema import __version__

if TYPE_CHECKING:
    from deepmd_ema.averaging import AverageProfile
    from deepmd_ema.config import RunConfig
    from deepmd_ema.data.npy import System
    from deepmd_ema.data.sampler import Sampler
    from deepmd_ema.model.energy import EnergyModel
    from deepmd_ema.runtime import Runtime


def start_lines(
    config: RunConfig,
    runtime: Runtime,
    model: EnergyModel,
    systems: Sequence[System],
    sampler: Sampler,
    num_steps: int,
    profiles: Sequence[AverageProfile],
) -> list[str]:
    """Return the start banner: device, ranks, systems, parameters, batch, steps and epochs, averages."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters()) - trained
    frames = sum(system.num_frames for system in systems)
    descriptor = config.model.descriptor
    epochs = num_steps / sampler.batches_per_epoch
    return [
        f"dp-ema {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        f"device      {_device(runtime)}; {runtime.world_size} process(es)",
        f"model       {descriptor.type}, cutoff {descriptor.rcut:g} angstrom, sel {descriptor.sel}, "
        f"{trained:,} trained parameters{f' and {frozen:,} frozen' if frozen else ''} in {model.dtype}".replace(
            "torch.", ""
        ),
        f"data        {len(systems)} systems, {frames} frames; batch_size {config.training.training_data.batch_size}",
        f"length      {num_steps:,} steps = {epochs:.1f} epochs of {sampler.batches_per_epoch} batches",
        f"learning    {config.optimizer.type}, {config.learning_rate.type} from {config.learning_rate.start_lr:g} "
        f"to {config.learning_rate.end_lr:g}",
        *([f"average     {_profile(profile)}" for profile in profiles] or ["average     none (training.enable_ema)"]),
    ]


def _device(runtime: Runtime) -> str:
    if runtime.device.type == "cuda":
        return f"{runtime.device} ({torch.cuda.get_device_name(runtime.device)})"
    return f"{runtime.device} ({torch.get_num_threads()} threads)"


def _profile(profile: AverageProfile) -> str:
    window = 1 / (1 - profile.decay)
    warmup = ", short at first (ema_warmup)" if profile.warmup else ""
    return f"{profile.name}: exponential, decay {profile.decay:g}, a window of {window:.0f} steps{warmup}"
