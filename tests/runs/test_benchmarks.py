"""The programs of the benchmarks start, and the smallest forms of those that take seconds run to
their page.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NIGHTLY = {  # the smallest forms, and a line of their pages
    "speed.py": (
        ["--quick", "--stage", "step", "growth", "start", "validation", "checkpoint"],
        "| se_e2_a, 96 atoms |",
    ),
    "parallel.py": (
        [
            "speed",
            "--ranks",
            "1",
            "2",
            "--stages",
            "0",
            "2",
            "--steps",
            "10",
            "--rounds",
            "1",
        ],
        "| 2 |",
    ),
    "averaging_worth.py": (
        [
            "--examples",
            "water",
            "--schedules",
            "constant",
            "--seeds",
            "1",
            "--steps",
            "40",
        ],
        "| live",
    ),
    "time_to_accuracy.py": (
        ["--targets", "--stage", "reach", "--sets", "water", "--seeds", "1"],
        "dp-ema, float64",
    ),
    "race.py": (
        [
            *("--sets", "water", "--trainers", "dp-ema init", "--seconds", "30"),
            *("--sources", ".", "--peers", "."),
        ],
        "| dp-ema init |",
    ),
}
FOLDER = Path(__file__).parents[2] / "benchmarks"
PROGRAMS = {
    path.name for path in FOLDER.glob("*.py") if "parse_args()" in path.read_text()
}


def output_of(program, *words):
    done = subprocess.run(
        [sys.executable, FOLDER / program, *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_benchmark_says_its_options_and_has_a_row_in_the_readme(program):
    assert "--output" in output_of(program, "--help")
    assert f"`{program}`" in (FOLDER / "README.md").read_text()


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("program", NIGHTLY)
def test_a_benchmark_runs_to_its_page(program, tmp_path):
    words, line = NIGHTLY[program]
    assert line in output_of(program, *words, "--work", str(tmp_path / "work"))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_benchmark_of_dynamics_runs_to_its_page(tmp_path):
    config = json.loads(
        (FOLDER.parent / "examples" / "water" / "input.json").read_text()
    )
    config["training"] |= {"numb_steps": 40, "save_freq": 40}
    (tmp_path / "input.json").write_text(json.dumps(config))
    (tmp_path / "data").symlink_to(FOLDER.parent / "examples" / "water" / "data")
    subprocess.run(
        [sys.executable, "-m", "deepmd_ema", "train", "input.json"],
        cwd=tmp_path,
        check=True,
    )
    words = ("--steps", "40", "--block", "20")
    assert "| dp-ema, .pt2 |" in output_of(
        "md.py", str(tmp_path / "model.ckpt.pt"), *words
    )
