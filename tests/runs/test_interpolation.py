"""Embedding nets as series in training and as tables in evaluation: errors, numbers of terms,
restarts, new weights.
"""

import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_same
from parallel_cases import config_of
from parallel_runs import train
from toy_models import TRICLINIC, batch_of, model_section, toy_atoms, toy_model
from training_runs import OPTIONS as OPTIONS
from training_runs import load

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.distributed.world import World
from deepmd_ema.infer.evaluate import measure
from deepmd_ema.infer.load import LoadedModel, Provenance
from deepmd_ema.infer.potential import Potential
from deepmd_ema.model.energy import EnergyModel
from deepmd_ema.model.interpolation.interpolation import Interpolation
from deepmd_ema.model.interpolation.series import MAX_ERROR, MIN_TERMS
from deepmd_ema.model.interpolation.tables import MARGIN
from deepmd_ema.model.model_set import ModelSet
from deepmd_ema.model.nn.layers import Network
from deepmd_ema.model.tabulated import interpolations_of, tabulate
from deepmd_ema.training.interpolation import InterpolationControl

pytestmark = pytest.mark.timeout(120)

CELL = np.diag([7.0, 7.5, 8.0])
ALWAYS = {"model__descriptor__interpolate": "always"}


def one_batch(model, natoms=40, seed=1):
    coord, types = toy_atoms(seed, natoms)
    return batch_of(model, (coord, types, CELL))


def controlled(
    descriptor="se_e2_a", activation="tanh", choice="auto", natoms=40, **changes
):
    """Return the interpolation of a model after a run has begun with it, its control and a
    batch.
    """
    changes |= {"interpolate": choice, "activation_function": activation}
    _, model = toy_model(descriptor, changes)
    batch = one_batch(model, natoms)
    control = InterpolationControl(
        ModelSet({"": model}), World(), {"": batch}, {}, interval=1
    )
    return model.descriptor.interpolation, control, batch


def test_auto_takes_series_where_there_are_many_pairs_and_the_nets_are_wide():
    wide = {"neuron": [50, 100, 200], "type_one_side": True}
    assert controlled(**wide)[0].terms >= MIN_TERMS
    assert controlled(**wide, natoms=3)[0].terms == 0
    assert controlled(neuron=[2, 4])[0].terms == 0
    assert controlled(**wide, choice="never")[0].terms == 0
    assert controlled(neuron=[2, 4], natoms=3, choice="always")[0].terms > 0


def test_a_series_that_is_too_short_for_a_batch_is_not_used_for_it():
    """The number of terms was chosen for another batch, and for other weights."""
    interpolation, control, batch = controlled(choice="always")
    model: EnergyModel = control.models.by_task[""]
    interpolation.use(MIN_TERMS)
    for factor in (1.0, 6.0, 20.0):
        with torch.no_grad():
            model.descriptor.embeddings[0].layers[0].weight *= factor
        forces = model(batch, create_graph=True)["force"].detach()
        interpolation.terms = 0
        direct = model(batch)["force"]
        assert (forces - direct).abs().max() < 3e-9 * direct.abs().max()
        interpolation.terms = MIN_TERMS


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("precision", [torch.float64, torch.float32])
def test_no_derivative_of_a_series_of_tanh_nets_is_off_by_more_than_is_accepted(
    seed, precision
):
    """Nets of many kinds over ranges of many lengths, beside their derivatives on a fine grid."""
    source = np.random.default_rng(seed)
    for _ in range(8):
        neuron = [[4, 8], [25, 50, 100], [10, 10, 20]][source.integers(3)]
        net = Network(
            [1, *neuron],
            "tanh",
            timestep=False,
            dtype=torch.float64,
            seed=int(source.integers(1 << 30)),
        )
        with torch.no_grad():
            for layer in net.layers:
                layer.weight *= float(10 ** source.uniform(-1, 0.7))
            # a narrow feature that is faint as well
            net.layers[0].weight[0, 0] *= float(10 ** source.uniform(0, 1.5))
            net.layers[1].weight[0] *= float(10 ** source.uniform(-6, 0))
        low = float(source.uniform(-3, 1))
        s = torch.linspace(
            low, low + float(10 ** source.uniform(-1, 1.2)), 3001, dtype=torch.float64
        )
        interpolation = Interpolation("always", precision)
        interpolation.use(int(source.choice([16, 32, 48, 96])))
        found = interpolation(
            torch.ones(len(s), 1, 1, dtype=torch.float64), s[:, None], net
        )
        expected = net.value_and_derivative(s[:, None])[1]
        assert (slopes_of(found) - expected).abs().max() <= MAX_ERROR[
            precision
        ] * expected.abs().max()


def slopes_of(found):
    """Return the derivatives of the channels of a sum over one neighbor of each atom with a weight
    of one.
    """
    rows = torch.eye(found.value.shape[-1], dtype=torch.float64)
    return torch.stack(
        [found.vjp(row.expand(len(found.value), 1, -1))[1][:, 0] for row in rows], 1
    )


def test_terms_are_added_when_a_net_gets_steeper_and_taken_away_when_it_is_smooth_again():
    interpolation, control, batch = controlled(choice="always")
    model: EnergyModel = control.models.by_task[""]
    first = interpolation.terms
    weight = model.descriptor.embeddings[0].layers[0].weight
    seen = []
    for factor in (6.0, 1 / 6.0):
        with torch.no_grad():
            weight *= factor
        for step in range(1, 11):  # fewer by a quarter at a time
            model(batch, create_graph=True)
            control.before_step(step)
        seen.append(interpolation.terms)
    assert first == seen[1] < seen[0]


def test_a_net_with_a_kink_is_evaluated_directly_with_a_warning(caplog):
    interpolation, control, _ = controlled(activation="relu", choice="always")
    assert interpolation.terms == 0
    assert "the network is not smooth" in caplog.text
    assert control.describe() == "evaluated for each pair of atoms"
    control.before_step(1000)
    assert interpolation.terms == 0


def test_a_run_on_knots_is_that_of_the_nets_and_a_restart_of_it_is_bitwise(
    start, monkeypatch, caplog
):
    monkeypatch.setattr(
        "deepmd_ema.training.trainer.InterpolationControl",
        partial(InterpolationControl, interval=7),
    )
    caplog.set_level(logging.DEBUG)
    direct = start("direct", 20, {"model__descriptor__interpolate": "never"})
    assert "embedding networks: evaluated for each pair of atoms" in caplog.text
    whole = start("whole", 20, ALWAYS)
    assert "terms of a Chebyshev series" in caplog.text
    weights = [load(folder / "model.ckpt-20.pt") for folder in (direct, whole)]
    for name, value in weights[0]["model"].items():
        torch.testing.assert_close(
            weights[1]["model"][name], value, rtol=1e-6, atol=1e-8
        )
    assert any(weights[1]["interpolation"]["terms"].values())
    assert all(weights[1]["interpolation"]["needed"].values())

    parts = start("parts", 20, ALWAYS)
    for name in ("model.ckpt-20.pt", "model_ema.ckpt-20.pt"):
        (parts / name).unlink()
    start("parts", 20, ALWAYS, restart="model.ckpt-10.pt")
    assert_same(weights[1], load(parts / "model.ckpt-20.pt"))
    assert_same(
        load(whole / "model_ema.ckpt-20.pt"), load(parts / "model_ema.ckpt-20.pt")
    )


def test_ranks_agree_on_the_knots_where_each_has_frames_of_its_own(
    tmp_path, water_like, water_like_valid
):
    config = config_of([water_like], water_like_valid, 3, 2, ALWAYS, num_steps=101)
    train(tmp_path, 2, config)
    saved = load(tmp_path / "model.ckpt-101.pt")["interpolation"]
    assert all(n > 0 for n in saved["terms"].values())


def test_a_validation_has_the_numbers_of_a_test_to_the_last_bit_though_weights_move_fast(
    start, water_like_valid
):
    """The terms were chosen for the first batch and weights, and neither an average nor a
    validation frame is it.
    """
    fast = {
        "learning_rate": {"type": "exp", "start_lr": 0.05, "stop_lr": 0.04},
        "validating__max_best_ckpt": 5,
    }
    folder = start("run", 20, ALWAYS | fast)
    for weights, suffix in (("live", ""), ("ema", "_ema")):
        for value, step in load(folder / "model.ckpt-20.pt")["best"][weights][
            "records"
        ]:
            (file,) = folder.glob(f"best{suffix}.ckpt-{step}.t-*.pt")
            report = measure(file, [water_like_valid])
            assert report.total.metric("E:MAE") == value


@pytest.mark.parametrize(
    ("old", "new"),
    [("spline", "always"), ("direct", "never"), (True, "always"), (False, "never")],
)
def test_former_names_of_the_option_and_of_its_state_in_checkpoints_are_read(old, new):
    known, old_name = (
        model_config_from_dict(model_section(descriptor_changes={"interpolate": one}))
        for one in (new, old)
    )
    assert old_name == known
    assert known.descriptor.interpolate == new
    _, control, batch = controlled(choice=new)
    saved = {"wanted": {"descriptor.spline": old}, "terms": {"descriptor.spline": 52}}
    state = InterpolationControl(
        control.models, World(), {"": batch}, saved
    ).state_dict()
    assert state["terms"] == {"descriptor": 0 if new == "never" else 52}


# ---- tables of models that are only evaluated

# of each kind of sum: per element, one for all, per element and centre, beside a net of elements,
# radial
WITH_TABLES = [
    "se_e2_a",
    "se_e2_r",
    "se_atten_interpolated",
    "se_atten_interpolated_one_side",
    "se_atten_interpolated_strip",
    "dpa2_interpolated",
]


@pytest.mark.parametrize("nearest", [0.7, 3.0])
@pytest.mark.parametrize("name", WITH_TABLES)
def test_energies_and_forces_from_tables_are_those_of_the_nets_also_of_pairs_nearer_than_they_reach(
    name, nearest
):
    _, model = toy_model(name)
    batch = one_batch(model.eval())
    for interpolation in interpolations_of(model).values():
        interpolation.choice = "always"
    direct = model(batch)
    model.min_nbor_dist = nearest
    assert tabulate(model)
    model(batch)  # makes the tables
    for key, value in model(batch).items():
        assert (value - direct[key]).abs().max() < 1e-11 * direct[key].abs().max(), key
    made = [
        series
        for interpolation in interpolations_of(model).values()
        for series in interpolation.tables.made
    ]
    assert made
    assert all(series.error <= MAX_ERROR[torch.float64] / MARGIN for series in made)


def potential_of(config, model):
    return Potential(
        LoadedModel(model.eval(), config, Provenance(Path("model"), "weights")),
        device="cpu",
    )


@pytest.mark.parametrize(
    ("nearest", "used"), [(None, 2), (2.5, 3)]
)  # a steep net needs a long table, of nearer pairs
def test_a_potential_reads_tables_where_there_are_many_pairs_with_the_numbers_of_its_nets(
    nearest, used
):
    found = {}
    few, many = (toy_atoms(1, natoms) for natoms in (3, 40))
    for choice in ("auto", "never"):
        changes = {
            "neuron": [25, 50, 100],
            "type_one_side": True,
            "interpolate": choice,
        }
        config, model = toy_model(descriptor_changes=changes)
        model.descriptor.embeddings[0].layers[0].weight.data *= 32
        model.min_nbor_dist = nearest
        potential, interpolation = (
            potential_of(config, model),
            model.descriptor.interpolation,
        )
        potential.evaluate(*few)
        assert interpolation.tables is None or not interpolation.tables.made
        found[choice] = potential.evaluate(*many, CELL)
        assert (
            interpolation.tables is not None and len(interpolation.tables.made) == used
        ) == (choice == "auto")
    for name, error in (("force", 1e-9), ("energy", 1e-11)):
        tables, nets = (getattr(found[choice], name) for choice in ("auto", "never"))
        assert np.abs(tables - nets).max() < error * np.abs(nets).max()


@pytest.mark.parametrize(
    "descriptor", ["se_e2_a", "se_e2_r", "se_atten_no_attention", "dpa2"]
)
def test_forces_are_those_of_the_weights_of_now(descriptor):
    """Also if they are changed in ways of which torch keeps no count."""
    frame = (*toy_atoms(0, 9), TRICLINIC)
    model = toy_model(descriptor, {"interpolate": "always"})
    potential = potential_of(*model)
    before = potential.evaluate(*frame).force
    weights = [
        p
        for n, p in model[1].named_parameters()
        if ".embedding" in n and n.endswith("weight")
    ]  # not of types
    for change in (
        lambda p: p.data.mul_(1.1),
        lambda p: np.multiply(p.detach().numpy(), 1.1, out=p.detach().numpy()),
    ):
        for weight in weights:
            change(weight)
        direct = toy_model(descriptor, {"interpolate": "never"})
        direct[1].load_state_dict(model[1].state_dict())
        known, found = (
            potential_of(*direct).evaluate(*frame).force,
            potential.evaluate(*frame).force,
        )
        assert np.abs(before - known).max() > 1e-2 * np.abs(known).max()
        np.testing.assert_allclose(
            found, known, rtol=0, atol=1e-8 * np.abs(known).max()
        )
        before = found
