"""Fine-tuning that keeps to old data: the input of ``dp-ema init --replay``, labels of a model,
biases that stay.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input, write_system
from training_runs import load

from deepmd_ema import Potential, checkpoint
from deepmd_ema.cli import main
from deepmd_ema.config import config_warnings, load_config
from deepmd_ema.training.run import run_training

DIPOLES = Path(__file__).parents[1] / "golden" / "quantities" / "dipole_se_e2_a.dp"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with old and new frames of other sizes, and a model that was trained on the old
    ones.
    """
    folder = tmp_path_factory.mktemp("replay")
    write_system(folder / "old", frames=10, seed=1)
    write_system(folder / "new", frames=10, seed=11, natoms=7)
    write_system(folder / "valid", frames=4, seed=12, natoms=7)
    (folder / "pretrained").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "pretrained")
        run_training(tiny_input(["../old"], num_steps=10), device="cpu")
    return folder


@pytest.fixture
def desk(here, base, tmp_path):
    for name in ("old", "new", "valid"):
        (tmp_path / name).symlink_to(base / name)
    (tmp_path / "old.pt").symlink_to(base / "pretrained" / "model.ckpt-10.pt")


def write_input(*options):
    return main(["init", "new", "--finetune", "old.pt", "--steps", "8", *options])


def test_the_input_has_one_model_for_new_and_old_data_and_trains_from_the_file(
    desk, capsys
):
    assert main(["init", "new", "--finetune", "nothing.pt"]) == 2
    assert "nothing.pt" in capsys.readouterr().err
    assert (
        write_input("--replay", "old", "--validation", "valid", "--test", "valid") == 0
    )
    assert "dp-ema train --finetune old.pt input.yaml" in capsys.readouterr().out
    config = load_config("input.yaml")
    assert [link.key for link in config.links if link.task == "old"] == [
        "elements",
        "descriptor",
        "fitting",
    ]
    assert config.training.model_prob == {"new": 0.7, "old": 0.3}
    assert {
        task: data.systems for task, data in config.validating.test_data_dict.items()
    } == {"new": ["valid"]}
    assert not [
        text for text in config_warnings(config) if "share this network" in text
    ]
    assert main(["train", "input.yaml", "--finetune", "old.pt"]) == 0
    said = capsys.readouterr().err
    table = said.partition("errors before the first step")[2].splitlines()
    assert [line.split()[2] for line in table[3:5]] == ["new", "old"]
    weights = load("model.ckpt.pt")["model"]
    of = {
        task: {
            n.removeprefix(task): t for n, t in weights.items() if n.startswith(task)
        }
        for task in ("new", "old")
    }
    assert not torch.equal(
        *(of[task].pop(".out_bias") for task in of)
    )  # the labels of toys differ by a shift
    assert not torch.equal(*(of[task].pop(".out_std") for task in of))
    assert_same(of["new"], of["old"])
    before = load("old.pt")["model"]
    torch.testing.assert_close(
        weights["old.out_bias"], before["out_bias"], rtol=0, atol=0
    )
    assert not torch.equal(
        weights["new.fitting.nets.0.layers.0.weight"],
        before["fitting.nets.0.layers.0.weight"],
    )
    assert main(["freeze", "--head", "new", "-o", "new.dp"]) == 0


def test_a_restart_with_replay_is_bitwise(desk):
    assert write_input("--replay", "old") == 0
    run_training("input.yaml", finetune="old.pt", device="cpu")
    straight = checkpoint.load("model.ckpt-8.pt")
    run_training("input.yaml", restart="model.ckpt-5.pt", device="cpu")
    again = checkpoint.load("model.ckpt-8.pt")
    for part in ("model", "optimizer", "averages", "display"):
        assert_same(straight[part], again[part])


def test_labels_of_a_model_are_its_predictions_whatever_the_labels_of_the_frames_are(
    desk, capsys
):
    write_system("bare", frames=3, seed=7)
    for name in ("energy", "force", "virial"):
        Path(f"bare/set.000/{name}.npy").unlink(missing_ok=True)
    assert main(["convert", "bare", "labelled", "--labels-of", "old.pt"]) == 0
    assert "labels of old.pt: live weights of step 10" in capsys.readouterr().out
    (system,) = Path("labelled").iterdir()
    arrays = {
        name: np.load(system / f"set.000/{name}.npy")
        for name in ("coord", "box", "energy", "force", "virial")
    }
    types = [
        (system / "type_map.raw").read_text().split()[k]
        for k in np.loadtxt(system / "type.raw", dtype=int)
    ]
    found = Potential("old.pt").evaluate(arrays["coord"], types, arrays["box"])
    for name in ("energy", "force", "virial"):
        value = getattr(found, name)
        np.testing.assert_allclose(
            arrays[name].reshape(value.shape), value, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize("choice", ["fit", "keep"])
def test_the_bias_is_kept_where_the_input_says_so(desk, capsys, choice):
    config = tiny_input(["new"], num_steps=1, model__finetune_bias=choice)
    Path("input.json").write_text(json.dumps(config))
    assert main(["train", "input.json", "--finetune", "old.pt"]) == 0
    same = torch.equal(
        load("model.ckpt-1.pt")["model"]["out_bias"],
        load("old.pt")["model"]["out_bias"],
    )
    assert same == (choice == "keep")
    if same:
        assert (
            main(["train", "input.json", "--finetune", "old.pt", "--head", "RANDOM"])
            == 2
        )
        assert (
            'model.finetune_bias = "keep": the fitting network starts anew'
            in capsys.readouterr().err
        )


def test_the_fitting_network_alone_is_trained_where_it_is_requested(desk, capsys):
    assert main(["init", "new", "--train", "fitting"]) == 2
    assert "init --train: is an option for fine-tuning" in capsys.readouterr().err
    assert write_input("--train", "fitting") == 0
    assert "its fitting network alone" in capsys.readouterr().out
    assert main(["train", "input.yaml", "--finetune", "old.pt"]) == 0
    before, after = load("old.pt")["model"], load("model.ckpt.pt")["model"]
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in moved if name.endswith("weight")} == {
        n for n in before if re.fullmatch(r"fitting.*weight", n)
    }
    # a file of such a run is trained as a whole again
    Path("input.yaml").unlink()
    assert main(["init", "new", "--finetune", "model.ckpt.pt", "--steps", "8"]) == 0
    assert load_config("input.yaml").task(None).model.descriptor.trainable is True


def test_options_of_the_file_fit_to_the_input_or_are_named(desk, tmp_path, capsys):
    energies = {
        "model__fitting_net__atom_ener": [-1.0, -2.0],
        "model__preset_out_bias": {"energy": [-1.0, None]},
        "model__atom_exclude_types": [1],
    }
    (tmp_path / "given").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "given")
        run_training(tiny_input(["../old"], num_steps=1, **energies), device="cpu")
    given = ["--finetune", "given/model.ckpt.pt", "--steps", "8"]
    # a new element has no energies that were given
    write_system("sodium", frames=10, seed=3, elements=("O", "H", "Na"))
    assert main(["init", "sodium", *given, "-o", "sodium.yaml"]) == 0
    model = load_config("sodium.yaml").task(None).model
    assert model.descriptor.sel == [24, 24, 24]
    assert model.fitting_net.atom_ener == [-1.0, -2.0, None]
    assert model.preset_out_bias == {"energy": [-1.0, None, None]}
    # elements without energies have dipoles
    tensors = Path("sodium/set.000")
    np.save(tensors / "dipole.npy", np.ones((10, 3)))
    dipole = ["--property", "dipole", "--sel-type", "H", "-o", "dipole.yaml"]
    assert main(["init", "sodium", *given, *dipole]) == 0
    model = load_config("dipole.yaml").task(None).model
    assert (model.fitting_net.sel_type, model.atom_exclude_types) == ([1], [])
    capsys.readouterr()
    of_dipoles = ["init", "sodium", "--finetune", str(DIPOLES), "-o", "other.yaml"]
    assert main(of_dipoles) == 2
    assert "predicts dipole, not energies. Give --property dipole." in error(capsys)
    assert main([*of_dipoles, "--property", "dipole", "--sel-type", "H"]) == 2
    assert "init --sel-type: the elements are those of --finetune." in error(capsys)
    assert not Path("other.yaml").exists()


def error(capsys):
    return capsys.readouterr().err
