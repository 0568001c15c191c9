"""Checkpoints of DeePMD-kit: read to its numbers, converted, written to the bit, taken by its
commands.
"""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import linear_models
import numpy as np
import pytest
import torch
from config_inputs import write
from helpers import tiny_input, write_system
from infer_models import write_run
from interchange_cases import VARIANTS as OPTIONS
from interchange_cases import same_bits
from shared_tasks import input_of
from toy_models import (
    SECTIONS,
    TABLE,
    TRICLINIC,
    VARIANTS,
    evaluate,
    toy_atoms,
    toy_model,
    write_dp,
)

from deepmd_ema import cli
from deepmd_ema.errors import CheckpointError
from deepmd_ema.infer.load import load_model, load_models
from deepmd_ema.infer.potential import Potential
from deepmd_ema.interop.deepmd_pt import write_deepmd_pt

PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
needs_peer = pytest.mark.skipif(
    PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0"
)
SAME_MATH = 1e-10
FILES = (
    Path(__file__).parents[1] / "golden" / "peer_checkpoints"
)  # made_by: make.py there
MODELS = {
    "pt": None,
    "pt_ema": None,
    "pt_expt": None,
    "pt_hybrid": None,
    "pt_se_e3": None,
    "pt_heads_water": "water",
    "pt_heads_ice": "ice",
}
FACTS = {"weights": "live", "step": 3}
OWN_TABLE = {**TABLE, "smin_alpha": 0.1}
# what the backend pt of DeePMD-kit does not have, and the message
NOT_THERE = {
    "dpa4c": "the type dpa4c",
    "dpa4c_interpolated": "the type dpa4c",
    "se_e2_r_interpolated": "type_one_side = false of se_e2_r",
    "table_by_type": "smin_alpha = 0.15: its own is 0.1",
    "table_dpa3": "smin_alpha = 0.15: its own is 0.1",
}
CASES = {
    **{
        name: {"descriptor": name}
        for name in (*SECTIONS, *VARIANTS)
        if name not in NOT_THERE
    },
    **{f"option_{name}": how for name, how in OPTIONS.items()},
    "table_dpa2": {"descriptor": "dpa2", **OWN_TABLE, "pair_exclude_types": [[0, 2]]},
}


def predict(model):
    with np.load(FILES / "predictions.npz") as frame:
        coord, types, box = (frame[key] for key in ("coord", "types", "box"))
    return Potential(model, device="cpu").evaluate(coord, types, box)


def assert_known(found, name):
    with np.load(FILES / "predictions.npz") as file:
        for key in ("energy", "force", "virial"):
            value = getattr(found, key)
            reference = file[f"{name}_{key}"].reshape(value.shape)
            assert (
                np.abs(value - reference).max() <= SAME_MATH * np.abs(reference).max()
            ), key


def convert(*words):
    return cli.main(["convert", *map(str, words)])


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_deepmd_kit_gives_its_numbers(name):
    file = FILES / f"{name.removesuffix('_water').removesuffix('_ice')}.pt"
    assert_known(predict(load_model(file, head=MODELS[name])), name)


def test_the_average_in_a_checkpoint_is_that_of_its_averaged_file():
    loaded = load_model(FILES / "pt.pt", use_average=True)
    assert_known(predict(loaded), "pt_ema")
    assert loaded.info.describe() == "averaged weights (ema) of step 4: decay 0.5"
    assert (
        "does not say whether they are live"
        in load_model(FILES / "pt_ema.pt").info.describe()
    )


@pytest.mark.parametrize("suffix", [".dp", ".yaml", ".pt"])
@pytest.mark.parametrize("name", ["pt", "pt_expt"])
def test_convert_writes_the_same_model(name, suffix, tmp_path, capsys):
    out = tmp_path / f"model{suffix}"
    assert convert(FILES / f"{name}.pt", out) == 0
    assert_known(predict(out), name)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"read {FILES / name}.pt: DeePMD-kit, elements O H, se_")
    assert said[1].startswith(
        f"wrote {out}: live weights of step 4, from {FILES / name}.pt"
    )
    assert said[2].startswith(
        "read back and compared on two made-up frames, largest differences: energy 0.0e+00 eV, "
    )
    assert convert(out, out) == 2
    assert "which the command reads" in capsys.readouterr().err


def test_convert_goes_around_without_a_change(tmp_path):
    """.pt -> .dp -> .yaml -> .pt -> .dp, to the bit; and the .pt of DeePMD-kit, written once more,
    back.
    """
    run, averaged = write_run(tmp_path)
    first = load_model(run, use_average=True)
    names = [run, *(tmp_path / name for name in ("a.dp", "b.yaml", "c.pt", "d.dp"))]
    for number, (one, two) in enumerate(pairwise(names)):
        assert convert(one, two, *["--use-ema"] * (number == 0)) == 0
        last = load_model(two)
        assert (last.info.weights, last.info.step) == (
            first.info.weights,
            first.info.step,
        )
        same_bits(last.model, first.model)
    theirs = tmp_path / "theirs.pt"
    assert (
        convert(run, theirs, "--to", "deepmd")
        == convert(run, theirs, "--to", "deepmd", "--use-ema")
        == 0
    )
    assert convert(theirs, tmp_path / "back.pt") == 0
    same_bits(load_model(tmp_path / "back.pt").model, load_model(averaged).model)
    assert (
        load_model(tmp_path / "back.pt").info.average == load_model(theirs).info.average
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["pt_heads.pt", "out.dp"],
            "several models; which? It has water, ice: choose one with --head",
        ),
        (
            ["pt_heads.pt", "out.dp", "--head", "steam"],
            "no head 'steam'. It has water, ice",
        ),
        (["pt.pt", "out.dp", "--head", "water"], "so there is no head 'water'"),
        (["pt_ema.pt", "out.dp", "--use-ema"], "without averaged weights"),
        (["pt.pt", "out.dp", "--average", "slow"], "no average is called 'slow'"),
        (
            ["pt.pt", "out.savedmodel"],
            "OUT out.savedmodel: dp-ema writes files. Write out.dp, then `dp convert",
        ),
        (
            ["pt.pt", "out.dp", "--dp", "dp"],
            "--dp dp: out.dp is written without DeePMD-kit. Leave it out.",
        ),
        (
            ["pt.pt", "out"],
            "OUT out: expected a name that ends in .dp, .yaml, .yml, .pt2 or .pt",
        ),
        (["pt.pt", "away/out.pt", "--to", "deepmd"], "the folder away is not there"),
        (
            ["pt.pt", "text.dp"],
            "OUT text.dp: a file is there that is not a frozen model",
        ),
        (["pt.pt", "text.pt"], "OUT text.pt: a file is there that"),
        (["pt.pt", "ckpt.pt"], "OUT ckpt.pt: a file of kind training"),
        (["nothing.pt", "out.dp"], "no such file"),
        (
            ["pt.pt", "x.dp", "--to", "deepmd"],
            "--to deepmd: chooses between files .pt, and OUT is x.dp. Leave it out.",
        ),
        (
            ["pt.pt", "x.pt", "--to", "deepmd", "--dp", "dp"],
            "--dp dp: x.pt is written without DeePMD-kit. Leave it",
        ),
        (
            ["pt.pt", "theirs.pt", "--to", "deepmd"],
            "that is no model file of dp-ema. Choose another OUT",
        ),
        (["pt.pt", "x.pt", "--to", "torch"], "argument --to: invalid choice: 'torch'"),
        (
            ["train.xyz", "x", "--to", "deepmd"],
            "convert --to: is an option for models, and these are data",
        ),
    ],
)
def test_what_convert_cannot_do_is_a_message(
    words, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("text.dp", "text.pt", "train.xyz"):
        Path(name).write_text("" if name == "train.xyz" else "precious")
    Path("theirs.pt").write_bytes((FILES / "pt_se_e3.pt").read_bytes())
    Path("ckpt.pt").write_bytes((write_run(tmp_path / "run")[0]).read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert (
        convert(FILES / words[0] if words[0].endswith(".pt") else words[0], *words[1:])
        == 2
    )
    assert message in capsys.readouterr().err
    assert {
        path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()
    } == before


FIRST = (
    "model.Default.atomic_model.descriptor.sea.filter_layers.networks.0.layers.0.matrix"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.pop(FIRST),
            r"missing: descriptor.embeddings.networks.0.layers.0.w",
        ),
        (
            lambda m: m.update({FIRST + "2": torch.ones(2)}),
            r"not of this model: .*layers.0.matrix2",
        ),
        (
            lambda m: m.update({FIRST: torch.ones(2, 2)}),
            r"shape \(2, 2\), expected \(1, 4\)",
        ),
        (
            lambda m: m["_extra_state"].pop("model_params"),
            "without the section `model` of its input",
        ),
        (
            lambda m: m["_extra_state"]["model_params"]["descriptor"].update(
                type="dpa9"
            ),
            '"dpa9"',
        ),
        (
            lambda m: m["_extra_state"]["model_params"].update(use_srtab="t.txt"),
            r"'t\.txt' is the name of a file",
        ),
        (
            lambda m: m.update(more=Path("x")),
            r"could run any program.*dp convert-backend",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_a_message(change, message, tmp_path):
    payload = torch.load(FILES / "pt.pt", weights_only=True)
    change(payload["model"])
    torch.save(payload, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "model.pt")


@pytest.mark.parametrize("name", ["pt", "pt_expt"])
def test_a_run_starts_from_the_weights_of_a_checkpoint_of_deepmd_kit(
    name, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=4, seed=1)
    loaded = load_model(FILES / f"{name}.pt")
    config = tiny_input(
        ["data"],
        num_steps=1,
        learning_rate={"type": "exp", "start_lr": 1e-30, "stop_lr": 1e-31},
    )
    Path("input.json").write_text(
        json.dumps({**config, "model": loaded.info.config["model"]})
    )
    assert (
        cli.main(
            [
                "train",
                "input.json",
                "--init-model",
                str(FILES / f"{name}.pt"),
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    same_bits(load_model("model.ckpt-1.pt").model, loaded.model)
    assert f"weights of {FILES / name}.pt (live, step 4)" in capsys.readouterr().err
    assert (
        cli.main(
            [
                "train",
                "input.json",
                "--restart",
                str(FILES / f"{name}.pt"),
                "--device",
                "cpu",
            ]
        )
        == 2
    )
    assert "a checkpoint of DeePMD-kit" in capsys.readouterr().err


def test_show_says_what_a_checkpoint_of_deepmd_kit_holds(capsys):
    for name, phrases in (
        ("pt", ["checkpoint of DeePMD-kit", "live weights of step 4"]),
        ("pt_heads", ["water, ice: O H", "water, ice: se_e2_a"]),
    ):
        assert cli.main(["show", str(FILES / f"{name}.pt")]) == 0
        out = capsys.readouterr().out
        assert all(phrase in out for phrase in phrases)


# ---- written here


@pytest.mark.parametrize("name", [*CASES, "linear"])
def test_a_model_comes_back_to_the_bit(name, tmp_path):
    config, model = (
        linear_models.linear() if name == "linear" else toy_model(**CASES[name])
    )
    model.min_nbor_dist = 0.87
    write_deepmd_pt(tmp_path / "model.pt", {"": (config, model, FACTS)})
    loaded = load_model(tmp_path / "model.pt")
    same_bits(loaded.model, model)
    assert loaded.model.min_nbor_dist == 0.87
    assert loaded.info.describe() == "live weights of step 3"
    assert loaded.config.type == config.type
    assert loaded.config.use_srtab == config.use_srtab
    assert_known_options(
        torch.load(tmp_path / "model.pt", weights_only=True)["model"]["_extra_state"][
            "model_params"
        ]
    )


def assert_known_options(part):
    """DeePMD-kit refuses options that it does not have, and those that are null."""
    for key, value in part.items() if isinstance(part, dict) else enumerate(part):
        assert value is not None, key
        assert key not in ("interpolate", "finetune_head"), key
        if isinstance(value, dict | list) and key not in (
            "preset_out_bias",
            "atom_ener",
        ):
            assert_known_options(value)


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_pt_does_not_have_is_named(name, tmp_path, capsys):
    config, model = toy_model(name)
    with pytest.raises(CheckpointError, match=NOT_THERE[name]):
        write_deepmd_pt(tmp_path / "model.pt", {"": (config, model, FACTS)})
    if name == "table_by_type":
        config, model = toy_model("se_e2_a", **OWN_TABLE)
        write_dp(tmp_path / "model.dp", model, config)
        assert (
            convert(tmp_path / "model.dp", tmp_path / "model.pt", "--to", "deepmd") == 2
        )
        assert (
            "it has use_srtab for descriptors of mixed types only"
            in capsys.readouterr().err
        )
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("task", ["keys", "a.b", "Default"])
def test_a_task_has_a_name_that_a_module_may_have(task, tmp_path):
    own = (*toy_model(), FACTS)
    with pytest.raises(
        CheckpointError, match=f"does not have a task of the name '{task}'"
    ):
        write_deepmd_pt(tmp_path / "model.pt", {"water": own, task: own})


def test_a_checkpoint_of_deepmd_kit_is_written_as_it_was(tmp_path):
    """All tensors under all names, but for those of the optimizer (and of se_e3, which has networks
    without use).
    """
    for name in ("pt", "pt_hybrid", "pt_heads"):
        out = tmp_path / f"{name}.pt"
        assert convert(FILES / f"{name}.pt", out, "--to", "deepmd") == 0
        theirs, ours = (
            torch.load(path, weights_only=True)["model"]
            for path in (FILES / f"{name}.pt", out)
        )
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            if key != "_extra_state":
                assert torch.equal(ours[key], value), key
                assert ours[key].dtype == value.dtype, key
        assert (
            ours["_extra_state"]["train_infos"]["step"]
            == theirs["_extra_state"]["train_infos"]["step"]
        )


def test_types_without_dipoles_are_excluded_in_checkpoints_although_sel_type_has_no_effect(
    tmp_path,
):
    """Its torch backends ignore ``sel_type``: dipoles of the other types were added in
    DeePMD-kit.
    """
    config, model = toy_model(fitting_changes={"type": "dipole", "sel_type": [0]})
    path = tmp_path / "model.pt"
    write_deepmd_pt(path, {"": (config, model, FACTS)})
    same_bits(load_model(path).model, model)
    payload = torch.load(path, weights_only=True)
    section = payload["model"]["_extra_state"]["model_params"]
    others = [*range(1, len(config.type_map))]
    assert section["atom_exclude_types"] == others
    assert "sel_type" not in section["fitting_net"]
    section["atom_exclude_types"] = []
    for name in ("sel_type", "dipole_type"):
        section["fitting_net"] = {
            "type": "dipole",
            "neuron": config.fitting_net.neuron,
            name: [0],
        }
        torch.save(payload, path)
        assert not load_model(path).config.excluded_types


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory):
    """The checkpoint of a run of two tasks that share descriptor and fitting network, with an
    average.
    """
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for k, task in enumerate(("water", "ice")):
            for n in (1, 2):
                write_system(
                    folder / f"{task}{n}", frames=4, natoms=5 + 2 * k, seed=10 * k + n
                )
        values = input_of("all", numb_steps=3)
        values["training"]["enable_ema"] = True
        write(folder, values)
        assert cli.main(["train", "input.json", "--device", "cpu"]) == 0
    return folder / "model.ckpt.pt"


@pytest.mark.parametrize("average", [[], ["--use-ema"]])
def test_several_tasks_are_in_one_file(two_tasks, average, tmp_path):
    assert convert(two_tasks, tmp_path / "x.pt", "--to", "deepmd", *average) == 0
    known = load_models(two_tasks, use_average=bool(average)).models
    found = load_models(tmp_path / "x.pt").models
    assert list(found) == list(known)
    for task, loaded in known.items():
        same_bits(found[task].model, loaded.model)
        assert found[task].info.describe() == loaded.info.describe()
    # what tasks share is in the file once
    state = torch.load(tmp_path / "x.pt", weights_only=True)["model"]
    shared = "fitting_net.filter_layers.networks.0.layers.0.matrix"
    first, second = (state[f"model.{task}.atomic_model.{shared}"] for task in known)
    assert first.data_ptr() == second.data_ptr()
    assert (
        convert(
            two_tasks, tmp_path / "x.pt", "--to", "deepmd", "--head", "ice", *average
        )
        == 0
    )
    assert list(load_models(tmp_path / "x.pt").models) == [""]


# ---- taken by DeePMD-kit


def dp(*words):
    command = [Path(PEER) / "bin" / "dp", "--pt", *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, (words, done.stdout + done.stderr)
    return done.stdout + done.stderr


FROZEN_SCRIPT = """
import numpy as np
from deepmd.infer import DeepPot
data = np.load("frame.npz")
coord, box = data["coord"].reshape(1, -1), data["box"].reshape(1, 9)
out = DeepPot("x.pth").eval(coord, box, data["types"], atomic=True)
np.savez("out.npz", energy=out[0], force=out[1], virial=out[2], atom_energy=out[3])
"""


@needs_peer
@pytest.mark.timeout(900)
@pytest.mark.parametrize("average", [[], ["--use-ema"]])
def test_commands_of_deepmd_kit_take_a_checkpoint(average, tmp_path, monkeypatch):
    """Live and averaged weights: tested, frozen, changed, and trained on."""
    monkeypatch.chdir(tmp_path)
    run, _ = write_run(tmp_path / "run")
    write_system("data", frames=4, seed=1)
    coord, types = toy_atoms(num_types=2)
    np.savez("frame.npz", coord=coord, box=TRICLINIC, types=types)
    config = tiny_input(
        ["data"], num_steps=2, training__save_freq=2, training__disp_freq=1
    )
    Path("input.json").write_text(json.dumps(config))
    assert convert(run, "x.pt", "--to", "deepmd", *average) == 0
    loaded = load_model("x.pt")
    assert "Force  RMSE" in dp("test", "-m", "x.pt", "-s", "data")
    dp("freeze", "-c", "x.pt", "-o", "x.pth")
    # the bias alone is another one, also where dp-ema reads the file
    dp("change-bias", "x.pt", "-s", "data", "-o", "changed.pt")
    changed = load_model("changed.pt").model.state_dict()
    others = {
        key
        for key, value in loaded.model.state_dict().items()
        if not torch.equal(changed[key], value)
    }
    assert "out_bias" in others <= {"out_bias", "out_std"}
    for option in ("--init-model", "--finetune"):
        dp(
            "train",
            "input.json",
            option,
            "x.pt",
            "--skip-neighbor-stat",
            *["--use-pretrain-script"] * (not average),
        )
        assert load_model("model.ckpt-2.pt").info.step == 2
    subprocess.run(
        [Path(PEER) / "bin" / "python", "-c", FROZEN_SCRIPT],
        check=True,
        stdout=sys.stderr,
    )
    ours, theirs = evaluate(loaded.model, (coord, types, TRICLINIC)), np.load("out.npz")
    for key in ("energy", "force", "virial", "atom_energy"):
        reference = theirs[key].reshape(ours[key].shape)
        assert (
            np.abs(ours[key] - reference).max() <= SAME_MATH * np.abs(reference).max()
        ), key
