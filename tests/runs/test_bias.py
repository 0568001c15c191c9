"""The output bias fitted to data with the weights a model has: what is zero after it, and what
stays as it was.
"""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input, write_system

from deepmd_ema import checkpoint, cli
from deepmd_ema.averaging import AverageBank
from deepmd_ema.commands.freeze import freeze
from deepmd_ema.config import config_from_dict
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.distributed.world import World
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model
from deepmd_ema.training.prepare import chosen_frames, prepare, refit_bias
from deepmd_ema.training.weights import Start

SHIFT = 3.0  # eV, of each atom of the first element: the labels are those of another energy zero
ZERO = 1e-10  # eV/atom
SIZES = (
    (12, 2),
    (8, 1),
    (8, 2),
    (18, 2),
)  # atoms of a frame, and how many elements they are of


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
        shift_energies(
            write_system(
                folder / f"{k}", frames=6, natoms=natoms, seed=k, num_types=num_types
            )
        )
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
    return np.mean(
        [(f.label[ENERGY] - f.prediction[ENERGY]) / f.num_atoms for f in frames]
    )


REFIT = {"training__change_bias_after_training": True}
BANK = {
    "training__averaging": [
        {"name": "long", "type": "power", "sigma_rel": 0.1},
        {"name": "wide", "type": "swa", "dtype": "float64"},
    ]
}


def test_after_training_every_file_has_a_bias_of_its_own(tmp_path, data, monkeypatch):
    """The live file and each averaged file have no mean residual per atom on the training
    frames.
    """
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
    one = freeze(
        load_model(folder / "model.ckpt-20.pt", average="long"), tmp_path / "one.yaml"
    )
    two = freeze(load_model(folder / "model_long.ckpt-20.pt"), tmp_path / "two.yaml")
    same_arrays(one.path, two.path)
    assert abs(mean_of_file(one.path, data)) < ZERO


def same_arrays(one, two):
    ours, theirs = (
        load_model(one).model.state_dict(),
        load_model(two).model.state_dict(),
    )
    assert_same(dict(ours), dict(theirs))


def test_a_restart_continues_from_the_raw_bias(tmp_path, data, monkeypatch):
    """The last checkpoint of a run with a fitted bias continues bitwise as that of a run
    without.
    """
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


def test_a_fit_that_is_ended_early_costs_no_step_of_the_run(
    tmp_path, data, monkeypatch
):
    """The last steps were lost with a kill or an error in the fit; now a restart has the fit only
    left to do.
    """

    def fail(*_):
        raise KeyboardInterrupt

    whole = checkpoint.load(
        train(tmp_path / "whole", data, monkeypatch, num_steps=7, **REFIT)
        / "model.ckpt-7.pt"
    )
    folder = tmp_path / "run"
    with monkeypatch.context() as broken:
        broken.setattr("deepmd_ema.training.trainer.refit_bias", fail)
        with pytest.raises(AssertionError):
            train(folder, data, monkeypatch, num_steps=7, **REFIT)
    assert "refitted" not in checkpoint.load(folder / "model.ckpt-7.pt")
    train(folder, data, monkeypatch, "--restart", "model.ckpt.pt", num_steps=7, **REFIT)
    again = checkpoint.load(folder / "model.ckpt-7.pt")
    for key in ("model", "optimizer", "averages", "streams", "refitted"):
        assert_same(whole[key], again[key], key)


def test_readers_and_a_new_run_take_the_fitted_bias(tmp_path, data, monkeypatch):
    path = (
        train(tmp_path / "run", data, monkeypatch, num_steps=10, **REFIT)
        / "model.ckpt-10.pt"
    )
    payload = checkpoint.load(path)
    live, ema = (payload["refitted"][name]["out_bias"] for name in ("live", "ema"))
    assert torch.equal(load_model(path).model.out_bias, live)
    assert torch.equal(load_model(path, use_average=True).model.out_bias, ema)
    assert not torch.equal(payload["model"]["out_bias"], live)
    for file, bias in ((path, live), (path.with_name("model_ema.ckpt-10.pt"), ema)):
        new = train(
            tmp_path / file.stem,
            data,
            monkeypatch,
            "--init-model",
            str(file),
            num_steps=1,
        )
        assert torch.equal(
            checkpoint.load(new / "model.ckpt-1.pt")["model"]["out_bias"], bias
        )


def prepared(systems, **changes):
    return prepare(config_from_dict(tiny_input(systems, **changes)), Start(), World())


def test_many_frames_give_a_sample_of_every_system(data, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    run = prepared(data)
    assert (
        chosen_frames(run.tasks[""].config, run.tasks[""].train, run.seed, 24)
        == [list(range(6))] * 4
    )
    chosen = chosen_frames(run.tasks[""].config, run.tasks[""].train, run.seed, 10)
    assert sorted(map(len, chosen)) == [2, 2, 3, 3]
    assert all(
        frames == sorted(set(frames)) and set(frames) <= set(range(6))
        for frames in chosen
    )
    assert chosen == chosen_frames(
        run.tasks[""].config, prepared(data).tasks[""].train, run.seed, 10
    )
    monkeypatch.setattr("deepmd_ema.training.prepare.MAX_FRAMES", 10)
    with caplog.at_level(logging.INFO):
        refit_bias(run, AverageBank(run.models.by_task, []))
    assert "with the weights live on 10 frames: mean residual" in caplog.text
    assert "meV/atom before, 0 after" in caplog.text


def test_without_energies_there_is_nothing_to_fit_and_a_warning_says_so(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.chdir(tmp_path)
    system = write_system(tmp_path / "forces", frames=2, energy=False)
    run = prepared([system], loss__start_pref_e=0, loss__limit_pref_e=0)
    assert refit_bias(run, AverageBank(run.models.by_task, [])) == {}
    assert (
        "training.change_bias_after_training: no training frame has an energy"
        in caplog.text
    )
