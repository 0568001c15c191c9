"""`dp-ema test`: the numbers, what is printed, what is written."""

import json
import math
import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system
from infer_models import run as run
from kept_runs import write_kept_run

from deepmd_ema import cli
from deepmd_ema.cli.read import chosen_systems
from deepmd_ema.config.labels import FORCE, GPA
from deepmd_ema.errors import ConfigError, UserError
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.potential import Potential
from deepmd_ema.report.facts import mae_rmse
from deepmd_ema.report.plots import plot_parity

DIPOLES = Path(__file__).parents[1] / "golden" / "quantities" / "dipole_se_e2_a.dp"

SAME_MATH = 1e-10


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """One periodic system of 4 frames in two sets, one open of 3 frames without virials, one mixed
    of 3.
    """
    root = tmp_path_factory.mktemp("labelled")
    write_system(root / "cell", frames=4, natoms=8, seed=1, sets=2, atom_ener=True)
    write_system(root / "open", frames=3, natoms=5, seed=2, pbc=False, atom_ener=True)
    write_system(
        root / "mixed",
        frames=3,
        natoms=6,
        seed=3,
        mixed=True,
        virtual=2,
        atom_ener=True,
    )
    return root


def read(root, name, array):
    return np.concatenate(
        [np.load(f) for f in sorted((root / name).glob(f"set.*/{array}.npy"))]
    )


def test_the_errors_are_those_of_the_python_interface(run, labelled):
    report = measure(run[0], [labelled / "cell"])
    coord, box = read(labelled, "cell", "coord"), read(labelled, "cell", "box")
    found = Potential(run[0]).evaluate(
        coord, np.loadtxt(labelled / "cell" / "type.raw", dtype=int), box
    )
    force = found.force.reshape(4, -1) - read(labelled, "cell", "force")
    energy = found.energy - read(labelled, "cell", "energy")
    stress = (found.virial - read(labelled, "cell", "virial")) / abs(
        np.linalg.det(box.reshape(-1, 3, 3))
    )[:, None]
    summary = report.total.summary()
    assert summary["rmse_f"] == pytest.approx(np.sqrt(np.mean(force**2)), rel=SAME_MATH)
    assert summary["mae_e"] == pytest.approx(np.mean(abs(energy)), rel=SAME_MATH)
    assert summary["rmse_e_peratom"] == pytest.approx(
        np.sqrt(np.mean((energy / 8) ** 2)), rel=SAME_MATH
    )
    assert summary["mae_s"] == pytest.approx(np.mean(abs(stress)), rel=SAME_MATH)
    assert math.isnan(summary["mae_ae"])


def test_the_lines_are_those_of_the_peer(run, labelled):
    text = measure(run[0], [labelled / "cell", labelled / "open"], atomic=True).text()
    lines = text.splitlines()
    assert lines[0].endswith("model.ckpt-7.pt: live weights of step 7")
    assert f"# testing system : {labelled / 'cell'}" in lines
    assert "# number of test data : 4 " in lines
    start = lines.index("# ----------weighted average of errors----------- ")
    assert lines[start + 1] == "# number of systems : 2"
    titles = [line.partition(" : ")[0] for line in lines[start + 2 : start + 18]]
    assert titles == [
        "Energy MAE        ",
        "Energy RMSE       ",
        "Energy MAE/Natoms ",
        "Energy RMSE/Natoms",
        "Force  MAE        ",
        "Force  RMSE       ",
        "Virial MAE        ",
        "Virial RMSE       ",
        "Virial MAE/Natoms ",
        "Virial RMSE/Natoms",
        "Stress MAE        ",
        "Stress RMSE       ",
        "Atomic ener MAE   ",
        "Atomic ener RMSE  ",
        "# " + "-" * 47 + " ",
        "# all frames, MAE / RMSE",
    ]
    in_mev = lines[start + 18 : start + 25]
    assert [line[:4] for line in in_mev] == [
        "# E ",
        "# F ",
        "# S ",
        "# V ",
        "# RM",
        "# --",
        "# er",
    ]
    forces = np.concatenate(
        [read(labelled, name, "force").ravel() for name in ("cell", "open")]
    )
    rms = float(
        re.match(
            r"# RMS of the labels: F ([\d.]+) meV/Å, S [\d.]+ meV/Å³, V [\d.]+ meV/atom$",
            in_mev[4],
        )[1]
    )
    assert rms == pytest.approx(1000 * np.sqrt(np.mean(forces**2)), rel=1e-4)
    stress = [float(line.split()[3]) for line in lines[start + 12 : start + 14]]
    in_gpa = [
        float(number) for number in re.findall(r"[\d.]+", in_mev[2].partition("(")[2])
    ]
    assert in_gpa == pytest.approx([GPA * value for value in stress], rel=1e-4)
    assert (
        sum(line.startswith("Virial MAE  ") for line in lines) == 2
    )  # the open system has none
    assert lines[start + 2].endswith(" eV")
    assert float(lines[start + 6].split()[3]) > 0


def test_forces_weighted_by_atom_have_errors_of_their_own(run, tmp_path):
    """Unknown forces, of weight 0, are in the plain errors only."""
    system = write_system(tmp_path / "s", frames=4, natoms=8, seed=1, atom_pref=True)
    file = system / "set.000" / "atom_pref.npy"
    pref = np.load(file)
    pref[:, :3] = 0
    np.save(file, pref)
    report = measure(run[0], [system])
    errors = np.array(
        [frame.prediction["force"] - frame.label["force"] for frame in report.frames]
    )
    weights = np.repeat(pref[:, :, None], 3, axis=2)
    absolute, squared = (
        (weights * size).sum() / weights.sum() for size in (abs(errors), errors**2)
    )
    text = report.text()
    assert float(
        re.search(r"^Force weighted MAE : (\S+) eV/Å$", text, re.MULTILINE)[1]
    ) == pytest.approx(absolute)
    assert float(
        re.search(r"^Force weighted RMSE : (\S+) eV/Å$", text, re.MULTILINE)[1]
    ) == pytest.approx(squared**0.5)
    assert report.total.metric("Q:RMSE") == pytest.approx(squared**0.5, rel=SAME_MATH)
    assert report.by_system[str(system)].metric("Q:MAE") == pytest.approx(
        absolute, rel=SAME_MATH
    )
    assert f"# Q {mae_rmse(report.total, 'Q')} meV/Å" in text
    assert report.total.metric("F:RMSE") == pytest.approx(
        np.sqrt(np.mean(errors**2)), rel=SAME_MATH
    )


def test_forces_by_element_and_worst_frames_are_listed(run, labelled):
    text = measure(run[0], [labelled]).text()
    elements = [
        line.split()[1:3]
        for line in text.split("# forces by element")[1].splitlines()[3:5]
    ]
    assert elements == [
        ["O", "34"],
        ["H", "31"],
    ]  # 4 * 4 + 3 * 3 + 3 * 3 atoms, 4 * 4 + 3 * 2 + 3 * 3
    worst = text.split("# the 10 frames of largest force error")[1].splitlines()[3:13]
    sizes = [float(line.split()[1]) for line in worst]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(
        measure(run[0], [labelled]).worst().rows[0][0], abs=1e-3
    )
    assert any(f"{labelled / 'cell'}/set.001 frame 1" in line for line in worst)


def test_errors_are_listed_by_config_type_and_by_composition_the_worst_first(
    run, tmp_path
):
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write

    rng, frames = np.random.default_rng(0), []
    for kind, symbols, size in [
        ("md", "OH2", 0.1),
        ("scan", "OH2", 5.0),
        ("md", "O2H", 0.2),
        ("", "O2H", 0.2),
    ] * 2:
        atoms = Atoms(
            symbols, [[0, 0, 0], [1, 0, 0], [0, 1, 0]] + 0.1 * rng.normal(size=(3, 3))
        )
        atoms.calc = SinglePointCalculator(
            atoms, energy=1.0, forces=size * rng.normal(size=(3, 3))
        )
        atoms.info.update({"config_type": kind} if kind else {})
        frames.append(atoms)
    write(tmp_path / "data.xyz", frames, format="extxyz")
    report = measure(run[0], [tmp_path / "data.xyz"])
    kinds, compositions = report.groups()
    assert [(row[0], row[1]) for row in kinds.rows] == [
        ("scan", 2),
        ("none", 2),
        ("md", 4),
    ]
    assert [(row[0], row[1]) for row in compositions.rows] == [
        ("O1 H2", 4),
        ("O2 H1", 4),
    ]
    scan = [f for f in report.frames if f.source[1] % 4 == 1]
    error = np.concatenate([f.prediction[FORCE] - f.label[FORCE] for f in scan])
    assert kinds.rows[0][-1] == pytest.approx(
        1e3 * np.sqrt(np.mean(error**2)), rel=SAME_MATH
    )  # meV/angstrom
    for number, atoms in enumerate(frames):
        atoms.info["config_type"] = f"frame {number}"
    write(tmp_path / "data.xyz", frames, format="extxyz")
    text = measure(run[0], [tmp_path / "data.xyz"]).text()
    assert (
        "# config_type or group names single frames and no groups (8 values in 8 frames)\n"
        in text
    )


def test_detail_files_hold_labels_beside_predictions(run, labelled, tmp_path):
    report = measure(run[0], [labelled], atomic=True)
    written = report.write_details(tmp_path / "detail")
    names = [
        f"detail.{e}.out" for e in ("e", "e_peratom", "f", "v", "v_peratom", "s", "ae")
    ]
    assert [p.name for p in written] == names
    tables = {
        path.name.split(".")[1]: np.loadtxt(path, encoding="utf-8") for path in written
    }
    assert tables["f"].shape == (4 * 8 + 3 * 5 + 3 * 6, 6)
    order = ("cell", "mixed", "open")
    np.testing.assert_array_equal(
        tables["e"][:, 0], np.concatenate([read(labelled, n, "energy") for n in order])
    )
    np.testing.assert_array_equal(
        tables["f"][:32, :3], read(labelled, "cell", "force").reshape(-1, 3)
    )
    assert tables["v"].shape == (10, 18)
    assert tables["s"].shape == (7, 18)
    assert np.isnan(tables["v"][-3:, :9]).all()
    assert np.isfinite(tables["v"][:, 9:]).all()
    errors = tables["e_peratom"][:, 1] - tables["e_peratom"][:, 0]
    assert abs(errors).mean() == pytest.approx(
        report.total.metric("E:MAE"), rel=SAME_MATH
    )
    stress = tables["s"][:, 9:] - tables["s"][:, :9]
    assert np.sqrt((stress**2).mean()) == pytest.approx(
        report.total.metric("S:RMSE"), rel=SAME_MATH
    )
    first = written[0].read_text().splitlines()
    assert first[0] == f"# {labelled / 'cell'}: data_e pred_e"
    assert first[5] == f"# {labelled / 'mixed'}: data_e pred_e"


def test_systems_are_named_in_a_file_or_by_an_input(tmp_path):
    listed = tmp_path / "list"
    listed.write_text("# mine\na\n\n  b \n")
    assert chosen_systems(Namespace(datafile=str(listed)))[0] == ["a", "b"]
    listed.write_text("\n")
    with pytest.raises(UserError, match="list: names no system"):
        chosen_systems(Namespace(datafile=str(listed)))[0]
    with pytest.raises(UserError, match="nowhere: cannot be read"):
        chosen_systems(Namespace(datafile=str(tmp_path / "nowhere")))[0]
    config = tmp_path / "input.json"
    config.write_text(json.dumps(tiny_input(["train"], ["valid"])))
    assert chosen_systems(Namespace(valid_data=str(config)))[0] == ["valid"]
    config.write_text(json.dumps(tiny_input(["train"])))
    with pytest.raises(
        ConfigError,
        match=r"input.json: training.validation_data is not there. Give .* with -s",
    ):
        chosen_systems(Namespace(valid_data=str(config)))


def test_the_command_prints_and_writes(
    here, run, labelled, tmp_path, capsys, monkeypatch
):
    titles, drawn = [], "deepmd_ema.report.plots.plot_parity"
    monkeypatch.setattr(
        drawn,
        lambda pairs, path, title: (
            titles.append(title) or plot_parity(pairs, path, title)
        ),
    )
    words = [
        "test",
        "-m",
        str(run[0]),
        "-s",
        str(labelled / "cell"),
        str(labelled / "open"),
        "-n",
        "2",
        "-d",
        "det",
    ]
    assert cli.main([*words, "--plot", "--use-ema", "-a", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "averaged weights (ema) of step 7" in out
    assert "Atomic ener MAE    : " in out
    assert "wrote det.e.out, det.e_peratom.out, det.f.out" in out
    assert ", parity.png\n" in out
    assert (tmp_path / "parity.png").read_bytes()[:4] == b"\x89PNG"
    assert titles == [
        "model.ckpt-7.pt: averaged weights (ema) of step 7; 4 frames of 2 systems"
    ]  # fits one line


def test_one_of_several_averages_is_tested_by_its_name(tmp_path, labelled, capsys):
    """`test --use-ema` requested --average, which test did not have."""
    path = write_kept_run(tmp_path, None, steps=40, every=20) / "model.ckpt-40.pt"
    words = ["test", "-m", str(path), "-s", str(labelled / "cell")]
    assert cli.main([*words, "--use-ema"]) == 2
    assert "Give --average one of: p05, p10" in capsys.readouterr().err
    assert cli.main([*words, "--average", "p10"]) == 0
    assert "averaged weights (p10) of step 40" in capsys.readouterr().out


def test_what_cannot_be_tested_or_written_is_named(run, labelled, tmp_path):
    path = write_system(
        tmp_path / "bare", frames=2, natoms=4, energy=False, force=False, virial=False
    )
    with pytest.raises(
        UserError, match=r"no frame of .*bare has an energy, a force or a virial"
    ):
        measure(run[0], [path])
    with pytest.raises(
        UserError,
        match=r"nowhere/x.e.out: cannot be written \(No such file or directory\)",
    ):
        measure(run[0], [labelled / "open"]).write_details(tmp_path / "nowhere" / "x")


def test_detail_files_of_tensors_have_rows_of_the_atoms_that_have_them(tmp_path):
    """In the file H has no dipoles."""
    system = write_system(tmp_path / "data", frames=3, natoms=6)
    is_oxygen = np.loadtxt(system / "type.raw") == 0
    labels = np.random.default_rng(0).normal(size=(3, 6, 3)) * is_oxygen[:, None]
    np.save(system / "set.000" / "atomic_dipole.npy", labels.reshape(3, -1))
    report = measure(DIPOLES, [system], atomic=True)
    report.write_details(tmp_path / "detail")
    label, predicted = np.split(np.loadtxt(tmp_path / "detail.adipole.out"), 2, axis=1)
    np.testing.assert_allclose(label, labels[:, is_oxygen].reshape(-1, 3))
    rmse = report.total.summary()["rmse_adipole"]
    assert np.sqrt(np.mean((predicted - label) ** 2)) == pytest.approx(rmse)
