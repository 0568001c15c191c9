"""dpa2: its options, each with the laws; parts of different cutoffs; numbers of neighbors; statistics by part."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import tiny_input
from toy_models import (
    REPFORMER,
    REPINIT,
    TRICLINIC,
    batch_of,
    evaluate,
    model_from_tree,
    model_section,
    toy_atoms,
    toy_model,
)

from deepmd_ema.config import config_from_dict, model_config_from_dict
from deepmd_ema.config.remarks import ignored_options
from deepmd_ema.data.collate import collate, pair_frame
from deepmd_ema.data.source import Frame
from deepmd_ema.errors import ConfigError
from deepmd_ema.interop.dp import config_from_tree, model_tree
from deepmd_ema.model.families.dpa2.layers import RepformerLayer
from deepmd_ema.model.ops.operations import REFERENCE, with_operations

ROUGH, ROUGH_ATTENTION = {"smooth": False}, {"smooth_type_embedding": False, "tebd_input_mode": "strip"}
TERMS = ("conv", "drrd", "grrg", "attn")
SUMS_ONLY = {f"update_{what}": False for what in ("g1_has_attn", "g2_has_attn", "g2_has_g1g1", "h2")}  # has a kernel
# changes of the small section
OPTIONS = {
    "two_bodies": {"use_three_body": False},
    "averaged": {"update_style": "res_avg"},
    "increments": {"update_style": "res_incr", "update_h2": False},
    "constant_residuals": {"update_residual_init": "const"},
    "strip": {"tebd_input_mode": "strip", "type_one_side": True},
    "distances": {"direct_dist": True, "attn2_has_gate": False},
    "all_in_one_layer": {"g1_out_conv": False, "g1_out_mlp": False, "use_sqrt_nnei": False},
    "rough": ROUGH,
    "rough_in_one_layer": {**ROUGH, "g1_out_conv": False, "g1_out_mlp": False, "use_sqrt_nnei": False},
    "one_layer": {"nlayers": 1},
    "vectors_only": {"update_g2_has_attn": False, "update_g2_has_g1g1": False},
    "attention_only": {**{f"update_g1_has_{term}": term == "attn" for term in TERMS}, "g1_out_mlp": False},
    "moments_only": {f"update_g1_has_{term}": term in ("drrd", "grrg") for term in TERMS},
    "no_transform": {"g1_dim": 64, "use_three_body": False, "add_tebd_to_repinit_out": False},
    "own_features_only": {"concat_output_tebd": False, "use_tebd_bias": True},
    "sums_only": SUMS_ONLY,
    "sums_only_averaged": {**SUMS_ONLY, **ROUGH, "update_style": "res_avg", "direct_dist": True},
    "excluded": {"exclude_types": [[0, 1]], "env_protection": 0.05},
}
every_option = pytest.mark.parametrize("option", sorted(OPTIONS))


def frame(natoms=7):
    coord, types = toy_atoms(0, natoms)
    return coord, types, TRICLINIC


@every_option
def test_forces_are_the_derivative_of_the_energy_with_every_option(option):
    _, model = toy_model("dpa2", OPTIONS[option])
    coord, types, box = frame()
    direction = np.random.default_rng(3).normal(size=coord.shape)
    ends = evaluate(model, *((coord + step * direction, types, box) for step in (1e-5, -1e-5)))["energy"]
    force = evaluate(model, (coord, types, box))["force"]
    assert -(ends[0] - ends[1]) / 2e-5 == pytest.approx((force * direction).sum(), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "changes"), [
    ("dpa2", {}), ("dpa2", ROUGH), ("dpa2", {"use_three_body": False, "add_tebd_to_repinit_out": False, "g1_dim": 64}),
    ("dpa2", {"exclude_types": [[0, 1]], "type_one_side": True, "env_protection": 0.05}),
    ("dpa2", {"update_style": "res_avg", "nlayers": 1, **ROUGH}), ("dpa2", {"update_style": "res_incr", "nlayers": 2}),
    ("dpa2", {"direct_dist": True, "tebd_input_mode": "strip"}), ("se_atten", {}), ("se_atten", ROUGH_ATTENTION),
    ("se_atten", {"attn_layer": 0}), ("se_atten", {"attn_layer": 0, "exclude_types": [[0, 1]], "type_one_side": True}),
    ("se_e3_tebd", {}), ("se_e3_tebd", {"exclude_types": [[0, 1]]}),
])  # fmt: skip
def test_the_written_out_gradient_is_that_of_torch_func(kind, changes, monkeypatch):
    """Energies, forces, virials and parameter gradients of all of them."""
    changes = (SUMS_ONLY if kind == "dpa2" else {}) | changes
    _, model = toy_model(kind, changes | ({} if kind == "se_e3_tebd" else {"interpolate": "always"}))
    alone = np.zeros((1, 3)), [1], None
    batch, results = batch_of(model.train(), frame(), frame(6), alone), []
    for is_written_out in (True, False):
        if not is_written_out:
            model = with_operations(model, REFERENCE)
            monkeypatch.setattr(RepformerLayer, "is_written_out", False)
        out = model(batch)
        loss = out["energy"].sum() + out["force"].square().sum() + out["virial"].sin().sum()
        results.append([*out.values(), *torch.autograd.grad(loss, list(model.parameters()))])
    for written_out, by_torch in zip(*results, strict=True):
        torch.testing.assert_close(written_out, by_torch, rtol=1e-10, atol=1e-11)


@every_option
def test_every_option_comes_back_from_its_tree_and_trains_every_parameter(option):
    config, model = toy_model("dpa2", OPTIONS[option])
    tree = model_tree(model, config)
    again = model_from_tree(config_from_tree({"model": tree}), tree)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))
    model.train()
    out = model(batch_of(model, frame()))
    (out["energy"].sum() + out["force"].square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name


@every_option
def test_the_slots_of_a_batch_do_not_matter_with_every_option(option):
    _, model = toy_model("dpa2", OPTIONS[option])
    coord, types, _ = frame()
    one = Frame(coord, types.astype(np.int64), None)
    few = collate([one], model.layout)
    many = collate([pair_frame(one, model.layout, round_to=60)], model.layout)
    assert few.slots < many.slots
    for name, value in model(few).items():
        torch.testing.assert_close(model(many)[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cutoff", [REPFORMER["rcut"], REPINIT["three_body_rcut"]])
@pytest.mark.parametrize("rough", [False, True])
def test_energy_and_forces_continue_smoothly_at_the_cutoffs_of_the_parts(cutoff, rough):
    """``smooth: false`` makes the energy jump where messages begin, as its manual text says."""
    _, model = toy_model("dpa2", {**ROUGH, "tebd_input_mode": "strip"} if rough else {})
    gap = 1e-4
    coords = [[[0, 0, 0], [0, 1.1, 0], [cutoff + step, 0, 0]] for step in (-gap, gap)]
    near, far = (evaluate(model, (coord, [0, 1, 2], None)) for coord in coords)
    if rough and cutoff == REPFORMER["rcut"]:
        assert abs(near["energy"] - far["energy"]).max() > 1e-4
    elif not rough:
        slope = (near["force"] + far["force"])[2, 0] / 2
        assert abs(near["energy"] - far["energy"] - 2 * gap * slope).max() < 1e-9
        assert abs(near["force"] - far["force"]).max() < 100 * gap


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("repinit", {"rcut_smth": 5.0}, r"repinit\.rcut_smth = 5: expected less than rcut = 4"),
        ("repinit", {"axis_neuron": 20}, r"repinit\.axis_neuron = 20: expected at most 16"),
        ("repinit", {"three_body_rcut": 4.5}, r"repinit\.three_body_rcut = 4\.5: expected at most rcut = 4"),
        ("repinit", {"three_body_rcut_smth": 3.5}, r"repinit\.three_body_rcut_smth = 3\.5: expected less than three_"),
        ("repinit", {"three_body_sel": 50}, r"repinit\.three_body_sel = 50: expected at most repformer\.nsel = 40"),
        ("repinit", {"nsel": "some"}, r'repinit\.nsel = "some": expected a whole number > 0'),
        ("repformer", {"rcut": 4.0}, r"repformer\.rcut = 4: expected less than repinit\.rcut = 4"),
        ("repformer", {"nsel": 60}, r"repformer\.nsel = 60: expected less than repinit\.nsel = 60"),
        ("repformer", {"nsel": 70}, r"repformer\.nsel = 70: expected at most repinit\.nsel = 60"),
        ("repformer", {"axis_neuron": 7}, r"repformer\.axis_neuron = 7: expected at most g2_dim = 6"),
        (
            "repformer",
            {"update_g1_has_grrg": False, "update_g1_has_drrd": False},
            r"repformer\.g1_out_mlp = true: the layer of all terms would have no input",
        ),
        ("repformer", {"update_style": "res"}, r'repformer\.update_style = "res"'),
        (None, {"exclude_types": [[0, 3]]}, "exclude_types: type 3 does not exist"),
    ],
)
def test_what_does_not_fit_together_is_named(part, changes, message):
    section = model_section("dpa2")
    target = section["descriptor"] if part is None else dict(section["descriptor"][part])
    target.update(changes)
    section["descriptor"] = {**section["descriptor"], **({part: target} if part else {})}
    with pytest.raises(ConfigError) as error:
        model_config_from_dict(section)
    assert any(re.search(message, problem) for problem in error.value.problems), error.value.problems


def test_numbers_of_neighbors_are_counted_at_the_cutoff_of_each_part():
    found = SimpleNamespace(max_total=50, max_within={3.2: 22, 3.0: 19}.get)
    auto = {"nsel": "auto", "three_body_sel": "auto"}
    section = model_config_from_dict(model_section("dpa2", auto)).descriptor
    assert section.neighbors is None
    counted = section.with_neighbors(found)
    assert (counted.repinit.nsel, counted.repformer.nsel, counted.repinit.three_body_sel) == (56, 24, 20)
    assert counted.neighbors == (56,)
    assert section.with_neighbors_of(counted) == counted
    assert list(counted.inner_neighbors()) == [("repinit.three_body_sel", 3.0, 20), ("repformer.nsel", 3.2, 24)]
    few = section.with_neighbors(SimpleNamespace(max_total=0, max_within=lambda rcut: 0))
    assert list(few.problems(["O", "H", "Na"])) == []  # as in small molecules: still one more where it looks farther
    assert (few.repinit.nsel, few.repformer.nsel) == (8, 4)


def test_statistics_of_each_part_stand_in_its_own_folder():
    config, model = toy_model("dpa2", {"set_davg_zero": False})
    batch = batch_of(model, frame())
    sums = model.descriptor.measure(batch)
    assert set(sums) == set(model.descriptor.sum_names)
    folders = {name.partition("/")[0] for name in sums}
    assert len(folders) == 3
    assert all(len(folder) == 40 for folder in folders)  # SHA-1, as DeePMD-kit names them
    model.descriptor.apply_statistics(sums)
    for name, sel in (("repinit", 60), ("repformer", 40), ("angles", 30)):
        mean = getattr(model.descriptor, name).mean
        assert mean.shape == (3, sel, 4)
        assert (mean[..., 0] > 0).all()
        assert (mean[..., 1:] == 0).all()
    repeated = model.descriptor.measure(collate([pair_frame(Frame(*frame()), model.layout, round_to=60)], model.layout))
    assert all(np.allclose(repeated[name], values) for name, values in sums.items())
    assert config.descriptor.repformer.nsel == 40


def test_options_without_effect_are_listed():
    changes = {"repinit": {**REPINIT, "use_three_body": False}, "repformer": {**REPFORMER, "update_style": "res_avg"}}
    config = config_from_dict(tiny_input(["data"], model__descriptor={"type": "dpa2", **changes}))
    lines = [line for line in ignored_options(config) if "model.descriptor." in line]
    assert "model.descriptor.repinit.three_body_rcut = 3.0: no effect, use_three_body is false" in lines
    assert "model.descriptor.repformer.update_residual = 0.05: no effect, update_style is res_avg" in lines
