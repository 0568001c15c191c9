"""Freeze: what is in the file, that it is the same model, and that nothing is lost when it
fails.
"""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import toy_frame
from infer_models import write_run

from deepmd_ema import cli
from deepmd_ema.commands.freeze import freeze
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.interop import dp


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


def predict(path):
    coord, types, box = toy_frame(np.random.default_rng(4), 12)
    found = Potential(path, device="cpu").evaluate(coord, types, box)
    return np.concatenate([found.energy, found.force.ravel(), found.virial.ravel()])


@pytest.mark.parametrize("suffix", [".dp", ".yaml"])
@pytest.mark.parametrize("use_average", [False, True])
def test_a_frozen_file_computes_what_the_checkpoint_computes(
    run, tmp_path, suffix, use_average
):
    frozen = freeze(
        load_model(run[0], use_average=use_average), tmp_path / f"m{suffix}"
    )
    assert max(frozen.difference.values()) == 0
    np.testing.assert_array_equal(
        predict(frozen.path), predict(run[1] if use_average else run[0])
    )


def test_weights_that_are_not_finite_are_the_fault_of_the_checkpoint(run, tmp_path):
    """The frozen file was called another model, to be reported."""
    loaded = load_model(run[0])
    with torch.no_grad():
        loaded.model.fitting.nets[0].layers[0].bias[0] = torch.inf
    with pytest.raises(
        CheckpointError,
        match=r"model.ckpt-7.pt: damaged, fitting.nets.0.layers.0.bias is not finite",
    ):
        freeze(loaded, tmp_path / "m.dp")


def test_a_frozen_file_says_which_weights_it_holds(run, tmp_path):
    averaged = load_model(
        freeze(load_model(run[0], use_average=True), tmp_path / "a.dp").path
    ).info
    live = load_model(freeze(load_model(run[0]), tmp_path / "b.dp").path).info
    assert (
        averaged.describe()
        == "averaged weights (ema) of step 7: decay 0.99, 7 updates, looks back 4.5 steps on "
        "average"
    )
    assert (averaged.average["profile"], averaged.min_nbor_dist) == ("ema", 0.9)
    assert live.describe() == "live weights of step 7"
    assert live.config["training"]["seed"] == 10
    assert load_model(tmp_path / "a.dp", use_average=True).info.weights == "ema"
    with pytest.raises(
        CheckpointError, match=r"b.dp: holds live weights \(frozen\), no average"
    ):
        load_model(tmp_path / "b.dp", use_average=True)


def test_the_command_freezes_the_newest_checkpoint_of_a_folder(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(run[0].parent)
    assert cli.main(["freeze", "-o", str(tmp_path / "live")]) == 0
    assert cli.main(["freeze", "--use-ema", "-o", str(tmp_path / "ema.dp")]) == 0
    assert (
        cli.main(
            [
                "freeze",
                "--profile",
                "ema",
                "-c",
                "model.ckpt",
                "-o",
                str(tmp_path / "profile.dp"),
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "live.dp: live weights of step 7, from model.ckpt-7.pt" in out
    assert "averaged weights (ema) of step 7: decay 0.99" in out
    assert "largest differences: energy 0.0e+00 eV, " in out
    assert "for LAMMPS with DeePMD-kit: dp-ema freeze -c" in out
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "ema.dp",
        "live.dp",
        "profile.dp",
    ]


@pytest.mark.parametrize(
    ("changes", "is_said"),
    [
        ({"loss": {"start_pref_e": 1}}, True),
        ({}, True),
        ({"loss": {"start_pref_e": 1, "limit_pref_v": 1}}, False),
        ({"loss": {"type": "tensor"}}, False),
        ({"loss_dict": {"a": {"start_pref_v": 1}, "b": {}}}, True),
    ],
)
def test_pressures_of_a_model_without_virials_are_named(
    run, tmp_path, changes, is_said
):
    loaded = load_model(run[0])
    config = {
        name: value for name, value in loaded.info.config.items() if name != "loss"
    }
    info = replace(
        loaded.info,
        config={**config, **changes},
        head="b" if "loss_dict" in changes else "",
    )
    text = freeze(replace(loaded, info=info), tmp_path / "m.dp").text()
    said = (
        "trained without virials: pressures and stresses mean nothing if all training frames had "
        "one cell"
    )
    assert (said in text.splitlines()) == is_said


def test_a_file_that_came_out_wrong_is_not_kept(run, tmp_path, monkeypatch):
    old = freeze(load_model(run[0]), tmp_path / "m.dp").path
    before = old.read_bytes()

    def bent(path):
        stored = true(path)
        stored.model.out_bias += 1e-3
        return stored

    true = dp.read_dp
    monkeypatch.setattr(dp, "read_dp", bent)
    with pytest.raises(
        CheckpointError,
        match=r"differs from the checkpoint by 8.0e-03 in energy.*was not kept",
    ):
        freeze(load_model(run[1]), old)
    assert old.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.dp"]


def test_a_missing_folder_and_a_foreign_suffix_are_refused(run, tmp_path):
    with pytest.raises(UserError, match=r"the folder .*nowhere is not there"):
        freeze(load_model(run[0]), tmp_path / "nowhere" / "m.dp")
    with pytest.raises(
        UserError,
        match=r"Write .*m.dp, then `dp convert-backend .*m.dp .*m.savedmodel`",
    ):
        freeze(load_model(run[0]), tmp_path / "m.savedmodel")


def test_a_disk_that_fills_up_while_freezing_is_reported_and_ends_nothing(tmp_path):
    """HDF5 ended the process by a signal when its file could not grow."""
    path, _ = write_run(tmp_path)
    command = (
        f"ulimit -f 1; exec {sys.executable} -m deepmd_ema freeze -c {path} -o "
        f"{tmp_path / 'm.dp'}"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert "m.dp: cannot be written (" in done.stderr
    assert not (tmp_path / "m.dp").exists()
