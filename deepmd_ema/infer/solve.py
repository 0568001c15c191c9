"""The output bias or the output layer of a model, fitted to labelled frames by least squares.

Of the layer, cross-validation chooses the ridge.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np
import torch
from torch import Tensor

from deepmd_ema.batch import Batch
from deepmd_ema.config import TaskConfig
from deepmd_ema.config.schema.model import ModelConfig
from deepmd_ema.config.schema.optim import EnerLossConfig, ScheduleConfig
from deepmd_ema.data.collate import PairCache
from deepmd_ema.data.epochs import permutation
from deepmd_ema.data.loader import sequential_batches
from deepmd_ema.data.sampler import frames_taken
from deepmd_ema.data.source import FrameSource
from deepmd_ema.dist.world import World
from deepmd_ema.errors import UserError, counted
from deepmd_ema.labels import LABELS
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.last_layer import (
    FITTED,
    Equations,
    changed_tensors,
    equations,
    num_unknowns,
    residuals,
    sample_changes,
    solve,
)
from deepmd_ema.model.model_set import TaskModel
from deepmd_ema.model.output_bias import change_bias, energies_of
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.report.progress import duration
from deepmd_ema.seeds import seed_for, stream_of

OUT_BIAS = "out_bias"  # name of the bias in a model
MAX_FRAMES = 10_000  # few numbers are fitted: more frames would only take longer
ATOMS_PER_UNKNOWN = 8  # whose forces are fitted: 24 equations per unknown, of which those of a frame are correlated
FRAMES_PER_UNKNOWN = 10  # whose energies are fitted
NUM_PARTS, NUM_BLOCKS = 5, 20  # of the frames; neighbors in a trajectory, which are near copies, share a block
ATOMS_AT_ONCE = 512  # as the columns of all unknowns are in memory
ROUNDING = 1.05  # factor of the loss that the precision of the weights may cost
RIDGE_FACTOR = 100.0  # by which the ridge grows where it costs more


@dataclass(frozen=True)
class Solved:
    """New tensors of a model.

    Attributes:
        tensors: by their names in the model; none where the trained weights are the best.
        summary: one line.
    """

    tensors: Mapping[str, Tensor]
    summary: str


def loss_weights(loss: EnerLossConfig, learning_rate: ScheduleConfig, num_steps: int, step: int) -> dict[str, float]:
    """Return the prefactors of energies, forces and virials in a step, counted from 1, of a run of ``num_steps``."""
    rate = build_schedule(learning_rate, num_steps)(max(0, step - 1)) / learning_rate.start_lr
    found = {}
    for name in FITTED:
        start, limit = (getattr(loss, f"{when}_pref_{LABELS[name].symbol}") for when in ("start", "limit"))
        found[name] = limit + (start - limit) * rate
    return found


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


def fit_bias(model: EnergyModel | TaskModel, config: ModelConfig, batches: Iterable[Batch]) -> Solved:
    """Return the output bias (1, T, 1), eV, with which the mean residual per atom over the frames is zero.

    Args:
        model: as it is; its tensors are the same afterwards.
        config: its section.
        batches: on the CPU, with labels; without energies nothing is fitted.
    """
    before = model.out_bias.view(-1).cpu().numpy()
    frames = energies_of(model, config, batches)
    if not len(frames):
        return Solved({}, "no frame has an energy")
    bias = change_bias(frames, before).bias
    about = f"{counted(len(frames), 'frame')}: {frames.describe_means(bias - before)}"
    return Solved({OUT_BIAS: torch.from_numpy(bias).view(1, -1, 1)}, about)


def solve_last_layer(
    model: EnergyModel,
    systems: Sequence[FrameSource],
    frames: Sequence[Sequence[int]],
    prefactors: Mapping[str, float],
    intensive: bool,
    cache: PairCache | None = None,
    world: World | None = None,
) -> Solved:
    """Return the tensors that fit the labels best where all but the output layer and the output bias stay as they are.

    Forces of at most ``ATOMS_PER_UNKNOWN`` atoms per unknown, and energies of all frames up to
    ``FRAMES_PER_UNKNOWN`` per unknown, evenly spaced, are fitted. Must be called by every rank.

    Args:
        model: whole on this rank; its tensors are the same afterwards.
        systems: with labels.
        frames: which frames of each system.
        prefactors: weights of the squared errors by label, as in the loss.
        intensive: whether the loss divides squares of energies and virials by the square of the number of atoms.
        cache: neighbor lists to share.
        world: the ranks among which batches are distributed.

    Raises:
        UserError: if there are too few frames.
    """
    began = time.monotonic()
    world = World() if world is None else world
    sample = _Sample.of(model, systems, frames)
    equations_of, residuals_of = (
        partial(_summed, function, model, sample, systems, intensive, cache, world)
        for function in (equations, residuals)
    )
    was_training = model.training
    model.eval()
    try:
        parts = [equations_of(part) for part in range(NUM_PARTS)]
        solution = solve(parts, prefactors)
        tensors = changed_tensors(model, solution.change)
        # weights of few digits may not hold a solution whose terms cancel: then a larger ridge
        while _loss_with(model, tensors, residuals_of, prefactors) > ROUNDING * solution.fitted[1]:
            solution = solve(parts, prefactors, RIDGE_FACTOR * solution.ridge)
            tensors = changed_tensors(model, solution.change)
    finally:
        model.train(was_training)
    before, after = solution.kept_apart
    is_changed = bool(solution.change.any())
    found = (
        f"loss of frames kept apart {before:.4g} before, {after:.4g} after, ridge {solution.ridge:.1g}"
        if is_changed
        else "no change is better for frames kept apart"
    )
    size, seconds = counted(num_unknowns(model), "number"), duration(time.monotonic() - began)
    return Solved(tensors if is_changed else {}, f"{size}, {sample.describe()}, {seconds}: {found}")


def sample_last_layers(
    model: EnergyModel,
    systems: Sequence[FrameSource],
    frames: Sequence[Sequence[int]],
    prefactors: Mapping[str, float],
    intensive: bool,
    number: int,
    seed: int,
) -> list[dict[str, Tensor]]:
    """Return output layers and output biases, drawn around those of the model from what the labels leave open.

    Args:
        model: in evaluation mode; its tensors are the same afterwards.
        systems: with labels.
        frames: which frames of each system.
        prefactors: weights of the squared errors by label, as in the loss.
        intensive: whether the loss divides squares of energies and virials by the square of the number of atoms.
        number: how many.
        seed: of the random numbers.

    Raises:
        UserError: if there are too few frames.
    """
    sample = _Sample.of(model, systems, frames)
    parts = [_summed(equations, model, sample, systems, intensive, None, World(), part) for part in range(NUM_PARTS)]
    random = torch.Generator().manual_seed(seed_for("output layers", seed))
    changes = sample_changes(reduce(Equations.plus, parts), prefactors, number, random)
    return [changed_tensors(model, change) for change in changes]


@dataclass(frozen=True)
class _Sample:
    """The frames that are fitted.

    Attributes:
        with_forces: by part and system, frames whose energies, forces and virials are.
        others: by part and system, frames whose energies are.
    """

    with_forces: Sequence[Sequence[Sequence[int]]]
    others: Sequence[Sequence[Sequence[int]]]

    @classmethod
    def of(cls, model: EnergyModel, systems: Sequence[FrameSource], frames: Sequence[Sequence[int]]) -> _Sample:
        order = [(system, frame) for system, own in enumerate(frames) for frame in own]
        unknowns, total = num_unknowns(model), len(order)
        atoms = sum(int(systems[system].frame_sizes[frame]) for system, frame in order)
        if total < NUM_PARTS:
            raise UserError(f"the output layer is fitted to at least {NUM_PARTS} frames, and there are {total}.")
        with_forces = _evenly_spaced(total, max(NUM_BLOCKS, ATOMS_PER_UNKNOWN * unknowns * total // max(1, atoms)))
        others = _evenly_spaced(total, FRAMES_PER_UNKNOWN * unknowns) - with_forces

        def by_part(chosen: set[int]) -> list[list[list[int]]]:
            found: list[list[list[int]]] = [[[] for _ in systems] for _ in range(NUM_PARTS)]
            for number in sorted(chosen):
                system, frame = order[number]
                found[number * NUM_BLOCKS // total % NUM_PARTS][system].append(frame)
            return found

        return cls(by_part(with_forces), by_part(others))

    def describe(self) -> str:
        """Return the numbers of frames."""
        forces, more = (sum(len(own) for part in kind for own in part) for kind in (self.with_forces, self.others))
        return f"{counted(forces, 'frame')}" + f" and the energies of {more:,} more" * (more > 0)


def _evenly_spaced(total: int, most: int) -> set[int]:
    """Return at most so many numbers below ``total``."""
    return set(np.linspace(0, total - 1, min(total, most)).round().astype(int).tolist())


def _summed(
    function: Callable[..., Equations], model: EnergyModel, sample: _Sample, systems: Sequence[FrameSource],
    intensive: bool, cache: PairCache | None, world: World, part: int,
) -> Equations:  # fmt: skip
    """Return the equations that ``function`` makes of a part of the frames, summed over the ranks."""
    found = []
    for chosen, with_forces in ((sample.with_forces, True), (sample.others, False)):
        batches = sequential_batches(
            systems, model.layout, cache, ATOMS_AT_ONCE, FITTED, world.rank, world.size, frames=chosen[part]
        )
        on_device = (batch.to(model.out_bias.device) for batch in batches)
        found.append(function(model, on_device, intensive, with_forces))
    return found[0].plus(found[1]).reduced(world.all_reduce_sum)


def _loss_with(
    model: EnergyModel, tensors: Mapping[str, Tensor], residuals_of: Callable[[int], Equations],
    prefactors: Mapping[str, float],
) -> float:  # fmt: skip
    """Return the loss of a model with other tensors, in the precision of its weights."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in tensors}
    model.load_state_dict(tensors, strict=False)
    try:
        return reduce(Equations.plus, map(residuals_of, range(NUM_PARTS))).loss(prefactors)
    finally:
        model.load_state_dict(before, strict=False)
