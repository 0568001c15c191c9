"""Restarts on several processes: bitwise on the same ones, and from any stage and number of ranks to any other."""

from functools import cache

import pytest
import torch
from helpers import assert_same, assert_same_files
from parallel_runs import train
from test_parallel import BANK, STEPS, WITH_BANK, assert_same_run, config_of

pytestmark = pytest.mark.timeout(480)

HALF = STEPS // 2
# all best files stay, so that a restart from the middle finds those of its time
OPTIONS = {**WITH_BANK, "validating__validation_freq": 5, "validating__max_best_ckpt": 9, "training__disp_avg": True}
SAME = [(0, 2), (1, 2), (2, 2), (3, 3)]  # (stage, ranks)
OTHER = [((0, 2), (3, 3)), ((3, 3), (0, 1)), ((2, 2), (1, 3)), ((1, 2), (2, 2))]


def load(path):
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def restarted(tmp_path_factory, water_like, water_like_valid):
    """Return a function that gives the folder of a run, unbroken or restarted from the middle of another run."""
    base = tmp_path_factory.mktemp("restarts")

    @cache
    def made(place, origin=None, num_steps=STEPS):
        folder, (stage, ranks), how = base / f"{place}{origin}{num_steps}", place, {}
        config = config_of([water_like], water_like_valid, stage, ranks, OPTIONS, num_steps)
        if origin is not None:
            how = {"restart": f"model.ckpt-{HALF}.pt", "allow_config_change": place != origin or num_steps != STEPS}
        train(folder, ranks, config, origin=origin and made(origin), **how)
        return folder

    return made


@pytest.mark.parametrize("place", SAME, ids=str)
def test_a_restart_on_the_same_ranks_continues_to_the_last_bit(restarted, place):
    names = assert_same_files(restarted(place), restarted(place, place))
    assert {"lcurve_slow.out", "val_p05.log", "snapshots/model_p05.ckpt-20.pt", "model_whole.ckpt-20.pt"} <= names


@pytest.mark.parametrize(("origin", "place"), OTHER, ids=str)
def test_a_checkpoint_is_the_same_bits_after_loading_at_another_stage_on_other_ranks(restarted, origin, place):
    before, after = restarted(origin), restarted(place, origin, HALF)
    averages = ["ema", *(entry["name"] for entry in BANK)]
    for name in (f"model.ckpt-{HALF}.pt", *(f"model_{average}.ckpt-{HALF}.pt" for average in averages)):
        old, new = load(before / name), load(after / name)
        for part in ("config", "num_steps", "digest"):  # the digest is of the other two as well
            del old[part], new[part]
        assert_same(old, new, name)


@pytest.mark.parametrize(("origin", "place"), OTHER[:3], ids=str)
def test_a_run_continues_at_another_stage_on_other_ranks(restarted, origin, place):
    assert_same_run(restarted(place, origin), restarted(place))
