"""The options of dpa3: each gives energies with right derivatives; numbers of neighbors; what does not fit together."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import tiny_input
from toy_models import FLOW, TRICLINIC, batch_of, evaluate, model_section, toy_atoms, toy_model

from deepmd_ema.config import config_from_dict, model_config_from_dict
from deepmd_ema.config.remarks import ignored_options
from deepmd_ema.errors import ConfigError
from deepmd_ema.geometry import neighbor_statistics

SAME_MATH = 1e-11


def model_with(flow=None, **changes):
    return toy_model("dpa3", {"repflow": {**FLOW, **(flow or {})}, **changes})


def close(a, b, tol=SAME_MATH):
    np.testing.assert_allclose(a, b, rtol=0, atol=tol * max(1.0, np.abs(b).max(initial=0)))


def test_skip_stat_is_the_older_name_of_a_fixed_spread():
    config, _ = model_with({"skip_stat": True, "fix_stat_std": 0.7})
    assert (config.descriptor.repflow.skip_stat, config.descriptor.repflow.fix_stat_std) == (False, 0.3)


def test_pairs_of_excluded_types_do_not_see_each_other():
    _, model = model_with(exclude_types=[[0, 1], [0, 0], [0, 2], [1, 1]])
    alone = evaluate(model, ([[0.0, 0, 0]], [0], None), ([[0.0, 0, 0]], [1], None))
    out = evaluate(model, ([[0.0, 0, 0], [1.1, 0, 0]], [0, 1], None))
    close(out["energy"], alone["energy"].sum())
    assert not out["force"].any()


def test_the_spread_of_the_environment_comes_from_the_data_only_if_it_is_not_fixed():
    coord, types = toy_atoms()
    (_, fixed), (_, measured) = (model_with({"fix_stat_std": value}) for value in (0.4, 0.0))
    batch = batch_of(fixed, (coord, types, TRICLINIC))
    assert fixed.descriptor.measure(batch) == {}
    assert fixed.descriptor.sum_names == ()
    sums = measured.descriptor.measure(batch)
    assert list(sums) == list(measured.descriptor.sum_names)
    measured.descriptor.mean.zero_()
    measured.descriptor.apply_statistics(sums)
    assert not measured.descriptor.mean.any()
    radial = measured.descriptor.stddev[:, 0, 0]
    assert (radial > 0.01).all()
    assert radial.unique().numel() == 3


@pytest.mark.parametrize(("e_sel", "a_sel", "expected"), [("auto", "auto:1.5", (1.1, 1.5)), (90, "auto", (None, 1.1))])
def test_auto_counts_neighbors_within_each_cutoff(e_sel, a_sel, expected):
    coord, types = toy_atoms()
    section = {"repflow": {**FLOW, "e_sel": e_sel, "a_sel": a_sel}}
    config = model_config_from_dict({**model_section("dpa3"), "descriptor": {"type": "dpa3", **section}}).descriptor
    assert config.neighbors is None
    found = neighbor_statistics([(coord, TRICLINIC, types)], config.cutoff, 3)
    vector = (
        coord[:, None]
        - coord
        + np.einsum("nk,kx->nx", np.indices((9, 9, 9)).reshape(3, -1).T - 4, TRICLINIC)[:, None, None]
    )
    distance = np.linalg.norm(vector, axis=-1)
    most = [((distance < rcut) & (distance > 0)).sum((0, 2)).max() for rcut in (4.0, 3.0)]
    assert [found.max_within(rcut) for rcut in (4.0, 3.0)] == most
    assert found.max_total == most[0]
    flow = config.with_neighbors(found).repflow
    wanted = [90 if ratio is None else 4 * int(np.ceil(int(n * ratio) / 4)) for n, ratio in zip(most, expected)]
    assert [flow.e_sel, flow.a_sel] == wanted
    assert config.with_neighbors_of(config.with_neighbors(found)).repflow == flow


BAD = {
    "switch": ({"a_rcut_smth": 3.0}, r"descriptor\.repflow\.a_rcut_smth = 3: expected less than a_rcut = 3"),
    "cutoffs": ({"a_rcut": 5.0}, r"descriptor\.repflow\.a_rcut = 5: expected at most e_rcut = 4"),
    "numbers": ({"a_sel": 61}, r"descriptor\.repflow\.a_sel = 61: expected at most e_sel = 60"),
    "sel": ({"e_sel": "many"}, r'repflow\.e_sel = "many": expected a whole number > 0'),
    "axis": ({"axis_neuron": 7}, r"axis_neuron = 7: expected at most 6, the smaller of n_dim and e_dim"),
    "compress": ({"a_compress_rate": 3}, r"a_compress_rate = 3: expected a number of which twice divides a_dim = 4"),
    "split": ({"a_compress_rate": 1, "a_compress_use_split": True, "a_compress_e_rate": 4}, r"e_dim = 6: expected at"),
    "dynamic": ({"use_dynamic_sel": True, "smooth_edge_update": False}, r"use_dynamic_sel = true: needs smooth"),
    "order": ({"sequential_update": True, "update_style": "res_avg"}, r'sequential_update = true: needs update_style'),
    "no_angles": ({"sequential_update": True, "update_angle": False}, r"sequential_update = true: needs update_angle"),
    "exponential": ({"use_exp_switch": True, "e_rcut_smth": 0.0}, r"e_rcut_smth = 0: use_exp_switch divides by it"),
}  # fmt: skip


@pytest.mark.parametrize("case", sorted(BAD))
def test_what_does_not_fit_together_is_named(case):
    changes, message = BAD[case]
    with pytest.raises(ConfigError, match=message):
        model_with(changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_chg_spin_ebd": True}, r"add_chg_spin_ebd = true: expected false: charge and spin .* not available in"),
        ({"default_chg_spin": [0.0, 1.0]}, r"default_chg_spin = \[0\.0, 1\.0\]: expected null: charge and spin"),
        ({"exclude_types": [[0, 3]]}, r"exclude_types: type 3 does not exist"),
    ],
)
def test_what_is_not_available_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        model_with(**changes)


def test_options_without_effect_are_listed():
    flow = {**FLOW, "optim_update": False, "sel_reduce_factor": 5.0, "update_style": "res_avg"}
    config = config_from_dict(tiny_input(["data"], model__descriptor={"type": "dpa3", "repflow": flow}))
    place = "model.descriptor.repflow"
    assert [line for line in ignored_options(config) if place in line] == [
        f"{place}.optim_update = false: no effect, both values are the same function",
        f"{place}.sel_reduce_factor = 5.0: no effect, use_dynamic_sel is false",
        f"{place}.update_residual = 1.0: no effect, update_style is res_avg",
    ]
