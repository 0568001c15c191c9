"""The Kalman filter: DeePMD-kit's numbers, blocks, updates skipped, state; runs with it and with
matrix optimizers.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import assert_same
from lkf_cases import KINDS
from lkf_cases import OPTIONS as OPTIONS
from torch import nn
from training_runs import load

from deepmd_ema.config.labels import ENERGY, FORCE
from deepmd_ema.config.schema.optim import EnerLossConfig, ExpScheduleConfig, LKFConfig
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError, DivergedError
from deepmd_ema.optim.lkf import LKF
from deepmd_ema.training.kalman import KalmanStep, measure_force
from deepmd_ema.training.loss import EnergyLoss

GOLDEN = Path(__file__).parents[1] / "golden" / "optim" / "lkf.npz"
PEER = 1e-10
BLOCK = 10
GOOD, BAD = torch.tensor(1.0), torch.tensor(0.0)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as file:
        return {name: torch.tensor(file[name]) for name in file.files}


def numbered(golden, prefix):
    names = [
        name
        for name in golden
        if name.startswith(prefix) and name[len(prefix) :].isdigit()
    ]
    return [golden[f"{prefix}{k}"] for k in range(len(names))]


def parameters(golden):
    return [
        (f"p{k}", nn.Parameter(value.clone()))
        for k, value in enumerate(numbered(golden, "filter/w/"))
    ]


def measurement(golden, k):
    divisor = golden[f"filter/divisor/{k}"]
    gradients = [
        golden[f"filter/g/{i}/{k}"] / divisor
        for i in range(len(numbered(golden, "filter/w/")))
    ]
    return gradients, golden[f"filter/error/{k}"]


def everything(named, lkf):
    state = lkf.state_dict()
    return [p.detach().clone() for _, p in named] + [
        state["memory"],
        *state["covariances"],
    ]


def test_updates_are_those_of_deepmd_kit_also_after_one_called_off_and_from_a_saved_state(
    golden, tmp_path
):
    named = parameters(golden)
    lkf = LKF(named, BLOCK)
    for k in range(2):
        lkf.update(*measurement(golden, k), GOOD)
    before = everything(named, lkf)
    lkf.update(
        [g * torch.nan for g in measurement(golden, 2)[0]], torch.tensor(torch.inf), BAD
    )
    assert all(torch.equal(a, b) for a, b in zip(before, everything(named, lkf)))
    torch.save(lkf.state_dict(), tmp_path / "state.pt")
    others = [(name, nn.Parameter(p.detach().clone())) for name, p in named]
    restored = LKF(others, BLOCK)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for k in range(2, 5):
        lkf.update(*measurement(golden, k), GOOD)
        restored.update(*measurement(golden, k), GOOD)
    assert all(
        torch.equal(a, b)
        for a, b in zip(everything(named, lkf), everything(others, restored))
    )
    for (name, p), start, after in zip(
        named, numbered(golden, "filter/w/"), numbered(golden, "filter/after/")
    ):
        assert (p.detach() - start).abs().max() > 1e4 * PEER
        assert (p.detach() - after).abs().max() < PEER, name


def test_covariances_stay_symmetric_to_the_last_bit():
    generator, dtype = torch.Generator().manual_seed(2), torch.float32
    sizes = (7, 64, 33)
    lkf = LKF(
        [
            (f"p{k}", nn.Parameter(torch.zeros(n, dtype=dtype)))
            for k, n in enumerate(sizes)
        ],
        64,
    )
    for _ in range(20):
        gradients = [torch.randn(n, generator=generator, dtype=dtype) for n in sizes]
        lkf.update(gradients, torch.tensor(0.1), GOOD)
    for covariance in lkf.state_dict()["covariances"]:
        assert torch.equal(covariance, covariance.mT)
        assert bool((torch.linalg.eigvalsh(covariance.double()) > 0).all())


def test_states_that_do_not_fit_are_refused_and_change_nothing(golden):
    named = parameters(golden)
    lkf = LKF(named, BLOCK)
    lkf.update(*measurement(golden, 0), GOOD)
    state = lkf.state_dict()
    fresh = LKF(parameters(golden), 12)
    before = everything([], fresh)
    with pytest.raises(
        CheckpointError,
        match=r"blocks of up to 10 weights, optimizer\.kf_blocksize makes",
    ):
        fresh.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"it is of Adam, optimizer\.type is LKF"):
        fresh.load_state_dict({"type": "Adam", "state": {}})
    renamed = dict(
        state,
        parameters={
            ("other" if k == "p0" else k): v for k, v in state["parameters"].items()
        },
    )
    with pytest.raises(
        CheckpointError, match="other parameters than this model's: other, p0"
    ):
        fresh.load_state_dict(renamed)
    assert all(torch.equal(a, b) for a, b in zip(before, everything([], fresh)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_errors_go_down_and_a_restart_is_the_same_run_to_the_last_bit(kind, start):
    rates = {
        "learning_rate__start_lr": 0.02,
        "learning_rate__stop_lr": 1e-3,
        "training__disp_freq": 1,
    }
    options = {"optimizer": KINDS[kind], "training__save_freq": 30, **rates}
    folder = start("run", 60, options)
    rows, whole = (
        np.genfromtxt(folder / "lcurve.out", names=True),
        load("model.ckpt-60.pt"),
    )
    for name in ("rmse_e_trn", "rmse_f_trn"):
        first, last = rows[name][:3].mean(), rows[name][-3:].mean()
        assert last < 0.8 * first, (name, first, last)
    start("run", 60, options, restart="model.ckpt-30.pt")
    assert_same(whole, load("model.ckpt-60.pt"))


class Itself(nn.Module):
    """A model whose parameters are its energies and forces; ``poison`` makes the n-th evaluation of
    forces infinite.
    """

    def __init__(self, energy, force, poison=None):
        super().__init__()
        self.energy, self.force = (
            nn.Parameter(energy.clone()),
            nn.Parameter(force.clone()),
        )
        self.poison, self.calls = poison, 0

    def forward(self, batch, need_virial=False):
        self.calls += 1
        force = self.force.flatten(0, 1) * (
            torch.inf if self.calls == self.poison else 1
        )
        return {ENERGY: self.energy.flatten() * 1, FORCE: force}


def as_batch(energy, force):
    frames, atoms = force.shape[:2]
    found = torch.ones(frames, dtype=torch.float64)
    return SimpleNamespace(
        num_atoms=torch.full((frames,), atoms),
        num_frames=frames,
        atom_frame=torch.repeat_interleave(torch.arange(frames), atoms),
        labels={ENERGY: energy.flatten(), FORCE: force.flatten(0, 1)},
        has_label={ENERGY: found, FORCE: found.clone()},
        in_file_order=lambda values: values,
    )


@pytest.fixture
def measured(golden):
    """The golden update: (model, batch, numbers that choose the atoms, parameters after it)."""
    model = Itself(golden["wrapper/w/energy"], golden["wrapper/w/force"])
    batch = as_batch(golden["wrapper/energy"], golden["wrapper/force"])
    counts = torch.stack(numbered(golden, "wrapper/counts/"))
    atoms = counts.shape[1]
    numbers = torch.stack(
        [
            (torch.repeat_interleave(torch.arange(atoms), c) + 0.5) / atoms
            for c in counts
        ]
    )
    return (
        model,
        batch,
        numbers,
        {name: golden[f"wrapper/after/{name}"] for name in ("energy", "force")},
    )


def kalman_step(model, **factors):
    optimizer = LKFConfig(
        kf_blocksize=100,
        **(factors or {"kf_start_pref_e": 1.5, "kf_limit_pref_e": 1.5}),
    )
    config = SimpleNamespace(
        optimizer=optimizer, learning_rate=ExpScheduleConfig(start_lr=1.0)
    )
    model.tasks_of_parameters = lambda: {
        name: [""] for name, _ in model.named_parameters()
    }
    loss = EnergyLoss(EnerLossConfig(), 1.0, World())
    task = SimpleNamespace(
        models=lambda _, batch, **how: model(batch, **how), loss=loss, name=""
    )
    return task, KalmanStep(SimpleNamespace(models=model, config=config, seed=0), 10)


def test_a_step_of_the_kalman_filter_is_that_of_deepmd_kit(measured, monkeypatch):
    model, batch, numbers, after = measured
    factors = {
        f"kf_{when}_pref_{term}": c
        for when in ("start", "limit")
        for term, c in (("e", 1.5), ("f", 3.0))
    }
    task, step = kalman_step(model, **factors)
    monkeypatch.setattr(step, "_draws", lambda *_: numbers)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    outcome = step.update(task, [batch], 1.0, 1)
    assert outcome.ok == 1
    for name, p in model.named_parameters():
        assert (p.detach() - before[name]).abs().max() > 1e4 * PEER
        assert (p.detach() - after[name]).abs().max() < PEER


def test_factors_go_from_start_to_limit_as_in_deepmd_kit(measured):
    """The numbers are those that a run of five steps from 2 to 1 gave its Kalman filter."""
    _, step = kalman_step(measured[0])
    step._num_steps = 5
    assert step._between(2.0, 1.0, 1) == 2
    assert step._between(2.0, 1.0, 4) == pytest.approx(1.3195079107728942)


def test_frames_of_other_sizes_count_per_atom_and_choose_their_own_atoms():
    force = torch.arange(15.0, dtype=torch.float64).reshape(5, 3).requires_grad_()
    batch = SimpleNamespace(
        num_atoms=torch.tensor([2, 3]),
        labels={FORCE: torch.zeros(5, 3, dtype=torch.float64)},
        has_label={FORCE: torch.ones(2, dtype=torch.float64)},
        in_file_order=lambda values: values,
    )
    scalar, error, found = measure_force(force, batch, 1.0, torch.tensor([0.1, 0.99]))
    (gradient,) = torch.autograd.grad(scalar, force)
    # atoms 0 and 1 of the first frame, 0 and 2 of the second; errors are all negative: labels are
    # zero
    expected = (
        torch.tensor([1 / 2, 1 / 2, 1 / 3, 0, 1 / 3], dtype=torch.float64)[:, None] / 6
    )
    signs = torch.where(force > 0, -1, 1)
    torch.testing.assert_close(gradient, expected * signs)
    means = [force[[0, 1]].mean().item() / 2, force[[2, 4]].mean().item() / 3]
    assert error.item() == pytest.approx(2**0.5 * sum(means) / 2)
    assert found == 1


@pytest.mark.parametrize("poison", [1, 3])
def test_nothing_changes_after_an_update_that_was_not_finite(measured, poison):
    model, batch, _, _ = measured
    model.poison = poison
    task, step = kalman_step(model)
    assert step.update(task, [batch], 1.0, 1).ok == 0
    values = [p.detach().clone() for p in model.parameters()]
    assert all(p.isfinite().all() for p in values)
    model.poison = None
    assert step.update(task, [batch], 1.0, 2).ok == 0
    assert all(torch.equal(p, q) for p, q in zip(values, model.parameters()))
    tasks = SimpleNamespace(draw=lambda _: task)
    task.frames_of_step = lambda back: [("water", 3)]
    with pytest.raises(
        DivergedError,
        match=r"step 1.*water frame 3.*were not updated by that step after its first update",
    ) as e:
        step.raise_if_diverged(tasks, 2, World())
    assert "lower optimizer.kf_start_pref_e" in str(e.value)
