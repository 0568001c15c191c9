"""Zone bridging: an analytic pair energy for close atoms, whose distances are clamped for the network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input
from packages import install
from test_data_run import with_close_atoms
from test_laws import GAP, close, slopes
from test_pt2 import TYPES, with_images
from test_train import StopAfter, load
from toy_models import (
    SECTIONS,
    TABLE,
    TRICLINIC,
    assert_parameter_gradients,
    batch_of,
    evaluate,
    model_section,
    numerical_forces,
    toy_atoms,
    toy_model,
    write_dp,
)

from deepmd_ema.config import config_from_dict, model_config_from_dict, to_dict
from deepmd_ema.config.labels import ATOM_ENERGY, ENERGY, VIRIAL
from deepmd_ema.config.schema.bridging import Window
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.data.run import check_task, open_run
from deepmd_ema.errors import CheckpointError, ConfigError, Interrupted
from deepmd_ema.infer.load import load_model
from deepmd_ema.model.bridging import ZblEnergies, clamped_distance, pair_switch, source_gate
from deepmd_ema.model.build import build_model
from deepmd_ema.model.energy import run
from deepmd_ema.model.extended_model import ExtendedModel
from deepmd_ema.training.run import run_training

PEER = json.loads((Path(__file__).parent / "golden" / "bridging.json").read_text())
WINDOW = Window(PEER["inner"], PEER["outer"])
WIDE = {"bridging_method": "zbl", "bridging_r_inner": 0.9, "bridging_r_outer": 2.2}  # the atoms of toys are in it
DIFFERENCES = 2e-7  # central differences of step 1e-4
SAME_MATH = 1e-13


@pytest.fixture(autouse=True)
def fake(tmp_path_factory, monkeypatch):
    """A descriptor that passes messages and can be bridged is installed for one test."""
    site = tmp_path_factory.mktemp("site")
    install(site, "fake-descriptor", {"fake": "fake_descriptor:FAMILY"})
    monkeypatch.syspath_prepend(site)
    monkeypatch.setitem(SECTIONS, "fake", {"type": "fake", **DESCRIPTORS["fake"].example})


def bridged(descriptor="fake", **changes):
    return toy_model(descriptor, None, {"precision": "float64"}, **{**WIDE, **changes})


both = pytest.mark.parametrize("descriptor", ["fake", "dpa4"])


def test_distances_weights_and_gates_are_those_of_deepmd_kit():
    distance = torch.tensor(PEER["distance"], dtype=torch.float64)
    value, slope = clamped_distance(distance, WINDOW)
    np.testing.assert_allclose(value, PEER["clamped"], rtol=SAME_MATH)
    np.testing.assert_allclose(slope, PEER["slope"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(pair_switch(distance, WINDOW), PEER["switch"], rtol=0, atol=SAME_MATH)
    gates = PEER["gate"]
    lengths = torch.full((3, 3), 8.0, dtype=torch.float64)
    slots = [(atom, gates["source"][:n].count(atom)) for n, atom in enumerate(gates["source"])]
    for (atom, slot), length in zip(slots, gates["length"], strict=True):
        lengths[atom, slot] = length
    found = source_gate(lengths, lengths < 8, WINDOW)
    np.testing.assert_allclose(found[torch.tensor(gates["source"])], gates["value"], rtol=SAME_MATH)
    assert found[0] == 0
    assert 0 < found[1] < found[2] == 1


def test_pair_energies_and_their_slopes_are_those_of_deepmd_kit():
    kinds = ["O", "H", "Na", "Au"]
    energies = ZblEnergies(kinds)
    _, model = toy_model("se_atten")
    batch = batch_of(model, ([[0.0, 0, 0], [1, 0, 0]], [0, 1], None))
    for i, one in enumerate(kinds):
        for j, other in enumerate(kinds):
            expected = PEER["pairs"][f"{one}-{other}"]
            for distance, energy, slope in zip(*expected.values(), strict=True):
                object.__setattr__(batch, "atom_type", torch.tensor([i, j]))
                found = energies(batch, torch.full(batch.neighbor.shape, distance, dtype=torch.float64), batch.occupied)
                here = batch.occupied[0].nonzero()[0, 0]
                assert float(found[0][0, here]) == pytest.approx(2 * energy, rel=1e-12)
                assert float(found[1][0, here]) == pytest.approx(2 * slope, rel=1e-12)


def test_the_clamped_distance_and_the_weight_have_three_continuous_derivatives():
    for function in (lambda r: clamped_distance(r, WINDOW)[0], lambda r: pair_switch(r, WINDOW)):
        for place in (WINDOW.inner, WINDOW.outer):
            ends = []
            for here in (place - GAP, place + GAP):
                leaf = torch.tensor(here, dtype=torch.float64, requires_grad=True)
                values = [function(leaf)]
                for _ in range(3):
                    values += torch.autograd.grad(values[-1], leaf, create_graph=True)
                ends.append(torch.stack([value.detach() for value in values]))
            np.testing.assert_allclose(*ends, rtol=0, atol=1)  # a jump would be at least 1e2


@both
def test_forces_are_the_derivative_of_the_energy(descriptor):
    _, model = bridged(descriptor, atom_exclude_types=[2])
    coord, types = toy_atoms(0, 6)
    found = evaluate(model, (coord, types, TRICLINIC))["force"]
    without = toy_model(descriptor, None, {"precision": "float64"}, atom_exclude_types=[2])[1]
    assert np.abs(found - evaluate(without, (coord, types, TRICLINIC))["force"]).max() > 0.1
    numerical = numerical_forces(model, coord, types)
    assert np.abs(found - numerical).max() < DIFFERENCES * max(1, np.abs(found).max())


@both
def test_the_virial_is_minus_the_derivative_of_the_energy_by_strain(descriptor):
    _, model = bridged(descriptor)
    coord, types = toy_atoms(0, 6)
    found = evaluate(model, (coord, types, TRICLINIC))["virial"].reshape(3, 3)
    for place in np.ndindex(3, 3):
        strain = np.zeros((3, 3))
        strain[place] = 2e-5
        frames = [(coord @ (np.eye(3) + s), types, TRICLINIC @ (np.eye(3) + s)) for s in (strain, -strain)]
        assert abs(found[place] + slopes(model, frames)[0]) < 1e-6 * max(1, np.abs(found).max())


@both
def test_gradients_of_the_parameters_are_right(descriptor):
    _, model = bridged(descriptor)
    model.train()
    batch = batch_of(model, (*toy_atoms(0, 7), TRICLINIC))
    assert_parameter_gradients(model, lambda: sum(value.square().sum() for value in model(batch).values()))


@both
def test_the_hessian_is_minus_the_derivative_of_the_forces(descriptor):
    _, model = bridged(descriptor)
    coord, types = toy_atoms(0, 4)
    moves = 2e-5 * np.concatenate([np.eye(12), -np.eye(12)]).reshape(24, 4, 3)
    up, down = evaluate(model, *((coord + move, types, None) for move in moves))["force"].reshape(2, 12, 12)
    found = model(batch_of(model, (coord, types, None)), need_hessian=True)["hessian"].view(12, 12).numpy()
    close(found, (down - up) / 4e-5, 1e-6)


def test_two_close_atoms_have_their_pair_energy_and_what_the_network_gives_each_alone():
    _, model = bridged()
    _, network = toy_model("fake")
    alone = evaluate(network, ([[0.0, 0, 0]], [0], None), ([[0.0, 0, 0]], [1], None))[ENERGY].sum()
    expected = PEER["pairs"]["O-H"]
    place = expected["distance"].index(0.5)
    found = evaluate(model, ([[0.0, 0, 0], [0.3, 0.4, 0]], [0, 1], None))[ENERGY]
    np.testing.assert_allclose(found, alone + 2 * expected["half energy"][place], rtol=1e-12)


@pytest.mark.parametrize("distance", [0.5, 1.2])
def test_other_atoms_see_where_two_atoms_turn_only_if_these_are_not_close(distance):
    _, model = bridged()
    of_network = []
    for angle in (0.0, 0.7):
        pair = [[0.0, 0, 0], [distance * np.cos(angle), distance * np.sin(angle), 0]]
        batch = batch_of(model, ([*pair, [0, 0, 3.0], [0, 3.0, 0]], [0, 1, 2, 0], None))
        lengths = torch.linalg.vector_norm(batch.vector, dim=-1)
        repulsion = 0.5 * model.short_range.pairs(batch, lengths, lengths < 4)[0].sum(1)
        of_network.append(batch.in_file_order(model(batch)[ATOM_ENERGY] - repulsion)[2:])
    assert torch.allclose(*of_network, rtol=1e-12) == (distance < 0.9)


def test_far_from_each_other_atoms_have_the_network_and_the_pair_energy_as_they_are():
    _, model = bridged()
    _, network = toy_model("fake")
    far = ([[0.0, 0, 0], [2.5, 0, 0]], [0, 1], None)
    pairs = ZblEnergies(["O", "H", "Na"])
    batch = batch_of(model, far)
    distance = torch.linalg.vector_norm(batch.vector, dim=-1)
    added = 0.5 * float(pairs(batch, distance, distance < 4)[0].sum())
    np.testing.assert_allclose(evaluate(model, far)[ENERGY] - added, evaluate(network, far)[ENERGY], rtol=1e-14)


def test_excluded_atoms_have_no_pair_energy():
    near = ([[0.0, 0, 0], [0.5, 0, 0]], [0, 1], None)
    _, model = bridged(atom_exclude_types=[1])
    assert abs(evaluate(model, near)[ENERGY][0]) < 20
    _, model = bridged(pair_exclude_types=[[0, 1]])
    assert abs(evaluate(model, near)[ENERGY][0]) < 20


@both
def test_a_frame_has_the_same_energy_in_any_batch(descriptor):
    _, model = bridged(descriptor)
    small, large = ([[0.0, 0, 0], [1.0, 0, 0]], [0, 1], None), (*toy_atoms(0, 11), TRICLINIC)
    alone = [evaluate(model, atoms) for atoms in (small, large)]
    together = evaluate(model, small, large)
    for name in (ENERGY, ATOM_ENERGY, "force"):
        joined = np.concatenate([found[name] for found in alone])
        np.testing.assert_allclose(together[name], joined, rtol=0, atol=1e-11 * np.abs(joined).max())


@both
def test_atoms_without_neighbors_are_finite(descriptor):
    _, model = bridged(descriptor)
    alone = evaluate(model, ([[0.0, 0, 0]], [1], None))
    assert np.isfinite(alone["energy"]).all()
    assert not alone["force"].any()


@both
def test_a_frame_with_images_is_the_same_model(descriptor):
    _, model = bridged(descriptor)
    coord, _ = toy_atoms(0, len(TYPES))
    known = evaluate(model, (coord, TYPES, TRICLINIC))
    found = ExtendedModel(model)(*with_images(coord, TYPES, TRICLINIC, model.layout.rcut + 0.5, 0))
    np.testing.assert_allclose(found["energy_redu"][0], known[ENERGY], rtol=1e-12)
    np.testing.assert_allclose(found["energy_derv_c_redu"][0, 0], known[VIRIAL][0], rtol=0, atol=1e-10)


def test_a_restart_continues_to_the_last_bit_and_a_checkpoint_holds_the_window(tmp_path, monkeypatch, water_like):
    options = {"model__descriptor": SECTIONS["fake"], **{f"model__{name}": value for name, value in WIDE.items()}}
    values = tiny_input([water_like], num_steps=4, **options)
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "input.json").write_text(json.dumps(values))
    monkeypatch.chdir(tmp_path / "whole")
    run_training("input.json", device="cpu")
    monkeypatch.chdir(tmp_path / "parts")
    with pytest.raises(Interrupted):
        run_training("input.json", device="cpu", callback=StopAfter(2))
    run_training("input.json", device="cpu", restart="model.ckpt.pt")
    assert_same(*(load(tmp_path / name / "model.ckpt-4.pt") for name in ("whole", "parts")))
    assert load_model("model.ckpt-4.pt").model.short_range.window == Window(0.9, 2.2)


@pytest.mark.parametrize("method", ["zbl", "ZBL", "none", "None", "", None])
def test_the_method_may_be_in_capitals_and_none_is_none(method):
    config = model_config_from_dict(model_section("fake", **{**WIDE, "bridging_method": method}))
    assert (config.bridging is not None) == (method in ("zbl", "ZBL"))
    assert model_config_from_dict(to_dict(config)) == config
    assert (build_model(config).short_range is not None) == (config.bridging is not None)


def test_the_summary_names_the_window():
    config, _ = bridged()
    assert ("short range", "zbl, distances clamped from 0.9 to 2.2 angstrom") in config.summary()


@pytest.mark.parametrize(("descriptor", "changes", "phrase"), [
    ("fake", {"bridging_method": "lj"}, 'bridging_method = "lj": expected "zbl", or "none".'),
    ("fake", {"bridging_r_outer": 0.9}, "bridging_r_outer = 0.9: expected more than bridging_r_inner = 0.9"),
    ("fake", {"bridging_r_outer": 5}, "at most rcut = 4 (angstrom)"),
    ("fake", {"type_map": ["O", "H", "X"]}, 'type_map = ["O", "H", "X"]: X is no element, whose charge zbl needs.'),
    ("se_e2_a", {}, 'model.bridging_method = "zbl": the descriptor se_e2_a does not have it, nor in DeePMD-kit.'),
    ("fake", TABLE, "model.use_srtab: bridging_method is given too, and both act at short distances."),
])  # fmt: skip
def test_what_does_not_fit_is_refused(descriptor, changes, phrase):
    with pytest.raises(ConfigError) as refused:
        model_config_from_dict(model_section(descriptor, **{**WIDE, **changes}))
    assert phrase in str(refused.value)


def report_of(system, **options):
    config = config_from_dict(tiny_input([system], model__descriptor=SECTIONS["fake"], **options))
    task = config.tasks[""]
    return check_task(task, open_run(config)[""])


def test_close_atoms_are_a_warning_in_data_of_a_bridged_model_and_a_problem_in_others(tmp_path):
    close = with_close_atoms(tmp_path / "close", [1, 4], 0.2)
    assert len(report_of(close).problems) == 2
    found = report_of(close, model__bridging_method="zbl")
    assert found.problems == []
    text = f"atoms are 0.200 angstrom apart ({close} frame 1), nearer than bridging_r_inner = 0.5"
    assert [line for line in found.warnings if line.startswith(text)]
    options = {"model__bridging_method": "zbl", "training__training_data__min_pair_dist": 0.5}
    found = report_of(close, **options)
    assert not [line for line in found.warnings if "bridging" in line]
    note = f"{close}: leaves out 2 of 6 frames: two atoms are closer than min_pair_dist = 0.5 angstrom"
    assert note in found.notes
    same_place = with_close_atoms(tmp_path / "same", [2], 0.001)
    assert len(report_of(same_place, model__bridging_method="zbl").problems) == 1


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_it_compiles_without_a_break():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    _, model = bridged()
    batch = batch_of(model.train(), (*toy_atoms(0, 7), TRICLINIC))
    compiled = torch.compile(run, dynamic=True, backend="aot_eager")(model, batch)
    for name, value in run(model, batch).items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-12, atol=1e-12)
    assert sum(counters["graph_break"].values()) == 0
    torch._dynamo.reset()


def test_a_standard_model_is_not_written_to_a_tree_that_would_lose_it(tmp_path):
    config, model = bridged()
    with pytest.raises(CheckpointError, match="no tree of DeePMD-kit has bridging_method in a model of type standard"):
        write_dp(tmp_path / "a.dp", model, config)
