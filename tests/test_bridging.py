"""Zone bridging: an analytic pair energy for close atoms, whose distances are clamped for the network."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input
from packages import install
from test_data_run import with_close_atoms
from test_train import StopAfter, load
from toy_models import (
    SECTIONS,
    TABLE,
    batch_of,
    evaluate,
    model_section,
    toy_model,
    write_dp,
)

from deepmd_ema.config import config_from_dict, model_config_from_dict, to_dict
from deepmd_ema.config.labels import ATOM_ENERGY, ENERGY
from deepmd_ema.config.schema.bridging import Window
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.data.run import check_task, open_run
from deepmd_ema.errors import CheckpointError, ConfigError, Interrupted
from deepmd_ema.infer.load import load_model
from deepmd_ema.model.bridging import ZblEnergies, clamped_distance, pair_switch, source_gate
from deepmd_ema.model.build import build_model
from deepmd_ema.training.run import run_training

PEER = json.loads((Path(__file__).parent / "golden" / "bridging.json").read_text())
WINDOW = Window(PEER["inner"], PEER["outer"])
WIDE = {"bridging_method": "zbl", "bridging_r_inner": 0.9, "bridging_r_outer": 2.2}  # the atoms of toys are in it
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


def test_excluded_atoms_have_no_pair_energy():
    near = ([[0.0, 0, 0], [0.5, 0, 0]], [0, 1], None)
    _, model = bridged(atom_exclude_types=[1])
    assert abs(evaluate(model, near)[ENERGY][0]) < 20
    _, model = bridged(pair_exclude_types=[[0, 1]])
    assert abs(evaluate(model, near)[ENERGY][0]) < 20


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


def test_a_standard_model_is_not_written_to_a_tree_that_would_lose_it(tmp_path):
    config, model = bridged()
    with pytest.raises(CheckpointError, match="no tree of DeePMD-kit has bridging_method in a model of type standard"):
        write_dp(tmp_path / "a.dp", model, config)
