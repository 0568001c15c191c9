"""Faults that are easily made when weights are sharded: averages that are not seen, memory, and the end of a run."""

import ctypes
import gc
import json
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import tiny_input, validated
from parallel_runs import run_ranks, train, train_here
from test_train import load

from deepmd_ema.training.trainer import Callback

pytestmark = pytest.mark.timeout(480)


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
        model__fitting_net__neuron=[1000, 1000], **validated(4),
    )  # fmt: skip
    (tmp_path / "input.json").write_text(json.dumps(config))
    grown = run_ranks(2, most_memory, str(tmp_path))[1].value
    whole = sum(t.nbytes for t in load(tmp_path / "model.ckpt-4.pt")["model"].values())
    assert grown.keys() == {("validation", 4), ("checkpoint", 4)}
    for growth in grown.values():
        assert whole / 5 < growth < whole  # one of the five nets is gathered at a time


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


@pytest.mark.parametrize(("stage", "rank", "at", "noticed"), [(0, 2, 3, 4), (0, 1, 0, 0)])
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
