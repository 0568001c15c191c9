"""Deviations of models and neighbor statistics of data: formulas, files, commands, and the numbers of DeePMD-kit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from helpers import write_system
from infer_models import write_run

from deepmd_ema import cli
from deepmd_ema.infer.deviation import COLUMNS, DeviationOptions, frame_deviation, measure_deviation
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.interop.freeze import freeze

PEER = os.environ.get("DP_PEER")  # a virtual environment with DeePMD-kit 3.2.0
SAME_MATH = 1e-10
LEVELS = {"relative": 0.7, "relative_v": 0.2}
# the peer takes relative_v for sets of one frame only
MODES = {
    "plain": ({}, ["water", "open", "single"]),
    "relative": ({"atomic": True, "relative": 0.7}, ["water", "open"]),
    "real": ({"real_error": True, "atomic": True}, ["water", "open"]),
    "relative_v": (LEVELS, ["single"]),
    "real_relative": ({"real_error": True, **LEVELS}, ["single"]),
}


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


@pytest.fixture(scope="module")
def more_data(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("more")
    shutil.copytree(data, folder, dirs_exist_ok=True)
    write_system(folder / "single", frames=1, natoms=12, seed=3)
    return folder


def prediction(energy, force, virial):
    return {"energy": np.array(energy), "force": np.array(force, float), "virial": np.array(virial, float)}


def test_the_numbers_of_two_models_are_those_of_the_formulas():
    """Two models are half their difference away from the mean."""
    one = prediction(3.0, [[1, 0, 0], [0, 2, 0]], np.arange(9))
    two = prediction(5.0, [[1, 0, 6], [8, 2, 6]], np.arange(9) + np.where(np.arange(9) == 0, 4, 2))
    numbers, atoms = frame_deviation([one, two], None, DeviationOptions())
    np.testing.assert_allclose(atoms, [3, 5])
    np.testing.assert_allclose(numbers, [1, 0.5, np.sqrt(1 + 8 * 0.25) / 3, 5, 3, 4, 0.5])
    numbers, atoms = frame_deviation([one, two], None, DeviationOptions(relative=0.5, relative_v=2.0))
    np.testing.assert_allclose(atoms, [3 / (np.hypot(1, 3) + 0.5), 5 / (np.linalg.norm([4, 2, 3]) + 0.5)])
    mean = (np.arange(9) + np.where(np.arange(9) == 0, 2, 1)) / 2
    np.testing.assert_allclose(numbers[0], 1 / (np.linalg.norm(mean) + 2.0))


def test_real_errors_are_measured_from_the_labels():
    one, two = prediction(3.0, [[1, 0, 0]], np.zeros(9)), prediction(5.0, [[3, 0, 0]], np.ones(9))
    label = {"energy": np.array(2.0), "force": np.array([[0.0, 0, 0]])}
    numbers, atoms = frame_deviation([one, two], label, DeviationOptions(real_error=True))
    np.testing.assert_allclose(atoms, [np.sqrt(5)])
    np.testing.assert_allclose(numbers, [np.nan] * 3 + [np.sqrt(5)] * 4)  # no virial to compare with


def test_rows_are_those_of_the_models_evaluated_one_by_one(runs, data):
    found = measure_deviation([run[0] for run in runs], [data / "water"], DeviationOptions(frequency=5), device="cpu")
    (rows,) = found.systems.values()
    assert rows[:, 0].tolist() == [0, 5, 10]
    folder = data / "water"
    kinds = np.loadtxt(folder / "type.raw", dtype=int)
    coord, box = (np.load(folder / "set.000" / f"{name}.npy") for name in ("coord", "box"))
    forces = np.stack([Potential(run[0], device="cpu").evaluate(coord, kinds, box).force for run in runs])
    np.testing.assert_allclose(rows[:, 4], np.linalg.norm(forces.std(axis=0), axis=-1).max(axis=-1), rtol=1e-12)


def test_averages_of_one_run_are_models(runs, data):
    live, ema = runs[0]
    by_file = measure_deviation([live, ema], [data], device="cpu")
    both = measure_deviation([live.parent, runs[1][0].parent], [data], averages=["ema"], device="cpu")
    assert ["live" in word for word in by_file.models] == [True, False]
    assert all("averaged weights (ema)" in word for word in both.models)
    by_name = measure_deviation([live.parent], [data], averages=["live", "ema"], device="cpu")
    for system, rows in by_file.systems.items():
        np.testing.assert_array_equal(by_name.systems[system], rows)
    assert by_file.systems.keys() == both.systems.keys() == {str(data / "open"), str(data / "water")}


def test_the_file_is_that_of_deepmd_kit(runs, data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["model-devi", "-m", *(str(run[0]) for run in runs), "-s", str(data), "--atomic", "--device", "cpu"]
    assert cli.main(words) == 0
    assert "wrote model_devi.out" in capsys.readouterr().out
    lines = Path("model_devi.out").read_text().splitlines()
    assert lines[0] == f"# {data / 'open'}"
    assert lines[1].split() == ["#", *COLUMNS, "atm_devi_f(N)"]
    assert [len(line) for line in lines[2:4]] == [12 + 19 * (7 + 8)] * 2
    assert lines[4] == f"# {data / 'water'}"
    assert len(lines) == 4 + 2 + 3
    assert cli.main(words) == 0  # a table is written over, DeePMD-kit would append to it
    assert len(Path("model_devi.out").read_text().splitlines()) == len(lines)
    Path("model_devi.out").write_text("mine")
    assert cli.main(words) == 2
    assert "a file is there that is not a table" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-m", "A"], "-m: one model, and deviations are those of two or more"),
        (["-m", "A", "C"], "type_map is ['H', 'O'], and ['O', 'H'] in"),
        (["-m", "A", "B", "--average", "nobody"], "no average is called 'nobody'"),
        (["-m", "E", "B", "--average", "live"], "holds ema weights (average), not the live ones"),
        (["-m", "A", "--sample-layer", "--seed", "2"], "model-devi --sample-layer: was removed; give several models, "),
        (["-m", "A", "B", "-f", "0"], "expected a number of steps, at least 1"),
        (["-m", "A", "B", "--relative", "-1"], "expected a number above 0"),
        (["-m", "A", "B", "-S", "set"], "model-devi -S: all sets of a system are read"),
        ([], "the following arguments are required: -m/--models"),
    ],
)
def test_a_wrong_request_is_reported(runs, data, tmp_path, capsys, words, message):
    other = write_run(tmp_path, model__type_map=["H", "O"])[0]
    places = {"A": str(runs[0][0]), "B": str(runs[1][0]), "C": str(other), "E": str(runs[0][1])}
    words = [places.get(word, word) for word in words]
    assert cli.main(["model-devi", *words, "-s", str(data), "-o", str(tmp_path / "x.out"), "--device", "cpu"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.out").exists()


PEER_SCRIPT = """
import json, sys, numpy as np
from pathlib import Path
from deepmd.entrypoints.convert_backend import convert_backend
from deepmd.entrypoints.neighbor_stat import neighbor_stat
from deepmd.infer.model_devi import make_model_devi

work, data, modes = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
for path in work.glob("*.dp"):
    convert_backend(INPUT=str(path), OUTPUT=str(path.with_suffix(".pth")))
models = [str(work / f"{name}.pth") for name in "abc"]
found = {}
for mode, (options, names) in modes.items():
    for name in names:
        more = dict(system=str(Path(data) / name), output=str(work / "theirs"), frequency=3, **options)
        (found[f"{mode}.{name}"],) = make_model_devi(models=models, **more)
for mixed in (False, True):
    nearest, most = neighbor_stat(system=data, rcut=4.0, type_map=["H", "O"], mixed_type=mixed, backend="pytorch")
    found[f"neighbors.{mixed}"] = np.array([nearest, *most])
np.savez(work / "theirs.npz", **found)
"""


@pytest.mark.skipif(PEER is None, reason="set DP_PEER to a virtual environment with DeePMD-kit 3.2.0")
@pytest.mark.timeout(600)
def test_deepmd_kit_finds_the_same_deviations_and_neighbors(runs, more_data, tmp_path, capsys):
    files = [runs[0][0], runs[1][0], runs[0][1]]
    for name, file in zip("abc", files):
        freeze(load_model(file), tmp_path / f"{name}.dp")
    (tmp_path / "peer.py").write_text(PEER_SCRIPT)
    words = [Path(PEER) / "bin" / "python", tmp_path / "peer.py", tmp_path, more_data, json.dumps(MODES)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=590, check=False)
    assert done.returncode == 0, done.stderr
    theirs = np.load(tmp_path / "theirs.npz")
    for mode, (options, names) in MODES.items():
        for name in names:
            found = measure_deviation(files, [more_data / name], DeviationOptions(frequency=3, **options), device="cpu")
            (ours,) = found.systems.values()
            expected = theirs[f"{mode}.{name}"]
            if "real_error" in options and name == "open":  # without a label of the virial, where it compares with zero
                assert np.isnan(ours[:, 1:4]).all()
                ours, expected = np.delete(ours, [1, 2, 3], axis=1), np.delete(expected, [1, 2, 3], axis=1)
            np.testing.assert_allclose(ours, expected, rtol=SAME_MATH, atol=SAME_MATH)
    for mixed in (False, True):
        capsys.readouterr()
        words = ["neighbor-stat", "-s", str(more_data), "-r", "4", "-t", "H", "O", *["--mixed-type"] * mixed]
        assert cli.main(words) == 0
        nearest, *most = theirs[f"neighbors.{mixed}"]
        expected = f"min_nbor_dist: {nearest:f}\nmax_nbor_size: {np.array(most, int)}\n"
        assert capsys.readouterr().out == expected


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
    assert cli.main(["neighbor-stat", "-s", str(tmp_path), "-r", "4", "-t", "O", "H"]) == 0


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
