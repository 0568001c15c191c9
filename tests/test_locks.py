"""One run in one place: on this machine, and on another that shares the file system."""

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
import threading
import time

import pytest

from deepmd_ema.distributed import files
from deepmd_ema.distributed.files import locked, this_machine
from deepmd_ema.errors import UserError


@pytest.fixture
def lock(tmp_path):
    return tmp_path / ".dp-ema.lock"


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(files, "BEAT_S", 0.05)
    monkeypatch.setattr(files, "WATCH_S", 0.5)


def write_lock(lock, machine="ffffffff", pid=7, host="node12"):
    lock.write_text(json.dumps({"machine": machine, "host": host, "pid": pid, "since": "2026-01-02 03:04:05"}))


HOLD = """
import sys, time
from pathlib import Path
from deepmd_ema.distributed.files import locked
with locked([Path(sys.argv[1])]):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(lock):
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_reported_the_process_and_the_machine_of_the_first(lock):
    process = hold(lock)
    try:
        said = rf"another run writes here \(process {process.pid} on .*another folder"
        with pytest.raises(UserError, match=said), locked([lock]):
            pytest.fail("both run")
        assert lock.exists()
    finally:
        process.kill()
        process.communicate()


def test_a_killed_run_leaves_a_lock_that_the_next_one_takes_at_once(lock, caplog):
    process = hold(lock)
    process.kill()
    process.communicate()
    assert lock.exists()
    caplog.set_level("INFO")
    with locked([lock]):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert f"the lock of process {process.pid} on" in caplog.text
    assert not lock.exists()


def test_the_lock_is_free_after_a_run_that_ends_by_itself_or_by_an_error(lock):
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), locked([lock]):
            raise ZeroDivisionError
    assert not lock.exists()
    assert not [t for t in threading.enumerate() if t.name == "dp-ema-lock"]


def test_of_several_places_none_is_held_if_one_cannot_be(lock, tmp_path):
    with locked([lock]):
        other = tmp_path / "other.lock"
        with pytest.raises(UserError, match="another run writes here"), locked([other, lock]):
            pytest.fail("both run")
        assert not other.exists()


def test_a_run_on_another_machine_is_reported_by_its_signs_of_life(lock, quick, monkeypatch):
    monkeypatch.setattr(files, "WATCH_S", 30)  # it ends with the first sign, however late that comes
    write_lock(lock)
    ended = threading.Event()
    handle = os.open(lock, os.O_RDWR)
    beats = threading.Thread(target=files._beat, args=([handle], ended))
    beats.start()
    said = r"another run writes here .process 7 on node12, since 2026-01-02"
    try:
        with pytest.raises(UserError, match=said), locked([lock]):
            pytest.fail("both run")
    finally:
        ended.set()
        beats.join()
        os.close(handle)


def test_the_wait_for_a_run_on_another_machine_is_reported_at_its_start(lock, caplog, monkeypatch):
    caplog.set_level("INFO")
    write_lock(lock)
    said_before = []
    monkeypatch.setattr(files, "_shows_life", lambda path: said_before.append(caplog.text))
    with locked([lock]):
        assert json.loads(lock.read_text())["machine"] == this_machine()
    assert re.search(
        rf"{lock}: process 7 on node12 held this lock, with a sign of life \d+ s ago, and can be checked only on "
        r"its own machine\. Waiting up to 70 s for another sign; this run begins if there is none\. .*remove the file",
        said_before[0],
    )
    assert "process 7 on node12, which has ended, is taken over" in caplog.text


def test_a_lock_of_another_machine_without_a_sign_of_life_is_taken(lock, quick):
    write_lock(lock)
    with locked([lock]):
        assert json.loads(lock.read_text())["machine"] == this_machine()


def test_a_run_on_another_machine_that_held_several_locks_is_waited_for_once(lock, tmp_path, monkeypatch):
    other, watched = tmp_path / "other.lock", []
    write_lock(lock)
    write_lock(other)
    monkeypatch.setattr(files, "_shows_life", watched.append)
    with locked([lock, other]):
        assert json.loads(other.read_text())["machine"] == this_machine()
    assert watched == [lock]
    write_lock(lock)
    write_lock(other, pid=8)
    with locked([lock, other]):
        pass
    assert watched == [lock, lock, other]


@pytest.mark.parametrize("hours", [-48, 2, 48])
def test_the_clock_of_this_machine_does_not_decide_whether_another_run_lives(lock, monkeypatch, hours):
    """Two machines whose clocks differ, or one that was set back or forward while a run held the lock."""
    watched, now = [], time.time
    write_lock(lock)
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * hours)
    monkeypatch.setattr(files, "_shows_life", lambda path: not watched.append(path))
    with pytest.raises(UserError, match=r"another run writes here .process 7 on node12"), locked([lock]):
        pytest.fail("both run")
    assert watched == [lock]


def test_an_old_lock_of_another_machine_is_taken_without_waiting(lock, monkeypatch):
    write_lock(lock)
    os.utime(lock, (1e9, 1e9))
    monkeypatch.setattr(files, "_shows_life", lambda _: pytest.fail("it waits"))
    with locked([lock]):
        assert json.loads(lock.read_text())["machine"] == this_machine()


def test_without_locks_of_the_file_system_processes_of_this_machine_are_requested(lock, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, "")

    monkeypatch.setattr(fcntl, "flock", none)
    write_lock(lock, this_machine(), os.getppid(), "here")
    with pytest.raises(UserError, match=f"process {os.getppid()} on here"), locked([lock]):
        pytest.fail("both run")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_lock(lock, this_machine(), dead.pid, "here")
    with locked([lock]):
        pass


@pytest.mark.parametrize("text", ["", "garbage", "[1]", '{"pid": 1}'])
def test_a_lock_that_says_nothing_is_taken(lock, text):
    lock.write_text(text)
    with locked([lock]):
        pass
    assert not lock.exists()


def test_a_link_is_not_followed(lock, tmp_path):
    (tmp_path / "victim").write_text("mine")
    lock.symlink_to("victim")
    with pytest.raises(UserError, match="cannot be written"), locked([lock]):
        pytest.fail("wrote through the link")
    assert (tmp_path / "victim").read_text() == "mine"
