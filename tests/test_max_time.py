"""``dp-ema train --max-time``: a run that is saved and ends when its time is over."""

import json
import logging
import math
from pathlib import Path

import pytest
from helpers import assert_same_files, tiny_input
from out_of_time import OutOfTime

from deepmd_ema import cli
from deepmd_ema.training.run import run_training

STEPS = 12
VALIDATED = {
    "full_validation": True,
    "ema_full_validation": True,
    "validation_freq": 4,
    "full_val_start": 0,
    "save_best": False,
}


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, **options of the request)."""

    def run(name, **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        # a checkpoint of the last step alone, so that both runs keep the same files
        more = {"training__enable_ema": True, "training__save_freq": 0, "training__max_ckpt_keep": 1}
        config = tiny_input([water_like], [water_like_valid], num_steps=STEPS, validating=VALIDATED, **more)
        (folder / "input.json").write_text(json.dumps(config))
        return run_training("input.json", device="cpu", **how)

    return run


@pytest.mark.parametrize(("step", "in_validation"), [(5, False), (8, True)])
def test_a_run_out_of_time_is_saved_and_its_restart_ends_as_an_unbroken_run(start, caplog, step, in_validation):
    caplog.set_level(logging.INFO, "deepmd_ema")
    found = start("parts", callback=OutOfTime(step, in_validation))
    assert found.step == step
    assert f"after step {step} of {STEPS}, as the time is over; everything is saved" in caplog.text
    assert "dp-ema train --restart model.ckpt.pt" in caplog.text
    # with time of its own
    assert start("parts", restart=str(found.checkpoint), max_time=1e6).step == STEPS
    start("whole")
    assert_same_files(Path("../parts"), Path("../whole"))


def test_a_run_that_takes_its_last_step_when_the_time_is_over_has_ended(start, caplog):
    caplog.set_level(logging.INFO, "deepmd_ema")
    assert start("run", callback=OutOfTime(STEPS)).step == STEPS
    assert "the time is over" not in caplog.text
    assert len([row for row in Path("val_ema.log").read_text().splitlines() if row[:1] != "#"]) == STEPS // 4


def test_the_start_counts_and_one_step_is_taken(start):
    assert start("run", max_time=1e-9).step == 1


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("300s", 300), ("90m", 5400), ("23.5h", 84600), ("2d", 172800), ("0:01:30", 90), ("1-00:00:10", 86410)],
)
def test_a_time_has_a_unit_or_colons(text, seconds):
    assert _parsed(text) == seconds
    assert _parsed(None) == math.inf


@pytest.mark.parametrize("text", ["300", "0s", "-1h", "90:00", "1:2:3", "h", "inf", "9" * 400 + "-0:00:00"])
def test_other_times_are_refused_with_examples(text, capsys):
    assert cli.main(["train", "input.json", f"--max-time={text}"]) == 2
    assert "expected a time above 0 with its unit (300s, 90m, 23.5h, 2d), or hours:min" in capsys.readouterr().err


def _parsed(text):
    from deepmd_ema.cli.main import build_parser

    words = ["train", "input.json"] + (["--max-time", text] if text else [])
    return build_parser().parse_args(words).max_time
