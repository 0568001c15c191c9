"""Learning rates: DeePMD-kit's numbers, ends of a run, wrong options."""

import json
from pathlib import Path

import pytest

from deepmd_ema.config.schema.optim import CosineScheduleConfig, ExpScheduleConfig, WsdScheduleConfig
from deepmd_ema.errors import ConfigError
from deepmd_ema.optim.schedule import build_schedule

GOLDEN = json.loads((Path(__file__).parent / "golden" / "schedule.json").read_text())
KINDS = {"exp": ExpScheduleConfig, "cosine": CosineScheduleConfig, "wsd": WsdScheduleConfig}
SAME_MATH = 1e-12


def make(num_steps, type="exp", **keys):
    return build_schedule(KINDS[type](**keys), num_steps)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: json.dumps(case["config"]))
def test_rates_are_those_of_deepmd_kit(case):
    schedule = make(**case["config"])
    assert [schedule(step) for step in case["steps"]] == pytest.approx(case["values"], rel=SAME_MATH, abs=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_starts_at_start_lr_and_ends_at_stop_lr(kind):
    schedule = make(4000, kind, start_lr=1e-3, stop_lr=1e-6)
    assert schedule(0) == 1e-3
    assert schedule(4000) == pytest.approx(1e-6)
    values = [schedule(step) for step in range(4001)]
    assert values == sorted(values, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_rises_to_start_lr_and_the_decay_begins_after_it(kind):
    schedule = make(1000, kind, start_lr=1e-3, warmup_steps=100, warmup_start_factor=0.1)
    assert schedule(0) == pytest.approx(1e-4)
    assert schedule(50) == pytest.approx(5.5e-4)
    assert schedule(100) == 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_warm_up_as_long_as_the_run_is_refused(kind):
    with pytest.raises(ConfigError, match="warmup_steps = 100: the run has only 100 steps"):
        make(100, kind, start_lr=1e-3, warmup_steps=100)


def test_an_inverse_linear_decay_to_zero_is_refused():
    with pytest.raises(ConfigError, match="inverse_linear never reaches 0"):
        make(100, "wsd", start_lr=1e-3, stop_lr=0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_of_no_steps_has_a_rate(kind):
    assert make(0, kind, start_lr=1e-3)(0) == 1e-3
