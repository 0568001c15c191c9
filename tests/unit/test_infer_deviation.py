"""Deviations of models and neighbor statistics of data: formulas, files, commands, and the numbers
of DeePMD-kit.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from helpers import write_system
from infer_models import write_run

from deepmd_ema import cli
from deepmd_ema.commands.deviation import (
    COLUMNS,
    DeviationOptions,
    DeviationReport,
    frame_deviation,
    measure_deviation,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, each with live and averaged weights."""
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / name, seed=seed) for name, seed in (("a", 0), ("b", 5))]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_system(folder / "water", frames=3, natoms=12, seed=1)
    write_system(folder / "open", frames=2, natoms=8, seed=2, pbc=False)
    return folder


def prediction(energy, force, virial):
    return {
        "energy": np.array(energy),
        "force": np.array(force, float),
        "virial": np.array(virial, float),
    }


def test_the_numbers_of_two_models_are_those_of_the_formulas():
    """Two models are half their difference away from the mean."""
    one = prediction(3.0, [[1, 0, 0], [0, 2, 0]], np.arange(9))
    two = prediction(
        5.0, [[1, 0, 6], [8, 2, 6]], np.arange(9) + np.where(np.arange(9) == 0, 4, 2)
    )
    numbers, atoms = frame_deviation([one, two], None, DeviationOptions())
    np.testing.assert_allclose(atoms, [3, 5])
    np.testing.assert_allclose(
        numbers, [1, 0.5, np.sqrt(1 + 8 * 0.25) / 3, 5, 3, 4, 0.5]
    )
    numbers, atoms = frame_deviation(
        [one, two], None, DeviationOptions(relative=0.5, relative_v=2.0)
    )
    np.testing.assert_allclose(
        atoms, [3 / (np.hypot(1, 3) + 0.5), 5 / (np.linalg.norm([4, 2, 3]) + 0.5)]
    )
    mean = (np.arange(9) + np.where(np.arange(9) == 0, 2, 1)) / 2
    np.testing.assert_allclose(numbers[0], 1 / (np.linalg.norm(mean) + 2.0))
    label = {"energy": np.array(2.0), "force": one["force"]}
    numbers, atoms = frame_deviation(
        [one, two], label, DeviationOptions(real_error=True)
    )
    np.testing.assert_allclose(atoms, np.sqrt([18, 50]))
    assert np.isnan(numbers[:3]).all()  # no virial to compare with


@pytest.mark.parametrize("command", ["test", "model-devi"])
def test_neighbors_without_a_slot_are_reported(tmp_path, data, caplog, command):
    """Also of open molecules, whose pairs are found together."""
    files = [
        str(write_run(tmp_path / str(k), model__descriptor__sel=sel)[0])
        for k, sel in enumerate(([2, 24], [24, 24]))
    ]
    for system in ("water", "open"):
        caplog.clear()
        words = ["-o", str(tmp_path / "o")] if command == "model-devi" else []
        models = [files] if command == "model-devi" else [files[:1], files[1:]]
        for model in models:
            assert (
                cli.main([command, "-m", *model, "-s", str(data / system), *words]) == 0
            )
        [text] = [
            r.getMessage() for r in caplog.records if "neighbors" in r.msg % r.args
        ]
        assert re.match(
            rf"{re.escape(files[0])}: an atom has up to \[\d+, \d+\] neighbors within 4 angstrom, "
            r"and the model keeps \[2, 24\]",
            text,
        )


def test_frames_without_a_label_have_no_part_in_the_mean_of_their_system():
    rows = np.full((3, len(COLUMNS)), np.nan)
    rows[1:] = [[1.0], [3.0]]
    report = DeviationReport([], {"some": rows, "none": rows[:1]})
    some, none = report.text().splitlines()[-2:]
    assert some.split() == ["some", "3", "2", "3", "2"]
    assert none.split() == ["none", "1", "-", "-", "-"]


def test_averages_of_one_run_are_models(runs, data):
    live, ema = runs[0]
    by_file = measure_deviation([live, ema], [data], device="cpu")
    both = measure_deviation(
        [live.parent, runs[1][0].parent], [data], averages=["ema"], device="cpu"
    )
    assert ["live" in word for word in by_file.models] == [True, False]
    assert all("averaged weights (ema)" in word for word in both.models)
    by_name = measure_deviation(
        [live.parent], [data], averages=["live", "ema"], device="cpu"
    )
    for system, rows in by_file.systems.items():
        np.testing.assert_array_equal(by_name.systems[system], rows)
    assert (
        by_file.systems.keys()
        == both.systems.keys()
        == {str(data / "open"), str(data / "water")}
    )


def test_the_file_is_that_of_deepmd_kit(here, runs, data, capsys):
    words = [
        "model-devi",
        "-m",
        *(str(run[0]) for run in runs),
        "-s",
        str(data),
        "--atomic",
        "--device",
        "cpu",
    ]
    assert cli.main(words) == 0
    assert "wrote model_devi.out" in capsys.readouterr().out
    lines = Path("model_devi.out").read_text().splitlines()
    assert lines[0] == f"# {data / 'open'}"
    assert lines[1].split() == ["#", *COLUMNS, "atm_devi_f(N)"]
    assert [len(line) for line in lines[2:4]] == [12 + 19 * (7 + 8)] * 2
    assert lines[4] == f"# {data / 'water'}"
    assert len(lines) == 4 + 2 + 3
    assert (
        cli.main(words) == 0
    )  # a table is written over, DeePMD-kit would append to it
    assert len(Path("model_devi.out").read_text().splitlines()) == len(lines)
    Path("model_devi.out").write_text("mine")
    assert cli.main(words) == 2
    assert "a file is there that is not a table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "A"], "-m: one model, and deviations are those of two or more"),
        (["-m", "A", "C"], "type_map is ['H', 'O'], and ['O', 'H'] in"),
        (
            ["-m", "E", "B", "--average", "live"],
            "holds ema weights (average), not the live ones",
        ),
        (["-m", "A", "B", "--relative", "-1"], "expected a number above 0"),
    ],
)
def test_a_wrong_request_is_reported(runs, data, tmp_path, capsys, words, message):
    other = write_run(tmp_path, model__type_map=["H", "O"])[0]
    places = {
        "A": str(runs[0][0]),
        "B": str(runs[1][0]),
        "C": str(other),
        "E": str(runs[0][1]),
    }
    words = [places.get(word, word) for word in words]
    assert (
        cli.main(
            [
                "model-devi",
                *words,
                "-s",
                str(data),
                "-o",
                str(tmp_path / "x.out"),
                "--device",
                "cpu",
            ]
        )
        == 2
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.out").exists()


def test_neighbor_statistics_name_the_elements_of_the_data(data, tmp_path, capsys):
    """Two systems that name their elements in another order: numbers are those of the elements."""
    assert cli.main(["neighbor-stat", "-s", str(data), "-r", "4"]) == 0
    plain = capsys.readouterr().out.splitlines()
    assert plain[0] == "type_map: ['O', 'H']"
    assert cli.main(["neighbor-stat", "-s", str(data), "-r", "4", "-t", "H", "O"]) == 0
    given = capsys.readouterr().out.splitlines()
    assert given[0] == plain[1]
    oxygen, hydrogen = plain[2].removeprefix("max_nbor_size: ").strip("[]").split()
    assert given[1] == f"max_nbor_size: [{hydrogen} {oxygen}]"
    write_system(tmp_path / "unnamed", frames=1, natoms=8)
    (tmp_path / "unnamed" / "type_map.raw").unlink()
    assert cli.main(["neighbor-stat", "-s", str(tmp_path), "-r", "4"]) == 2
    assert (
        "type_map.raw: names no elements in the order of their numbers. Name them all with -t"
        in capsys.readouterr().err
    )
    assert (
        cli.main(["neighbor-stat", "-s", str(tmp_path), "-r", "4", "-t", "O", "H"]) == 0
    )


def test_atoms_in_one_place_are_reported(data, tmp_path, capsys):
    write_system(tmp_path / "bad", frames=3, natoms=8)
    file = tmp_path / "bad" / "set.000" / "coord.npy"
    coord = np.load(file)
    coord[1].reshape(-1, 3)[5] = coord[1].reshape(-1, 3)[2]
    np.save(file, coord)
    assert cli.main(["neighbor-stat", "-s", str(tmp_path), "-r", "4"]) == 2
    assert "frame 1 (from 0): atoms 2 and 5 are in one place" in capsys.readouterr().err
    assert cli.main(["neighbor-stat", "-s", str(data), "-r", "0"]) == 2
    assert "expected a number above 0" in capsys.readouterr().err
