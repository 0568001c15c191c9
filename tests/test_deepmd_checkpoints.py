"""Checkpoints for DeePMD-kit (``dp-ema convert --to deepmd``): read back to the bit, and taken by its commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import test_linear
import torch
from config_inputs import write
from helpers import tiny_input, write_system
from infer_models import write_run
from test_interchange import VARIANTS as OPTIONS
from test_interchange import same_bits
from test_train_sharing import input_of
from toy_models import SECTIONS, TABLE, TRICLINIC, VARIANTS, evaluate, toy_atoms, toy_model, write_dp

from deepmd_ema import cli
from deepmd_ema.errors import CheckpointError
from deepmd_ema.infer.load import load_model, load_models
from deepmd_ema.interop.deepmd_pt import write_deepmd_pt

PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
needs_peer = pytest.mark.skipif(PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0")
SAME_MATH = 1e-10
FILES = Path(__file__).parent / "golden" / "peer_checkpoints"
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
    **{name: {"descriptor": name} for name in (*SECTIONS, *VARIANTS) if name not in NOT_THERE},
    **{f"option_{name}": how for name, how in OPTIONS.items()},
    "table_se_atten": {"descriptor": "se_atten", **OWN_TABLE},
    "table_dpa2": {"descriptor": "dpa2", **OWN_TABLE, "pair_exclude_types": [[0, 2]]},
}


def made(name):
    """Return (config, model) of a case."""
    config, model = test_linear.linear() if name == "linear" else toy_model(**CASES[name])
    model.min_nbor_dist = 0.87
    return config, model


def write_one(path, config, model):
    write_deepmd_pt(Path(path), {"": (config, model, FACTS)})


def convert(*words):
    return cli.main(["convert", *map(str, words), "--to", "deepmd"])


def test_what_pt_does_not_have_is_a_kind_of_model():
    assert set(NOT_THERE) <= {*SECTIONS, *VARIANTS}


@pytest.mark.parametrize("name", [*CASES, "linear"])
def test_a_model_comes_back_to_the_bit(name, tmp_path):
    config, model = made(name)
    write_one(tmp_path / "model.pt", config, model)
    loaded = load_model(tmp_path / "model.pt")
    same_bits(loaded.model, model)
    assert loaded.model.min_nbor_dist == 0.87
    assert loaded.info.describe() == "live weights of step 3"
    assert loaded.config.type == config.type
    assert loaded.config.use_srtab == config.use_srtab


@pytest.mark.parametrize("name", NOT_THERE)
def test_what_pt_does_not_have_is_named(name, tmp_path):
    with pytest.raises(CheckpointError, match=NOT_THERE[name]):
        write_one(tmp_path / "model.pt", *toy_model(name))
    assert not list(tmp_path.iterdir())


def test_a_descriptor_of_another_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("deepmd_ema.interop.trees.by_type.SeE2ATree.modules", {})
    for name in ("se_e2_a", "hybrid_by_type"):
        with pytest.raises(CheckpointError, match="does not have the type se_e2_a"):
            write_one(tmp_path / "model.pt", *toy_model(name))


@pytest.mark.parametrize("name", ["se_e2_a", "se_e3"])
def test_a_table_for_descriptors_of_single_types_is_named(name, tmp_path, capsys):
    config, model = toy_model(name, **OWN_TABLE)
    write_dp(tmp_path / "model.dp", model, config)
    assert convert(tmp_path / "model.dp", tmp_path / "model.pt") == 2
    assert "it has use_srtab for descriptors of mixed types only" in capsys.readouterr().err
    assert not (tmp_path / "model.pt").exists()


@pytest.mark.parametrize("task", ["keys", "a.b", "Default"])
def test_a_task_has_a_name_that_a_module_may_have(task, tmp_path):
    own = (*toy_model(), FACTS)
    with pytest.raises(CheckpointError, match=f"does not have a task of the name '{task}'"):
        write_deepmd_pt(tmp_path / "model.pt", {"water": own, task: own})


@pytest.mark.parametrize("name", ["se_atten_interpolated", "dpa2_interpolated", "table_se_atten", "linear"])
def test_the_section_has_no_options_that_deepmd_kit_refuses(name, tmp_path):
    write_one(tmp_path / "model.pt", *made(name))
    section = torch.load(tmp_path / "model.pt", weights_only=True)["model"]["_extra_state"]["model_params"]

    def options(part):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            assert value is not None, key
            assert key not in ("interpolate", "finetune_head"), key
            if isinstance(value, dict | list) and key != "preset_out_bias":
                options(value)

    options(section)


def test_a_checkpoint_is_live_or_averaged(tmp_path, capsys):
    run, averaged = write_run(tmp_path / "run")
    assert convert(run, tmp_path / "live.pt") == 0
    assert "wrote " in capsys.readouterr().out
    assert convert(run, tmp_path / "ema.pt", "--use-ema") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[1].startswith(f"wrote {tmp_path / 'ema.pt'}: averaged weights (ema) of step 7: decay 0.99")
    assert said[2].startswith("read back and compared on two made-up frames: largest difference 0.0e+00")
    assert said[3] == "for DeePMD-kit: dp --pt test, freeze, change-bias, and train with --init-model or --finetune"
    for name, source in (("live", run), ("ema", averaged)):
        one, two = load_model(tmp_path / f"{name}.pt"), load_model(run, use_average=name == "ema")
        same_bits(one.model, two.model)
        same_bits(one.model, load_model(source).model)
        assert one.info.weights == two.info.weights == name
        assert (one.info.step, one.info.average) == (two.info.step, two.info.average)
    assert cli.main(["show", str(tmp_path / "ema.pt")]) == 0
    assert "averaged weights (ema) of step 7" in capsys.readouterr().out
    # and back
    assert cli.main(["convert", str(tmp_path / "ema.pt"), str(tmp_path / "back.pt")]) == 0
    same_bits(load_model(tmp_path / "back.pt").model, load_model(averaged).model)
    assert load_model(tmp_path / "back.pt").info.average == one.info.average


def test_a_checkpoint_that_was_written_is_written_again(tmp_path):
    run, _ = write_run(tmp_path / "run")
    assert convert(run, tmp_path / "x.pt") == 0
    assert convert(run, tmp_path / "x.pt", "--use-ema") == 0
    assert load_model(tmp_path / "x.pt").info.weights == "ema"


def test_a_checkpoint_of_deepmd_kit_is_written_as_it_was(tmp_path):
    """All tensors under all names, but for those of the optimizer (and of se_e3, which has networks without use)."""
    for name in ("pt", "pt_hybrid", "pt_heads"):
        out = tmp_path / f"{name}.pt"
        assert convert(FILES / f"{name}.pt", out) == 0
        theirs, ours = (torch.load(path, weights_only=True)["model"] for path in (FILES / f"{name}.pt", out))
        assert set(ours) == set(theirs)
        for key, value in theirs.items():
            if key != "_extra_state":
                assert torch.equal(ours[key], value), key
                assert ours[key].dtype == value.dtype, key
        assert ours["_extra_state"]["train_infos"]["step"] == theirs["_extra_state"]["train_infos"]["step"]


@pytest.fixture(scope="module")
def two_tasks(tmp_path_factory):
    """The checkpoint of a run of two tasks that share descriptor and fitting network, with an average."""
    folder = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for k, task in enumerate(("water", "ice")):
            for n in (1, 2):
                write_system(folder / f"{task}{n}", frames=4, natoms=5 + 2 * k, seed=10 * k + n)
        values = input_of("all", numb_steps=3)
        values["training"]["enable_ema"] = True
        write(folder, values)
        assert cli.main(["train", "input.json", "--device", "cpu"]) == 0
    return folder / "model.ckpt.pt"


@pytest.mark.parametrize("average", [[], ["--use-ema"]])
def test_several_tasks_are_in_one_file(two_tasks, average, tmp_path, capsys):
    assert convert(two_tasks, tmp_path / "x.pt", *average) == 0
    assert "wrote " in capsys.readouterr().out
    known = load_models(two_tasks, use_average=bool(average)).models
    found = load_models(tmp_path / "x.pt").models
    assert list(found) == list(known)
    for task, loaded in known.items():
        same_bits(found[task].model, loaded.model)
        assert found[task].info.describe() == loaded.info.describe()
    # what tasks share is in the file once
    state = torch.load(tmp_path / "x.pt", weights_only=True)["model"]
    first, second = (state[f"model.{task}.atomic_model.{SHARED}"] for task in known)
    assert first.data_ptr() == second.data_ptr()


SHARED = "fitting_net.filter_layers.networks.0.layers.0.matrix"


def test_one_of_several_tasks_is_written_alone(two_tasks, tmp_path):
    assert convert(two_tasks, tmp_path / "x.pt", "--head", "ice") == 0
    loaded = load_models(tmp_path / "x.pt").models
    assert list(loaded) == [""]
    same_bits(loaded[""].model, load_model(two_tasks, head="ice").model)
    assert "model.Default.min_nbor_dist" in torch.load(tmp_path / "x.pt", weights_only=True)["model"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pt.pt", "x.dp", "--to", "deepmd"], "--to deepmd: chooses between files .pt, and OUT is x.dp. Leave it out."),
        (["pt.pt", "x.dp", "--to", "dp-ema"], "--to dp-ema: chooses between files .pt, and OUT is x.dp. Leave it out."),
        (["pt.pt", "x.pt", "--to", "deepmd", "--dp", "dp"], "--dp dp: x.pt is written without DeePMD-kit. Leave it"),
        (["pt.pt", "x.pt", "--to", "deepmd", "--head", "ice"], "so there is no head 'ice'"),
        (["pt_ema.pt", "x.pt", "--to", "deepmd", "--use-ema"], "without averaged weights"),
        (
            ["pt.pt", "theirs.pt", "--to", "deepmd"],
            "that is no model file of dp-ema. Choose another OUT",
        ),
        (["pt.pt", "ckpt.pt", "--to", "deepmd"], "OUT ckpt.pt: a file of kind training"),
        (["pt.pt", "away/x.pt", "--to", "deepmd"], "the folder away is not there"),
        (["pt.pt", "x.pt", "--to", "torch"], "argument --to: invalid choice: 'torch'"),
        (["train.xyz", "x", "--to", "deepmd"], "convert --to: is an option for models, and these are data"),
    ],
)
def test_what_cannot_be_written_is_a_message(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("theirs.pt").write_bytes((FILES / "pt_se_e3.pt").read_bytes())
    Path("ckpt.pt").write_bytes((write_run(tmp_path / "run")[0]).read_bytes())
    Path("train.xyz").write_text("")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    source = FILES / words[0] if words[0].endswith(".pt") else words[0]
    assert cli.main(["convert", str(source), *words[1:]]) == 2
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_file_that_is_not_the_same_model_is_not_kept(tmp_path, monkeypatch, capsys):
    run, _ = write_run(tmp_path / "run")
    monkeypatch.setattr("deepmd_ema.interop.trees.by_type.SeE2ATree.modules", {"pt": ((r"^", "sea."),)})
    monkeypatch.setattr("deepmd_ema.interop.deepmd_pt._is_weight", lambda name, _: "filter_layers" in name)
    assert convert(run, tmp_path / "x.pt") == 2
    assert "missing: " in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


def test_a_table_by_the_name_of_a_file_is_refused(tmp_path):
    """As DeePMD-kit's own checkpoints have it."""
    write_one(tmp_path / "model.pt", *made("table_se_atten"))
    payload = torch.load(tmp_path / "model.pt", weights_only=True)
    payload["model"]["_extra_state"]["model_params"]["use_srtab"] = "table.txt"
    torch.save(payload, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"use_srtab = 'table\.txt' is the name of a file"):
        load_model(tmp_path / "model.pt")


PEER_SCRIPT = """
import copy, sys, numpy as np, torch
from pathlib import Path
from deepmd.infer import DeepPot
from deepmd.pt.train.training import get_model_for_wrapper
from deepmd.pt.train.wrapper import ModelWrapper

for path in sorted(Path(sys.argv[1]).glob("*.pt")):
    state = torch.load(path, weights_only=True)["model"]
    model = get_model_for_wrapper(copy.deepcopy(state["_extra_state"]["model_params"]))
    ModelWrapper(model).load_state_dict(state)  # every name, as all commands but `dp test` want it
    for head in model if isinstance(model, dict) else [None]:
        potential = DeepPot(str(path), head=head) if head else DeepPot(str(path))
        data = np.load(path.with_suffix(".npz"))
        more = {k: data[k] for k in ("fparam", "aparam") if k in data}
        out = potential.eval(
            data["coord"].reshape(1, -1), data["box"].reshape(1, 9), data["types"], atomic=True, **more
        )
        name = path.with_suffix(f".{head}.out.npz" if head else ".out.npz")
        np.savez(name, energy=out[0], force=out[1], virial=out[2], atom_energy=out[3])
"""


def ask_peer(folder):
    script = folder / "peer.py"
    script.write_text(PEER_SCRIPT)
    subprocess.run([Path(PEER) / "bin" / "python", script, folder], check=True, timeout=590, stdout=sys.stderr)


def assert_near(ours, path, tol=SAME_MATH):
    theirs = np.load(path)
    for key in ("energy", "force", "virial", "atom_energy"):
        reference = theirs[key].reshape(ours[key].shape)
        assert np.abs(ours[key] - reference).max() <= tol * np.abs(reference).max(), (path.name, key)


@needs_peer
@pytest.mark.timeout(600)
def test_deepmd_kit_computes_the_same_with_every_kind_of_model(tmp_path):
    rng, expected = np.random.default_rng(0), {}
    coord, types = toy_atoms()
    for name in (*CASES, "linear"):
        config, model = made(name)
        fitting, more = config.fitting_net, {}
        if fitting.numb_fparam:
            more["fparam"] = rng.normal(size=fitting.numb_fparam)
        if fitting.numb_aparam:
            more["aparam"] = rng.normal(size=(len(types), fitting.numb_aparam))
        write_one(tmp_path / f"{name}.pt", config, model)
        np.savez(tmp_path / f"{name}.npz", coord=coord, box=TRICLINIC, types=types, **more)
        expected[name] = evaluate(model, (coord, types, TRICLINIC), **more)
    ask_peer(tmp_path)
    for name, ours in expected.items():
        tol = 1e-5 if "single" in name or "mixed" in name else SAME_MATH
        assert_near(ours, tmp_path / f"{name}.out.npz", tol)


@needs_peer
@pytest.mark.timeout(600)
def test_deepmd_kit_computes_the_same_with_each_of_several_tasks(two_tasks, tmp_path):
    coord, types = toy_atoms(num_types=2)
    for name, average in (("live", []), ("ema", ["--use-ema"])):
        assert convert(two_tasks, tmp_path / f"{name}.pt", *average) == 0
        np.savez(tmp_path / f"{name}.npz", coord=coord, box=TRICLINIC, types=types)
    ask_peer(tmp_path)
    for name in ("live", "ema"):
        for head, loaded in load_models(two_tasks, use_average=name == "ema").models.items():
            assert_near(evaluate(loaded.model, (coord, types, TRICLINIC)), tmp_path / f"{name}.{head}.out.npz")


def dp(*words):
    command = [Path(PEER) / "bin" / "dp", "--pt", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, (words, done.stdout + done.stderr)
    return done.stdout + done.stderr


@needs_peer
@pytest.mark.timeout(900)
def test_commands_of_deepmd_kit_take_several_tasks(two_tasks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert convert(two_tasks, "x.pt", "--use-ema") == 0
    values = json.loads((two_tasks.parent / "input.json").read_text())
    for task, data in values["training"]["data_dict"].items():
        for part in data.values():
            part["systems"] = [str(two_tasks.parent / system) for system in part["systems"]]
        values["loss_dict"].setdefault(task, {})["type"] = "ener"
    values["learning_rate"]["type"] = "exp"
    values["training"] |= {"numb_steps": 1, "save_freq": 1, "enable_ema": False}
    values["training"].pop("ema_decay", None)
    Path("input.json").write_text(json.dumps(values))
    dp("freeze", "-c", "x.pt", "-o", "x.pth", "--head", "ice")
    dp("change-bias", "x.pt", "-s", str(two_tasks.parent / "ice1"), "--model-branch", "ice", "-o", "changed.pt")
    same_bits(load_model("changed.pt", head="water").model, load_model("x.pt", head="water").model)
    before, after = (load_model(name, head="ice").model.out_bias for name in ("x.pt", "changed.pt"))
    assert not torch.equal(before, after)
    for option in ("--init-model", "--finetune"):
        dp("train", "input.json", option, "x.pt", "--skip-neighbor-stat")
        assert list(load_models("model.ckpt-1.pt").models) == ["water", "ice"]


@needs_peer
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["table_se_atten", "linear"])
def test_deepmd_kit_freezes_tables_without_their_files(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_one("x.pt", *made(name))
    dp("freeze", "-c", "x.pt", "-o", "x.pth")
    assert Path("x.pth").stat().st_size


@needs_peer
@pytest.mark.timeout(900)
def test_commands_of_deepmd_kit_take_a_checkpoint(tmp_path, monkeypatch):
    """Live and averaged weights: tested, frozen, changed, and trained on."""
    monkeypatch.chdir(tmp_path)
    run, _ = write_run(tmp_path / "run")
    write_system("data", frames=4, seed=1)
    coord, types = toy_atoms(num_types=2)
    np.savez("frame.npz", coord=coord, box=TRICLINIC, types=types)
    config = tiny_input(["data"], num_steps=2, training__save_freq=2, training__disp_freq=1)
    Path("input.json").write_text(json.dumps(config))

    for name, average in (("live", []), ("ema", ["--use-ema"])):
        assert convert(run, f"{name}.pt", *average) == 0
        loaded = load_model(f"{name}.pt")
        assert "Force  RMSE" in dp("test", "-m", f"{name}.pt", "-s", "data")
        dp("freeze", "-c", f"{name}.pt", "-o", f"{name}.pth")
        # the bias alone is another one, also where dp-ema reads the file
        dp("change-bias", f"{name}.pt", "-s", "data", "-o", "changed.pt")
        changed = load_model("changed.pt").model.state_dict()
        others = {key for key, value in loaded.model.state_dict().items() if not torch.equal(changed[key], value)}
        assert "out_bias" in others
        assert others <= {"out_bias", "out_std"}
        for option in ("--init-model", "--finetune"):
            dp(
                "train",
                "input.json",
                option,
                f"{name}.pt",
                "--skip-neighbor-stat",
                *["--use-pretrain-script"] * (not average),
            )
            assert load_model("model.ckpt-2.pt").info.step == 2
    ask_peer_of_frozen(tmp_path)
    for name in ("live", "ema"):
        assert_near(evaluate(load_model(f"{name}.pt").model, (coord, types, TRICLINIC)), tmp_path / f"{name}.out.npz")


FROZEN_SCRIPT = """
import numpy as np
from deepmd.infer import DeepPot
data = np.load("frame.npz")
for name in ("live", "ema"):
    frame = data["coord"].reshape(1, -1), data["box"].reshape(1, 9), data["types"]
    out = DeepPot(f"{name}.pth").eval(*frame, atomic=True)
    np.savez(f"{name}.out.npz", energy=out[0], force=out[1], virial=out[2], atom_energy=out[3])
"""


def ask_peer_of_frozen(folder):
    subprocess.run([Path(PEER) / "bin" / "python", "-c", FROZEN_SCRIPT], cwd=folder, check=True, stdout=sys.stderr)
