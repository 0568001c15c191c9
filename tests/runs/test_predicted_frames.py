"""`dp-ema test -o`: frames with predictions under the names of ASE, and labels beside them."""

from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system
from infer_models import run as run
from infer_models import write_run

from deepmd_ema import cli
from deepmd_ema.calculator import DP
from deepmd_ema.infer.evaluate import measure

read = pytest.importorskip("ase.io").read
LABELS = "#energy=REF_energy,force=REF_forces,stress=REF_stress"
SAME_MATH = 1e-10


@pytest.fixture(scope="module")
def file(run, tmp_path_factory):
    """Predictions for a periodic system with its elements in another order, an open one, and one
    with virtual atoms.
    """
    root = tmp_path_factory.mktemp("predicted")
    write_system(root / "a_cell", frames=2, natoms=8, elements=("H", "O"), seed=1)
    write_system(root / "b_open", frames=1, natoms=5, seed=2, pbc=False)
    write_system(root / "c_mixed", frames=2, natoms=6, seed=3, mixed=True, virtual=2)
    systems = [root / name for name in ("a_cell", "b_open", "c_mixed")]
    assert (
        cli.main(
            [
                "test",
                "-m",
                str(run[0]),
                "-s",
                *map(str, systems),
                "-o",
                str(root / "out.extxyz"),
            ]
        )
        == 0
    )
    return root / "out.extxyz", measure(run[0], systems)


def test_ase_reads_the_predictions_as_results_of_the_calculator(run, file):
    frames, calculator = read(file[0], ":"), DP(run[0])
    assert [len(frame) for frame in frames] == [8, 8, 5, 6, 6]
    for frame in frames:
        again = frame.copy()
        again.calc = calculator
        assert frame.get_potential_energy() == pytest.approx(
            again.get_potential_energy(), rel=SAME_MATH
        )
        np.testing.assert_allclose(
            frame.get_forces(), again.get_forces(), atol=SAME_MATH
        )
        if frame.pbc.all():
            np.testing.assert_allclose(
                frame.get_stress(), again.get_stress(), atol=SAME_MATH
            )
        else:
            assert "stress" not in frame.calc.results
    assert "".join(frames[0].symbols) == "HOHOHOHO"  # as in the system


def test_ase_has_the_labels_beside_them(file):
    folders = [
        file[0].parent / name / "set.000" for name in ("a_cell", "b_open", "c_mixed")
    ]
    energies = [
        energy for folder in folders for energy in np.load(folder / "energy.npy")
    ]
    frames = read(file[0], ":")
    assert [frame.info["REF_energy"] for frame in frames] == energies
    forces = np.load(folders[0] / "force.npy")
    assert [
        frame.arrays["REF_forces"].ravel().tolist() for frame in frames[:2]
    ] == forces.tolist()
    for frame, virial in zip(frames, np.load(folders[0] / "virial.npy")):
        np.testing.assert_allclose(
            frame.info["REF_stress"], -virial / frame.get_volume(), rtol=SAME_MATH
        )
    assert "REF_stress" not in frames[2].info


@pytest.mark.parametrize("suffix", ["", LABELS.replace("REF_", "")])
def test_a_file_that_is_read_again_gives_the_errors_of_its_labels_or_none(
    suffix, run, file
):
    choice = suffix or LABELS
    again = measure(run[0], [f"{file[0]}{choice}"])
    for name in ("rmse_e", "rmse_f", "rmse_v", "rmse_s", "num_frames"):
        expected = (
            file[1].total.summary()[name] if not suffix or name == "num_frames" else 0
        )
        # the virial of the open frame is not in the file, as it has none
        assert again.total.summary()[name] == pytest.approx(
            expected, rel=SAME_MATH, abs=SAME_MATH
        ), name


def test_the_file_does_not_choose_which_are_the_labels(file, tmp_path, capsys):
    assert cli.main(["convert", str(file[0]), str(tmp_path / "data")]) == 2
    assert (
        f"such as {file[0]}#energy=REF_energy,force=REF_forces,stress=REF_stress"
        in capsys.readouterr().err
    )
    assert cli.main(["convert", f"{file[0]}{LABELS}", str(tmp_path / "data.xyz")]) == 0
    assert (
        "atom_energy" not in capsys.readouterr().out
    )  # shares of atoms that have no label


def test_what_has_no_label_is_predicted_and_kinds_are_kept(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lattice = 'Lattice="6 0 0 0 6 0 0 0 6" config_type=liquid energy=-1.5'
    Path("in.xyz").write_text(
        f"2\n{lattice} Properties=species:S:1:pos:R:3\nH 0 0 0\nO 0 0 1.2\n"
    )
    assert cli.main(["test", "-m", str(run[0]), "-s", "in.xyz", "-o", "out.xyz"]) == 0
    (frame,) = read("out.xyz", ":")
    assert frame.info == {"REF_energy": -1.5, "config_type": "liquid"}
    assert set(frame.calc.results) == {"energy", "forces", "stress"}
    assert "REF_forces" not in frame.arrays


def test_energies_of_atoms_are_there_where_they_are_labels(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=1, atom_ener=True)
    assert (
        cli.main(["test", "-m", str(run[0]), "-s", "data", "-a", "-o", "out.extxyz"])
        == 0
    )
    frame = read("out.extxyz")
    assert frame.get_potential_energies().sum() == pytest.approx(
        frame.get_potential_energy()
    )
    assert (
        frame.arrays["REF_energies"].tolist()
        == np.load("data/set.000/atom_ener.npy")[0].tolist()
    )


def test_another_quantity_has_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=2, energy=False, force=False, virial=False)
    gaps = np.array([[1.5], [2.5]])
    np.save("data/set.000/gap.npy", gaps)
    config = tiny_input(["data"], num_steps=1, loss={"type": "property"})
    fitting = {"type": "property", "property_name": "gap", "task_dim": 1, "neuron": [4]}
    changes = {"model__fitting_net": fitting, "loss": config["loss"]}
    model, _ = write_run(tmp_path / "run", averages=False, **changes)
    assert cli.main(["test", "-m", str(model), "-s", "data", "-o", "out.extxyz"]) == 0
    for frame, gap in zip(read("out.extxyz", ":"), gaps[:, 0]):
        atoms = frame.copy()
        atoms.calc = DP(model)
        assert frame.info["gap"] == pytest.approx(
            atoms.calc.get_property("gap", atoms).item()
        )
        assert frame.info["REF_gap"] == gap


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.txt", "-o out.txt: expected a file that ends in .xyz or .extxyz"),
        ("data.xyz", "-o data.xyz: exists, and may be data"),
        ("no/out.xyz", "the folder no is not there"),
    ],
)
def test_no_other_file_is_written_over(
    name, message, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    Path("data.xyz").write_text("1\nenergy=1 Properties=species:S:1:pos:R:3\nH 0 0 0\n")
    assert cli.main(["test", "-m", str(run[0]), "-s", "data.xyz", "-o", name]) == 2
    assert message in capsys.readouterr().err
    assert Path("data.xyz").read_text().startswith("1\nenergy=1")
