"""One tiny run through the commands: train, freeze, test, show, plot; every number is the same everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import tiny_input

from deepmd_ema import checkpoint, cli
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.report.curves import Curve

STEPS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory, water_like, water_like_valid):
    folder = tmp_path_factory.mktemp("run")
    config = tiny_input([water_like], [water_like_valid], num_steps=STEPS, training__enable_ema=True,
        training__ema_decay=0.8, training__save_freq=6, validating__full_validation=True,
        validating__ema_full_validation=True, validating__validation_freq=4, validating__full_val_start=0,
        validating__validation_metric="F:RMSE")  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "input.json").write_text(json.dumps(config))
        assert cli.main(["train", "input.json", "--device", "cpu", "-v", "ERROR"]) == 0
    return folder


@pytest.mark.parametrize("weights", ["live", "ema"])
def test_the_best_file_gives_its_logged_metric_again_to_the_last_bit(run, water_like_valid, weights):
    payload = checkpoint.load(run / "model.ckpt.pt")
    value, step = payload["best"][weights]["records"][0]
    suffix = "" if weights == "live" else "_ema"
    found = measure(run / f"best{suffix}.ckpt-{step}.t-1.pt", [water_like_valid]).total
    assert found.metric("F:RMSE") == value


@pytest.mark.parametrize("use_average", [False, True])
def test_the_log_the_test_and_the_frozen_file_say_the_same(run, water_like_valid, tmp_path, monkeypatch, use_average):
    monkeypatch.chdir(run)
    words = ["freeze", "-o", str(tmp_path / "m.dp"), *(["--use-ema"] if use_average else [])]
    assert cli.main(words) == 0
    inside = measure(run / "model.ckpt.pt", [water_like_valid], use_average=use_average).total.summary()
    frozen = measure(tmp_path / "m.dp", [water_like_valid]).total.summary()
    assert str(inside) == str(frozen)
    log = Curve(run / ("val_ema.log" if use_average else "val.log"))
    assert log.steps[-1] == STEPS
    np.testing.assert_allclose(log.columns["F_RMSE(meV/Å)"][-1], 1000 * inside["rmse_f"], rtol=1e-4)


def shell(line, folder, **environ):
    """Run ``dp-ema`` with the words and redirections of ``line`` in a shell."""
    return subprocess.run(["sh", "-c", f'"$0" -m deepmd_ema {line}', sys.executable], cwd=folder, capture_output=True,
                          timeout=100, env={**os.environ, **environ})  # fmt: skip


@pytest.mark.parametrize("words", ["test -m model.ckpt.pt -s {}", "doc"])
def test_a_full_disk_under_the_results_is_reported(run, water_like_valid, words):
    done = shell(f"{words.format(water_like_valid)} > /dev/full", run)
    assert done.returncode == 2
    assert re.fullmatch(rb"dp-ema: .*No space left on device.*Make room on the disk.*\n", done.stderr)


@pytest.mark.parametrize("streams", ["<&- >&- 2>&-", "2>/dev/full"])
def test_a_run_continues_without_its_terminal(run, tmp_path, streams):
    (tmp_path / "input.json").write_text((run / "input.json").read_text())
    done = shell(f"train input.json --device cpu {streams}", tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert checkpoint.load(tmp_path / "model.ckpt.pt")["step"] == STEPS
    for file in ("lcurve.out", "out.json"):  # nothing else was written into the files that took their numbers
        assert (tmp_path / file).read_bytes() == (run / file).read_bytes()


def test_an_error_without_a_terminal_has_its_exit_code(tmp_path):
    assert shell("train nothing.json 2>/dev/full", tmp_path).returncode == 2
    assert shell("train nothing.json 2>&-", tmp_path).returncode == 2
