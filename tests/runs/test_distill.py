"""The example that distills a potential: its rounds, their continuation, its errors, and the
density at its end.
"""

import argparse
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

build = pytest.importorskip("ase.build")
EMT = "ase.calculators.emt:EMT"


@pytest.fixture
def example(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "distill")
    monkeypatch.chdir(tmp_path)
    build.bulk("Al", cubic=True).write("metal.cif")
    return pytest.importorskip("distill")


def test_rounds_label_where_students_disagree_and_are_not_repeated(
    example, monkeypatch, tmp_path
):
    other = (EMT, '{"asap_cutoff": true}')  # the students of the second round agree
    students = cycle([other, (EMT, "{}"), other, other])
    monkeypatch.setattr(example, "train", lambda *_: next(students))
    args = argparse.Namespace(
        structure="metal.cif",
        teacher=EMT,
        arguments={},
        temperature=[300.0],
        hours=0.01,
        limit=0.003,
        workers=1,
        output=tmp_path / "out",
    )
    with ThreadPoolExecutor(1) as pool:
        first = example.Distillation(args, pool).rounds()
        new = example.read("out/round-1/labels.extxyz", ":")
        assert first == example.read("out/round-2/frames.extxyz", ":")
        assert first[: len(first) - len(new)] == example.read(
            "out/round-1/frames.extxyz", ":"
        )
        assert (
            np.abs(
                new[0].get_forces() - example.evaluate(new[0], (EMT, "{}")).get_forces()
            ).max()
            < 1e-6
        )
        times = {path: path.stat().st_mtime for path in Path("out").rglob("*.extxyz")}
        assert example.Distillation(args, pool).rounds() == first
        assert {
            path: path.stat().st_mtime for path in Path("out").rglob("*.extxyz")
        } == times
        args.temperature = [400.0]
        with pytest.raises(ValueError, match="Give another folder with -o"):
            example.Distillation(args, pool)


def test_a_student_is_trained_with_its_seed(example, tmp_path):
    metal = example.read("metal.cif")
    frames = example.simulate(
        tmp_path / "x-sheared.extxyz", metal, [(EMT, "{}")], 300.0, 0.5, 1.0
    )
    assert abs(frames[0].cell.angles() - 90).max() > 3
    example.save(tmp_path / "frames.extxyz", frames)
    source = example.train(tmp_path / "student", 2, example.MIN_TRAINING)
    assert json.loads(Path("student/input.json").read_text())["training"]["seed"] == 2
    assert (
        np.abs(
            example.evaluate(frames[-1], source).get_forces() - frames[-1].get_forces()
        ).max()
        < 0.3
    )


@pytest.mark.parametrize(
    ("element", "hours", "text"),
    [
        ("Fe", "1", "EMT.*Fe"),
        ("Al", "1e-5", "--hours 1e-05: expected at least 0.05, for two trainings."),
    ],
)
def test_a_teacher_that_fails_and_too_little_time_are_one_line(
    example, monkeypatch, capsys, element, hours, text
):
    build.bulk(element).write("bulk.cif")
    words = [
        "bulk.cif",
        "--teacher",
        EMT,
        "--temperature",
        "300",
        "--hours",
        hours,
        "-o",
        "out",
    ]
    monkeypatch.setattr(sys, "argv", ["distill.py", *words])
    assert example.main() == 2
    assert re.fullmatch(f"distill: .*{text}.*\\n", capsys.readouterr().err)


def test_a_teacher_without_a_module_is_refused_with_the_form(
    example, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["distill.py", "metal.cif", "--teacher", "emt"])
    assert example.main() == 2
    text = (
        "--teacher emt: expected chgnet, or module:Class of an ASE calculator, such as "
        "ase.calculators.emt:EMT."
    )
    assert text in capsys.readouterr().err


def test_parts_that_cannot_be_met_get_what_they_need(example, monkeypatch, tmp_path):
    metal = example.read("metal.cif")
    frames = example.simulate(
        tmp_path / "x-same.extxyz", metal, [(EMT, "{}")], 300.0, 0.0, 1.0
    )
    assert len(frames) == example.MIN_FRAMES + 1
    example.save(tmp_path / "frames.extxyz", frames)
    (tmp_path / "student").mkdir()
    command, hours = example.command, []
    (tmp_path / "student/proposed.json").touch()  # of a run that was killed

    def command_once(folder, *words):
        """Run the first command, which fails: the second would measure the same steps again."""
        hours.append(words[-1])
        return command(folder, *words) if len(hours) == 1 else ""

    monkeypatch.setattr(example, "command", command_once)
    example.propose(tmp_path / "student", 1e-6)
    log = tmp_path / "student/log.txt"
    least = re.search(
        r"--hours 1e-06: a step takes .* \(--hours ([\d.]+)\)", log.read_text()
    )[1]
    assert hours == [1e-6, pytest.approx(1.2 * float(least))]
    log.write_text("[2026-01-02 03:04:05] 100  train E 1\n")
    assert example.last_line(log) == "100  train E 1"


@pytest.mark.parametrize("slower", [1.5, 3.0, 100.0])
def test_a_load_that_grows_between_measurements_does_not_end_the_run(
    example, monkeypatch, tmp_path, slower
):
    """Each measurement finds steps that take longer than the last."""
    calls, needed = [], [0.01]

    def command(folder, *words):
        option, value = words[-2:]
        calls.append((option, value))
        if option == "--hours" and value < needed[0]:
            text = f"--hours {value:g}: a step takes 0.4 s here, and a run needs 1 min"
            error = f"dp-ema init: {text} (--hours {needed[0]:g}) for 100 steps. Give more time."
            needed[0] *= slower
            raise RuntimeError(error)
        return ""

    monkeypatch.setattr(example, "command", command)
    example.propose(tmp_path, 0.005)
    *refused, accepted = calls
    if slower > 2:
        assert accepted == ("--steps", 100)
    assert 1 <= len(refused) <= 3
    assert all(
        later >= 2 * hours for (_, hours), (_, later) in itertools.pairwise(refused)
    )


def test_another_error_of_init_ends_the_run(example, monkeypatch, tmp_path):
    def command(folder, *words):
        raise RuntimeError("dp-ema init: ../frames.extxyz: frame 3 has no energy")

    monkeypatch.setattr(example, "command", command)
    with pytest.raises(RuntimeError, match="frame 3 has no energy"):
        example.propose(tmp_path, 1.0)


@pytest.mark.parametrize(("teacher", "student"), [(6, 60), (60, 1), (6, 1)])
def test_a_table_is_made_of_few_frames(example, tmp_path, teacher, student):
    """A slow teacher, or students whose dynamics fail at once."""

    def run(number, cell):
        frames = []
        for k in range(number):
            frame = build.bulk("Al", cubic=True).repeat(2)
            frame.set_cell(frame.cell * cell, scale_atoms=True)
            frame.rattle(0.05, seed=k)
            stress = 0.01 * (1 - cell) * np.eye(3)
            frame.calc = example.SinglePointCalculator(frame, stress=stress)
            frame.info = {"seconds": 0.1 * k, "failed": False}
            frames.append(frame)
        return frames

    cells = {"small": 0.985, "same": 1.0, "large": 1.02}
    both = [
        {(300.0, name): run(number, cell) for name, cell in cells.items()}
        for number in (teacher, student)
    ]
    rows = example.compare.averages(*both, tmp_path / "radial.svg")
    height = next(row for row in rows if row[0].endswith("height"))
    assert [value.startswith("nan") for value in height[2:]] == [
        teacher < 10,
        student < 10,
    ]
    assert example.compare.table(rows).count("\n") > len(rows)


@pytest.mark.slow
def test_a_stopped_run_leaves_no_semaphore(example, tmp_path):
    program = Path(example.__file__)
    words = [
        sys.executable,
        program,
        "metal.cif",
        "--teacher",
        EMT,
        "-o",
        "out",
        "--workers",
        "2",
    ]
    with subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # what a shell starts in the background ignores SIGINT, and so would all that it starts
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        deadline = time.monotonic() + 120
        while (
            not (tmp_path / "out/settings.json").exists()
            and time.monotonic() < deadline
        ):
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=120)[1]
    assert process.returncode == 130
    assert err == "distill: stopped. The same command continues.\n"


def test_the_density_at_zero_pressure_is_that_of_an_equation_of_state(example):
    rng, runs = np.random.default_rng(1), []
    for scale in (0.985, 1.0, 1.02):
        frames = [build.bulk("Al", a=4 * scale, cubic=True) for _ in range(50)]
        for frame in frames:
            ideal = 4 * example.units.kB * 300 / frame.get_volume()
            static = (
                0.1 * (scale**-15 - 1.003**5) - ideal + 0.002 * rng.normal()
            )  # eV/angstrom^3
            frame.calc = example.SinglePointCalculator(
                frame, stress=-static * np.eye(3)
            )
        runs.append(frames)
    value, half = map(float, example.compare.density(runs, 300.0).split(" ± "))
    assert abs(value - 1.003 * 4 * 26.9815 * 1.66053907 / 4**3) < half < 0.02
