"""Short distances: tables that take over from the network (``use_srtab``), and pair energies
(``bridging_method``).

The laws hold for both (test_laws.py), and whole models have the numbers of DeePMD-kit
(test_model_golden.py, test_dpa4.py).
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import with_close_atoms
from helpers import tiny_input
from toy_models import (
    SECTIONS,
    TABLE,
    TRICLINIC,
    assert_tree_refused,
    batch_of,
    evaluate,
    model_section,
    toy_atoms,
    toy_model,
    write_dp,
)

from deepmd_ema.commands.freeze import freeze
from deepmd_ema.config import config_from_dict, model_config_from_dict, to_dict
from deepmd_ema.config.labels import ENERGY
from deepmd_ema.config.schema.bridging import Window
from deepmd_ema.data.run import check_task, open_run
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.dp import read_dp
from deepmd_ema.interop.tree_files import read_tree
from deepmd_ema.model.bridging import (
    ZblEnergies,
    clamped_distance,
    pair_switch,
    source_gate,
)
from deepmd_ema.model.build import build_model

PEER = json.loads((Path(__file__).parents[1] / "golden" / "bridging.json").read_text())
WINDOW = Window(PEER["inner"], PEER["outer"])
SAME_MATH = 1e-13
NEAR = ([[0.0, 0, 0], [0.5, 0, 0]], [0, 1], None)


def test_the_network_alone_counts_far_away_and_the_table_alone_nearby():
    _, model = toy_model("se_atten", **TABLE)
    network = toy_model("se_atten")[1]
    far = ([[0.0, 0, 0], [3.5, 0, 0], [0, 2.6, 0]], [0, 1, 2], None)
    np.testing.assert_array_equal(
        evaluate(model, far)["force"], evaluate(network, far)["force"]
    )
    np.testing.assert_array_equal(
        evaluate(model, far)["energy"], evaluate(network, far)["energy"]
    )
    bias = model.out_bias.view(-1)[:2].numpy()
    table = {round(row[0], 6): row[1:] for row in TABLE["use_srtab"]}
    np.testing.assert_allclose(
        evaluate(model, NEAR)["energy"], bias.sum() + table[0.5][1], rtol=1e-12
    )
    assert np.isnan(
        evaluate(model, ([[0.0, 0, 0], [0.29, 0, 0]], [0, 1], None))["energy"]
    ).all()


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
    once, twice = (
        read_tree(tmp_path / f"{name}{suffix}")["model"]["models"][1]["tab"]
        for name in "ab"
    )
    assert np.array_equal(
        once["@variables"]["tab_data"], twice["@variables"]["tab_data"]
    )


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (
            lambda model: model["models"][0]["@variables"].update(
                out_bias=np.ones((1, 3, 1))
            ),
            "out_bias of its own",
        ),
        (lambda model: model["models"][1].update(rcut=9.0), "extrapolated"),
        (
            lambda model: model["models"][0].update(atom_exclude_types=[1]),
            "excludes types",
        ),
    ],
)
def test_what_a_blended_model_of_another_program_may_have_beside_is_refused(
    tmp_path, change, phrase
):
    config, model = toy_model("se_atten", **TABLE)
    assert_tree_refused(tmp_path, config, model, change, phrase)


def test_the_config_holds_the_rows_of_the_file(tmp_path):
    np.savetxt(
        tmp_path / "table.txt",
        TABLE["use_srtab"],
        header="r O-O O-H O-Na H-H H-Na Na-Na",
    )
    config = model_config_from_dict(
        model_section("se_atten", **{**TABLE, "use_srtab": str(tmp_path / "table.txt")})
    )
    np.testing.assert_allclose(config.use_srtab, TABLE["use_srtab"], rtol=1e-15)
    # distances of few digits: the spacing of the first two rows is not that of the table
    few = np.array(TABLE["use_srtab"])
    few[:, 0] += np.where(np.arange(len(few)) % 2, 1e-4, 0)[: len(few)]
    few[-1, 0] = TABLE["use_srtab"][-1][0]
    printed = model_config_from_dict(
        model_section("se_atten", **{**TABLE, "use_srtab": few.tolist()})
    )
    np.testing.assert_allclose(printed.use_srtab, TABLE["use_srtab"], rtol=1e-12)
    (tmp_path / "table.txt").unlink()
    again = model_config_from_dict(to_dict(config))
    assert again == config
    assert build_model(again).short_range is not None
    assert (
        "short range",
        "table from 0.3 to 2.4 angstrom, off from 0.7 to 2.2",
    ) in config.summary()


@pytest.mark.parametrize(
    ("descriptor", "only_here"), [("se_e2_a", True), ("se_atten", False)]
)
def test_a_frozen_model_that_only_dp_ema_reads_says_so(tmp_path, descriptor, only_here):
    config, model = toy_model(descriptor, **TABLE)
    write_dp(tmp_path / "a.dp", model, config)
    text = freeze(load_model(tmp_path / "a.dp"), tmp_path / "b.dp").text()
    assert (
        "does not read it: it has use_srtab for descriptors of mixed types only" in text
    ) == only_here


# ---- bridging_method


def test_distances_weights_and_gates_are_those_of_deepmd_kit():
    distance = torch.tensor(PEER["distance"], dtype=torch.float64)
    value, slope = clamped_distance(distance, WINDOW)
    np.testing.assert_allclose(value, PEER["clamped"], rtol=SAME_MATH)
    np.testing.assert_allclose(slope, PEER["slope"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(
        pair_switch(distance, WINDOW), PEER["switch"], rtol=0, atol=SAME_MATH
    )
    gates = PEER["gate"]
    lengths = torch.full((3, 3), 8.0, dtype=torch.float64)
    slots = [
        (atom, gates["source"][:n].count(atom))
        for n, atom in enumerate(gates["source"])
    ]
    for (atom, slot), length in zip(slots, gates["length"], strict=True):
        lengths[atom, slot] = length
    found = source_gate(lengths, lengths < 8, WINDOW)
    np.testing.assert_allclose(
        found[torch.tensor(gates["source"])], gates["value"], rtol=SAME_MATH
    )
    assert found[0] == 0
    assert 0 < found[1] < found[2] == 1


def test_pair_energies_and_their_slopes_are_those_of_deepmd_kit():
    kinds = ["O", "H", "Na", "Au"]
    energies = ZblEnergies(kinds)
    _, model = toy_model("se_atten")
    batch = batch_of(model, ([[0.0, 0, 0], [1, 0, 0]], [0, 1], None))
    here = batch.occupied[0].nonzero()[0, 0]
    for i, one in enumerate(kinds):
        for j, other in enumerate(kinds):
            object.__setattr__(batch, "atom_type", torch.tensor([i, j]))
            for distance, energy, slope in zip(
                *PEER["pairs"][f"{one}-{other}"].values(), strict=True
            ):
                found = energies(
                    batch,
                    torch.full(batch.neighbor.shape, distance, dtype=torch.float64),
                    batch.occupied,
                )
                assert [float(part[0, here]) for part in found[:2]] == pytest.approx(
                    [2 * energy, 2 * slope], rel=1e-12
                )


@pytest.mark.parametrize(
    "changes", [{"atom_exclude_types": [1]}, {"pair_exclude_types": [[0, 1]]}]
)
def test_excluded_atoms_have_no_pair_energy(changes):
    of_all, of_some = (
        evaluate(toy_model("dpa4_bridged", **more)[1], NEAR)[ENERGY][0]
        for more in ({}, changes)
    )
    assert of_all > 30 + of_some


@pytest.mark.parametrize("method", ["zbl", "ZBL", "none", "None", "", None])
def test_the_method_may_be_in_capitals_and_none_is_none(method):
    config = model_config_from_dict(model_section("dpa4", bridging_method=method))
    assert (config.bridging is not None) == (method in ("zbl", "ZBL"))
    assert model_config_from_dict(to_dict(config)) == config
    assert (build_model(config).short_range is not None) == (
        config.bridging is not None
    )


def test_close_atoms_are_a_warning_in_data_of_a_bridged_model_and_a_problem_in_others(
    tmp_path,
):
    def report_of(system, **options):
        config = config_from_dict(
            tiny_input(
                [system],
                model__descriptor=SECTIONS["dpa4"],
                model__fitting_net={},
                **options,
            )
        )
        return check_task(config, "", open_run(config)[""])

    close = with_close_atoms(tmp_path / "close", [1, 4], 0.2)
    bridged = {"model__bridging_method": "zbl"}
    assert len(report_of(close).problems) == 2
    found = report_of(close, **bridged)
    assert found.problems == []
    text = f"atoms are 0.200 angstrom apart ({close} frame 1), nearer than bridging_r_inner = 0.5"
    assert [line for line in found.warnings if line.startswith(text)]
    found = report_of(close, **bridged, training__training_data__min_pair_dist=0.5)
    assert not [line for line in found.warnings if "bridging" in line]
    assert (
        f"{close}: leaves out 2 of 6 frames: two atoms are closer than min_pair_dist = 0.5 angstrom"
        in found.notes
    )
    assert (
        len(
            report_of(
                with_close_atoms(tmp_path / "same", [2], 0.001), **bridged
            ).problems
        )
        == 1
    )
