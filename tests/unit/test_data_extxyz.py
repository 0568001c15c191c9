"""Extended XYZ files as training data: read as ASE reads them, every name and every fault
reported.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import LABELS, text, toy_atoms
from helpers import assert_same_files, open_data, tiny_input

from deepmd_ema.cli import main
from deepmd_ema.config import config_from_dict
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.run import check_task, open_run
from deepmd_ema.data.source import FrameSource
from deepmd_ema.errors import DataError
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig


def write_toy(path, *args, **options):
    from ase.io import write

    write(path, toy_atoms(*args, **options), format="extxyz")


@pytest.fixture
def write_text(here, tmp_path):

    def write(*frames, name="a.xyz", mode="w"):
        with open(tmp_path / name, mode) as file:
            file.write("".join(frames) if mode == "w" else b"".join(frames))
        return name

    return write


def open_one(name, type_map=("O", "H"), labels=LABELS, **spec):
    [source] = open_data([name], list(type_map), labels, **spec)
    return source


def problems_of(name, *args, **spec):
    with pytest.raises(DataError) as caught:
        open_one(name, *args, **spec)
    return "\n".join(caught.value.problems)


def test_frames_are_those_that_ase_reads(tmp_path):
    from ase.io import read

    write_toy(tmp_path / "a.extxyz", 12, num_types=3)
    source: FrameSource = open_one(
        str(tmp_path / "a.extxyz"), ("H", "C", "O"), (*LABELS, "atom_energy")
    )
    expected = read(tmp_path / "a.extxyz", ":")
    assert source.num_frames == 12
    assert len({*source.frame_sizes.tolist()}) > 3
    for k, atoms in enumerate(expected):
        frame = source.frame(k)
        assert [
            ["H", "C", "O"][t] for t in frame.atom_type
        ] == atoms.get_chemical_symbols()
        np.testing.assert_array_equal(frame.coord, atoms.positions)
        np.testing.assert_array_equal(frame.labels["force"], atoms.get_forces())
        np.testing.assert_array_equal(
            frame.labels["atom_energy"], atoms.calc.results["energies"]
        )
        assert frame.labels["energy"] == atoms.get_potential_energy()
        assert (frame.box is None) == (not atoms.pbc.any())
        if frame.box is not None:
            np.testing.assert_array_equal(frame.box, atoms.cell.array)
            stress = -frame.labels["virial"].reshape(3, 3) / atoms.get_volume()
            np.testing.assert_allclose(
                stress, atoms.get_stress(voigt=False), rtol=1e-12, atol=1e-15
            )
        assert source.where(k) == (str(tmp_path / "a.extxyz"), k, 12)


@pytest.mark.parametrize(
    ("head", "virial"),
    [
        (
            {"virial": "1 4 7 2 5 8 3 6 9"},
            range(1, 10),
        ),  # column by column, as ASE writes this name
        ({"dft_virials": "1 2 3 23 13 12"}, [1, 12, 13, 12, 2, 23, 13, 23, 3]),
        ({"stress": "1 4 7 2 5 8 3 6 9"}, [-729 * k for k in range(1, 10)]),
        ({"virial": "_JSON [[1, 2, 3], [4, 5, 6], [7, 8, 9]]"}, range(1, 10)),
    ],
)
def test_virials_and_stresses_by_their_usual_names(write_text, head, virial):
    name = write_text(text(**head))
    assert open_one(name).frame(0).labels["virial"].tolist() == pytest.approx(
        list(virial), rel=1e-14
    )


def test_names_are_found_chosen_and_reported_once(write_text):
    frame = text(
        rows="O 0 0 0 1 2 3 1 1 1 0.5\nH 0 0 1 4 5 6 1 1 1 0.5\n",
        Properties="species:S:1:pos:R:3:REF_forces:R:3:mace_forces:R:3:charge:R:1",
        energy=None,
        REF_energy=-2,
        mace_energy=-3,
        config_type="bulk water",
        stress="0 0 0 0 0 0 0 0 0",
    )
    source = open_one(
        write_text(
            frame,
            text(
                Lattice=None,
                energy=None,
                Properties="species:S:1:pos:R:3",
                rows="O 0 0 0\nH 0 0 1\n",
            ),
        )
    )
    assert source.frame(0).labels["energy"] == -2
    assert source.frame(0).labels["force"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert source.frame(1).labels == {}
    assert source.notes == [
        "reads energy from REF_energy in 1 frame, force from REF_forces in 1 frame, virial = "
        "-volume * stress (stress in eV/angstrom^3, positive under tension, as in ASE) in 1 frame",
        "does not read charge in 1 frame, mace_energy in 1 frame, mace_forces in 1 frame",
        "config_type has 1 value in 1 frame",
    ]
    chosen = open_one("a.xyz#energy=mace_energy,forces=mace_forces")
    assert chosen.frame(0).labels["energy"] == -3
    assert chosen.frame(0).labels["force"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_all_labels_with_several_names_are_in_one_line_with_the_commonest_names(
    write_text,
):
    rows, properties = (
        "O 0 0 0 1 2 3 1 2 3\nH 0 0 1 4 5 6 4 5 6\n",
        "species:S:1:pos:R:3:forces:R:3:REF_forces:R:3",
    )
    full = {
        "rows": rows,
        "Properties": properties,
        "REF_energy": -2,
        "virial": "0 " * 9,
        "REF_stress": "0 " * 9,
    }
    found = problems_of(write_text(*[text(**full)] * 2, text(), text()))
    assert found == (
        "a.xyz: energy may be REF_energy (2 frames) or energy (4 frames); force may be REF_forces "
        "(2 frames) or forces (4 frames); virial may be virial (2 frames) or REF_stress (2 "
        "frames). Say which after the name of the file, such as "
        "a.xyz#energy=energy,force=forces,stress=REF_stress."
    )
    found = problems_of(f"{write_text(*[text(**full)] * 2)}#virial=virial")
    assert found.endswith(
        "such as a.xyz#virial=virial,energy=REF_energy,force=REF_forces."
    )
    source = open_one("a.xyz#energy=REF_energy,force=REF_forces,stress=REF_stress")
    assert source.frame(0).labels["energy"] == -2


@pytest.mark.parametrize(
    ("label", "stored"),
    [
        ("gap", "gap"),
        ("gap", "REF_gap"),
        ("gap", "Gap"),
        ("Gap", "Gap"),
        ("Gap", "dft_Gap"),
        ("ref_gap", "ref_gap"),
        ("band_gap", "band-gap"),
    ],
)
def test_names_of_a_property_are_found_as_those_of_energies_are(
    write_text, label, stored
):
    source = open_one(
        write_text(text(**{stored: 1.5}, dft_energy=2)), labels=[f"{label}[1]"]
    )
    assert source.frame(0).labels == {f"{label}[1]": 1.5}
    # what is not read may have several names
    assert source.notes == [
        f"reads {label}[1] from {stored}",
        "does not read dft_energy, energy, forces",
    ]


def test_a_name_of_another_origin_is_no_property(write_text):
    assert (
        open_one(write_text(text(gap=1.5)), labels=["ref_gap[1]"]).frame(0).labels == {}
    )


@pytest.mark.parametrize("key", ["gap", "gap[1]"])
def test_names_of_a_property_can_be_chosen(write_text, key):
    name = write_text(text(ref_gap=1, dft_gap=2))
    assert problems_of(name, labels=["gap[1]"]).endswith(
        "such as a.xyz#gap[1]=dft_gap."
    )
    assert open_one(f"{name}#{key}=ref_gap", labels=["gap[1]"]).frame(0).labels == {
        "gap[1]": 1
    }


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (
            [text(), text(energy="abc")],
            "frame 1 (from 0): energy: is 'abc', expected numbers.",
        ),
        ([text(virial="1 2 3")], "virial: has 3 numbers, expected 9 (3x3) or 6"),
        ([text(Lattice="1 2 3")], "Lattice: has 3 numbers, expected 9."),
        ([text(pbc="T T F")], 'pbc = "T T F": periodic in some directions only'),
        ([text(Lattice=None, pbc="T T T")], "without Lattice"),
        (
            ["2\nLattice='9 0 0 0 9 0 0 0 9\nO 0 0 0\nH 0 0 1\n"],
            "line 2 of the frame: a quote or bracket does not end",
        ),
        (
            [text(Lattice="9 0 0 0 9 0 0 0 0")],
            'cell without volume (9 0 0 0 9 0 0 0 0). Molecules have pbc = "F F F"',
        ),
        (
            [
                text(
                    Properties="Z:I:1:pos:R:3:forces:R:3",
                    rows="8 0 0 0 1 2 3\n-1 0 0 1 4 5 6\n",
                )
            ],
            "Z: '-1' is no atomic",
        ),
        ([text(pbc="yes")], "pbc = 'yes': expected T or F"),
        (
            [text(rows="O 0 0 0 1 2\nH 0 0 1 4 5 6\n")],
            "atom 0 (from 0): 'O 0 0 0 1 2' has 6 columns, expected 7",
        ),
        (
            [text(Properties="pos:R:3:species:S:1", rows="0 0 0 H 5\n0 0 H\n")],
            "atom 0 (from 0): '0 0 0 H 5' has 5 columns, expected 4",
        ),
        (
            [text(Properties="species:S:1:forces:R:3:x:R:3")],
            "expected name:kind:columns",
        ),
        (
            [text(Properties="species:S:1:pos:R:3:pos:R:3")],
            "expected name:kind:columns, each name once",
        ),
        (
            [text(some="1").replace("some=", "some=2 some=")],
            "some: is there twice, as '2' and '1'. Keep one of them.",
        ),
        (
            [text(energy_unit="Ha", forces_unit="Ha/bohr"), text(), text()],
            "energy: 1 frame of 3 state its unit. Add it to all frames.",
        ),
        (
            [text(rows="O 0 0 0 1 2 3\nHe 0 0 1 4 5 6\n")],
            "element 'He' is not in model.type_map. Did you mean H?",
        ),
        ([text(rows="O 0 0 x 1 2 3\nH 0 0 1 4 5 6\n")], "positions: could not convert"),
        (
            [text(), "2\n\nO 0 0 0\n"],
            "is cut off: frame 1 (from line 5) has 1 of 2 atoms.",
        ),
        (
            [text(natoms=1)],
            "line 4: 'H 0 0 1 4 5 6', expected the number of atoms of frame 1.",
        ),
        ([""], "no frames: the file is empty."),
    ],
)
def test_faults_are_reported_with_file_and_frame(write_text, frames, message):
    found = problems_of(write_text(*frames))
    assert message in found
    assert "a.xyz" in found


def test_damaged_bytes_are_reported(write_text):
    good = text().encode()
    assert "is not UTF-8 text" in problems_of(
        write_text(good.replace(b"species", b"sp\xffcies"), mode="wb")
    )
    binary = write_text(np.ones(50_000).tobytes(), mode="wb")
    assert (
        problems_of(binary)
        == "a.xyz: line 1: is not text, expected the number of atoms of frame 0."
    )


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            "energy=REF_energy",
            "#energy=REF_energy: no frame has it. Did you mean energy?",
        ),
        ("energy", "'energy' is not understood. Expected e.g. energy=REF_energy"),
        ("stress=a,virial=b", "names a virial and a stress"),
    ],
)
def test_a_wrong_choice_is_reported(write_text, choice, message):
    assert message in problems_of(f"{write_text(text())}#{choice}")


def test_parameters_are_read_and_missed(write_text):
    rows = "O 0 0 0 1 2 3 7 8\nH 0 0 1 4 5 6 9 10\n"
    columns = "species:S:1:pos:R:3:forces:R:3:aparam:R:2"
    name = write_text(text(rows, fparam="0.5 1", Properties=columns))
    frame = open_one(name, numb_fparam=2, numb_aparam=2).frame(0)
    assert frame.fparam.tolist() == [0.5, 1]
    assert frame.aparam.tolist() == [[7, 8], [9, 10]]
    assert set(open_one(name).unread) == {"fparam", "aparam"}
    assert "fparam: has 2 numbers, but numb_fparam = 1." in problems_of(
        name, numb_fparam=1
    )
    name = write_text(text())
    assert "aparam: has none, but numb_aparam = 1." in problems_of(name, numb_aparam=1)
    assert open_one(name, numb_fparam=1, default_fparam=[3.0]).frame(
        0
    ).fparam.tolist() == [3.0]


def test_a_run_on_a_file_is_checked_trained_validated_tested_and_restarted_bitwise(
    tmp_path, monkeypatch, capsys
):
    write_toy(tmp_path / "train.extxyz", 14)
    write_toy(tmp_path / "valid.extxyz", 4, seed=1)
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    content = tiny_input(
        ["../train.extxyz"],
        ["../valid.extxyz"],
        num_steps=12,
        training__disp_freq=4,
        training__disp_avg=True,
        training__training_data__batch_size="auto:16",
        training__enable_ema=True,
        training__save_freq=6,
        model__descriptor__sel="auto",
        validating={"full_validation": True, "validation_freq": 6, "full_val_start": 0},
    )
    Path("input.json").write_text(json.dumps(content))
    assert main(["check", "input.json"]) == 0
    reported = capsys.readouterr().out
    assert "1 system, 14 frames" in reported
    assert (
        "train.extxyz: reads energy, force from forces, virial = -volume * stress"
        in reported
    )
    assert main(["train", "input.json"]) == 0
    assert "valid.extxyz: reads energy" in capsys.readouterr().err
    shutil.copytree(".", tmp_path / "unbroken", symlinks=True)
    assert main(["train", "input.json", "--restart", "model.ckpt-6.pt"]) == 0
    names = assert_same_files(tmp_path / "unbroken", Path())
    assert {
        "lcurve.out",
        "model.ckpt-12.pt",
        "model_ema.ckpt-12.pt",
        "val.log",
    } <= names
    assert main(["test", "-m", "model.ckpt-12.pt", "-s", "../valid.extxyz"]) == 0


def test_isolated_atoms_fix_the_energies_of_elements_that_one_composition_leaves_open(
    here,
):
    """A sample of the frames rarely has one: each element then had the mean energy, hundreds of eV
    from its atom's.
    """
    from ase import Atoms
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write

    def labelled(atoms, energy):
        forces = (
            np.outer([0.2, -0.1, -0.1], [1, 1, 0])
            if len(atoms) == 3
            else np.zeros((1, 3))
        )
        atoms.calc = SinglePointCalculator(atoms, energy=energy, forces=forces)
        return atoms

    single = {"O": -2040.0, "H": -13.5}
    rng = np.random.default_rng(0)
    water = [
        Atoms("OH2", [[0, 0, 0], [1, 0, 0], [0, 1, 0]] + 0.05 * rng.normal(size=(3, 3)))
        for _ in range(60)
    ]
    frames = [labelled(atoms, single["O"] + 2 * single["H"] - 9.0) for atoms in water]
    frames += [
        labelled(Atoms(symbol, [[0, 0, 0]]), energy)
        for symbol, energy in single.items()
    ]
    # a crystal of one atom is not isolated
    frames.append(labelled(Atoms("O", [[0, 0, 0]], cell=[3, 3, 3], pbc=True), -2050.0))
    write("train.extxyz", frames, format="extxyz")
    no_virial = {"loss__start_pref_v": 0.0, "loss__limit_pref_v": 0.0}
    config = tiny_input(
        ["train.extxyz"], num_steps=1, model__data_stat_nbatch=1, **no_virial
    )
    Path("input.json").write_text(json.dumps(config))
    assert main(["train", "input.json"]) == 0
    bias = (
        torch.load("model.ckpt.pt", weights_only=True)["model"]["out_bias"]
        .ravel()
        .numpy()
    )
    counts, energies = (
        [[1, 2]] * 2 + [[1, 0], [0, 1]],
        [single["O"] + 2 * single["H"] - 9.0] * 2 + [*single.values()],
    )
    np.testing.assert_allclose(
        bias,
        np.linalg.lstsq(np.array(counts, float), energies, rcond=None)[0],
        rtol=1e-12,
    )
    assert np.all(np.abs(bias - [*single.values()]) < 5)


def test_isolated_atoms_offer_the_energies_of_the_elements(tmp_path):
    atoms = [
        f'1\nenergy={energy} pbc="F F F" Properties=species:S:1:pos:R:3:forces:R:3\n{symbol} 0 0 '
        "0 0 0 0\n"
        for symbol, energy in (("O", -432.5), ("H", -13.5))
    ]
    (tmp_path / "a.xyz").write_text(
        "".join([*(text(energy=-440 - k / 9) for k in range(9)), *atoms])
    )
    source = open_one(str(tmp_path / "a.xyz"))
    report = check_systems(
        [source], [], ["O", "H"], SeE2AConfig(rcut=4.0, sel="auto"), LABELS
    )
    assert not [w for w in report.warnings if "far from the others" in w]
    [note] = [note for note in report.notes if "isolated atom" in note]
    assert note.startswith("2 frames of one isolated atom (first: ")
    assert (
        "model.fitting_net.atom_ener = [-432.5, -13.5] (eV; needs set_davg_zero and many more"
        in note
    )


def test_a_folder_of_files_says_their_names(write_text, tmp_path):
    write_text(text())
    assert "Name its XYZ files themselves: " in problems_of(str(tmp_path))
    with pytest.raises(
        DataError, match="rglob_patterns has '/abs\\*', expected names below it"
    ):
        open_data(["."], ["O", "H"], LABELS, rglob_patterns=["/abs*"])
    found = problems_of(write_text(*[text(energy=f"x{k}") for k in range(9)]))
    assert "the frames after this one were not read" in found


BOHR, HARTREE, KCAL = 0.529177210903, 27.211386245988, 4.184 / 96.48533212331
LATTICE = "9 0 0 0 9 0 0 0 9"
VOLUME = 9.0**3


@pytest.mark.parametrize(
    ("stated", "length", "energy", "force", "stress"),
    [
        (
            {"energy_units": "Hartree", "forces_units": "Hartree/Bohr"},
            1,
            HARTREE,
            HARTREE / BOHR,
            1,
        ),
        (
            {"energy-unit": "au", "force-unit": "a.u.", "stress-unit": "GPa"},
            1,
            HARTREE,
            HARTREE / BOHR,
            1 / 160.2176634,
        ),
        (
            {"energy_unit": "kcal/mol", "forces_unit": "kcal mol^-1 Å^-1"},
            1,
            KCAL,
            KCAL,
            1,
        ),
        ({"stress_units": "kbar"}, 1, 1, 1, 0.1 / 160.2176634),
        (
            {"stress_units": "eV/Ang^3", "energyUnit": "eV", "forces_units": "eV/Ang"},
            1,
            1,
            1,
            1,
        ),
        ({"units": "metal"}, 1, 1, 1, 1),
        ({"units": "atomic"}, BOHR, HARTREE, HARTREE / BOHR, HARTREE / BOHR**3),
        (
            {"units": "bohr, Ry"},
            BOHR,
            HARTREE / 2,
            HARTREE / 2 / BOHR,
            HARTREE / 2 / BOHR**3,
        ),
        ({"units": "eV/A"}, 1, 1, 1, 1),
        (
            {"units_of_energy": "meV", "units_of_force": "meV/angstrom"},
            1,
            1e-3,
            1e-3,
            1,
        ),
        (
            {"length_unit": "nm", "force_unit": "kJ/(mol*nm)", "energy_unit": "kJ/mol"},
            10,
            KCAL / 4.184,
            KCAL / 41.84,
            1,
        ),
        ({"time_unit": "fs", "magmom_units": "anything"}, 1, 1, 1, 1),
    ],
)
def test_units_that_a_file_states_are_converted(
    write_text, stated, length, energy, force, stress
):
    has_stress = (
        {"stress": "1 0 0 0 2 0 0 0 3"}
        if stress != 1 or "stress_units" in stated
        else {}
    )
    system = open_data([write_text(text(**has_stress, **stated))], ["O", "H"], LABELS)[
        0
    ]
    frame = system.frame(0)
    assert frame.coord[1, 2] == pytest.approx(length)
    assert frame.box[0, 0] == pytest.approx(9 * length)
    assert frame.labels["energy"] == pytest.approx(-1.5 * energy)
    np.testing.assert_allclose(
        frame.labels["force"], force * np.arange(1.0, 7).reshape(2, 3)
    )
    if has_stress:
        np.testing.assert_allclose(
            frame.labels["virial"][8], -3 * stress * VOLUME * length**3
        )
    notes = "\n".join(system.notes)
    assert notes.count("converted to eV and angstrom") == (
        not length == energy == force == stress == 1
    )
    if "time_unit" not in stated:
        assert "does not read" not in notes


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        (
            {"energy_unit": "nonsense"},
            "energy_unit = 'nonsense': is not a known unit of a quantity in eV. Known: eV, ",
        ),
        ({"energy_unit": "eV/atom"}, "energy_unit = 'eV/atom': is not a known unit"),
        (
            {"units": "lj"},
            "units = 'lj': is not a known unit of a quantity in eV. Known: eV, hartree",
        ),
        (
            {"force_units": "GPa"},
            "force_units = 'GPa': is not a known unit of a quantity in eV/angstrom. ",
        ),
        (
            {"position_units": "inch"},
            "position_units = 'inch': is not a known unit of a quantity in angstrom. ",
        ),
        (
            {"energy_unit": "Ha"},
            "energy_unit = Ha, and the unit of forces is not stated. Add forces_unit, such as "
            "eV/ang",
        ),
        (
            {"force_unit": "Ha/bohr"},
            "force_unit = Ha/bohr, and the unit of energy is not stated. Add energy_unit, such",
        ),
        (
            {"length_unit": "bohr"},
            "length_unit = bohr, and the unit of forces is not stated.",
        ),
        (
            {"pos_unit": "bohr", "cell_unit": "nm"},
            "cell_unit = nm and pos_unit = bohr: expected one unit of lengths.",
        ),
    ],
)
def test_units_that_are_not_known_are_errors(write_text, stated, expected):
    with pytest.raises(DataError) as caught:
        open_data([write_text(text(**stated))], ["O", "H"], LABELS)
    assert str(caught.value).startswith(f"a.xyz: frame 0 (from 0): {expected}")


@pytest.mark.parametrize(
    ("stated", "factor"),
    [
        ({"energies_unit": "hartree", "forces_unit": "eV/angstrom"}, HARTREE),
        ({"unit_of_energies": "hartree", "forces_unit": "eV/angstrom"}, HARTREE),
        ({"unit_system": "atomic"}, HARTREE),
        (
            {"energy_units": "Ha", "force_units": "eV/A", "temperature_unit": "au"},
            HARTREE,
        ),
        ({"formula_units": 4, "unit_number": 7}, 1.0),
    ],
)
def test_other_spellings_of_keys_of_units_are_understood(write_text, stated, factor):
    frame = open_one(write_text(text(**stated))).frame(0)
    assert frame.labels["energy"] == pytest.approx(-1.5 * factor)


@pytest.mark.parametrize(
    "key", ["e_unit", "E_units", "unit_of_e0", "energy_per_atom_unit"]
)
def test_a_unit_of_nothing_that_is_known_is_an_error(write_text, key):
    expected = (
        f"{key} = 'hartree': is the unit of nothing that is known. Expected energy_unit"
    )
    assert expected in problems_of(write_text(text(**{key: "hartree"})))
    # eV and angstrom are the units of all that is read
    assert open_one(write_text(text(**{key: "eV"}))).frame(0).labels["energy"] == -1.5


def test_a_unit_cell_is_no_unit(write_text):
    """A file with ``unit_cell = conventional`` was refused."""
    for value in ("conventional", "4 0 0 0 4 0 0 0 4"):
        frame = open_one(write_text(text(unit_cell=value))).frame(0)
        assert frame.labels["energy"] == -1.5
    assert "unit_cell = 'hartree'" in problems_of(write_text(text(unit_cell="hartree")))


@pytest.mark.parametrize("stated", ["dipole", "dipoles", "atomic_dipole"])
def test_dipoles_of_frames_and_of_atoms_have_one_unit(write_text, stated):
    rows = "O 0 0 0 1 0 0\nH 0 0 1 0 1 0\n"
    head = {
        "Properties": "species:S:1:pos:R:3:atomic_dipole:R:3",
        "dipole": "1 0 0",
        f"{stated}_unit": "debye",
    }
    labels = ["dipole", "atom_dipole"]
    frame = open_one(write_text(text(rows, **head)), labels=labels).frame(0)
    debye = 0.2081943328
    assert frame.labels["dipole"] == pytest.approx([debye, 0, 0])
    assert frame.labels["atom_dipole"][1] == pytest.approx([0, debye, 0])
    # positions in bohr, and dipoles in e*angstrom or in e*bohr
    del head[f"{stated}_unit"]
    lengths = text(rows, **head, energy=None, length_unit="bohr")
    assert "the unit of dipole is not stated" in problems_of(
        write_text(lengths), labels=labels
    )


def test_units_of_a_property_are_compared_and_shown(write_text):
    def gaps(*units, name):
        frames = [text(gap=1.5, gap_unit=unit) for unit in units]
        return write_text(*frames, name=name)

    label = ["gap[1]"]
    files = [
        gaps("eV", "eV", name="a.xyz"),
        gaps("hartree", name="b.xyz"),
        gaps("EV", name="c.xyz"),
    ]
    assert problems_of(gaps("eV", "Ha", name="d.xyz"), labels=label) == (
        "d.xyz: gap[1] is in ev and ha: expected one unit in all frames."
    )
    source = open_one(files[1], labels=label)
    assert source.frame(0).labels == {"gap[1]": 1.5}
    assert source.notes[0] == "reads gap[1] from gap (stated in hartree)"
    fitting = {"type": "property", "property_name": "gap", "task_dim": 1}
    for chosen, number in ((files, 1), (files[::2], 0)):
        values = tiny_input(
            chosen, model__fitting_net=fitting, loss={"type": "property"}
        )
        config = config_from_dict(values)
        problems = check_task(config, "", open_run(config)[""]).problems
        assert [text for text in problems if "units" in text] == [
            "gap[1] has several units: ev in a.xyz, hartree in b.xyz. Expected one."
        ] * number


def test_the_unit_of_the_name_that_is_read_is_taken(write_text):
    path = write_text(
        text(
            energy=None,
            REF_energy="-2",
            REF_energy_unit="hartree",
            forces_unit="eV/A",
            MP2="7",
            MP2_unit="eV",
        )
    )
    frame = open_data([path], ["O", "H"], LABELS)[0].frame(0)
    assert frame.labels["energy"] == pytest.approx(-2 * HARTREE)
    other = open_data([f"{path}#energy=MP2"], ["O", "H"], LABELS)[0].frame(0)
    assert other.labels["energy"] == 7.0


def test_convert_takes_no_units_beside_those_of_the_file(write_text, capsys):
    path = write_text(text(energy_unit="hartree", forces_unit="hartree/bohr"))
    assert main(["convert", path, "out", "--units", "bohr,hartree"]) == 2
    assert (
        "a.xyz: states its units itself. Leave --units out" in capsys.readouterr().err
    )
    assert main(["convert", path, "out"]) == 0
    energy = np.load("out/H1O1/set.000/energy.npy")
    np.testing.assert_allclose(energy, [-1.5 * HARTREE])
