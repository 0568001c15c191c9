"""``dp-ema report``: one page without links to elsewhere, with the errors that ``dp-ema test``
finds.
"""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import tiny_input, write_system
from quantity_runs import RUNS, with_energies, write_labelled
from run_records import change_record, train_in

from deepmd_ema import checkpoint
from deepmd_ema.cli.main import main
from deepmd_ema.config.labels import LABELS
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.report.table import significant

pytest.importorskip("matplotlib")
VALIDATED = {"full_validation": True, "validation_freq": 3, "full_val_start": 0.0}
AVERAGES = [
    {"name": "ema", "type": "ema", "decay": 0.9, "full_validation": True},
    {"name": "slow", "type": "ema", "decay": 0.99, "full_validation": True},
]


def one_task(**changes):
    values = tiny_input(
        ["../data"],
        num_steps=6,
        training__averaging=AVERAGES,
        training__save_freq=3,
        training__disp_freq=2,
        validating=VALIDATED,
    )
    values["training"] |= {"validation_fraction": 0.25, **changes}
    return values


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with two averages, which split its validation frames off, and one of two tasks."""
    root = tmp_path_factory.mktemp("runs")
    write_system(root / "data", frames=24)
    write_system(root / "other", frames=6, seed=5, natoms=8, pbc=False)
    train_in(root / "run", one_task())
    single = tiny_input(["../data"])
    task = {
        "type_map": ["O", "H"],
        "descriptor": "d",
        "fitting_net": single["model"]["fitting_net"],
    }
    data = {
        name: {
            "training_data": {"systems": [f"../{of}"]},
            "validation_data": {"systems": [f"../{of}"]},
        }
        for name, of in (("ice", "data"), ("gas", "other"))
    }
    training = {
        name: value
        for name, value in single["training"].items()
        if name != "training_data"
    }
    several = {
        "model": {
            "shared_dict": {"d": single["model"]["descriptor"]},
            "model_dict": {"ice": task, "gas": task},
        },
        "learning_rate": single["learning_rate"],
        "loss_dict": {
            "ice": single["loss"],
            "gas": {"start_pref_e": 1, "limit_pref_e": 1, "start_pref_f": 1},
        },
        "training": {
            **training,
            "data_dict": data,
            "numb_steps": 6,
            "enable_ema": True,
            "disp_freq": 2,
        },
        "validating": {**VALIDATED, "ema_full_validation": True},
    }
    train_in(root / "tasks", several)
    return root


@pytest.fixture(scope="module")
def page(trained):
    """The page of the first of them."""
    assert (
        main(
            [
                "report",
                str(trained / "run"),
                "-o",
                str(trained / "page.html"),
                "--device",
                "cpu",
            ]
        )
        == 0
    )
    return Page(trained / "page.html")


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    """A copy of all of it, in the working directory."""
    shutil.copytree(trained, tmp_path / "all", symlinks=True)
    monkeypatch.chdir(tmp_path / "all")
    return tmp_path / "all"


def report(capsys, *words):
    """Write the page and return what the command prints after the first line."""
    assert main(["report", *words, "-o", "page.html", "--device", "cpu"]) == 0
    first, *more = capsys.readouterr().out.splitlines()
    assert first == "wrote page.html"
    return more


class Page(HTMLParser):
    """The parts of a page that can be checked: tags are closed in order, tables are read cell by
    cell.
    """

    def __init__(self, path="page.html"):
        super().__init__()
        self.open, self.tables, self.images, self.ids, self.links, self.text = (
            [],
            [],
            [],
            set(),
            [],
            "",
        )
        self.source = Path(path).read_text(encoding="utf-8")
        self.feed(self.source)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.ids |= {attrs["id"]} if "id" in attrs else set()
        self.links += [attrs[name] for name in ("href", "src") if name in attrs]
        if tag == "img":
            self.images.append(attrs["alt"])
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("meta", "img", "br", "link"):  # without an end
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data
        if any(tag in self.open for tag in ("td", "th")):
            self.tables[-1][-1][-1] += data

    def table(self, corner):
        """Return the rows of the table whose first cell is ``corner``, by their first cell."""
        [found] = [rows for rows in self.tables if rows[0][0] == corner]
        return {row[0]: row[1:] for row in found}


def test_the_page_has_the_errors_of_the_last_validation_and_needs_nothing_else(
    trained, page
):
    table = page.table("6 validation frames")
    assert table["6 validation frames"] == [
        "live",
        "emaaveraged",
        "slowaveraged",
        "labelsRMS",
    ]
    last = [
        line.split()
        for line in (trained / "run/val_ema.log").read_text().splitlines()
        if not line.startswith("#")
    ][-1]
    for row, column in [
        ("Energy MAE, meV/atom", 1),
        ("Energy RMSE, meV/atom", 2),
        ("Force MAE, meV/Å", 3),
        ("Force RMSE, meV/Å", 4),
        ("Stress RMSE, meV/Å³", 6),
    ]:
        assert table[row][1] == significant(float(last[column]), 3)
    assert table["Stress RMSE, GPa"][1] == significant(0.1602176634 * float(last[6]), 3)
    assert "<h1>run</h1>" in page.source
    rows = page.table("weights, frames")
    assert {
        f"{name}, {part}"
        for name in ("live", "ema", "slow")
        for part in ("validation", "training")
    } < rows.keys()
    assert rows["ema, validation"][0] == rows["ema, training"][0] == "6"
    assert all(link.startswith(("data:image/", "#")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert len(page.source) < 2e6
    assert (
        "Potential se_e2_a for O, H, trained on 18 frames of 1 system, validated on 6 frames of 1 "
        "system." in page.text
    )


def test_errors_are_those_of_the_test_of_the_same_frames(runs, capsys):
    values = one_task()
    del values["training"]["validation_fraction"]
    values["training"]["validation_data"] = {"systems": ["../other"]}
    train_in(runs / "second", values)
    report(capsys, "second", "--average", "slow")
    tested = measure("second", ["other"], average="slow")
    table = Page().table("6 validation frames")
    assert table["Energy RMSE, meV/atom"][1] == significant(
        1000 * tested.total.metric("E:RMSE"), 3
    )
    assert table["Force RMSE, meV/Å"][1] == significant(
        1000 * tested.total.metric("F:RMSE"), 3
    )
    assert "Virial RMSE, meV/atom" not in table  # open frames have none
    assert (
        table["6 validation frames"][1] == "slowaveraged"
    )  # the chosen one is beside the live weights


def test_virials_have_validation_curves_where_the_volumes_are_alike(
    trained, page, runs, capsys
):
    """Rows of val.log have the stress; another metric would change its columns, which are
    DeePMD-kit's.
    """
    rows = [
        line.split()
        for line in (trained / "run/val_ema.log").read_text().splitlines()
        if line[0] != "#"
    ]
    volume = float(
        re.search(
            r"Virial: errors of stresses times the mean volume, ([\d.]+) Å³/atom",
            page.text,
        )[1]
    )
    [words] = [
        text for text in page.images if text.startswith("Virial RMSE over steps: live ")
    ]
    shown = float(re.search(r"ema ([\d.]+) meV/atom at the end", words)[1])
    assert shown == pytest.approx(volume * float(rows[-1][6]), rel=1e-2)
    assert shown == pytest.approx(
        float(page.table("6 validation frames")["Virial RMSE, meV/atom"][1]), rel=0.1
    )
    for path in (runs / "data").glob("set.*/box.npy"):
        box = np.load(path)
        np.save(path, box * np.linspace(1, 1.3, len(box)).reshape(-1, 1))
    report(capsys, "run")
    unlike = Page()
    assert "Virial RMSE over steps: of single batches" in unlike.images
    assert any(
        text.startswith("Stress RMSE over steps: live ") for text in unlike.images
    )
    assert "times the mean volume" not in unlike.text


def test_test_data_are_those_of_the_option(runs, capsys):
    report(capsys, "run", "-s", "other")
    page, tested = (
        Page(),
        measure("run", ["other"], use_average=True, average="slow").total,
    )
    assert page.table("6 test frames")["Force RMSE, meV/Å"][2] == significant(
        1000 * tested.metric("F:RMSE"), 3
    )
    assert "6 test frames, weights ema." in page.text
    report(capsys, "run", "-s", "data", "-n", "4")
    assert "4 test frames" in Page().tables[1][0]
    assert main(["report", "run", "-s", "nowhere", "-o", "page.html"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(["report", "tasks", "-s", "data", "-o", "page.html"]) == 2
    assert "-s: of a run of several tasks" in capsys.readouterr().err


def test_deviations_are_relative_distances_from_the_live_weights(trained, page):
    table = page.table("part of the model")
    payload = checkpoint.load(trained / "run")
    for part in ("descriptor", "fitting"):
        for column, name in enumerate(("ema", "slow"), 1):
            weights = payload["averages"]["profiles"][name]["weights"]
            names = [n for n in weights if n.startswith(part)]
            live = torch.cat([payload["model"][n].ravel() for n in names])
            apart = torch.cat([weights[n].ravel() for n in names]) - live
            assert table[part][column] == significant(
                100 * float(apart.norm() / live.norm()), 3
            )
    ages = page.table("average")
    assert ages["ema"][1:] == [
        "6",
        f"{payload['averages']['profiles']['ema']['mean_age']:,.1f}",
    ]


def test_times_add_up_to_that_of_the_run(runs, capsys):
    seconds = {
        "start": 10.0,
        "data": 20.0,
        "step": 100.0,
        "forward": 30.0,
        "backward": 40.0,
        "optimizer": 20.0,
    }
    change_record(runs / "run", elapsed=200.0, seconds=seconds | {"validation": 50.0})
    report(capsys, "run")
    table = Page().table("part")
    assert {name: cells[:2] for name, cells in table.items() if name != "part"} == {
        "start: data, statistics": ["10 s", "5.0 %"],
        "waiting for data": ["20 s", "10.0 %"],
        "step: forward pass": ["30 s", "15.0 %"],
        "step: backward pass": ["40 s", "20.0 %"],
        "step: clipping, optimizer": ["20 s", "10.0 %"],
        "step: averages, the rest": ["10 s", "5.0 %"],
        "full validations": ["50 s", "25.0 %"],
        "end and everything else": ["20 s", "10.0 %"],
    }


def test_each_of_several_tasks_has_its_errors_curves_and_worst_frames(runs, capsys):
    report(capsys, "tasks")
    page = Page()
    assert "<h1>tasks</h1>" in page.source
    assert "Stress RMSE, meV/Å³" in page.table("ice: 24 validation frames")
    assert "Stress RMSE, meV/Å³" not in page.table("gas: 6 validation frames")
    assert page.images.count("Learning rate over steps") == 2
    assert {"ice descriptor", "ice fitting", "gas fitting"} < page.table(
        "part of the model"
    ).keys()
    assert "gas descriptor" not in page.table("part of the model")  # it is that of ice


QUANTITIES = {
    "dipole": ["Dipole RMSE, e*Å/atom", "Atomic dipole RMSE, e*Å"],
    "polar": ["Polarizability RMSE, Å³/atom", "Atomic polarizability RMSE, Å³"],
    "property": ["Property RMSE"],
    "dos": ["Density of states RMSE, 1/eV/atom", "Atomic density of states RMSE, 1/eV"],
}
HEADINGS = {
    "dipole": "Dipole",
    "polar": "Polarizability",
    "property": "Gap",
    "dos": "Dos",
}


@pytest.mark.parametrize("kind", QUANTITIES)
def test_a_model_of_another_quantity_has_its_errors_parity_and_worst_frames(
    kind, tmp_path, monkeypatch, capsys
):
    """The tables were empty, and there was no parity: names of energies, forces and virials were
    written there.
    """
    monkeypatch.chdir(tmp_path)
    data = [
        write_labelled(tmp_path / name, seed)
        for seed, name in enumerate(("a", "valid", "unseen"))
    ]
    values = tiny_input(
        [data[0]], [data[1]], num_steps=4, validating=VALIDATED, **RUNS[kind][0]
    )
    train_in(tmp_path / "run", values)
    report(capsys, "run", "-s", "unseen")
    page = Page()
    assert "<h1>run</h1>" in page.source
    assert (
        f"{HEADINGS[kind]} model se_e2_a for O, H, trained on 6 frames of 1 system"
        in page.source
    )
    for part, system in (("validation", data[1]), ("test", data[2])):
        table = page.table(f"6 {part} frames")
        measured = measure("run/model.ckpt.pt", [system], device="cpu")
        for row, letter in zip(QUANTITIES[kind], RUNS[kind][1]):
            error = measured.total.metric(f"{letter}:RMSE")
            rms = np.sqrt(
                np.mean(
                    [np.mean(label_of(frame, letter) ** 2) for frame in measured.frames]
                )
            )
            assert table[row] == [significant(error, 3), significant(rms, 3)]
    names = {
        "dipole": "Dipole x",
        "polar": "Polarizability xx",
        "property": "Property 0",
        "dos": "Density of states 0",
    }
    assert sum(image.startswith(names[kind]) for image in page.images) == 2
    assert "frames of largest" in page.text
    best = re.search(
        r"best.*?live: (\w) MAE [\d.]+ ?(\S*) at step", page.text, re.DOTALL
    )
    assert best[1] == RUNS[kind][1][0]


def label_of(frame, letter):
    """Return the label of a frame that a metric is about, of dipoles, polarizabilities and
    densities per atom.
    """
    name = next(
        n for n in frame.label if letter in [error.metric for error in LABELS[n].errors]
    )
    is_per_atom = not LABELS[name].per_atom and letter != "P"
    return frame.label[name] / (len(frame.atom_type) if is_per_atom else 1)


def test_the_best_of_each_task_is_named_by_an_error_of_its_own(
    tmp_path, monkeypatch, capsys
):
    """Of energies and dipoles that are ranked by dipoles only the latter were named."""
    monkeypatch.chdir(tmp_path)
    data = [
        write_labelled(tmp_path / name, seed)
        for seed, name in enumerate(("a", "valid"))
    ]
    train_in(tmp_path / "run", with_energies(([data[0]], [data[1]])))
    report(capsys, "run")
    page = Page()
    assert re.search(r"energy live: E MAE [\d.]+ meV/atom at step \d+", page.text)
    assert re.search(r"dipole live: W MAE [\d.]+ e\*Å at step \d+", page.text)
    assert "energy: potential se_e2_a for O, H" in page.text
    assert "dipole: dipole model se_e2_a for O, H" in page.text
    assert page.table("dipole: 6 validation frames")["Dipole RMSE, e*Å/atom"]


def test_the_details_are_those_of_the_average_that_is_named(runs, capsys):
    remarks = report(capsys, "run")
    assert remarks == ["Details are of the average ema; --average shows another: slow."]
    assert report(capsys, "run", "--average", "slow", "--title", "Water & <ice>") == []
    assert "6 validation frames, weights slow." in Page().text
    assert "<h1>Water &amp; &lt;ice&gt;</h1>" in Page().source
    assert main(["report", "run", "--average", "fast"]) == 2
    assert (
        "no average is called 'fast'. Give --average one of: ema, slow."
        in capsys.readouterr().err
    )


def test_an_interrupted_run_is_called_so(runs, capsys):
    change_record(runs / "tasks", ended="interrupted by SIGTERM", step=5)
    [line] = report(capsys, "tasks")
    assert (
        line
        == "Status: interrupted (by SIGTERM), step 6 of 6 (100 %). The checkpoint is of step 6."
    )
    assert line in Page().text
    for file in ("checkpoint", "model.ckpt.pt"):
        Path("tasks", file).unlink()
    assert main(["report", "tasks"]) == 2
    message = capsys.readouterr().err
    assert "tasks: no checkpoint yet (interrupted" in message
    assert "`dp-ema show tasks` says how far the run is." in message
    assert message.count("\n") == 1


def test_data_that_have_moved_leave_the_errors_of_the_last_validation(runs, capsys):
    shutil.rmtree("data")
    [line, _] = report(capsys, "run")
    assert line.startswith(
        "The errors of single frames are missing: training.training_data.systems"
    )
    assert str(runs / "data") in line
    page = Page()
    assert line in page.text
    assert "ema, validation of step 6: E MAE" in page.text
    assert "descriptor" in page.table("part of the model")
    assert not [words for words in page.images if "predictions" in words]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nothing"], "nothing"),
        (
            ["report", "run/model_ema.ckpt.pt"],
            "is of the kind average. Expected the folder of a run",
        ),
        (
            ["report", "run", "-o", "run/input.json"],
            "a file is there that is not an HTML page",
        ),
    ],
)
def test_wrong_use_ends_in_one_line_and_changes_nothing(runs, words, message, capsys):
    before = (runs / "run" / "input.json").read_text()
    assert main(words) == 2
    found = capsys.readouterr().err
    assert message in found
    assert found.count("\n") == 1
    assert (runs / "run" / "input.json").read_text() == before
    assert not Path("report.html").exists()
