"""The programs of the benchmarks start, and the smallest forms of those that take seconds run to their page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
PROGRAMS = {path.name for path in FOLDER.glob("*.py") if "parse_args()" in path.read_text()}
PROGRAMS -= {"speed_bound.py"}  # a part of speed.py


def output_of(program, *words):
    done = subprocess.run([sys.executable, FOLDER / program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_a_benchmark_says_its_options_and_has_a_row_in_the_readme(program):
    assert "--output" in output_of(program, "--help")
    assert f"`{program}`" in (FOLDER / "README.md").read_text()


@pytest.mark.slow
def test_the_benchmark_of_optimizers_keeps_its_runs_and_prints_errors_by_length(tmp_path):
    words = ("optimizers.py", "--quick", "--only", "AdamWScheduleFree, r 4", "--work", str(tmp_path))
    first, again = output_of(*words), output_of(*words)
    assert "water, AdamWScheduleFree-r_4-0.003-1-60" in first
    assert first.endswith(again[again.index("## water") :])
    assert [line.split(" | ")[1] for line in again.splitlines() if "**" in line] == ["30", "60"]
