"""A fault on one rank ends all of them soon, with one message, and leaves a run that continues;
what ranks may hold.
"""

import ctypes
import gc
import json
import os
import re
import signal
import socket
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import tiny_input, validated
from parallel_runs import free_port, launcher_environment, run_ranks, train, train_here
from rank_faults import (
    AT_STEP,
    HELD_UP_S,
    LAST,
    SAVE_EVERY,
    last_words,
    make_run,
    start_rank,
    wait_for,
)
from training_runs import load

from deepmd_ema.cli import main
from deepmd_ema.distributed import rendezvous, world
from deepmd_ema.distributed.launch import find_launch
from deepmd_ema.errors import RankLostError, Terminated, UserError
from deepmd_ema.locks import locked
from deepmd_ema.training.outputs import LOCK
from deepmd_ema.training.trainer import Callback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
    pytest.mark.timeout(480),
]

# from the start, on a machine that is busy with other things; a fault that is not noticed takes
# minutes
LIMIT_S = 100


def start(folder, faults, environ=None):
    """Start one rank per fault; return their numbers."""
    port = free_port()
    return [
        start_rank(
            folder, launcher_environment(k, len(faults), port) | (environ or {}), fault
        )
        for k, fault in enumerate(faults)
    ]


def run(folder, *faults, environ=None):
    """Run one rank per fault to their ends; return exit codes and last words."""
    codes = wait_for(start(folder, faults, environ), LIMIT_S)
    assert None not in codes, f"hangs: {(folder / 'reported.txt').read_text()}"
    return codes, last_words(folder)


def assert_continues(folder, step):
    """The newest checkpoint is that of ``step``, nothing is half-written, and two ranks continue to
    the end.
    """
    assert not list(folder.glob("*.part*"))
    assert load(folder / "model.ckpt.pt")["step"] == step
    (folder / "reported.txt").unlink()
    port, words = (
        free_port(),
        ("train", "input.json", "--device", "cpu", "--restart", "model.ckpt.pt"),
    )
    pids = [
        start_rank(folder, launcher_environment(k, 2, port), "", words)
        for k in range(2)
    ]
    assert wait_for(pids, LIMIT_S) == [0, 0], (folder / "reported.txt").read_text()
    assert last_words(folder) == []
    assert load(folder / "model.ckpt.pt")["step"] == LAST


SAVED = AT_STEP // SAVE_EVERY * SAVE_EVERY


OTHER_DATA = (
    rf"dp-ema \(rank 1\): rank 1 on {re.escape(socket.gethostname())} has other "
    r"data than rank 0: "
)
STOPPED = r"stopped by (SIGTERM|SIGINT) after step {} of 20; everything is saved. Continue with"
USABLE = rf"cannot be written .*model.ckpt-{SAVED}.pt is whole and still usable"
# faults of the ranks, changes of the input -> exit codes, the only message, the step from which the
# run continues
FAULTS = {
    "a rank is killed": (
        ["", "die"],
        {},
        [1, -9],
        r"rank 1 \(process .*ended without a message",
        SAVED,
    ),
    "rank 0 is killed": (
        ["die", "", ""],
        {},
        [-9, 1, 1],
        r"dp-ema \(rank 1\): rank 0 has ended; if it left no message, it was killed\.$",
        None,
    ),
    "the launcher ends the others": (
        ["be_terminated_at_start", "die_early"],
        {},
        [143, -9],
        r"dp-ema \(rank 0\): stopped by SIGTERM outside .*; nothing was saved. rank 1 \(.*did not "
        r"answer",
        None,
    ),
    "another force": (
        ["", "have_another_force"],
        {},
        [1, 2],
        rf"{OTHER_DATA}data: set.000/force.npy: other",
        None,
    ),
    "another input": (
        ["", "have_another_input"],
        {},
        [1, 2],
        r"rank 1 on .* has another input than rank 0: training.numb_steps = 21 here, 20 on rank "
        r"0. All ranks",
        None,
    ),
    "a full disk": (
        ["fill_disk speak_late", ""],
        {"training__zero_stage": 2},
        [2, 1],
        USABLE,
        SAVED,
    ),
    "a loss that is not finite": (
        ["", "lose_weights speak_late"],
        {},
        [1, 2],
        r"dp-ema \(rank 1\): step 13: the loss or a gradient is not finite",
        SAVED,
    ),
    "a signal while the ranks connect": (
        ["be_terminated_soon", "never_connect be_terminated_soon"],
        {},
        [143] * 2,
        r"stopped by SIGTERM outside the training steps; nothing was saved",
        None,
    ),
    "no input": (
        ["", "lose_input speak_late"],
        {},
        [1, 2],
        r"dp-ema \(rank 1\): input.json",
        None,
    ),
    "a signal": (
        ["", "ask_to_stop"],
        {"training__zero_stage": 2},
        [143] * 2,
        STOPPED.format(AT_STEP),
        AT_STEP,
    ),
    "a signal in a validation": (
        ["", "ask_in_validation"],
        {"training__zero_stage": 3},
        [143] * 2,
        STOPPED.format(AT_STEP + 2),
        AT_STEP + 2,
    ),
    "two signals": (["", "ask_often"], {}, [130] * 2, STOPPED.format(AT_STEP), AT_STEP),
    "a mistake of all": (
        ["", ""],
        {"training__zero_stagee": 1},
        [2, 2],
        r"training.zero_stagee",
        None,
    ),
    "no data": (
        ["", ""],
        {"training__training_data__systems": ["nowhere"]},
        [2, 2],
        "nowhere",
        None,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_on_one_rank_ends_all_with_one_message_and_leaves_a_run_that_continues(
    tmp_path, monkeypatch, name
):
    """However late the rank speaks that knows why; what no rank can say is not waited for."""
    faults, changes, codes, message, step = FAULTS[name]
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.3 if -9 in codes else HELD_UP_S / 3)
    folder = make_run(tmp_path / "run", **changes)
    found, said = run(folder, *faults)
    assert found == codes
    (line,) = said
    assert re.search(message, line), line
    if step is None:
        assert codes[0] == -9 or not list(folder.glob("*.pt"))
    else:
        assert_continues(folder, step)


@pytest.mark.parametrize(
    ("option", "fault", "difference"),
    [
        (
            "--restart",
            "have_other_moments",
            r"step 10, sha256 \w{16} here, step 10, sha256 \w{16} on rank 0",
        ),
        (
            "--restart",
            "have_another_step",
            "step 20, sha256 .* here, step 10, sha256 .* on rank 0",
        ),
        ("--init-model", "have_another_step", "sha256 .* here, sha256 .* on rank 0"),
        ("--finetune", "have_another_step", "sha256 .* here, sha256 .* on rank 0"),
    ],
)
def test_ranks_that_start_from_other_files_say_so_before_the_first_step(
    tmp_path, monkeypatch, option, fault, difference
):
    folder = make_run(
        tmp_path / "run", validating__full_validation=False, training__zero_stage=1
    )
    monkeypatch.chdir(folder)
    assert main(["train", "input.json", "--device", "cpu"]) == 0
    Path(f"model.ckpt-{SAVE_EVERY}.pt").rename("start.pt")
    port, words = (
        free_port(),
        ("train", "input.json", "--device", "cpu", option, "start.pt"),
    )
    pids = [
        start_rank(folder, launcher_environment(k, 2, port), of, words)
        for k, of in enumerate(("", fault))
    ]
    assert wait_for(pids, LIMIT_S) == [1, 2]
    (line,) = last_words(folder)
    assert re.search(
        rf"rank 1 on .* starts from another start.pt than rank 0: {difference}. All ranks must "
        r"read",
        line,
    )


@pytest.mark.parametrize("faults", [("", "fail"), ("fail", "")])
def test_torchrun_is_reported_what_the_rank_reports_that_knows_why(tmp_path, faults):
    """Also if that is rank 0, which hosts the store, while the other one waits in a collective."""
    folder, file = make_run(tmp_path / "run"), tmp_path / "error.json"
    codes, said = run(folder, *faults, environ={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert codes == [1, 1]
    found = json.loads(file.read_text())
    assert [line.strip() for line in found["message"].splitlines()] == said
    assert abs(found["timestamp"] - time.time()) < LIMIT_S


def test_a_rank_that_is_stopped_is_named_when_the_time_of_a_collective_is_over(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(world, "STEP_TIMEOUT", timedelta(seconds=8))
    monkeypatch.setattr(rendezvous, "GRACE_S", 0.3)
    folder = make_run(tmp_path / "run")
    first, stopped = start(folder, ["", "be_stopped"])
    assert wait_for([first], LIMIT_S) == [1]
    os.kill(stopped, signal.SIGKILL)
    assert wait_for([stopped], LIMIT_S) == [-signal.SIGKILL]
    (line,) = last_words(folder)
    assert re.search(
        rf"rank 1 \(process {stopped} on .*\) ended without a message or does not", line
    )
    assert_continues(folder, SAVED)


def test_two_runs_of_several_ranks_in_one_folder_are_reported_once(tmp_path):
    folder = make_run(tmp_path / "run")
    with locked([folder / LOCK]):
        codes, said = run(folder, "", "")
    assert codes == [2, 1]
    (line,) = said
    assert (
        f"another run writes here (process {os.getpid()} on {socket.gethostname()}"
        in line
    )


def test_one_rank_that_is_out_of_time_ends_all_after_the_same_step_without_an_error(
    tmp_path,
):
    folder = make_run(tmp_path / "run", 1)
    codes, said = run(folder, "", "run_out_of_time")
    assert (codes, said) == ([0, 0], [])
    log = (folder / "reported.txt").read_text()
    assert "dp-ema train --restart model.ckpt.pt, launched as before" in log
    assert_continues(folder, AT_STEP)


def test_ranks_that_are_held_up_are_waited_for(tmp_path):
    assert run(make_run(tmp_path / "run"), "leave_late", "come_late meet_late") == (
        [0, 0],
        [],
    )


@pytest.mark.parametrize("fault", ["", "fail"])
def test_ranks_that_an_agent_has_started_train_twice(tmp_path, fault):
    """Its store has the keys of their first run."""
    store = torch.distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    environ = {"MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    folder = make_run(tmp_path / "run")
    codes, said = run(folder, "train_before", f"train_before {fault}", environ=environ)
    assert codes == ([1, 1] if fault else [0, 0])
    assert sum(line.startswith("dp-ema") for line in said) == bool(fault)


@pytest.mark.parametrize(
    ("environ", "fault", "message"),
    [
        ({"MASTER_ADDR": ""}, "", "MASTER_ADDR is not set, so the ranks cannot meet"),
        ({"WORLD_SIZE": "3"}, "be_quick", "rank 2 did not come within 2 s"),
    ],
)
def test_ranks_that_cannot_meet_say_why(tmp_path, environ, fault, message):
    codes, said = run(make_run(tmp_path / "run"), fault, fault, environ=environ)
    assert 2 in codes
    assert set(codes) <= {1, 2}
    assert all(message in line for line in said)
    assert not list((tmp_path / "run").glob("*.pt"))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"WORLD_SIZE": "2", "RANK": "5"},
            "RANK = 5: expected 0 to 1, because WORLD_SIZE = 2.",
        ),
        (
            {"WORLD_SIZE": "²", "RANK": "0"},
            "WORLD_SIZE = '²': expected a whole number.",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2, but RANK is not set"),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environ, message):
    with pytest.raises(UserError, match=message):
        find_launch(environ)


def test_a_port_in_use_is_named(tmp_path):
    folder = make_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert wait_for(
            [start_rank(folder, launcher_environment(0, 2, port))], LIMIT_S
        ) == [2]
    (line,) = last_words(folder)
    assert line.startswith(
        f"dp-ema (rank 0): rank 0 of 2: cannot meet at 127.0.0.1:{port} ("
    )
    assert "address already in use). MASTER_ADDR and MASTER_PORT must be" in line


def test_sharing_out_without_a_launcher_shares_nothing_out_and_says_so(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(make_run(tmp_path / "run", stage=2))
    assert main(["train", "input.json"]) == 0
    said = "training.zero_stage = 2: no launcher has started this process, which trains with 0"
    assert said in capsys.readouterr().err
    assert main(["check", "input.json"]) == 0
    assert said in capsys.readouterr().out
    assert json.loads(Path("out.json").read_text())["training"]["zero_stage"] == 0


def most_memory(folder):
    """Train as a rank; return by what happened how much memory (bytes) it took for a while, on top
    of what it holds.
    """
    growth = {}
    ctypes.CDLL(None).mallopt(
        -3, 65536
    )  # M_MMAP_THRESHOLD: what is freed goes back to the system at once

    class Measure(Callback):
        @contextmanager
        def during(self, trainer, phase):
            if phase in ("step", "display"):
                yield
                return
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5")
            before = resident("VmRSS")
            yield
            growth[phase, trainer.step] = resident("VmHWM") - before

    with mock.patch.object(world, "keep_freed_memory"):
        train_here(folder, {"callback": Measure()})
    return growth


def resident(what):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(
        1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:")
    )


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="no way to ask for the largest memory",
)
def test_a_rank_that_writes_nothing_never_takes_the_memory_of_a_whole_model(
    tmp_path, water_like, water_like_valid
):
    config = tiny_input(
        [water_like],
        [water_like_valid],
        num_steps=4,
        type_map=("O", "H", "C", "N"),
        training__zero_stage=3,
        model__fitting_net__neuron=[1000, 1000],
        **validated(4),
    )
    (tmp_path / "input.json").write_text(json.dumps(config))
    grown = run_ranks(2, most_memory, str(tmp_path))[1].value
    whole = sum(t.nbytes for t in load(tmp_path / "model.ckpt-4.pt")["model"].values())
    assert grown.keys() == {("validation", 4), ("checkpoint", 4)}
    for growth in grown.values():
        assert whole / 5 < growth < whole  # one of the five nets is gathered at a time


class Drift(Callback):
    """Changes the last bit of one weight of one rank after a step; step 0 is before the first
    one.
    """

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_start(self, trainer):
        if self.step == 0:
            self.after_update(trainer)

    def after_update(self, trainer):
        if trainer.step == self.step and trainer.world.rank == self.rank:
            weight = dict(trainer.saver.builder.models.named_parameters())[
                "fitting.nets.1.layers.0.weight"
            ]
            with torch.no_grad():
                weight.copy_(torch.nextafter(weight, weight + 1))


@pytest.mark.parametrize(
    ("stage", "rank", "at", "noticed"), [(0, 2, 3, 4), (0, 1, 0, 0)]
)
def test_a_rank_that_holds_another_weight_ends_the_run_unsaved(
    tmp_path, water_like, stage, rank, at, noticed
):
    config = tiny_input(
        [water_like], num_steps=6, training__zero_stage=stage, training__save_freq=2
    )
    ended = train(
        tmp_path, 3 if rank == 2 else 2, config, may_fail=True, callback=Drift(rank, at)
    )
    assert [e.error for e in ended] == ["UserError"] + ["ReportedElsewhere"] * (
        len(ended) - 1
    )
    for words in (
        f"step {noticed}: rank {rank} holds other weights than rank 0",
        "fitting.nets.1.layers.0.weight",
        "training.zero_stage 1",
    ):
        assert words in ended[0].message
    assert [file.name for file in tmp_path.glob("model.ckpt-*.pt")] == [
        "model.ckpt-2.pt"
    ] * (noticed > 0)


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (
            Terminated(),
            "stopped by SIGTERM outside the training steps; nothing was saved; rank 0 has ended; "
            "if it left no",
        ),
        (
            RankLostError("lost"),
            "rank 0 has ended; if it left no message, it was killed.",
        ),
    ],
)
def test_a_rank_that_was_stopped_says_so_where_rank_0_is_gone(
    monkeypatch, error, reported
):
    """SIGTERM to all ranks at their start was reported as the end of rank 0."""
    for name, value in launcher_environment(1, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    address = {"host_name": "127.0.0.1", "port": int(os.environ["MASTER_PORT"])}
    store = torch.distributed.TCPStore(
        **address, is_master=True, wait_for_workers=False
    )
    meeting = rendezvous.Rendezvous(find_launch())
    del store
    report = meeting.report_of(error)
    assert type(report) is type(error)
    assert str(report).startswith(reported)
