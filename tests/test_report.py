"""Output of a run for people: tables byte for byte, restarts, the bar, the split of the time, log messages."""

import errno
import io
import logging
import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest

from deepmd_ema.config.outputs import Due
from deepmd_ema.errors import UserError, WriteError, counted, every_steps
from deepmd_ema.report.curves import LcurveFile, ValidationLog
from deepmd_ema.report.log import Progress, RunTimes, set_up_logging
from deepmd_ema.report.table import duration, show_metric

TABLES = Path(__file__).parent / "golden" / "tables"
# written by `dp --pt train` of DeePMD-kit 3.2.0 (12 steps, disp_freq 4, validation_freq 4, se_e2_a on random frames)
LCURVE = (TABLES / "lcurve.txt").read_text(encoding="utf-8")
LCURVE_WITHOUT_VALIDATION = (TABLES / "lcurve_without_validation.txt").read_text(encoding="utf-8")
VAL_LOG = (TABLES / "val.txt").read_text(encoding="utf-8")
VAL_LOG_OPEN = (TABLES / "val_wide_and_missing.txt").read_text(encoding="utf-8")
VAL_LOG_VIRIAL = (TABLES / "val_virial.txt").read_text(encoding="utf-8")
NAMES = ["rmse_f", "rmse", "rmse_v", "rmse_e"]


class Given:
    """Errors as a validation would give them."""

    def __init__(self, cells, last="S"):
        keys = [f"{q}:{k}" for q in ("E", "F", last) for k in ("MAE", "RMSE")]
        self.values = {key: float(cell) / 1000 for key, cell in zip(keys, cells)}

    def metric(self, name):
        return self.values.get(name, math.nan)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def fresh_logging():
    yield
    logger = logging.getLogger("deepmd_ema")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.NOTSET)


def write_lcurve(file, text, steps=()):
    """Write rows of ``text`` through ``file``, those of ``steps`` or all."""
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        cells = line.split()
        if steps and int(cells[0]) not in steps:
            continue
        values = [float(c) for c in cells[1:-1]]
        names = sorted(NAMES)
        if len(values) == 8:
            training, validation = dict(zip(names, values[1::2])), dict(zip(names, values[::2]))
            file.write(int(cells[0]), float(cells[-1]), {"": training}, {"": validation})
        else:
            file.write(int(cells[0]), float(cells[-1]), {"": dict(zip(names, values))}, {})


def write_validation(log, text, steps=()):
    for line in text.splitlines():
        if line.startswith("# saved") and (not steps or int(line.split("ckpt-")[1].split(".")[0]) in steps):
            metric, value = line.split("(")[1].split()[0], float(line.split("= ")[1].split()[0])
            log.write_best(line.split()[4], metric, value / 1000)
        elif not line.startswith("#"):
            cells = line.split()
            if not steps or int(cells[0]) in steps:
                log.write(int(cells[0]), Given(cells[1:], "V" if "V_MAE" in text else "S"))


@pytest.mark.parametrize("text", [LCURVE, LCURVE_WITHOUT_VALIDATION])
def test_lcurve_has_the_bytes_of_deepmd_kit(here, text):
    file = LcurveFile("lcurve.out", {"": NAMES}, {""} if "_val" in text else ())
    write_lcurve(file, text)
    assert (here / "lcurve.out").read_text() == text  # before close: every row is flushed


@pytest.mark.parametrize("text", [VAL_LOG, VAL_LOG_OPEN, VAL_LOG_VIRIAL])
def test_val_log_has_the_bytes_of_deepmd_kit(here, text):
    log = ValidationLog("val.log", 12, "V:RMSE" if "V_MAE" in text else "E:MAE")
    write_validation(log, text)
    assert (here / "val.log").read_text(encoding="utf-8") == text


def test_a_long_run_widens_the_step_column_of_val_log(here):
    log = ValidationLog("val.log", 1000000)
    log.write(5000, Given([1, 1, 1, 1, 1, 1]))
    lines = (here / "val.log").read_text().splitlines()
    assert lines[0].startswith("#  step   E_MAE")
    assert lines[2].startswith("   5000  ")


def test_lcurve_names_the_tasks_when_there_are_tasks(here):
    file = LcurveFile("lcurve.out", {"water": ["rmse", "rmse_e"], "ice": ["rmse"]}, {"water", "ice"})
    file.write(7, 1e-3, {"water": {"rmse": 1.0, "rmse_e": 2.0}, "ice": {"rmse": 3.0}}, {"ice": {"rmse": 4.0}})
    header, _, row = (here / "lcurve.out").read_text().splitlines()
    assert header.split()[2:] == [
        *("rmse_val_water", "rmse_trn_water", "rmse_e_val_water", "rmse_e_trn_water"),
        *("rmse_val_ice", "rmse_trn_ice", "lr"),
    ]
    assert row.split() == ["7", "nan", "1.00e+00", "nan", "2.00e+00", "4.00e+00", "3.00e+00", "1.0e-03"]


def test_the_columns_of_tasks_have_the_bytes_that_deepmd_kit_writes(here):
    """Tasks stand in their own order; one without validation data has columns of training only."""
    file = LcurveFile("lcurve.out", {"water": ["rmse_f", "rmse"], "ice": ["rmse"]}, {"water"})
    file.write(100, 1e-3, {"water": {"rmse": 1.0, "rmse_f": 2.0}, "ice": {"rmse": 3.0}}, {"water": {"rmse": 4.0}})
    names = [("rmse_val_water", "rmse_trn_water"), ("rmse_f_val_water", "rmse_f_trn_water"), ("rmse_trn_ice",)]
    values = [("   4.00e+00", "   1.00e+00"), ("        nan", "   2.00e+00"), ("   3.00e+00",)]
    header, _, row = (here / "lcurve.out").read_text().splitlines()
    assert header == "# step " + "".join("  " + "".join(f" {n:>11}" for n in pair) for pair in names) + "   lr      "
    assert row == "    100" + "".join("  " + "".join(f" {v}" for v in pair) for pair in values) + "    1.0e-03"


def test_a_run_that_starts_anew_starts_its_files_anew(here):
    for _ in range(2):
        file = LcurveFile("lcurve.out", {"": NAMES}, {""})
        write_lcurve(file, LCURVE, steps=(1, 4))
    assert (here / "lcurve.out").read_text() == "".join(LCURVE.splitlines(keepends=True)[:4])


def test_rows_after_the_restored_step_are_cut_and_written_again_under_one_header(here):
    for torn in ("", "     16      5.0", "# step     "):
        (here / "lcurve.out").write_text(LCURVE + torn)
        file = LcurveFile("lcurve.out", {"": NAMES}, {""})
        file.cut_after(5)
        assert (here / "lcurve.out").read_text() == "".join(LCURVE.splitlines(keepends=True)[:4])
        write_lcurve(file, LCURVE, steps=(8, 12))
        assert (here / "lcurve.out").read_text() == LCURVE


def test_best_lines_of_later_steps_are_cut_from_val_log(here):
    for torn in ("", "# saved best checkpoint: best.ck"):
        (here / "val.log").write_text(VAL_LOG + torn)
        log = ValidationLog("val.log", 12)
        log.cut_after(8)
        assert (here / "val.log").read_text() == "".join(VAL_LOG.splitlines(keepends=True)[:6])
        write_validation(log, VAL_LOG, steps=(12,))
        assert (here / "val.log").read_text() == VAL_LOG


@pytest.mark.parametrize("before", [None, "", "# st", LCURVE.splitlines(keepends=True)[0]])
def test_a_restart_without_a_whole_file_starts_it_with_a_header(here, before):
    if before is not None:
        (here / "lcurve.out").write_text(before)
    file = LcurveFile("lcurve.out", {"": NAMES}, {""})
    file.cut_after(3)
    write_lcurve(file, LCURVE, steps=(4,))
    lines = LCURVE.splitlines(keepends=True)
    assert (here / "lcurve.out").read_text() == lines[0] + lines[1] + lines[3]


def test_a_second_header_that_deepmd_kit_wrote_at_a_restart_is_removed(here):
    lines = LCURVE.splitlines(keepends=True)
    (here / "lcurve.out").write_text("".join(lines[:4] + lines[:2] + lines[4:]))
    file = LcurveFile("lcurve.out", {"": NAMES}, {""})
    file.cut_after(100)
    assert (here / "lcurve.out").read_text() == LCURVE


def test_other_columns_after_a_restart_get_a_header_of_their_own(here, caplog):
    (here / "lcurve.out").write_text(LCURVE)
    file = LcurveFile("lcurve.out", {"": NAMES}, ())
    file.cut_after(1)
    write_lcurve(file, LCURVE_WITHOUT_VALIDATION, steps=(4,))
    new = LCURVE_WITHOUT_VALIDATION.splitlines(keepends=True)
    old = LCURVE.splitlines(keepends=True)
    assert (here / "lcurve.out").read_text() == "".join([*old[:3], new[0], new[1], new[3]])
    assert "the columns have changed" in caplog.text


def test_a_table_that_cannot_be_written_is_reported_with_its_name(here, monkeypatch):
    (here / "file").write_text("x")
    with pytest.raises(WriteError, match=r"file/lcurve.out: cannot be written \((Not a directory|File exists)\)"):
        write_lcurve(LcurveFile("file/lcurve.out", {"": NAMES}, {""}), LCURVE)
    file = LcurveFile("lcurve.out", {"": NAMES}, {""})
    write_lcurve(file, LCURVE, steps=(1,))

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "open", lambda *arguments, **options: Full())
    with pytest.raises(WriteError, match=r"lcurve.out: cannot be written \(No space left on device\)"):
        write_lcurve(file, LCURVE, steps=(4,))


def test_a_table_is_whole_in_the_file_between_two_rows(here):
    file = LcurveFile("lcurve.out", {"": NAMES}, {""})
    write_lcurve(file, LCURVE, steps=(1, 4))
    write_lcurve(file, LCURVE, steps=(8, 12))
    assert (here / "lcurve.out").read_text() == LCURVE


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0943634, "94.363"), (1.10301, "1103.0"), (999.999, "1000000"), (0.0, "0.0000"), (1e-9, "0.0000010000"),
     (float("nan"), "nan"), (float("inf"), "inf"), (9.99996e-3, "10.000")],
)  # fmt: skip
def test_errors_are_shown_with_five_significant_digits(value, shown):
    assert show_metric("E:MAE", value) == f"{shown} meV/atom"
    assert show_metric("f:rmse", value).endswith("meV/Å")


# progress, times, messages


class Known(RunTimes):
    """Times that are given, not measured."""

    def __init__(self, left, step=0.25):
        super().__init__()
        self.given = left, step

    def left(self, step, num_steps):
        return self.given[0]

    def step_seconds(self):
        return self.given[1]

    def split(self):
        return "data 2 % | step 95 %"


@pytest.fixture
def clock(monkeypatch):
    """A list of one number: what the clock says."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def bar_text(monkeypatch, progress, columns=None):
    """Return the last state of the bar of 100 steps after step 40, on a terminal of so many columns."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress.advance(39)
    progress._bar.ncols, progress._bar.dynamic_ncols = columns, None
    progress.advance(40)
    progress._bar.refresh()
    progress.close()
    return stream.getvalue().rstrip().rpartition("\r")[2]


def show(progress, step):
    errors = {"": {"rmse_e": 0.2, "rmse": 41.9}}
    progress.show(step, 1e-3, {"train": errors, "valid": {"": {"rmse": 35.0, "rmse_f": 0.0661}}})


def test_a_displayed_step_says_errors_speed_split_and_when_it_ends(caplog, clock):
    caplog.set_level(logging.DEBUG)
    progress = Progress(100, Known(left=2.5), interactive=False)
    progress.start_at(40)
    for step in range(41, 51):
        clock[0] += 0.05
        progress.advance(step)
    show(progress, 50)
    progress.close()
    lines = [r.getMessage() for r in caplog.records]
    assert lines[0] == " 50  train E 200  valid F 66.1  lr 1.0e-03  20 steps/s  00:02 left"
    assert lines[1] == " 50  0.50 s: data 2 % | step 95 %"


def test_each_of_several_tasks_has_a_line_of_its_own(caplog, monkeypatch):
    """All of them was in one line, sorted by column: rmse_e_ice, rmse_e_water, rmse_f_ice, ..."""
    caplog.set_level(logging.INFO)
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(100, RunTimes(), interactive=True)
    progress.advance(1)
    errors = {"water": {"rmse": 2.0, "rmse_e": 1.0, "rmse_ae": 0.5}, "ice": {"rmse": 3.0, "rmse_f": 3e-4}, "steam": {}}
    progress.show(1, 1e-3, {"train": errors, "valid": {"water": {}, "ice": {"rmse_v": 4.0}}, "ema": errors})
    progress.close()
    assert [r.getMessage() for r in caplog.records] == [
        "  1  water  train E 1000 ae 0.5  ema E 1000 ae 0.5  lr 1.0e-03",
        "  1  ice  train F 0.300  valid V 4000  ema F 0.300  lr 1.0e-03",
    ]


def take_steps(times, clock, steps, seconds):
    for _ in range(steps):
        with times.of("step"):
            clock[0] += seconds


def test_the_time_left_has_the_validations_and_checkpoints_that_are_due(clock):
    """It followed from the intervals so far, and jumped when the first validation came."""
    due = {"validation": Due(range(40, 101, 40), 100), "checkpoint": Due(range(100, 101), 100)}
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


@pytest.mark.parametrize("first", [0, 1, 7, 10, 30, 100, 150])
@pytest.mark.parametrize("every", [0, 1, 7, 10, 100, 1000])
def test_what_is_due_is_counted_as_it_will_happen(first, every):
    steps = range(first, 101, every) if every else range(0)
    due = Due(steps, 100)
    for after in (0, 1, 6, 7, 10, 29, 30, 99, 100):
        assert due.count(after) == sum(step in due for step in range(after + 1, 101))


def test_the_bar_has_what_matters_within_its_width(monkeypatch):
    wide, narrow, tiny = (bar_of(monkeypatch, columns) for columns in (120, 60, 40))
    assert wide.endswith("| 40/100, ema F 4.00 meV/Å, 07:33 left, 0.25 s/step")
    assert narrow.endswith("| 40/100, ema F 4.00 meV/Å, 07:33 left, 0.25 s/step")
    assert tiny.endswith("| 40/100, ema F 4.00 meV/Å")
    assert [len(text) for text in (wide, narrow, tiny)] == [120, 60, 40]


def bar_of(monkeypatch, columns):
    progress = Progress(100, Known(left=453.0), interactive=True)
    progress.show_validation(30, {"live": Given([1, 2, 3, 9, 5, 6]), "ema": Given([1, 2, 3, 4, 5, 6])})
    return bar_text(monkeypatch, progress, columns)


def test_the_bar_shows_the_first_average_or_live_weights_and_each_task(monkeypatch):
    progress = Progress(100, RunTimes(), interactive=True)
    progress.show_validation(30, {"live": Given([1, 2, 3, 1234.5, 5, 6])})
    assert bar_text(monkeypatch, progress).endswith("40/100, live F 1230 meV/Å")
    progress = Progress(100, RunTimes(), interactive=True)
    rows = {f"{task} {name}": k for k, (name, task) in enumerate(product(("live", "ema", "swa"), ("ice", "water")))}
    progress.show_validation(30, {name: Given([1, 2, 3, k, 5, 6]) for name, k in rows.items()})
    assert bar_text(monkeypatch, progress).endswith("40/100, ema F ice 2.00, water 3.00 meV/Å")


def test_the_bar_shows_errors_of_batches_until_there_is_a_validation(monkeypatch):
    progress = Progress(100, RunTimes(), interactive=True)
    progress.show(30, 1e-3, {"train": {"": {"rmse_f": 0.5}}, "valid": {"": {"rmse_f": 0.0661}}})
    assert bar_text(monkeypatch, progress).endswith("40/100, valid F 66.1 meV/Å")
    progress = Progress(100, RunTimes(), interactive=True)
    progress.show(30, 1e-3, {"train": {"": {"rmse_f": 0.5}}, "valid": {"": {}}})
    assert bar_text(monkeypatch, progress).endswith("40/100, train F 500 meV/Å")


def test_without_a_terminal_a_line_comes_every_minute_that_has_no_row(caplog, clock):
    caplog.set_level(logging.INFO)
    progress = Progress(100, Known(left=30.0), interactive=False)
    for step in range(1, 101):
        clock[0] += 25.0 if step < 10 else 1.0
        progress.advance(step)
        if step == 5:
            show(progress, step)
    lines = [r.getMessage() for r in caplog.records if "of 100 steps" in r.getMessage()]
    assert [int(line.split()[0]) for line in lines] == [3, 8, 45]
    assert lines[0] == "  3  of 100 steps, 00:30 left, 0.25 s/step"


def test_times_and_numbers_are_as_text():
    assert [duration(s) for s in (0.04, 9.94, 10, 75, 3600, 3725, 90061)] == [
        *("0.0 s", "9.9 s", "10 s", "1 min 15 s", "1 h", "1 h 2 min", "1 d 1 h")
    ]
    assert [counted(n, "frame") for n in (0, 1, 2000)] == ["0 frames", "1 frame", "2,000 frames"]
    assert [counted(n, "batch", "batches") for n in (1, 2)] == ["1 batch", "2 batches"]
    assert [every_steps(n) for n in (1, 5000)] == ["every step", "every 5,000 steps"]


def test_a_full_validation_is_one_line_for_each_task_with_stars_at_the_best(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress(10, RunTimes(), interactive=False)
    results = {"live": Given([94, 115.17, 896, 1103, "nan", "nan"]), "ema": Given([1, 2, 3, 4, 5, 6])}
    progress.show_validation(4, results, ["ema"])
    progress.show_validation(10, {f"ice {name}": errors for name, errors in results.items()}, ["ice live"])
    assert [r.getMessage() for r in caplog.records] == [
        " 4  full  live E 115 F 1100  ema* E 2.00 F 4.00",
        "10  ice  full  live* E 115 F 1100  ema E 2.00 F 4.00",
    ]


def test_messages_do_not_break_the_bar(monkeypatch, fresh_logging):
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


def test_a_restarted_bar_begins_at_its_step(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(20, RunTimes(), interactive=True)
    progress.start_at(15)
    progress.advance(16)
    progress.close()
    assert "16/20" in stream.getvalue()


def test_the_bar_shows_the_last_validated_force_error_of_the_averaged_weights(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(20, RunTimes(), interactive=True)
    progress.advance(10)
    progress.show_validation(10, {"live": Given([1, 2, 3, 4, 5, 6]), "ema": Given([1, 2, 3, 44.4, 5, 6])})
    show(progress, 10)
    progress.advance(20)
    assert "ema F 44.4 meV/Å" in progress._bar.postfix
    progress.show_validation(20, {"live": Given([1, 2, 3, 4, 5, 6]), "ema": Given([1, 2, 3, 33.3, 5, 6])})
    progress.close()
    assert "20/20, ema F 33.3 meV/Å" in stream.getvalue()


def test_a_terminal_that_does_not_know_its_width_has_a_bar():
    pty, ours = pytest.importorskip("pty"), []
    master, slave = pty.openpty()  # its size is 0 by 0
    code = (
        "from deepmd_ema.report.log import Progress, RunTimes\n"
        "bar = Progress(5, RunTimes())\nfor k in range(1, 6): bar.advance(k)\nbar.close()"
    )
    subprocess.run([sys.executable, "-c", code], stderr=slave, check=True, timeout=60)
    os.close(slave)
    with suppress(OSError):
        while chunk := os.read(master, 4096):
            ours.append(chunk.decode())
    os.close(master)
    assert "5/5" in "".join(ours)
    assert "|#####" in "".join(ours) or "█" in "".join(ours)


def test_no_bar_is_drawn_when_stderr_is_not_a_terminal(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress(5, RunTimes())
    progress.advance(1)
    progress.close()
    assert stream.getvalue() == ""


def test_the_time_of_an_interval_is_split_by_category(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    times = RunTimes()
    for _ in range(2):
        for category, seconds in {"data": 2, "step": 95, "validation": 2, "checkpoint": 1}.items():
            with times.of(category):
                clock[0] += seconds
        assert times.split() == "data 2 % | step 95 % | validation 2 % | checkpoint 1 %"
    assert not caplog.records
    for _ in range(2):
        with times.of("data"):
            clock[0] += 30
        clock[0] += 70
        assert times.split() == "data 30 % | step 0 % | validation 0 % | checkpoint 0 %"
    assert caplog.text.count("30 % of the time was spent waiting for data") == 1
    assert times.waiting_share() == (2 + 2 * 30) / (400 - 2)  # the first batch is a part of the start


def test_time_is_counted_also_when_the_body_fails(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    times = RunTimes()

    def fail():
        clock[0] += 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), times.of("step"):
        fail()
    assert times.split().startswith("data 0 % | step 100 %")


def test_messages_go_to_the_terminal_and_the_log_file_by_level(here, monkeypatch, fresh_logging):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("DEBUG", here / "logs" / "train.log")
    set_up_logging("INFO", here / "logs" / "train.log")  # again, without doubling the messages
    logger = logging.getLogger("deepmd_ema.some.module")
    logger.debug("hidden")
    logger.info("plain")
    logger.warning("careful")
    for text in (stream.getvalue(), (here / "logs" / "train.log").read_text()):
        first, second = text.splitlines()
        assert first.endswith("] plain")
        assert second.endswith("] WARNING: careful")


def test_only_the_chief_speaks(here, monkeypatch, fresh_logging):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    set_up_logging("INFO", here / "train.log", is_main=False)
    logging.getLogger("deepmd_ema").warning("not me")
    assert stream.getvalue() == ""
    assert not (here / "train.log").exists()


def test_a_log_file_that_cannot_be_written_is_an_error(here, fresh_logging):
    (here / "file").write_text("x")
    with pytest.raises(UserError, match=r"--log-path file/train.log: cannot be written"):
        set_up_logging("INFO", "file/train.log")
