"""Units and signs: found where frames are independent of each other, and quiet where they are right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import open_data

from deepmd_ema.config.schema.se_e2_a import SeE2AConfig
from deepmd_ema.data.check import units
from deepmd_ema.data.check.physics import Evidence, Ratio, judge
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.source import Frame

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
                assert "can be told: lengths in 1, forces in 1, energies in 1" in report.units.lines()[0], source


def test_what_cannot_be_told_is_said(tmp_path):
    path = copied(WATER, tmp_path / "s", frames=5)
    lines = report_of(path).units.lines()
    assert lines[0] == (
        "Units and signs: of 1 system, can be told: lengths in 1, forces in 1, energies in 0, virials in 0"
    )
    assert lines[1] == f"  cannot be told: energies of {path}"
    for file in ("energy", "force"):
        (path / "set.000" / f"{file}.npy").unlink()
    assert report_of(path).units.lines() == ["Units and signs: cannot be told without forces"]


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
    assert report.units.told["lengths"] == 0


def test_of_many_systems_some_are_judged(tmp_path, monkeypatch):
    monkeypatch.setattr(units, "_MOST_SYSTEMS", 2)
    parts = [copied(MOLECULES, tmp_path / f"s{k}", seed=k, frames=20) for k in range(5)]
    assert (
        report_of(*parts).units.lines()[0].startswith("Units and signs: of 2 of 5 systems, evenly taken, can be told")
    )


@pytest.mark.parametrize(
    ("correlation", "free", "clear"), [(0.9, 20, True), (0.6, 20, False), (0.45, 1000, False), (0.99, 2, True)]
)
def test_a_ratio_counts_when_its_correlation_is_no_chance(correlation, free, clear):
    assert Ratio(1.0, correlation, free).is_clear is clear
    assert Ratio(-1.0, -correlation, free).is_clear is clear


@pytest.mark.parametrize(("correlation", "found"), [(0.97, True), (0.8, False)])
def test_a_good_fit_tells_hartree_of_stiff_bonds(correlation, found):
    """MgO and silicon have bonds so stiff that hartree/bohr look like soft ones; a fit of 0.97 is exact enough."""
    evidence = Evidence(30, 0.91, 11.1 * BOHR / HARTREE, Ratio(0.95 / BOHR, correlation, 22))
    texts = units._Findings(evidence, None).texts
    assert bool(texts) is found
    assert not found or "Hartree and Hartree/bohr" in texts[0]


def test_without_bonds_a_unit_common_to_energies_and_forces_is_not_told(tmp_path):
    """Of noble gases it was said that units can be told, and kcal/mol of both passed."""
    report = units.UnitReport()
    findings = units._Findings(Evidence(30, energy=Ratio(1.0, 0.97, 27)), None)
    units._count(
        report, "argon", [Frame(np.zeros((1, 3)), np.zeros(1, int), labels={"energy": 0.0, "force": 0.0})], findings
    )
    assert report.untold["a unit common to energies and forces"] == ["argon"]
    assert report.told == {"lengths": 0, "forces": 1, "energies": 1}


def test_frames_of_very_many_atoms_are_judged_by_their_nearest_pairs():
    """The judgment of 12 frames of 100,000 atoms took 7 GB."""
    rng = np.random.default_rng(0)
    sites = 3.61 * (
        np.array(list(np.ndindex(22, 22, 22)))[:, None] + [[0, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5], [0, 0.5, 0.5]]
    )
    sites = sites.reshape(-1, 3)  # of copper
    frames = []
    for _ in range(2):
        moved = rng.normal(0, 0.1, sites.shape)
        frames.append(Frame(sites + moved, np.zeros(len(sites), int), 79.42 * np.eye(3), {"force": -5 * moved}))
    evidence = judge(frames, ["Cu"])
    assert evidence.bond == pytest.approx(0.84, abs=0.02)
    assert evidence.stiffness == pytest.approx(2.56, abs=0.1)
