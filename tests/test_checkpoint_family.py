"""Families of checkpoints and best files: names, rotation, links, crashes at every write."""

import logging
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers import config_parts, training_parts

from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.series import BestFiles, CheckpointSeries, save_together
from deepmd_ema.distributed.files import this_machine
from deepmd_ema.errors import WriteError


def payload(step, kind="training", weights="live", value=0.0):
    head = {"format": checkpoint.FORMAT, "version": "0.1.0", "kind": kind, "weights": weights, "step": step}
    parts = training_parts() if kind == "training" else {"average": {}} if kind == "average" else {}
    return {**head, "config": config_parts(), **parts, "model": {"w": torch.full((50,), float(step) + value)}}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def names(folder, pattern="*"):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob(pattern) if p.is_file() or p.is_symlink())


def save_pair(step, live, average, bests=()):
    return save_together(step, [(live, payload(step)), (average, payload(step, "average", "ema", 0.5))], bests)


def test_names_links_and_pointer_are_those_of_deepmd_kit(here):
    # what `dp --pt train` of DeePMD-kit 3.2.0 leaves behind with these options
    live = CheckpointSeries("out/mm.ckpt", save_dir="ck/sub", keep=2, start=0)
    average = CheckpointSeries("out/mm.ckpt", "_ema", save_dir="ck/sub", keep=1, start=0)
    for step in (5, 10, 12):
        save_pair(step, live, average)
    assert names(here) == [
        "checkpoint",
        "ck/sub/mm.ckpt-10.pt",
        "ck/sub/mm.ckpt-12.pt",
        "ck/sub/mm_ema.ckpt-12.pt",
        "out/mm.ckpt.pt",
        "out/mm_ema.ckpt.pt",
    ]
    assert os.readlink("out/mm.ckpt.pt") == "../ck/sub/mm.ckpt-12.pt"
    assert os.readlink("out/mm_ema.ckpt.pt") == "../ck/sub/mm_ema.ckpt-12.pt"
    assert (here / "checkpoint").read_text() == "ck/sub/mm.ckpt-12.pt"


def test_no_file_of_a_run_is_written_through_a_link(here):
    (here / "theirs").mkdir()
    (here / "run" / "snapshots").mkdir(parents=True)
    os.chdir("run")
    for name in ("checkpoint", "model.ckpt-2.pt", "best.ckpt-2.t-1.pt", "snapshots/model.ckpt-2.pt", "model.ckpt.pt"):
        target = here / "theirs" / name.replace("/", "_")
        target.write_text("my notes")
        os.symlink(target, name)
    best = BestFiles("best", ".", 1, "E:MAE")
    best.offer(1.0, 2)
    best.write(2, payload(2, "best"))
    snapshots = CheckpointSeries("model.ckpt", save_dir="snapshots")
    snapshots.save(2, payload(2))
    save_together(2, [(CheckpointSeries("model.ckpt", start=0), payload(2))], [best])
    assert {path.read_text() for path in (here / "theirs").iterdir()} == {"my notes"}
    for path in (".", "best.ckpt-2.t-1.pt", "snapshots/model.ckpt-2.pt"):
        assert checkpoint.load(path)["step"] == 2


def test_a_prefix_without_a_dot_gets_its_suffix_at_the_end(here):
    assert CheckpointSeries("model", "_ema").file(3).name == "model_ema-3.pt"
    assert CheckpointSeries("a.b.ckpt", "_ema").file(3).name == "a.b_ema.ckpt-3.pt"


def test_families_do_not_see_each_others_files(here):
    live, average = CheckpointSeries("model.ckpt", start=0), CheckpointSeries("model.ckpt", "_ema", start=0)
    save_pair(1, live, average)
    checkpoint.save("model.ckpt-extra-2.pt", payload(2))
    assert live.steps() == average.steps() == [1]


def test_rotation_goes_by_the_step_and_not_by_time(here):
    live = CheckpointSeries("model.ckpt", keep=2, start=0)
    for step in (1, 9, 10, 100):
        save_together(step, [(live, payload(step))])
        os.utime(live.file(step), (1e9 - step, 1e9 - step))
    assert live.steps() == [10, 100]


@pytest.mark.parametrize("keep", [0, -1])
def test_a_keep_below_one_keeps_everything(here, keep):
    live = CheckpointSeries("model.ckpt", keep=keep, start=0)
    for step in range(1, 9):
        save_together(step, [(live, payload(step))])
    assert live.steps() == list(range(1, 9))


def test_files_of_a_longer_earlier_run_do_not_push_out_new_ones(here, caplog):
    caplog.set_level(logging.INFO)
    for step in (100, 1000, 1100, 1200):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    live = CheckpointSeries("model.ckpt", keep=2, start=0)
    for step in (50, 150, 250):
        save_together(step, [(live, payload(step))])
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


def test_a_family_that_does_not_know_its_start_removes_nothing_of_others(here):
    for step in (10, 20, 30):
        checkpoint.save(f"model.ckpt-{step}.pt", payload(step))
    live = CheckpointSeries("model.ckpt", keep=5)
    save_together(40, [(live, payload(40))])
    assert live.steps() == [10, 20, 30, 40]


def test_half_written_files_of_killed_processes_are_swept_and_those_of_living_ones_stay(here, monkeypatch):
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + 3 * 86400)  # ages do not come from the clock of this machine
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine, token = this_machine(), "0123456789abcdef"
    for name in ("model.ckpt-3.pt", "model.ckpt.pt", "checkpoint", "other"):
        (here / f"{name}.{mine}-{dead.pid}-{token}.part").write_text("x")
    (here / f"model.ckpt-2.pt.ffffffff-1-{token}.part.pt").write_text("x")
    os.utime(here / f"model.ckpt-2.pt.ffffffff-1-{token}.part.pt", (1e9, 1e9))
    # of a process that runs, of another machine where the number means another process, and of another program
    stay = [
        f"m.pt.{mine}-{os.getppid()}-{token}.part.pt",
        f"m.pt.ffffffff-{dead.pid}-{token}.part",
        f"x.{dead.pid}.part",
    ]
    for name in stay:
        (here / name).write_text("x")
    save_together(4, [(CheckpointSeries("model.ckpt", start=0), payload(4))])
    assert names(here, "*.part*") == sorted(stay)


def test_a_link_that_cannot_be_moved_says_that_the_file_is_whole(here):
    (here / "model.ckpt.pt").mkdir()
    with pytest.raises(WriteError, match=r"model.ckpt.pt: cannot be written .*model.ckpt-4.pt is whole and usable"):
        save_together(4, [(CheckpointSeries("model.ckpt", start=0), payload(4))])


CRASH = """
import os, signal, sys
from pathlib import Path
import torch
from deepmd_ema import checkpoint
from deepmd_ema.checkpoint.series import BestFiles, CheckpointSeries, save_together

at, count = int(sys.argv[1]), 0

def dying(call):
    def wrapped(*arguments, **options):
        global count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **options)
    return wrapped

sys.path.insert(0, sys.argv[2])
from test_checkpoint_family import payload

live = CheckpointSeries("model.ckpt", keep=2, start=10)
average = CheckpointSeries("model.ckpt", "_ema", keep=1, start=10)
best = BestFiles("best", ".", 1, "E:MAE")
best.load_state_dict(checkpoint.load("model.ckpt.pt")["best"]["live"])
for name in ("replace", "fsync", "unlink"):
    setattr(os, name, dying(getattr(os, name)))
torch.save = dying(torch.save)
Path.symlink_to = dying(Path.symlink_to)
best.offer(0.5, 20)
best.write(20, payload(20, "best"))
content = payload(20) | {"best": {"live": best.state_dict()}}
save_together(20, [(live, content), (average, payload(20, "average", "ema"))], [best])
print("end", count)
"""


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_kill_at_every_write_leaves_a_consistent_pair(tmp_path, monkeypatch):
    here = os.path.dirname(__file__)
    for at in range(1, 60):
        folder = tmp_path / str(at)
        folder.mkdir()
        monkeypatch.chdir(folder)
        live, average = (
            CheckpointSeries("model.ckpt", keep=2, start=0),
            CheckpointSeries("model.ckpt", "_ema", keep=1, start=0),
        )
        best = BestFiles("best", ".", 1, "E:MAE")
        for step in (5, 10):
            submit(best, 10 / step, step)
            content = payload(step) | {"best": {"live": best.state_dict()}}
            save_together(step, [(live, content), (average, payload(step, "average", "ema"))], [best])
        pid = os.fork()
        if pid == 0:  # as a fork: starting torch anew for each write would take a second each
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            sys.argv = ["crash.py", str(at), here]
            exec(compile(CRASH, "crash.py", "exec"), {"__name__": "crash"})
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        newest = checkpoint.load("model.ckpt.pt")
        pair = checkpoint.load("model_ema.ckpt.pt")
        step = newest["step"]
        assert step in (10, 20)
        assert checkpoint.load(f"model_ema.ckpt-{step}.pt")["step"] == step
        assert pair["step"] in (step, 20)
        assert checkpoint.load(".")["step"] in (10, step)
        again = BestFiles("best", ".", 1, "E:MAE")
        again.load_state_dict(newest["best"]["live"])
        assert len(again.records) == 1
        assert checkpoint.load(again.path(again.records[0][1]))["step"] == step
        assert checkpoint.load("best.ckpt.pt")["step"] == step
        submit(again, 0.5, 20)
        save_together(20, [(live, payload(20)), (average, payload(20, "average", "ema"))], [again])
        live_files = ["checkpoint", "model.ckpt-10.pt", "model.ckpt-20.pt", "model.ckpt.pt"]
        averaged = ["model_ema.ckpt-20.pt", "model_ema.ckpt.pt"]
        assert names(folder) == ["best.ckpt-20.t-1.pt", "best.ckpt.pt", *live_files, *averaged]
        if os.WIFEXITED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert at > 15


# best files


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


def test_best_files_carry_their_rank_as_those_of_deepmd_kit(here, best):
    assert [submit(best, v, s) for v, s in [(5.0, 4), (3.0, 8), (4.0, 12), (9.0, 16)]] == [True, True, True, False]
    best.prune()
    assert numbered_best(here) == ["best.ckpt-12.t-2.pt", "best.ckpt-8.t-1.pt"]
    assert best.path(8).name == "best.ckpt-8.t-1.pt"
    assert checkpoint.load(best.path(12))["step"] == 12


def test_the_link_leads_to_the_best_file_of_either_format(here, best):
    for value, step, first in [(5.0, 4, 4), (3.0, 8, 8), (4.0, 12, 8), (1.0, 16, 16)]:
        submit(best, value, step)
        assert os.readlink("best.ckpt.pt") == f"best.ckpt-{first}.t-1.pt"
        assert checkpoint.load("best.ckpt")["step"] == first
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


def test_nothing_is_to_be_written_for_a_value_that_is_not_kept(here, best):
    submit(best, 1.0, 1)
    submit(best, 2.0, 2)
    before = numbered_best(here)
    assert not best.offer(3.0, 3)
    assert numbered_best(here) == before
    assert best.records == [(1.0, 1), (2.0, 2)]


def test_what_was_pushed_out_stays_until_a_checkpoint_knows(here):
    best = BestFiles("best", ".", 1, "E:MAE")
    submit(best, 2.0, 4)
    best.prune()
    known = best.state_dict()
    submit(best, 1.0, 8)
    assert numbered_best(here) == ["best.ckpt-4.t-2.pt", "best.ckpt-8.t-1.pt"]
    restarted = BestFiles("best", ".", 1, "E:MAE")
    restarted.load_state_dict(known)
    assert restarted.records == [(2.0, 4)]
    assert restarted.path(4).is_file()
    submit(restarted, 1.5, 8)
    restarted.prune()
    assert numbered_best(here) == ["best.ckpt-8.t-1.pt"]


def test_the_best_so_far_survives_a_restart(here, best):
    submit(best, 5.0, 4)
    submit(best, 3.0, 8)
    again = BestFiles("best", ".", 2, "E:MAE")
    again.load_state_dict(best.state_dict())
    assert not submit(again, 6.0, 12)
    assert submit(again, 4.0, 16)
    again.prune()
    assert numbered_best(here) == ["best.ckpt-16.t-2.pt", "best.ckpt-8.t-1.pt"]


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


def test_records_of_another_metric_are_not_continued(here, best, caplog):
    submit(best, 5.0, 4)
    again = BestFiles("best", ".", 2, "F:RMSE")
    again.load_state_dict(best.state_dict())
    assert again.records == []
    assert "F:RMSE now, by E:MAE before" in caplog.text


def test_fewer_best_files_after_a_restart_keep_the_best(here, best):
    submit(best, 5.0, 4)
    submit(best, 3.0, 8)
    again = BestFiles("best", ".", 1, "E:MAE")
    again.load_state_dict(best.state_dict())
    again.prune()
    assert numbered_best(here) == ["best.ckpt-8.t-1.pt"]


def test_best_files_are_never_rotated(here):
    best, live = BestFiles("best", ".", 1, "E:MAE"), CheckpointSeries("model.ckpt", keep=1, start=0)
    submit(best, 1.0, 1)
    for step in range(2, 9):
        save_together(step, [(live, payload(step))], [best])
    assert numbered_best(here) == ["best.ckpt-1.t-1.pt"]
