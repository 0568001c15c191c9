"""Tabulated pair energies that take over from the network at short distances (``model.use_srtab``)."""

import numpy as np
import pytest
from toy_models import (
    TABLE,
    TRICLINIC,
    assert_tree_refused,
    evaluate,
    model_section,
    toy_atoms,
    toy_model,
    write_dp,
)

from deepmd_ema.config import model_config_from_dict, to_dict
from deepmd_ema.errors import ConfigError
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.dp import read_dp
from deepmd_ema.interop.freeze import freeze
from deepmd_ema.interop.tree_files import read_tree
from deepmd_ema.model.build import build_model
from deepmd_ema.model.pair_table import PairTable

DIFFERENCES = 2e-7  # central differences of step 1e-4


def test_the_network_alone_counts_far_away_and_the_table_alone_nearby():
    _, model = toy_model("se_atten", **TABLE)
    network = toy_model("se_atten")[1]
    far = ([[0.0, 0, 0], [3.5, 0, 0], [0, 2.6, 0]], [0, 1, 2], None)
    np.testing.assert_array_equal(evaluate(model, far)["force"], evaluate(network, far)["force"])
    np.testing.assert_array_equal(evaluate(model, far)["energy"], evaluate(network, far)["energy"])
    near = ([[0.0, 0, 0], [0.5, 0, 0]], [0, 1], None)
    bias = model.out_bias.view(-1)[:2].numpy()
    table = {round(row[0], 6): row[1:] for row in TABLE["use_srtab"]}
    np.testing.assert_allclose(evaluate(model, near)["energy"], bias.sum() + table[0.5][1], rtol=1e-12)


def test_atoms_without_neighbors_are_finite_and_nearer_than_the_table_is_nan():
    _, model = toy_model("se_e2_a", **TABLE)
    alone = evaluate(model, ([[0.0, 0, 0]], [1], None))
    assert np.isfinite(alone["energy"]).all()
    assert not alone["force"].any()
    assert np.isnan(evaluate(model, ([[0.0, 0, 0], [0.29, 0, 0]], [0, 1], None))["energy"]).all()


def test_the_spline_is_clamped_and_has_two_continuous_derivatives():
    table = PairTable(TABLE["use_srtab"], 4.0)
    assert table.rows[-1, 0] >= 4.0 > table.rows[-2, 0]
    coefficients = table.coefficients.view(3, 3, -1, 4).numpy()
    c0, c1, c2, c3 = np.moveaxis(coefficients[0, 1], -1, 0)
    np.testing.assert_array_equal(c3, table.rows[:-1, 2])
    np.testing.assert_allclose((c0 + c1 + c2 + c3)[:-1], c3[1:], rtol=0, atol=1e-12 * c3.max())
    np.testing.assert_allclose((3 * c0 + 2 * c1 + c2)[:-1], c2[1:], rtol=0, atol=1e-12 * c3.max())
    np.testing.assert_allclose((3 * c0 + c1)[:-1], c1[1:], rtol=0, atol=1e-12 * c3.max())
    assert c2[0] == 0
    np.testing.assert_array_equal(coefficients, coefficients.transpose(1, 0, 2, 3))


@pytest.mark.parametrize("suffix", [".dp", ".yaml"])
def test_a_frozen_model_gives_the_same_bits(tmp_path, suffix):
    config, model = toy_model("se_atten", atom_exclude_types=[1], **TABLE)
    write_dp(tmp_path / f"a{suffix}", model, config)
    again, loaded, _ = read_dp(tmp_path / f"a{suffix}")
    atoms = (*toy_atoms(0, 8), TRICLINIC)
    here, there = evaluate(model, atoms), evaluate(loaded, atoms)
    assert all(np.array_equal(here[name], there[name]) for name in here)
    assert (again.sw_rmin, again.sw_rmax, again.smin_alpha) == (0.7, 2.2, 0.15)
    write_dp(tmp_path / f"b{suffix}", loaded, again)
    once, twice = (read_tree(tmp_path / f"{name}{suffix}")["model"]["models"][1]["tab"] for name in "ab")
    assert np.array_equal(once["@variables"]["tab_data"], twice["@variables"]["tab_data"])


@pytest.mark.parametrize(("change", "phrase"), [
    (lambda model: model["models"][0]["@variables"].update(out_bias=np.ones((1, 3, 1))), "out_bias of its own"),
    (lambda model: model["models"][1].update(rcut=9.0), "extrapolated"),
    (lambda model: model["models"][0].update(atom_exclude_types=[1]), "excludes types"),
])  # fmt: skip
def test_what_a_blended_model_of_another_program_may_have_beside_is_refused(tmp_path, change, phrase):
    config, model = toy_model("se_atten", **TABLE)
    assert_tree_refused(tmp_path, config, model, change, phrase)


def test_the_config_holds_the_rows_of_the_file(tmp_path):
    np.savetxt(tmp_path / "table.txt", TABLE["use_srtab"], header="r O-O O-H O-Na H-H H-Na Na-Na")
    section = model_section("se_atten", **{**TABLE, "use_srtab": str(tmp_path / "table.txt")})
    config = model_config_from_dict(section)
    np.testing.assert_allclose(config.use_srtab, TABLE["use_srtab"], rtol=1e-15)
    (tmp_path / "table.txt").unlink()
    again = model_config_from_dict(to_dict(config))
    assert again == config
    assert build_model(again).short_range is not None
    assert ("short range", "table from 0.3 to 2.4 angstrom, off from 0.7 to 2.2") in config.summary()


@pytest.mark.parametrize(("changes", "phrase"), [
    ({"use_srtab": "missing.txt"}, 'use_srtab = "missing.txt": expected a readable text file'),
    ({"use_srtab": [[1.0, 2.0], [2.0, 1.0]]}, "at least three rows"),
    ({"use_srtab": [[1.0, 2.0], [2.0, 1.0], [4.0, 0.0]]}, "even steps"),
    ({"use_srtab": [row[:4] for row in TABLE["use_srtab"]]}, "has energies of 3 pairs, expected 6"),
    ({"use_srtab": TABLE["use_srtab"][:50]}, "with energies that are not 0, and rcut is 4"),
    ({"sw_rmin": None}, "model.sw_rmin: required beside use_srtab"),
    ({"sw_rmax": 0.5}, "expected more than sw_rmin = 0.7, at most rcut = 4"),
    ({"sw_rmax": 5.0}, "at most rcut = 4"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes, phrase):
    with pytest.raises(ConfigError) as refused:
        model_config_from_dict(model_section("se_atten", **{**TABLE, **changes}))
    assert phrase in str(refused.value)


@pytest.mark.parametrize(("descriptor", "only_here"), [("se_e2_a", True), ("se_atten", False)])
def test_a_frozen_model_that_only_dp_ema_reads_says_so(tmp_path, descriptor, only_here):
    config, model = toy_model(descriptor, **TABLE)
    write_dp(tmp_path / "a.dp", model, config)
    text = freeze(load_model(tmp_path / "a.dp"), tmp_path / "b.dp").text()
    assert ("does not read it: it has use_srtab for descriptors of mixed types only" in text) == only_here
