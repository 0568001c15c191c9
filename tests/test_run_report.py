"""``dp-ema report``: one page without links, with the errors that ``dp-ema test`` finds."""

import json
import re
from pathlib import Path

import pytest
from helpers import tiny_input, write_system

from deepmd_ema.cli.main import main
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.run_report import write_report
from deepmd_ema.training.run import run_training

pytest.importorskip("matplotlib")
VALIDATED = {"full_validation": True, "ema_full_validation": True, "validation_freq": 3, "full_val_start": 0.0}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The folder of a run with an average, which split its validation frames off."""
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write_system("data", frames=24)
    config = tiny_input(["data"], num_steps=6, training__enable_ema=True, training__save_freq=3, validating=VALIDATED)
    config["training"]["validation_fraction"] = 0.25
    Path("input.json").write_text(json.dumps(config))
    run_training("input.json", device="cpu")
    monkeypatch.chdir(tmp_path)  # paths of the input begin in the folder of the run
    return folder


def rows_of(page):
    """Return the cells of the rows of all tables."""
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.DOTALL)
    return [re.findall(r"<td>(.*?)</td>", row) for row in rows]


def test_the_page_has_the_errors_of_the_last_validation_and_needs_nothing_else(run, capsys):
    assert main(["report", "run", "-o", "page.html", "--device", "cpu"]) == 0
    assert capsys.readouterr().out == "wrote page.html\n"
    page = Path("page.html").read_text()
    rows = {row[0]: row[1:] for row in rows_of(page) if row}
    assert {"live, validation", "live, training", "ema, validation", "ema, training"} <= rows.keys()
    assert rows["ema, validation"][0] == rows["ema, training"][0] == "6"
    header = [line for line in (run / "val_ema.log").read_text().splitlines() if line.startswith("#")]
    last = [line.split() for line in (run / "val_ema.log").read_text().splitlines() if not line.startswith("#")][-1]
    column = next(
        k for line in header if "F_RMSE" in line for k, name in enumerate(line.strip("# ").split()) if "F_RMSE" in name
    )
    assert float(rows["ema, validation"][4]) == pytest.approx(float(last[column]), rel=1e-3)
    assert page.count("data:image/png;base64,") == 2
    assert not re.search(r"(src|href)=.(?!data:)", page)
    assert "the 6 frames of largest force error" in page
    assert "forces by element" in page
    assert "validation_fraction" in page


def test_errors_are_those_of_the_test_of_the_same_frames(run, monkeypatch):
    values = json.loads((run / "input.json").read_text())
    del values["training"]["validation_fraction"]
    values["training"]["training_data"]["systems"] = [str(run / "data")]
    values["training"]["validation_data"] = {"systems": ["other"]}
    second = Path("second").resolve()
    write_system(second / "other", frames=7, seed=5)
    monkeypatch.chdir(second)
    run_training(values, device="cpu")
    monkeypatch.chdir(run)
    page = write_report(second, "page.html", device="cpu").read_text()
    rows = {row[0]: row[1:] for row in rows_of(page) if row}
    report = measure(second, [second / "other"], use_average=True)
    assert rows["ema, validation"][2] == f"{1000 * report.total.metric('E:RMSE'):.4g}"
    assert rows["ema, validation"][4] == f"{1000 * report.total.metric('F:RMSE'):.4g}"


def test_few_frames_are_spread_over_all(run):
    page = write_report(run, "page.html", num_frames=3, device="cpu").read_text()
    rows = {row[0]: row[1:] for row in rows_of(page) if row}
    assert rows["live, validation"][0] == rows["live, training"][0] == "3"


def test_a_run_without_rows_and_validation_has_a_page(run):
    for file in [*run.glob("val*.log"), run / "lcurve.out"]:
        file.unlink()
    page = write_report(run, "page.html", device="cpu").read_text()
    assert "No rows were written yet." in page


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "empty"], "empty: no file 'checkpoint' here that names the newest checkpoint"),
        (["report", "nothing"], "nothing"),
        (["report", "run/model_ema.ckpt.pt"], "is of the kind average. Expected the folder of a run"),
        (["report", "run", "-o", "run/input.json"], "a file is there that is not an HTML page"),
    ],
)
def test_what_is_no_run_ends_in_one_line(run, words, message, capsys):
    Path("empty").mkdir()
    before = (run / "input.json").read_text()
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert (run / "input.json").read_text() == before
    assert not Path("report.html").exists()
