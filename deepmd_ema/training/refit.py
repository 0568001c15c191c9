"""Fits the output bias again after training, for each set of weights with these weights themselves."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.averaging import AverageBank
from deepmd_ema.config import TaskConfig
from deepmd_ema.data.epochs import permutation
from deepmd_ema.data.loader import atoms_at_once, sequential_batches
from deepmd_ema.data.sampler import frames_taken
from deepmd_ema.data.source import FrameSource
from deepmd_ema.errors import counted
from deepmd_ema.model.output_bias import change_bias, energies_of
from deepmd_ema.seeds import seed_for, stream_of
from deepmd_ema.tensors import prefix_of
from deepmd_ema.training.prepare import PreparedRun
from deepmd_ema.weight_names import LIVE

logger = logging.getLogger(__name__)

MAX_FRAMES = 10_000  # few numbers are fitted: more frames would only take longer


def refit_bias(prepared: PreparedRun, bank: AverageBank | None) -> dict[str, dict[str, Tensor]]:
    """Return the output biases (1, T, 1) in eV that fit the data, by weights and by their names in the models.

    The weights are ``live`` and every average. With its bias the mean residual per atom over the training frames of a
    task is zero for the weights that it was fitted with. All frames take part up to 10,000, of more a sample in which
    every system has its share; it depends on the seed of the run only. Nothing in the models or the bank changes. A
    task without energies is left out, with a warning. Readers of the last files use these biases, in place of those
    that a restart continues from.

    Args:
        prepared: data and models of the run; it computes where the models are.
        bank: averages, or None.
    """
    fitted: dict[str, dict[str, Tensor]] = {}
    for weights in (LIVE, *(bank.names if bank is not None else ())):
        with bank.swapped_in(weights) if bank is not None and weights != LIVE else nullcontext():
            for name, task in prepared.tasks.items():
                model = prepared.models.of(name)
                chosen = chosen_frames(task.config, task.train, prepared.seed, MAX_FRAMES)
                most = atoms_at_once(model.out_bias.device)
                batches = sequential_batches(task.train, task.model.layout, task.cache, most, frames=chosen)
                before = model.out_bias.view(-1).cpu().numpy()
                frames = energies_of(model, task.config.model, batches)
                if len(frames):
                    bias = change_bias(frames, before).bias
                    logger.info(
                        "output bias fitted again with the weights %s on %s: %s",
                        f"{name} {weights}" if name else weights,
                        counted(len(frames), "frame"),
                        frames.describe_means(bias - before),
                    )
                    tensor = torch.from_numpy(bias).view(1, -1, 1)
                    fitted.setdefault(weights, {})[f"{prefix_of(name)}out_bias"] = tensor
                elif weights == LIVE:
                    logger.warning(
                        "training.change_bias_after_training: no training frame%s has an energy, so there is nothing "
                        "to fit the bias to: it stays as it is",
                        f" of task {name}" if name else "",
                    )
    return fitted


def chosen_frames(task: TaskConfig, train: Sequence[FrameSource], seed: int, most: int) -> list[Sequence[int]]:
    """Return the frames of each system: all, or a sample of ``most`` of them in proportion to the systems' sizes."""
    # frames that `filter:N` leaves out were not trained on
    frames = frames_taken(task.training_data.batch_size, [system.frame_sizes for system in train])
    counts = [len(own) for own in frames]
    total = sum(counts)
    if total <= most:
        return [own.tolist() for own in frames]
    # rounded so that they add up: the shares are the differences of rounded edges
    edges = np.cumsum([0, *counts]) * most // total
    stream = stream_of("bias", task.name)
    orders = [permutation(count, seed_for(stream, seed, number)) for number, count in enumerate(counts)]
    return [np.sort(own[order[:share]]).tolist() for own, order, share in zip(frames, orders, np.diff(edges))]
