"""Data of any format become folders or extended XYZ: every number comes back, and nothing is
dropped without a word.
"""

from pathlib import Path

import numpy as np
import pytest
from data_files import (
    LABELS,
    hdf5,
    text,
    toy_atoms,
    toy_records,
    write_kinds,
    write_lmdb,
)
from helpers import open_data, write_system

from deepmd_ema.cli import main
from deepmd_ema.data.convert import convert_data
from deepmd_ema.data.formats.extxyz import blocks
from deepmd_ema.data.units import BOHR, HARTREE
from deepmd_ema.errors import DataError, UserError

KBAR = 1602.1766208  # in eV/angstrom^3
TYPES = ("O", "H")


pytestmark = pytest.mark.usefixtures("here")


def read_all(path, labels=LABELS):
    """Return the frames below a folder as (sorted rows of element, position, force), box, other
    labels.
    """
    found = []
    for source in open_data([str(path)], list(TYPES), labels):
        for k in range(source.num_frames):
            frame = source.frame(k)
            rows = np.column_stack(
                [frame.atom_type, frame.coord, frame.labels["force"]]
            )
            others = {
                name: value
                for name, value in frame.labels.items()
                if name not in ("force", "atom_energy")
            }
            found.append((rows[np.lexsort(rows.T[::-1])], frame.box, others))
    return found


def assert_holds(path, expected):
    """Check that the frames below a folder are those of ASE, in any order, stress and its sign
    included.
    """
    found = read_all(path)
    assert len(found) == len(expected)
    by_energy = {
        float(others["energy"]): (rows, box, others) for rows, box, others in found
    }
    for atoms in expected:
        rows, box, others = by_energy[
            atoms.get_potential_energy(apply_constraint=False)
        ]
        own = np.column_stack(
            [
                [TYPES.index(s) for s in atoms.symbols],
                atoms.positions,
                atoms.get_forces(apply_constraint=False),
            ]
        )
        np.testing.assert_allclose(rows, own[np.lexsort(own.T[::-1])], rtol=1e-12)
        assert (box is None) == (not atoms.pbc.any())
        if box is None:
            assert "virial" not in others
            continue
        np.testing.assert_array_equal(box, atoms.cell.array)
        stress = -others["virial"].reshape(3, 3) / atoms.get_volume()
        np.testing.assert_allclose(
            stress, atoms.get_stress(voigt=False), rtol=1e-12, atol=1e-15
        )


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["a.extxyz", "a.traj", "a.db"])
def test_frames_come_back(name, mixed):
    from ase.io import read, write

    frames = toy_atoms(12)
    if name.endswith(".db"):
        from ase.db import connect

        with connect(name) as base:
            for atoms in frames:
                base.write(atoms, kind_of_frame="toy")
    else:
        write(name, frames)
    lines = convert_data([name], "out", mixed=mixed)
    assert_holds("out", read(name, ":"))
    reported = "\n".join(lines)
    assert f"read {name}: 12 frames" in reported
    assert (
        "= -volume * stress (stress in eV/angstrom^3, positive under tension, as in ASE) in 10 "
        "frames" in reported
    )
    assert ("kind_of_frame" in reported) == name.endswith(".db")
    folders = [path.parent.name for path in Path("out").rglob("type.raw")]
    assert all(folder.removesuffix("_open").isdigit() == mixed for folder in folders)
    assert any(folder.endswith("_open") for folder in folders)
    assert not list(Path().glob(".out*"))


def outcar(steps=2, ended=True, converged=True, energies=(-10.0, -10.5)):
    """Return the atoms that ASE reads from an OUTCAR: two H and one O in a cube of 4 angstrom."""
    out = [" vasp.6.3.0 20Jan22 complex"]
    out += [f" POTCAR:    PAW_PBE {e} 01Jan2001" for e in ("O", "H", "O", "H")]
    out += [
        "   ISPIN  =      2    spin polarized calculation?",
        "   ions per type =               1   2",
    ]
    for k in range(steps):
        out += [f"--- Iteration {k + 1}(   1)  ---"]
        out += ["------ aborting loop because EDIFF is reached ------"] * converged
        out += [" number of electron      8.0 magnetization       1.5"]
        out += ["  in kB      10.0    20.0    30.0    1.0    2.0    3.0"]
        out += [
            "      direct lattice vectors                 reciprocal lattice vectors"
        ]
        out += [f"  {a}  {b}  {c}  0 0 0" for a, b, c in np.eye(3) * 4.0]
        out += [
            " POSITION                                       TOTAL-FORCE (eV/Angst)",
            " -----",
        ]
        out += [
            f"  0.0 0.0 {z + 0.01 * k:.2f}  0.1 0.2 {0.3 * z - 0.3:.1f}"
            for z in (0, 1, 2)
        ]
        free, zero = energies
        out += [
            "  FREE ENERGIE OF THE ION-ELECTRON SYSTEM (eV)",
            "  ---",
            f"  free  energy   TOTEN  =   {free - k} eV",
            "",
            f"  energy  without entropy=   {free}  energy(sigma->0) =   {zero - k}",
        ]
    return (
        "\n".join(
            out + [" General timing and accounting informations for this job:"] * ended
        )
        + "\n"
    )


def test_an_outcar_with_constraints_smearing_and_spin():
    Path("OUTCAR").write_text(outcar())
    Path("POSCAR").write_text(
        "x\n1.0\n4 0 0\n0 4 0\n0 0 4\nO H\n1 2\nSelective dynamics\nDirect\n"
        "0 0 0 F F F\n0 0 0.25 T T T\n0 0 0.5 T T T\n"
    )
    reported = "\n".join(convert_data(["OUTCAR"], "out"))
    assert (
        "free_energy differs, and forces belong to it: FILE#energy=free_energy reads it (2 frames)"
        in reported
    )
    assert (
        "constraints are not applied: forces are those that were computed (2 frames)"
        in reported
    )
    assert "does not read free_energy, magmom" in reported
    first, second = sorted(read_all("out"), key=lambda found: -found[2]["energy"])
    assert [first[2]["energy"], second[2]["energy"]] == [-10.5, -11.5]
    assert first[0][0].tolist() == pytest.approx(
        [0, 0, 0, 0, 0.1, 0.2, -0.3]
    )  # of the atom that is held
    virial = (
        np.array([[10, 1, 3], [1, 20, 2], [3, 2, 30]]) * 64 / KBAR
    )  # positive under compression
    np.testing.assert_allclose(first[2]["virial"].reshape(3, 3), virial, rtol=1e-6)
    reported = "\n".join(convert_data(["OUTCAR#energy=free_energy"], "free"))
    assert "differs" not in reported
    assert sorted(float(found[2]["energy"]) for found in read_all("free")) == [-11, -10]


def test_an_outcar_that_is_cut_off_or_did_not_converge_is_reported():
    Path("OUTCAR").write_text(outcar(3, ended=False, converged=False)[:-150])
    reported = "\n".join(convert_data(["OUTCAR"], "out"))
    assert "read OUTCAR: 2 frames" in reported
    assert (
        "the end of the file is missing: a frame that was not finished is left out"
        in reported
    )
    assert "EDIFF was not reached: these are read, and may be wrong" in reported


NOT_REACHED = "EDIFF was not reached: these are read, and may be wrong (2 frames)"


def electronic_steps(number, last_change):
    """Return the lines that VASP writes about the electronic steps of an ionic step."""
    changes = [0.5] * (number - 1) + [last_change]
    return "".join(
        f"--- Iteration 1({k: 4d})  ---\n total energy-change (2. order) :{change: .7E}  "
        "(-0.1E-07)\n"
        for k, change in enumerate(changes, 1)
    )


@pytest.mark.parametrize(
    ("version", "is_reported"), [("5.4.4.18Apr17", True), ("6.3.0", False)]
)
def test_steps_of_vasp_5_that_took_all_electronic_steps_are_reported(
    version, is_reported
):
    text = outcar(4).replace("vasp.6.3.0", f"vasp.{version}")
    head, *parts = text.split("--- Iteration")
    # the third has converged in its last step
    counts = [(20, 1e-3), (9, 1e-7), (20, 1e-7), (20, 2e-6)]
    steps = [
        electronic_steps(*count) + part.partition("\n")[2]
        for count, part in zip(counts, parts, strict=True)
    ]
    limits = (
        "   NELM   =     20;   NELMIN=  2; NELMDL= -5     # of ELM steps\n   EDIFF  = 0.1E-05   "
        "stopping-criterion\n"
    )
    Path("OUTCAR").write_text(head + limits + "".join(steps))
    assert (NOT_REACHED in "\n".join(convert_data(["OUTCAR"], "out"))) == is_reported


def test_steps_of_a_machine_learned_potential_in_vasp_have_no_electrons():
    ml = "\n  ML FREE ENERGIE OF THE ION-ELECTRON SYSTEM (eV)\n General timing"
    Path("OUTCAR").write_text(outcar(2).replace("\n General timing", ml))
    assert "EDIFF" not in "\n".join(convert_data(["OUTCAR"], "out"))


def vasprun(counts, last_change=1e-3, energies=(-10.0, -10.5, -11.0)):
    """Return a vasprun.xml with a step for each number of electronic steps."""
    cell = '<crystal><varray name="basis"><v>4 0 0</v><v>0 4 0</v><v>0 0 4</v></varray></crystal>'
    out = [
        '<?xml version="1.0" encoding="ISO-8859-1"?>',
        "<modeling>",
        '<parameters><i type="int" name="NELM"> 20</i>',
    ]
    out += [
        '<i name="EDIFF"> 0.00000100</i><i type="int" name="NELM"> 1</i></parameters>',
        "<atominfo>",
    ]
    out += [
        '<atoms> 2 </atoms><types> 1 </types><array name="atoms"><set>',
        *["<rc><c>H </c><c> 1 </c></rc>"] * 2,
    ]
    out += ["</set></array></atominfo>"]
    out.append('<kpoints><varray name="kpointlist"><v>0 0 0</v></varray>')
    out.append('<varray name="weights"><v>1</v></varray></kpoints>')
    rows = "<v> 0 0 0 </v><v> 0 0 0.25 </v></varray>"
    place = f'{cell}<varray name="positions">{rows}</structure>'
    out += [f'<structure name="initialpos">{place}']
    for count, energy in zip(counts, energies):
        names = ("e_fr_energy", "e_wo_entrp", "e_0_energy")
        out.append("<calculation>")
        for k in range(count):
            value = energy if k == count - 1 else energy + last_change
            out.append(
                "<scstep><energy>"
                + "".join(f'<i name="{n}"> {value} </i>' for n in names)
                + "</energy></scstep>"
            )
        out += [f"<structure>{place}", f'<varray name="forces">{rows}', "<energy>"]
        out += [
            *(f'<i name="{n}"> {energy:.8f} </i>' for n in names),
            "</energy>",
            "</calculation>",
        ]
    return "\n".join([*out, "</modeling>"])


def test_steps_in_a_vasprun_that_took_all_electronic_steps_are_reported():
    Path("vasprun.xml").write_text(vasprun((20, 9, 20)))
    assert NOT_REACHED in "\n".join(convert_data(["vasprun.xml"], "out"))
    Path("vasprun.xml").write_text(vasprun((20, 9, 20), last_change=1e-8))
    assert "EDIFF" not in "\n".join(convert_data(["vasprun.xml"], "out2"))


def test_frames_with_numbers_that_are_not_finite_are_left_out_by_name():
    # VASP writes nan where a step of its electrons has failed
    Path("energies.xml").write_text(
        vasprun((2, 2, 2)).replace("-10.50000000", "nan").replace(" -10.5 ", " nan ")
    )
    reported = "\n".join(convert_data(["energies.xml"], "out"))
    assert (
        "warning: left out, since numbers are not finite: 1 frame (from 0): 1 (energy)"
        in reported
    )
    assert len(read_all("out")) == 2
    Path("only.xyz").write_text(
        '1\nenergy=nan Properties=species:S:1:pos:R:3 pbc="F F F"\nH 0 0 0\n'
    )
    words = r"warning: left out, since numbers are not finite: 1 frame \(from 0\): 0 \(energy\)"
    with pytest.raises(DataError, match=words):
        convert_data(["only.xyz"], "out3")


EVERY_LABEL = ("energy", "force", "virial", "atom_energy", "atom_pref", "hessian")


def assert_same_frames(name, origins, spec):
    """Check that a file has every number of other data bit for bit, in their order of frames and
    atoms.
    """
    [own], sources = (
        open_data(paths, list(TYPES), EVERY_LABEL, **spec)
        for paths in ([name], origins)
    )
    frames = [source.frame(k) for source in sources for k in range(source.num_frames)]
    assert own.num_frames == len(frames)
    for k, expected in enumerate(frames):
        found = own.frame(k)
        assert (found.box is None) == (expected.box is None)
        assert found.labels.keys() == expected.labels.keys()
        for label, value in expected.labels.items():
            np.testing.assert_array_equal(found.labels[label], value)
        for part in ("coord", "atom_type", "box", "fparam", "aparam"):
            np.testing.assert_array_equal(getattr(found, part), getattr(expected, part))


def write_everything():
    """Write three systems with every label and parameter: plain, open, and mixed with virtual
    atoms.
    """
    options = {
        "frames": 6,
        "atom_ener": True,
        "atom_pref": True,
        "hessian": True,
        "fparam": 2,
        "aparam": 3,
    }
    write_system("folders/plain", natoms=6, seed=1, sets=2, **options)
    write_system("folders/open", natoms=4, seed=2, pbc=False, **options)
    write_system("folders/mixed", natoms=5, seed=3, mixed=True, virtual=2, **options)


def test_folders_become_a_file_with_the_same_numbers_which_become_folders_with_the_same_numbers():
    write_everything()
    lines = convert_data(["folders"], "out.extxyz")
    assert "read folders/mixed: 6 frames, 30 atoms" in lines
    labels = "energy, force, virial (12 frames), atom_energy, atom_pref, hessian, fparam, aparam"
    assert lines[-1] == f"wrote out.extxyz: 18 frames, {labels}"
    assert_same_frames("out.extxyz", ["folders"], {"numb_fparam": 2, "numb_aparam": 3})
    convert_data(["out.extxyz"], "again", mixed=True)
    convert_data(["again"], "back.xyz")
    assert sorted(frames_in("back.xyz")) == sorted(frames_in("out.extxyz"))


def frames_in(name):
    return [block for _, block in blocks(Path(name))]


def test_validation_is_of_every_kind_that_the_files_name_and_the_same_for_a_seed():
    write_kinds("a.extxyz")
    lines = convert_data(["a.extxyz"], "out", validation=0.2)
    start = lines.index("validation: 6 of 31 frames (fraction 0.2, seed 1)")
    assert (
        lines[start + 1] == "  by config_type or group: bulk 4 of 20, surface 2 of 10"
    )
    chosen = []
    for name, seed in (("out", 1), ("again", 1), ("other", 2)):
        if name != "out":
            convert_data(["a.extxyz"], name, validation=0.2, seed=seed)
        chosen.append(
            {float(found[2]["energy"]) for found in read_all(f"{name}/validation")}
        )
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(read_all("out/train")) == 25


@pytest.mark.parametrize(
    "words", [["-o", "out.extxyz", "a.extxyz"], ["a.extxyz", "out.extxyz"]]
)
def test_the_output_is_named_last_or_as_of_other_commands(words, capsys):
    write_kinds("a.extxyz")
    assert main(["convert", *words]) == 0
    assert len(read_all("out.extxyz")) == 31
    assert main(["convert", "a.extxyz"]) == 2
    assert "convert a.extxyz: no output is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        (["a.xyz"], {"validation": 1.5}, "--validation 1.5: expected a share"),
        (
            ["a.xyz"],
            {"file_format": "nothing"},
            "--format nothing: ASE has no such format",
        ),
        (["noise.bin"], {}, "noise.bin: cannot be read by ASE"),
        (["a.xyz", "cut.xyz"], {}, "cut.xyz: is cut off: frame 0"),
        (
            ["bare.xyz"],
            {},
            "bare.xyz: no frame has an energy or forces (read by dp-ema, in angstrom and eV).",
        ),
        (
            ["slab.traj"],
            {},
            "slab.traj: frame 0: pbc = [True, True, False]: is periodic in some directions only",
        ),
        (
            ["two.xyz"],
            {},
            "two.xyz: energy may be energy (1 frame) or ref_energy (1 frame).",
        ),
    ],
)
def test_what_cannot_be_converted_is_reported(inputs, options, message):
    from ase.io import write

    Path("a.xyz").write_text(text() + text())
    Path("cut.xyz").write_text(text()[:-20])
    Path("two.xyz").write_text(text(ref_energy=1))
    Path("bare.xyz").write_text("1\n\nO 0 0 0\n")
    Path("noise.bin").write_bytes(bytes(range(256)) * 9)
    [slab] = toy_atoms(1)
    slab.pbc = (True, True, False)
    write("slab.traj", slab)
    with pytest.raises(UserError) as caught:
        convert_data(inputs, "out", **options)
    assert message in "\n".join(caught.value.problems)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["a.xyz", "out", "--head", "x"],
            "--head: is an option for models, and these are data. Remove it.",
        ),
        (
            ["gone.pt", "out.dp", "--mixed"],
            "--mixed: is an option for data, and gone.pt is a model or does not exist.",
        ),
        (["a.xyz", "a.xyz"], "a.xyz: exists. Nothing is written over"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(words, message, capsys):
    Path("a.xyz").write_text(text())
    assert main(["convert", *words]) == 2
    assert message in capsys.readouterr().err


def test_frames_without_labels_are_counted():
    bare = text(
        energy=None, Properties="species:S:1:pos:R:3", rows="O 0 0 0\nH 0 0 1\n"
    )
    Path("a.xyz").write_text(
        text() + bare + text(energy=None) + text(rows="H 0 0 0 1 2 3\nO 0 0 1 4 5 6\n")
    )
    lines = convert_data(["a.xyz"], "out")
    assert "left out: 1 frame without energy and forces" in lines
    assert "the atoms of a frame are sorted by element: O H" in lines
    assert lines[-1] == "  H1O1: 3 frames, periodic, energy (2 frames), force"


def test_arrays_that_are_not_carried_over_are_named_in_one_line():
    write_system("plain", 2)
    for name in ("spin", "force_mag", "dos"):
        np.save(f"plain/set.000/{name}.npy", np.zeros((2, 3)))
    lines = ["  does not read dos, force_mag, spin"]
    write_lmdb("a.lmdb", [r | {"charge_spin": np.ones(2)} for r in toy_records(2)])
    for number, (path, line) in enumerate(
        [
            ("plain", lines),
            (hdf5(Path("plain")), lines),
            ("a.lmdb", ["  does not read charge_spin"]),
        ]
    ):
        reported = convert_data([str(path)], f"out{number}")
        assert [text for text in reported if "does not read" in text] == line
    # what is written has nothing that is not read
    assert "does not read" not in "\n".join(convert_data(["out0"], "again"))


@pytest.mark.parametrize(
    ("metadata", "factors"),
    [
        ({"energy_unit": "Ha", "forces_unit": "Ha/bohr"}, (HARTREE, HARTREE / BOHR)),
        (
            {
                "_property_unit_dict": {"energy": "Ha", "forces": "Ha/Ang"},
                "_distance_unit": "Ang",
            },
            (HARTREE, HARTREE),
        ),
        ({"units": "metal"}, (1.0, 1.0)),
        ({"Units": {"energy": "eV"}}, "Units = .*is not a known unit"),
        ({"energy_unit": "foo"}, "energy_unit = 'foo': is not a known unit"),
    ],
)
def test_units_in_the_metadata_of_a_data_base_are_those_of_all_rows(metadata, factors):
    from ase.db import connect

    atoms = toy_atoms(1, natoms=4)[0]
    del atoms.calc.results["energies"], atoms.calc.results["stress"]
    with connect("a.db") as base:
        base.write(atoms)
        base.metadata = metadata
    if isinstance(factors, str):
        with pytest.raises(DataError, match=factors):
            convert_data(["a.db"], "out")
        return
    convert_data(["a.db"], "out")
    [(rows, _, labels)] = read_all("out")
    assert labels["energy"] == pytest.approx(
        factors[0] * atoms.get_potential_energy(), rel=1e-8
    )
    assert np.linalg.norm(rows[:, -3:]) == pytest.approx(
        factors[1] * np.linalg.norm(atoms.get_forces()), rel=1e-8
    )
