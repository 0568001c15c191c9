"""Bad inputs through the real command line: one screen that names the place and what to do, and
exit code 2.
"""

import copy
import json
import os
import pickle
import re
import shutil
import socket
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import to_hdf5
from helpers import FullDisk, tiny_input, validated, write_system

from deepmd_ema import checkpoint, cli
from deepmd_ema.locks import locked
from deepmd_ema.training.outputs import LOCK

LAST = 4
USER, GOOD = 2, 0  # exit codes
ONE_SCREEN = 24  # lines
_TIME = re.compile(r"^\[[-0-9: ]+\] ", re.MULTILINE)


@dataclass(frozen=True)
class Reported:
    """Exit code of a command and what it wrote to stderr, without the times of log lines."""

    code: int
    text: str

    @property
    def problem(self) -> str:
        """The message itself, without log lines before it."""
        return self.text[f"\n{self.text}".index("\ndp-ema") :]

    def must_say(self, *phrases: str, code: int = USER) -> None:
        """Check the exit code, what it says, that it is no traceback, and that a run that failed
        fits one screen.
        """
        assert self.code == code, self.text
        assert "Traceback" not in self.text
        assert "This should not happen" not in self.text
        assert code == GOOD or len(self.text.splitlines()) <= ONE_SCREEN, self.text
        for phrase in phrases:
            assert phrase in self.text, self.text
        if code == USER:
            assert self.problem.startswith("dp-ema: "), self.text


class Desk:
    """The working folder of a user with ``input.json``, ``data`` and ``valid``.

    Args:
        folder: made when it is not there.
        systems: training and validation data to copy.
        capsys: pytest's, or None when only files are made.
    """

    def __init__(self, folder: Path, systems: tuple[Path, Path], capsys=None) -> None:
        self.folder, self._capsys = folder, capsys
        folder.mkdir(exist_ok=True)
        for system, name in zip(systems, ("data", "valid")):
            shutil.copytree(system, folder / name)
        self.write()

    def config(self, **changes):
        """Return a good input with changes ``section__key=value``."""
        changes = {"training__enable_ema": True, "training__ema_decay": 0.5, **changes}
        return tiny_input(["data"], ["valid"], **{"num_steps": 2, **changes})

    def write(self, config=None, **changes):
        """Write ``input.json``."""
        text = json.dumps(
            self.config(**changes) if config is None else config, indent=4
        )
        (self.folder / "input.json").write_text(text)

    def run(self, *words: str) -> Reported:
        """Run ``dp-ema`` with ``words`` and return what it reported."""
        self._capsys.readouterr()
        code = cli.main(list(words))
        return Reported(code, _TIME.sub("", self._capsys.readouterr().err))

    def train(self, *words: str) -> Reported:
        """Run ``dp-ema train input.json`` with further ``words``."""
        return self.run("train", "input.json", "--device", "cpu", *words)


@pytest.fixture(scope="module")
def systems(tmp_path_factory):
    """Training and validation data."""
    home = tmp_path_factory.mktemp("systems")
    return write_system(home / "data", frames=8, seed=1, sets=2), write_system(
        home / "valid", frames=3, seed=2
    )


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
    """A desk without a run, of a process that no launcher has started."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return Desk(tmp_path, systems, capsys)


@pytest.fixture
def desk(clean, trained):
    """A desk with the files of that run; its input continues to step 8."""
    shutil.copytree(trained, clean.folder, symlinks=True, dirs_exist_ok=True)
    clean.write(num_steps=8, training__save_freq=2)
    return clean


def test_a_hundred_mistakes_come_on_one_screen_with_numbers_and_lines(clean):
    config = clean.config(training__ema_decay=1.5)
    config["modle"] = config["model"]["descriptor"]["rcut_smooth"] = 1
    config["training"] |= {f"option_{n}": n for n in range(97)}
    clean.write(config)
    reported = clean.train()
    assert reported.code == USER
    assert reported.text.startswith(
        "dp-ema: 100 problems in input.json\n  1. input.json:"
    )
    *lines, last = reported.text.splitlines()
    assert last.endswith("more; `dp-ema check` shows all")
    places = [int(line.split(":")[1]) for line in lines[1:]]
    assert (places == sorted(places), len(lines) < 30) == (True, True)
    assert "100. input.json" in clean.run("check", "input.json").text


# ---- the data


def put_nan_into_forces(_):
    force = np.load("data/set.000/force.npy")
    force[2, 4] = np.nan
    np.save("data/set.000/force.npy", force)


BAD_DATA = {
    "no such folder": (
        lambda clean: shutil.move("data", "water"),
        [
            "training.training_data.systems[0]: data: no such file or folder.",
            "holds: input.json, valid, water",
        ],
    ),
    "unknown element": (
        lambda clean: Path("data/type_map.raw").write_text("O\nSi\n"),
        [
            'data/type_map.raw: element "Si" is not in model.type_map. Known: O, H. Add it to '
            "model.type_map"
        ],
    ),
    "nan": (
        put_nan_into_forces,
        [
            "data/set.000/force.npy: frame 2 (of 4, from 0): nan at atom 1.",
            "remove the frame or compute it again",
        ],
    ),
}


@pytest.mark.parametrize("kind", BAD_DATA)
def test_wrong_data_are_reported_with_file_and_frame_before_anything_is_trained(
    clean, kind
):
    break_it, phrases = BAD_DATA[kind]
    break_it(clean)
    reported = clean.train()
    reported.must_say(*phrases)
    assert len(reported.text.splitlines()) == 1
    assert not Path("out.json").exists()
    assert not Path("lcurve.out").exists()
    assert clean.run("check", "input.json").problem == reported.problem


# ---- data that can be trained on, with a word of warning


def test_doubtful_data_are_trained_on_with_a_warning(clean):
    for file in Path("data").glob("set.*/virial.npy"):
        file.unlink()
    warning = (
        "WARNING: no virial in the training data, but the loss has a prefactor for it"
    )
    clean.train().must_say(warning, "set the prefactor to 0", code=GOOD)
    assert Path("model.ckpt-2.pt").exists()


# ---- the command line


@pytest.mark.parametrize(
    ("words", "phrases"),
    [
        (
            ["train", "input.json", "--device", "gpu"],
            ["--device gpu: is not usable here (", "Use cpu, cuda or cuda:0."],
        ),
        (
            ["freeze", "-o", "/proc/m.dp"],
            ["no file 'checkpoint' here that names the newest checkpoint"],
        ),
        (["test", "-m", "m.dp"], ["m.dp: no such file."]),
        (["show", "input.json"], ["input.json: not a checkpoint"]),
        (
            ["plot", "input.json"],
            [
                "input.json: has no header line",
                "Give lcurve.out, val.log or val_ema.log.",
            ],
        ),
    ],
)
def test_a_wrong_command_is_reported_with_what_to_write_instead(clean, words, phrases):
    clean.run(*words).must_say(*phrases)


@pytest.mark.parametrize(
    ("env", "phrase"),
    [
        ({"LOCAL_RANK": "²"}, "LOCAL_RANK = '²': expected a whole number, "),
        (
            {"LOCAL_RANK": "9" * 5000},
            "9'... (5,000 characters): expected a whole number, ",
        ),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK = 2"),
        (
            {"WORLD_SIZE": "1", "RANK": "0", "MASTER_PORT": "99999"},
            "'99999': expected a whole number, 1 to 65535",
        ),
    ],
)
def test_ranks_and_ports_that_are_no_numbers_are_reported(
    clean, monkeypatch, env, phrase
):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    clean.run("check", "input.json", "--config-only").must_say(phrase)


def test_numbers_of_frames_and_names_of_outputs_are_checked(clean):
    for words in ("test -m m.pt -n -5", "change-bias m.pt -n ²", "test -m m.pt -n 1.5"):
        clean.run(*words.split()).must_say("expected a number of frames, 0 for all")
    for words in (
        "freeze -o",
        "plot val.log -o",
        "train input.json -o",
        "test --plot",
        "train input.json -l",
    ):
        clean.run(*words.split(), "").must_say("'': expected the name of a file")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["type.raw", "set.000/coord.npy"])
def test_a_pipe_among_the_data_is_reported_and_not_waited_for(clean, name):
    file = Path("data", name)
    file.unlink()
    os.mkfifo(file)
    clean.run("check", "input.json").must_say(
        f"data/{name}: is a pipe or a device, expected a file."
    )


def test_advice_names_the_input_as_it_is_called(clean):
    clean.write(training__zero_stage=1)
    Path("input.json").rename("water.json")
    advice = (
        "export PET_NO_PYTHON=1; torchrun --nproc_per_node=2 dp-ema train water.json"
    )
    clean.run("train", "water.json", "--device", "cpu").must_say(advice, code=GOOD)


def test_the_end_of_a_run_names_its_files_and_the_next_command(clean):
    clean.write(
        validating__full_validation=True,
        validating__ema_full_validation=True,
        validating__validation_freq=2,
        validating__full_val_start=0.0,
    )
    reported = clean.train()
    reported.must_say(
        "trained model: model.ckpt.pt\n",
        "averaged  model_ema.ckpt.pt (ema)",
        "best      best.ckpt-2.t-1.pt (live, E:MAE = ",
        "errors    ema, step 2, MAE / RMSE: E ",
        "for 2 steps, validation included",
        "next      dp-ema test -m model_ema.ckpt.pt --valid-data input.json --plot",
        "dp-ema freeze -c model_ema.ckpt.pt",
        code=GOOD,
    )
    for line in re.findall(r"dp-ema ((?:test|freeze) .*)", reported.text):
        assert clean.run(*line.split()).code == GOOD


@pytest.mark.parametrize("average", ["", "_ema"])
def test_the_next_commands_take_the_best_file_where_errors_have_risen(clean, average):
    """The last average was worse than the best by a third, and freeze was advised for it."""
    clean.write(
        learning_rate__start_lr=0.5,  # errors rise
        learning_rate__stop_lr=0.1,
        training__enable_ema=bool(average),
        validating__full_validation=True,
        validating__ema_full_validation=bool(average),
        validating__validation_freq=1,
        validating__validation_metric="F:RMSE",
        validating__full_val_start=0.0,
    )
    reported = clean.train()
    best = f"best{average}.ckpt-1.t-1.pt"
    reported.must_say(
        f" {best} (",
        f" dp-ema test -m {best} --valid-data input.json --plot",
        f" dp-ema freeze -c {best}\n",
        code=GOOD,
    )
    for line in re.findall(r"dp-ema ((?:test|freeze) .*)", reported.text):
        assert clean.run(*line.split()).code == GOOD


# ---- where a run starts from


def flip(name):
    with zipfile.ZipFile(name) as archive:
        largest = max(archive.infolist(), key=lambda part: part.file_size)
        numbers = archive.read(largest)
    content = bytearray(Path(name).read_bytes())
    content[content.index(numbers) + len(numbers) // 2] ^= 1
    Path(name).write_bytes(content)


BAD_STARTS = {
    "one bit of it changed": (
        lambda desk: flip("model.ckpt-4.pt"),
        ["--restart", "model.ckpt.pt"],
        ["model.ckpt.pt: damaged, ", "model.ckpt-2.pt: continue from that one."],
    ),
    "of another model": (
        lambda desk: desk.write(
            num_steps=8, training__save_freq=2, model__descriptor__neuron=[4, 6]
        ),
        ["--restart", "model.ckpt.pt"],
        [
            "model.descriptor.neuron: [4, 8] in the checkpoint, [4, 6] in the input.",
            "Put this back, or say --allow-",
        ],
    ),
    "weights of other elements": (
        lambda desk: desk.write(type_map=["O", "H", "Si"]),
        ["--init-model", "model.ckpt.pt"],
        [
            "a model of type_map ['O', 'H'], but model.type_map is ['O', 'H', 'Si']. Use the "
            "type_map of"
        ],
    ),
    "of another optimizer": (
        lambda desk: desk.write(num_steps=8, optimizer__type="AdamW"),
        ["--restart", "model.ckpt.pt", "--allow-config-change"],
        [
            'optimizer.type = "AdamW": the checkpoint holds the moments of Adam. Set it to "Adam"'
        ],
    ),
    "of another seed and other data": (
        lambda desk: desk.write(
            num_steps=8, training__seed=3, training__training_data__batch_size=1
        ),
        ["--restart", "model.ckpt.pt"],
        [
            "2 problems in input.json",
            "1. training.seed: 10 in the",
            "2. training.training_data.batch_size: 2 in the",
        ],
    ),
}


BAD_STARTS |= {
    f"a file that the run would set aside, {how} {name}": (
        lambda desk: Path("mine.pt").symlink_to("model.ckpt-2.pt"),
        [how, name],
        [
            f"{name}: the file to start from belongs to an earlier run",
            f"or from a copy: `cp {real} start.pt`",
        ],
    )
    for how, name, real in (
        ("--init-model", "model_ema.ckpt", "model_ema.ckpt-4.pt"),
        ("--init-model", ".", "model.ckpt-4.pt"),
        ("--finetune", "mine.pt", "model.ckpt-2.pt"),
    )
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BAD_STARTS)
def test_a_file_that_a_run_cannot_start_from_is_reported_and_nothing_is_touched(
    desk, kind
):
    break_it, words, phrases = BAD_STARTS[kind]
    break_it(desk)
    before = {
        p.name: p.lstat().st_mtime_ns for p in desk.folder.iterdir() if p.is_file()
    }
    desk.train(*words).must_say(*phrases)
    assert {
        p.name: p.lstat().st_mtime_ns for p in desk.folder.iterdir() if p.is_file()
    } == before


def test_a_restart_of_a_finished_run_says_that_nothing_is_left(desk):
    desk.write(num_steps=LAST, training__save_freq=2)
    desk.train("--restart", "model.ckpt.pt").must_say(
        "WARNING: step 4 is the last of 4 already: nothing is left to train. Raise "
        "training.numb_steps",
        code=GOOD,
    )
    desk.run("show", "model.ckpt.pt", "--json").must_say(
        "prints the status of a run. Give its folder, or leave --json"
    )


def test_statistics_are_not_added_to_data(clean):
    with pytest.importorskip("h5py").File("data.h5", "w") as file:
        file["water/type.raw"] = [0, 1]
    clean.write(training__stat_file="data.h5")
    clean.train("-v", "ERROR").must_say(
        "data.h5: holds data, to which no statistics are added"
    )


def test_a_restart_on_data_that_have_grown_says_so(desk):
    shutil.copytree("data/set.000", "data/set.002")
    desk.train("--restart", "model.ckpt.pt").must_say(
        "WARNING: the training data have 12 frames now and had 8 when the checkpoint was written",
        code=GOOD,
    )


# ---- where a run writes to


@pytest.mark.parametrize("files_that_fit", [0, 1])
def test_a_full_disk_is_reported_and_the_old_checkpoint_stays_usable(
    desk, monkeypatch, files_that_fit
):
    kept, save, written = Path("model.ckpt-4.pt").read_bytes(), torch.save, []

    def save_while_there_is_space(content, file):
        written.append(file.name)
        save(content, file if len(written) <= files_that_fit else FullDisk(file, 3000))

    monkeypatch.setattr(torch, "save", save_while_there_is_space)
    name = ("model.ckpt-6.pt", "model_ema.ckpt-6.pt")[files_that_fit]
    reported = desk.train("--restart", "model.ckpt.pt", "-v", "WARNING")
    reported.must_say(
        f"dp-ema: {name}: cannot be written (No space left on device). Make room on the disk.",
        "model.ckpt-4.pt is whole and still usable.",
    )
    monkeypatch.setattr(torch, "save", save)
    assert Path("model.ckpt-4.pt").read_bytes() == kept
    assert not list(Path().glob("*.part*"))
    assert {
        checkpoint.load(p)["step"] for p in ("model.ckpt.pt", "model_ema.ckpt.pt", ".")
    } == {4}
    desk.train("--restart", "model.ckpt.pt").must_say(code=GOOD)


BAD_PLACES = {
    "a file in the way": (
        lambda: Path("out").write_text(""),
        {"training__save_ckpt": "out/model.ckpt"},
        [
            "training.save_ckpt: ",
            "/out: cannot be written (File exists)",
            "There is a file where a folder is expected",
        ],
    ),
    "a folder in place of the learning curve": (
        lambda: Path("lcurve.out").mkdir(),
        {},
        [
            "training.disp_file: lcurve.out is a folder, and the run writes a file of that name. "
            "Move it away"
        ],
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
    "a file in place of the statistics": (
        lambda: Path("stat").write_text(""),
        {"training__stat_file": "stat"},
        [
            "training.stat_file: stat: cannot be written (",
            "Remove the file that is there, name another place",
        ],
    ),
}


@pytest.mark.parametrize("kind", BAD_PLACES)
def test_a_place_that_cannot_be_written_is_reported_before_anything_is_trained(
    clean, kind
):
    break_it, changes, phrases = BAD_PLACES[kind]
    break_it()
    clean.write(**changes)
    reported = clean.train()
    reported.must_say(*phrases)
    assert "trained parameters" not in reported.text


def everything(folder="."):
    return {
        str(p): p.read_bytes()
        for p in Path(folder).rglob("*")
        if p.is_file() and not p.is_symlink()
    }


NOT_OVERWRITTEN = {
    "a link to the input": ["train", "input.json", "-o", "link.json"],
    "data by a picture": ["plot", "lcurve.out", "-o", "data/type.raw"],
    "an input by a frozen model": ["freeze", "-o", "other.yaml"],
    "text by a bias": [
        "change-bias",
        "model.ckpt.pt",
        "-b",
        "-1",
        "-2",
        "-o",
        "text.pt",
    ],
}


@pytest.mark.parametrize("kind", NOT_OVERWRITTEN)
def test_no_command_writes_over_a_checkpoint_an_input_or_data(desk, kind):
    Path("link.json").symlink_to("input.json")
    Path("other.yaml").write_text("model:\n  type_map: [O, H]\n")
    Path("text.pt").write_text("my notes")
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
            "another run writes here",
            f"process {os.getpid()} on {socket.gethostname()}",
            "another folder",
        )
    assert everything() == before


def test_a_forgotten_restart_loses_nothing_and_is_reported_before_the_first_step(desk):
    before = everything()
    reported = desk.train()
    reported.must_say(
        "there were files of an earlier run, up to step 4: moved to earlier-1.",
        "use --restart",
        code=GOOD,
    )
    assert reported.text.index("moved to earlier-1") < reported.text.index("1  train")
    ran = [
        name
        for name in before
        if name.endswith((".pt", ".out", ".log", "out.json")) or name == "checkpoint"
    ]
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
    "a path that is too long": (
        {"training__disp_file": "x/" * 3000 + "lcurve.out"},
        "File name too long",
    ),
    "a link to itself": ({"training__training_data__systems": ["self"]}, "self"),
    "a link to itself below": (
        {"training__training_data__systems": ["with_self"]},
        "with_self/self: Too many levels of symbolic links",
    ),
}


@pytest.mark.parametrize("kind", BAD_PATHS)
def test_a_path_that_the_system_refuses_is_one_message(clean, kind):
    changes, phrase = BAD_PATHS[kind]
    Path("self").symlink_to("self")
    Path("with_self").mkdir()
    Path("with_self/self").symlink_to("self")
    clean.write(**changes)
    clean.train().must_say(phrase)


# ---- after training


def without_numbers():
    payload = checkpoint.load("model.ckpt-4.pt")
    payload["model"]["fitting.bias_atom_e"] *= float("nan")
    checkpoint.save("model.ckpt-4.pt", payload)


BAD_USES = {
    "test weights that are nan": (
        without_numbers,
        ["test", "-m", "model.ckpt.pt", "-s", "data"],
        [
            "data/set.000: frame 0 (from 0) and 7 more: model.ckpt.pt gives no finite energies",
            "Does it hold nan",
        ],
    ),
    "test without data": (
        lambda: None,
        ["test", "-m", "model.ckpt.pt", "-s", "dta"],
        ["dta: no such file or folder. Did you mean data?"],
    ),
    "show a truncated file": (
        lambda: os.truncate("model.ckpt-4.pt", 9000),
        ["show", "model.ckpt-4.pt"],
        ["model.ckpt-4.pt: damaged, cut off after"],
    ),
}


@pytest.mark.parametrize("kind", BAD_USES)
def test_a_model_that_cannot_be_used_as_requested_is_reported(desk, kind):
    break_it, words, phrases = BAD_USES[kind]
    break_it()
    desk.run(*words).must_say(*phrases)


# ---- generated damage: whatever a file holds, a command ends with a result or one message

READERS = {
    "model.ckpt-4.pt": [
        "train input.json --device cpu --restart model.ckpt-4.pt",
        "show model.ckpt-4.pt",
        "test -m model.ckpt-4.pt -s valid",
        "freeze -c model.ckpt-4.pt",
    ],
    "frozen.dp": ["show frozen.dp", "test -m frozen.dp -s valid"],
    "frozen.yaml": ["test -m frozen.yaml -s valid", "change-bias frozen.yaml -b 1 2"],
    "data/set.000/force.npy": ["check input.json"],
    "data/type.raw": ["check input.json", "test -m model.ckpt-4.pt -s data"],
    "input.json": ["check input.json --config-only"],
    "lcurve.out": ["plot lcurve.out", "show ."],
    "checkpoint": ["freeze", "show .", "posthoc ."],
    "data.extxyz": [
        "test -m model.ckpt-4.pt -s data.extxyz",
        "convert data.extxyz out",
    ],
    "data.h5": ["test -m model.ckpt-4.pt -s data.h5"],
}


def damaged(content):
    """Yield a file that is cut off, overwritten by zeros, changed in some bytes, or that is of
    another kind.
    """
    for part in (0, 0.01, 0.4, 0.95):
        yield content[: int(part * len(content))]
        yield content[: int(part * len(content))].ljust(len(content), b"\0")
    for seed in range(8):
        rng, spoiled = np.random.default_rng(seed), bytearray(content)
        for place in rng.integers(
            0, len(content) if seed % 2 else min(len(content), 2048), 1 + seed
        ):
            spoiled[place] = int(rng.integers(256))
        yield bytes(spoiled)
    yield from (
        b"words\n" * 9,
        b"\xff\xfe\0",
        b"[" * 50_000,
        pickle.dumps({"model": {}}),
        b"gone.pt\nmodel.ckpt-2.pt",
    )


@pytest.mark.slow
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


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("streams.", 1e300),
        ("streams..frames", ...),
        ("averages.profiles.ema.updates", "x"),
        ("averages.profiles.ema.weights", ...),
        ("optimizer.state", None),
        ("display.sums", {"rmse": 1}),
        ("interpolation.terms", -1),
        ("best.live", -1),
        ("best.live.records", None),
    ],
)
def test_what_a_restart_cannot_read_is_the_fault_of_the_file(desk, path, value):
    if path.startswith("best"):
        desk.write(num_steps=LAST, **validated(2))
        assert desk.run("train", "input.json").code == GOOD
    content = part = checkpoint.load("model.ckpt-4.pt")
    name, *above, last = path.split(".")
    for key in (name, *above):
        part = part[key]
    part.pop(last) if value is ... else part.update({last: value})
    checkpoint.save("model.ckpt-4.pt", content)
    reported = desk.run("train", "--restart", "model.ckpt-4.pt")
    assert reported.code == USER
    part_of_file = "best or early_stop" if name == "best" else name
    pattern = (
        rf"model\.ckpt-4\.pt: {part_of_file} is not as dp-ema writes it \(\w+Error: .*\)\. "
        r"Another program has"
    )
    assert re.search(pattern, reported.text), reported.text


TAMPERED = [None, "x", -1, 10**30, float("nan"), [1, "x"], {"x": 1}, torch.zeros(2, 3)]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "path",
    [
        "format",
        "kind",
        "step",
        "config",
        "model",
        "optimizer",
        "streams",
        "display",
        "averages",
        "best",
        "run",
        "config.model",
        "config.training",
        "config.model.descriptor",
        "config.model.descriptor.sel",
        "model.out_bias",
        "averages.steps",
    ],
)
def test_a_part_of_a_checkpoint_that_is_gone_or_of_another_kind_ends_no_command_with_a_traceback(
    desk, path
):
    whole = checkpoint.load("model.ckpt-4.pt")
    *above, last = path.split(".")
    for number, value in enumerate([..., *TAMPERED]):
        content = copy.deepcopy(whole)
        part = content
        for key in above:
            part = part[key]
        part.pop(last, None) if value is ... else part.update({last: value})
        checkpoint.save("model.ckpt-4.pt", content)
        for command in (
            READERS["model.ckpt-4.pt"][0],
            READERS["model.ckpt-4.pt"][1 + number % 3],
        ):
            reported = desk.run(*command.split())
            assert reported.code in (GOOD, USER), (value, reported.text)
            assert "Traceback" not in reported.text
