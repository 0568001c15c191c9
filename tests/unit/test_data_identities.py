"""Units and signs: found by identities of energies, forces and virials and by bounds of lengths, or
not verified.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers import open_data, toy_frame, toy_labels

from deepmd_ema.cli.main import main
from deepmd_ema.data.check.bonds import misplaced_types
from deepmd_ema.data.check.identities import ratios_of
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.source import Frame, FrameSubset
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BOHR, HARTREE, KCAL, GPA = 0.52917721, 27.211386, 23.060548, 160.21766
LABELS = ("energy", "force", "virial")


def crystal(num, energy=1, force=1, virial=1, seed=9, size=0.01, strains=True):
    """Return frames of a strained crystal whose atoms are off their sites, with labels multiplied
    by factors.
    """
    rng = np.random.default_rng(seed)
    coord, types, box = toy_frame(rng, 12, jitter=0.0)
    frames = []
    for _ in range(num):
        strain = np.eye(3) + rng.normal(0, size if strains else 0, (3, 3))
        moved, cell = (coord + rng.normal(0, size, coord.shape)) @ strain, box @ strain
        e, f, w, _ = toy_labels(moved, types, cell)
        labels = {"energy": e * energy, "force": f * force, "virial": w * virial}
        frames.append(
            Frame(moved + rng.integers(-1, 2, (12, 1)) @ cell[:1], types, cell, labels)
        )
    return frames


def molecules(num, seed=1, size=0.05, energy=1, force=1, virial=1):
    """Return frames of a molecule that is turned at will, without a cell."""
    rng = np.random.default_rng(seed)
    coord, types, _ = toy_frame(rng, 6, pbc=False)
    frames = []
    for _ in range(num):
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        turn *= np.linalg.det(turn)  # a rotation
        moved = (coord + rng.normal(0, size, coord.shape)) @ turn + rng.normal(size=3)
        e, f, w, _ = toy_labels(moved, types)
        frames.append(
            Frame(
                moved,
                types,
                None,
                {"energy": e * energy, "force": f * force, "virial": w * virial},
            )
        )
    return frames


def stored(path, frames, virial=True, names=("O", "H")):
    """Write frames as a system, and return its path."""
    folder = path / "set.000"
    folder.mkdir(parents=True)
    np.savetxt(path / "type.raw", frames[0].atom_type, fmt="%d")
    (path / "type_map.raw").write_text("\n".join(names) + "\n")
    arrays = {
        name: [np.ravel(frame.labels[name]) for frame in frames]
        for name in LABELS[: 2 + virial]
    }
    arrays |= {"coord": [frame.coord.ravel() for frame in frames]}
    if frames[0].box is None:
        (path / "nopbc").touch()
    else:
        arrays["box"] = [frame.box.ravel() for frame in frames]
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return path


def report_of(*systems, names=("O", "H")):
    opened = open_data([str(path) for path in systems], names, LABELS)
    return check_systems(opened, [], names, SeE2AConfig(rcut=4.0, sel="auto"), LABELS)


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"energy": 1 / HARTREE}, "the energies look like Hartree"),
        ({"force": BOHR / HARTREE}, "the forces look like Hartree/bohr"),
        ({"force": -1}, "the forces have the wrong sign"),
        ({"virial": -1}, "the virials have the wrong sign"),
        ({"virial": 10 * GPA}, "the virials look like kbar * angstrom^3"),
        ({"virial": "stress"}, "the virials look like a stress in eV/angstrom^3"),
        (
            {"energy": 1 / HARTREE, "virial": 1 / HARTREE},
            "the energies and virials look like Hartree",
        ),
    ],
)
def test_of_three_quantities_the_one_that_does_not_fit_the_others_is_named(
    tmp_path, factors, words
):
    """Of Si and Ge, stresses in kbar, in GPa and with the wrong sign passed without a word."""
    if factors.get("virial") == "stress":
        factors = {"virial": -1 / abs(np.linalg.det(crystal(1)[0].box))}
    report = report_of(stored(tmp_path / "s", crystal(24, **factors)))
    [warning] = map(str, report.units.findings())
    assert warning.startswith(f"{tmp_path / 's'}: {words}"), warning
    assert warning.count(" the energy changes by ") == 2
    assert (
        "Expected eV, eV/angstrom and angstrom, and virial = -volume * stress in eV"
        in warning
    )
    assert set(report.units.verified.values()) <= {0, 1}
    assert "energies and forces" in report.units.unverified


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        (
            {"energy": 1 / HARTREE, "force": BOHR / HARTREE},
            "the energies and forces look like Hartree and Hartree/bohr",
        ),
        (
            {"force": -1},
            "the forces have the wrong sign (gradients instead of forces) or the energies have",
        ),
        (
            {"force": 4},
            "energies and forces do not fit together: between near frames the energy changes by "
            "0.2",
        ),
    ],
)
@pytest.mark.parametrize("make", [crystal, molecules])
def test_of_two_quantities_both_are_named(tmp_path, make, factors, words):
    options = {"strains": False} if make is crystal else {}
    [warning] = map(
        str,
        report_of(
            stored(tmp_path / "s", make(24, **factors, **options), virial=False)
        ).units.findings(),
    )
    assert words in warning


@pytest.mark.parametrize("make", [crystal, molecules])
def test_right_frames_are_verified(tmp_path, make):
    report = report_of(stored(tmp_path / "s", make(24)))
    assert report.warnings == []
    assert report.units.lines() == [
        "verified: lengths in 1, energies and forces (with each other) in 1, virials in 1 of 1 "
        "system"
    ]


def test_a_shift_of_all_atoms_by_half_a_cell_changes_no_ratio():
    frames = crystal(16)
    rng = np.random.default_rng(3)
    shifted = []
    for number, frame in enumerate(frames):
        inside = (
            frame.coord @ np.linalg.inv(frame.box)
            + 0.5 * (number % 2)
            + rng.normal(0, 1e-3, 3)
        )
        shifted.append(
            Frame((inside % 1.0) @ frame.box, frame.atom_type, frame.box, frame.labels)
        )
    assert ratios_of(shifted).force == pytest.approx(ratios_of(frames).force, rel=1e-6)


@pytest.mark.usefixtures("real_radii")
def test_right_data_are_quiet():
    for source in sorted(EXAMPLES.glob("*/data/*")):
        if source.is_dir():
            names = (source / "type_map.raw").read_text().split()
            assert not report_of(source, names=names).units.faults, source


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"virial": -1}, "the virials have the wrong sign"),
        ({"force": -1}, "the forces have the wrong sign"),
    ],
)
def test_open_systems_hold_virials_against_forces(tmp_path, factors, words):
    [warning] = map(
        str,
        report_of(stored(tmp_path / "s", molecules(24, **factors))).units.findings(),
    )
    assert words in warning
    assert "times the sum of positions and forces" in warning


def test_forces_that_were_moved_by_a_frame_or_sorted_are_found(tmp_path):
    frames = crystal(24, strains=False)
    before = [
        Frame(f.coord, f.atom_type, f.box, f.labels | {"force": g.labels["force"]})
        for f, g in zip(frames, frames[-1:] + frames[:-1])
    ]
    order = np.argsort(frames[0].atom_type, kind="stable")
    by_type = [
        Frame(
            f.coord, f.atom_type, f.box, f.labels | {"force": f.labels["force"][order]}
        )
        for f in frames
    ]
    for name, wrong, place in (
        ("before", before, "the frame before"),
        ("by_type", by_type, "atoms in the order of their types"),
    ):
        [warning] = map(str, report_of(stored(tmp_path / name, wrong)).units.findings())
        assert f"the forces are those of {place}: with these" in warning


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (
            1 / BOHR,
            "lengths look like bohr, or were converted from bohr although they were in angstrom",
        ),
        (
            BOHR,
            "lengths look like angstrom that were divided by 1.89 as if they were in bohr",
        ),
    ],
)
def test_lengths_beyond_their_bounds_are_reported_with_a_pair_of_atoms(
    tmp_path, factor, words
):
    source = EXAMPLES / "water" / "data" / "train_400K"
    path = tmp_path / "s"
    shutil.copytree(source, path)
    for file in path.rglob("*.npy"):
        np.save(
            file, np.load(file)[:20] * (factor if file.stem in ("coord", "box") else 1)
        )
    report = report_of(path, names=(source / "type_map.raw").read_text().split())
    [warning] = [text for text in report.warnings if "lengths" in text]
    assert words in warning
    assert "half of the atoms have their nearest neighbor within " in warning
    assert f"in {path} frame " in warning
    assert report.units.verified["lengths"] == 0


WATER_ORDERS = [
    (lambda types: np.sort(types), ["O", "H"], "nearest neighbors O and O are "),
    (lambda types: np.sort(types)[::-1], ["O", "H"], "hydrogen atoms"),
    (
        lambda types: np.random.default_rng(3).permutation(types),
        ["O", "H"],
        "hydrogen atoms",
    ),
    (
        lambda types: 1 - types,
        ["O", "H"],
        "100 % of the hydrogen atoms of a frame (the median of 8) have two",
    ),
    (
        lambda types: types,
        ["H", "O"],
        "100 % of the hydrogen atoms of a frame (the median of 8) have two",
    ),
]


def water_frames(number):
    """Return frames of four molecules of water on a lattice, turned at random, the atoms as O H H O
    H H ...
    """
    rng = np.random.default_rng(4)
    bonds = np.array([[0.0, 0.0, 0.0], [0.76, 0.59, 0.0], [-0.76, 0.59, 0.0]])
    frames = []
    for k in range(number):
        coord = []
        for site in np.ndindex(2, 2, 1):
            turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
            coord.append(
                3.1 * np.array(site) + bonds @ turn + rng.normal(0, 0.03, (3, 3))
            )
        labels = {"energy": 0.0, "force": np.zeros((12, 3)), "virial": np.zeros(9)}
        frames.append(
            Frame(
                np.concatenate(coord),
                np.tile([0, 1, 1], 4),
                np.diag([6.2, 6.2, 4.0]),
                labels,
                source=("s", k),
            )
        )
    return frames


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(("order", "names", "words"), WATER_ORDERS)
def test_types_in_another_order_than_the_positions_are_reported(order, names, words):
    """A published set passed with "lengths verified, No warnings", and its model was silently
    worse.
    """
    frames = water_frames(8)
    assert misplaced_types(frames, ["O", "H"]) == []
    moved = [
        replace(frame, atom_type=np.asarray(order(frame.atom_type))) for frame in frames
    ]
    texts = misplaced_types(moved, names)
    assert words in "; ".join(texts)


def stored_water(path, name, num, change=lambda array: array, label="force"):
    """Copy frames of the example to a system with another label, and return its path."""
    shutil.copytree(EXAMPLES / "water" / "data" / name, path)
    for file in path.glob("set.000/*.npy"):
        array = np.load(file)[:num]
        np.save(file, change(array) if file.stem == label else array)
    return path


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (BOHR / HARTREE, "look like Hartree/bohr"),
        (1 / HARTREE, "look like Rydberg/bohr or Hartree/angstrom"),
        (KCAL, "look like kcal/mol/angstrom"),
        (1.5, ""),
        (2, ""),
        (0.5, ""),
    ],
)
def test_forces_of_a_system_are_compared_by_force_constants_of_bonds(
    tmp_path, factor, words
):
    """Each passed with "No warnings": no frames of these systems are near each other."""
    paths = [
        stored_water(tmp_path / str(k), f"train_{k}K", 16, lambda force: factor * force)
        if k == 300
        else stored_water(tmp_path / str(k), f"train_{k}K", 16)
        for k in (300, 350, 400)
    ]
    odd = paths[0]
    # O and H have a known constant, so that no other system is needed
    for systems in (paths, [odd]):
        warnings = report_of(*systems).warnings
        reported = [line for line in warnings if "force constant" in line]
        assert len(reported) == bool(words)
        for line in reported:
            numbers = (
                rf"the forces of {odd} {words}: by them bonds of O and H have a force constant of "
                r"(\S+) eV/angstrom\^2, expected about (\S+)\. Expected eV/angstrom"
            )
            constant, usual = map(float, re.match(numbers, line).groups())
            assert usual == 45
            assert constant / usual == pytest.approx(factor, rel=0.2)
    for path in paths:
        (path / "type_map.raw").write_text("F H")
    # the constants of others are compared, of which the median is right
    warnings = report_of(*paths, names=("F", "H")).warnings
    reported = [line for line in warnings if "force constant" in line]
    assert len(reported) == bool(words)
    assert all(f"the forces of {odd} {words}: by them" in line for line in reported)
    # between two systems neither is known to be right, and one is no reference for itself
    for systems in (paths[:2], paths[:1]):
        warnings = report_of(*systems, names=("F", "H")).warnings
        assert not any("constant" in line for line in warnings)


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize("names", [["O", "H"], ["C", "O", "N", "H"]])
def test_gradients_in_atomic_units_are_reported(tmp_path, names):
    """Quantum chemistry codes write them; they passed with "No warnings"."""
    path = stored_water(
        tmp_path / "s", "train_300K", 16, lambda force: -BOHR / HARTREE * force
    )
    [line] = [
        line
        for line in report_of(path, names=names).warnings
        if "force constant" in line
    ]
    assert line.startswith(
        f"the forces of {path} look like Hartree/bohr: by them bonds"
    )


@pytest.mark.usefixtures("real_radii")
def test_energies_and_forces_of_all_systems_in_another_unit_are_reported(tmp_path):
    """Units that energies, forces and virials have in common change no identity, and passed."""
    paths = []
    for kelvin in (300, 350):
        paths.append(stored_water(tmp_path / str(kelvin), f"train_{kelvin}K", 16))
        for label in LABELS:
            scale_array(paths[-1], label, KCAL)
    [line] = [
        line for line in report_of(*paths).warnings if "kcal/mol/angstrom" in line
    ]
    assert line.startswith(f"the forces of {paths[0]}, {paths[1]} look like kcal/mol/")


def negative(array):
    return -array


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize("names", [["O", "H"], ["H", "O"], ["C", "O", "N", "H"]])
@pytest.mark.parametrize("wrong", [(300,), (300, 350)])
@pytest.mark.parametrize("label", ["force", "virial"])
def test_a_sign_is_judged_by_bonds_where_no_frames_are_near_each_other(
    tmp_path, label, wrong, names
):
    """Each passed with "No warnings", but for the forces of one of three systems."""
    systems = [
        stored_water(
            tmp_path / str(kelvin),
            f"train_{kelvin}K",
            16,
            negative if kelvin in wrong else lambda array: array,
            label,
        )
        for kelvin in (300, 350)
    ]
    reported = [
        line
        for line in report_of(*systems, names=names).warnings
        if "wrong sign" in line
    ]
    named = ", ".join(map(str, systems[: len(wrong)]))
    assert len(reported) == 1
    assert reported[0].startswith(f"the {label}s of {named} have the wrong sign: they ")


@pytest.mark.usefixtures("real_radii")
def test_forces_and_virials_that_both_have_the_wrong_sign_are_both_named(tmp_path):
    path = stored_water(tmp_path / "s", "train_300K", 16, negative)
    file = path / "set.000" / "virial.npy"
    np.save(file, -np.load(file))
    reported = [line for line in report_of(path).warnings if "wrong sign" in line]
    assert [line.split()[1] for line in reported] == ["forces", "virials"]


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(
    ("label", "change"),
    [
        ("force", lambda array: array),
        ("force", lambda array: -0.003 * array),
        ("force", lambda array: -0.2 * array),
        ("force", lambda array: np.random.default_rng(7).normal(0, 0.8, array.shape)),
        ("virial", lambda array: 4 * array),
        ("virial", lambda array: array - 20 * np.eye(3).ravel()),
        ("virial", lambda array: np.random.default_rng(7).normal(0, 2, array.shape)),
    ],
)
def test_other_data_do_not_have_the_wrong_sign(tmp_path, label, change):
    """Relaxed forces, differences between methods, and forces and virials of any direction have no
    sign that is known; units and pressures change none.
    """
    path = stored_water(tmp_path / "s", "train_300K", 16, change, label)
    assert not any("wrong sign" in line for line in report_of(path).warnings)


@pytest.mark.usefixtures("real_radii")
def test_a_system_that_is_split_between_parts_is_named_once(tmp_path):
    path = stored_water(tmp_path / "s", "train_300K", 16, negative)
    [system] = open_data([str(path)], ["O", "H"], LABELS)
    parts = [FrameSubset(system, np.arange(k, 16, 2)) for k in range(2)]
    section = SeE2AConfig(rcut=4.0, sel="auto")
    report = check_systems(parts[:1], parts[1:], ["O", "H"], section, LABELS)
    [line] = [line for line in report.warnings if "wrong sign" in line]
    assert line.startswith(f"the forces of {path} have the wrong sign")


@pytest.mark.usefixtures("real_radii")
def test_bonds_of_few_frames_are_no_evidence_of_a_sign(tmp_path):
    """In published data of different compounds lengths of bonds of one frame rise with forces."""
    path = stored_water(tmp_path / "s", "train_300K", 3, negative)
    assert not any("wrong sign" in line for line in report_of(path).warnings)


@pytest.mark.usefixtures("real_radii")
def test_forces_that_lengths_of_bonds_do_not_explain_are_not_compared(tmp_path):
    """Relaxed structures have small forces of any direction."""
    rng = np.random.default_rng(7)
    systems = [
        stored_water(
            tmp_path / name, name, 16, lambda force: rng.normal(0, 0.014, force.shape)
        )
        if name == "train_300K"
        else stored_water(tmp_path / name, name, 16)
        for name in ("train_300K", "train_350K", "train_400K")
    ]
    assert not any("force constant" in line for line in report_of(*systems).warnings)


def permuted(frame, rng):
    return replace(frame, coord=rng.permutation(frame.coord))


def pressed(frame, _):
    """Return a frame with hydrogen atoms between oxygen atoms, as ice has them under pressure."""
    chain = 1.1 * np.arange(12)[:, None] * [[1.0, 0, 0]]
    return replace(
        frame,
        coord=chain[[0, 1, 3, 2, 5, 7, 4, 9, 11, 6, 8, 10]],
        box=np.diag([13.2, 4.0, 4.0]),
    )


def rattled(frame, rng):
    return replace(frame, coord=frame.coord + rng.normal(0, 0.3, frame.coord.shape))


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(
    ("change", "is_named"),
    [(permuted, True), (pressed, False), (rattled, False)],
)
def test_positions_in_another_order_in_some_frames_are_reported_with_the_frames(
    tmp_path, change, is_named
):
    """A median over eight frames was "lengths verified", with 20 of 72 in another order."""
    rng = np.random.default_rng(2)
    frames = water_frames(40)
    for k in (5, 17, 30):
        frames[k] = change(frames[k], rng)
    path = stored(tmp_path / "s", frames)
    report = report_of(path)
    reported = [line for line in report.warnings if "two or more neighbors" in line]
    assert report.units.verified["lengths"] == (not is_named)
    assert len(reported) == is_named
    if is_named:
        assert reported[0].startswith(
            f"{path}: in 3 of 40 frames ({path} frame 5, {path} frame 17, {path} frame 30) more "
            "than 20 % of the hydrogen atoms have two or more neighbors within 1.12 angstrom, "
            "expected one bond. Expected types in the order of the positions"
        )


@pytest.mark.usefixtures("real_radii")
def test_a_hydrogen_atom_between_heavier_ones_is_of_a_reaction():
    """C4H3O of examples/nopbc of DeePMD-kit has 1.05 and 1.09 angstrom in one of 15 frames."""
    coord = np.array(
        [[0, 0, 0], [1.05, 0, 0], [2.59, 0, 0], [0, 4, 0], [1.1, 4, 0], [3, 7, 0]]
    )
    frame = Frame(coord, np.array([0, 1, 2, 0, 1, 1]), None, {})
    frames = [frame] * 15
    near = coord.copy()
    near[2, 0] = 2.14
    frames[7] = replace(frame, coord=near)
    assert misplaced_types(frames, ["C", "H", "O"]) == []


@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(("number", "is_named"), [(40, True), (39, False)])
def test_two_atoms_in_each_others_places_are_reported_if_they_are_in_all_frames(
    number, is_named
):
    """One atom of twenty molecules hardly changes the share of a frame."""
    frames = []
    for frame in water_frames(40):
        sites = [frame.coord + np.array([0, 0, 4.0 * k]) for k in range(6)]
        large = replace(
            frame,
            coord=np.concatenate(sites),
            atom_type=np.tile(frame.atom_type, 6),
            box=np.diag([6.2, 6.2, 24.0]),
            labels={**frame.labels, "force": np.zeros((72, 3))},
        )
        if len(frames) < number:
            large.coord[[0, 1]] = large.coord[[1, 0]]
        frames.append(large)
    texts = misplaced_types(frames, ["O", "H"])
    assert (
        texts
        == [
            "2 % of the hydrogen atoms of a frame (the median of 40) have two or more neighbors "
            "within 1.12 angstrom, expected one bond"
        ]
        * is_named
    )


@pytest.mark.usefixtures("real_radii")
def test_a_warning_of_types_names_system_distance_and_atoms(tmp_path):
    frames = water_frames(20)
    moved = [replace(frame, atom_type=np.sort(frame.atom_type)) for frame in frames]
    path = stored(tmp_path / "s", moved)
    report = report_of(path)
    [warning] = [line for line in report.warnings if "nearest neighbors" in line]
    assert re.match(
        rf"{path}: nearest neighbors O and O are 0.9\d+ angstrom apart in 8 of 8 frames "
        rf"\(atoms \d+ \(O\) and \d+ \(O\) in {path} frame \d+\), expected at least 1.00; \d+ % "
        r"of the hydrogen",
        warning,
    )
    assert warning.endswith(
        "Expected types in the order of the positions, and elements (type_map.raw) in the order "
        "of the numbers of the types."
    )
    assert report.units.verified["lengths"] == 0


@pytest.mark.usefixtures("real_radii")
def test_short_bonds_and_atoms_in_random_places_are_in_their_order():
    """N2 has the shortest bond of two such atoms, and U=O and Cr2 are shorter than their radii."""
    rng = np.random.default_rng(5)
    names = ["N", "U", "O", "Cr", "H"]
    molecules = {
        (0, 0, 4, 4): [0, 1.1, 4, 4.74],
        (1, 2, 2): [0, 1.76, -1.76],
        (3, 3, 2): [0, 1.68, 4],
    }
    for types, places in molecules.items():
        coord = np.outer(places, [1.0, 0, 0])
        frames = [
            Frame(
                coord + rng.normal(0, 0.02, coord.shape),
                np.array(types),
                None,
                {},
                source=("s", k),
            )
            for k in range(8)
        ]
        assert misplaced_types(frames, names) == []
    # two atoms of carbon that are pressed together, of a public set: their forces are large
    places = np.array([[0, 0, 0], [1.0, 0, 0], [0, 4, 0], [0, 5.1, 0]])
    pressed = [
        Frame(
            places + rng.normal(0, 0.01, (4, 3)),
            np.array([0, 0, 1, 2]),
            None,
            {"force": np.array([[-45.0, 0, 0], [45.0, 0, 0], [0, 0, 0], [0, 0, 0]])},
            source=("s", k),
        )
        for k in range(8)
    ]
    assert misplaced_types(pressed, ["C", "O", "H"]) == []
    at_rest = [replace(frame, labels={"force": np.zeros((4, 3))}) for frame in pressed]
    assert len(misplaced_types(at_rest, ["C", "O", "H"])) == 1
    grid = np.stack(np.meshgrid(*[1.3 * np.arange(4)] * 3), -1).reshape(-1, 3)
    types = np.tile([0, 2], 32)
    frames = [
        Frame(grid + rng.normal(0, 0.3, grid.shape), types, None, {}, source=("s", k))
        for k in range(8)
    ]
    assert misplaced_types(frames, names) == []


def test_what_cannot_be_verified_is_said(tmp_path):
    path = stored(tmp_path / "s", crystal(24, size=0.4))
    assert report_of(path).units.lines() == [
        "verified: lengths in 1, energies and forces (with each other) in 0, virials in 0 of 1 "
        "system",
        f"not verified: energies and forces of {path}",
        f"not verified: virials of {path}",
    ]


@pytest.mark.parametrize("strains", [False, True])
def test_crystals_that_were_turned_or_mirrored_give_the_ratios_of_those_that_were_not(
    strains,
):
    """The mean of two such cells is singular, and `check` ended with a LinAlgError."""
    frames, turn = (
        crystal(24, strains=strains),
        np.array([[0.0, 1, 0], [1, 0, 0], [0, 0, -1]]),
    )  # about 110
    turned = []
    for frame in frames[::2]:
        virial = turn.T @ frame.labels["virial"].reshape(3, 3) @ turn
        labels = frame.labels | {
            "force": frame.labels["force"] @ turn,
            "virial": virial.ravel(),
        }
        turned.append(
            Frame(frame.coord @ turn, frame.atom_type, frame.box @ turn, labels)
        )
    found, expected = (
        ratios_of([*turned, *frames[1::2]]),
        ratios_of([*frames[::2], *frames[1::2]]),
    )
    assert found.force == pytest.approx(expected.force, rel=1e-6)
    assert found.virial == (
        pytest.approx(expected.virial, rel=1e-6) if strains else None
    )


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (
            GPA,
            "the virials look like volume * stress in kbar or GPa: between frames in one cell "
            "they change by ",
        ),
        # of 1,000 angstrom^3
        (
            1e-3,
            "the virials look like a stress: between frames in one cell they change by ",
        ),
    ],
)
def test_virials_far_from_the_size_of_the_forces_are_reported(tmp_path, factor, words):
    """A virial RMS of 1,875 eV/atom passed where frames are far from each other."""
    report = report_of(
        stored(tmp_path / "s", crystal(12, size=0.3, strains=False, virial=factor))
    )
    [warning] = map(str, report.units.findings())
    assert words in warning
    assert (
        "times the change of the forces times the spacing of atoms, expected 0.03 to 3. Expected eV"
        in warning
    )
    assert report.units.verified["virials"] == 0


@pytest.mark.parametrize(
    ("part", "is_judged"), [(np.eye(3), False), (np.ones((3, 3)), True)]
)
def test_virials_that_differ_by_a_pressure_are_not_held_against_forces(part, is_judged):
    """Moving atoms have a pressure beside that of their forces, the same in all directions."""
    frames = crystal(12, size=0.3, strains=False)
    rng = np.random.default_rng(2)
    for frame in frames:
        frame.labels["virial"] = (
            frame.labels["virial"] + 1000 * rng.normal() * part.ravel()
        )  # eV
    assert (ratios_of(frames).change is not None) == is_judged


def test_virials_of_open_systems_that_are_placeholders_are_found(tmp_path):
    """A virial.npy of ones or zeros was trained on."""
    frames = [
        Frame(f.coord, f.atom_type, None, f.labels | {"virial": np.ones(9)})
        for f in molecules(24)
    ]
    warnings = report_of(stored(tmp_path / "s", frames)).warnings
    assert any(
        "the virials are placeholders, or another quantity" in text for text in warnings
    )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", [0, 6, 12])
@pytest.mark.parametrize("make", [crystal, molecules])
def test_atoms_in_one_place_are_reported_and_no_logarithm_of_their_ratios_is_taken(
    tmp_path, make, number
):
    """`test`, `model-devi`, `report -s` and `init` ended with "math domain error"."""
    frames = make(13)
    for frame in frames[: number + 1]:
        frame.coord[:] = 1.0
    frames[-1].labels["force"][0] = (
        1e4  # its contacts are compared with those of the others
    )
    report = report_of(stored(tmp_path / "a", frames))
    assert (
        "atoms 0 (O) and 1 (H) are 0.000 angstrom apart, expected at least"
        in report.problems[0]
    )
    assert not [line for line in report.warnings if "lengths" in line]


def minus(path, rng):
    scale_array(path, "force", -1)


def in_hartree(path, rng):
    scale_array(path, "force", 1 / 51.42206747)


def in_kcal(path, rng):
    scale_array(path, "force", KCAL)


def per_atom(path, rng):
    scale_array(path, "energy", 1 / 96)


def in_another_order(path, rng):
    file = path / "set.000" / "coord.npy"
    coord = np.load(file)
    for k in range(0, 60, 3):
        coord[k] = rng.permutation(coord[k].reshape(-1, 3)).ravel()
    np.save(file, coord)


def scale_array(path, name, factor):
    file = path / "set.000" / f"{name}.npy"
    np.save(file, np.load(file) * factor)


@pytest.mark.slow
@pytest.mark.usefixtures("real_radii")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (minus, "have the wrong sign: they push atoms of longer bonds apart"),
        (in_hartree, "look like Hartree/bohr: by them bonds of O and H"),
        (in_kcal, "look like kcal/mol/angstrom: by them bonds of O and H"),
        (per_atom, "eV/atom as if its energies were per atom"),
        (
            in_another_order,
            "more than 20 % of the hydrogen atoms have two or more neighbors",
        ),
    ],
)
def test_one_wrong_system_of_the_example_is_named_by_the_command(
    tmp_path, monkeypatch, capsys, change, words
):
    """Each passed with "No warnings" (forces and order), or was named kJ/mol (energies)."""
    shutil.copytree(EXAMPLES / "water", tmp_path / "water")
    folder = tmp_path / "water"
    change(folder / "data" / "train_400K", np.random.default_rng(1))
    monkeypatch.chdir(folder)
    assert main(["check", "input.json"]) == 0
    output = capsys.readouterr().out
    [line] = [line for line in output.splitlines() if words in line]
    assert "train_400K" in line
