"""Checks of the data: each fault is reported with file and frame, and sound data raise no
suspicion.
"""

import re
import shutil
from functools import partial

import numpy as np
import pytest
from helpers import open_data, write_system

from deepmd_ema.commands.check import RunCheck, data_lines
from deepmd_ema.data.check.report import check_systems
from deepmd_ema.data.convert import convert_data
from deepmd_ema.errors import DataError
from deepmd_ema.geometry import find_pairs, find_pairs_once
from deepmd_ema.model.families.dpa3.section import DPA3Config, RepflowConfig
from deepmd_ema.model.families.se_e2_a.section import SeE2AConfig

ELEMENTS = ["O", "H"]
LABELS = ("energy", "force", "virial")


def check(
    training, validation=(), type_map=ELEMENTS, labels=LABELS, sel="auto", **arguments
):
    opened = [
        open_data([str(p) for p in paths], type_map, labels) if paths else []
        for paths in (training, validation)
    ]
    return check_systems(
        *opened, type_map, SeE2AConfig(rcut=4.0, sel=sel), labels, **arguments
    )


@pytest.fixture
def water(here):
    return write_system("water", frames=12, natoms=12, seed=1, sets=3)


def edit(path, change):
    array = np.load(path)
    change(array)
    np.save(path, array)


def put(index, value):
    return lambda array: array.__setitem__(index, value)


def shift(array, by):
    array += by


def lines_of(report):
    """Return the sections about the data of `dp-ema check`."""
    check = RunCheck(None)
    check.reports = {"": report}
    return list(data_lines(check))


def test_the_summary_reports_systems_elements_labels_ranges_pairs_and_neighbors(
    water, tmp_path
):
    write_system("open", frames=5, natoms=7, seed=2, pbc=False)
    report = check(["water", "open"], ["open"])
    text = "\n".join(lines_of(report))
    assert "Training data: 2 systems, 17 frames, 179 atoms\n" in text
    assert "Validation data: 1 system, 5 frames, 35 atoms, open\n" in text
    assert re.search(r"\n  water +12 +12  periodic +-\d", text)
    assert re.search(r"\n  open +5 +7  open +-\d.* -  +-\n", text)
    assert "virial: 12 of 17 frames" in text
    assert re.search(r"\n  O +92 +20 ", text)
    assert re.search(r"\n  H +87 +15 ", text)
    force = np.concatenate(
        [np.load(f).ravel() for f in sorted(tmp_path.glob("*/set.*/force.npy"))]
    )
    every = re.search(r"\n  all +17 .*", text)[0].split()
    assert every[-4:-2] == [
        f"{np.sqrt((force**2).mean()):.3f}",
        f"{np.abs(force).max():.2f}",
    ]
    most, closest = 0, (np.inf, "")
    for system in open_data(["water", "open"], ELEMENTS):
        for k in range(system.num_frames):
            frame = system.frame(k)
            pairs = find_pairs(frame.coord, frame.box, 4.0)
            distance = np.linalg.norm(pairs.vector(frame.coord, frame.box), axis=1)
            most = max(most, np.bincount(pairs.i).max())
            closest = min(closest, (distance.min(), f"{system.name} frame {k}"))
    assert f"at most {most} within 4 angstrom" in text
    assert (
        f"the nearest atoms are {closest[0]:.3f} angstrom apart ({closest[1]})" in text
    )


@pytest.mark.parametrize(
    ("file", "index", "value", "message"),
    [
        (
            "force",
            (2, 16),
            np.nan,
            "water/set.001/force.npy: frame 2 (of 4, from 0): nan at atom 5. Expected finite "
            "numbers; remove the frame or",
        ),
        (
            "box",
            (1, slice(0, 3)),
            0.0,
            "water/set.001/box.npy: frame 1 (of 4, from 0): the cell has no volume (0 0 0 ",
        ),
    ],
)
def test_broken_numbers_are_reported_with_file_and_frame(
    water, file, index, value, message
):
    edit(water / "set.001" / f"{file}.npy", put(index, value))
    report = check(["water"])
    assert len(report.problems) == 1
    assert report.problems[0].startswith(message)
    with pytest.raises(DataError, match=r"set\.001"):
        report.raise_problems()


@pytest.mark.parametrize(("value", "is_reported"), [(9e29, False), (2e30, True)])
def test_numbers_are_expected_up_to_1e30(water, value, is_reported):
    edit(water / "set.001" / "virial.npy", put((2, 4), value))
    problems = check(["water"]).problems
    assert any("Expected finite numbers" in text for text in problems) == is_reported


def test_atoms_that_are_too_close_are_reported_with_their_places_in_the_file(tmp_path):
    path = write_system(
        tmp_path / "w", frames=4, natoms=6, mixed=True, virtual=2, seed=1
    )
    file = path / "set.000" / "coord.npy"
    types = np.load(path / "set.000" / "real_atom_types.npy")
    a, b = np.flatnonzero(types[2] >= 0)[[1, 4]]
    edit(
        file,
        lambda c: c.__setitem__(
            (2, slice(3 * b, 3 * b + 3)), c[2, 3 * a : 3 * a + 3] + [0.1, 0, 0]
        ),
    )
    [problem] = check([path]).problems
    expected = [
        f"{file}: frame 2 (of 4, from 0): atoms {j} ({ELEMENTS[types[2, j]]}) and {k} "
        f"({ELEMENTS[types[2, k]]}) are 0.100 angstrom apart, expected at least 0.3. Remove the "
        "frame"
        for j, k in ((a, b), (b, a))
    ]
    assert problem.startswith(tuple(expected))
    assert problem.endswith(
        "leaves such training frames out, a smaller number accepts them."
    )
    assert check([path], min_distance=0.05).problems == []
    assert len(check([path], min_distance=2.5).problems) == 4


@pytest.mark.parametrize(("distance", "is_reported"), [(0.29, True), (0.31, False)])
def test_atoms_are_too_close_below_three_tenths_of_an_angstrom(
    water, distance, is_reported
):
    edit(
        water / "set.001" / "coord.npy",
        lambda coord: coord.__setitem__(
            (1, slice(3, 6)), coord[1, :3] + [distance, 0, 0]
        ),
    )
    assert (
        any("expected at least 0.3" in text for text in check(["water"]).problems)
        == is_reported
    )


def test_a_label_that_some_systems_lack_is_a_warning_with_numbers(water):
    write_system("other", frames=5, seed=7, force=False)
    (water / "set.001" / "virial.npy").unlink()
    assert check(["water", "other"]).warnings == [
        "no force in 5 training frames of 1 of 2 systems (first: other): they do not count in "
        "this term of the loss.",
        "no virial in 4 training frames of 1 of 2 systems (first: water): they do not count in "
        "this term of the loss.",
    ]


def test_data_without_any_label_cannot_be_trained_on(tmp_path):
    path = write_system(tmp_path / "w", energy=False, force=False, virial=False)
    assert check([path]).problems == [
        "training data: no label of the loss is present in any system (energy.npy, "
        "force.npy, virial.npy): there is nothing to learn."
    ]


@pytest.mark.parametrize(
    ("stored", "shape", "predicted", "in_loss", "options"),
    [
        (
            "dos",
            (20,),
            ("dos[20]", "atom_dos[20]"),
            "atom_dos[20]",
            "start_pref_dos and limit_pref_dos",
        ),
        (
            "atom_dos",
            (120,),
            ("dos[20]", "atom_dos[20]"),
            "dos[20]",
            "start_pref_ados and limit_pref_ados",
        ),
        ("dipole", (3,), ("dipole", "atom_dipole"), "atom_dipole", "pref"),
        (
            "atom_polarizability",
            (54,),
            ("polarizability", "atom_polarizability"),
            "polarizability",
            "pref_atomic",
        ),
        (
            "virial",
            (9,),
            ("energy", "force", "virial"),
            "energy",
            "start_pref_v and limit_pref_v",
        ),
    ],
)
def test_labels_without_a_weight_are_named_with_their_options(
    tmp_path, stored, shape, predicted, in_loss, options
):
    path = write_system(
        tmp_path / "w",
        energy=False,
        force=False,
        virial=False,
        sets=1,
        natoms=6,
        frames=4,
    )
    np.save(path / "set.000" / f"{stored}.npy", np.ones((4, *shape)))
    systems = open_data([str(path)], ELEMENTS, predicted)
    report = check_systems(
        systems, [], ELEMENTS, SeE2AConfig(rcut=4.0, sel="auto"), [in_loss]
    )
    assert report.problems[-1].endswith(
        f"there is nothing to learn. {stored}.npy is there: the loss learns it with {options} "
        "above 0."
    )
    assert not any(
        "the loss has a prefactor for it" in text for text in report.warnings
    )


def test_files_of_other_names_are_listed_where_nothing_can_be_learned(tmp_path):
    path = write_system(tmp_path / "w", energy=False, force=False, virial=False, sets=1)
    np.save(path / "set.000" / "band_gap.npy", np.ones(4))
    systems = open_data([str(path)], ELEMENTS, ["gap[1]", "atom_gap[1]"])
    report = check_systems(
        systems, [], ELEMENTS, SeE2AConfig(rcut=4.0, sel="auto"), ["gap[1]"]
    )
    assert report.problems[-1].endswith(
        f"there is nothing to learn. {path} has band_gap.npy."
    )


def test_a_sel_too_small_is_a_warning_with_the_numbers_needed(water):
    found = check(["water"]).neighbors
    a, b = found.max_neighbors
    assert check(["water"], sel=[a, b]).warnings == []
    assert check(["water"], sel=[a - 2, b + 4]).warnings == [
        f"sel = [{a - 2}, {b + 4}] is too small: an atom has up to [{a}, {b}] neighbors within 4 "
        f"angstrom, and the farthest are dropped, which makes the energy jump. Use sel [{a}, "
        f"{b + 4}] or more, or auto."
    ]


def test_shorter_lists_of_neighbors_that_are_too_small_are_a_warning_each(water):
    opened = open_data(["water"], ELEMENTS, LABELS)
    flow = RepflowConfig(
        e_rcut=4.0, e_rcut_smth=1.0, e_sel=200, a_rcut=3.0, a_rcut_smth=1.0, a_sel=2
    )
    report = check_systems(opened, [], ELEMENTS, DPA3Config(repflow=flow), LABELS)
    most = report.neighbors.max_within(3.0)
    assert 2 < most < report.neighbors.max_total
    assert report.warnings == [
        f"repflow.a_sel = 2 is too small: an atom has up to {most} neighbors within 3 angstrom, "
        f"and the farthest are dropped, which makes the energy jump. Use repflow.a_sel {most} or "
        "more, or auto."
    ]


def test_elements_that_no_training_frame_has_are_a_warning(water):
    write_system("more", frames=5, seed=7, elements=("O", "C"))
    warnings = check(["water"], ["more"], type_map=["O", "H", "C", "Xe"]).warnings
    assert (
        warnings[0]
        == "type_map has C, Xe, but no training frame does: their networks stay untrained."
    )
    assert warnings[1] == "validation frames have C, but no training frame does."


def test_validation_frames_that_are_training_frames_are_counted_even_in_another_precision(
    water,
):
    shutil.copytree("water", "valid")
    shutil.rmtree("valid/set.000")
    write_system("fresh", frames=3, seed=9)
    for file in water.parent.glob("valid/set.*/*.npy"):
        np.save(file, np.load(file).astype(np.float32))
    report = check(["water"], ["fresh", "valid"])
    assert report.warnings == [
        "8 of 11 validation frames are also training frames (first: valid frame 0 is water "
        "frame 4): validation errors will look too good."
    ]


def test_an_energy_outlier_is_named(tmp_path):
    path = write_system(tmp_path / "w", frames=40, seed=1)
    other = write_system(
        tmp_path / "o", frames=20, seed=2, elements=("H", "O"), natoms=7
    )
    assert check([path, other]).warnings == []
    edit(path / "set.000" / "energy.npy", lambda e: e.__setitem__(17, e[17] + 40))
    [warning] = check([path, other]).warnings
    assert warning.startswith("1 frame has an energy far from the others")
    assert f"{path} frame 17 (3." in warning


def test_an_energy_is_judged_by_the_spread_of_its_system(tmp_path):
    """An outlier is beyond 15 robust standard deviations, as doc/data.md says."""
    path = write_system(tmp_path / "w", frames=40, seed=1)
    sigma = 0.02  # eV/atom
    deviation = sigma * np.random.default_rng(1).permutation(np.linspace(-1.6, 1.6, 40))
    for factor, is_named in ((13, False), (20, True)):
        values = deviation.copy()
        values[17] = factor * 1.4826 * np.median(np.abs(deviation))
        np.save(path / "set.000" / "energy.npy", 12 * (values - 100))
        warnings = check([path]).warnings
        assert (
            any("has an energy far from the others" in text for text in warnings)
            == is_named
        )


@pytest.mark.parametrize(("factor", "is_named"), [(0.9, False), (1.1, True)])
@pytest.mark.parametrize(
    ("frames", "sigma", "bound"), [(9, 1e-3, 1.0), (10, 1e-3, 0.2), (40, 0.2, 1.0)]
)
def test_bounds_of_energies_have_a_least_and_a_largest_size(
    tmp_path, frames, sigma, bound, factor, is_named
):
    """They are 1 eV/atom, or of ten frames and more 0.2 to 1 eV/atom, as doc/data.md says."""
    path = write_system(tmp_path / "w", frames=frames, seed=1)
    values = sigma * np.linspace(-1.6, 1.6, frames)
    values[frames // 2] = factor * bound
    np.save(path / "set.000" / "energy.npy", 12 * (values - 100))
    warnings = check([path]).warnings
    assert (
        any("has an energy far from the others" in text for text in warnings)
        == is_named
    )


@pytest.mark.parametrize(("number", "is_named"), [(4, True), (5, False)])
def test_outliers_are_named_up_to_a_tenth_of_the_frames(tmp_path, number, is_named):
    path = write_system(tmp_path / "w", frames=40, seed=1)
    edit(path / "set.000" / "energy.npy", lambda e: e[:number].__iadd__(40))
    report = check([path])
    assert (
        any("an energy far from the others" in text for text in report.warnings)
        == is_named
    )
    assert any(f"({number} of 40)" in text for text in report.notes) == (not is_named)


def test_an_isolated_atom_is_no_outlier_beside_a_crystal_of_its_element(tmp_path):
    """The energy of the crystal is that of its atoms and its cohesive energy."""
    rng = np.random.default_rng(1)
    sites = 2.0 * np.stack(np.meshgrid(*[range(2)] * 3), axis=-1).reshape(-1, 3)
    lines = []
    for number in range(20):
        head = 'Lattice="4 0 0 0 4 0 0 0 4" Properties=species:S:1:pos:R:3 pbc="T T T"'
        lines += ["8", f"{head} energy={-40 + 0.01 * number}"]
        lines += [
            f"O {x:.8f} {y:.8f} {z:.8f}"
            for x, y, z in sites + rng.normal(0, 0.05, sites.shape)
        ]
    lines += [
        "1",
        'Properties=species:S:1:pos:R:3 pbc="F F F" energy=0.0',
        "O 0.0 0.0 0.0",
    ]
    path = tmp_path / "oxygen.xyz"
    path.write_text("\n".join(lines) + "\n")
    report = check([path], type_map=["O"], labels=("energy",))
    assert report.warnings == []
    assert any("one isolated atom" in text for text in report.notes)


def test_energies_per_element_explain_other_compositions_beside_isolated_atoms(
    tmp_path,
):
    """Isolated atoms, which are a cohesive energy above the others, are left out of the fit."""
    atom = write_system(tmp_path / "atom", frames=4, natoms=1, pbc=False)
    bulk = [
        write_system(tmp_path / str(size), frames=8, natoms=size, seed=size)
        for size in (7, 12)
    ]
    for path in (atom, *bulk):
        num_oxygen = (np.loadtxt(path / "type.raw") == 0).sum()
        edit(path / "set.000" / "energy.npy", partial(shift, by=-2000.0 * num_oxygen))
    for systems in (bulk, [atom, *bulk]):
        assert not [
            text
            for text in check(systems).warnings
            if "do not fit the energies" in text
        ]


@pytest.mark.parametrize(("spacing", "is_isolated"), [(3.9, False), (4.1, True)])
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1)])
def test_one_atom_is_isolated_if_no_faces_of_its_cell_are_nearer_than_the_cutoff(
    tmp_path, order, spacing, is_isolated
):
    path = write_system(tmp_path / "atom", frames=1, natoms=1)
    cell = np.array([[spacing, 3.0, 1.0], [0.0, 10.0, 0.0], [0.0, 0.0, 10.0]])
    np.save(path / "set.000" / "box.npy", cell[list(order)].reshape(1, 9))
    notes = check([path]).notes  # with a cutoff of 4 angstrom
    assert any("one isolated atom" in text for text in notes) == is_isolated


def test_a_system_that_is_listed_twice_has_no_copies(water):
    assert not any("of another" in text for text in check(["water", "water"]).warnings)
    shutil.copytree("water", "again")
    [warning] = check(["water", "again"]).warnings
    assert warning.startswith(
        "12 training frames are copies of another (first: again frame 0 is water frame 0)"
    )


HARTREE = 27.211386
# numbers of atoms of the systems; of the last the energies per atom before, their factor and that
# of the forces; words
OTHER_SYSTEMS = [
    ((12, 12, 12), -600, 1, 1, " eV/atom, expected -5."),
    ((12, 12), -600, 1, 1, " eV/atom, expected -5."),
    ((12, 7, 11, 16), -600, 1, 1, " eV/atom, expected -"),
    (
        (12, 12, 12),
        0,
        1 / HARTREE,
        0.5292 / HARTREE,
        " eV/atom as in Hartree, expected -5.",
    ),
    ((12, 12, 12), 0, 1 / HARTREE, 1, " eV/atom as in Hartree, expected -5."),
    ((12, 7, 11, 12), -150, 1 / HARTREE, 1, " eV/atom as in Hartree, expected -15"),
    ((12, 12, 12), 0, 23.060548, 23.060548, " eV/atom as in kcal/mol, expected -5."),
    (
        (12, 12, 8),
        0,
        1 / 8,
        1,
        " eV/atom as if its energies were per atom, expected -5",
    ),
    (
        (96, 96, 96),
        0,
        1 / 96,
        1,
        " eV/atom as if its energies were per atom or as if the others were in kJ/mol, expected",
    ),
]


@pytest.mark.parametrize(("sizes", "zero", "energy", "force", "words"), OTHER_SYSTEMS)
def test_a_system_of_another_unit_or_code_is_named(
    tmp_path, sizes, zero, energy, force, words
):
    """Training started 51,500 meV/atom off, after "No warnings"."""
    systems = [
        write_system(tmp_path / str(k), frames=8, seed=k, natoms=size, virial=False)
        for k, size in enumerate(sizes)
    ]
    common = zero if energy != 1 else 0
    for path, size in zip(systems, sizes):
        edit(path / "set.000" / "energy.npy", partial(shift, by=common * size))
    assert not [
        line for line in check(systems).warnings if not line.startswith("no virial")
    ]
    odd = systems[-1]
    edit(odd / "set.000" / "energy.npy", partial(shift, by=(zero - common) * sizes[-1]))
    edit(odd / "set.000" / "energy.npy", lambda e: np.multiply(e, energy, out=e))
    edit(odd / "set.000" / "force.npy", lambda f: np.multiply(f, force, out=f))
    [warning] = [
        line
        for line in check(systems).warnings
        if "do not fit the energies per element" in line
    ]
    assert f"of the others: {odd} (" in warning
    assert words in warning
    assert "RMS force " in warning
    [beside] = [
        line
        for line in check(systems[:-1], [odd]).warnings
        if "do not fit the energies per element" in line
    ]
    assert f"of the others: {odd} (" in beside


def test_energies_of_small_systems_are_not_compared_with_energies_per_atom(tmp_path):
    """A third of the energy is left where a molecule is broken."""
    systems = [write_system(tmp_path / str(k), seed=k, natoms=7) for k in range(3)]
    edit(systems[2] / "set.000" / "energy.npy", lambda e: np.multiply(e, 1 / 7, out=e))
    assert not [line for line in check(systems).warnings if "per atom" in line]


def test_of_many_systems_of_another_code_some_are_named(tmp_path):
    systems = [write_system(tmp_path / str(k), frames=4, seed=k) for k in range(9)]
    for path in systems[5:]:
        edit(path / "set.000" / "energy.npy", partial(shift, by=-600 * 12))
    [warning] = check(systems).warnings
    assert warning.startswith("the energies of 4 systems do not fit")
    assert f"{systems[5]} (" in warning
    assert (
        " and 1 more. Expected eV, and one code and method, in all systems." in warning
    )


def test_systems_of_large_forces_and_isolated_atoms_are_not_of_another_code(tmp_path):
    """Their energies are far above those of the others."""
    bulk = [write_system(tmp_path / str(k), frames=8, seed=k) for k in range(2)]
    near = write_system(tmp_path / "near", frames=8, seed=5)
    edit(near / "set.000" / "energy.npy", partial(shift, by=40 * 12))
    edit(near / "set.000" / "force.npy", lambda f: np.multiply(f, 500, out=f))
    atom = write_system(tmp_path / "atom", frames=4, natoms=1, pbc=False)
    edit(atom / "set.000" / "energy.npy", partial(shift, by=300))
    assert not [
        line
        for line in check([*bulk, near, atom]).warnings
        if "do not fit the energies" in line
    ]


@pytest.mark.parametrize(("factor", "is_named"), [(0.9, False), (1.1, True)])
@pytest.mark.parametrize("rms", [1e-3, 10.0])
def test_a_system_is_of_another_code_beyond_20_ev_and_its_forces_over_an_angstrom(
    tmp_path, rms, factor, is_named
):
    """Per atom, as doc/data.md says."""
    systems = [write_system(tmp_path / str(k), frames=8, seed=k) for k in range(3)]
    bound = 20 + rms
    file = systems[2] / "set.000" / "force.npy"
    edit(file, lambda force: force.__imul__(rms / np.sqrt((force**2).mean())))
    edit(systems[2] / "set.000" / "energy.npy", partial(shift, by=factor * bound * 12))
    warnings = check(systems).warnings
    assert (
        any("do not fit the energies per element" in text for text in warnings)
        == is_named
    )


def test_frames_of_three_are_judged_and_those_of_several_kinds_are_not(tmp_path):
    """Of 60 right frames 24 were "far from the others", and one frame with 2,000 eV/angstrom
    passed.
    """
    few = write_system(tmp_path / "few", frames=3, seed=1)
    edit(few / "set.000" / "energy.npy", lambda e: e.__setitem__(1, e[1] - 40))
    edit(
        few / "set.000" / "force.npy",
        lambda f: f.__setitem__(2, 2000 / np.abs(f[2]).max() * f[2]),
    )
    energy, force = check([few]).warnings
    assert f"{few} frame 1 (-3." in energy
    assert f"{few} frame 2 (2000 eV/angstrom)" in force
    kinds = write_system(tmp_path / "kinds", frames=60, seed=2)
    edit(
        kinds / "set.000" / "energy.npy",
        lambda e: e.__setitem__(slice(24), e[:24] + 30),
    )
    report = check([kinds])
    assert report.warnings == []
    [note] = report.notes
    assert note.endswith(f"are of another kind, none is named: {kinds} (24 of 60)")


def test_large_forces_of_atoms_near_each_other_are_no_outliers(tmp_path):
    """A rattled cell beside relaxed ones was accused."""
    for name, factor in (("rattled", 0.55), ("spike", 1.0)):
        path = write_system(tmp_path / name, frames=20, seed=1)
        edit(
            path / "set.000" / "force.npy", lambda f: f.__imul__(0.01 / np.abs(f).max())
        )
        edit(
            path / "set.000" / "force.npy",
            lambda f: f.__setitem__(4, f[4] * 40 / np.abs(f[4]).max()),
        )
        frame = open_data([str(path)], ELEMENTS, ["force"])[0].frame(4)
        i, _, vector, distance = find_pairs_once(frame.coord, frame.box, 4.0)
        pair = distance.argmin()
        frame.coord[i[pair]] += (1 - factor) * vector[pair]
        edit(path / "set.000" / "coord.npy", put(4, frame.coord.ravel()))
        large = [text for text in check([path]).warnings if "30 times" in text]
        assert len(large) == (name == "spike"), name
        assert all(
            f"{path} frame 4 (40 eV/angstrom). Has it converged?" in text
            for text in large
        )


@pytest.mark.parametrize(("factor", "is_named"), [(0.95, False), (1.05, True)])
@pytest.mark.parametrize("usual", [0.01, 1.0])
def test_large_forces_are_above_15_ev_per_angstrom_and_30_times_the_usual(
    tmp_path, usual, factor, is_named
):
    path = write_system(tmp_path / "w", frames=20, seed=1, jitter=1e-3)
    force = np.load(path / "set.000" / "force.npy")
    force[:] = usual * force[0] / np.abs(force[0]).max()
    force[4] *= factor * max(15.0, 30 * usual) / usual
    np.save(path / "set.000" / "force.npy", force)
    assert any("30 times" in text for text in check([path]).warnings) == is_named


def test_forces_that_are_zero_are_a_problem_unless_symmetry_explains_them(tmp_path):
    path = write_system(tmp_path / "w", frames=6, natoms=8, seed=1)
    edit(path / "set.000" / "force.npy", put(slice(None), 0.0))
    [problem] = check([path]).problems
    assert problem.startswith(
        f"{path}: all forces are zero, which the positions do not explain. Remove set.*/force"
    )
    crystal = write_system(
        tmp_path / "c",
        frames=6,
        natoms=8,
        seed=1,
        jitter=0.0,
        triclinic=False,
        elements=("O",),
    )
    edit(crystal / "set.000" / "force.npy", put(slice(None), 0.0))
    edit(
        crystal / "set.000" / "box.npy",
        lambda box: box.__imul__(np.linspace(0.9, 1.1, 6)[:, None]),
    )
    edit(
        crystal / "set.000" / "coord.npy",
        lambda coord: coord.__imul__(np.linspace(0.9, 1.1, 6)[:, None]),
    )
    assert check([crystal], type_map=["O"]).problems == []


def test_frames_without_forces_among_others_are_named_unless_symmetry_explains_them(
    tmp_path,
):
    path = write_system(tmp_path / "w", frames=6, natoms=8, seed=1)
    symmetric = write_system(
        tmp_path / "c", frames=1, natoms=8, jitter=0.0, triclinic=False, elements=("O",)
    )
    for name in ("coord", "box"):
        values = np.load(symmetric / "set.000" / f"{name}.npy")[0]
        edit(path / "set.000" / f"{name}.npy", put(4, values))
    np.savetxt(path / "type.raw", np.zeros(8), fmt="%d")
    edit(path / "set.000" / "force.npy", put([2, 4], 0.0))
    [warning] = [text for text in check([path]).warnings if "all zero" in text]
    assert warning == (
        "1 frame has forces that are all zero, which the positions do not explain: "
        f"{path} frame 2. Remove them, or compute them again."
    )


def test_forces_that_do_not_add_up_to_zero_are_a_warning(water):
    edit(water / "set.001" / "force.npy", lambda f: f.__setitem__((2, 0), f[2, 0] + 3))
    [warning] = check(["water"]).warnings
    assert warning.startswith(
        "the forces of 1 frame of 12 do not add up to zero (worst: 3 eV/angstrom in water frame "
        "6, RMS force "
    )
    assert "no model can learn this part" in warning


@pytest.mark.parametrize(("factor", "is_named"), [(0.8, False), (1.2, True)])
@pytest.mark.parametrize("rms", [1e-3, 10.0])
def test_net_forces_are_judged_by_their_size_and_by_the_rms_force(
    tmp_path, rms, factor, is_named
):
    """They are named above 0.1 eV/angstrom and sqrt(N) tenths of the RMS force, as doc/data.md
    says.
    """
    natoms = 12
    path = write_system(tmp_path / "w", frames=4, natoms=natoms, seed=1)
    bound = max(0.1, 0.1 * np.sqrt(natoms) * rms)
    file = path / "set.000" / "force.npy"
    edit(file, lambda force: force.__imul__(rms / np.sqrt((force**2).mean())))
    # on all atoms: the RMS force hardly changes
    edit(
        file,
        lambda force: force.reshape(4, natoms, 3)[2, :, 0].__iadd__(
            factor * bound / natoms
        ),
    )
    is_warned = any("do not add up to zero" in text for text in check([path]).warnings)
    assert is_warned == is_named


def test_forces_of_weight_zero_are_not_judged(tmp_path):
    """They may be unknown; a warning of net forces of 800 eV/angstrom was about them."""
    system = write_system(
        tmp_path / "s", frames=12, seed=1, jitter=0.02, atom_pref=True
    )
    pref = np.load(system / "set.000" / "atom_pref.npy")
    pref[:, 6:] = 0
    np.save(system / "set.000" / "atom_pref.npy", pref)
    edit(
        system / "set.000" / "force.npy",
        lambda f: f.reshape(12, 12, 3)[:, 6:].__iadd__(77.0),
    )
    assert check([system], labels=(*LABELS, "atom_pref")).warnings == []
    # without the weights all forces are learned
    assert [
        line for line in check([system]).warnings if "do not add up to zero" in line
    ]
    np.save(system / "set.000" / "atom_pref.npy", np.ones_like(pref))
    weighted = check([system], labels=(*LABELS, "atom_pref")).warnings
    assert [line for line in weighted if "do not add up to zero" in line]


def test_pressures_without_virials_and_in_one_cell_mean_nothing(tmp_path):
    """A model of such data had pressures of 55 to 75 GPa."""
    first, second = (
        write_system(tmp_path / name, frames=4, seed=k, virial=False)
        for k, name in enumerate("ab")
    )

    def notes(*systems, labels=LABELS):
        return [
            line for line in check(systems, labels=labels).notes if "pressures" in line
        ]

    [note] = notes(first, second)
    assert note.startswith(
        "no virials, and one cell in all training frames: pressures and stresses of the model mean"
    )
    assert notes(write_system(tmp_path / "v", frames=4)) == []
    assert (
        len(notes(tmp_path / "v", labels=("energy", "force"))) == 1
    )  # the loss does not read them
    assert notes(write_system(tmp_path / "open", frames=4, pbc=False)) == []
    assert (
        notes(
            first, write_system(tmp_path / "larger", frames=4, natoms=18, virial=False)
        )
        == []
    )
    edit(
        second / "set.000" / "box.npy",
        lambda box: box.__imul__(np.linspace(0.99, 1.01, 4)[:, None]),
    )
    assert notes(second) == []


def test_parameters_that_the_model_does_not_take_are_reported_once(tmp_path):
    """They were left out in silence."""
    path = write_system(tmp_path / "w", frames=8, fparam=2, aparam=1, sets=2)
    write_system(tmp_path / "v", frames=4, seed=5)
    names = [str(tmp_path / name) for name in "vw"]
    reported = [w for w in check(names).warnings if "is not read" in w]
    assert reported == [
        f"fparam in 1 of 2 systems (first: {path}) is not read: model.fitting_net.numb_fparam is "
        "0. Set it to the numbers per frame, or leave it if the model shall not depend on them.",
        f"aparam in 1 of 2 systems (first: {path}) is not read: model.fitting_net.numb_aparam is "
        "0. Set it to the numbers per atom, or leave it if the model shall not depend on them.",
    ]
    opened = open_data([str(path)], ELEMENTS, LABELS, numb_fparam=2, numb_aparam=1)
    report = check_systems(opened, [], ELEMENTS, SeE2AConfig(rcut=4.0), LABELS)
    assert not [w for w in report.warnings if "is not read" in w]


def test_a_label_that_is_the_same_in_all_frames_is_a_placeholder(water):
    for file in water.glob("set.*/virial.npy"):
        edit(file, put(slice(None), 1.0))
    assert check(["water"]).warnings == [
        "water: virial is 1 in all 12 frames, a placeholder. Remove set.*/virial.npy, or compute "
        "it again."
    ]


def test_training_frames_that_stand_twice_are_counted(water):
    for file in water.glob("set.*/*.npy"):
        edit(file, lambda a: a.__setitem__(3, a[1]))
    [warning] = check(["water"]).warnings
    assert (
        warning
        == "3 training frames are copies of another (first: water frame 3 is water frame 1)."
    )


def test_energies_in_single_precision_are_reported_with_their_steps(water):
    """Of 12 atoms of 8,000 eV: float32 has steps of 1/128 eV."""
    for file in water.glob("set.*/energy.npy"):
        edit(file, partial(shift, by=-96_000.0))
    for dtype in (np.float64, np.float32):
        for file in water.glob("set.*/energy.npy"):
            np.save(file, np.load(file).astype(dtype))
        reported = convert_data(["water"], np.dtype(dtype).name)
        texts = [
            [text for text in lines if "precision" in text]
            for lines in (check(["water"]).warnings, reported)
        ]
        if dtype == np.float64:
            assert texts == [[], []]
    text = (
        "energies of -96,060 eV are in single precision (float32), in which they have steps of "
        "0.65 meV/atom. Write them in float64 from the calculations, or subtract energies of "
        "the elements before they become float32."
    )
    assert texts == [[f"water: {text}"], [f"  warning: {text}"]]
    # what was converted is in double precision, and as coarse as before
    assert f"  warning: {text}" in convert_data(["float32"], "again")
    # energies of pseudopotentials, whose steps are small
    for file in water.glob("set.*/energy.npy"):
        np.save(file, (np.load(file) + 95_000).astype(np.float32))
    assert "precision" not in "".join(check(["water"]).warnings)
