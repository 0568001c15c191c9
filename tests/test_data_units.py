"""Units and signs: found where frames are independent of each other, and quiet where they are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import open_data, toy_frame, toy_labels

from deepmd_ema.data.check import units
from deepmd_ema.data.check.physics import Evidence, PathRatios, Ratio, judge, path_ratios
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.source import Frame
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

pytestmark = pytest.mark.usefixtures("real_radii")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
BOHR, HARTREE, KCAL, KJ, GPA = 0.52917721, 27.211386, 23.060548, 96.485332, 160.21766
LABELS = ("energy", "force", "virial")
WATER, MOLECULES = EXAMPLES / "water" / "data" / "train_400K", EXAMPLES / "molecules" / "data" / "train_large"


def copied(source, target, seed=0, frames=60, **factors):
    """Copy some frames of a system in random order, with arrays multiplied by factors."""
    order = None
    (target / "set.000").mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file():
            (target / file.name).write_bytes(file.read_bytes())
    for file in sorted((source / "set.000").glob("*.npy")):
        array = np.load(file)
        if order is None:
            order = np.random.default_rng(seed).permutation(len(array))[:frames]
        np.save(target / "set.000" / file.name, array[order] * factors.get(file.stem, 1))
    return target


def report_of(*systems):
    names = (Path(systems[0]) / "type_map.raw").read_text().split()
    opened = open_data([str(path) for path in systems], names, LABELS)
    return check_systems(opened, [], names, SeE2AConfig(rcut=4.0, sel="auto"), LABELS)


def volume(source, frames=60, seed=0):
    box = np.load(source / "set.000" / "box.npy")
    return float(np.abs(np.linalg.det(box.reshape(-1, 3, 3))).mean())


TRAPS = [
    ({"energy": 1 / HARTREE}, ["the energies look like Hartree"]),
    ({"energy": KCAL}, ["the energies look like kcal/mol"]),
    ({"energy": KJ}, ["the energies look like kJ/mol"]),
    ({"force": BOHR / HARTREE}, ["the forces look like Hartree/bohr"]),
    ({"force": KCAL}, ["the forces look like kcal/mol/angstrom"]),
    ({"force": -1}, ["the forces have the wrong sign (gradients instead of forces)"]),
    ({"energy": -1}, ["the energies have the wrong sign"]),
    ({"energy": KCAL, "force": KCAL, "virial": KCAL}, ["energies and forces look like kcal/mol and kcal/mol/angstrom"]),
    (
        {"energy": 1 / HARTREE, "force": BOHR / HARTREE, "virial": 1 / HARTREE},
        ["energies and forces look like Hartree and Hartree/bohr"],
    ),
    ({"coord": 1 / BOHR, "box": 1 / BOHR}, ["lengths look like bohr"]),
    (
        {"coord": 1 / BOHR, "box": 1 / BOHR, "energy": 1 / HARTREE, "force": BOHR / HARTREE, "virial": 1 / HARTREE},
        ["lengths look like bohr", "energies and forces look like Hartree and Hartree/bohr"],
    ),
]


@pytest.mark.parametrize("source", [WATER, MOLECULES], ids=["liquid", "molecules"])
@pytest.mark.parametrize(("factors", "words"), TRAPS, ids=["-".join(t[0]) + f"{k}" for k, t in enumerate(TRAPS)])
def test_wrong_units_and_signs_of_independent_frames_are_found(tmp_path, source, factors, words):
    """They were found in trajectories only, so that hartree and gradients passed in silence."""
    [warning] = report_of(copied(source, tmp_path / "s", **factors)).units.warnings
    for word in words:
        assert word in warning, warning
    assert "Expected eV, eV/angstrom and angstrom" in warning


@pytest.mark.parametrize(
    ("factor", "word"),
    [
        (-1, "the virials have the wrong sign"),
        (GPA, "the virials look like GPa * angstrom^3"),
        (-10 * GPA, "the virials look like kbar * angstrom^3 with the wrong sign"),
        ("stress", "the virials look like a stress in eV/angstrom^3, not a virial"),
        ("GPa", "the virials look like a stress in GPa, not a virial"),
    ],
)
def test_wrong_units_and_signs_of_virials_are_found(tmp_path, factor, word):
    factor = {"stress": -1 / volume(WATER), "GPa": -GPA / volume(WATER)}.get(factor, factor)
    [warning] = report_of(copied(WATER, tmp_path / "s", virial=factor)).units.warnings
    assert word in warning
    assert "virial = -volume * stress in eV" in warning


def test_right_data_are_quiet(tmp_path):
    for source in sorted(EXAMPLES.glob("*/data/*")):
        if source.is_dir():
            report = report_of(source)
            assert report.units.warnings == [], source
            if source.name.startswith("train"):
                assert "verified: lengths in 1, forces in 1, energies in 1" in report.units.lines()[0], source


def test_what_cannot_be_reported_is_said(tmp_path):
    path = copied(WATER, tmp_path / "s", frames=5)
    lines = report_of(path).units.lines()
    assert lines[0] == ("verified: lengths in 1, forces in 1, energies in 0, virials in 0 of 1 system")
    assert lines[1] == f"not verified: energies of {path}"
    for file in ("energy", "force"):
        (path / "set.000" / f"{file}.npy").unlink()
    assert report_of(path).units.lines() == ["cannot be verified without forces"]


def test_small_systems_are_judged_together(tmp_path):
    parts = [copied(MOLECULES, tmp_path / f"s{k}", seed=k, frames=8, energy=KCAL) for k in range(6)]
    [warning] = report_of(*parts).units.warnings
    assert warning.startswith(f"{parts[0]} and 5 more systems of few frames: the energies look like kcal/mol")


def test_elements_that_are_unknown_hide_lengths_only(tmp_path):
    path = copied(WATER, tmp_path / "s", force=-1)
    names = (path / "type_map.raw").read_text()
    (path / "type_map.raw").write_text(names.replace("H", "H_wat").replace("O", "O_wat"))
    report = report_of(path)
    assert "the forces have the wrong sign" in report.units.warnings[0]
    assert report.units.verified["lengths"] == 0


def test_of_many_systems_some_are_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "_MAX_SYSTEMS", 2)
    parts = [copied(MOLECULES, tmp_path / f"s{k}", seed=k, frames=20) for k in range(5)]
    assert report_of(*parts).units.lines()[0].endswith(" of 2 evenly spaced systems of 5")


@pytest.mark.parametrize(
    ("correlation", "free", "clear"), [(0.9, 20, True), (0.6, 20, False), (0.45, 1000, False), (0.99, 2, True)]
)
def test_a_ratio_counts_when_its_correlation_is_no_chance(correlation, free, clear):
    assert Ratio(1.0, correlation, free).is_clear is clear
    assert Ratio(-1.0, -correlation, free).is_clear is clear


# stiffness, ratio and correlation of the pair potential of right data (mlearn): Si test and training, Ge training
COVALENT = [(4.33, 2.68, 0.99), (4.54, 2.23, 0.98), (2.43, 4.48, 0.91)]


@pytest.mark.parametrize(("stiffness", "ratio", "correlation"), COVALENT)
@pytest.mark.parametrize("near", [None, 1.08])
def test_the_pair_potential_of_a_covalent_solid_is_no_proof_of_a_unit(stiffness, ratio, correlation, near):
    """Right data of Si and Ge were reported to be in kcal/mol, because the energies correlate to 0.95 and more."""
    evidence = Evidence(60, 0.99, stiffness, Ratio(ratio, correlation, 20), paths=PathRatios(near))
    assert units._Findings(evidence, None).texts == []


@pytest.mark.parametrize(("near", "found"), [(0.95 / BOHR, True), (None, False)])
def test_near_frames_report_hartree_of_stiff_bonds(near, found):
    """MgO and silicon have bonds so stiff that hartree/bohr look like soft ones; work and energy differ by 1.89."""
    evidence = Evidence(30, 0.91, 11.1 * BOHR / HARTREE, Ratio(0.95 / BOHR, 0.97, 22), paths=PathRatios(near))
    texts = units._Findings(evidence, None).texts
    assert bool(texts) is found
    assert not found or "Hartree and Hartree/bohr" in texts[0]


@pytest.mark.parametrize(
    ("factors", "words"),
    [
        ({"virial": -1}, ["the virials have the wrong sign"]),
        ({"virial": 10 * GPA}, ["the virials look like kbar * angstrom^3"]),
        ({"virial": GPA}, ["the virials look like GPa * angstrom^3"]),
        ({"energy": KCAL}, ["the energies look like kcal/mol"]),
        ({"force": -1}, ["the forces have the wrong sign"]),
    ],
)
def test_strained_crystals_report_units_and_signs(factors, words):
    """Of Si and Ge, stresses in kbar, in GPa and with the wrong sign passed without a word."""
    texts = units._Findings(Evidence(12, volume=500.0, paths=path_ratios(crystal(12, **factors))), None).texts
    assert [text[: len(word)] for text, word in zip(texts, words)] == words, texts
    assert len(texts) == 1


def test_right_strained_crystals_are_quiet():
    findings = units._Findings(judge(crystal(12), ["O_", "H_"]), None)  # no elements, whose bonds would have a length
    assert findings.texts == []
    assert findings.verified >= {"energy", "force", "virial"}


def crystal(num, energy=1, force=1, virial=1, seed=9, size=0.01, strains=True):
    """Return frames of a strained crystal whose atoms are off their sites."""
    rng = np.random.default_rng(seed)
    coord, types, box = toy_frame(rng, 12, jitter=0.0)
    frames = []
    for _ in range(num):
        strain = np.eye(3) + rng.normal(0, size if strains else 0, (3, 3))
        moved, cell = (coord + rng.normal(0, size, coord.shape)) @ strain, box @ strain
        e, f, w, _ = toy_labels(moved, types, cell)
        labels = {"energy": e * energy, "force": f * force, "virial": w * virial}
        frames.append(Frame(moved + rng.integers(-1, 2, (12, 1)) @ cell[:1], types, cell, labels))
    return frames


def test_near_frames_give_energies_and_virials_of_their_paths():
    ratios = path_ratios(crystal(12))
    assert ratios.energy == pytest.approx(1, abs=0.05)
    assert ratios.virial == pytest.approx(1, abs=0.05)
    ratios = path_ratios(crystal(12, 3.0, -1.0, 5.0))
    assert ratios.energy == pytest.approx(-3, abs=0.15)
    assert ratios.virial == pytest.approx(5 / 3, abs=0.1)


def test_molecules_that_were_turned_give_energies_of_their_paths():
    rng = np.random.default_rng(1)
    coord, types, _ = toy_frame(rng, 6, pbc=False)
    frames = []
    for _ in range(12):
        turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
        turn *= np.linalg.det(turn)  # a rotation
        moved = (coord + rng.normal(0, 0.05, coord.shape)) @ turn + rng.normal(size=3)
        e, f, *_ = toy_labels(moved, types)
        frames.append(Frame(moved, types, None, {"energy": e, "force": f}))
    assert path_ratios(frames).energy == pytest.approx(1, abs=0.05)


_TURNS = {
    "half_turn_about_z": np.diag([-1.0, -1.0, 1.0]),
    "half_turn_about_110": np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]]),
    "mirror_in_z": np.diag([1.0, 1.0, -1.0]),
    "inversion": -np.eye(3),
    "any": np.linalg.qr(np.random.default_rng(3).normal(size=(3, 3)))[0],
}


@pytest.mark.parametrize("strains", [False, True])
@pytest.mark.parametrize("turn", _TURNS.values(), ids=_TURNS)
def test_crystals_that_were_turned_or_mirrored_give_the_ratios_of_those_that_were_not(turn, strains):
    """The mean of two such cells is singular, and `check` ended with a LinAlgError."""
    frames = crystal(12, strains=strains)
    turned = [
        Frame(
            frame.coord @ turn,
            frame.atom_type,
            frame.box @ turn,
            frame.labels
            | {"force": frame.labels["force"] @ turn, "virial": (turn.T @ virial.reshape(3, 3) @ turn).ravel()},
        )
        for frame in frames[::2]
        for virial in [frame.labels["virial"]]
    ]
    found, expected = path_ratios([*turned, *frames[1::2]]), path_ratios(frames)
    assert found.energy == pytest.approx(expected.energy, rel=1e-6)
    assert found.virial == (pytest.approx(expected.virial, rel=1e-6) if strains else None)


@pytest.mark.parametrize("strains", [False, True])
@pytest.mark.parametrize("signs", [(1, 1, -1), (-1, -1, -1), (-1, -1, 1)], ids=str)
def test_crystals_whose_cell_vectors_point_the_other_way_in_half_of_the_frames_are_quiet(signs, strains):
    frames = crystal(24, strains=strains)
    for frame in frames[::2]:
        frame.box[:] = np.diag(signs) @ frame.box
    findings = units._Findings(judge(frames, ["O_", "H_"]), None)
    assert findings.texts == []
    assert findings.verified >= {"energy", "force", *["virial"] * strains}


def test_few_or_distant_or_unrelated_frames_give_no_path():
    assert path_ratios(crystal(7)) == PathRatios()
    assert path_ratios(crystal(12, size=0.4)) == PathRatios()
    frames = crystal(12)
    mixed = [
        Frame(f.coord, f.atom_type, f.box, f.labels | {"energy": g.labels["energy"]})
        for f, g in zip(frames, frames[5:] + frames[:5])
    ]
    assert path_ratios(mixed) == PathRatios()
    assert (
        path_ratios([Frame(f.coord, f.atom_type, f.box, {"force": f.labels["force"]}) for f in frames]) == PathRatios()
    )


def test_virials_that_no_material_has_are_reported_whatever_can_be_reported(tmp_path):
    """A virial RMS of 1,875 eV/atom passed where units could not be determined."""
    report = report_of(copied(WATER, tmp_path / "s", frames=5, virial=10 * GPA))
    assert report.units.warnings == []
    [warning] = [w for w in report.warnings if "virials" in w]
    assert "eV/atom; no material has more than 20. Expected virial = -volume * stress in eV" in warning


def test_virials_of_validation_in_another_unit_are_reported(tmp_path):
    names = (WATER / "type_map.raw").read_text().split()

    def warnings(**factors):
        paths = [
            str(copied(WATER, tmp_path / f"s{len(list(tmp_path.iterdir()))}", seed, 5, **f))
            for seed, f in enumerate(({}, factors))
        ]
        training, validation = (open_data([path], names, LABELS) for path in paths)
        report = check_systems(training, validation, names, SeE2AConfig(rcut=4.0, sel="auto"), LABELS)
        return [w for w in report.warnings if "virials without their trace" in w]

    assert warnings() == []
    assert warnings(virial=0.02, force=0.02, energy=0.02) == []  # relaxed structures
    for factor in (GPA, 1 / GPA):
        [warning] = warnings(virial=factor)
        assert "one of the two has virials in another unit" in warning


def test_without_bonds_a_unit_common_to_energies_and_forces_is_not_reported(tmp_path):
    """Units of noble gases counted as verified, and kcal/mol of both passed."""
    report = units.UnitReport()
    findings = units._Findings(Evidence(30, energy=Ratio(1.0, 0.97, 27)), None)
    report.count("argon", {"energy", "force"}, findings.verified)
    assert report.unverified["a unit common to energies and forces"] == ["argon"]
    assert report.verified == {"lengths": 0, "forces": 1, "energies": 1}


def test_frames_of_very_many_atoms_are_judged_by_their_nearest_pairs():
    """The judgment of 12 frames of 100,000 atoms took 7 GB."""
    rng = np.random.default_rng(0)
    sites = 3.61 * (
        np.array(list(np.ndindex(22, 22, 22)))[:, None] + [[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]
    )
    sites = sites.reshape(-1, 3)  # of copper
    frames = []
    for _ in range(4):
        moved = rng.normal(0, 0.1, sites.shape)
        frames.append(Frame(sites + moved, np.zeros(len(sites), int), 79.42 * np.eye(3), {"force": -5 * moved}))
    evidence = judge(frames, ["Cu"])
    assert evidence.bond == pytest.approx(0.84, abs=0.02)
    assert evidence.stiffness == pytest.approx(2.56, abs=0.1)
