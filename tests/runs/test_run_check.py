"""``dp-ema check``: the report of a run before it starts, as text and as JSON."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system

from deepmd_ema.cli.main import main

VALIDATED = {
    "full_validation": True,
    "ema_full_validation": True,
    "validation_freq": 4,
    "full_val_start": 0.0,
    "max_best_ckpt": 2,
}
KEYS = [
    "format",
    "version",
    "input",
    "problems",
    "warnings",
    "without_effect",
    "notes",
    "plan",
    "data",
    "cost",
]


@pytest.fixture
def write(here):
    """Return a function that writes an input with averages and validation."""
    write_system("data", frames=12, seed=1)
    write_system("valid", frames=5, seed=2)

    def write(**changes):
        options = {
            "num_steps": 12,
            "training__save_freq": 3,
            "training__enable_ema": True,
            "validating": VALIDATED,
        }
        Path("input.json").write_text(
            json.dumps(tiny_input(["data"], ["valid"], **(options | changes)), indent=1)
        )

    return write


def reported(capsys, *words, code=0):
    """Return the document that the command prints, and check that it prints nothing else."""
    assert main(["check", "input.json", "--json", *words]) == code
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def test_sections_come_in_order_and_warnings_last(write, capsys):
    write(validating=VALIDATED | {"tf32_infer": True}, training__ema_decay=0.999)
    assert main(["check", "input.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    heads = [
        re.split(r"[:(]", line)[0].strip()
        for line in lines
        if line and not line.startswith(" ")
    ]
    assert heads == [
        "input.json",
        "Training data",
        "Validation data",
        "Elements",
        "Checks of the data",
        "Plan",
        "Cost",
        "1 option without effect",
        "1 warning",
        "next",
    ]
    assert lines[-1] == "next: dp-ema train input.json"
    assert lines[-3].startswith(
        "  1. training.ema_decay = 0.999: the average is over about 1,000 steps"
    )
    assert max(map(len, lines[: lines.index("Plan")])) <= 110


def test_the_document_has_the_same_keys_whatever_is_wrong(write, capsys):
    write()
    good = reported(capsys)
    assert list(good) == KEYS
    assert good["problems"] == []
    only = reported(capsys, "--config-only")
    assert list(only) == KEYS
    assert (only["data"], only["cost"]) == ([], None)
    assert only["plan"].keys() == good["plan"].keys()
    write(training__enable_ema=3, training__no_such=1)
    bad = reported(capsys, code=2)
    assert list(bad) == KEYS
    [unknown] = [p for p in bad["problems"] if p["path"] == "training.no_such"]
    assert (
        Path("input.json")
        .read_text()
        .splitlines()[unknown["line"] - 1]
        .strip()
        .startswith('"no_such"')
    )
    assert unknown["message"].startswith(
        f"input.json:{unknown['line']}: training.no_such: unknown key."
    )


def test_problems_of_the_data_are_in_the_document(write, capsys):
    write()
    force = np.load("data/set.000/force.npy")
    force[3, 4] = np.nan
    np.save("data/set.000/force.npy", force)
    found = reported(capsys, code=2)
    [problem] = found["problems"]
    assert problem["message"].startswith("data/set.000/force.npy: frame 3")
    assert (problem["path"], problem["line"]) == (None, None)
    assert [system["system"] for system in found["data"][0]["systems"]] == [
        "data",
        "valid",
    ]


def test_numbers_of_the_document_are_those_of_the_data(write, capsys):
    write()
    found = reported(capsys)
    [task] = found["data"]
    data, valid = task["systems"]
    assert (data["part"], data["frames"], data["periodic_frames"], valid["part"]) == (
        "training",
        12,
        12,
        "validation",
    )
    force = np.load("data/set.000/force.npy")
    assert data["labels"]["force"]["rms_eV_per_angstrom"] == pytest.approx(
        np.sqrt((force**2).mean())
    )
    energy = np.load("data/set.000/energy.npy") / 12
    assert data["labels"]["energy"]["min_eV_per_atom"] == pytest.approx(energy.min())
    assert [row["element"] for row in task["elements"]] == ["O", "H"]
    every = np.concatenate([force, np.load("valid/set.000/force.npy")]).reshape(
        17, 12, 3
    )
    for k, row in enumerate(task["elements"]):
        own = every[:, np.loadtxt("data/type.raw", dtype=int) == k]
        assert row["force_rms_eV_per_angstrom"] == pytest.approx(
            np.sqrt((own**2).mean())
        )
        assert row["force_max_eV_per_angstrom"] == np.abs(own).max()
    assert sum(row["training_atoms"] for row in task["elements"]) == 144
    assert task["checks"]["duplicates"] == {
        "frames": 0,
        "of_frames": 12,
        "example": None,
    }
    assert found["plan"]["num_steps"] == 12
    assert found["plan"]["tasks"][0]["epochs"] == pytest.approx(
        12 / found["plan"]["tasks"][0]["batches_per_epoch"]
    )
    assert "NaN" not in json.dumps(found)
