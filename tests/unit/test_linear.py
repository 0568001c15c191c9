"""Models of several parts, whose energies are added up with weights (``model.type``
linear_ener).
"""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system
from linear_models import FIT, NETWORKS, TABLE, linear, rows, section
from toy_models import SECTIONS, TRICLINIC, TYPES, batch_of, evaluate, toy_atoms

from deepmd_ema import checkpoint, cli
from deepmd_ema.config import model_config_from_dict, to_dict
from deepmd_ema.config.schema.common import auto_sel
from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.geometry import neighbor_statistics
from deepmd_ema.interop.dp import file_tree, read_dp, rewrite_bias
from deepmd_ema.interop.tree_files import write_tree
from deepmd_ema.model.build import build_model
from deepmd_ema.model.statistics import collect_statistics

SAME_MATH = 1e-11
FRAMES = [(*toy_atoms(0, 7), TRICLINIC), (*toy_atoms(1, 4), None)]


@pytest.mark.parametrize(
    ("weights", "numbers"), [("sum", [1.0] * 3), ("mean", [1 / 3] * 3)]
)
def test_words_are_weights(weights, numbers):
    """The sum itself is that of DeePMD-kit: test_model_golden."""
    named, given = (linear(weights=one)[1] for one in (weights, numbers))
    for frame in FRAMES:
        np.testing.assert_allclose(
            evaluate(named, frame)["force"],
            evaluate(given, frame)["force"],
            atol=SAME_MATH,
        )


def test_parts_are_given_the_statistics_that_they_have_alone():
    config, model = linear()
    sums = collect_statistics(model, config, [batch_of(model, *FRAMES)]).measured
    for number in (0, 1):
        standard = config.standard(config.models[number])
        alone = build_model(standard)
        own = collect_statistics(alone, standard, [batch_of(alone, *FRAMES)]).measured
        for name, value in own.items():
            np.testing.assert_allclose(
                sums[f"{number}_{name}"], value, rtol=1e-12, atol=1e-12
            )


def test_frame_parameters_go_to_the_parts_that_read_them():
    conditioned = {
        **NETWORKS[0],
        "fitting_net": FIT | {"numb_fparam": 2, "default_fparam": [0.1, 0.2]},
    }
    config, model = linear((NETWORKS[1], conditioned, TABLE))
    assert (config.fitting_net.numb_fparam, config.fitting_net.default_fparam) == (
        2,
        [0.1, 0.2],
    )
    one, two, default = (
        evaluate(model, FRAMES[0], **more)["energy"]
        for more in (
            {"fparam": np.array([0.1, 0.2])},
            {"fparam": np.array([0.5, 0.2])},
            {},
        )
    )
    assert one == default != two
    sums = {"fparam": np.array([[2.0, 1.0, 5.0], [2.0, 4.0, 10.0]])}
    model.fitting.apply_statistics(sums, 0.01)
    np.testing.assert_allclose(model.fitting.parts[1].fparam_avg, [0.5, 2.0])


def test_a_table_of_other_elements_is_read_by_their_names():
    _, here = linear()
    names = ["Na", "C", "H", "O"]
    pairs = [(a, b) for n, a in enumerate(names) for b in names[n:]]
    own = {
        frozenset((a, b)): 1 + k
        for k, (a, b) in enumerate(
            (a, b) for n, a in enumerate(TYPES) for b in TYPES[n:]
        )
    }
    table = [
        [
            row[0],
            *(
                row[own[frozenset(p)]] if "C" not in p else 9.0 * (row[1] != 0)
                for p in pairs
            ),
        ]
        for row in rows()
    ]
    _, there = linear((*NETWORKS, {**TABLE, "type_map": names, "tab_file": table}))
    np.testing.assert_array_equal(
        evaluate(here, FRAMES[0])["force"], evaluate(there, FRAMES[0])["force"]
    )


def test_the_number_of_neighbors_of_each_part_is_counted_inside_its_cutoff(tmp_path):
    np.savetxt(tmp_path / "table.txt", rows())
    networks = [
        {**NETWORKS[0], "descriptor": NETWORKS[0]["descriptor"] | {"sel": "auto"}}
    ]
    table = {**TABLE, "sel": "auto:1.5", "tab_file": str(tmp_path / "table.txt")}
    config = model_config_from_dict(section([*networks, table], "sum"))
    assert config.descriptor.neighbors is None
    coord, types, box = FRAMES[0]
    found = neighbor_statistics([(coord, box, types)], 4.8, 3)
    resolved = config.with_descriptor(config.descriptor.with_neighbors(found))
    inside = [found.max_within(rcut) for rcut in (4.0, 4.8)]
    assert inside[0] < inside[1]
    assert [part.neighbors for part in resolved.descriptor.list] == [
        tuple(auto_sel([inside[0]])),
        tuple(auto_sel([inside[1]], "auto:1.5")),
    ]
    (tmp_path / "table.txt").unlink()
    assert model_config_from_dict(to_dict(resolved)) == resolved


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with data and an input of two parts, the table in a file."""
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=4, seed=1)
    np.savetxt("table.txt", rows(num_types=2))
    config = tiny_input(
        ["data"], num_steps=4, training__save_freq=2, training__enable_ema=True
    )
    network = {
        "descriptor": SECTIONS["se_atten"] | {"sel": "auto", "attn_layer": 0},
        "fitting_net": FIT,
    }
    parts = [
        network,
        {"type": "pairtab", "tab_file": "table.txt", "rcut": 4.8, "sel": 534},
    ]
    config["model"] = section(parts, "sum", type_map=["O", "H"])
    Path("input.json").write_text(json.dumps(config))
    return config


def test_a_run_restarts_exactly_and_goes_through_all_commands(desk, capsys):
    assert cli.main(["train", "input.json", "--device", "cpu", "-v", "DEBUG"]) == 0
    assert "energy of each element: " in capsys.readouterr().err
    straight = checkpoint.load("model.ckpt-4.pt")
    assert (
        cli.main(
            ["train", "input.json", "--device", "cpu", "--restart", "model.ckpt-2.pt"]
        )
        == 0
    )
    again = checkpoint.load("model.ckpt-4.pt")
    for part in ("model", "optimizer", "averages"):
        assert content_digest(again[part]) == content_digest(straight[part]), part
    assert cli.main(["freeze", "--use-ema", "-o", "water.dp"]) == 0
    Path("table.txt").unlink()  # the rows are in the files
    assert cli.main(["show", "model.ckpt.pt"]) == 0
    assert (
        "1 x pairtab, table from 0.3 to 4.8, rcut 4.8, sel 534"
        in capsys.readouterr().out
    )
    assert cli.main(["test", "-m", "water.dp", "-s", "data"]) == 0
    # other elements, with a table for them
    write_system("data", frames=4, seed=5, elements=("H", "O", "Na"))
    np.savetxt("table.txt", rows())
    desk["model"] |= {"type_map": ["Na", "O", "H"]}
    Path("input.json").write_text(json.dumps(desk))
    assert (
        cli.main(["train", "input.json", "--device", "cpu", "--finetune", "water.dp"])
        == 0
    )
    bias = "fitting.parts.0.nets.0.layers.0.weight"
    assert (
        checkpoint.load("model.ckpt-4.pt")["model"][bias].shape
        == straight["model"][bias].shape
    )


def test_a_new_bias_takes_the_place_of_those_of_the_parts(tmp_path):
    """A reader adds those of the parts, which other programs write, to that of the whole."""
    config, model = linear(NETWORKS, [0.6, -0.3])
    tree = file_tree(model, config)
    whole = tree["model"]["@variables"]
    own = whole["out_bias"].copy()
    whole["out_bias"] = np.zeros_like(own)
    tree["model"]["models"][0]["@variables"]["out_bias"] = own
    write_tree(tmp_path / "parts.dp", tree)
    bias = read_dp(tmp_path / "parts.dp")[1].out_bias
    np.testing.assert_allclose(bias.numpy(), 0.6 * own, atol=SAME_MATH)
    given = np.array([-1.0, -2.0, -3.0])
    rewrite_bias(tmp_path / "parts.dp", tmp_path / "new.dp", given, None, {})
    read = read_dp(tmp_path / "new.dp")[1].out_bias
    np.testing.assert_allclose(read.numpy().ravel(), given, atol=SAME_MATH)
