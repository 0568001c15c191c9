"""``dp-ema model-devi --sample-layer``: models of one run that differ in the output layer."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_input, write_system
from infer_models import write_run
from test_last_layer import PREFACTORS, frames_of, labelled, put, random_change
from test_train_tasks import input_of_two_tasks, write_data
from toy_models import TRICLINIC, toy_atoms, toy_model

from deepmd_ema import cli
from deepmd_ema.errors import UserError
from deepmd_ema.export import freeze
from deepmd_ema.infer.deviation import measure_deviation
from deepmd_ema.infer.evaluate import first_frames, measure, open_labelled, predict
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.sampled_layers import with_sampled_layers
from deepmd_ema.labels import ENERGY
from deepmd_ema.model.last_layer import changed_tensors, equations, sample_changes
from deepmd_ema.training.run import run_training

NUM_SAMPLES = 4000
SAMPLED = 0.1  # relative, of a mean over so many samples


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return [write_system(folder / name, frames=frames, seed=frames) for name, frames in (("train", 24), ("valid", 6))]


@pytest.fixture(scope="module")
def run(tmp_path_factory, systems):
    """A run that has ended, with an average."""
    folder = tmp_path_factory.mktemp("run")
    config = tiny_input(systems[:1], systems[1:], training__enable_ema=True)
    (folder / "input.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run_training("input.json", device="cpu")
    return folder


def equations_and_model():
    _, model = toy_model()
    before = put(model, changed_tensors(model, random_change(model)))
    batch = labelled(model, frames_of(range(4)))
    put(model, before)
    return equations(model, [batch], False), model


def draw(found, number=NUM_SAMPLES, seed=1):
    return sample_changes(found, PREFACTORS, number, torch.Generator().manual_seed(seed))


def test_samples_change_predictions_by_as_much_as_residuals_are():
    found, _ = equations_and_model()
    changes = draw(found)
    matrix = found.weighted(PREFACTORS)[:-1, :-1]
    assert float(torch.einsum("si,ij,sj->s", changes, matrix, changes).mean()) == pytest.approx(
        found.loss(PREFACTORS), rel=SAMPLED
    )


def test_samples_vary_most_where_the_frames_say_least():
    """Their covariance is the inverse of the matrix, up to a factor and the ridge."""
    found, _ = equations_and_model()
    matrix = found.weighted(PREFACTORS)[:-1, :-1]
    values, vectors = torch.linalg.eigh(matrix)
    strong = values > 1e-3  # where the ridge does not count
    assert values[strong].max() > 1000 * values[strong].min()
    products = (draw(found) @ vectors[:, strong]).var(0) * values[strong]
    assert products.max() < (1 + 2 * SAMPLED) * products.min()


def test_the_bias_of_an_element_that_no_frame_has_is_not_sampled():
    _, model = toy_model()
    batch = labelled(model, [(*toy_atoms(1, 9, num_types=2), TRICLINIC)])
    shifted = replace(batch, labels={**batch.labels, ENERGY: batch.labels[ENERGY] + 3})
    changes = draw(equations(model, [shifted], False), 3)
    assert torch.all(changes[:, -1] == 0)
    assert torch.all(changes[:, -2] != 0)


def test_the_deviation_is_that_of_the_samples(run, systems):
    (rows,) = measure_deviation([run], systems[1:], device="cpu", sampled_layers=3, seed=7).systems.values()
    loaded = load_model(run)
    models = with_sampled_layers(loaded, 3, 7, "cpu")
    before, weights = loaded.model.state_dict(), [one.model.state_dict() for one in models]
    changed = {name for name in before if not torch.equal(weights[0][name], before[name])}
    assert changed == {"fitting.nets.0.layers.2.weight", "fitting.nets.1.layers.2.weight", "out_bias"}
    opened = open_labelled(systems[1:], loaded.config, ())
    found = [predict(one, opened, first_frames(opened, 0), "cpu").frames for one in models]
    forces = np.array([[frame.prediction["force"] for frame in frames] for frames in found])
    np.testing.assert_allclose(rows[:, 4], np.linalg.norm(forces.std(axis=0), axis=-1).max(axis=-1), rtol=1e-9)


def test_the_deviation_is_as_large_as_the_error_on_training_frames(run, systems):
    (rows,) = measure_deviation([run], systems[:1], device="cpu", sampled_layers=64).systems.values()
    error = measure(run, systems[:1], device="cpu").total.metric("F:RMSE") * np.sqrt(3)
    assert 0.5 * error < rows[:, 6].mean() < 2 * error


def test_a_seed_gives_the_same_samples_and_another_one_others(run, systems):
    def rows(seed):
        (found,) = measure_deviation([run], systems[1:], device="cpu", sampled_layers=2, seed=seed).systems.values()
        return found

    np.testing.assert_array_equal(rows(1), rows(1))
    assert not np.allclose(rows(1)[:, 1:], rows(2)[:, 1:])


def test_one_of_two_tasks_is_sampled_on_its_own_frames(tmp_path, monkeypatch):
    data = write_data(tmp_path / "data")
    (tmp_path / "input.json").write_text(json.dumps(input_of_two_tasks(data)))
    monkeypatch.chdir(tmp_path)
    run_training("input.json", device="cpu")
    found = measure_deviation([tmp_path], [data / "salt2"], head="salt", device="cpu", sampled_layers=3)
    assert all(np.all(rows[:, 4] > 0) for rows in found.systems.values())
    shutil.rmtree(data / "salt1")
    with pytest.raises(UserError, match="salt1: no such"):
        measure_deviation([tmp_path], [data / "salt2"], head="salt", device="cpu", sampled_layers=3)


def test_the_command_prints_which_weights_were_sampled(run, systems, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model-devi", "-m", str(run), "--average", "live", "ema", "--sample-layer", "-s", str(systems[1])]
    assert cli.main([*words, "--device", "cpu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "live weights of step 20, 16 samples of its output layer" in printed[0]
    assert "averaged weights (ema)" in printed[1]
    assert printed[1].endswith("16 samples of its output layer")
    assert len(Path("model_devi.out").read_text().splitlines()) == 2 + 6


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--real_error"], "--sample-layer and --real_error: samples have larger errors than the model"),
        (["-m", "FROZEN"], "is not a checkpoint of dp-ema, which names its training frames"),
        (["-m", "MOVED"], "train: no such"),
        (["-m", "OTHER"], "--sample-layer: the loss has no energies, forces or virials to fit"),
    ],
)
def test_a_request_without_samples_is_reported(run, systems, tmp_path, capsys, words, message):
    freeze(load_model(run), tmp_path / "frozen.dp")
    places = {"FROZEN": str(tmp_path / "frozen.dp"), "MOVED": str(write_run(tmp_path / "moved")[0])}
    others = {f"loss__{when}_pref_{term}": 0 for when in ("start", "limit") for term in "efv"}
    places["OTHER"] = str(write_run(tmp_path / "other", **others, loss__start_pref_ae=1)[0])
    words = [places.get(word, word) for word in words]
    if "-m" not in words:
        words += ["-m", str(run)]
    words += ["--sample-layer", "2", "-s", str(systems[1]), "-o", str(tmp_path / "x.out"), "--device", "cpu"]
    assert cli.main(["model-devi", *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.out").exists()
