"""The thread that writes the files of a run: order, memory, errors, and what waits for it."""

import json
import os
import re
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from helpers import FullDisk, assert_same, tiny_input
from test_train import StopAfter, load

from deepmd_ema.checkpoint.writer import NICENESS, Writer
from deepmd_ema.distributed.tensors import HostCopies, on_cpu
from deepmd_ema.distributed.world import World
from deepmd_ema.errors import CheckpointError, Interrupted, WriteError
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback


@pytest.fixture
def writer():
    writer = Writer(World())
    yield writer
    writer.close()


@pytest.fixture
def gate():
    """A job that does not end before ``gate.open`` is called."""

    class Gate:
        def __init__(self):
            self.opened = threading.Event()
            self.open = self.opened.set

        def __call__(self):
            assert self.opened.wait(30)

    gate = Gate()
    yield gate
    gate.open()


def refuse():
    raise CheckpointError("no room")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priorities of their own")
def test_training_goes_before_the_writing_of_files(writer):
    found = []
    writer.begin(1)
    writer.submit(lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    writer.finish()
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert found == [min(19, own + NICENESS)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own


def test_jobs_are_done_in_their_order_and_training_continues_meanwhile(writer, gate):
    done = []
    writer.begin(1)
    writer.submit(gate)
    for number in range(5):
        writer.submit(lambda number=number: done.append(number))
    writer.begin(1)  # of the same step: nothing is waited for
    assert not done
    gate.open()
    writer.finish()
    assert done == [0, 1, 2, 3, 4]
    assert (writer.steps, writer.waits) == (1, 0)


def test_a_later_step_waits_for_the_files_of_the_one_before(writer, gate):
    done = []
    writer.begin(1)
    writer.submit(gate)
    writer.submit(lambda: done.append(1))
    threading.Timer(0.05, gate.open).start()
    writer.begin(2)
    assert done == [1]
    assert writer.waits == 1
    assert writer.waited_s > 0.02


def test_what_is_written_is_not_kept(writer):
    content = {"w": torch.zeros(3)}
    there = weakref.ref(content["w"])
    writer.begin(1)
    writer.submit(lambda content=content: None)
    del content
    writer.finish()
    assert there() is None


def test_an_error_is_raised_once_where_training_requests_and_nothing_more_is_written(writer, gate):
    done = []
    writer.begin(1)
    writer.submit(gate)
    writer.submit(refuse)
    writer.submit(lambda: done.append("behind"))
    gate.open()
    writer.wait()
    assert writer.error is not None
    writer.submit(lambda: done.append("later"))
    with pytest.raises(CheckpointError, match="no room"):
        writer.begin(2)
    writer.submit(lambda: done.append("after it was raised"))
    writer.finish()
    assert not done
    assert writer.error is None


def test_other_ranks_write_nothing(gate):
    writer = Writer(World(rank=1, size=1))
    writer.begin(1)
    writer.submit(refuse)
    writer.finish()
    writer.close()
    assert not writer.steps


# ---- copies


def test_each_tensor_is_copied_once_and_the_copy_is_alone_in_its_memory():
    copies, flat = HostCopies(), torch.arange(12.0)
    one, other = flat[:6].view(2, 3), flat[6:]
    first = copies(one)
    assert copies(one.detach()) is first  # another object of the same numbers
    assert copies(one.t()).tolist() == one.t().tolist()  # the same memory in another order
    assert copies(other) is not first
    flat.zero_()
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert first.untyped_storage().nbytes() == 24
    copies.arrival()()


def test_a_tensor_on_the_cpu_is_saved_from_where_it_is_and_a_part_of_one_is_copied():
    whole, big = torch.nn.Parameter(torch.ones(3)), torch.arange(100.0)
    there = on_cpu({"whole": whole, "parts": [big[:2], big[:2]], "number": 1})
    assert there["whole"].data_ptr() == whole.data_ptr()
    assert not there["whole"].requires_grad
    assert there["parts"][0] is there["parts"][1]
    assert there["parts"][0].untyped_storage().nbytes() == 8
    assert there["number"] == 1


# ---- runs


OPTIONS = {
    "training__enable_ema": True,
    "training__ema_decay": 0.9,
    "training__disp_freq": 1,
    "training__save_freq": 2,
    "training__averaging": [{"name": "p", "type": "power", "sigma_rel": 0.2, "snapshots": True, "snapshot_freq": 2}],
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 2,
    "validating__full_val_start": 0,
}


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    monkeypatch.chdir(tmp_path)

    def run(num_steps=6, callback=None, **options):
        config = tiny_input([water_like], [water_like_valid], num_steps=num_steps, **{**OPTIONS, **options})
        Path("input.json").write_text(json.dumps(config))
        run_training("input.json", device="cpu", callback=callback)

    return run


def test_the_files_of_a_step_share_one_copy_of_every_tensor(start, monkeypatch):
    save, written = torch.save, []
    monkeypatch.setattr(torch, "save", lambda content, file: (written.append(content), save(content, file)))
    start(num_steps=2)
    kinds = [content["kind"] for content in written]
    assert kinds == ["snapshot", "best", "best", "training", "average", "average"]
    whole = next(content for content in written if content["kind"] == "training")
    parts = [whole["model"], whole["optimizer"], whole["averages"]["profiles"], whole["display"]]
    once = {t.data_ptr() for t in tensors_of(parts)}
    assert len(once) == len(tensors_of(parts))
    for content in written:
        own = {t.data_ptr() for t in tensors_of(content)}
        if content["kind"] == "snapshot":  # its parameters are narrowed
            own -= {content["model"][name].data_ptr() for name in content["averaged"]}
        assert own <= once, content["kind"]


def tensors_of(tree):
    if isinstance(tree, torch.Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [t for part in inner for t in tensors_of(part)]


class HeldUp(Callback):
    """Lets the files of step 2 wait until two more steps are done."""

    def __init__(self, monkeypatch):
        self.gate, self.writes = threading.Event(), []
        from deepmd_ema.checkpoint import series

        save = series.save

        def late(path, *arguments, **more):
            assert self.gate.wait(30)
            self.writes.append((path.name, self.step))
            save(path, *arguments, **more)

        monkeypatch.setattr(series, "save", late)
        self.step = 0

    def after_update(self, trainer):
        self.step = trainer.step
        if trainer.step == 4:
            self.gate.set()


def test_files_written_late_hold_the_step_that_they_are_of(start, monkeypatch, tmp_path):
    start()
    kept = {p.name: load(p) for p in tmp_path.glob("*.pt")}
    logs = {name: (tmp_path / name).read_bytes() for name in ("lcurve.out", "val.log", "val_ema.log")}
    (tmp_path / "late").mkdir()
    monkeypatch.chdir(tmp_path / "late")
    held = HeldUp(monkeypatch)
    start(callback=held)
    assert any("-2." in name and step == 4 for name, step in held.writes)
    late = tmp_path / "late"
    assert kept.keys() == {p.name for p in late.glob("*.pt")}
    for name, content in kept.items():
        assert_same(content, load(late / name), name)
    for name, content in logs.items():
        assert (late / name).read_bytes() == content, name


def test_a_disk_that_is_full_ends_training_at_the_next_step_with_the_usual_message(start, monkeypatch):
    save, steps = torch.save, []

    def fill(content, file):
        save(content, FullDisk(file) if content["step"] == 2 and content["kind"] == "training" else file)

    class Note(Callback):
        def after_step(self, trainer):
            steps.append(trainer.step)
            trainer.saver.writer.wait()

    monkeypatch.setattr(torch, "save", fill)
    with pytest.raises(WriteError, match=r"model.ckpt-2.pt: cannot be written \(No space left on device\). Make room"):
        start(callback=Note())
    assert steps == [1, 2]
    assert not Path("model.ckpt-2.pt").exists()
    assert not list(Path().rglob("*.part*"))


def test_a_disk_that_is_full_at_the_last_step_is_no_success(start, monkeypatch):
    save = torch.save

    def fill(content, file):
        save(content, FullDisk(file) if content["step"] == 6 and content["kind"] == "average" else file)

    monkeypatch.setattr(torch, "save", fill)
    with pytest.raises(WriteError, match=r"model_ema.ckpt-6.pt: cannot be written"):
        start()
    assert os.readlink("model.ckpt.pt") == "model.ckpt-4.pt"  # live and averaged files are one transaction


def test_a_run_that_is_stopped_says_so_when_everything_is_written(start, monkeypatch):
    save = torch.save

    def slow(content, file):
        threading.Event().wait(0.05)
        save(content, file)

    monkeypatch.setattr(torch, "save", slow)
    with pytest.raises(Interrupted, match="after step 3 of 6; everything is saved"):
        start(callback=StopAfter(3))
    assert load("model.ckpt.pt")["step"] == load("model_ema.ckpt.pt")["step"] == 3


def test_a_stop_whose_files_cannot_be_written_says_that_and_not_that_all_is_saved(start, monkeypatch):
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda content, file: save(content, FullDisk(file)))
    with pytest.raises(WriteError, match="cannot be written"):
        start(callback=StopAfter(1))


def test_an_error_of_training_leaves_the_files_of_the_step_before_whole(start):
    class Fail(Callback):
        def after_update(self, trainer):
            if trainer.step == 3:
                raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        start(callback=Fail())
    assert load("model.ckpt.pt")["step"] == load("model_ema.ckpt.pt")["step"] == 2
    assert not list(Path().rglob("*.part*"))


def test_the_end_says_how_long_files_took_and_how_long_training_waited(start, caplog):
    caplog.set_level("DEBUG")
    start()
    found = re.search(r"files of 3 steps written in [\d.]+ s beside training, which waited [\d.]+ s", caplog.text)
    assert found, caplog.text
