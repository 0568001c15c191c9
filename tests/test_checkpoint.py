"""One checkpoint file: written whole, read with every way it can be wrong named."""

import errno
import os
import re
import shutil
import tempfile
import zipfile
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import FullDisk, config_parts, training_parts

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.series import CheckpointSeries, save_together
from deepmd_ema.distributed.files import ensure_writable
from deepmd_ema.distributed.tensors import HostCopies, check_weights, map_tensors
from deepmd_ema.errors import CheckpointError, WriteError
from deepmd_ema.interop.tree_files import read_tree


def payload(step=3, kind="training", weights="live", **more):
    model = {"a.weight": torch.arange(6.0).view(2, 3), "a.bias": torch.zeros(2, dtype=torch.float64)}
    head = {"format": checkpoint.FORMAT, "version": "0.1.0", "kind": kind, "weights": weights, "step": step}
    parts = training_parts() if kind == "training" else {"average": {}} if kind == "average" else {}
    return {**head, "config": config_parts(), "model": model, **parts, **more}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spoil(path, how):
    """Damage a file as disks and interrupted copies do."""
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "tail":
        path.write_bytes(data[:-30])
    elif how == "flipped":
        with zipfile.ZipFile(path) as archive:
            info = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
        place = data.index(torch.arange(6.0).numpy().tobytes(), info.header_offset)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


def test_a_payload_comes_back_as_it_was_and_loads_without_running_code(here):
    given = payload(best={"live": {"records": [[0.5, 2]], "metric": "E:MAE"}}, min_nbor_dist=None)
    checkpoint.save("m.pt", given)
    back = checkpoint.load("m.pt")
    assert torch.load("m.pt", weights_only=True).keys() == {*given, "digest"}
    assert back.keys() == given.keys()
    assert torch.equal(back["model"]["a.weight"], given["model"]["a.weight"])
    assert back["model"]["a.bias"].dtype == torch.float64
    assert back["best"] == given["best"]
    assert [p.name for p in here.iterdir()] == ["m.pt"]


def test_the_same_payload_gives_the_same_bytes_whatever_the_file_is_called(here):
    checkpoint.save("one.pt", payload())
    checkpoint.save("two.pt", payload())
    assert (here / "one.pt").read_bytes() == (here / "two.pt").read_bytes()


def test_a_cpu_copy_shares_no_memory_and_keeps_aliases():
    big = torch.arange(100.0)
    tree = {"view": big[:3], "again": big[:3], "list": [big[10:12]], "tuple": (1, "x"), "empty": torch.zeros(0)}
    copy = map_tensors(HostCopies(wait=True), tree)
    big.zero_()
    assert copy["view"].tolist() == [0, 1, 2]
    assert copy["list"][0].tolist() == [10, 11]
    assert copy["again"] is copy["view"]
    assert copy["view"].untyped_storage().nbytes() == 12
    assert copy["tuple"] == (1, "x")


@pytest.mark.parametrize("how", ["cut", "empty", "tail", "flipped"])
def test_a_damaged_file_is_named_with_the_newest_intact_one_before_it(here, how):
    for step in (1, 2, 3, 4):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    spoil(here / "model.ckpt-3.pt", how)
    spoil(here / "model.ckpt-2.pt", "cut")
    with pytest.raises(CheckpointError, match=r"model.ckpt-3.pt: damaged, .*\bmodel.ckpt-1.pt: continue from that one"):
        checkpoint.load("model.ckpt-3.pt")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(here / "model.ckpt-2.pt")


NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 800 bytes. Error code 12"
NOT_ENOUGH = "DefaultCPUAllocator: not enough memory: you tried to allocate 800 bytes."


@pytest.mark.parametrize(
    ("place", "error", "phrase"),
    [
        ("torch.load", MemoryError(), "out of memory"),
        ("torch.load", RuntimeError(NO_MEMORY), "out of memory"),
        ("zipfile.ZipFile.testzip", OSError(errno.ENOMEM, "no memory"), "out of memory"),
        (
            "torch.load",
            RuntimeError("unable to mmap 8 bytes from <x>: Cannot allocate memory (12)"),
            "out of memory",
        ),
        ("torch.load", RuntimeError(NOT_ENOUGH), "out of memory"),
        ("torch.load", RuntimeError("unable to open file <x> in read-only mode: Too many open files (24)"), "Too many"),
        ("torch.load", OSError(errno.EMFILE, "many"), "Too many open files). Too many files are open: raise the limit"),
        ("zipfile.ZipFile.testzip", OSError(errno.EIO, "bad"), "Input/output error). The disk or the network file"),
        ("zipfile.ZipFile.testzip", OSError(errno.ESTALE, "old"), "Stale file handle). The disk or the network file"),
    ],
)
def test_what_the_system_refuses_while_reading_is_no_damage(here, monkeypatch, place, error, phrase):
    for step in (1, 2):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))

    def refuse(*_given, **_how):
        raise error

    monkeypatch.setattr(place, refuse)
    with pytest.raises(CheckpointError) as reported:
        checkpoint.load("model.ckpt-2.pt")
    assert str(reported.value).startswith(f"model.ckpt-2.pt: cannot be read ({phrase}")
    assert "damaged" not in str(reported.value)
    assert "model.ckpt-1.pt" not in str(reported.value)


@pytest.mark.parametrize("file", ["model.pt", "model.dp", "model.yaml"])
def test_no_error_of_the_system_is_taken_for_damage(here, monkeypatch, file):
    Path(file).write_bytes(b"PK")
    for number in set(errno.errorcode) - {errno.EINVAL}:  # which is a seek to a negative position
        reader = Mock(side_effect=OSError(number, os.strerror(number)))
        for place in ("zipfile.is_zipfile", "h5py.File", "pathlib.Path.read_text"):
            monkeypatch.setattr(place, reader)
        with pytest.raises(CheckpointError, match=re.escape(f"{file}: cannot be read (")) as reported:
            (checkpoint.load if file.endswith("pt") else read_tree)(Path(file))
        assert number == errno.ENOMEM or os.strerror(number) in str(reported.value)


def test_an_offset_of_an_archive_that_leads_before_the_file_is_damage(here):
    checkpoint.save("model.ckpt-3.pt", payload(3))
    content = bytearray((here / "model.ckpt-3.pt").read_bytes())
    content[content.rindex(b"PK\6\6") + 48 + 3] = 127  # a high byte of the offset of the central directory
    Path("model.ckpt-3.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load("model.ckpt-3.pt")


def test_a_damaged_file_without_an_older_one_says_so(here):
    checkpoint.save("model.ckpt-3.pt", payload(3))
    spoil(here / "model.ckpt-3.pt", "cut")
    with pytest.raises(CheckpointError, match="There is no older intact checkpoint beside it"):
        checkpoint.load("model.ckpt-3.pt")


@pytest.mark.parametrize("way", [".", "checkpoint", "other"])
def test_a_pointer_that_leads_to_a_pointer_is_reported(here, way):
    (here / "other").mkdir()
    (here / "checkpoint").write_text("checkpoint\n" if way == "." else "other/checkpoint\n")
    (here / "other" / "checkpoint").write_text("../checkpoint\n")
    checkpoint.save("model.ckpt-3.pt", payload(3))
    with pytest.raises(
        CheckpointError, match=r"checkpoint: not the path of a checkpoint.*names such a file again.*Give"
    ):
        checkpoint.resolve(way)


def test_names_without_ending_links_folders_and_pointers_are_found(here):
    series = CheckpointSeries("out/mm.ckpt", save_dir="ck/sub")
    save_together(5, [(series, payload(5))])
    real = (here / "ck/sub/mm.ckpt-5.pt").resolve()
    for way in ("out/mm.ckpt.pt", "out/mm.ckpt", "ck/sub/mm.ckpt-5", "ck/sub/mm.ckpt-5.pt", ".", "checkpoint", here):
        assert checkpoint.resolve(way).resolve() == real
        assert checkpoint.load(way)["step"] == 5


def test_a_missing_file_lists_what_is_there(here):
    with pytest.raises(CheckpointError, match=r"model.ckpt.pt: no such file. There is no checkpoint in"):
        checkpoint.load("model.ckpt.pt")
    for step in (2, 10):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    with pytest.raises(CheckpointError, match=r"Available in .: model.ckpt-10.pt, model.ckpt-2.pt"):
        checkpoint.load("modle.ckpt.pt")
    with pytest.raises(CheckpointError, match="no file 'checkpoint' here that names the newest"):
        checkpoint.resolve(here)
    (here / "model.ckpt.pt").symlink_to("model.ckpt-9.pt")
    with pytest.raises(CheckpointError, match=r"links to model.ckpt-9.pt, which is missing. Available"):
        checkpoint.load("model.ckpt.pt")
    (here / "checkpoint").write_text("model.ckpt-9.pt")
    with pytest.raises(CheckpointError, match=r"names model.ckpt-9.pt, which is missing"):
        checkpoint.load(".")


def test_files_of_other_programs_are_recognised(here):
    torch.save({"model": {"_extra_state": {"model_params": {}}, "model.Default.x": torch.zeros(1)}}, "dp.pt")
    torch.save({"weight": torch.zeros(1)}, "plain.pt")
    torch.save({"x": pytest.MonkeyPatch}, "code.pt")
    (here / "text.pt").write_text("hello")
    (here / "model.dp").write_bytes(b"\x89HDF\r\n\x1a\n" + b"0" * 50)
    with zipfile.ZipFile("script.pth", "w") as archive:
        archive.writestr("model/constants.pkl", b"")
    newer = payload() | {"format": checkpoint.FORMAT + 1, "version": "9.0"}
    checkpoint.save("newer.pt", newer)
    expected = {
        "dp.pt": "a checkpoint of DeePMD-kit.*--init-model and --finetune start a run.*dp-ema convert",
        "plain.pt": "not a checkpoint of dp-ema",
        "code.pt": "objects other than tensors",
        "text.pt": "not a checkpoint",
        "model.dp": r"a frozen model \(.dp, HDF5\), not a checkpoint. Give it a name that ends in .dp",
        "script.pth": "TorchScript.*`dp convert-backend script.pth script.dp`.*which dp-ema reads",
        "newer.pt": r"written by dp-ema 9.0 in format 2.*Update dp-ema",
    }
    for name, phrase in expected.items():
        with pytest.raises(CheckpointError, match=phrase):
            checkpoint.load(name)


def test_a_restart_from_an_average_or_a_best_file_names_the_file_to_use(here):
    series_list = [CheckpointSeries("model.ckpt"), CheckpointSeries("model.ckpt", "_ema")]
    average = payload(7, "average", "ema")
    save_together(7, [(series_list[0], payload(7)), (series_list[1], average)])
    checkpoint.require_training(checkpoint.load("model.ckpt.pt"), "model.ckpt.pt")
    with pytest.raises(CheckpointError, match=r"average weights .* of step 7.*--restart model.ckpt-7.pt.*--init-model"):
        checkpoint.require_training(average, "model_ema.ckpt.pt")
    names = {"best": "live", "best_ema": "ema", "best_ice": "live", "best_ice_ema": "ema"}  # the last two of a task
    for stem, weights in names.items():
        best, name = payload(4, "best", weights), f"{stem}.ckpt-4.t-1.pt"
        checkpoint.save(name, best)
        with pytest.raises(CheckpointError, match=r"best weights.* of step 4 .*--restart model.ckpt-7.pt"):
            checkpoint.require_training(best, name)
    os.remove("model.ckpt-7.pt")
    with pytest.raises(CheckpointError, match=r"Use a training checkpoint \(model.ckpt-\*.pt\)"):
        checkpoint.require_training(average, "model_ema.ckpt-7.pt")


def test_weights_of_another_model_are_listed_in_one_message():
    expected = {"kept": (2,), "lost": (3,), "net.layers.0.weight": (1, 4), "wide": (5, 5)}
    found = {"kept": (2,), "net.layers.0.matrix": torch.zeros(1, 4), "wide": torch.zeros(5, 6), "odd": torch.zeros(7)}
    check_weights({"kept": [2]}, {"kept": torch.zeros(2)}, "x.pt")
    with pytest.raises(CheckpointError) as caught:
        check_weights(expected, found, "x.pt")
    text = str(caught.value)
    assert text.startswith("x.pt: its weights do not fit")
    assert "missing: lost (3,)" in text
    assert "not of this model: odd (7,)" in text
    assert "renamed: net.layers.0.weight is called net.layers.0.matrix there" in text
    assert "of another shape: wide is (5, 6) there, (5, 5) here" in text
    many = {f"layer{i}": (i,) for i in range(1000)}
    with pytest.raises(CheckpointError, match="and 990 more"):
        check_weights(many, {}, "x.pt")


def test_a_full_disk_leaves_the_old_checkpoint_and_says_that_it_is_usable(here, monkeypatch):
    series, write = CheckpointSeries("model.ckpt"), torch.save
    save_together(1, [(series, payload(1))])
    kept = (here / "model.ckpt-1.pt").read_bytes()
    monkeypatch.setattr(torch, "save", lambda content, file: write(content, FullDisk(file)))
    phrase = r"model.ckpt-2.pt: cannot be written \(No space.*Make room on the disk.*model.ckpt-1.pt is whole and still"
    with pytest.raises(WriteError, match=phrase):
        save_together(2, [(series, payload(2))])
    assert (here / "model.ckpt-1.pt").read_bytes() == kept
    assert sorted(p.name for p in here.iterdir()) == ["checkpoint", "model.ckpt-1.pt", "model.ckpt.pt"]
    assert checkpoint.load(".")["step"] == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_device_without_space_is_reported_as_a_full_disk(here):
    (here / "m.pt").symlink_to("/dev/full")
    with pytest.raises(WriteError, match="Make room on the disk"):
        checkpoint.save("m.pt", payload())


def test_a_folder_that_cannot_be_written_is_reported_before_training(here):
    ensure_writable(here / "new" / "deep", "-o")
    assert list((here / "new" / "deep").iterdir()) == []
    (here / "file").write_text("x")
    with pytest.raises(WriteError, match=r"-o: .*file/deep: cannot be written \(Not a directory\)"):
        ensure_writable(here / "file" / "deep", "-o")
    with pytest.raises(WriteError, match=r"cannot be written \(File exists\)"):
        checkpoint.save(here / "file" / "m.pt", payload())


def test_a_full_disk_is_reported_before_training_with_what_to_do(here, monkeypatch):
    def full(**_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    message = rf"-o: {here}: cannot be written \(No space left on device\). Make room on the disk.$"
    with pytest.raises(WriteError, match=message):
        ensure_writable(here, "-o")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_reported(here):
    folder = here / "closed"
    folder.mkdir(mode=0o500)
    try:
        with pytest.raises(WriteError, match="Permission denied"):
            ensure_writable(folder, "-o")
    finally:
        shutil.rmtree(folder)
