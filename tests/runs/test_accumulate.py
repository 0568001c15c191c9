"""Several batches of a step: the gradient, the update and the displayed errors of one batch with
all their frames.
"""

import os
import re

import numpy as np
import pytest
import torch
from flat_batches import flat_batch, predicted, random_frame
from helpers import assert_same, trains_in, write_system
from loss_cases import LOSSES
from parallel_cases import assert_near
from training_runs import StopAfter, load

from deepmd_ema.config.schema.optim import EnerLossConfig as Config
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import ConfigError, DivergedError, Interrupted
from deepmd_ema.training.loss import EnergyLoss, LossOverBatches

SAME_MATH = 1e-12
ROUNDING = 1e-9  # after some steps
LACKING = [
    (),
    ("force", "hessian"),
    ("energy", "virial", "atom_pref"),
    ("atom_energy", "virial", "force", "hessian"),
]


def frames_of_different_sizes():
    """Return frames of four sizes, which lack different labels, and predictions for them."""
    rng = np.random.default_rng(1)
    sizes = (2, 7, 4, 3)
    complete = [random_frame(rng, n) for n in sizes]
    labelled = [
        {k: v for k, v in f.items() if k not in lacking}
        for f, lacking in zip(complete, LACKING)
    ]
    return labelled, [
        random_frame(rng, n, types=f["types"]) for n, f in zip(sizes, labelled)
    ]


@pytest.mark.parametrize(
    "frames_of_parts", [([0, 1], [2], [3]), ([0], [2])]
)  # the latter: one frame has an energy
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_batches_add_up_to_that_of_all_their_frames(name, frames_of_parts):
    labelled, guess = frames_of_different_sizes()
    config = Config(**LOSSES[name])
    loss = EnergyLoss(config, 1e-3, World())

    def evaluated(frames):
        batch = flat_batch([labelled[k] for k in frames], names=config.labels(()))
        return batch, {
            k: v.requires_grad_()
            for k, v in predicted([guess[k] for k in frames], batch).items()
        }

    batch, prediction = evaluated([k for frames in frames_of_parts for k in frames])
    total, shown = loss(prediction, batch, 7e-4)
    total.backward()
    parts = [evaluated(frames) for frames in frames_of_parts]
    whole = LossOverBatches(loss, [part for part, _ in parts], 7e-4)
    shares = [whole.add(own, part) for part, own in parts]
    sum(shares).backward()
    assert sum(shares).item() == pytest.approx(total.item(), rel=SAME_MATH)
    displayed = whole.displayed()
    assert list(displayed) == list(shown)
    for key, value in shown.items():
        assert displayed[key].item() == pytest.approx(
            value.item(), rel=SAME_MATH, nan_ok=True
        ), key
    gradient = torch.cat([own["energy"].grad for _, own in parts])
    torch.testing.assert_close(
        gradient, prediction["energy"].grad, rtol=SAME_MATH, atol=0
    )
    forces = torch.cat([part.in_file_order(own["force"].grad) for part, own in parts])
    torch.testing.assert_close(
        forces, batch.in_file_order(prediction["force"].grad), rtol=SAME_MATH, atol=0
    )


class OneOfTwo:
    """In the place of a world: a rank of two, which knows what the other one adds to each sum."""

    size, device = 2, torch.device("cpu")

    def __init__(self, others=(0, 0)):
        self.own, self.others = [], iter(others)

    def all_reduce_sum(self, value):
        self.own.append(value)
        return value + next(self.others)


@pytest.mark.parametrize("name", LOSSES)
def test_batches_of_two_ranks_have_the_gradient_and_the_errors_of_all_their_frames(
    name,
):
    """Ranks have other numbers of frames with a label; the mean of their gradients is that of one
    process.
    """
    labelled, guess = frames_of_different_sizes()
    config = Config(**LOSSES[name])

    def of_batches(world, numbers):
        loss, batches = EnergyLoss(config, 1e-3, World()), []
        loss.world = world
        for frames in numbers:
            batch = flat_batch([labelled[k] for k in frames], names=config.labels(()))
            batches.append((batch, predicted([guess[k] for k in frames], batch)))
        whole = LossOverBatches(loss, [batch for batch, _ in batches], 7e-4)
        for batch, prediction in batches:
            prediction["energy"].requires_grad_()
            whole.add(prediction, batch).backward()
        gradients = torch.cat([prediction["energy"].grad for _, prediction in batches])
        return gradients, {
            key: value.item() for key, value in whole.displayed().items()
        }

    parts = ([[0], [1]], [[2], [3]])
    solo = [OneOfTwo() for _ in parts]
    for world, numbers in zip(solo, parts):
        of_batches(world, numbers)
    ranks = [
        of_batches(OneOfTwo(other.own), numbers)
        for other, numbers in zip(reversed(solo), parts)
    ]
    expected, errors = of_batches(World(), [[0, 1, 2, 3]])
    found = torch.cat([gradients for gradients, _ in ranks]) / 2
    torch.testing.assert_close(found, expected, rtol=SAME_MATH, atol=0)
    for _, shown in ranks:
        assert shown == pytest.approx(errors, rel=SAME_MATH, nan_ok=True)


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    """Six frames of three sizes: two with all labels, two open ones without virials, two with
    energies only.
    """
    folder = tmp_path_factory.mktemp("data")
    return [
        write_system(folder / "whole", frames=2, natoms=12, seed=1),
        write_system(folder / "open", frames=2, natoms=7, seed=2, pbc=False),
        write_system(
            folder / "energies", frames=2, natoms=10, seed=3, force=False, virial=False
        ),
    ]


OPTIONS = {
    "model__descriptor__interpolate": "never",
    "training__enable_ema": True,
    "training__ema_decay": 0.8,
    "training__gradient_max_norm": 0.5,
    "training__save_freq": 1,
    "training__disp_freq": 1,
    "training__max_ckpt_keep": 0,
    "training__averaging": [{"name": "slow", "decay": 0.9, "lcurve": True}],
}


@pytest.fixture
def start(tmp_path, monkeypatch, systems, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, batch_size, accumulate,
    options, **how).
    """
    train = trains_in(tmp_path, monkeypatch, (systems, [water_like_valid]), OPTIONS)

    def run(name, batch_size, accumulate, options=None, num_steps=6, **how):
        chosen = {
            "training__training_data__batch_size": batch_size,
            "training__accumulate": accumulate,
        }
        return train(name, num_steps, {**chosen, **(options or {})}, **how)

    return run


def parts_of(folder, step):
    """Return weights, averages and moments of a checkpoint: all but the positions in the data."""
    file = load(folder / f"model.ckpt-{step}.pt")
    return {key: file[key] for key in ("model", "averages", "optimizer", "step")}


def test_a_step_of_three_batches_is_one_of_a_batch_with_all_their_frames(start):
    once, thrice = start("once", "mixed:6", 1), start("thrice", "mixed:2", 3)
    assert_near(
        parts_of(thrice, 1), parts_of(once, 1), SAME_MATH
    )  # moments of the first step are the gradient
    assert_near(
        parts_of(thrice, 6), parts_of(once, 6), ROUNDING
    )  # and averages are updated once per step
    for name in ("lcurve.out", "lcurve_slow.out"):
        rows = [
            np.genfromtxt(folder / name, skip_header=2) for folder in (thrice, once)
        ]
        np.testing.assert_allclose(*rows, rtol=2e-3, atol=1e-6)  # of three digits
        assert len(rows[0]) == 6


def test_a_restart_continues_to_the_last_bit(start):
    options = {"training__disp_avg": True, "optimizer": {"type": "HybridMuon"}}
    whole = start("whole", "mixed:2", 2, options)
    with pytest.raises(Interrupted):
        start("parts", "mixed:2", 2, options, callback=StopAfter(4))
    parts = start("parts", "mixed:2", 2, options, restart="model.ckpt.pt")
    assert_same(load(whole / "model.ckpt-6.pt"), load(parts / "model.ckpt-6.pt"))
    for name in ("lcurve.out", "lcurve_slow.out"):
        assert (whole / name).read_bytes() == (parts / name).read_bytes()


def test_another_number_of_batches_at_a_restart_is_refused_or_reported(start, caplog):
    start("run", "mixed:2", 3, num_steps=2)
    with pytest.raises(
        ConfigError, match=r"training\.accumulate: 3 in the checkpoint, 2 in the input"
    ):
        start("run", "mixed:2", 2, restart="model.ckpt.pt")
    with caplog.at_level("WARNING"):
        start("run", "mixed:2", 2, restart="model.ckpt.pt", allow_config_change=True)
    assert (
        "a step has 4 frames on average now, over all ranks together, and had 6 when"
        in caplog.text
    )
    assert load("model.ckpt-6.pt")["streams"][""]["frames"] == 2 * 3 + 4 * 2


def test_a_batch_that_is_not_finite_skips_the_update_and_all_frames_of_the_step_are_named(
    start, monkeypatch
):
    add, seen = EnergyLoss.sums, []

    def spoiled(self, prediction, batch):
        seen.append(batch.frames)
        return [
            part * (torch.nan if len(seen) == 2 * 3 + 2 else 1)
            for part in add(self, prediction, batch)
        ]

    monkeypatch.setattr(EnergyLoss, "sums", spoiled)
    with pytest.raises(
        DivergedError, match=r"step 3: the loss or a gradient is not finite"
    ) as caught:
        start(
            "run",
            "mixed:2",
            3,
            {"training__averaging": [], "training__disp_training": False},
        )
    frames = {f"{system} frame {k}" for frames in seen[6:9] for system, k in frames}
    assert (len(seen), len(frames)) == (9, 6)
    assert all(name in str(caught.value) for name in frames)
    assert not os.path.exists("model.ckpt-3.pt")


def test_lengths_and_frames_are_those_of_steps_of_several_batches(start, caplog):
    options = {
        "training__numb_epoch": 4,
        "training__averaging": [{"name": "late", "decay": 0.9, "start_epoch": 2}],
    }
    with caplog.at_level("INFO"):
        start("run", "mixed:2", 2, options, num_steps=None)
    assert load("model.ckpt.pt")["step"] == 6  # 4 epochs of 3 batches, 2 in each step
    text = re.sub(" +", " ", caplog.text)
    assert " step 2 batches, 4 frames\n" in text
    assert (
        '6 steps = 4.0 epochs of 3 batches, batch_size "mixed:2", 2 batches a step'
        in text
    )
    assert "from epoch 2 (step 3)" in text


def test_epochs_that_are_other_steps_after_a_restart_are_named(start, caplog):
    options = {"training__numb_epoch": 4, "training__save_freq": 3}
    start("run", "mixed:2", 1, options, num_steps=None)
    assert "the epochs of the input" not in caplog.text
    how = {"restart": "model.ckpt-3.pt", "allow_config_change": True}
    start("run", "mixed:2", 2, options, num_steps=None, **how)
    assert "the epochs of the input are 6 steps now and were 12" in caplog.text
    start("run", "mixed:2", 2, options, num_steps=None, restart="model.ckpt.pt")
    assert "nothing is left to train. Raise training.numb_epoch" in caplog.text
