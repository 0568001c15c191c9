"""`dp-ema posthoc --solve`: output layer or bias fitted to the training frames of a run that has ended."""

import csv
import json
import re
import shutil

import pytest
import torch
from helpers import assert_same, tiny_input, write_system

from deepmd_ema import checkpoint, cli
from deepmd_ema.errors import UserError
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import load_model
from deepmd_ema.posthoc.run import run_posthoc
from deepmd_ema.training.run import run_training

OPTIONS = {
    "training__averaging": [
        {"name": f"p{n:02d}", "type": "power", "sigma_rel": n / 100, "snapshots": True, "snapshot_freq": 2}
        for n in (5, 10)
    ],
    "validating__full_validation": True,
    "validating__validation_freq": 10,
    "validating__full_val_start": 0.0,
}
LAYERS = {"fitting.nets.0.layers.2.weight", "fitting.nets.1.layers.2.weight", "out_bias"}


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [write_system(folder / name, frames=frames, seed=frames) for name, frames in (("train", 24), ("valid", 6))]


def train(folder, systems, **options):
    """Train in a folder and return it."""
    folder.mkdir()
    config = tiny_input(systems[:1], systems[1:] or None, **(OPTIONS | options))
    (folder / "input.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_training("input.json", device="cpu")
    return folder


@pytest.fixture(scope="module")
def ended(tmp_path_factory, systems):
    return train(tmp_path_factory.mktemp("runs") / "plain", systems)


@pytest.fixture
def run(ended, tmp_path):
    """A copy of a run with snapshots, which a test may change."""
    return shutil.copytree(ended, tmp_path / "run")


def rows_of(run):
    with (run / "posthoc.csv").open() as file:
        return {row["weights"]: row for row in csv.DictReader(file)}


def test_it_finds_what_the_run_would_have_found_at_its_end(run, systems, tmp_path):
    solved = train(tmp_path / "solved", systems, training__solve_last_layer=True)
    refitted = checkpoint.load(solved / "model.ckpt-20.pt")["refitted"]
    assert refitted.keys() == {"live", "p05", "p10"}
    shutil.rmtree(run / "snapshots")
    said = []
    report = run_posthoc(run, solve="layer", metric="F:RMSE", say=said.append)
    assert [row.name for row in report.rows] == [
        *refitted, *(f"{name}, layer fitted" for name in refitted),
    ]  # fmt: skip
    written = checkpoint.load(run / "model_posthoc.pt")
    of = report.chosen.name.split(",")[0]
    for name, tensor in refitted[of].items():
        torch.testing.assert_close(written["model"][name], tensor, rtol=1e-9, atol=1e-9)
    assert written["fitted"] == "layer"
    assert written["weights"] == of
    text = "\n".join(said)
    assert "no snapshots" in text
    assert "no picture: there are no snapshots" in text


def test_the_best_combination_is_fitted_and_its_file_has_the_errors_of_its_row(run, systems, capsys):
    assert cli.main(["posthoc", str(run), "--solve", "--sigma-rel", "0.07", "--metric", "F:RMSE"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"output layer and bias fitted with the weights posthoc: \d+ numbers, 2\d frames", said)
    assert f"dp-ema test --physics -m {run / 'model_posthoc.pt'} -s SYSTEM" in " ".join(said.split())
    rows = rows_of(run)
    assert list(rows)[-1] == "posthoc, layer fitted"
    (chosen,) = [row for row in rows.values() if row["chosen"] == "1"]
    assert chosen["kind"] == "fitted"
    assert chosen["fitted"] == "layer"
    for name in ("live", "p05", "p10", "posthoc"):
        force, energy = (
            [float(rows[f"{name}{fit}"][column]) for fit in (", layer fitted", "")]
            for column in ("rmse_f_meV/A", "rmse_e_meV/atom")
        )
        assert force[0] < 0.7 * force[1]
        assert energy[0] < 0.7 * energy[1]
    tested = measure(run / "model_posthoc.pt", systems[1:], device="cpu").total
    assert float(chosen["rmse_f_meV/A"]) == pytest.approx(1000 * tested.metric("F:RMSE"), rel=1e-12)
    capsys.readouterr()
    assert cli.main(["show", str(run / "model_posthoc.pt")]) == 0
    assert "output layer, to training frames after the run" in capsys.readouterr().out


def test_only_output_layers_and_bias_change(run):
    run_posthoc(run, ["0.07"], output=run / "plain.pt", say=str)
    run_posthoc(run, ["0.07"], solve="layer", metric="F:RMSE", output=run / "fitted.pt", table=run / "f.csv", say=str)
    of = checkpoint.load(run / "fitted.pt")["weights"]
    plain = checkpoint.load(run / "plain.pt")["model"]
    if of != "posthoc":
        plain = checkpoint.weights_in(checkpoint.load(run / "model.ckpt-20.pt"), run, None if of == "live" else of)[0]
    fitted = load_model(run / "fitted.pt").model.state_dict()
    assert {name for name in fitted if not torch.equal(fitted[name], plain[name].to(fitted[name]))} == LAYERS


def test_the_bias_alone_is_that_of_the_option_of_a_run(run, systems, tmp_path):
    refitted = checkpoint.load(
        train(tmp_path / "solved", systems, training__change_bias_after_training=True) / "model.ckpt-20.pt"
    )["refitted"]
    shutil.rmtree(run / "snapshots")
    report = run_posthoc(run, solve="bias", metric="E:RMSE", say=str)
    assert sum(row.fitted == "bias" for row in report.rows) == 3
    assert report.chosen.fitted == "bias"  # the energies of this run are far off
    written = checkpoint.load(run / "model_posthoc.pt")
    assert written["fitted"] == "bias"
    assert_same(written["model"]["out_bias"], refitted[written["weights"]]["out_bias"])


def test_validation_frames_that_the_run_has_split_off_are_the_ones_that_judge(tmp_path, systems):
    split = train(tmp_path / "split", systems[:1], training__validation_fraction=0.25)
    report = run_posthoc(split, solve="layer", say=str)
    assert report.num_frames == 6
    assert_same(
        report.rows[0].errors.sums,
        run_posthoc(split, ["0.07"], output=tmp_path / "m.pt", say=str).rows[0].errors.sums,
    )
    rows = [line for line in (split / "val.log").read_text().splitlines() if not line.startswith("#")]
    last = rows[-1].split()
    assert float(last[2]) == pytest.approx(1000 * report.rows[0].errors.metric("E:RMSE"), rel=1e-3)


def test_what_cannot_be_solved_is_refused_before_any_work(run):
    path = run / "model.ckpt-20.pt"
    payload = checkpoint.load(path)
    loss = {f"{when}_pref_{x}": int(x == "ae") for when in ("start", "limit") for x in ("e", "f", "v", "ae")}
    payload["config"]["loss"] |= loss
    payload["config"]["validating"] |= {"full_validation": False}
    checkpoint.save(path, payload)
    with pytest.raises(UserError, match=r"--solve layer: the loss has no energies.*Use --solve bias, or none"):
        run_posthoc(run, solve="layer", say=str)


def test_lengths_need_snapshots_with_a_fit_too(run):
    shutil.rmtree(run / "snapshots")
    with pytest.raises(UserError, match="no snapshots of the run"):
        run_posthoc(run, ["0.07"], solve="layer", say=str)
