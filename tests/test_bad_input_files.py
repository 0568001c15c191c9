"""Bad checkpoints and places that cannot be written, through the real command line."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import zipfile
from pathlib import Path

import pytest
import torch
from bad_inputs import GOOD, USER, Desk, sit_down, write_systems
from helpers import FullDisk

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
    "missing": (
        lambda desk: None,
        ["--restart", "model.ckpt-7.pt"],
        ["model.ckpt-7.pt: no such file. Available in .: model.ckpt-4.pt, model.ckpt-2.pt"],
    ),
    "truncated": (
        lambda desk: cut("model.ckpt-4.pt"),
        ["--restart", "model.ckpt.pt"],
        ["model.ckpt.pt: damaged, cut off after", "model.ckpt-2.pt: continue from that one."],
    ),
    "one bit of it changed": (
        lambda desk: flip("model.ckpt-4.pt"),
        ["--restart", "model.ckpt.pt"],
        ["model.ckpt.pt: damaged, ", "model.ckpt-2.pt: continue from that one."],
    ),
    "its target is gone": (
        lambda desk: Path("model.ckpt-4.pt").unlink(),
        ["--restart", "model.ckpt.pt"],
        ["model.ckpt.pt: links to model.ckpt-4.pt, which is missing. Available in .: model.ckpt-2.pt"],
    ),
    "no checkpoint": (
        lambda desk: Path("m.pt").write_text("hello"),
        ["--restart", "m.pt"],
        ["m.pt: not a checkpoint. dp-ema writes them as model.ckpt-<step>.pt."],
    ),
    "another program's": (
        lambda desk: torch.save({"model": {"_extra_state": {}}}, "m.pt"),
        ["--init-model", "m.pt"],
        ["m.pt: a checkpoint of DeePMD-kit without the section `model`", "dp convert-backend"],
    ),
    "an average": (
        lambda desk: None,
        ["--restart", "model_ema.ckpt.pt"],
        ["holds average weights (ema) of step 4", "Use --restart model.ckpt-4.pt,", "--init-model model_ema"],
    ),
    "of another model": (
        lambda desk: desk.write(num_steps=8, training__save_freq=2, model__descriptor__neuron=[4, 6]),
        ["--restart", "model.ckpt.pt"],
        ["model.descriptor.neuron: [4, 8] in the checkpoint, [4, 6] in the input.", "Put this back, or say --allow-"],
    ),
    "of another model, insisted": (
        lambda desk: desk.write(num_steps=8, training__save_freq=2, model__descriptor__neuron=[4, 6]),
        ["--restart", "model.ckpt.pt", "--allow-config-change"],
        ["its weights do not fit", "layers.1.weight is (4, 8) there, (4, 6) here", "Use the model"],
    ),
    "weights of another model": (
        lambda desk: (desk.write(model__fitting_net__neuron=[8, 9]), shutil.copy("model.ckpt.pt", "start.pt")),
        ["--init-model", "start.pt"],
        ["start.pt: its weights do not fit", "fitting.nets.0.layers.1", "is (8, 8) there, (8, 9) here"],
    ),
    "weights of other elements": (
        lambda desk: desk.write(type_map=["O", "H", "Si"]),
        ["--init-model", "model.ckpt.pt"],
        ["a model of type_map ['O', 'H'], but model.type_map is ['O', 'H', 'Si']. Use the type_map of"],
    ),
    "of another optimizer": (
        lambda desk: desk.write(num_steps=8, optimizer__type="AdamW"),
        ["--restart", "model.ckpt.pt", "--allow-config-change"],
        ['optimizer.type = "AdamW": the checkpoint holds the moments of Adam. Set it to "Adam"'],
    ),
    "of another seed and other data": (
        lambda desk: desk.write(num_steps=8, training__seed=3, training__training_data__batch_size=1),
        ["--restart", "model.ckpt.pt"],
        ["2 problems in input.json", "1. training.seed: 10 in the", "2. training.training_data.batch_size: 2 in the"],
    ),
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


@pytest.mark.parametrize("option", ["--init-model", "--finetune"])
def test_a_run_from_a_copy_beside_an_earlier_run_can_be_started_again(desk, option):
    shutil.copy("model.ckpt.pt", "start.pt")
    for number in (1, 2):
        assert desk.train(option, "start.pt").code == GOOD
        assert Path(f"earlier-{number}/model.ckpt.pt").is_file()


def test_a_restart_of_a_finished_run_says_that_nothing_is_left(desk):
    desk.write(num_steps=LAST, training__save_freq=2)
    desk.train("--restart", "model.ckpt.pt").must_say(
        "WARNING: step 4 is the last of 4 already: nothing is left to train. Raise training.numb_steps", code=GOOD
    )


def test_a_restart_on_data_that_have_grown_says_so(desk):
    shutil.copytree("data/set.000", "data/set.002")
    desk.train("--restart", "model.ckpt.pt").must_say(
        "WARNING: the training data have 12 frames now and had 8 when the checkpoint was written", code=GOOD
    )


def test_a_restart_from_the_file_that_a_message_named_continues(desk):
    cut("model.ckpt-4.pt")
    named = desk.train("--restart", "model.ckpt.pt").text.split("before it is ")[1].split(": continue")[0]
    desk.train("--restart", named).must_say(code=GOOD)
    assert checkpoint.load("model.ckpt.pt")["step"] == 8


# ---- where a run writes to


@pytest.mark.parametrize("files_that_fit", [0, 1])
def test_a_full_disk_is_reported_and_the_old_checkpoint_stays_usable(desk, monkeypatch, files_that_fit):
    kept, save, written = Path("model.ckpt-4.pt").read_bytes(), torch.save, []

    def save_while_there_is_space(content, file):
        written.append(file.name)
        save(content, file if len(written) <= files_that_fit else FullDisk(file, 3000))

    monkeypatch.setattr(torch, "save", save_while_there_is_space)
    name = ("model.ckpt-6.pt", "model_ema.ckpt-6.pt")[files_that_fit]
    reported = desk.train("--restart", "model.ckpt.pt")
    reported.must_say(f"dp-ema: {name}: cannot be written (No space left on device). Make room on the disk.",
                  "model.ckpt-4.pt is whole and still usable.")  # fmt: skip
    monkeypatch.setattr(torch, "save", save)
    assert Path("model.ckpt-4.pt").read_bytes() == kept
    assert not list(Path().glob("*.part*"))
    assert {checkpoint.load(p)["step"] for p in ("model.ckpt.pt", "model_ema.ckpt.pt", ".")} == {4}
    desk.train("--restart", "model.ckpt.pt").must_say(code=GOOD)


def test_a_full_disk_before_the_first_checkpoint_is_reported(clean, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    clean.train().must_say("out.json: cannot be written (No space left on device). Make room")


BAD_PLACES = {
    "a file in the way": (
        lambda: Path("out").write_text(""),
        {"training__save_ckpt": "out/model.ckpt"},
        ["training.save_ckpt: ", "/out: cannot be written (File exists)", "There is a file where a folder is expected"],
    ),
    "no permission": (
        lambda: None,
        {"training__save_dir": "/proc/here"},
        ["training.save_dir: /proc/here: cannot be written ("],
    ),
    "several": (
        lambda: Path("out").write_text(""),
        {"training__disp_file": "/proc/lcurve.out", "training__save_dir": "out", "validating__save_best_dir": "/proc"},
        ["2 problems", "training.disp_file: /proc: cannot", "training.save_dir: /", "out: cannot"],
    ),
    "a folder in place of the learning curve": (
        lambda: Path("lcurve.out").mkdir(),
        {},
        ["training.disp_file: lcurve.out is a folder, and the run writes a file of that name. Move it away"],
    ),
    "a folder in place of the link": (
        lambda: Path("model.ckpt.pt").mkdir(),
        {},
        ["training.save_ckpt: model.ckpt.pt is a folder"],
    ),
    "a folder in place of the link to an average": (
        lambda: Path("model_ema.ckpt.pt").mkdir(),
        {"training__enable_ema": True},
        ["training.save_ckpt: model_ema.ckpt.pt is a folder, and the run writes a file of that name. Move it away"],
    ),
    "a folder in place of the link to an average of the list": (
        lambda: Path("model_slow.ckpt.pt").mkdir(),
        {"training__averaging": [{"name": "slow", "decay": 0.9}]},
        ["training.save_ckpt: model_slow.ckpt.pt is a folder"],
    ),
    "a folder in place of the normalized input": (
        lambda: Path("out.json").mkdir(),
        {},
        ["--output: out.json is a folder"],
    ),
    "no place for the board": (
        lambda: None,
        {"training__tensorboard": True, "training__tensorboard_log_dir": "/proc/board"},
        ["training.tensorboard_log_dir: /proc/board: cannot be written"],
    ),
    "no place for statistics": (
        lambda: None,
        {"training__stat_file": "/proc/stat.h5"},
        ["training.stat_file: /proc: cannot be written"],
    ),
    "a file in place of the statistics": (
        lambda: Path("stat").write_text(""),
        {"training__stat_file": "stat"},
        ["training.stat_file: stat: cannot be written (", "Remove the file that is there, name another place"],
    ),
}


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_a_place_that_cannot_be_written_is_reported_before_anything_is_trained(clean, kind):
    break_it, changes, phrases = BAD_PLACES[kind]
    break_it()
    clean.write(**changes)
    reported = clean.train()
    reported.must_say(*phrases)
    assert "trained parameters" not in reported.text


def test_a_log_file_that_cannot_be_written_is_reported(clean):
    clean.train("-l", "/proc/log").must_say("--log-path /proc/log: cannot be written (")


def everything(folder="."):
    return {str(p): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file() and not p.is_symlink()}


NOT_OVERWRITTEN = {
    "the input": ["train", "input.json", "-o", "input.json"],
    "a link to the input": ["train", "input.json", "-o", "link.json"],
    "the input by the log": ["freeze", "-l", "input.json"],
    "a checkpoint by the log": ["freeze", "-l", "model.ckpt-4.pt"],
    "data by a picture": ["plot", "lcurve.out", "-o", "data/type.raw"],
    "a learning curve by a picture": ["plot", "lcurve.out", "-o", "lcurve.out"],
    "a checkpoint by a picture": ["test", "-m", "model.ckpt.pt", "--plot", "model.ckpt-4.pt"],
    "data by details": ["test", "-m", "model.ckpt.pt", "-d", "details"],
    "an input by a frozen model": ["freeze", "-o", "other.yaml"],
    "an average by a bias": ["change-bias", "model.ckpt.pt", "-b", "-1", "-2", "-o", "model_ema.ckpt-4.pt"],
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


def test_rows_are_not_written_over_the_input_or_data(clean):
    clean.write(training__disp_file="input.json")
    before = everything()
    clean.train().must_say("training.disp_file input.json: this is input.json, which the command reads")
    clean.write(training__disp_file="data/type.raw")
    clean.train().must_say("training.disp_file data/type.raw: a file is there that is not a table")
    assert (Path("data") / "type.raw").read_bytes() == before["data/type.raw"]


def test_statistics_are_not_added_to_data(clean):
    h5py = pytest.importorskip("h5py")
    with h5py.File("data.h5", "w") as file:
        file["water/type.raw"] = [0, 1]
    before = Path("data.h5").read_bytes()
    clean.write(training__stat_file="data.h5")
    clean.train("-v", "ERROR").must_say("data.h5: holds data, to which no statistics are added")
    assert Path("data.h5").read_bytes() == before


def test_two_runs_in_one_folder_are_refused_with_process_and_machine(desk):
    before = everything()
    with locked([Path.cwd() / LOCK]):
        reported = desk.train()
        reported.must_say(
            "another run writes here", f"process {os.getpid()} on {socket.gethostname()}", "another folder"
        )
    assert everything() == before


def test_a_wait_for_a_run_on_another_machine_is_reported_before_it(desk, monkeypatch):
    monkeypatch.setattr("deepmd_ema.distributed.files.WATCH_S", 0.2)
    holder = {"machine": "ffffffff", "host": "node12", "pid": 7, "since": "2026-01-02 03:04:05"}
    Path(LOCK).write_text(json.dumps(holder))
    reported = desk.train("--restart", "model.ckpt.pt")
    reported.must_say("process 7 on node12 held this lock", "Waiting up to 0 s", "remove the file", code=GOOD)
    assert reported.text.index("Waiting up to") < reported.text.index("restart after step")


def test_two_runs_may_share_a_folder_of_checkpoints_but_no_file_in_it(clean):
    away = Path.cwd().with_name(f"{Path.cwd().name}_away")
    clean.write(training__save_ckpt=str(away / "one"))
    clean.train().must_say(code=GOOD)
    with locked([away / ".two.pt.lock"]):
        clean.train("--restart", str(away / "one.pt")).must_say(code=GOOD)
    with locked([away / ".one.pt.lock"]):
        clean.train("--restart", str(away / "one.pt")).must_say(f"{away}: another run writes here")
    assert not list(away.glob(".*.lock"))


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


def test_a_run_that_left_neither_rows_nor_checkpoints_is_not_kept(clean):
    """A run that ends before its first row leaves its normalized input alone; another file of the name is kept."""
    clean.train().must_say(code=GOOD)
    normalized = Path("out.json").read_text()
    for path in Path().iterdir():
        if path.name.startswith(("model", "lcurve", "val", "best", "checkpoint")) and not path.is_dir():
            path.unlink()
    Path("out.json").write_text(normalized.replace('"numb_steps": 2', '"numb_steps": 3'))
    assert Path("out.json").read_text() != normalized
    clean.train().must_say(code=GOOD)
    assert not list(Path().glob("earlier*"))
    assert Path("out.json").read_text() == normalized


def test_an_input_of_the_user_under_the_name_of_the_output_is_kept(clean):
    shutil.copy("input.json", "out.json")
    clean.train().must_say("moved to earlier-1", code=GOOD)
    assert Path("earlier-1/out.json").read_bytes() == Path("input.json").read_bytes()


def test_a_restart_sets_nothing_aside(desk):
    desk.train("--restart", "model.ckpt.pt").must_say(code=GOOD)
    assert not list(Path().glob("earlier*"))


def test_a_checkpoint_in_the_place_of_a_link_is_kept(desk):
    """A folder that was copied without its links."""
    Path("model.ckpt.pt").unlink()
    shutil.copy("model.ckpt-4.pt", "model.ckpt.pt")
    desk.train("--restart", "model.ckpt.pt").must_say("moved to earlier-1", code=GOOD)
    assert checkpoint.load("earlier-1/model.ckpt.pt")["step"] == LAST


BAD_PATHS = {
    "a name that is too long": ({"training__training_data__systems": ["x" * 300]}, "File name too long"),
    "a path that is too long": ({"training__disp_file": "x/" * 3000 + "lcurve.out"}, "File name too long"),
    "a NUL in a system": (
        {"training__training_data__systems": ["a\0b"]},
        '["a\\u0000b"]: expected a text without',
    ),
    "a NUL in a name": ({"training__save_ckpt": "a\0b"}, 'training.save_ckpt = "a\\u0000b": expected a text without'),
    "a link to itself": ({"training__training_data__systems": ["self"]}, "self"),
    "a link to itself below": (
        {"training__training_data__systems": ["with_self"]},
        "with_self/self: Too many levels of symbolic links",
    ),
    "a stat_file that is a link to itself": ({"training__stat_file": "self/x"}, "self"),
    "1,200 folders in each other": ({"training__training_data__systems": ["deep"]}, "deep: no system in it"),
    "1,200 folders and a pattern": (
        {"training__training_data__systems": ["deep"], "training__training_data__rglob_patterns": ["*"]},
        "deep",
    ),
}


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


def test_a_log_that_cannot_be_written_any_more_is_reported_once(clean):
    Path("train.log").symlink_to("/dev/full")
    reported = clean.train("-l", "train.log")
    reported.must_say("cannot be written any more (No space left on device): the run continues without it", code=GOOD)
    assert reported.text.count("/train.log") == 1
    assert len(reported.text.splitlines()) < 100


def test_a_full_disk_at_the_rows_is_reported_and_not_hidden_by_the_end(desk, monkeypatch):
    Path("lcurve.out").unlink()
    Path("lcurve.out").symlink_to("/dev/full")

    def also_full(*_):
        raise OSError(errno.ENOSPC, "")

    monkeypatch.setattr("deepmd_ema.training.reporter.Reporter.close", also_full)
    reported = desk.train("-v", "ERROR")
    reported.must_say("lcurve.out: cannot be written (No space left on device). Make room", "last checkpoint is usable")


# ---- after training


def drop_average():
    payload = checkpoint.load("model.ckpt-4.pt")
    del payload["averages"]
    checkpoint.save("model.ckpt-4.pt", payload)


BAD_USES = {
    "freeze without an average": (
        drop_average,
        ["freeze", "--use-ema"],
        [
            "model.ckpt-4.pt: no averaged weights in this checkpoint: training.enable_ema was false and",
            "leave out --use",
        ],
    ),
    "freeze an average of another name": (
        lambda: None,
        ["freeze", "--profile", "slow"],
        ["model.ckpt-4.pt: no average is called 'slow'. Give --average one of: ema."],
    ),
    "freeze to nowhere": (lambda: None, ["freeze", "-o", "/proc/m.dp"], ["/proc/m.dp: cannot be written (No such"]),
    "freeze to a missing folder": (lambda: None, ["freeze", "-o", "out/m.dp"], ["the folder out is not there. Make"]),
    "test without data": (
        lambda: None,
        ["test", "-m", "model.ckpt.pt", "-s", "dta"],
        ["dta: no such file or folder. Did you mean data?"],
    ),
    "test on other elements": (
        lambda: Path("data/type_map.raw").write_text("O\nSi\n"),
        ["test", "-m", "model.ckpt.pt", "-s", "data"],
        ['data/type_map.raw: element "Si" is not in model.type_map. Known: O, H.'],
    ),
    "show a truncated file": (
        lambda: cut("model.ckpt-4.pt"),
        ["show", "model.ckpt-4.pt"],
        ["model.ckpt-4.pt: damaged, cut off after"],
    ),
}


@pytest.mark.parametrize("kind", BAD_USES)
def test_a_model_that_cannot_be_used_as_requested_is_reported(desk, kind):
    break_it, words, phrases = BAD_USES[kind]
    break_it()
    desk.run(*words).must_say(*phrases)


def test_a_label_that_is_no_number_is_reported_by_test_too(desk):
    def put_nan(array):
        array[2, 4] = float("nan")
        return array

    desk.change_array("force", put_nan)
    desk.run("test", "-m", "model.ckpt.pt", "-s", "data").must_say("data/set.000/force.npy: frame 2 (of 4, from 0)")


def test_atoms_in_one_place_are_reported_by_test_with_the_frame(desk):
    def move(coords):
        coords[1, 3:6] = coords[1, 0:3]
        return coords

    desk.change_array("coord", move)
    reported = desk.run("test", "-m", "model.ckpt.pt", "-s", "data")
    reported.must_say("data/set.000/coord.npy: frame 1 (of 4, from 0): atoms 0 (O) and 1 (H) are 0.000 angstrom apart")
    assert len(reported.text.splitlines()) == 1


def test_a_model_that_holds_nan_is_reported_by_test(desk):
    payload = checkpoint.load("model.ckpt-4.pt")
    payload["model"]["fitting.bias_atom_e"] *= float("nan")
    checkpoint.save("model.ckpt-4.pt", payload)
    desk.run("test", "-m", "model.ckpt.pt", "-s", "data").must_say(
        "data/set.000: frame 0 (from 0) and 7 more: model.ckpt.pt gives no finite energies", "Does it hold nan"
    )


def test_the_input_that_was_normalized_is_a_good_input(desk):
    shutil.copy("out.json", "again.json")
    assert json.loads(Path("again.json").read_text())["training"]["numb_steps"] == LAST
    reported = desk.run("train", "again.json", "--restart", "model.ckpt.pt", "--device", "cpu")
    assert reported.code != USER, reported.text
