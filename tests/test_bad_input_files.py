"""Bad checkpoints and places that cannot be written, through the real command line."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import socket
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from bad_inputs import GOOD, USER, Desk, sit_down, write_systems
from helpers import FullDisk
from test_data_npy import to_hdf5

from deepmd_ema import checkpoint, cli
from deepmd_ema.distributed.files import locked
from deepmd_ema.training.outputs import LOCK

LAST = 4


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    return write_systems(tmp_path_factory.mktemp("systems"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, systems):
    """A folder in which a run of 4 steps has saved twice."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    with pytest.MonkeyPatch.context() as patch:
        desk = Desk(folder, systems)
        patch.chdir(folder)
        desk.write(num_steps=LAST, training__save_freq=2)
        assert cli.main(["train", "input.json", "--device", "cpu", "-v", "ERROR"]) == 0
    return folder


@pytest.fixture
def clean(tmp_path, systems, monkeypatch, capsys):
    """A desk without a run."""
    return sit_down(tmp_path, systems, monkeypatch, capsys)


@pytest.fixture
def desk(clean, trained):
    """A desk with the files of that run; its input continues to step 8."""
    shutil.copytree(trained, clean.folder, symlinks=True, dirs_exist_ok=True)
    clean.write(num_steps=8, training__save_freq=2)
    return clean


# ---- where a run starts from


def cut(name):
    file = Path(name)
    file.write_bytes(file.read_bytes()[:-500])


def flip(name):
    with zipfile.ZipFile(name) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
        numbers = archive.read(largest)
    content = bytearray(Path(name).read_bytes())
    content[content.index(numbers) + len(numbers) // 2] ^= 1
    Path(name).write_bytes(content)


BAD_STARTS = {
    "no checkpoint": (lambda desk: Path("m.pt").write_text("hello"), ["--restart", "m.pt"],
     ["m.pt: not a checkpoint. dp-ema writes them as model.ckpt-<step>.pt."]),
    "missing": (lambda desk: None, ["--restart", "model.ckpt-7.pt"],
     ["model.ckpt-7.pt: no such file. Available in .: model.ckpt-4.pt, model.ckpt-2.pt"]),
    "one bit of it changed": (lambda desk: flip("model.ckpt-4.pt"), ["--restart", "model.ckpt.pt"],
     ["model.ckpt.pt: damaged, ", "model.ckpt-2.pt: continue from that one."]),
    "another program's": (lambda desk: torch.save({"model": {"_extra_state": {}}}, "m.pt"), ["--init-model", "m.pt"],
     ["m.pt: a checkpoint of DeePMD-kit without the section `model`", "dp convert-backend"]),
    "of another model": (lambda desk: desk.write(num_steps=8, training__save_freq=2, model__descriptor__neuron=[4, 6]),
     ["--restart", "model.ckpt.pt"], ["model.descriptor.neuron: [4, 8] in the checkpoint, [4, 6] in the input.",
     "Put this back, or say --allow-"]),
    "weights of another model": (lambda desk: (desk.write(model__fitting_net__neuron=[8, 9]),
     shutil.copy("model.ckpt.pt", "start.pt")), ["--init-model", "start.pt"],
     ["start.pt: its weights do not fit", "fitting.nets.0.layers.1", "is (8, 8) there, (8, 9) here"]),
    "weights of other elements": (lambda desk: desk.write(type_map=["O", "H", "Si"]), ["--init-model", "model.ckpt.pt"],
     ["a model of type_map ['O', 'H'], but model.type_map is ['O', 'H', 'Si']. Use the type_map of"]),
    "of another optimizer": (lambda desk: desk.write(num_steps=8, optimizer__type="AdamW"),
     ["--restart", "model.ckpt.pt", "--allow-config-change"],
     ['optimizer.type = "AdamW": the checkpoint holds the moments of Adam. Set it to "Adam"']),
    "of another seed and other data": (lambda desk: desk.write(num_steps=8, training__seed=3,
     training__training_data__batch_size=1), ["--restart", "model.ckpt.pt"],
     ["2 problems in input.json", "1. training.seed: 10 in the", "2. training.training_data.batch_size: 2 in the"]),
}  # fmt: skip


WAY_OUT = "in another folder, or from a copy: `cp"
BAD_STARTS |= {
    f"a file that the run would set aside, {how}": (
        lambda desk: Path("mine.pt").symlink_to("model.ckpt-2.pt"),
        how.split(),
        [f"{how.split()[1]}: the file to start from belongs to an earlier run", f"{WAY_OUT} {real} start.pt`"],
    )
    for how, real in {
        "--init-model model.ckpt.pt": "model.ckpt-4.pt",
        "--init-model model_ema.ckpt": "model_ema.ckpt-4.pt",
        "--finetune model.ckpt-2.pt": "model.ckpt-2.pt",
        "--init-model .": "model.ckpt-4.pt",
        "--finetune mine.pt": "model.ckpt-2.pt",
    }.items()
}


@pytest.mark.parametrize("kind", BAD_STARTS)
def test_a_file_that_a_run_cannot_start_from_is_reported_and_nothing_is_touched(desk, kind):
    break_it, words, phrases = BAD_STARTS[kind]
    break_it(desk)
    before = {p.name: p.lstat().st_mtime_ns for p in desk.folder.iterdir() if p.is_file()}
    desk.train(*words).must_say(*phrases)
    assert {p.name: p.lstat().st_mtime_ns for p in desk.folder.iterdir() if p.is_file()} == before


def test_a_restart_of_a_finished_run_says_that_nothing_is_left(desk):
    desk.write(num_steps=LAST, training__save_freq=2)
    desk.train("--restart", "model.ckpt.pt").must_say(
        "WARNING: step 4 is the last of 4 already: nothing is left to train. Raise training.numb_steps", code=GOOD
    )
    desk.run("show", "model.ckpt.pt", "--json").must_say("prints the status of a run. Give its folder, or leave --json")


def test_statistics_are_not_added_to_data(clean):
    with pytest.importorskip("h5py").File("data.h5", "w") as file:
        file["water/type.raw"] = [0, 1]
    clean.write(training__stat_file="data.h5")
    clean.train("-v", "ERROR").must_say("data.h5: holds data, to which no statistics are added")


def test_a_restart_on_data_that_have_grown_says_so(desk):
    shutil.copytree("data/set.000", "data/set.002")
    desk.train("--restart", "model.ckpt.pt").must_say(
        "WARNING: the training data have 12 frames now and had 8 when the checkpoint was written", code=GOOD
    )


# ---- where a run writes to


@pytest.mark.parametrize("files_that_fit", [0, 1])
def test_a_full_disk_is_reported_and_the_old_checkpoint_stays_usable(desk, monkeypatch, files_that_fit):
    kept, save, written = Path("model.ckpt-4.pt").read_bytes(), torch.save, []

    def save_while_there_is_space(content, file):
        written.append(file.name)
        save(content, file if len(written) <= files_that_fit else FullDisk(file, 3000))

    monkeypatch.setattr(torch, "save", save_while_there_is_space)
    name = ("model.ckpt-6.pt", "model_ema.ckpt-6.pt")[files_that_fit]
    reported = desk.train("--restart", "model.ckpt.pt", "-v", "WARNING")
    reported.must_say(f"dp-ema: {name}: cannot be written (No space left on device). Make room on the disk.",
                  "model.ckpt-4.pt is whole and still usable.")  # fmt: skip
    monkeypatch.setattr(torch, "save", save)
    assert Path("model.ckpt-4.pt").read_bytes() == kept
    assert not list(Path().glob("*.part*"))
    assert {checkpoint.load(p)["step"] for p in ("model.ckpt.pt", "model_ema.ckpt.pt", ".")} == {4}
    desk.train("--restart", "model.ckpt.pt").must_say(code=GOOD)


BAD_PLACES = {
    "a file in the way": (lambda: Path("out").write_text(""), {"training__save_ckpt": "out/model.ckpt"},
     ["training.save_ckpt: ", "/out: cannot be written (File exists)", "There is a file where a folder is expected"]),
    "several": (lambda: Path("out").write_text(""),
     {"training__disp_file": "/proc/lcurve.out", "training__save_dir": "out", "validating__save_best_dir": "/proc"},
     ["2 problems", "training.disp_file: /proc: cannot", "training.save_dir: /", "out: cannot"]),
    "a folder in place of the learning curve": (lambda: Path("lcurve.out").mkdir(), {},
     ["training.disp_file: lcurve.out is a folder, and the run writes a file of that name. Move it away"]),
    "a folder in place of the link to an average of the list": (lambda: Path("model_slow.ckpt.pt").mkdir(),
     {"training__averaging": [{"name": "slow", "decay": 0.9}]}, ["training.save_ckpt: model_slow.ckpt.pt is a folder"]),
    "a folder in place of the normalized input": (lambda: Path("out.json").mkdir(), {},
     ["--output: out.json is a folder"]),
    "a file in place of the statistics": (lambda: Path("stat").write_text(""), {"training__stat_file": "stat"},
     ["training.stat_file: stat: cannot be written (", "Remove the file that is there, name another place"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_a_place_that_cannot_be_written_is_reported_before_anything_is_trained(clean, kind):
    break_it, changes, phrases = BAD_PLACES[kind]
    break_it()
    clean.write(**changes)
    reported = clean.train()
    reported.must_say(*phrases)
    assert "trained parameters" not in reported.text


def everything(folder="."):
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file() and not p.is_symlink()}


NOT_OVERWRITTEN = {
    "a link to the input": ["train", "input.json", "-o", "link.json"],
    "the input by the log": ["freeze", "-l", "input.json"],
    "data by a picture": ["plot", "lcurve.out", "-o", "data/type.raw"],
    "a checkpoint by a picture": ["test", "-m", "model.ckpt.pt", "--plot", "model.ckpt-4.pt"],
    "an input by a frozen model": ["freeze", "-o", "other.yaml"],
    "text by a bias": ["change-bias", "model.ckpt.pt", "-b", "-1", "-2", "-o", "text.pt"],
}


@pytest.mark.parametrize("kind", NOT_OVERWRITTEN)
def test_no_command_writes_over_a_checkpoint_an_input_or_data(desk, kind):
    Path("link.json").symlink_to("input.json")
    Path("other.yaml").write_text("model:\n  type_map: [O, H]\n")
    Path("text.pt").write_text("my notes")
    Path("details.e.out").write_text("my notes")
    before = everything()
    command, *words = NOT_OVERWRITTEN[kind]
    reported = desk.run(command, *words)
    reported.must_say(words[-1], "Choose another", code=USER)
    assert everything() == before


def test_two_runs_in_one_folder_are_refused_with_process_and_machine(desk):
    before = everything()
    with locked([Path.cwd() / LOCK]):
        reported = desk.train()
        reported.must_say(
            "another run writes here", f"process {os.getpid()} on {socket.gethostname()}", "another folder"
        )
    assert everything() == before


def test_a_forgotten_restart_loses_nothing_and_is_reported_before_the_first_step(desk):
    before = everything()
    reported = desk.train()
    reported.must_say(
        "there were files of an earlier run, up to step 4: moved to earlier-1.", "use --restart", code=GOOD
    )
    assert reported.text.index("moved to earlier-1") < reported.text.index("1  train")
    ran = [name for name in before if name.endswith((".pt", ".out", ".log", "out.json")) or name == "checkpoint"]
    assert len(ran) > 5
    after = everything()
    for name in ran:
        assert after[f"earlier-1/{name}"] == before[name], name
    for link in ("model.ckpt.pt", "model_ema.ckpt.pt", "checkpoint", "."):
        assert checkpoint.load(Path("earlier-1") / link)["step"] == LAST
    assert checkpoint.load("model.ckpt.pt")["step"] == 8
    assert not Path(LOCK).exists()
    desk.train().must_say("moved to earlier-2", code=GOOD)
    assert checkpoint.load(Path("earlier-1") / ".")["step"] == LAST


BAD_PATHS = {
    "a path that is too long": ({"training__disp_file": "x/" * 3000 + "lcurve.out"}, "File name too long"),
    "a link to itself": ({"training__training_data__systems": ["self"]}, "self"),
    "a link to itself below": ({"training__training_data__systems": ["with_self"]},
     "with_self/self: Too many levels of symbolic links"),
    "1,200 folders in each other": ({"training__training_data__systems": ["deep"]}, "deep: no system in it"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_that_the_system_refuses_is_one_message(clean, kind):
    changes, phrase = BAD_PATHS[kind]
    Path("self").symlink_to("self")
    Path("with_self").mkdir()
    Path("with_self/self").symlink_to("self")
    if "1,200" in kind:
        here = os.getcwd()
        try:
            for name in ("deep", *("d" * 1200)):
                os.mkdir(name)
                os.chdir(name)
        finally:
            os.chdir(here)
    clean.write(**changes)
    reported = clean.train()
    subprocess.run(["rm", "-rf", "deep"], check=True)  # Python would recurse too deeply
    reported.must_say(phrase)


# ---- after training


def drop_average():
    payload = checkpoint.load("model.ckpt-4.pt")
    del payload["averages"]
    checkpoint.save("model.ckpt-4.pt", payload)


BAD_USES = {
    "freeze without an average": (drop_average, ["freeze", "--use-ema"],
     ["model.ckpt-4.pt: no averaged weights in this checkpoint: training.enable_ema was false and", "leave out --use"]),
    "test without data": (lambda: None, ["test", "-m", "model.ckpt.pt", "-s", "dta"],
     ["dta: no such file or folder. Did you mean data?"]),
    "show a truncated file": (lambda: cut("model.ckpt-4.pt"), ["show", "model.ckpt-4.pt"],
     ["model.ckpt-4.pt: damaged, cut off after"]),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD_USES)
def test_a_model_that_cannot_be_used_as_requested_is_reported(desk, kind):
    break_it, words, phrases = BAD_USES[kind]
    break_it()
    desk.run(*words).must_say(*phrases)


def test_a_model_that_holds_nan_is_reported_by_test(desk):
    payload = checkpoint.load("model.ckpt-4.pt")
    payload["model"]["fitting.bias_atom_e"] *= float("nan")
    checkpoint.save("model.ckpt-4.pt", payload)
    desk.run("test", "-m", "model.ckpt.pt", "-s", "data").must_say(
        "data/set.000: frame 0 (from 0) and 7 more: model.ckpt.pt gives no finite energies", "Does it hold nan"
    )


# ---- generated damage: whatever a file holds, a command ends with a result or one message

READERS = {
    "model.ckpt-4.pt": ["train input.json --device cpu --restart model.ckpt-4.pt", "show model.ckpt-4.pt",
                        "test -m model.ckpt-4.pt -s valid", "freeze -c model.ckpt-4.pt"],
    "frozen.dp": ["show frozen.dp", "test -m frozen.dp -s valid"],
    "frozen.yaml": ["test -m frozen.yaml -s valid", "change-bias frozen.yaml -b 1 2"],
    "data/set.000/force.npy": ["check input.json"],
    "data/type.raw": ["check input.json", "test -m model.ckpt-4.pt -s data"],
    "input.json": ["check input.json --config-only"],
    "lcurve.out": ["plot lcurve.out", "show ."],
    "checkpoint": ["freeze", "show .", "posthoc ."],
    "data.extxyz": ["test -m model.ckpt-4.pt -s data.extxyz", "convert data.extxyz out"],
    "data.h5": ["test -m model.ckpt-4.pt -s data.h5"],
}  # fmt: skip


def damaged(content):
    """Yield a file that is cut off, overwritten by zeros, changed in some bytes, or that is of another kind."""
    for part in (0, 0.01, 0.4, 0.95):
        yield content[: int(part * len(content))]
        yield content[: int(part * len(content))].ljust(len(content), b"\0")
    for seed in range(8):
        rng, spoiled = np.random.default_rng(seed), bytearray(content)
        for place in rng.integers(0, len(content) if seed % 2 else min(len(content), 2048), 1 + seed):
            spoiled[place] = int(rng.integers(256))
        yield bytes(spoiled)
    yield from (b"words\n" * 9, b"\xff\xfe\0", b"[" * 50_000, pickle.dumps({"model": {}}), b"gone.pt\nmodel.ckpt-2.pt")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", READERS)
def test_whatever_a_file_holds_a_command_ends_with_a_result_or_one_message(desk, name):
    for output in ("frozen.dp", "frozen.yaml"):
        assert desk.run("freeze", "-o", output).code == GOOD
    assert desk.run("convert", "data", "data.extxyz").code == GOOD
    with pytest.importorskip("h5py").File("data.h5", "w") as file:
        to_hdf5(Path("data"), file.create_group("water"))
    whole = Path(name).read_bytes()
    for content in damaged(whole):
        Path(name).write_bytes(content)
        for command in READERS[name]:
            reported = desk.run(*command.split())
            assert reported.code in (GOOD, USER), (content[:80], reported.text)
            assert "Traceback" not in reported.text
            assert len(reported.text.splitlines()) < 60 or reported.code == GOOD
        shutil.rmtree("out", ignore_errors=True)


TAMPERED = [None, "x", -1, 10**30, float("nan"), [1, "x"], {"x": 1}, torch.zeros(2, 3)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", [
    "format", "kind", "step", "config", "model", "optimizer", "streams", "display", "averages", "best", "run",
    "config.model", "config.training", "config.model.descriptor", "config.model.descriptor.sel",
    "model.out_bias", "averages.steps",
])  # fmt: skip
def test_a_part_of_a_checkpoint_that_is_gone_or_of_another_kind_ends_no_command_with_a_traceback(desk, path):
    whole = checkpoint.load("model.ckpt-4.pt")
    *above, last = path.split(".")
    for number, value in enumerate([..., *TAMPERED]):
        content = copy.deepcopy(whole)
        part = content
        for key in above:
            part = part[key]
        part.pop(last, None) if value is ... else part.update({last: value})
        checkpoint.save("model.ckpt-4.pt", content)
        for command in (READERS["model.ckpt-4.pt"][0], READERS["model.ckpt-4.pt"][1 + number % 3]):
            reported = desk.run(*command.split())
            assert reported.code in (GOOD, USER), (value, reported.text)
            assert "Traceback" not in reported.text
