"""A fault on one rank ends all of them soon, with one message, and leaves a run that continues."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
import torch
from parallel_runs import free_port, launcher_environment
from rank_faults import AT_STEP, HELD_UP_S, LAST, SAVE_EVERY, last_words, make_run, start_rank, wait_for

from deepmd_ema.cli import main
from deepmd_ema.distributed import rendezvous
from deepmd_ema.distributed.files import locked
from deepmd_ema.distributed.launch import find_launch
from deepmd_ema.errors import UserError
from deepmd_ema.training.outputs import LOCK

pytestmark = [pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"), pytest.mark.timeout(240)]

LIMIT_S = 100  # from the start, on a machine that is busy with other things; a fault that is not noticed takes minutes


@pytest.fixture
def little_patience(monkeypatch):
    """A rank that is held up is waited for less long than that, unless it is known to be there."""
    monkeypatch.setattr(rendezvous, "PEER_ERROR_S", HELD_UP_S / 3)


@pytest.fixture
def no_last_words(monkeypatch):
    """Ranks do not wait for a report that no rank can give."""
    monkeypatch.setattr(rendezvous, "PEER_ERROR_S", 0.3)
    monkeypatch.setattr(rendezvous, "LINGER_S", 0.3)


def start(folder, faults, environ=None):
    """Start one rank per fault; return their numbers."""
    port = free_port()
    return [
        start_rank(folder, launcher_environment(k, len(faults), port) | (environ or {}), fault)
        for k, fault in enumerate(faults)
    ]


def run(folder, *faults, environ=None):
    """Run one rank per fault to their ends; return exit codes and last words."""
    codes = wait_for(start(folder, faults, environ), LIMIT_S)
    assert None not in codes, f"hangs: {(folder / 'reported.txt').read_text()}"
    return codes, last_words(folder)


def assert_continues(folder, step):
    """The newest checkpoint is that of ``step``, nothing is half-written, and two ranks continue to the end."""
    assert not list(folder.glob("*.part*"))
    assert torch.load(folder / "model.ckpt.pt", weights_only=True)["step"] == step
    (folder / "reported.txt").unlink()
    port = free_port()
    words = ("train", "input.json", "--device", "cpu", "--restart", "model.ckpt.pt")
    pids = [start_rank(folder, launcher_environment(k, 2, port), "", words) for k in range(2)]
    assert wait_for(pids, LIMIT_S) == [0, 0], (folder / "reported.txt").read_text()
    assert last_words(folder) == []
    assert torch.load(folder / "model.ckpt.pt", weights_only=True)["step"] == LAST


SAVED = AT_STEP // SAVE_EVERY * SAVE_EVERY
BROKEN = "dp-ema (rank 1): ValueError: something that nobody has thought of"


def test_an_exception_on_one_rank_ends_all_with_its_message(tmp_path):
    folder = make_run(tmp_path / "run")
    codes, said = run(folder, "", "fail")
    assert codes == [1, 1]
    assert said[0] == BROKEN
    assert len(said) == 2  # and what to do about it


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.usefixtures("no_last_words")
def test_a_killed_rank_is_named_by_another_one(tmp_path, stage):
    folder = make_run(tmp_path / "run", stage)
    codes, said = run(folder, "", "die")
    assert codes == [1, -signal.SIGKILL]
    (line,) = said
    assert "rank 1 (process" in line
    assert "ended without a message" in line
    assert_continues(folder, SAVED)


@pytest.mark.usefixtures("no_last_words")
def test_a_killed_rank_0_is_reported_by_one_rank(tmp_path):
    folder = make_run(tmp_path / "run")
    codes, said = run(folder, "die", "", "")
    assert codes == [-signal.SIGKILL, 1, 1]
    assert said == ["dp-ema (rank 1): rank 0 has ended; if it left no message, it was killed."]


@pytest.mark.parametrize("fault", ["die_at_start", "die_in_validation"])
@pytest.mark.usefixtures("no_last_words")
def test_a_rank_that_is_killed_elsewhere_ends_all_as_well(tmp_path, fault):
    codes, said = run(make_run(tmp_path / "run"), "", fault)
    assert codes == [1, -signal.SIGKILL]
    assert len(said) == 1


@pytest.mark.usefixtures("no_last_words")
def test_a_rank_that_a_launcher_ends_before_the_first_step_names_the_killed_one(tmp_path):
    """torchrun sends SIGTERM to the ranks that are left, which had ended without a message."""
    codes, said = run(make_run(tmp_path / "run"), "be_terminated_at_start", "die_early")
    assert codes == [128 + signal.SIGTERM, -signal.SIGKILL]
    (line,) = said
    assert line.startswith(
        "dp-ema (rank 0): stopped by SIGTERM outside the training steps; nothing was saved. rank 1 ("
    )
    assert "did not answer: if it was killed, the launcher has ended the others." in line


@pytest.mark.usefixtures("no_last_words")
def test_a_rank_that_a_launcher_ends_inside_the_rendezvous_of_torch_says_so(tmp_path):
    """Python runs no handler there: the rank waited for half an hour, or ended without a message when it was killed."""
    codes, said = run(make_run(tmp_path / "run"), "be_terminated_at_the_rendezvous", "die_at_the_rendezvous")
    assert codes == [128 + signal.SIGTERM, -signal.SIGKILL]
    (line,) = said
    assert line.startswith("dp-ema (rank 0): stopped by SIGTERM"), line


def test_all_ranks_that_are_reported_to_stop_before_the_first_step_report_it_once(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "PEER_ERROR_S", 10.0)  # a rank that a loaded machine holds up is not lost
    codes, said = run(make_run(tmp_path / "run"), "be_terminated_at_start", "be_terminated_at_start")
    assert codes == [128 + signal.SIGTERM] * 2
    (line,) = said
    assert line.endswith("stopped by SIGTERM outside the training steps; nothing was saved.")


def test_torchrun_is_reported_what_the_rank_reports_that_knows_why(tmp_path):
    folder, file = make_run(tmp_path / "run"), tmp_path / "error.json"
    codes, said = run(folder, "", "fail", environ={"TORCHELASTIC_ERROR_FILE": str(file)})
    assert codes == [1, 1]
    found = json.loads(file.read_text())
    assert [line.strip() for line in found["message"].splitlines()] == said
    assert abs(found["timestamp"] - time.time()) < LIMIT_S


def test_a_network_interface_that_does_not_exist_is_no_lost_rank(tmp_path):
    codes, said = run(make_run(tmp_path / "run"), "", "", environ={"GLOO_SOCKET_IFNAME": "nowhere"})
    assert codes == [2, 2]
    (line,) = said
    assert "the ranks cannot exchange tensors" in line
    assert "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in line


@pytest.mark.parametrize("fault", ["lose_folder_at_start", "lose_file"])
def test_data_that_one_rank_cannot_read_end_all_with_the_file(tmp_path, fault):
    codes, said = run(make_run(tmp_path / "run"), "", fault)
    assert codes == [1, 2]
    assert said[0].startswith("dp-ema (rank 1): ")
    assert "npy: cannot be read" in "".join(said)
    assert "Permission denied" in "".join(said)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("have_another_force", "data: set.000/force.npy: other content. "),
        ("lack_a_frame", "valid: frames: 29 here, 30 on rank 0. "),
    ],
)
def test_a_rank_with_other_data_ends_all_and_names_what_differs(tmp_path, fault, found):
    codes, said = run(make_run(tmp_path / "run"), "", fault)
    assert codes == [1, 2]
    (line,) = said
    assert line.startswith(f"dp-ema (rank 1): rank 1 on {socket.gethostname()} has other data than rank 0: {found}")
    assert not list((tmp_path / "run").glob("*.pt"))


def test_a_rank_may_read_a_copy_of_the_data(tmp_path):
    assert run(make_run(tmp_path / "run"), "", "have_a_copy") == ([0, 0], [])


def test_frames_that_are_not_finite_are_named_by_the_rank_that_has_them(tmp_path):
    folder = make_run(tmp_path / "run")
    codes, said = run(folder, "", "spoil_frame")
    assert codes == [1, 2]
    (line,) = said
    assert line.startswith("dp-ema (rank 1): step ")
    assert "the loss or a gradient is not finite. Frames of the batch: " in line
    assert torch.load(folder / "model.ckpt.pt", weights_only=True)["step"] == SAVED


def test_a_disk_that_is_full_leaves_the_last_checkpoint(tmp_path):
    folder = make_run(tmp_path / "run")
    codes, said = run(folder, "fill_disk", "")
    assert codes == [2, 1]
    assert "cannot be written" in said[0]
    assert f"model.ckpt-{SAVED}.pt is whole and still usable" in said[0]
    assert_continues(folder, SAVED)


@pytest.mark.parametrize(
    ("fault", "stage", "number", "step"),
    [
        ("ask_to_stop", 2, signal.SIGTERM, AT_STEP),
        ("ask_in_validation", 3, signal.SIGTERM, AT_STEP + 2),
        ("ask_often", 0, signal.SIGINT, AT_STEP),
    ],
)
def test_one_rank_that_is_requested_to_stop_stops_all_after_the_same_step(tmp_path, fault, stage, number, step):
    folder = make_run(tmp_path / "run", stage)
    codes, said = run(folder, "", fault)
    assert codes == [128 + number] * 2
    (line,) = said
    assert line.startswith(f"stopped by {number.name} after step {step} of {LAST}; everything is saved. Continue with")
    assert_continues(folder, step)


def test_one_rank_that_is_out_of_time_ends_all_after_the_same_step_without_an_error(tmp_path):
    folder = make_run(tmp_path / "run", 1)
    codes, said = run(folder, "", "run_out_of_time")
    assert (codes, said) == ([0, 0], [])
    log = (folder / "reported.txt").read_text()
    assert "dp-ema train --restart model.ckpt.pt, launched as before" in log
    assert_continues(folder, AT_STEP)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__zero_stage": 4}, "training.zero_stage = 4: expected 0, 1, 2 or 3"),
        ({"training__zero_stagee": 1}, "training.zero_stagee"),
        ({"training__training_data__systems": ["nowhere"]}, "nowhere"),
    ],
)
def test_a_mistake_that_all_ranks_see_is_reported_once(tmp_path, changes, message):
    codes, said = run(make_run(tmp_path / "run", **changes), "", "")
    assert codes == [2, 2]
    assert message in "".join(said)
    assert len(said) == 1
    assert not list((tmp_path / "run").glob("*.pt"))


@pytest.mark.parametrize(
    ("faults", "codes", "message"),
    [
        (("", "lose_input speak_late"), [1, 2], "dp-ema (rank 1): input.json"),
        (("fill_disk speak_late", ""), [2, 1], f"model.ckpt-{SAVED}.pt is whole and still usable"),
        (("", "lack_device"), [1, 2], "dp-ema (rank 1): --device cpu: is not usable here."),
        (("", "be_terminated_while_joining"), [1, 143], "dp-ema (rank 1): stopped by SIGTERM outside"),
    ],
)
@pytest.mark.usefixtures("little_patience")
def test_only_the_rank_that_knows_why_speaks_however_late(tmp_path, faults, codes, message):
    """The user read that it was killed, not why; or the others waited 30 min to connect to one that had ended."""
    found, said = run(make_run(tmp_path / "run"), *faults)
    assert found == codes
    (line,) = said
    assert message in line


@pytest.mark.usefixtures("little_patience")
def test_a_rank_that_is_ended_while_it_waits_for_another_one_ends_soon(tmp_path):
    """It requested the store for the name of a rank that had not come, and waited for that for five minutes."""
    folder = make_run(tmp_path / "run")
    pids = [start_rank(folder, launcher_environment(0, 2, free_port()), "be_terminated_while_joining")]
    assert wait_for(pids, LIMIT_S) == [128 + signal.SIGTERM]
    (line,) = last_words(folder)
    assert line.startswith("dp-ema (rank 0): stopped by SIGTERM outside the training steps; nothing was saved.")


def test_ranks_that_are_held_up_are_waited_for(tmp_path):
    assert run(make_run(tmp_path / "run"), "leave_late", "come_late meet_late") == ([0, 0], [])


def test_a_rank_that_is_stopped_is_named_while_the_others_wait_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "BEAT_INTERVAL_S", 0.5)
    folder = make_run(tmp_path / "run")
    log = folder / "reported.txt"
    log.touch()  # a loaded machine makes it after it is read
    pids, began = start(folder, ["", "be_stopped"]), time.monotonic()
    while "waiting for rank 1" not in log.read_text() and time.monotonic() < began + LIMIT_S:
        time.sleep(0.1)
    os.kill(pids[1], signal.SIGCONT)
    assert wait_for(pids, LIMIT_S) == [0, 0], log.read_text()
    line = rf"waiting for rank 1 \(process {pids[1]} on \S+\) for 0.033 min: it is stopped, or cannot be reached"
    assert re.search(line, log.read_text())


def test_two_runs_of_several_ranks_in_one_folder_are_reported_once(tmp_path):
    folder = make_run(tmp_path / "run")
    with locked([folder / LOCK]):
        codes, said = run(folder, "", "")
    assert codes == [2, 1]
    assert len(said) == 1
    assert f"another run writes here (process {os.getpid()} on {socket.gethostname()}" in said[0]
    assert run(folder, "", "")[0] == [0, 0]
    assert not (folder / LOCK).exists()


def test_an_input_that_only_one_rank_lacks_is_reported_by_that_rank(tmp_path):
    codes, said = run(make_run(tmp_path / "run"), "", "lose_input")
    assert codes == [1, 2]
    assert len(said) == 1
    assert said[0].startswith("dp-ema (rank 1): ")
    assert "input.json" in said[0]


@pytest.mark.parametrize(
    ("environ", "fault", "message"),
    [
        ({"MASTER_ADDR": ""}, "", "MASTER_ADDR is not set, so the ranks cannot meet"),
        ({"MASTER_PORT": "many"}, "", "MASTER_PORT = 'many': expected a whole number"),
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
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK = 5: expected 0 to 1, because WORLD_SIZE = 2."),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE = 'two': expected a whole number."),
        ({"WORLD_SIZE": "²", "RANK": "0"}, "WORLD_SIZE = '²': expected a whole number."),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE = 2, but RANK is not set"),
        (
            {"SLURM_PROCID": "2", "SLURM_NTASKS": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "SLURM_PROCID = 2: expected 0 to 1, because SLURM_NTASKS = 2.",
        ),
    ],
)
def test_an_environment_that_makes_no_sense_is_refused(environ, message):
    with pytest.raises(UserError, match=message):
        find_launch(environ)


def test_a_port_in_use_is_named(tmp_path):
    folder = make_run(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        began = time.monotonic()
        pids = [start_rank(folder, launcher_environment(0, 2, port))]
        assert wait_for(pids, LIMIT_S) == [2]
        assert time.monotonic() - began < LIMIT_S
    (line,) = last_words(folder)
    assert line.startswith(f"dp-ema (rank 0): rank 0 of 2: cannot meet at 127.0.0.1:{port} (")
    assert "address already in use). MASTER_ADDR and MASTER_PORT must be" in line


def test_sharing_out_without_a_launcher_shares_nothing_out_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(make_run(tmp_path / "run", stage=2))
    assert main(["train", "input.json"]) == 0
    said = "training.zero_stage = 2: no launcher has started this process, which trains with 0"
    assert said in capsys.readouterr().err
    assert main(["check", "input.json"]) == 0
    assert said in capsys.readouterr().out
    assert json.loads(Path("out.json").read_text())["training"]["zero_stage"] == 0


def test_ctrl_c_at_the_terminal_stops_all_ranks_after_the_same_step(tmp_path):
    folder = make_run(tmp_path / "run", training__numb_steps=10**6)
    pids = start(folder, ("", ""))
    end = time.monotonic() + LIMIT_S
    while not (folder / "model.ckpt.pt").exists() and time.monotonic() < end:
        time.sleep(0.01)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert wait_for(pids, LIMIT_S) == [130, 130]
    (line,) = last_words(folder)
    assert line.startswith("stopped by SIGINT after step ")
    assert f"after step {torch.load(folder / 'model.ckpt.pt', weights_only=True)['step']} of" in line
