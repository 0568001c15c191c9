"""Seeds, files that appear whole, and locks: one run in one place, on this machine and on
others.
"""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from deepmd_ema import locks
from deepmd_ema.distributed import links
from deepmd_ema.errors import UserError, WriteError, os_error_message
from deepmd_ema.files import (
    CSV,
    JSON,
    MODEL_FILE,
    PICTURE,
    atomic_write,
    check_output,
    refuse_to_lose,
    this_machine,
)
from deepmd_ema.locks import locked
from deepmd_ema.utils import seed_for


def test_a_seed_depends_on_the_stream_and_its_numbers_only():
    assert seed_for("frames", 1) == seed_for("frames", 1)
    assert (
        len(
            {
                seed_for("frames", 1),
                seed_for("frames", 2),
                seed_for("weights", 1),
                seed_for("frames", 1, 0),
            }
        )
        == 4
    )
    assert 0 <= seed_for("frames", 1) < 2**63


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path):
    file = tmp_path / "out.json"
    file.write_text("old")

    def write_half():
        with atomic_write(file) as part:
            part.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_half()
    assert file.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "real").write_text("old")
    (tmp_path / "out.json").symlink_to("far/real")
    (tmp_path / "new.json").symlink_to("far/not_yet")
    for name in ("out.json", "new.json"):
        with atomic_write(tmp_path / name) as part:
            assert part.parent == tmp_path / "far"
            part.write_text("new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == "new"
    assert sorted(p.name for p in (tmp_path / "far").iterdir()) == ["not_yet", "real"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_device_and_a_pipe_get_the_bytes_and_stay(tmp_path):
    (tmp_path / "nothing").symlink_to("/dev/null")
    with atomic_write(tmp_path / "nothing") as part:
        part.write_text("gone")
    assert Path("/dev/null").is_char_device()
    (tmp_path / "full").symlink_to("/dev/full")
    full_disk = r"full: cannot be written \(No space left on device\). Make room"
    with (
        pytest.raises(WriteError, match=full_disk),
        atomic_write(tmp_path / "full") as part,
    ):
        part.write_text("too much")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(tmp_path / "pipe") as part:
        part.write_text("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_name_that_is_too_long_or_a_folder_is_refused_before_the_work(tmp_path):
    (tmp_path / "folder").mkdir()
    with atomic_write(tmp_path / ("é" * 127)) as part:
        part.write_text("new")
    for name, phrase in (
        ("x" * 256, "File name too long"),
        ("folder", "Is a directory"),
        ("no/x", "No such file"),
    ):
        with (
            pytest.raises(WriteError, match=rf"{name}: cannot be written \({phrase}"),
            atomic_write(tmp_path / name),
        ):
            pytest.fail("the work was begun")


def test_only_a_file_of_the_same_kind_is_written_over(tmp_path):
    contents = {
        "model.pt": b"PK\3\4",
        "input.yaml": b"model: {}",
        "empty": b"",
        "old.png": b"\x89PNG\r\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in ("empty", "old.png", "not_there"):
        refuse_to_lose(tmp_path / name, "--x", PICTURE)
    refuse_to_lose("/dev/null", "--x", CSV)
    for name in ("model.pt", "input.yaml", "old.png"):
        with pytest.raises(
            UserError, match=rf"--x .*{name}: a file is there that is not {CSV.name}"
        ):
            refuse_to_lose(tmp_path / name, "--x", CSV)
    (tmp_path / "input.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("input.json")
    refuse_to_lose(tmp_path / "link.json", "-o", JSON)
    with pytest.raises(
        UserError,
        match=r"-o .*link.json: this is .*input.json, which the command reads",
    ):
        refuse_to_lose(
            tmp_path / "link.json", "-o", JSON, [None, tmp_path / "input.json"]
        )


def test_a_place_that_cannot_be_written_is_reported_before_the_work(
    tmp_path, monkeypatch
):
    with pytest.raises(
        UserError,
        match=r"^-o .*x.json: the folder .*gone is not there. Make it, or choose",
    ):
        check_output(tmp_path / "gone" / "x.json", "-o", JSON)
    with pytest.raises(
        WriteError,
        match=r": cannot be written \(Is a directory.*Or choose another -o\.$",
    ):
        check_output(tmp_path, "-o", JSON)

    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=full))
    message = (
        r"x.json: cannot be written \(No space left on device\). Make room on the disk. Or choose "
        r"another -o.$"
    )
    with pytest.raises(WriteError, match=message):
        check_output(tmp_path / "x.json", "-o", JSON)
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_system_is_a_message_where_the_user_can_act():
    for number, phrase in (
        (errno.ENAMETOOLONG, "x: File name too long. A name has at most 255 bytes"),
        (errno.EACCES, "x: Permission denied. Change its permissions"),
        (errno.EMFILE, "x: Too many open files. Too many files are open: raise"),
    ):
        assert os_error_message(OSError(number, os.strerror(number), "x")).startswith(
            phrase
        )
    assert os_error_message(OSError(errno.ENOSPC, "")).startswith(
        "No space left on device. Make room"
    )
    assert os_error_message(OSError(errno.ECHILD, "")) is None


@pytest.fixture
def lock(tmp_path):
    return tmp_path / ".dp-ema.lock"


def write_lock(lock, machine="ffffffff", pid=7, host="node12"):
    lock.write_text(
        json.dumps(
            {
                "machine": machine,
                "host": host,
                "pid": pid,
                "since": "2026-01-02 03:04:05",
            }
        )
    )


HOLD = """
import sys, time
from pathlib import Path
from deepmd_ema.locks import locked
with locked([Path(sys.argv[1])]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_names_the_first_and_takes_its_lock_at_once_when_it_is_killed(
    lock, caplog
):
    caplog.set_level("INFO")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    try:
        said = rf"another run writes here \(process {process.pid} on .*another folder"
        with pytest.raises(UserError, match=said), locked([lock]):
            pytest.fail("both run")
    finally:
        process.kill()
        process.communicate()
    assert lock.exists()
    with locked([lock]):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert f"the lock of process {process.pid} on" in caplog.text
    assert not lock.exists()


def test_a_lock_that_is_a_link_is_refused_by_name(lock, tmp_path):
    lock.symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(
            UserError, match=r"dp-ema\.lock.*It is a link, which is not followed here"
        ),
        locked([lock]),
    ):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_of_several_places_none_is_held_if_one_cannot_be(lock, tmp_path):
    with locked([lock]):
        other = tmp_path / "other.lock"
        with (
            pytest.raises(UserError, match="another run writes here"),
            locked([other, lock]),
        ):
            pytest.fail("both run")
        assert not other.exists()


def test_a_run_on_another_machine_is_reported_by_its_signs_of_life(lock, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_S", 0.05)
    monkeypatch.setattr(
        locks, "WATCH_S", 30
    )  # it ends with the first sign, however late that comes
    write_lock(lock)
    ended = threading.Event()
    handle = os.open(lock, os.O_RDWR)
    beats = threading.Thread(target=locks._beat, args=([handle], ended))
    beats.start()
    said = r"another run writes here .process 7 on node12, since 2026-01-02"
    try:
        with pytest.raises(UserError, match=said), locked([lock]):
            pytest.fail("both run")
    finally:
        ended.set()
        beats.join()
        os.close(handle)
    monkeypatch.setattr(locks, "WATCH_S", 0.3)
    with locked([lock]):  # without a sign it is taken
        assert json.loads(lock.read_text())["machine"] == this_machine()


def test_the_clock_of_this_machine_does_not_decide_whether_another_run_lives(
    lock, monkeypatch
):
    watched, now = [], time.time
    write_lock(lock)
    monkeypatch.setattr(time, "time", lambda: now() + 3600 * 48)
    monkeypatch.setattr(locks, "_shows_life", lambda path: not watched.append(path))
    with (
        pytest.raises(UserError, match=r"another run writes here .process 7 on node12"),
        locked([lock]),
    ):
        pytest.fail("both run")
    assert watched == [lock]
    os.utime(lock, (1e9, 1e9))  # an old one is taken without waiting
    with locked([lock]):
        assert watched == [lock]


def test_without_locks_of_the_file_system_processes_of_this_machine_are_requested(
    lock, monkeypatch
):
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "")))
    write_lock(lock, this_machine(), os.getppid(), "here")
    with (
        pytest.raises(UserError, match=f"process {os.getppid()} on here"),
        locked([lock]),
    ):
        pytest.fail("both run")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    write_lock(lock, this_machine(), dead.pid, "here")
    with locked([lock]):
        pass


def test_a_lock_that_says_nothing_is_taken(lock):
    for text in ("", "garbage", "[1]", '{"pid": 1}'):
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


@pytest.fixture
def without(monkeypatch):
    """Return a function that has the file system refuse calls of these names."""
    links._report_no_links.cache_clear()

    def refuse(code, *names):
        def refused(source, *_, **__):
            raise OSError(code, os.strerror(code), source)

        for name in names:
            monkeypatch.setattr(
                os if hasattr(os, name) else links.shutil, name, refused
            )

    return refuse


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
@pytest.mark.parametrize(
    ("refused", "way"),
    [(["symlink"], "hard links are used"), (["symlink", "link"], "copies are used")],
)
def test_without_symbolic_links_there_are_hard_links_or_copies_and_one_warning(
    tmp_path, without, caplog, code, refused, way
):
    without(code, *refused)
    link = tmp_path / "model.pt"
    for step in (1, 2, 2):
        (tmp_path / f"model-{step}.pt").write_text(f"{step}")
        links.link(link, tmp_path / f"model-{step}.pt")
        assert link.read_text() == f"{step}"
        assert links.is_copy(link)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "model-1.pt",
        "model-2.pt",
        "model.pt",
    ]
    expected = f"{tmp_path}: the file system refuses symbolic links ({os.strerror(code)}): {way}."
    assert [r.getMessage() for r in caplog.records] == [expected]
    link.unlink()
    link.write_text("3")
    assert not links.is_copy(link)


def test_where_nothing_can_be_linked_an_older_link_goes(tmp_path, without, caplog):
    (tmp_path / "model.pt").write_text("old")
    (tmp_path / "model-2.pt").write_text("new")
    without(errno.ENOSYS, "symlink", "link", "copyfile")
    links.link(tmp_path / "model.pt", tmp_path / "model-2.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["model-2.pt"]
    assert "there is no model.pt." in caplog.text


def test_a_full_disk_is_no_file_system_without_links(tmp_path, without):
    (tmp_path / "model-2.pt").write_text("new")
    without(errno.ENOSPC, "symlink")
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        links.link(tmp_path / "model.pt", tmp_path / "model-2.pt")


def test_a_frozen_model_is_written_over_but_no_checkpoint(tmp_path):
    import torch

    layer = torch.nn.Linear(2, 3)
    torch.jit.save(torch.jit.script(layer), tmp_path / "frozen.pth")
    torch.export.save(
        torch.export.export(layer, (torch.ones(1, 2),)), tmp_path / "frozen.pt2"
    )
    torch.save({"model": layer.state_dict()}, tmp_path / "model.pth")
    for name in ("frozen.pth", "frozen.pt2"):  # the second is a .pte of DeePMD-kit
        refuse_to_lose(tmp_path / name, "-o", MODEL_FILE)
    with pytest.raises(UserError, match="not a frozen model"):
        refuse_to_lose(tmp_path / "model.pth", "-o", MODEL_FILE)
