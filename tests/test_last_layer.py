"""Least squares for the output layer: columns are derivatives, and the solution is the best there is."""

import json
import shutil
from dataclasses import replace
from functools import cache

import parallel_runs
import pytest
import torch
from helpers import assert_same, tiny_input, write_system
from toy_models import TRICLINIC, VARIANTS, batch_of, toy_atoms, toy_model

from deepmd_ema import checkpoint
from deepmd_ema.config import config_from_dict
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.optim import EnerLossConfig, ExpScheduleConfig
from deepmd_ema.dist.world import World
from deepmd_ema.errors import ConfigError, UserError
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.solve import loss_weights
from deepmd_ema.labels import ENERGY, FORCE, LABELS, VIRIAL
from deepmd_ema.loss import EnergyLoss
from deepmd_ema.model import last_layer
from deepmd_ema.model.last_layer import (
    FITTED,
    _columns,
    changed_tensors,
    equations,
    num_unknowns,
    residuals,
    solve,
)
from deepmd_ema.optim.schedule import build_schedule
from deepmd_ema.training.run import run_training

LINEAR = 1e-9  # of the largest number: sums in another order
PREFACTORS = {ENERGY: 1.0, FORCE: 2.0, VIRIAL: 0.5}
SYMBOLS = {name: LABELS[name].symbol for name in PREFACTORS}


def frames_of(seeds, natoms=9):
    return [(*toy_atoms(seed, natoms), TRICLINIC) for seed in seeds]


def labelled(model, frames, lacking=()):
    """Return a batch whose labels are the predictions of ``model``; the frames ``lacking`` have no forces."""
    batch = batch_of(model, *frames)
    found = {name: value.detach() for name, value in model(batch).items() if name in FITTED}
    has_label = {name: torch.ones(len(frames), dtype=torch.float64) for name in found}
    has_label[FORCE][list(lacking)] = 0
    return replace(batch, labels=found, has_label=has_label)


def put(model, tensors):
    """Give the model other tensors and return what it had."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in tensors}
    model.load_state_dict(tensors, strict=False)
    return before


def random_change(model, seed=0, size=0.1):
    return size * torch.randn(num_unknowns(model), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CASES = {
    **{name: (name, {}, {}) for name in (*sorted(DESCRIPTORS), *VARIANTS) if "interpolated" not in name},
    "excluded_type": ("se_e2_a", {}, {"atom_exclude_types": [1]}),
    "excluded_type_in_one_network": ("se_atten", {}, {"atom_exclude_types": [1]}),
    "energies_of_atoms": ("se_e2_a", {"atom_ener": [-3.0, None, None]}, {}),
    "gated": ("dpa4c", {"type": "dpa4_ener", "neuron": [12], "precision": "float64"}, {}),
    "gated_dpa4": ("dpa4", {"type": "dpa4_ener", "neuron": [12], "precision": "float64"}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_linear_in_the_output_layer_and_the_columns_are_their_slopes(case):
    descriptor, fitting, changes = CASES[case]
    _, model = toy_model(descriptor, fitting_changes=fitting, **changes)
    batch = labelled(model, frames_of((1, 2)))
    change = random_change(model)
    put(model, changed_tensors(model, change))
    moved = model(batch)
    found = equations_of_one(model, batch)
    for name in FITTED:
        difference = (moved[name].detach() - batch.labels[name]).flatten()
        assert difference.abs().max() > 1e-3  # or nothing was tested
        torch.testing.assert_close(
            found[name] @ change, difference, rtol=LINEAR, atol=LINEAR * float(difference.abs().max())
        )


def equations_of_one(model, batch):
    """Return the columns of a batch (R, P) by label, from the right sides of its equations with unit residuals."""
    with torch.no_grad():
        return _columns(model, batch, with_forces=True)


def test_labels_of_another_output_layer_are_fitted_exactly():
    _, model = toy_model()
    before = put(model, changed_tensors(model, random_change(model)))
    *batches, others = (labelled(model, frames_of(range(start, start + 4)), lacking=(1,)) for start in range(0, 16, 4))
    put(model, before)
    start = residuals(model, [others], False).loss(PREFACTORS)
    found = solve([equations(model, [batch], False) for batch in batches], PREFACTORS)
    # half of the gain of the logarithm, which only rounding limits
    assert found.kept_apart[1] < 1e-7 * found.kept_apart[0]
    put(model, changed_tensors(model, found.change))
    assert residuals(model, [others], False).loss(PREFACTORS) < 1e-7 * start


@pytest.mark.parametrize("intensive", [False, True])
def test_the_loss_of_the_equations_is_that_of_training(intensive):
    _, model = toy_model()
    batch = labelled(model, frames_of(range(2)) + frames_of(range(2), 6), lacking=(0, 2))
    put(model, changed_tensors(model, random_change(model)))
    by_equations = equations(model, [batch], intensive).loss(PREFACTORS)
    assert by_equations == pytest.approx(residuals(model, [batch], intensive).loss(PREFACTORS), rel=1e-12)
    pref = {
        f"{when}_pref_{symbol}": PREFACTORS[name] for name, symbol in SYMBOLS.items() for when in ("start", "limit")
    }
    loss = EnergyLoss(EnerLossConfig(**pref, intensive_ener_virial=intensive), 1e-3, World())
    assert by_equations == pytest.approx(float(loss(model(batch), batch, 1e-3)[0]), rel=1e-12)


def test_the_prefactors_are_those_of_the_step():
    loss = EnerLossConfig(start_pref_e=0.02, limit_pref_e=1.0, start_pref_f=1000.0, limit_pref_f=1.0)
    section = ExpScheduleConfig(start_lr=0.01, stop_lr=0.001, decay_steps=1, smooth=True)
    for step in (1, 40, 100):
        found, rate = loss_weights(loss, section, 100, step), build_schedule(section, 100)(step - 1) / 0.01
        assert found[FORCE] == pytest.approx(1 + 999 * rate)
        assert found[ENERGY] == pytest.approx(1 - 0.98 * rate)


def test_labels_that_do_not_depend_on_the_unknowns_leave_the_weights_as_they_were_trained():
    _, model = toy_model()
    parts = []
    for start in range(0, 12, 4):
        batch = labelled(model, frames_of(range(start, start + 4)))
        noise = {name: torch.randn(value.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(start))
                 for name, value in batch.labels.items()}  # fmt: skip
        parts.append(equations(model, [replace(batch, labels={n: batch.labels[n] + noise[n] for n in noise})], False))
    found = solve(parts, PREFACTORS)
    assert found.kept_apart[1] <= found.kept_apart[0]
    assert found.ridge >= 0.1  # so few frames of noise determine nothing


def test_the_ridge_is_the_largest_with_half_of_the_largest_gain(monkeypatch):
    """The best ridge made weights whose terms cancel in the data only: dynamics of such a model failed."""
    _, model = toy_model()
    parts = []
    for start in range(0, 12, 4):
        batch = labelled(model, frames_of(range(start, start + 4)))
        noise = 0.01 * torch.randn(
            batch.labels[FORCE].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(start)
        )
        parts.append(replace(batch, labels=batch.labels | {FORCE: batch.labels[FORCE] + noise}))
    put(model, changed_tensors(model, random_change(model)))
    parts = [equations(model, [batch], False) for batch in parts]
    found = solve(parts, PREFACTORS)
    alone = {}
    for ridge in last_layer.RIDGES:
        with monkeypatch.context() as patch:
            patch.setattr(last_layer, "RIDGES", (ridge,))
            alone[ridge] = solve(parts, PREFACTORS).kept_apart
    before, best = found.kept_apart[0], min(after for _, after in alone.values())
    assert alone[found.ridge][1] == found.kept_apart[1]
    assert found.kept_apart[1] <= (before * best) ** 0.5
    larger = [after for ridge, (_, after) in alone.items() if ridge > found.ridge]
    assert larger
    assert min(larger) > (before * best) ** 0.5
    assert found.kept_apart[1] > best
    none = solve(parts, PREFACTORS, least=1e6)  # larger than every candidate
    assert not none.change.any()
    assert none.kept_apart == (before, before)


def test_energies_alone_move_what_energies_depend_on():
    _, model = toy_model()
    batch = labelled(model, frames_of(range(5)))
    both, alone = (equations(model, [batch], False, with_forces=with_forces) for with_forces in (True, False))
    torch.testing.assert_close(both.sums[ENERGY], alone.sums[ENERGY], rtol=1e-12, atol=1e-12)
    assert not alone.counts[FORCE]
    assert both.counts[FORCE] == 3 * len(batch.atom_type)


def test_an_element_that_no_frame_has_keeps_its_bias():
    _, model = toy_model()
    coord, types = toy_atoms(1, 9, num_types=2)
    batches = [labelled(model, [(coord + 0.01 * k, types, TRICLINIC)]) for k in range(3)]
    shifted = [replace(b, labels={**b.labels, ENERGY: b.labels[ENERGY] + 3}) for b in batches]
    change = solve([equations(model, [batch], False) for batch in shifted], PREFACTORS).change
    assert change[-1] == 0
    assert change[-2] != 0


# ---- training.solve_last_layer ----

SOLVED = {
    "training__solve_last_layer": True,
    "training__enable_ema": True,
    "training__ema_decay": 0.9,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 10,
    "validating__full_val_start": 0.0,
}


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [write_system(folder / name, frames=frames, seed=frames) for name, frames in (("train", 24), ("valid", 6))]


@pytest.fixture(scope="module")
def run(tmp_path_factory, systems):
    """Return a function that gives the folder of a run with or without the option, and what it returned."""

    @cache
    def made(solves, stage=0, ranks=1):
        folder = tmp_path_factory.mktemp("run")
        config = tiny_input(systems[:1], systems[1:], **SOLVED, training__zero_stage=stage)
        config["training"]["training_data"]["batch_size"] //= ranks
        config["training"]["solve_last_layer"] = solves
        (folder / "input.json").write_text(json.dumps(config))
        if ranks > 1:
            parallel_runs.train(folder, ranks)
            return folder, None
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return folder, run_training("input.json", device="cpu")

    return made


def test_solved_weights_are_in_the_files_and_raw_ones_in_the_checkpoint(run, systems):
    (solved, found), (plain, before) = run(True), run(False)
    one, two = (checkpoint.load(folder / "model.ckpt-20.pt") for folder in (solved, plain))
    for key in ("model", "optimizer", "averages", "streams", "display", "best"):
        assert_same(one[key], two[key], key)
    assert (solved / "val_ema.log").read_text() == (plain / "val_ema.log").read_text()
    assert one["refitted"].keys() == {"live", "ema"}
    layers = {"fitting.nets.0.layers.2.weight", "fitting.nets.1.layers.2.weight", "out_bias"}
    assert all(tensors.keys() == layers for tensors in one["refitted"].values())
    assert "refitted" not in checkpoint.load(solved / "model.ckpt-10.pt")
    for name, path in (("live", "model.ckpt.pt"), ("ema", "model_ema.ckpt.pt")):
        errors, old = found.errors[name], before.errors[name]
        assert errors["F:RMSE"] < 0.7 * old["F:RMSE"]
        assert errors["E:RMSE"] < 0.7 * old["E:RMSE"]
        tested = measure(solved / path, systems[1:], device="cpu").total
        assert {key: tested.metric(key) for key in errors} == errors


def test_a_restart_continues_from_the_raw_layers(run, tmp_path, monkeypatch):
    folders = [shutil.copytree(run(solves)[0], tmp_path / str(solves)) for solves in (True, False)]
    for folder in folders:
        monkeypatch.chdir(folder)
        config = json.loads((folder / "input.json").read_text())
        config["training"] |= {"numb_steps": 24, "solve_last_layer": False}
        (folder / "input.json").write_text(json.dumps(config))
        run_training("input.json", restart="model.ckpt.pt", device="cpu")
    one, two = (checkpoint.load(folder / "model.ckpt-24.pt") for folder in folders)
    for key in ("model", "optimizer", "averages"):
        assert_same(one[key], two[key], key)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_two_ranks_solve_for_the_layers_of_one_process(run, stage):
    one, two = (checkpoint.load(run(True, *how)[0] / "model.ckpt-20.pt")["refitted"] for how in ((), (stage, 2)))
    for weights, tensors in one.items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(two[weights][name], tensor, rtol=1e-6, atol=1e-8)


def test_few_frames_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_input([write_system(tmp_path / "few", frames=4)], **{"training__solve_last_layer": True}, num_steps=1)
    with pytest.raises(UserError, match="fitted to at least 5 frames, and there are 4"):
        run_training(config, device="cpu")


def test_a_loss_without_labels_of_the_layer_is_refused():
    weights = {
        f"{when}_pref_{symbol}": int(symbol == "ae") for when in ("start", "limit") for symbol in ["e", "f", "v", "ae"]
    }
    config = tiny_input(["x"], **{"training__solve_last_layer": True})
    config["loss"] = weights
    with pytest.raises(ConfigError, match="the loss has no energies, forces or virials to fit"):
        config_from_dict(config)
