"""Checkpoint files: written whole, read with every way it can be wrong named; families, best files,
crashes.
"""

import errno
import logging
import os
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import checkpoint_payload as payload
from helpers import killed_at

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.series import BestFiles, CheckpointSeries, save_together
from deepmd_ema.checkpoint.writer import Writer
from deepmd_ema.distributed.tensors import check_weights
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError, WriteError
from deepmd_ema.files import this_machine


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def spoil(path, how):
    """Damage a file as disks and interrupted copies do."""
    data = path.read_bytes()
    if how in ("cut", "empty", "tail"):
        path.write_bytes(data[: {"cut": len(data) // 2, "empty": 0, "tail": -30}[how]])
    else:
        with zipfile.ZipFile(path) as archive:
            info = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
        place = data.index(torch.arange(6.0).numpy().tobytes(), info.header_offset)
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


@pytest.mark.parametrize("how", ["cut", "empty", "tail", "flipped"])
def test_a_damaged_file_is_named_with_the_newest_intact_one_before_it(here, how):
    for step in (1, 2, 3, 4):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    spoil(here / "model.ckpt-3.pt", how)
    spoil(here / "model.ckpt-2.pt", "cut")
    with pytest.raises(
        CheckpointError,
        match=r"model.ckpt-3.pt: damaged, .*\bmodel.ckpt-1.pt: continue from that one",
    ):
        checkpoint.load("model.ckpt-3.pt")
    os.remove("model.ckpt-1.pt")
    with pytest.raises(
        CheckpointError,
        match=r"damaged.* There is no older intact checkpoint beside it",
    ):
        checkpoint.load(here / "model.ckpt-2.pt")


@pytest.mark.parametrize(
    ("place", "error", "phrase"),
    [
        ("torch.load", MemoryError(), "out of memory"),
        (
            "torch.load",
            RuntimeError(
                "unable to mmap 8 bytes from <x>: Cannot allocate memory (12)"
            ),
            "out of memory",
        ),
        (
            "torch.load",
            OSError(errno.EMFILE, "many"),
            "Too many open files). Too many files are open: raise the limit",
        ),
        (
            "zipfile.ZipFile.testzip",
            OSError(errno.EIO, "bad"),
            "Input/output error). The disk or the network file",
        ),
    ],
)
def test_what_the_system_refuses_while_reading_is_no_damage(
    here, monkeypatch, place, error, phrase
):
    for step in (1, 2):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    monkeypatch.setattr(place, Mock(side_effect=error))
    with pytest.raises(CheckpointError) as reported:
        checkpoint.load("model.ckpt-2.pt")
    assert str(reported.value).startswith(f"model.ckpt-2.pt: cannot be read ({phrase}")
    assert "model.ckpt-1.pt" not in str(reported.value)


def test_a_missing_file_lists_what_is_there(here):
    with pytest.raises(
        CheckpointError, match=r"model.ckpt.pt: no such file. There is no checkpoint in"
    ):
        checkpoint.load("model.ckpt.pt")
    for step in (2, 10):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    with pytest.raises(
        CheckpointError, match=r"Available in .: model.ckpt-10.pt, model.ckpt-2.pt"
    ):
        checkpoint.load("modle.ckpt.pt")
    with pytest.raises(
        CheckpointError, match="no file 'checkpoint' here that names the newest"
    ):
        checkpoint.resolve(here)
    (here / "checkpoint").write_text("model.ckpt-10.pt")
    for link in ("model.ckpt.pt", "model.ckpt"):  # a file system without links has none
        assert checkpoint.resolve(link) == Path("model.ckpt-10.pt")
    (here / "model.ckpt.pt").symlink_to("model.ckpt-9.pt")
    with pytest.raises(
        CheckpointError, match=r"links to model.ckpt-9.pt, which is missing. Available"
    ):
        checkpoint.load("model.ckpt.pt")
    (here / "checkpoint").write_text("model.ckpt-9.pt")
    with pytest.raises(
        CheckpointError, match=r"names model.ckpt-9.pt, which is missing"
    ):
        checkpoint.load(".")
    for content, phrase in (
        (
            b"a\x00b",
            "not the path of a checkpoint, which a run writes there .it is no text.",
        ),
        (b"x" * 10_000, "not the path of a checkpoint"),
        (b"", "names nothing, which is missing"),
    ):
        (here / "checkpoint").write_bytes(content)
        with pytest.raises(
            CheckpointError,
            match=rf"checkpoint: {phrase}.*Available in .: model.ckpt-10.pt",
        ):
            checkpoint.load(".")


def test_files_of_other_programs_are_recognised(here):
    torch.save(
        {
            "model": {
                "_extra_state": {"model_params": {}},
                "model.Default.x": torch.zeros(1),
            }
        },
        "dp.pt",
    )
    torch.save({"weight": torch.zeros(1)}, "plain.pt")
    torch.save({"x": pytest.MonkeyPatch}, "code.pt")
    (here / "text.pt").write_text("hello")
    (here / "model.dp").write_bytes(b"\x89HDF\r\n\x1a\n" + b"0" * 50)
    with zipfile.ZipFile("script.pth", "w") as archive:
        archive.writestr("model/constants.pkl", b"")
    newer = payload() | {"format": checkpoint.FORMAT + 1, "version": "9.0"}
    checkpoint.save("newer.pt", newer)
    expected = {
        "dp.pt": (
            "a checkpoint of DeePMD-kit.*--init-model and --finetune start a run.*dp-ema convert"
        ),
        "plain.pt": "not a checkpoint of dp-ema",
        "code.pt": "objects other than tensors",
        "text.pt": "not a checkpoint",
        "model.dp": (
            r"a frozen model \(.dp, HDF5\), not a checkpoint. Give it a name that ends in .dp"
        ),
        "script.pth": "TorchScript.*`dp convert-backend script.pth script.dp`.*which dp-ema reads",
        "newer.pt": r"written by dp-ema 9.0 in format 2.*Update dp-ema",
    }
    for name, phrase in expected.items():
        with pytest.raises(CheckpointError, match=phrase):
            checkpoint.load(name)


def test_a_restart_from_an_average_or_a_best_file_names_the_file_to_use(here):
    average = payload(7, "average", "ema")
    save_together(
        7,
        [
            (CheckpointSeries("model.ckpt"), payload(7)),
            (CheckpointSeries("model.ckpt", "_ema"), average),
        ],
    )
    checkpoint.require_training(checkpoint.load("model.ckpt.pt"), "model.ckpt.pt")
    with pytest.raises(
        CheckpointError,
        match=r"average weights .* of step 7.*--restart model.ckpt-7.pt.*--init-model",
    ):
        checkpoint.require_training(average, "model_ema.ckpt.pt")
    for stem in ("best", "best_ice_ema"):  # the last one of a task
        with pytest.raises(
            CheckpointError,
            match=r"best weights.* of step 4 .*--restart model.ckpt-7.pt",
        ):
            checkpoint.require_training(
                payload(4, "best", "live"), f"{stem}.ckpt-4.t-1.pt"
            )
    os.remove("model.ckpt-7.pt")
    with pytest.raises(
        CheckpointError, match=r"Use a training checkpoint \(model.ckpt-\*.pt\)"
    ):
        checkpoint.require_training(average, "model_ema.ckpt-7.pt")


def test_weights_of_another_model_are_listed_in_one_message():
    expected = {
        "kept": (2,),
        "lost": (3,),
        "net.layers.0.weight": (1, 4),
        "wide": (5, 5),
    }
    found = {
        "kept": (2,),
        "net.layers.0.matrix": torch.zeros(1, 4),
        "wide": torch.zeros(5, 6),
        "odd": torch.zeros(7),
    }
    check_weights({"kept": [2]}, {"kept": torch.zeros(2)}, "x.pt")
    with pytest.raises(CheckpointError) as caught:
        check_weights(expected, found, "x.pt")
    text = str(caught.value)
    assert text.startswith("x.pt: its weights do not fit")
    assert "missing: lost (3,)" in text
    assert "not of this model: odd (7,)" in text
    assert "renamed: net.layers.0.weight is called net.layers.0.matrix there" in text
    assert "of another shape: wide is (5, 6) there, (5, 5) here" in text
    with pytest.raises(CheckpointError, match="and 990 more"):
        check_weights({f"layer{i}": (i,) for i in range(1000)}, {}, "x.pt")


def names(folder, pattern="*"):
    return sorted(
        str(p.relative_to(folder))
        for p in folder.rglob(pattern)
        if p.is_file() or p.is_symlink()
    )


def test_names_links_and_pointer_are_those_of_deepmd_kit(here):
    # what `dp --pt train` of DeePMD-kit 3.2.0 leaves behind with these options
    live = CheckpointSeries("out/mm.ckpt", save_dir="ck/sub", keep=2, start=0)
    average = CheckpointSeries(
        "out/mm.ckpt", "_ema", save_dir="ck/sub", keep=1, start=0
    )
    for step in (5, 10, 12):
        save_together(
            step, [(live, payload(step)), (average, payload(step, "average", "ema"))]
        )
    assert " ".join(names(here)) == (
        "checkpoint ck/sub/mm.ckpt-10.pt ck/sub/mm.ckpt-12.pt ck/sub/mm_ema.ckpt-12.pt "
        "out/mm.ckpt.pt out/mm_ema.ckpt.pt"
    )
    assert os.readlink("out/mm.ckpt.pt") == "../ck/sub/mm.ckpt-12.pt"
    assert (here / "checkpoint").read_text() == "ck/sub/mm.ckpt-12.pt"
    for way in (
        "out/mm.ckpt.pt",
        "out/mm.ckpt",
        "ck/sub/mm.ckpt-12",
        "ck/sub/mm.ckpt-12.pt",
        ".",
        "checkpoint",
        here,
    ):
        assert (
            checkpoint.resolve(way).resolve()
            == (here / "ck/sub/mm.ckpt-12.pt").resolve()
        )
        assert checkpoint.load(way)["step"] == 12


def test_a_write_that_fails_names_the_newest_whole_checkpoint_before_it(
    here, monkeypatch
):
    live = CheckpointSeries("model.ckpt", keep=5, start=0)
    for step in (10, 20, 40):
        save_together(step, [(live, payload(step))])

    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("deepmd_ema.checkpoint.file.write_archive", refuse)
    with pytest.raises(WriteError, match=r"model.ckpt-20.pt is whole and still usable"):
        save_together(30, [(live, payload(30))])
    with pytest.raises(WriteError, match=r"model.ckpt-40.pt is whole and still usable"):
        save_together(50, [(live, payload(50))])
    with pytest.raises(WriteError) as caught:
        save_together(5, [(live, payload(5))])
    assert "usable" not in str(caught.value)
    assert live.steps() == [10, 20, 40]


def test_jobs_behind_a_write_that_failed_are_dropped():
    writer, done = Writer(World()), []

    def fail():
        raise ValueError("no room")

    writer.begin(1)
    writer.submit(partial(done.append, 1), fail, partial(done.append, 2))
    with pytest.raises(ValueError, match="no room"):
        writer.begin(2)
    writer.submit(partial(done.append, 3))
    writer.close()
    assert done == [1]  # a pointer that follows a file would lead to none


def test_files_of_a_longer_earlier_run_do_not_push_out_new_ones(here, caplog):
    caplog.set_level(logging.INFO)
    for step in (100, 1000, 1100, 1200):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    live = CheckpointSeries("model.ckpt", keep=2, start=0)
    for step in (50, 150, 250):
        save_together(step, [(live, payload(step))])
        os.utime(live.file(step), (1e9 - step, 1e9 - step))  # steps count, not times
    assert live.steps() == [150, 250, 1000, 1100, 1200]
    assert caplog.text.count("of an earlier run") == 1
    save_together(1150, [(live, payload(1150))])
    assert live.steps() == [250, 1150, 1200]


def test_a_restart_leaves_its_own_files_and_drops_the_branch_that_it_leaves(here):
    for step in (10, 20, 30, 35):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    live = CheckpointSeries("model.ckpt", keep=5, start=20)
    save_together(30, [(live, payload(30, value=0.25))])
    assert live.steps() == [10, 20, 30, 35]
    assert checkpoint.load("model.ckpt-30.pt")["model"]["w"][0] == 30.25
    save_together(40, [(live, payload(40))])
    assert live.steps() == [10, 20, 30, 40]


def test_half_written_files_of_killed_processes_are_swept_and_those_of_living_ones_stay(
    here,
):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine, token = this_machine(), "0123456789abcdef"
    old = f"model.ckpt-2.pt.ffffffff-1-{token}.part.pt"
    # of a process that runs, of another machine where the number means another process, and of
    # another program
    stay = [
        f"m.pt.{mine}-{os.getppid()}-{token}.part.pt",
        f"m.pt.ffffffff-{dead.pid}-{token}.part",
        f"x.{dead.pid}.part",
    ]
    for name in (
        *stay,
        old,
        *(
            f"{name}.{mine}-{dead.pid}-{token}.part"
            for name in ("model.ckpt-3.pt", "checkpoint")
        ),
    ):
        Path(name).write_text("x")
    os.utime(old, (1e9, 1e9))
    save_together(4, [(CheckpointSeries("model.ckpt", start=0), payload(4))])
    assert names(here, "*.part*") == sorted(stay)


def save_step(step, best, value, series):
    submit(best, value, step)
    content = payload(step, best={"live": best.state_dict()})
    save_together(
        step,
        [(series[0], content), (series[1], payload(step, "average", "ema"))],
        [best],
    )


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_every_write_leaves_a_consistent_pair(tmp_path, monkeypatch):
    for at in range(1, 60):
        folder = tmp_path / str(at)
        folder.mkdir()
        monkeypatch.chdir(folder)
        series = [
            CheckpointSeries("model.ckpt", suffix, keep=keep, start=0)
            for suffix, keep in (("", 2), ("_ema", 1))
        ]
        best = BestFiles("best", ".", 1, "E:MAE")
        for step in (5, 10):
            save_step(step, best, 10 / step, series)
        killed = killed_at(at, partial(save_step, 20, best, 0.5, series))
        newest = checkpoint.load("model.ckpt.pt")
        step = newest["step"]
        assert step in (10, 20)
        assert checkpoint.load(f"model_ema.ckpt-{step}.pt")["step"] == step
        assert checkpoint.load("model_ema.ckpt.pt")["step"] in (step, 20)
        assert checkpoint.load(".")["step"] in (10, step)
        again = BestFiles("best", ".", 1, "E:MAE")
        again.load_state_dict(newest["best"]["live"])
        ((_, kept),) = again.records
        assert (
            checkpoint.load(again.path(kept))["step"]
            == checkpoint.load("best.ckpt.pt")["step"]
            == step
        )
        save_step(20, again, 0.5, series)
        assert " ".join(names(folder)) == (
            "best.ckpt-20.t-1.pt best.ckpt.pt checkpoint model.ckpt-10.pt model.ckpt-20.pt "
            "model.ckpt.pt model_ema.ckpt-20.pt model_ema.ckpt.pt"
        )
        if not killed:
            break
    assert not killed
    assert at > 15


@pytest.fixture
def best(here):
    return BestFiles("best", ".", 2, "E:MAE")


def numbered_best(folder):
    return names(folder, "best*.t-*")


def submit(best, value, step):
    kept = best.offer(value, step)
    if kept:
        best.write(step, payload(step, "best"))
    return kept


def test_best_files_carry_their_rank_and_the_link_leads_to_the_best_one_of_either_format(
    here, best
):
    for value, step, first in [(5.0, 4, 4), (3.0, 8, 8), (9.0, 10, 8), (4.0, 12, 8)]:
        assert submit(best, value, step) == (step != 10)
        assert os.readlink("best.ckpt.pt") == f"best.ckpt-{first}.t-1.pt"
        assert checkpoint.load("best.ckpt")["step"] == first
    best.prune()
    assert numbered_best(here) == ["best.ckpt-12.t-2.pt", "best.ckpt-8.t-1.pt"]
    assert checkpoint.load(best.path(12))["step"] == 12
    submit(best, 1.0, 16)
    os.remove("best.ckpt-16.t-1.pt")
    os.mkdir("best.ckpt-16.t-1.dcp")  # written by a run that shards its checkpoints
    BestFiles("best", ".", 2, "E:MAE").load_state_dict(best.state_dict())
    assert os.readlink("best.ckpt.dcp") == "best.ckpt-16.t-1.dcp"
    assert not os.path.lexists("best.ckpt.pt")


def test_of_equal_values_the_earlier_one_stays_ahead_and_nan_is_never_kept(here, best):
    assert submit(best, 1.0, 1)
    assert not submit(best, float("nan"), 2)
    assert not submit(best, float("inf"), 3)
    assert submit(best, 1.0, 4)
    assert not submit(best, 1.0, 5)
    assert best.records == [(1.0, 1), (1.0, 4)]


def test_the_best_so_far_survives_a_restart_and_what_was_pushed_out_stays_until_a_checkpoint_knows(
    here,
):
    best = BestFiles("best", ".", 1, "E:MAE")
    submit(best, 2.0, 4)
    best.prune()
    known = best.state_dict()
    submit(best, 1.0, 8)
    assert numbered_best(here) == ["best.ckpt-4.t-2.pt", "best.ckpt-8.t-1.pt"]
    restarted = BestFiles("best", ".", 1, "E:MAE")
    restarted.load_state_dict(known)
    assert restarted.records == [(2.0, 4)]
    assert not submit(restarted, 2.5, 6)
    submit(restarted, 1.5, 8)
    restarted.prune()
    assert numbered_best(here) == ["best.ckpt-8.t-1.pt"]


def test_best_files_of_an_earlier_run_go_once_this_run_has_its_own(here, best):
    submit(best, 0.1, 900)
    checkpoint.save("best_ema.ckpt-900.t-1.pt", payload(900, "best", "ema"))
    fresh = BestFiles("best", ".", 2, "E:MAE")
    fresh.prune()
    assert "best.ckpt-900.t-1.pt" in numbered_best(here)
    assert submit(fresh, 7.0, 10)
    fresh.prune()
    assert numbered_best(here) == ["best.ckpt-10.t-1.pt", "best_ema.ckpt-900.t-1.pt"]


def test_a_best_file_that_was_deleted_no_longer_counts(here, best, caplog):
    submit(best, 5.0, 4)
    submit(best, 3.0, 8)
    os.remove("best.ckpt-8.t-1.pt")
    again = BestFiles("best", ".", 2, "E:MAE")
    again.load_state_dict(best.state_dict())
    assert again.records == [(5.0, 4)]
    assert numbered_best(here) == ["best.ckpt-4.t-1.pt"]
    assert "best of step 8 (E:MAE 3) is gone" in caplog.text
    other = BestFiles("best", ".", 2, "F:RMSE")
    other.load_state_dict(best.state_dict())
    assert other.records == []
    assert "F:RMSE now, by E:MAE before" in caplog.text
