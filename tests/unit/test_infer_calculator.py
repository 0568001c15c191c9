"""The ASE calculator against central differences and the Python interface."""

import re

import numpy as np
import pytest
from helpers import toy_frame
from infer_models import potential as potential
from infer_models import run as run
from infer_models import write_run

from deepmd_ema.errors import UserError

ase = pytest.importorskip("ase")
numerical = pytest.importorskip("ase.calculators.fd")
DP = pytest.importorskip("deepmd_ema.calculator").DP
NATOMS = 12


@pytest.fixture
def atoms(potential):
    coord, types, box = toy_frame(np.random.default_rng(5), NATOMS)
    return ase.Atoms(
        ["OH"[t] for t in types], coord, cell=box, pbc=True, calculator=DP(potential)
    )


def test_results_are_those_of_the_python_interface(atoms, potential):
    found = potential.evaluate(
        atoms.positions, atoms.get_chemical_symbols(), atoms.cell.array
    )
    assert atoms.get_potential_energy() == found.energy[0]
    assert atoms.get_potential_energy(force_consistent=True) == found.energy[0]
    np.testing.assert_array_equal(atoms.get_forces(), found.force[0])
    np.testing.assert_array_equal(atoms.get_potential_energies(), found.atom_energy[0])
    stress = -found.virial[0].reshape(3, 3) / atoms.get_volume()
    np.testing.assert_allclose(atoms.get_stress(voigt=False), stress, atol=1e-12)


def test_forces_and_stress_are_derivatives(atoms):
    np.testing.assert_allclose(
        atoms.get_forces(),
        numerical.calculate_numerical_forces(atoms, eps=1e-4),
        atol=1e-6,
    )
    np.testing.assert_allclose(
        atoms.get_stress(),
        numerical.calculate_numerical_stress(atoms, eps=1e-5),
        atol=1e-7,
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda atoms: atoms.positions.__setitem__((3, 1), atoms.positions[3, 1] + 0.1),
        lambda atoms: atoms.set_chemical_symbols(atoms.get_chemical_symbols()[::-1]),
        lambda atoms: atoms.set_cell(atoms.cell * 1.01),
        lambda atoms: atoms.set_pbc(False),
    ],
)
def test_every_change_that_ase_sees_is_seen(atoms, potential, change):
    atoms.get_forces()
    change(atoms)
    fresh = atoms.copy()
    fresh.calc = DP(potential)
    np.testing.assert_allclose(atoms.get_forces(), fresh.get_forces(), atol=1e-12)


def test_an_open_system_has_no_stress_and_other_atoms_are_refused(atoms, potential):
    atoms.pbc = False
    found = potential.evaluate(atoms.positions, atoms.get_chemical_symbols())
    assert atoms.get_potential_energy() == found.energy[0]
    with pytest.raises(NotImplementedError, match="stress"):
        atoms.get_stress()
    atoms.pbc = (True, True, False)
    with pytest.raises(
        UserError,
        match=r"periodic in some directions only.*vacuum of more than 4 angstrom",
    ):
        atoms.get_potential_energy()
    with pytest.raises(UserError, match=r"skin = .*expected a length in angstrom"):
        DP(potential, skin=float("nan"))
    atoms.symbols[0] = "Na"
    with pytest.raises(
        UserError, match=r"the element Na of the atoms is not in the model. Known: O, H"
    ):
        atoms.get_potential_energy()


def test_parameters_are_taken_from_info(tmp_path, atoms):
    """`atoms.info["fparam"]`, which DeePMD-kit's calculator reads, was ignored."""
    path, _ = write_run(
        tmp_path, model__fitting_net__numb_fparam=1, model__fitting_net__numb_aparam=2
    )
    aparam = np.linspace(0, 1, 2 * NATOMS).reshape(NATOMS, 2)

    def energy_at(value):
        frame = atoms.positions, atoms.get_chemical_symbols(), atoms.cell.array
        parameters = {"fparam": [value], "aparam": aparam}
        return atoms.calc.potential.evaluate(*frame, **parameters).energy[0]

    atoms.calc = DP(path, fparam=[0.3], aparam=aparam)
    first = atoms.get_potential_energy()
    atoms.calc = DP(atoms.calc.potential)
    with pytest.raises(
        UserError,
        match=r'needs 1 number per frame. Set atoms.info\["fparam"\], or give',
    ):
        atoms.get_potential_energy()
    with pytest.raises(
        UserError, match=r"heads: models take no such parameter\. Known: fparam, aparam"
    ):
        DP(atoms.calc.potential, heads="water")
    atoms.info |= {"fparam": [0.3], "aparam": aparam}
    assert atoms.get_potential_energy() == first
    atoms.info["fparam"] = [
        0.6
    ]  # ASE does not look at `info` to see whether something has changed
    assert abs(atoms.get_potential_energy() - first) > 1e-6
    atoms.calc.set(fparam=[0.3])
    assert atoms.get_potential_energy() == first
    # an array that the caller changes in place, in both ways of giving it
    values = np.array([0.3])
    for changed, give in ((0.6, atoms.calc.set), (0.9, atoms.calc.set)):
        values[0] = changed
        give(fparam=values)
        assert atoms.get_potential_energy() == energy_at(changed)
    atoms.calc = DP(atoms.calc.potential, fparam=values, aparam=aparam)
    values[0] = 0.3
    assert atoms.get_potential_energy() == energy_at(0.9)


def test_what_the_model_was_not_trained_for_is_said_once(tmp_path, atoms, caplog):
    path, _ = write_run(tmp_path, model__descriptor__sel=[1, 24])
    atoms.calc = DP(path, device="cpu")
    atoms.get_potential_energy()
    (text,) = [r.getMessage() for r in caplog.records]
    assert re.match(
        r"an atom has up to \[\d+, \d+\] neighbors within 4 angstrom, and the model keeps \[1, "
        r"24\]",
        text,
    )
    atoms.positions[1] = atoms.positions[0] + [0.5, 0, 0]
    atoms.get_potential_energy()
    (_, text) = [r.getMessage() for r in caplog.records]
    assert text.startswith(
        "two atoms are 0.500 angstrom apart, and the nearest pair of the training data 0.900"
    )
    atoms.rattle(0.01, seed=1)
    atoms.get_potential_energy()
    assert len(caplog.records) == 2


def test_an_atom_that_has_left_the_others_is_reported_once(tmp_path, caplog):
    path, _ = write_run(tmp_path)
    atoms = ase.Atoms("OH2", [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 3.9, 0.0]])
    atoms.calc = DP(path, device="cpu")
    atoms.get_potential_energy()
    assert not caplog.records
    for distance in (4.1, 5.0):  # beyond the cutoff of 4, within the skin first
        atoms.positions[2, 1] = distance
        assert not atoms.get_forces()[2].any()
    (text,) = [r.getMessage() for r in caplog.records]
    assert text.startswith("atom 2 (H) has no neighbor within 4 angstrom")
    caplog.clear()
    ase.Atoms(
        "H", calculator=DP(path, device="cpu")
    ).get_potential_energy()  # meant to be alone
    assert not caplog.records
