"""The output bias fitted again after training, for each set of weights with these weights themselves."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING

import numpy as np
import torch

from deepmd_ema.data.loader import sequential_batches
from deepmd_ema.data.sampler import permutation, plan_batches
from deepmd_ema.model.bias import change_bias, energies_of
from deepmd_ema.seeds import seed_for
from deepmd_ema.train.validate import LIVE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from deepmd_ema.averaging import AverageBank
    from deepmd_ema.batch import Batch
    from deepmd_ema.train.prepare import Prepared

logger = logging.getLogger(__name__)

MOST_FRAMES = 10_000  # a few numbers are fitted: more frames would only take longer


def refit(prepared: Prepared, bank: AverageBank | None) -> dict[str, Tensor]:
    """Return by name of the weights, ``live`` and every average, the output bias (1, T, 1) that fits the data, eV.

    With it the mean residual per atom over the training frames is zero for the weights that it was fitted with. All
    frames take part up to 10,000, of more a sample in which every system has its share; it depends on the seed of the
    run only. Nothing in the model or the bank changes. Empty, with a warning, if no frame has an energy.

    Args:
        prepared: data and model of the run; it computes where the model is.
        bank: averages, or None.
    """
    model, config = prepared.model, prepared.config.model
    chosen = _chosen_frames(prepared, MOST_FRAMES)
    biases: dict[str, Tensor] = {}
    for name in (LIVE, *(bank.names if bank is not None else ())):
        with bank.swapped_in(name) if bank is not None and name != LIVE else nullcontext():
            before = model.out_bias.view(-1).cpu().numpy()
            frames = energies_of(model, config, _batches(prepared, chosen))
        if not len(frames):
            logger.warning(
                "training.change_bias_after_training: no training frame has an energy, so there is nothing to fit the "
                "bias to: it stays as it is"
            )
            return {}
        fit = change_bias(frames, before)
        means = [np.mean(frames.residual(change) / frames.num_atoms) for change in (None, fit.bias - before)]
        logger.info(
            "output bias fitted again with the weights %s on %s frames: mean residual %s meV/atom before, %s after",
            name, f"{len(frames):,}", *(f"{round(1000 * mean, 6) + 0.0:.4g}" for mean in means),
        )  # fmt: skip
        biases[name] = torch.from_numpy(fit.bias).view(1, -1, 1)
    return biases


def _chosen_frames(prepared: Prepared, most: int) -> list[Sequence[int]]:
    """Return the frames of each system: all, or a sample of ``most`` of them in proportion to the systems' sizes."""
    rule, train = prepared.config.training.training_data.batch_size, prepared.train
    # frames that `filter:N` leaves out were not trained on
    frames = plan_batches([s.num_frames for s in train], [s.frame_sizes for s in train], rule).frames
    counts = [len(own) for own in frames]
    total = sum(counts)
    if total <= most:
        return [own.tolist() for own in frames]
    # rounded so that they add up: the shares are the differences of rounded edges
    edges = np.cumsum([0, *counts]) * most // total
    orders = [permutation(count, seed_for("bias", prepared.seed, number)) for number, count in enumerate(counts)]
    return [np.sort(own[order[:share]]).tolist() for own, order, share in zip(frames, orders, np.diff(edges))]


def _batches(prepared: Prepared, chosen: Sequence[Sequence[int]]) -> Iterator[Batch]:
    return sequential_batches(prepared.train, prepared.model.layout, prepared.cache, frames=chosen)
