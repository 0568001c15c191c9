"""Faults that are easily made when weights are sharded: averages that are not seen, memory, and the end of a run."""

import ctypes
import gc
import json
import os
import re
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import tiny_input
from parallel_runs import run_ranks, train, train_here

from deepmd_ema.data.sampler import Sampler
from deepmd_ema.distributed.launch import find_launch
from deepmd_ema.distributed.world import open_world
from deepmd_ema.errors import UserError
from deepmd_ema.training.trainer import Callback

pytestmark = pytest.mark.timeout(480)

VALIDATED = {
    "training__enable_ema": True,
    "training__ema_decay": 0.5,
    "learning_rate__start_lr": 1e-2,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 5,
    "validating__full_val_start": 0,
}


def load(path):
    return torch.load(path, weights_only=True)


def rows_of(file):
    return np.array([row.split() for row in file.read_text().splitlines() if not row.startswith("#")])[:, :7]


def train_without_reshard(folder):
    """Train as a rank whose averages are swapped in without dropping gathered weights."""
    with mock.patch("deepmd_ema.averaging.bank.reshard"):
        train_here(folder, {})


def test_gathered_weights_do_not_hide_the_average_in_a_validation(tmp_path, water_like, water_like_valid):
    folders = [tmp_path / name for name in ("whole", "sharded", "trapped")]
    for folder, stage in zip(folders, (0, 2, 2)):
        config = tiny_input([water_like], [water_like_valid], num_steps=10, training__zero_stage=stage, **VALIDATED)
        if folder.name == "trapped":
            folder.mkdir()
            (folder / "input.json").write_text((folders[1] / "input.json").read_text())
            run_ranks(2, train_without_reshard, str(folder))
        else:
            train(folder, 2, config)
    live, average = ([rows_of(folder / name) for folder in folders] for name in ("val.log", "val_ema.log"))
    assert (live[0] == live[1]).all()
    assert (average[0] == average[1]).all()
    assert (average[1] != live[1]).any()
    # this is what would be seen, and what the assertions above are there for
    assert (average[2] == live[2]).all()


def most_memory(folder):
    """Train as a rank; return by what happened how much memory (bytes) it took for a while, on top of what it holds."""
    from deepmd_ema.distributed import world
    from deepmd_ema.training.trainer import Callback

    growth = {}
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once

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
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no way to ask for the largest memory")
def test_a_rank_that_writes_nothing_never_takes_the_memory_of_a_whole_model(tmp_path, water_like, water_like_valid):
    config = tiny_input(
        [water_like], [water_like_valid], num_steps=4, type_map=("O", "H", "C", "N"), training__zero_stage=3,
        model__fitting_net__neuron=[1000, 1000], **{**VALIDATED, "validating__validation_freq": 4},
    )  # fmt: skip
    (tmp_path / "input.json").write_text(json.dumps(config))
    grown = run_ranks(2, most_memory, str(tmp_path))[1].value
    whole = sum(t.nbytes for t in load(tmp_path / "model.ckpt-4.pt")["model"].values())
    assert grown.keys() == {("validation", 4), ("checkpoint", 4)}
    for growth in grown.values():
        assert whole / 5 < growth < whole  # one of the five nets is gathered at a time


def train_and_part(folder):
    """Train as a rank; return how many DDP modules are left when the process group goes."""
    from torch.nn.parallel import DistributedDataParallel

    left = []
    collect = gc.collect

    def collect_and_count():
        collect()
        left.append(sum(isinstance(thing, DistributedDataParallel) for thing in gc.get_objects()))

    with mock.patch("deepmd_ema.distributed.world.gc.collect", collect_and_count):
        train_here(folder, {})
    return left


@pytest.mark.parametrize("stage", [0, 1])
def test_nothing_of_a_run_outlives_its_process_group(tmp_path, water_like, stage):
    """Else it ends the group holding the interpreter lock that the group's threads may want: now and then for ever."""
    config = tiny_input([water_like], num_steps=2, training__zero_stage=stage)
    (tmp_path / "input.json").write_text(json.dumps(config))
    assert [ended.value for ended in run_ranks(2, train_and_part, str(tmp_path))] == [[0], [0]]


class Drift(Callback):
    """Changes the last bit of one weight of one rank after a step; step 0 is before the first one."""

    def __init__(self, rank, step):
        self.rank, self.step = rank, step

    def on_start(self, trainer):
        if self.step == 0:
            self.after_update(trainer)

    def after_update(self, trainer):
        if trainer.step == self.step and trainer.world.rank == self.rank:
            weight = dict(trainer.saver.builder.models.named_parameters())["fitting.nets.1.layers.0.weight"]
            with torch.no_grad():
                weight.copy_(torch.nextafter(weight, weight + 1))


@pytest.mark.parametrize(("stage", "rank", "at", "noticed"), [(0, 2, 3, 4), (1, 1, 4, 4), (0, 1, 0, 0)])
def test_a_rank_that_holds_another_weight_ends_the_run_unsaved(tmp_path, water_like, stage, rank, at, noticed):
    config = tiny_input([water_like], num_steps=6, training__zero_stage=stage, training__save_freq=2)
    ended = train(tmp_path, 3 if rank == 2 else 2, config, may_fail=True, callback=Drift(rank, at))
    assert [e.error for e in ended] == ["UserError"] + ["ReportedElsewhere"] * (len(ended) - 1)
    for words in (
        f"step {noticed}: rank {rank} holds other weights than rank 0", "fitting.nets.1.layers.0.weight",
        "training.zero_stage 1",
    ):  # fmt: skip
        assert words in ended[0].message
    assert [file.name for file in tmp_path.glob("model.ckpt-*.pt")] == ["model.ckpt-2.pt"] * (noticed > 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_is_not_finite_ends_all_ranks_and_changes_nothing(tmp_path, water_like, stage):
    wild = {"learning_rate__start_lr": 1e200, "learning_rate__stop_lr": 1e199, "training__max_ckpt_keep": 0}
    config = tiny_input(
        [water_like], num_steps=60, training__zero_stage=stage, training__save_freq=1, training__enable_ema=True, **wild
    )
    ended = train(tmp_path, 2, config, may_fail=True)
    assert sorted(e.error for e in ended) == ["DivergedError", "ReportedElsewhere"]
    (said,) = [e for e in ended if e.error == "DivergedError"]
    assert re.search(r"step \d+: .*not finite. Frames of the batch: .*water_like frame \d+", said.message)
    files = list(tmp_path.glob("model*.ckpt-*.pt"))
    assert files
    for file in files:
        assert all(torch.isfinite(t).all() for t in load(file)["model"].values()), file


@pytest.mark.parametrize("size", [2, "mixed:2", "mix:20"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_union_of_the_ranks_in_an_epoch_is_every_frame_once_from_any_place_on(ranks, size):
    frames, atoms = (16, 9, 10, 1), (12, 7, 10, 5)
    samplers = [Sampler(frames, atoms, size, seed=3, rank=r, world_size=ranks) for r in range(ranks)]
    length = samplers[0].batches_per_epoch
    for epoch in range(3):
        seen = []
        for n in range(epoch * length, (epoch + 1) * length):
            again = [Sampler(frames, atoms, size, seed=3, rank=r, world_size=ranks) for r in range(ranks)]
            assert [s.batch(n) for s in samplers] == [s.batch(n) for s in again]
            seen += [frame for s in samplers if not s.is_repeat(n) for frame in s.batch(n)]
        assert sorted(seen) == [(s, k) for s, number in enumerate(frames) for k in range(number)]


def threads_when_memory_is_set_up(folder):
    """Return the number of threads of the process, and whether gloo runs, at the call of ``keep_freed_memory``."""
    from deepmd_ema.distributed import world

    seen = []

    def look():
        seen.append((len(os.listdir("/proc/self/task")), torch.distributed.is_initialized()))

    with mock.patch.object(world, "keep_freed_memory", look):
        train_here(folder, {})
    return seen


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no /proc")
def test_mallopt_is_called_before_any_thread_is_started(tmp_path, water_like):
    (tmp_path / "input.json").write_text(json.dumps(tiny_input([water_like], num_steps=1)))
    for ended in run_ranks(2, threads_when_memory_is_set_up, str(tmp_path)):
        assert ended.value == [(1, False)]


def fail_in_a_body_inside_another():
    """Fail on rank 0 only, two bodies deep that all ranks run."""
    with open_world("cpu", find_launch()) as world, world.all_ranks_ok():
        world.broadcast_from_rank0(lambda: refuse("no"))


def refuse(message):
    raise UserError(message)


def test_a_mistake_that_all_ranks_know_of_is_reported_at_once_by_the_rank_that_made_it():
    """Without g++ a compiled run of two ranks reported after 10 s that rank 0 was killed, and not why."""
    ended = run_ranks(2, fail_in_a_body_inside_another, may_fail=True)
    assert [(e.error, e.message) for e in ended] == [("UserError", "no"), ("ReportedElsewhere", "")]
