"""Learning rates: DeePMD-kit's numbers, ends of a run, wrong options."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

from deepmd_ema.config.schema.optim import (
    CosineScheduleConfig,
    ExpScheduleConfig,
    InvSqrtScheduleConfig,
    WsdScheduleConfig,
)
from deepmd_ema.errors import ConfigError
from deepmd_ema.optim.schedule import build_schedule

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "schedule.json").read_text()
)
KINDS = {
    "exp": ExpScheduleConfig,
    "cosine": CosineScheduleConfig,
    "wsd": WsdScheduleConfig,
    "invsqrt": partial(InvSqrtScheduleConfig, decay_phase_ratio=0.2),
}
SAME_MATH = 1e-12


def make(num_steps, type="exp", **keys):
    return build_schedule(KINDS[type](**keys), num_steps)


@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: json.dumps(case["config"])
)
def test_rates_are_those_of_deepmd_kit(case):
    schedule = make(**case["config"])
    assert [schedule(step) for step in case["steps"]] == pytest.approx(
        case["values"], rel=SAME_MATH, abs=0
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_at_start_lr_and_ends_at_stop_lr(kind):
    schedule = make(4000, kind, start_lr=1e-3, stop_lr=1e-6)
    assert schedule(0) == 1e-3
    assert schedule(4000) == pytest.approx(1e-6)
    values = [schedule(step) for step in range(4001)]
    assert values == sorted(values, reverse=True)
    schedule = make(
        1000, kind, start_lr=1e-3, warmup_steps=100, warmup_start_factor=0.1
    )
    assert schedule(0) == pytest.approx(1e-4)
    assert schedule(50) == pytest.approx(5.5e-4)
    assert schedule(100) == 1e-3


def test_what_no_run_can_follow_is_refused():
    with pytest.raises(
        ConfigError, match="warmup_steps = 100: the run has only 100 steps"
    ):
        make(100, start_lr=1e-3, warmup_steps=100)
    with pytest.raises(ConfigError, match="inverse_linear never reaches 0"):
        make(100, "wsd", start_lr=1e-3, stop_lr=0.0)


def test_the_inverse_root_is_that_of_the_steps_after_the_warm_up_whatever_the_length_of_the_run():
    options = {"start_lr": 2e-3, "warmup_steps": 50, "a": 300.0}
    rates, longer = (
        build_schedule(InvSqrtScheduleConfig(**options), steps)
        for steps in (1000, 9000)
    )
    for step in (50, 51, 350, 999):
        assert rates(step) == pytest.approx(
            2e-3 * math.sqrt(300 / (300 + step - 50)), rel=SAME_MATH
        )
        assert rates(step) == longer(step)
    assert rates(350) == pytest.approx(2e-3 / math.sqrt(2), rel=SAME_MATH)


@pytest.mark.parametrize("kind", ["inverse_linear", "cosine", "linear"])
def test_an_inverse_root_with_a_decay_falls_from_where_it_is_to_stop_lr(kind):
    options = {"start_lr": 1e-3, "a": 100.0}
    config = InvSqrtScheduleConfig(
        **options, stop_lr=1e-6, decay_phase_ratio=0.25, decay_type=kind
    )
    rate, without = (
        build_schedule(config, 400),
        build_schedule(InvSqrtScheduleConfig(**options), 400),
    )
    assert [rate(step) for step in range(301)] == pytest.approx(
        [without(step) for step in range(301)], rel=SAME_MATH
    )
    assert rate(400) == pytest.approx(1e-6, rel=SAME_MATH)
    expected = {
        "inverse_linear": 2 / (1e6 + 1 / 5e-4),
        "cosine": 2.505e-4,
        "linear": 2.505e-4,
    }
    assert rate(350) == pytest.approx(expected[kind], rel=1e-9)
