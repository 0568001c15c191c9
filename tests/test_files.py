"""Seeds, files that appear whole, and memory that stays."""

import errno
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from deepmd_ema.distributed import files
from deepmd_ema.distributed.files import (
    CSV,
    JSON,
    PICTURE,
    append,
    atomic_write,
    check_output,
    link,
    move,
    refuse_to_lose,
    sync,
)
from deepmd_ema.errors import UserError, WriteError, os_error_message
from deepmd_ema.utils import seed_for

BLOCKS = """
import resource, sys, torch
from deepmd_ema.utils import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
def faults(millions):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(millions * 1_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(min([faults(20) for _ in range(20)][10:]))  # the first ones make room
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_large_blocks_are_mapped_once_and_kept():
    def fewest_page_faults(how):
        return int(
            subprocess.run([sys.executable, "-c", BLOCKS, how], check=True, capture_output=True, timeout=60).stdout
        )

    assert fewest_page_faults("keep") < 100
    assert fewest_page_faults("give back") > 500


def test_a_seed_depends_on_the_stream_and_its_numbers_only():
    assert seed_for("frames", 1) == seed_for("frames", 1)
    assert len({seed_for("frames", 1), seed_for("frames", 2), seed_for("weights", 1), seed_for("frames", 1, 0)}) == 4
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
    with pytest.raises(WriteError, match=full_disk), atomic_write(tmp_path / "full") as part:
        part.write_text("too much")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(tmp_path / "pipe") as part:
        part.write_text("through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_name_that_is_too_long_or_a_folder_is_refused_before_the_work(tmp_path):
    (tmp_path / "folder").mkdir()
    for name, phrase in (("x" * 256, "File name too long"), ("folder", "Is a directory"), ("no/x", "No such file")):
        with pytest.raises(WriteError, match=rf"{name}: cannot be written \({phrase}"), atomic_write(tmp_path / name):
            pytest.fail("the work was begun")


@pytest.mark.parametrize("name", ["x" * 255, "é" * 127, "x.json", "." + "y" * 200])
def test_the_longest_names_can_be_written(tmp_path, name):
    with atomic_write(tmp_path / name) as part:
        part.write_text("new")
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_nobody_can_lay_a_link_where_a_half_written_file_will_be(tmp_path, monkeypatch):
    target = tmp_path / "victim"
    target.write_text("mine")
    parts = [files.part_of(tmp_path / "out.json") for _ in range(2)]
    assert parts[0] != parts[1]
    parts[0].symlink_to(target)
    monkeypatch.setattr(files, "part_of", lambda final: parts[0])
    with pytest.raises(WriteError, match="File exists"), atomic_write(tmp_path / "out.json"):
        pytest.fail("wrote through the link")
    assert target.read_text() == "mine"


def test_what_torch_and_hdf5_say_of_a_full_disk_is_reported_in_the_words_of_the_system(tmp_path):
    text = "Unable to flush file (file write failed: filename = 'x.part', errno = 28, error message = 'No space')"
    with (
        pytest.raises(
            WriteError, match=r"^\S*x: cannot be written \(No space left on device\). Make room on the disk.$"
        ),
        atomic_write(tmp_path / "x"),
    ):
        raise RuntimeError(text)
    assert list(tmp_path.iterdir()) == []


def test_links_and_moves_are_on_the_disk_before_the_run_continues(tmp_path, monkeypatch):
    """After a power cut: the link beside save_ckpt and the rank of a best file were lost."""
    synced = []
    fsync = os.fsync

    def note(handle):
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", note)
    (tmp_path / "a").write_text("x")
    (tmp_path / "far").mkdir()
    link(tmp_path / "far" / "newest", tmp_path / "a")
    assert synced.pop() == str(tmp_path / "far")
    move(tmp_path / "a", tmp_path / "b")
    assert synced.pop() == str(tmp_path)
    append(tmp_path / "rows", "1\n", anew=True)
    assert synced == []  # rows wait for the next checkpoint: test_train.py
    sync(tmp_path / "rows")
    assert synced == [str(tmp_path / "rows")]


def test_only_a_file_of_the_same_kind_is_written_over(tmp_path):
    contents = {"model.pt": b"PK\3\4", "type.raw": b"0 1", "coord.npy": b"\x93NUMPY", "input.yaml": b"model: {}",
                "lcurve.out": b"# step", "empty": b"", "old.png": b"\x89PNG\r\n"}  # fmt: skip
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    for name in contents:
        path = tmp_path / name
        for kind, good in ((CSV, ["empty"]), (PICTURE, ["empty", "old.png"])):
            if name in good:
                refuse_to_lose(path, "--x", kind)
            else:
                with pytest.raises(UserError, match=rf"--x .*{name}: a file is there that is not {kind.name}"):
                    refuse_to_lose(path, "--x", kind)
    refuse_to_lose(tmp_path / "not_there", "--x", CSV)
    refuse_to_lose("/dev/null", "--x", CSV)
    (tmp_path / "input.json").write_text("{}")
    (tmp_path / "link.json").symlink_to("input.json")
    refuse_to_lose(tmp_path / "link.json", "-o", JSON)
    with pytest.raises(UserError, match=r"-o .*link.json: this is .*input.json, which the command reads"):
        refuse_to_lose(tmp_path / "link.json", "-o", JSON, [None, tmp_path / "input.json"])


def test_a_place_that_cannot_be_written_is_reported_before_the_work(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"^-o .*x.json: the folder .*gone is not there. Make it, or choose"):
        check_output(tmp_path / "gone" / "x.json", "-o", JSON)
    with pytest.raises(WriteError, match=r": cannot be written \(Is a directory.*Or choose another -o\.$"):
        check_output(tmp_path, "-o", JSON)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    message = r"x.json: cannot be written \(No space left on device\). Make room on the disk. Or choose another -o.$"
    with pytest.raises(WriteError, match=message):
        check_output(tmp_path / "x.json", "-o", JSON)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "phrase"),
    [
        (errno.ENAMETOOLONG, "x: File name too long. A name has at most 255 bytes"),
        (errno.EACCES, "x: Permission denied. Change its permissions"),
        (errno.ELOOP, "x: Too many levels of symbolic links. A link leads back to itself"),
        (errno.EMFILE, "x: Too many open files. Too many files are open: raise"),
        (errno.EBUSY, "x: Device or resource busy."),
    ],
)
def test_an_error_of_the_system_with_a_file_is_a_message(number, phrase):
    assert os_error_message(OSError(number, os.strerror(number), "x")).startswith(phrase)


def test_an_error_of_the_system_without_a_file_is_a_message_where_the_user_can_act():
    assert os_error_message(OSError(errno.ENOSPC, "")).startswith("No space left on device. Make room")
    assert os_error_message(OSError(errno.ECHILD, "")) is None
    long = os_error_message(OSError(errno.ENAMETOOLONG, "", "x" * 5000))
    assert len(long) < 500
