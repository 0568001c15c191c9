"""Ranks on several CUDA devices, connected by NCCL: the numbers of one process, restarts, other
stages and ranks.
"""

import json
import os
import shutil
from collections import Counter
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from gpu_counts import counted_waits
from helpers import assert_same, assert_same_files
from parallel_cases import BANK, STEPS, WITH_BANK, assert_same_run, config_of, load
from parallel_runs import run_ranks, train

from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HALF = STEPS // 2
# of the largest number of a tensor, after all steps: rates of Adam on CUDA are in float32
ROUNDING = 1e-7
STAGES = (0, 1, 2, 3)
OTHER = [
    ((0, 2), (3, 2)),
    ((3, 2), (0, 1)),
    ((1, 2), (2, 2)),
    ((2, 2), (1, 2)),
    ((0, 1), (3, 2)),
]  # (stage, ranks)
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason="two GPUs: python tests/pretend_cuda -m pytest -m gpu pretends them",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory, water_like, water_like_valid):
    """Return a function that gives the folder of a run, unbroken or restarted from the middle of
    another run.
    """
    base = tmp_path_factory.mktemp("ranks")

    @cache
    def run(place, origin=None, num_steps=STEPS, device="cuda"):
        folder, (stage, ranks), how = (
            base / f"{place}{origin}{num_steps}{device}",
            place,
            {"device": device},
        )
        config = config_of(
            [water_like], water_like_valid, stage, ranks, WITH_BANK, num_steps
        )
        if origin is not None:
            shutil.copytree(run(origin), folder, symlinks=True)
            other = place != origin or num_steps != STEPS
            how |= {"restart": f"model.ckpt-{HALF}.pt", "allow_config_change": other}
        if ranks > 1:
            train(folder, ranks, config, **how)
            return folder
        folder.mkdir(exist_ok=True)
        (folder / "input.json").write_text(json.dumps(config))
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            run_training("input.json", **how)
        return folder

    return run


@two_gpus
@pytest.mark.parametrize("stage", STAGES)
def test_two_gpus_train_as_one_process_on_a_cpu_with_all_the_frames(made, stage):
    assert_same_run(made((stage, 2)), made((0, 1), device="cpu"), ROUNDING)


@two_gpus
@pytest.mark.parametrize("stage", STAGES)
def test_a_restart_on_two_gpus_continues_to_the_last_bit(made, stage):
    names = assert_same_files(made((stage, 2)), made((stage, 2), (stage, 2)))
    assert {
        "lcurve_slow.out",
        "val_p05.log",
        "snapshots/model_p05.ckpt-20.pt",
        "model_whole.ckpt-20.pt",
    } <= names


@two_gpus
@pytest.mark.parametrize(("origin", "place"), OTHER, ids=str)
def test_a_checkpoint_of_gpus_is_the_same_bits_at_another_stage_on_other_ranks(
    made, origin, place
):
    before, after = made(origin), made(place, origin, HALF)
    averages = ["ema", *(entry["name"] for entry in BANK)]
    for name in (
        f"model.ckpt-{HALF}.pt",
        *(f"model_{average}.ckpt-{HALF}.pt" for average in averages),
    ):
        old, new = load(before / name), load(after / name)
        for part in (
            "config",
            "num_steps",
            "digest",
        ):  # the digest is of the other two as well
            del old[part], new[part]
        assert_same(old, new, name)


def waits_here(folder):
    """Train in ``folder`` as one rank; return the device and the waits of steps in which nothing is
    due.
    """
    os.chdir(folder)
    found, devices = Counter(), set()

    class Watch(Callback):
        @contextmanager
        def during(self, trainer, phase):
            number = trainer.step + 1
            devices.add(str(trainer.world.device))
            if phase != "step" or number < 5 or number == trainer.num_steps:
                yield
                return
            with counted_waits() as waits:
                yield
            found.update(waits)

    run_training("input.json", device="cuda", callback=Watch())
    return devices, dict(found)


@two_gpus
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_of_two_ranks_does_not_wait_for_the_gpu(
    tmp_path, water_like, water_like_valid, stage
):
    rare = {f"training__{name}_freq": 100 for name in ("disp", "save")}
    config = config_of(
        [water_like],
        water_like_valid,
        stage,
        2,
        {"training__enable_ema": True, **rare},
        num_steps=9,
    )
    (tmp_path / "input.json").write_text(json.dumps(config))
    for rank, ended in enumerate(run_ranks(2, waits_here, str(tmp_path))):
        assert ended.value == ({f"cuda:{rank}"}, {})
