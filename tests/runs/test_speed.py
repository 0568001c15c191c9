"""Reading of times, and growth up to the memory of the machine, in the benchmark of speed."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
# a program that waits 20 ms in a step of 96 atoms, and wants more memory than there is for 192
DP = """
import json, sys, time
from pathlib import Path
system = json.loads(Path("input.json").read_text())["training"]["training_data"]["systems"][0]
atoms = len(Path(system, "type.raw").read_text().split())
if atoms == 192:
    if "--pt" in sys.argv:
        sys.exit("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 32.60 GiB.")
    bytearray(2 * 10**9)
for step in range(1, 10**6):
    time.sleep(0.02)
    with open("lcurve.out", "a") as file:
        print(step, 0.1, file=file)
"""


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


@pytest.mark.slow
def test_a_program_without_memory_for_a_frame_is_shown_and_not_tried_with_larger_ones(
    tmp_path,
):
    folder = tmp_path / "peer" / "bin"
    folder.mkdir(parents=True)
    (tmp_path / "dp.py").write_text(DP)
    for name, words in (("python", ""), ("dp", tmp_path / "dp.py")):
        (folder / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (folder / name).chmod(0o755)
    words = [
        "--stage",
        "growth",
        "--atoms",
        "288",
        "96",
        "192",
        "--kinds",
        "se_e2_a",
        "--precision",
        "float64",
        "--programs",
        "pt",
        "pt_expt",
        "--peer",
        folder.parent,
        "--work",
        tmp_path,
        "--memory",
        "1",
        "--turns",
        "1",
        "--seconds",
        "0.1",
        "--output",
        tmp_path / "speed.md",
    ]
    subprocess.run(
        [sys.executable, FOLDER / "speed.py", *words], check=True, capture_output=True
    )
    rows = [
        line.split(" | ")
        for line in (tmp_path / "speed.md").read_text().splitlines()
        if "| se_e2_a |" in line
    ]
    (_, _, _, atoms, *cells, _), failed, skipped = rows
    assert atoms == "96"
    assert all(float(cell.split(";")[0]) > 10 for cell in cells)
    assert failed[3:6] == [
        "192",
        "out of memory (35.0 GB more requested)",
        "out of memory",
    ]
    assert skipped[3:6] == ["288", "-", "-"]
    assert (tmp_path / "speed-growth.png").exists()
    (config,) = tmp_path.rglob(
        "*-96/pt/input.json"
    )  # of several batches DeePMD-kit makes one list of neighbors
    assert json.loads(config.read_text())["model"]["data_stat_nbatch"] == 1


def test_times_of_the_processor_are_without_those_of_waiting(scripts, tmp_path):
    (tmp_path / "dp.py").write_text(DP)
    (tmp_path / "type.raw").write_text("0\n")
    config = {"training": {"training_data": {"systems": [str(tmp_path)]}}}
    command = [sys.executable, str(tmp_path / "dp.py")]
    run = scripts("common").HaltedRun.start(
        command, tmp_path / "run", config, os.environ
    )
    run.wait_for(0, time.perf_counter() + 60)
    wall, processor = run.turn(0.2, 60), run.turn(0.2, 60, "processor")
    run.end()
    assert 0 < processor < wall / 2
