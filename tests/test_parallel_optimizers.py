"""Optimizers on several processes: every stage trains as one process does, and takes up the state of any other."""

from functools import cache

import pytest
import torch
from parallel_runs import train
from test_parallel import assert_near, config_of

pytestmark = pytest.mark.timeout(480)

STEPS, HALF = 8, 4
GROUPS = [{"pattern": "fitting.*.bias", "lr_scale": 3, "weight_decay": 0}, {"pattern": "descriptor.*", "lr_scale": 0.1}]
KINDS = {
    "AdamW": {"type": "AdamW", "weight_decay": 0.05, "groups": GROUPS},  # with steps of several batches
    "AdaMuon": {"type": "AdaMuon"},
    "HybridMuon": {"type": "HybridMuon", "enable_gram": False},
    "AdamWScheduleFree": {"type": "AdamWScheduleFree"},
    "SOAP": {"type": "SOAP", "precondition_frequency": 3},
}
OPTIONS = {
    "model__fitting_net__neuron": [7, 7],  # 7 rows are distributed unevenly
    "training__enable_ema": True,
    "training__gradient_max_norm": 0.5,
    "training__save_freq": HALF,
}
FILES = (f"model.ckpt-{STEPS}.pt", f"model_ema.ckpt-{STEPS}.pt")


@pytest.fixture(scope="module")
def run(tmp_path_factory, water_like, open_like, mixed_like, water_like_valid):
    """Return a function that gives the folder of a run, from its beginning or from the middle of another stage's."""
    base = tmp_path_factory.mktemp("optimizers")

    @cache
    def made(kind, stage, ranks, origin=None):
        folder, how = base / f"{kind}-{stage}-{ranks}-{origin}", {}
        options, systems = {**OPTIONS, "optimizer": KINDS[kind]}, [water_like]
        if kind == "AdamW":
            options, systems = {**options, "training__accumulate": 3}, [water_like, open_like, mixed_like]
        config = config_of(systems, water_like_valid, stage, ranks, options, STEPS)
        if kind == "AdamW":
            config["training"]["training_data"]["batch_size"] = f"mixed:{4 // ranks}"
        if origin is not None:
            how = {"restart": f"model.ckpt-{HALF}.pt", "allow_config_change": True}
        train(folder, ranks, config, origin=None if origin is None else made(kind, origin, ranks), **how)
        return folder

    return made


def assert_same_end(left, right):
    """Weights, averages and the state of the optimizer are the same to rounding."""
    for name in FILES:
        found = [torch.load(folder / name, weights_only=True) for folder in (left, right)]
        assert_near(*found, tolerance=1e-6)  # moments of Adam beside Muon are in float32


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_stage_follows_one_process_with_all_the_frames(run, kind, stage):
    assert_same_end(run(kind, stage, 2), run(kind, 0, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("origin", "stage"), [(1, 3)])
def test_a_run_continues_at_another_stage_with_the_state_of_its_optimizer(run, kind, origin, stage):
    assert_same_end(run(kind, stage, 2, origin), run(kind, 0, 1))


def test_the_kalman_filter_is_refused_on_several_processes(tmp_path, water_like, water_like_valid):
    options = {"optimizer": {"type": "LKF"}, "loss__start_pref_v": 0, "loss__limit_pref_v": 0}
    ended = train(tmp_path, 2, config_of([water_like], water_like_valid, 0, 2, options), may_fail=True)
    first, second = sorted(ended, key=lambda end: end.error)
    assert (first.error, second.error) == ("ConfigError", "ReportedElsewhere")
    assert 'optimizer.type = "LKF": trains in one process only, and 2 were launched' in first.message
    assert not list(tmp_path.glob("*.pt"))
