"""The example notebook: its cells run from top to bottom, and it is stored without outputs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import deepmd_ema

EXAMPLE = Path(__file__).parents[2] / "examples" / "water"
CODE = [
    cell
    for cell in json.loads((EXAMPLE / "python.ipynb").read_text())["cells"]
    if cell["cell_type"] == "code"
]


def test_the_notebook_is_stored_without_outputs():
    assert CODE
    assert all(
        cell["outputs"] == [] and cell["execution_count"] is None for cell in CODE
    )


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute on two idle cores
def test_the_cells_of_the_notebook_run(tmp_path):
    for package in ("ase", "matplotlib"):
        pytest.importorskip(package)
    (tmp_path / "data").symlink_to(EXAMPLE / "data")
    (tmp_path / "cells.py").write_text(
        "\n".join("".join(cell["source"]) for cell in CODE)
    )
    environ = {
        **os.environ,
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(Path(deepmd_ema.__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = re.search(
        r"force RMSE: ([\d.]+) meV/angstrom, of the training: ([\d.]+)\n", done.stdout
    )
    assert found[1] == found[2]
    assert float(found[1]) < 300  # the spread of the forces is 840
    drift = re.search(r"drift in 20 steps: (-?[\d.]+) meV/atom", done.stdout)
    assert abs(float(drift[1])) < 1
