"""`dp-ema show`: what it says of every kind of file."""

import json

from infer_models import run as run

from deepmd_ema import checkpoint, cli
from deepmd_ema.commands.freeze import freeze
from deepmd_ema.commands.show import describe
from deepmd_ema.config import config_from_dict
from deepmd_ema.infer.load import load_model


def row(text, name):
    return next(
        line.split(None, 1)[1]
        for line in text.splitlines()
        if line.startswith(f"  {name}")
    )


def test_a_training_checkpoint_is_described(run):
    averaged = describe(run[1])
    assert (
        row(averaged, "weights")
        == "average ema: decay 0.99, 7 updates, looks back 4.5 steps on average, step 7"
    )
    assert "restart" not in averaged
    text = describe(run[0])
    assert text.splitlines()[0].startswith(f"{run[0]}: training checkpoint of dp-ema 0")
    assert row(text, "weights") == "live, step 7"
    average = (
        "ema: decay 0.99, 7 updates, looks back 4.5 steps on average (freeze it with "
        "--use-ema)"
    )
    assert row(text, "average ") == average
    assert row(text, "elements") == "O H"
    assert row(text, "descriptor") == (
        "se_e2_a, rcut 4 angstrom (smooth from 1), sel 24 24, neuron 4-8, axis_neuron 4, float64"
    )
    assert row(text, "fitting") == "ener, neuron 8-8, float64"
    assert "float64" in row(text, "sizes")
    assert row(text, "nearest") == "pair   0.9000 angstrom in the training data"
    assert row(text, "best") == "live E:MAE 12.3 meV/atom at step 5"
    assert row(text, "restart").startswith("possible")
    assert "20 steps" in row(text, "run")


def test_a_frozen_file_is_described(run, tmp_path):
    text = describe(
        freeze(load_model(run[0], use_average=True), tmp_path / "m.dp").path
    )
    assert "frozen model of dp-ema 0" in text
    weights = (
        "averaged weights (ema) of step 7: decay 0.99, 7 updates, looks back 4.5 steps "
        "on average"
    )
    assert row(text, "weights") == weights
    assert row(text, "sizes") == row(describe(run[0]), "sizes")


def test_the_whole_config_is_json_that_describes_the_run(run, capsys):
    assert cli.main(["show", str(run[0]), "--config"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert config_from_dict(values).training.numb_steps == 20


def test_a_checkpoint_with_a_model_of_another_version_is_described_without_it(
    run, tmp_path
):
    payload = checkpoint.load(run[0])
    payload["config"]["model"]["type_map"] = True
    checkpoint.save(tmp_path / "other.pt", payload)
    assert "elements" not in describe(tmp_path / "other.pt")
