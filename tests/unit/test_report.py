"""Output of a run for people: tables byte for byte, restarts, the bar, the split of the time, log
messages.
"""

import io
import logging
import math
import sys
import time
from itertools import product
from pathlib import Path

import pytest

from deepmd_ema.config.outputs import Due
from deepmd_ema.report.curves import LcurveFile, ValidationLog
from deepmd_ema.report.log import Progress, RunTimes, set_up_logging
from deepmd_ema.report.table import significant

TABLES = Path(__file__).parents[1] / "golden" / "tables"
# written by `dp --pt train` of DeePMD-kit 3.2.0 (12 steps, disp_freq 4, validation_freq 4, se_e2_a
# on random frames)
LCURVE = (TABLES / "lcurve.txt").read_text(encoding="utf-8")
LCURVE_WITHOUT_VALIDATION = (TABLES / "lcurve_without_validation.txt").read_text(
    encoding="utf-8"
)
VAL_LOG = (TABLES / "val.txt").read_text(encoding="utf-8")
VAL_LOG_OPEN = (TABLES / "val_wide_and_missing.txt").read_text(encoding="utf-8")
VAL_LOG_VIRIAL = (TABLES / "val_virial.txt").read_text(encoding="utf-8")
NAMES = ["rmse", "rmse_e", "rmse_f", "rmse_v"]
COLUMNS = [("", name, ("val", "trn")) for name in NAMES]


class Given:
    """Errors as a validation would give them."""

    def __init__(self, cells, last="S"):
        keys = [f"{q}:{k}" for q in ("E", "F", last) for k in ("MAE", "RMSE")]
        self.values = {key: float(cell) / 1000 for key, cell in zip(keys, cells)}

    def metric(self, name):
        return self.values.get(name, math.nan)


def write_lcurve(file, text, steps=()):
    """Write rows of ``text`` through ``file``, those of ``steps`` or all."""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        cells = line.split()
        if steps and int(cells[0]) not in steps:
            continue
        values = [float(c) for c in cells[1:-1]]
        if len(values) == 8:
            training, validation = (
                dict(zip(NAMES, values[1::2])),
                dict(zip(NAMES, values[::2])),
            )
            file.write(
                int(cells[0]), float(cells[-1]), {"": training}, {"": validation}
            )
        else:
            file.write(
                int(cells[0]), float(cells[-1]), {"": dict(zip(NAMES, values))}, {}
            )


def write_validation(log, text, steps=()):
    for line in text.splitlines():
        if line.startswith("# saved") and (
            not steps or int(line.split("ckpt-")[1].split(".")[0]) in steps
        ):
            metric, value = (
                line.split("(")[1].split()[0],
                float(line.split("= ")[1].split()[0]),
            )
            log.write_best(line.split()[4], metric, value / 1000)
        elif not line.startswith("#"):
            cells = line.split()
            if not steps or int(cells[0]) in steps:
                log.write(
                    int(cells[0]), Given(cells[1:], "V" if "V_MAE" in text else "S")
                )


@pytest.mark.parametrize("text", [LCURVE, LCURVE_WITHOUT_VALIDATION])
def test_lcurve_has_the_bytes_of_deepmd_kit(here, text):
    frames = ("val", "trn") if "_val" in text else ("trn",)
    file = LcurveFile("lcurve.out", [("", name, frames) for name in NAMES])
    write_lcurve(file, text)
    assert (
        here / "lcurve.out"
    ).read_text() == text  # before close: every row is flushed


@pytest.mark.parametrize("text", [VAL_LOG, VAL_LOG_OPEN, VAL_LOG_VIRIAL])
def test_val_log_has_the_bytes_of_deepmd_kit(here, text):
    log = ValidationLog("val.log", 12, "V:RMSE" if "V_MAE" in text else "E:MAE")
    write_validation(log, text)
    assert (here / "val.log").read_text(encoding="utf-8") == text


def test_the_columns_of_tasks_have_the_bytes_that_deepmd_kit_writes(here):
    """Tasks stand in their own order; one without validation data has columns of training only."""
    both = ("val", "trn")
    columns = [
        ("water", "rmse", both),
        ("water", "rmse_f", both),
        ("ice", "rmse", ("trn",)),
    ]
    file = LcurveFile("lcurve.out", columns)
    file.write(
        100,
        1e-3,
        {"water": {"rmse": 1.0, "rmse_f": 2.0}, "ice": {"rmse": 3.0}},
        {"water": {"rmse": 4.0}},
    )
    names = [
        ("rmse_val_water", "rmse_trn_water"),
        ("rmse_f_val_water", "rmse_f_trn_water"),
        ("rmse_trn_ice",),
    ]
    values = [
        ("   4.00e+00", "   1.00e+00"),
        ("        nan", "   2.00e+00"),
        ("   3.00e+00",),
    ]
    header, _, row = (here / "lcurve.out").read_text().splitlines()
    assert (
        header
        == "# step "
        + "".join("  " + "".join(f" {n:>11}" for n in pair) for pair in names)
        + "   lr      "
    )
    assert (
        row
        == "    100"
        + "".join("  " + "".join(f" {v}" for v in pair) for pair in values)
        + "    1.0e-03"
    )


def test_rows_after_the_restored_step_are_cut_and_written_again_under_one_header(here):
    for torn in ("", "     16      5.0", "# step     "):
        (here / "lcurve.out").write_text(LCURVE + torn)
        file = LcurveFile("lcurve.out", COLUMNS)
        file.cut_after(5)
        assert (here / "lcurve.out").read_text() == "".join(
            LCURVE.splitlines(keepends=True)[:4]
        )
        write_lcurve(file, LCURVE, steps=(8, 12))
        assert (here / "lcurve.out").read_text() == LCURVE


def test_a_second_header_is_written_once_for_other_columns(here, caplog):
    (here / "lcurve.out").write_text(LCURVE)
    other = LcurveFile("lcurve.out", [("", "mae_e", ("trn",))])
    other.cut_after(5)
    other.write(6, 1e-3, {"": {"mae_e": 1.0}}, {})
    text = (here / "lcurve.out").read_text()
    assert text.endswith(f"{other.header}      6      1.00e+00    1.0e-03\n")
    again = LcurveFile("lcurve.out", [("", "mae_e", ("trn",))])
    again.cut_after(6)
    assert (here / "lcurve.out").read_text() == text
    assert len(caplog.records) == 1
    # and the first columns again
    LcurveFile("lcurve.out", COLUMNS).cut_after(6)
    header = "".join(LCURVE.splitlines(keepends=True)[:2])
    assert (here / "lcurve.out").read_text() == text + header


def test_best_lines_of_later_steps_are_cut_from_val_log(here):
    for torn in ("", "# saved best checkpoint: best.ck"):
        (here / "val.log").write_text(VAL_LOG + torn)
        log = ValidationLog("val.log", 12)
        log.cut_after(8)
        assert (here / "val.log").read_text() == "".join(
            VAL_LOG.splitlines(keepends=True)[:6]
        )
        write_validation(log, VAL_LOG, steps=(12,))
        assert (here / "val.log").read_text() == VAL_LOG


@pytest.mark.parametrize(
    "before", [None, "", "# st", LCURVE.splitlines(keepends=True)[0]]
)
def test_a_restart_without_a_whole_file_starts_it_with_a_header(here, before):
    if before is not None:
        (here / "lcurve.out").write_text(before)
    file = LcurveFile("lcurve.out", COLUMNS)
    file.cut_after(3)
    write_lcurve(file, LCURVE, steps=(4,))
    lines = LCURVE.splitlines(keepends=True)
    assert (here / "lcurve.out").read_text() == lines[0] + lines[1] + lines[3]


# progress, times, messages


@pytest.fixture
def clock(monkeypatch):
    """A list of one number: what the clock says."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def bar_text(monkeypatch, progress):
    """Return the last state of the bar of 100 steps after step 40, on a terminal of any width."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress.advance(39)
    progress._bar.ncols, progress._bar.dynamic_ncols = None, None
    progress.advance(40)
    progress._bar.refresh()
    progress.close()
    return stream.getvalue().rstrip().rpartition("\r")[2]


def show(progress, step):
    errors = {"": {"rmse_e": 0.2, "rmse": 41.9}}
    progress.show(
        step, 1e-3, {"train": errors, "valid": {"": {"rmse": 35.0, "rmse_f": 0.0661}}}
    )


def test_each_of_several_tasks_has_a_line_of_its_own(caplog, monkeypatch):
    """All of them was in one line, sorted by column: rmse_e_ice, rmse_e_water, rmse_f_ice, ..."""
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(100, RunTimes(), interactive=True)
    progress.advance(1)
    errors = {
        "water": {"rmse": 2.0, "rmse_e": 1.0, "rmse_ae": 0.5},
        "ice": {"rmse": 3.0, "rmse_f": 3e-4},
        "steam": {},
    }
    progress.show(
        1,
        1e-3,
        {
            "train": errors,
            "valid": {"water": {}, "ice": {"rmse_v": 4.0}},
            "ema": errors,
        },
    )
    progress.close()
    assert [r.getMessage() for r in caplog.records] == [
        "  1  water  train E 1000 ae 500  ema E 1000 ae 500  lr 1.0e-03",
        "  1  ice  train F 0.300  valid V 4000  ema F 0.300  lr 1.0e-03",
    ]


def take_steps(times, clock, steps, seconds):
    for _ in range(steps):
        with times.of("step"):
            clock[0] += seconds


def test_the_time_left_has_the_validations_and_checkpoints_that_are_due(clock):
    """It followed from the intervals so far, and jumped when the first validation came."""
    due = {
        "validation": Due(range(40, 101, 40), 100),
        "checkpoint": Due(range(100, 101), 100),
    }
    times = RunTimes(due, expected={"validation": 8.0})
    assert times.left(0, 100) is None  # nothing is known yet
    take_steps(times, clock, 2, 9.0)  # they prepare memory
    assert times.left(2, 100) is None
    take_steps(times, clock, 18, 0.5)
    assert times.left(20, 100) == 80 * 0.5 + 3 * 8 * 0.5
    take_steps(times, clock, 20, 0.5)
    with times.of("validation"):
        clock[0] += 6.0
    with times.of("checkpoint"):
        clock[0] += 1.0
    assert times.left(40, 100) == pytest.approx(60 * 0.5 + 2 * 6.0 + 1.0)
    assert times.step_seconds() == pytest.approx(0.5)
    take_steps(times, clock, 60, 0.5)
    assert times.left(100, 100) == 0.0


def test_the_bar_shows_the_first_average_or_live_weights_and_each_task(monkeypatch):
    progress = Progress(100, RunTimes(), interactive=True)
    progress.show_validation(30, {"live": Given([1, 2, 3, 1234.5, 5, 6])})
    assert bar_text(monkeypatch, progress).endswith("40/100, live F 1230 meV/Å")
    progress = Progress(100, RunTimes(), interactive=True)
    rows = {
        f"{task} {name}": k
        for k, (name, task) in enumerate(
            product(("live", "ema", "swa"), ("ice", "water"))
        )
    }
    progress.show_validation(
        30, {name: Given([1, 2, 3, k, 5, 6]) for name, k in rows.items()}
    )
    assert bar_text(monkeypatch, progress).endswith(
        "40/100, ema F ice 2.00, water 3.00 meV/Å"
    )


def test_without_a_terminal_a_line_comes_every_minute_that_has_no_row(
    caplog, clock, monkeypatch
):
    caplog.set_level(logging.INFO)
    times = RunTimes()
    monkeypatch.setattr(times, "left", lambda step, num_steps: 30.0)
    monkeypatch.setattr(times, "step_seconds", lambda: 0.25)
    progress = Progress(100, times, interactive=False)
    for step in range(1, 101):
        clock[0] += 25.0 if step < 10 else 1.0
        progress.advance(step)
        if step == 5:
            show(progress, step)
    lines = [r.getMessage() for r in caplog.records if "of 100 steps" in r.getMessage()]
    assert [int(line.split()[0]) for line in lines] == [3, 8, 45]
    assert lines[0] == "  3  of 100 steps, 00:30 left, 0.25 s/step"


def test_a_full_validation_is_one_line_for_each_task_with_stars_at_the_best(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(10, RunTimes(), interactive=False)
    results = {
        "live": Given([94, 115.17, 896, 1103, "nan", "nan"]),
        "ema": Given([1, 2, 3, 4, 5, 6]),
    }
    progress.show_validation(4, results, ["ema"])
    progress.show_validation(
        10, {f"ice {name}": errors for name, errors in results.items()}, ["ice live"]
    )
    assert [r.getMessage() for r in caplog.records] == [
        " 4  full  live E 115 F 1100  ema* E 2.00 F 4.00",
        "10  ice  full  live* E 115 F 1100  ema E 2.00 F 4.00",
    ]


def test_messages_do_not_break_the_bar(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("INFO")
    progress = Progress(20, RunTimes(), interactive=True)
    for step in range(1, 21):
        progress.advance(step)
        if step % 10 == 0:
            show(progress, step)
            logging.getLogger("deepmd_ema.training").info("saved model.ckpt-10.pt")
    progress.close()
    text = stream.getvalue()
    assert "20/20" in text
    for line in text.replace("\r", "\n").splitlines():
        assert not ("saved" in line and "step/s" in line)
        assert not ("train" in line and "|" in line)


def test_the_time_of_an_interval_is_split_by_category(clock, caplog):
    caplog.set_level(logging.INFO)
    times = RunTimes()
    for _ in range(2):
        for category, seconds in {
            "data": 2,
            "step": 95,
            "validation": 2,
            "checkpoint": 1,
        }.items():
            with times.of(category):
                clock[0] += seconds
        assert times.split() == "data 2 % | step 95 % | validation 2 % | checkpoint 1 %"
    with times.of("data"):
        clock[0] += 4
    assert times.split() == "data 100 % | step 0 % | validation 0 % | checkpoint 0 %"
    assert not caplog.records  # four seconds are mostly the start
    for _ in range(2):
        with times.of("data"):
            clock[0] += 30
        clock[0] += 70
        assert times.split() == "data 30 % | step 0 % | validation 0 % | checkpoint 0 %"
    assert caplog.text.count("30 % of the time was spent waiting for data") == 1
    assert times.waiting_share() == (2 + 4 + 2 * 30) / (
        404 - 2
    )  # the first batch is a part of the start


def test_numbers_have_an_exponent_only_where_a_run_has_failed():
    numbers = (0.0, -0.00012345, 94.363, 123456.78, 987654321012.0, 1.5e63, math.inf)
    shown = [
        "0.000",
        "-0.0001234",
        "94.36",
        "123500",
        "987700000000",
        "1.500e+63",
        "inf",
    ]
    assert [significant(number, 4) for number in numbers] == shown


def test_messages_go_to_the_terminal_and_the_log_file_by_level(here, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("DEBUG", here / "logs" / "train.log")
    set_up_logging(
        "INFO", here / "logs" / "train.log"
    )  # again, without doubling the messages
    logger = logging.getLogger("deepmd_ema.some.module")
    logger.debug("hidden")
    logger.info("plain")
    logger.warning("careful")
    for text in (stream.getvalue(), (here / "logs" / "train.log").read_text()):
        first, second = text.splitlines()
        assert first.endswith("] plain")
        assert second.endswith("] WARNING: careful")
