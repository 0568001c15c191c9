"""Checkpoints of DeePMD-kit: read to the same numbers, and converted; what cannot be read is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import tiny_input, write_system
from infer_models import write_run

from deepmd_ema import checkpoint, cli
from deepmd_ema.errors import CheckpointError
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.interop.deepmd_pt import deepmd_section, read_deepmd_pt
from deepmd_ema.interop.dp import read_dp
from deepmd_ema.training.weights import load_weights

GOLDEN = Path(__file__).parent / "golden"
FILES = GOLDEN / "peer_checkpoints"  # made_by: make.py there
PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
SAME_MATH = 1e-10
MODELS = {
    "pt": None, "pt_ema": None, "pt_expt": None, "pt_hybrid": None, "pt_se_e3": None,
    "pt_heads_water": "water", "pt_heads_ice": "ice",
}  # fmt: skip


def file_of(name):
    return FILES / f"{name.removesuffix('_water').removesuffix('_ice')}.pt"


def predict(model):
    with np.load(FILES / "predictions.npz") as frame:
        coord, types, box = (frame[key] for key in ("coord", "types", "box"))
    found = Potential(model, device="cpu").evaluate(coord, types, box)
    return {"energy": found.energy, "force": found.force, "virial": found.virial}


def assert_same(found, name, tol=SAME_MATH):
    with np.load(FILES / "predictions.npz") as file:
        for key, value in found.items():
            reference = file[f"{name}_{key}"].reshape(value.shape)
            assert np.abs(value - reference).max() <= tol * np.abs(reference).max(), key


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_of_deepmd_kit_gives_its_numbers(name):
    assert_same(predict(load_model(file_of(name), head=MODELS[name])), name)


def test_the_average_in_a_checkpoint_is_that_of_its_averaged_file():
    loaded = load_model(FILES / "pt.pt", use_average=True)
    assert_same(predict(loaded), "pt_ema")
    assert loaded.info.describe() == "averaged weights (ema) of step 4: decay 0.5"


def test_a_checkpoint_says_what_its_weights_are():
    assert load_model(FILES / "pt.pt").info.describe() == "live weights of step 4"
    assert load_model(FILES / "pt_expt.pt").info.describe() == "live weights of step 4"
    assert "does not say whether they are live" in load_model(FILES / "pt_ema.pt").info.describe()


@pytest.mark.parametrize("suffix", [".dp", ".yaml", ".pt"])
@pytest.mark.parametrize("name", ["pt", "pt_expt"])
def test_convert_writes_the_same_model(name, suffix, tmp_path, capsys):
    out = tmp_path / f"model{suffix}"
    assert cli.main(["convert", str(FILES / f"{name}.pt"), str(out)]) == 0
    assert_same(predict(out), name)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"read {FILES / name}.pt: DeePMD-kit, elements O H, se_")
    assert said[1].startswith(f"wrote {out}: live weights of step 4, from {FILES / name}.pt")
    assert said[2].startswith("read back and compared on two made-up frames: largest difference 0.0e+00")
    if suffix == ".pt":
        assert checkpoint.load(out)["kind"] == "weights"


def test_convert_goes_around_without_a_change(tmp_path):
    """.pt -> .dp -> .yaml -> .pt -> .dp, to the bit."""
    run, _ = write_run(tmp_path)[:2]
    first = load_model(run, use_average=True)
    names = [run, *(tmp_path / name for name in ("a.dp", "b.yaml", "c.pt", "d.dp"))]
    for number, (one, two) in enumerate(pairwise(names)):
        assert cli.main(["convert", str(one), str(two), *["--use-ema"] * (number == 0)]) == 0
        last = load_model(two)
        assert last.info.weights == first.info.weights
        assert last.info.step == first.info.step
        for name, value in first.model.state_dict().items():
            assert torch.equal(last.model.state_dict()[name], value), name


@pytest.mark.parametrize("name", ["water", "ice"])
def test_a_head_is_chosen_by_name(name, tmp_path):
    assert cli.main(["convert", str(FILES / "pt_heads.pt"), str(tmp_path / "one.dp"), "--head", name]) == 0
    assert_same(predict(tmp_path / "one.dp"), f"pt_heads_{name}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pt_heads.pt", "out.dp"], "several models; which? It has water, ice: choose one with --head"),
        (["pt_heads.pt", "out.dp", "--head", "steam"], "no head 'steam'. It has water, ice"),
        (["pt.pt", "out.dp", "--head", "water"], "so there is no head 'water'"),
        (["pt_ema.pt", "out.dp", "--use-ema"], "without averaged weights"),
        (["pt.pt", "out.dp", "--average", "slow"], "no average is called 'slow'"),
        (
            ["pt.pt", "out.savedmodel"],
            "OUT out.savedmodel: dp-ema writes files. Write out.dp, then `dp convert",
        ),
        (["pt.pt", "out.dp", "--dp", "dp"], "--dp dp: out.dp is written without DeePMD-kit. Leave it out."),
        (["pt.pt", "out"], "OUT out: expected a name that ends in .dp, .yaml, .yml, .pt2 or .pt"),
        (["pt.pt", "away/out.pt"], "the folder away is not there"),
        (["pt.pt", "text.dp"], "OUT text.dp: a file is there that is not a frozen model"),
        (["pt.pt", "text.pt"], "OUT text.pt: a file is there that"),
        (["pt.pt", "ckpt.pt"], "OUT ckpt.pt: a file of kind training"),
        (["nothing.pt", "out.dp"], "no such file"),
    ],
)
def test_what_convert_cannot_do_is_a_message(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("text.dp", "text.pt"):
        Path(name).write_text("precious")
    Path("ckpt.pt").write_bytes((write_run(tmp_path / "run")[0]).read_bytes())
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert cli.main(["convert", str(FILES / words[0]), *words[1:]]) == 2
    assert message in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("suffix", [".dp", ".pt"])
def test_convert_never_writes_over_what_it_reads(suffix, tmp_path, capsys):
    path = tmp_path / f"model{suffix}"
    assert cli.main(["convert", str(FILES / "pt.pt"), str(path)]) == 0
    assert cli.main(["convert", str(path), str(path)]) == 2
    assert "which the command reads" in capsys.readouterr().err


def damaged(tmp_path, change):
    payload = torch.load(FILES / "pt.pt", weights_only=True)
    change(payload["model"])
    path = tmp_path / "model.pt"
    torch.save(payload, path)
    return path


FIRST = "model.Default.atomic_model.descriptor.sea.filter_layers.networks.0.layers.0.matrix"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.pop(FIRST), r"missing: descriptor.embeddings.networks.0.layers.0.w"),
        (lambda m: m.update({FIRST + "2": torch.ones(2)}), r"not of this model: .*layers.0.matrix2"),
        (lambda m: m.update({FIRST: torch.ones(2, 2)}), r"shape \(2, 2\), expected \(1, 4\)"),
        (lambda m: m["_extra_state"].pop("model_params"), "without the section `model` of its input"),
        (lambda m: m["_extra_state"].update(model_params={"type_map": 3}), "type_map"),
        (lambda m: m["_extra_state"]["model_params"]["descriptor"].update(type="dpa9"), '"dpa9"'),
        (
            lambda m: m.update(
                {FIRST.replace("filter_layers", "compress_data").replace("0.matrix", "0"): torch.ones(3)}
            ),
            "not of this model: .*compress_data",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_a_message(change, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        load_model(damaged(tmp_path, change))


def test_objects_that_could_run_programs_are_not_loaded(tmp_path):
    payload = torch.load(FILES / "pt.pt", weights_only=True)
    torch.save({**payload, "more": Path("x")}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match=r"could run any program.*dp convert-backend"):
        load_model(tmp_path / "model.pt")


def test_a_restart_from_a_checkpoint_of_deepmd_kit_is_refused(tmp_path):
    with pytest.raises(checkpoint.DeepmdCheckpointError, match="--init-model and --finetune start a run"):
        checkpoint.load(FILES / "pt.pt")


@pytest.mark.parametrize("name", ["pt", "pt_expt"])
def test_a_run_starts_from_the_weights_of_a_checkpoint_of_deepmd_kit(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=4, seed=1)
    loaded = load_model(FILES / f"{name}.pt")
    config = tiny_input(["data"], num_steps=2, training__enable_ema=True, training__save_freq=2)
    Path("input.json").write_text(json.dumps({**config, "model": loaded.info.config["model"]}))
    begin = load_weights(str(FILES / f"{name}.pt")).sources[""].loaded.model.state_dict()
    assert all(torch.equal(begin[key], value) for key, value in loaded.model.state_dict().items())
    with mock.patch.object(checkpoint.file, "read_archive", wraps=checkpoint.file.read_archive) as read:
        assert cli.main(["train", "input.json", "--init-model", str(FILES / f"{name}.pt"), "--device", "cpu"]) == 0
    assert read.call_count == 1
    assert f"weights of {FILES / name}.pt (live, step 4)" in capsys.readouterr().err
    assert cli.main(["train", "input.json", "--restart", str(FILES / f"{name}.pt"), "--device", "cpu"]) == 2
    assert "a checkpoint of DeePMD-kit" in capsys.readouterr().err


def test_show_says_what_a_checkpoint_of_deepmd_kit_holds(capsys):
    assert cli.main(["show", str(FILES / "pt.pt")]) == 0
    out = capsys.readouterr().out
    assert "checkpoint of DeePMD-kit" in out
    assert "live weights of step 4" in out


def test_show_says_what_each_model_of_a_checkpoint_of_deepmd_kit_is(capsys):
    assert cli.main(["show", str(FILES / "pt_heads.pt")]) == 0
    out = capsys.readouterr().out
    assert "water, ice: O H" in out
    assert "water, ice: se_e2_a" in out


PEER_SCRIPT = """
import sys, torch
from pathlib import Path
from unittest import mock
from deepmd.dpmodel.utils.serialization import load_dp_model
from importlib import import_module

for path in sorted(Path(sys.argv[2]).glob("*.section")):
    path = Path(sys.argv[1]) / f"{path.stem}.dp"
    for backend in ("pt", "pt_expt"):
        model = import_module(f"deepmd.{backend}.model.model").BaseModel
        wrapper = import_module(f"deepmd.{backend}.train.wrapper").ModelWrapper
        data = load_dp_model(str(path))
        built = model.deserialize(data["model"])
        params = torch.load(Path(sys.argv[2]) / f"{path.stem}.section", weights_only=True)
        state = wrapper(built, model_params=params).state_dict()
        torch.save({"model": state}, Path(sys.argv[2]) / f"{path.stem}.{backend}.pt")
"""


@pytest.mark.skipif(PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0")
@pytest.mark.timeout(600)
def test_every_kind_of_model_is_read_to_the_bit(tmp_path):
    """The peer reads each golden model and writes its modules' tensors; read here they are those of the .dp file."""
    known = {}
    for path in sorted(GOLDEN.glob("*.dp")):
        config, model, _ = read_dp(path)
        if config.type == "linear_ener":  # the peer does not read the files of it that it writes
            continue
        known[path.stem] = model.state_dict()
        torch.save(deepmd_section(config), tmp_path / f"{path.stem}.section")
    script = tmp_path / "peer.py"
    script.write_text(PEER_SCRIPT)
    subprocess.run([Path(PEER) / "bin" / "python", script, GOLDEN, tmp_path], check=True, stdout=sys.stderr)
    for name, expected in known.items():
        for backend in ("pt", "pt_expt"):
            path = tmp_path / f"{name}.{backend}.pt"
            found = read_deepmd_pt(torch.load(path, weights_only=True), path)[1].state_dict()
            assert list(found) == list(expected)
            for key, value in expected.items():
                # pt_expt has zeros for the networks of pairs that se_e3 excludes
                unused = (name, backend) == ("se_e3", "pt_expt") and not found[key].any()
                assert unused or torch.equal(found[key], value), (name, backend, key)
