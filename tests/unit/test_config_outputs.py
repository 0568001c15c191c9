"""The plan of a run: what is done after which step, and how many files stay."""

import pytest
from helpers import tiny_input

from deepmd_ema.config import config_from_dict
from deepmd_ema.config.outputs import Schedule

EMA = {"type": "power", "name": "ema", "sigma_rel": 0.1}


def schedule_of(num_steps, **changes):
    return Schedule(
        config_from_dict(tiny_input(["data"], ["data"], **changes)), num_steps
    )


@pytest.mark.parametrize(
    ("most", "ratio", "num_steps", "every", "kept"),
    [
        (5, None, 100, 10, 5),
        (5, 0.25, 100, 10, 3),
        (5, 0.5, 100, 0, 1),
    ],
)
def test_a_keep_ratio_is_a_share_of_all_checkpoints_of_the_run(
    most, ratio, num_steps, every, kept
):
    options = {
        "training__max_ckpt_keep": most,
        "training__ckpt_keep_ratio": ratio,
        "training__save_freq": every,
    }
    assert schedule_of(num_steps, **options).num_kept() == kept
    assert schedule_of(num_steps, **options).num_kept(2) == (
        2 if ratio is None else kept
    )


def test_rows_begin_with_the_first_step_and_all_else_ends_with_the_last():
    averages = [
        {**EMA, "snapshots": True},
        {**EMA, "name": "rare", "snapshots": True, "snapshot_freq": 6},
        {**EMA, "name": "no"},
    ]
    validating = {"full_validation": True, "validation_freq": 3, "full_val_start": 0.25}
    options = {
        "training__disp_freq": 4,
        "training__save_freq": 5,
        "training__averaging": averages,
    }
    schedule = schedule_of(17, validating=validating, **options)

    def steps(due):
        return [step for step in range(1, 20) if step in due]

    assert steps(schedule.rows) == [1, 4, 8, 12, 16]
    assert steps(schedule.checkpoint) == [5, 10, 15, 17]
    assert steps(schedule.validation) == [4, 7, 10, 13, 16, 17]
    assert {name: steps(due) for name, due in schedule.snapshots.items()} == {
        "ema": [5, 10, 15, 17],
        "rare": [6, 12, 17],
    }
    never = {"full_validation": True, "full_val_start": 1}
    assert schedule_of(17, validating=never).validation is None
