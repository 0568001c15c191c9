"""Runs with AdaMuon, HybridMuon and the Kalman filter: errors go down, a restart is the same run."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import assert_same, trains_in
from test_optim_lkf import GOLDEN, PEER, numbered
from test_train import load
from torch import nn

from deepmd_ema.config.labels import ENERGY, FORCE
from deepmd_ema.config.schema.optim import EnerLossConfig, ExpScheduleConfig, LKFConfig
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import DivergedError
from deepmd_ema.training.kalman import KalmanStep, measure_force
from deepmd_ema.training.loss import EnergyLoss

KINDS = {
    "AdaMuon": {"type": "AdaMuon"},
    "HybridMuon": {"type": "HybridMuon"},
    "SOAP": {"type": "SOAP"},
    "LKF": {"type": "LKF", "kf_blocksize": 64, "kf_start_pref_f": 2.0},
}
NO_VIRIAL = {"loss__start_pref_v": 0, "loss__limit_pref_v": 0}


@pytest.fixture
def start(tmp_path, monkeypatch, water_like):
    """Return a function that trains in a folder of its own: start(name, num_steps, options, **how)."""
    return trains_in(tmp_path, monkeypatch, ([water_like], None), NO_VIRIAL)


@pytest.mark.parametrize("kind", KINDS)
def test_errors_go_down_and_a_restart_is_the_same_run_to_the_last_bit(kind, start):
    rates = {"learning_rate__start_lr": 0.02, "learning_rate__stop_lr": 1e-3, "training__disp_freq": 1}
    options = {"optimizer": KINDS[kind], "training__save_freq": 30, **rates}
    folder = start("run", 60, options)
    rows, whole = np.genfromtxt(folder / "lcurve.out", names=True), load("model.ckpt-60.pt")
    for name in ("rmse_e_trn", "rmse_f_trn"):
        first, last = rows[name][:3].mean(), rows[name][-3:].mean()
        assert last < 0.8 * first, (name, first, last)
    start("run", 60, options, restart="model.ckpt-30.pt")
    assert_same(whole, load("model.ckpt-60.pt"))


class Itself(nn.Module):
    """A model whose parameters are its energies and forces; ``poison`` makes the n-th evaluation of forces infinite."""

    def __init__(self, energy, force, poison=None):
        super().__init__()
        self.energy, self.force = nn.Parameter(energy.clone()), nn.Parameter(force.clone())
        self.poison, self.calls = poison, 0

    def forward(self, batch, need_virial=False):
        self.calls += 1
        force = self.force.flatten(0, 1) * (torch.inf if self.calls == self.poison else 1)
        return {ENERGY: self.energy.flatten() * 1, FORCE: force}


def as_batch(energy, force):
    frames, atoms = force.shape[:2]
    found = torch.ones(frames, dtype=torch.float64)
    return SimpleNamespace(
        num_atoms=torch.full((frames,), atoms), num_frames=frames,
        atom_frame=torch.repeat_interleave(torch.arange(frames), atoms),
        labels={ENERGY: energy.flatten(), FORCE: force.flatten(0, 1)}, has_label={ENERGY: found, FORCE: found.clone()},
        in_file_order=lambda values: values,
    )  # fmt: skip


@pytest.fixture
def measured():
    """The golden update: (model, batch, numbers that choose the atoms, parameters after it)."""
    with np.load(GOLDEN) as file:
        golden = {name: torch.tensor(file[name]) for name in file.files}
    model = Itself(golden["wrapper/w/energy"], golden["wrapper/w/force"])
    batch = as_batch(golden["wrapper/energy"], golden["wrapper/force"])
    counts = torch.stack(numbered(golden, "wrapper/counts/"))
    atoms = counts.shape[1]
    numbers = torch.stack([(torch.repeat_interleave(torch.arange(atoms), c) + 0.5) / atoms for c in counts])
    return model, batch, numbers, {name: golden[f"wrapper/after/{name}"] for name in ("energy", "force")}


def kalman_step(model, **factors):
    optimizer = LKFConfig(kf_blocksize=100, **(factors or {"kf_start_pref_e": 1.5, "kf_limit_pref_e": 1.5}))
    config = SimpleNamespace(optimizer=optimizer, learning_rate=ExpScheduleConfig(start_lr=1.0))
    model.tasks_of_parameters = lambda: {name: [""] for name, _ in model.named_parameters()}
    loss = EnergyLoss(EnerLossConfig(), 1.0, World())
    task = SimpleNamespace(models=lambda _, batch, **how: model(batch, **how), loss=loss, name="")
    return task, KalmanStep(SimpleNamespace(models=model, config=config, seed=0), 10)


def test_a_step_of_the_kalman_filter_is_that_of_deepmd_kit(measured, monkeypatch):
    model, batch, numbers, after = measured
    factors = {f"kf_{when}_pref_{term}": c for when in ("start", "limit") for term, c in (("e", 1.5), ("f", 3.0))}
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
    # atoms 0 and 1 of the first frame, 0 and 2 of the second; errors are all negative: labels are zero
    expected = torch.tensor([1 / 2, 1 / 2, 1 / 3, 0, 1 / 3], dtype=torch.float64)[:, None] / 6
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
        DivergedError, match=r"step 1.*water frame 3.*were not updated by that step after its first update"
    ) as e:
        step.raise_if_diverged(tasks, 2, World())
    assert "lower optimizer.kf_start_pref_e" in str(e.value)
