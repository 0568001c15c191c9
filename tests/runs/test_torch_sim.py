"""The model for torch-sim: its own checks, the results of single systems, relaxations and dynamics
of several.
"""

import importlib
import sys

import numpy as np
import pytest
import torch
from helpers import toy_frame
from infer_models import potential as potential
from infer_models import run as run
from infer_models import write_run

from deepmd_ema.data.loader import ATOMS_AT_ONCE
from deepmd_ema.errors import UserError
from deepmd_ema.geometry import KeptPairs
from deepmd_ema.infer import potential as potentials

ts = pytest.importorskip("torch_sim")
ase = pytest.importorskip("ase")
interface = pytest.importorskip("torch_sim.models.interface")
DPModel = pytest.importorskip("deepmd_ema.torch_sim").DPModel


def atoms_of(natoms, seed, pbc=True, elements="OH"):
    coord, types, box = toy_frame(np.random.default_rng(seed), natoms)
    atoms = ase.Atoms([elements[t] for t in types], coord, cell=box, pbc=pbc)
    if not pbc:
        atoms.center(vacuum=5.0)
        atoms.pbc = False
    return atoms


def state_of(systems, dtype=torch.float64):
    return ts.io.atoms_to_state(systems, torch.device("cpu"), dtype)


@pytest.mark.parametrize("skin", [0.0, 1.0])
def test_it_fulfils_the_interface_of_torch_sim(tmp_path, skin):
    elements = ["Si", "Fe", "Mg", "C", "H"]  # of the systems of the check
    run = write_run(
        tmp_path, model__type_map=elements, model__descriptor__sel=[24] * len(elements)
    )
    model = DPModel(run[0], device="cpu", skin=skin)
    interface.validate_model_outputs(model, model.device, model.dtype)


@pytest.mark.parametrize("pbc", [True, False])
@pytest.mark.parametrize("skin", [0.0, 1.0])
@pytest.mark.parametrize("at_once", [16, 1024])
def test_systems_of_any_sizes_have_the_results_that_they_have_alone(
    potential, monkeypatch, pbc, skin, at_once
):
    """Also where the atoms move, systems leave the state or change their places, and batches are
    small.
    """
    monkeypatch.setitem(ATOMS_AT_ONCE, "cpu", at_once)
    monkeypatch.setattr(potentials, "MAX_ATOMS_SHARING", 20)
    model = DPModel(potential, skin=skin)
    systems = [atoms_of(natoms, natoms, pbc) for natoms in (12, 5, 30, 1, 12)]
    rng = np.random.default_rng(0)
    for step in range(8):
        if step == 3:
            del systems[1]
        if step == 5:
            systems.reverse()
        for atoms in systems:
            atoms.positions += rng.uniform(-0.1, 0.1, atoms.positions.shape)
        found = model(state_of(systems))
        known = [
            potential.evaluate(
                a.positions, a.get_chemical_symbols(), a.cell.array if pbc else None
            )
            for a in systems
        ]
        np.testing.assert_allclose(
            found["energy"], [one.energy[0] for one in known], rtol=1e-12
        )
        np.testing.assert_allclose(
            found["forces"], np.concatenate([one.force[0] for one in known]), atol=1e-11
        )
        stress = [
            -one.virial.reshape(3, 3) / a.get_volume() * pbc
            for one, a in zip(known, systems)
        ]
        np.testing.assert_allclose(found["stress"], stress, atol=1e-12)


def test_what_it_cannot_evaluate_is_one_message(potential, tmp_path):
    model = DPModel(potential)
    with pytest.raises(
        UserError, match=r"^Fe: is not an element of the model, which has O H\.$"
    ):
        model(state_of([atoms_of(5, 0, elements=["O", "Fe"])]))
    state = state_of([atoms_of(5, 0)])
    state.pbc = torch.tensor([True, True, False])
    with pytest.raises(
        UserError,
        match=r"^pbc: periodic in some directions only. Expected all of them, or none\.$",
    ):
        model(state)
    near = [atoms_of(5, 0), atoms_of(5, 1)]
    near[1].positions[3] = near[1].positions[0]
    with pytest.raises(
        UserError, match=r"frame 1 \(from 0\): atoms (0|3) .* 0 angstrom apart"
    ):
        model(state_of(near))
    with pytest.raises(
        UserError, match="kept: pairs of 1 systems, expected those of 2 or more"
    ):
        potential.evaluate_systems([([[0.0, 0, 0]], ["O"], None)] * 2, [KeptPairs(1.0)])
    with pytest.raises(UserError, match="skin = -1: expected a length in angstrom"):
        DPModel(potential, skin=-1)
    path = write_run(tmp_path, model__fitting_net__numb_aparam=1)[0]
    with pytest.raises(
        UserError,
        match=r"the model takes aparam \(1 numbers\), which torch-sim does not have",
    ):
        DPModel(path)


def test_without_torch_sim_the_import_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_sim", None)
    monkeypatch.delitem(sys.modules, "deepmd_ema.torch_sim")
    with pytest.raises(
        ModuleNotFoundError,
        match=r"deepmd_ema.torch_sim needs torch-sim: pip install 'dp-ema\[torch-",
    ):
        importlib.import_module("deepmd_ema.torch_sim")
