"""The output bias fitted to data with the weights a model has: what is zero after it, and what stays as it was."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input, toy_frame, toy_labels, write_system
from infer_models import random_model, tiny_config

from deepmd_ema import checkpoint, cli
from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.data.collate import collate
from deepmd_ema.data.source import Frame
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import DataError
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.interop.freeze import freeze
from deepmd_ema.model.output_bias import change_bias, energies_of, set_bias
from deepmd_ema.model.statistics import collect_statistics
from deepmd_ema.training.prepare import chosen_frames, prepare, refit_bias
from deepmd_ema.training.weights import Start

SHIFT = 3.0  # eV, of each atom of the first element: the labels are those of another energy zero
ZERO = 1e-10  # eV/atom
SIZES = ((12, 2), (8, 1), (8, 2), (18, 2))  # atoms of a frame, and how many elements they are of


def shifted_frames(repeats=3, seed=0):
    """Return frames of different sizes and compositions whose energies have another zero."""
    rng, frames = np.random.default_rng(seed), []
    for natoms, num_types in SIZES * repeats:
        coord, types, box = toy_frame(rng, natoms, num_types)
        energy = toy_labels(coord, types, box)[0] + SHIFT * (types == 0).sum()
        frames.append(Frame(coord, types, box, {ENERGY: energy}, source=("shifted", len(frames))))
    return frames


def batches_of(frames, model, frames_per_batch=5):
    for k in range(0, len(frames), frames_per_batch):
        yield collate(frames[k : k + frames_per_batch], model.layout, labels=[ENERGY])


def mean_residual(model, frames):
    """Return the mean of label minus prediction per atom, eV, as the whole model gives it frame by frame."""
    errors = []
    for batch, frame in zip(batches_of(frames, model, 1), frames, strict=True):
        errors.append((frame.labels[ENERGY] - float(model(batch)[ENERGY][0])) / len(frame.atom_type))
    return np.mean(errors)


def fitted(model, config, frames):
    return change_bias(energies_of(model, config.model, batches_of(frames, model)), current(model))


def current(model):
    return model.out_bias.view(-1).numpy().copy()


def put(model, bias):
    model.out_bias.copy_(torch.from_numpy(bias).view(1, -1, 1))


def test_the_mean_residual_per_atom_is_zero_with_the_weights_that_the_bias_was_fitted_with():
    """Frames of different sizes and compositions, labels of another energy zero: live and averaged weights alike."""
    config, frames = tiny_config(), shifted_frames()
    model = random_model(config)
    bank = AverageBank(model, [EmaProfile("fast", 0.5), PowerProfile("long", 6.0)])
    for _ in range(3):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        bank.update()
    biases = {}
    assert abs(mean_residual(model, frames)) > 0.1
    biases["live"] = fitted(model, config, frames).bias
    for name in bank.names:
        with bank.swapped_in(name):
            biases[name] = fitted(model, config, frames).bias
    raw = current(model)
    assert len({tuple(bias) for bias in biases.values()}) == 3
    put(model, biases["live"])
    assert abs(mean_residual(model, frames)) < ZERO
    for name in bank.names:
        put(model, biases[name])
        with bank.swapped_in(name):
            assert abs(mean_residual(model, frames)) < ZERO
        put(model, biases["live"])
        with bank.swapped_in(name):  # what DeePMD-kit ships: the averaged weights with the bias of the live ones
            assert abs(mean_residual(model, frames)) > 1e-4
    assert abs(biases["live"] - raw).max() > 1


def test_set_is_what_the_statistics_of_a_new_model_find():
    config, frames = tiny_config(), shifted_frames()
    model = random_model(config)
    statistics = collect_statistics(model, config.model, batches_of(frames, model))
    found = set_bias(energies_of(model, config.model, batches_of(frames, model)))
    np.testing.assert_array_equal(found.bias, statistics.fit.bias)
    np.testing.assert_array_equal(found.std, statistics.fit.std)


def test_frames_without_an_energy_do_not_count():
    config, model = tiny_config(), random_model(tiny_config())
    frames = shifted_frames()
    without = [replace(f, labels={} if k % 3 == 0 else f.labels) for k, f in enumerate(frames)]
    rest = [f for k, f in enumerate(frames) if k % 3]
    np.testing.assert_allclose(
        fitted(model, config, without).bias, fitted(model, config, rest).bias, rtol=0, atol=1e-11
    )
    assert len(energies_of(model, config.model, batches_of(without, model))) == len(rest)


def test_a_model_that_gives_no_number_names_the_frame():
    config, model = tiny_config(), random_model(tiny_config())
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(DataError, match=r"shifted: frame 0 \(from 0\): the model gives no finite energy"):
        fitted(model, config, shifted_frames())


# ---- after training ----


def shift_energies(system):
    """Move the energy zero of a system on the disk."""
    types = np.loadtxt(system / "type.raw", dtype=int)
    for file in system.glob("set.*/energy.npy"):
        np.save(file, np.load(file) + SHIFT * (types == 0).sum())
    return system


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shifted")
    return [
        shift_energies(write_system(folder / f"{k}", frames=6, natoms=natoms, seed=k, num_types=num_types))
        for k, (natoms, num_types) in enumerate(SIZES)
    ]


def train(folder, data, monkeypatch, *words, **changes):
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    more = {"training__enable_ema": True, "training__ema_decay": 0.9, **changes}
    Path("input.json").write_text(json.dumps(tiny_input(data, data[:1], **more)))
    assert cli.main(["train", "input.json", "--device", "cpu", *words]) == 0
    return folder


def mean_of_file(path, data, **options):
    frames = measure(path, data, device="cpu", **options).frames
    return np.mean([(f.label[ENERGY] - f.prediction[ENERGY]) / f.num_atoms for f in frames])


REFIT = {"training__change_bias_after_training": True}
BANK = {
    "training__averaging": [
        {"name": "long", "type": "power", "sigma_rel": 0.1},
        {"name": "wide", "type": "swa", "dtype": "float64"},
    ]
}


def test_after_training_every_file_has_a_bias_of_its_own(tmp_path, data, monkeypatch):
    """The live file and each averaged file have no mean residual per atom on the training frames."""
    folder = train(tmp_path / "run", data, monkeypatch, **REFIT, **BANK)
    plain = train(tmp_path / "plain", data, monkeypatch, **BANK)
    names = ("ema", "long", "wide")
    assert abs(mean_of_file(plain / "model.ckpt-20.pt", data)) > 0.01
    assert abs(mean_of_file(folder / "model.ckpt-20.pt", data)) < ZERO
    for name in names:
        assert abs(mean_of_file(plain / f"model_{name}.ckpt-20.pt", data)) > 0.01
        assert abs(mean_of_file(folder / f"model_{name}.ckpt-20.pt", data)) < ZERO
    payload = checkpoint.load(folder / "model.ckpt-20.pt")
    assert sorted(payload["refitted"]) == ["ema", "live", "long", "wide"]
    without = checkpoint.load(plain / "model.ckpt-20.pt")
    assert_same(payload["model"], without["model"])
    assert_same(payload["averages"], without["averages"])
    for name in names:
        averaged = checkpoint.load(folder / f"model_{name}.ckpt-20.pt")["model"]
        assert torch.equal(averaged["out_bias"], payload["refitted"][name]["out_bias"])
        inside, facts = checkpoint.weights_in(payload, "x", name)
        assert_same(inside, averaged)
        assert facts["profile"] == name
    # only the last files are fitted again
    assert "refitted" not in checkpoint.load(folder / "model.ckpt-10.pt")
    one = freeze(load_model(folder / "model.ckpt-20.pt", average="long"), tmp_path / "one.yaml")
    two = freeze(load_model(folder / "model_long.ckpt-20.pt"), tmp_path / "two.yaml")
    same_arrays(one.path, two.path)
    assert abs(mean_of_file(one.path, data)) < ZERO


def same_arrays(one, two):
    ours, theirs = load_model(one).model.state_dict(), load_model(two).model.state_dict()
    assert_same(dict(ours), dict(theirs))


def test_a_restart_continues_from_the_raw_bias(tmp_path, data, monkeypatch):
    """The last checkpoint of a run with a fitted bias continues bitwise as that of a run without."""
    folders = []
    for name, changes in (("fitted", REFIT), ("plain", {})):
        folder = train(tmp_path / name, data, monkeypatch, num_steps=10, **changes)
        train(folder, data, monkeypatch, "--restart", "model.ckpt.pt", num_steps=20)
        folders.append(folder)
    assert "refitted" in checkpoint.load(folders[0] / "model.ckpt-10.pt")
    one, two = (checkpoint.load(folder / "model.ckpt-20.pt") for folder in folders)
    for key in ("model", "optimizer", "averages", "streams", "display"):
        assert_same(one[key], two[key], key)
    rows = [(folder / "lcurve.out").read_text() for folder in folders]
    assert rows[0] == rows[1]


def test_a_fit_that_is_ended_early_costs_no_step_of_the_run(tmp_path, data, monkeypatch):
    """The last steps were lost with a kill or an error in the fit; now a restart has the fit only left to do."""

    def fail(*_):
        raise KeyboardInterrupt

    folder = train(tmp_path / "whole", data, monkeypatch, num_steps=7, **REFIT)
    with monkeypatch.context() as broken:
        broken.setattr("deepmd_ema.training.trainer.refit_bias", fail)
        with pytest.raises(AssertionError):
            train(tmp_path / "run", data, monkeypatch, num_steps=7, **REFIT)
    assert "refitted" not in checkpoint.load(tmp_path / "run" / "model.ckpt-7.pt")
    train(tmp_path / "run", data, monkeypatch, "--restart", "model.ckpt.pt", num_steps=7, **REFIT)
    one, two = (checkpoint.load(f / "model.ckpt-7.pt") for f in (folder, tmp_path / "run"))
    for key in ("model", "optimizer", "averages", "streams", "refitted"):
        assert_same(one[key], two[key], key)


def test_readers_and_a_new_run_take_the_fitted_bias(tmp_path, data, monkeypatch):
    folder = train(tmp_path / "run", data, monkeypatch, num_steps=10, **REFIT)
    path = folder / "model.ckpt-10.pt"
    payload = checkpoint.load(path)
    live, ema = (payload["refitted"][name]["out_bias"] for name in ("live", "ema"))
    assert torch.equal(load_model(path).model.out_bias, live)
    assert torch.equal(load_model(path, use_average=True).model.out_bias, ema)
    assert not torch.equal(payload["model"]["out_bias"], live)
    coord, types, box = toy_frame(np.random.default_rng(0), 12)
    frozen = freeze(load_model(path), tmp_path / "m.dp").path
    ours, theirs = (Potential(p, device="cpu").evaluate(coord, types, box).energy for p in (path, frozen))
    np.testing.assert_array_equal(ours, theirs)
    new = train(tmp_path / "new", data, monkeypatch, "--init-model", str(path), num_steps=1)
    assert torch.equal(checkpoint.load(new / "model.ckpt-1.pt")["model"]["out_bias"], live)
    averaged = folder / "model_ema.ckpt-10.pt"
    new = train(tmp_path / "other", data, monkeypatch, "--init-model", str(averaged), num_steps=1)
    found = checkpoint.load(new / "model.ckpt-1.pt")["model"]["out_bias"]
    assert torch.equal(found, ema)


@pytest.fixture
def prepared(data, tmp_path, monkeypatch):
    def make(systems=data, **changes):
        from deepmd_ema.config import config_from_dict

        monkeypatch.chdir(tmp_path)
        return prepare(config_from_dict(tiny_input(systems, **changes)), Start(), World())

    return make


def test_many_frames_give_a_sample_of_every_system(prepared, data, monkeypatch, caplog):
    run = prepared()
    assert chosen_frames(run.tasks[""].config, run.tasks[""].train, run.seed, 24) == [list(range(6))] * 4
    chosen = chosen_frames(run.tasks[""].config, run.tasks[""].train, run.seed, 10)
    assert sum(map(len, chosen)) == 10
    assert {len(frames) for frames in chosen} <= {2, 3}
    assert all(frames == sorted(set(frames)) and set(frames) <= set(range(6)) for frames in chosen)
    assert chosen == chosen_frames(run.tasks[""].config, prepared().tasks[""].train, run.seed, 10)
    assert chosen != chosen_frames(run.tasks[""].config, run.tasks[""].train, 11, 10)
    monkeypatch.setattr("deepmd_ema.training.prepare.MAX_FRAMES", 10)
    with caplog.at_level(logging.INFO):
        refit_bias(run, AverageBank(run.models.by_task, []))
    assert "with the weights live on 10 frames: mean residual" in caplog.text
    assert "meV/atom before, 0 after" in caplog.text


def test_without_energies_there_is_nothing_to_fit_and_a_warning_says_so(prepared, tmp_path, caplog):
    system = write_system(tmp_path / "forces", frames=2, energy=False)
    run = prepared([system], loss__start_pref_e=0, loss__limit_pref_e=0)
    assert refit_bias(run, AverageBank(run.models.by_task, [])) == {}
    assert "training.change_bias_after_training: no training frame has an energy" in caplog.text
