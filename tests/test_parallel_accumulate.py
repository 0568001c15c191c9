"""Several batches of a step on two processes, with groups of parameters: every stage trains as one process does."""

import json
from functools import cache
from unittest import mock

import pytest
import torch
from parallel_runs import run_ranks, train, train_here
from test_parallel import STAGES, assert_near, config_of

pytestmark = pytest.mark.timeout(480)

STEPS, ACCUMULATE = 4, 3
GROUPS = [
    {"pattern": "fitting.*.bias", "lr_scale": 3, "weight_decay": 0},
    {"pattern": "descriptor.*", "lr_scale": 0.1},
]
KINDS = {"AdamW": {"type": "AdamW"}, "HybridMuon": {"type": "HybridMuon", "enable_gram": False}}
OPTIONS = {
    "model__fitting_net__neuron": [7, 7],  # 7 rows are distributed unevenly
    "model__descriptor__interpolate": "never",
    "training__accumulate": ACCUMULATE,
    "training__enable_ema": True,
    "training__gradient_max_norm": 0.5,
}
FILES = (f"model.ckpt-{STEPS}.pt", f"model_ema.ckpt-{STEPS}.pt")


@pytest.fixture(scope="module")
def config(water_like, open_like, mixed_like, water_like_valid):
    """Return a function that makes an input: frames of three sizes, some without virials, in each step."""

    def made(kind, stage, ranks):
        optimizer = {**KINDS[kind], "weight_decay": 0.05, "groups": GROUPS}
        options = {**OPTIONS, "optimizer": optimizer}
        found = config_of([water_like, open_like, mixed_like], water_like_valid, stage, ranks, options, STEPS)
        found["training"]["training_data"]["batch_size"] = f"mixed:{4 // ranks}"
        return found

    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory, config):
    """Return a function that gives the folder of a run: run(kind, stage, ranks)."""
    base = tmp_path_factory.mktemp("accumulate")

    @cache
    def made(kind, stage, ranks):
        folder = base / f"{kind}-{stage}-{ranks}"
        train(folder, ranks, config(kind, stage, ranks))
        return folder

    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_follows_one_process_with_all_the_frames(run, kind, stage):
    for name in FILES:
        left, right = (torch.load(folder / name) for folder in (run(kind, stage, 2), run(kind, 0, 1)))
        assert_near(left, right, tolerance=1e-9 if kind == "AdamW" else 1e-6)


def train_and_count(folder, how):
    """Train as one rank; return how many batches were added up without an exchange of gradients."""
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.no_sync
    with mock.patch.object(DistributedDataParallel, "no_sync", autospec=True, side_effect=original) as called:
        train_here(folder, how)
    return called.call_count


def test_gradients_are_exchanged_once_for_each_step(tmp_path, config):
    (tmp_path / "input.json").write_text(json.dumps(config("AdamW", 0, 2)))
    ended = run_ranks(2, train_and_count, str(tmp_path), {})
    assert [end.value for end in ended] == [STEPS * (ACCUMULATE - 1)] * 2
