"""Models of several parts, whose energies are added up with weights (``model.type`` linear_ener)."""

import json
from pathlib import Path

import numpy as np
import pytest
from helpers import tiny_input, write_system
from toy_models import (
    SECTIONS,
    TRICLINIC,
    TYPES,
    disturb,
    evaluate,
    numerical_forces,
    toy_atoms,
    write_dp,
)

from deepmd_ema import checkpoint, cli
from deepmd_ema.config import model_config_from_dict, to_dict
from deepmd_ema.config.schema.common import auto_sel
from deepmd_ema.distributed.tensors import content_digest
from deepmd_ema.errors import ConfigError
from deepmd_ema.geometry import neighbor_statistics
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.freeze import freeze
from deepmd_ema.model.build import build_model

DIFFERENCES = 2e-7  # central differences of step 1e-4
SAME_MATH = 1e-11
FRAMES = [(*toy_atoms(0, 7), TRICLINIC), (*toy_atoms(1, 4), None)]


def rows(last=4.8, step=0.05, num_types=3):
    """Return a table of attraction that ends smoothly at ``last``."""
    r = 0.3 + step * np.arange(round((last - 0.3) / step) + 1)
    shape = -np.exp(-r / 2) * np.clip(1 - r / last, 0, None) ** 3
    strengths = 1 + np.arange(num_types * (num_types + 1) // 2)
    return np.column_stack([r, shape[:, None] * strengths]).tolist()


FIT = {"neuron": [6, 6]}
# the table looks farther than the networks; the features of the second jump where a neighbor goes, so that it has to
# know its own cutoff
TABLE = {"type": "pairtab", "tab_file": rows(), "rcut": 4.8, "sel": [40, 40, 60]}
NETWORKS = [
    {"descriptor": SECTIONS["se_atten"] | {"attn_layer": 1}, "fitting_net": FIT},
    {"descriptor": SECTIONS["se_atten"] | {"attn_layer": 1, "smooth_type_embedding": False, "rcut": 3.1, "sel": 50},
     "fitting_net": FIT | {"precision": "float64"}},
]  # fmt: skip
WEIGHTS = [0.6, -0.3, 1.7]


def section(models=(*NETWORKS, TABLE), weights=WEIGHTS, **changes):
    return {"type": "linear_ener", "type_map": TYPES, "models": list(models), "weights": weights, **changes}


def linear(*args, seed=3, **changes):
    """Return (config, model) with statistics and biases that a wrong formula cannot hide behind."""
    config = model_config_from_dict(section(*args, **changes))
    model = build_model(config, seed).eval()
    disturb(model)
    return config, model


def part_alone(config, model, number):
    """Return a network as a model of its own, with the weights that it has as a part."""
    alone = build_model(config.standard(config.models[number])).eval()
    alone.descriptor.load_state_dict(model.descriptor.parts[number].state_dict())
    alone.fitting.load_state_dict(model.fitting.parts[number].state_dict())
    return alone


@pytest.mark.parametrize("weights", ["sum", "mean", WEIGHTS])
def test_the_energy_is_the_weighted_sum_of_those_of_its_parts(weights):
    """Each part alone has a list of neighbors of its own cutoff."""
    config, model = linear(weights=weights)
    factors = [1, 1, 1] if weights == "sum" else [1 / 3] * 3 if weights == "mean" else weights
    for frame in FRAMES:
        found = evaluate(model, frame)
        parts = [evaluate(part_alone(config, model, k), frame) for k in (0, 1)]
        table = explicit(frame)
        for name in ("energy", "force", "virial", "atom_energy"):
            expected = sum(w * part[name] for w, part in zip(factors, [*parts, table]))
            if name in ("energy", "atom_energy"):
                bias = model.out_bias.view(-1).numpy()[frame[1]]
                expected = expected + (bias.sum() if name == "energy" else bias)
            np.testing.assert_allclose(found[name], expected, rtol=0, atol=SAME_MATH * np.abs(expected).max())


def explicit(frame):
    """Return the energies of the table, pair by pair, with images of the cell."""
    coord, types, box = frame
    numbers = range(-2, 3) if box is not None else [0]
    shifts = np.array([[i, j, k] for i in numbers for j in numbers for k in numbers]) @ (
        np.eye(3) if box is None else box
    )
    table = np.array(TABLE["tab_file"])
    column = {}
    for a in range(3):
        for b in range(a, 3):
            column[a, b] = column[b, a] = 1 + len(set(column.values()))
    atom, force, virial = np.zeros(len(types)), np.zeros_like(coord), np.zeros((3, 3))
    for i, x in enumerate(coord):
        for j, y in enumerate(coord):
            for shift in shifts:
                vector = y + shift - x
                r = np.linalg.norm(vector)
                if not 1e-9 < r < TABLE["rcut"]:
                    continue
                energy, slope = spline(table[:, 0], table[:, column[types[i], types[j]]], r)
                atom[i] += 0.5 * energy
                pull = 0.5 * slope * vector / r
                force[i] += pull
                force[j] -= pull
                virial -= np.outer(vector, pull)
    return {"energy": atom.sum(keepdims=True), "atom_energy": atom, "force": force, "virial": virial.reshape(1, 9)}


def spline(x, y, r):
    """Return the clamped cubic spline and its derivative at ``r``, from a dense solve."""
    h, n = x[1] - x[0], len(x)
    matrix, right = np.eye(n), np.zeros(n)
    for k in range(1, n - 1):
        matrix[k, k - 1 : k + 2] = 1, 4, 1
        right[k] = 3 * (y[k + 1] - y[k - 1])
    s = np.linalg.solve(matrix, right)
    k = min(int((r - x[0]) / h), n - 2)
    u = (r - x[0]) / h - k
    c0, c1 = s[k] + s[k + 1] - 2 * (y[k + 1] - y[k]), 3 * (y[k + 1] - y[k]) - 2 * s[k] - s[k + 1]
    return ((c0 * u + c1) * u + s[k]) * u + y[k], ((3 * c0 * u + 2 * c1) * u + s[k]) / h


@pytest.mark.parametrize("models", [
    (*NETWORKS, TABLE),
    ({"descriptor": SECTIONS["se_e2_a"] | {"rcut": 3.4}, "fitting_net": FIT}, TABLE),
    ({"descriptor": SECTIONS["dpa3"], "fitting_net": FIT}, {**TABLE, "rcut": 3.0}),
], ids=["attention", "by_type", "messages"])  # fmt: skip
def test_forces_are_the_derivative_of_the_energy(models):
    _, model = linear(models, "sum", atom_exclude_types=[2], pair_exclude_types=[[0, 1]])
    coord, types = toy_atoms(0, 6)
    numerical = numerical_forces(model, coord, types)
    found = evaluate(model, (coord, types, TRICLINIC))["force"]
    assert np.abs(found).max() > 1e-2
    np.testing.assert_allclose(found, numerical, rtol=0, atol=DIFFERENCES * np.abs(found).max())


def test_frame_parameters_go_to_the_parts_that_read_them():
    conditioned = {**NETWORKS[0], "fitting_net": FIT | {"numb_fparam": 2, "default_fparam": [0.1, 0.2]}}
    config, model = linear((NETWORKS[1], conditioned, TABLE))
    assert (config.fitting_net.numb_fparam, config.fitting_net.default_fparam) == (2, [0.1, 0.2])
    one, two, default = (evaluate(model, FRAMES[0], **more)["energy"] for more in (
        {"fparam": np.array([0.1, 0.2])}, {"fparam": np.array([0.5, 0.2])}, {}))  # fmt: skip
    assert one == default != two
    sums = {"fparam": np.array([[2.0, 1.0, 5.0], [2.0, 4.0, 10.0]])}
    model.fitting.apply_statistics(sums, 0.01)
    np.testing.assert_allclose(model.fitting.parts[1].fparam_avg, [0.5, 2.0])


def test_a_table_of_other_elements_is_read_by_their_names():
    _, here = linear()
    names = ["Na", "C", "H", "O"]
    pairs = [(a, b) for n, a in enumerate(names) for b in names[n:]]
    own = {frozenset((a, b)): 1 + k for k, (a, b) in enumerate((a, b) for n, a in enumerate(TYPES) for b in TYPES[n:])}
    table = [
        [row[0], *(row[own[frozenset(p)]] if "C" not in p else 9.0 * (row[1] != 0) for p in pairs)] for row in rows()
    ]
    _, there = linear((*NETWORKS, {**TABLE, "type_map": names, "tab_file": table}))
    np.testing.assert_array_equal(evaluate(here, FRAMES[0])["force"], evaluate(there, FRAMES[0])["force"])


def test_the_number_of_neighbors_of_each_part_is_counted_inside_its_cutoff(tmp_path):
    np.savetxt(tmp_path / "table.txt", rows())
    networks = [{**NETWORKS[0], "descriptor": NETWORKS[0]["descriptor"] | {"sel": "auto"}}]
    table = {**TABLE, "sel": "auto:1.5", "tab_file": str(tmp_path / "table.txt")}
    config = model_config_from_dict(section([*networks, table], "sum"))
    assert config.descriptor.neighbors is None
    coord, types, box = FRAMES[0]
    found = neighbor_statistics([(coord, box, types)], 4.8, 3)
    resolved = config.with_descriptor(config.descriptor.with_neighbors(found))
    inside = [found.max_within(rcut) for rcut in (4.0, 4.8)]
    assert inside[0] < inside[1]
    assert [part.neighbors for part in resolved.descriptor.list] == [
        tuple(auto_sel([inside[0]])), tuple(auto_sel([inside[1]], "auto:1.5"))
    ]  # fmt: skip
    (tmp_path / "table.txt").unlink()
    assert model_config_from_dict(to_dict(resolved)) == resolved


@pytest.mark.parametrize(("changes", "phrase"), [
    ({"weights": [1.0, 2.0]}, "model.weights = [1.0, 2.0]: has length 2, expected 3"),
    ({"weights": "avg"}, 'model.weights = "avg": expected "mean", "sum", or a list of numbers'),
    ({"models": [TABLE], "weights": "sum"}, "model.models: expected at least one part with a descriptor"),
    ({"models": [NETWORKS[0], {"type": "frozen", "model_file": "a.dp"}], "weights": "sum"},
     'model.models[1].type = "frozen": known to DeePMD-kit, not available'),
    ({"models": [NETWORKS[0], section()], "weights": "sum"}, "Put its parts here, with weights"),
    ({"models": [NETWORKS[0], {**TABLE, "rcut": 9.0, "tab_file": rows()[:30]}], "weights": "sum"},
     "with energies that are not 0, and rcut is 9"),
    ({"models": [NETWORKS[0], {**TABLE, "type_map": ["O", "H"]}], "weights": "sum"},
     'model.models[1].type_map = ["O", "H"]: expected all elements of the model; Na is missing'),
    ({"models": [{**NETWORKS[0], "type_map": ["H", "O", "Na"]}, TABLE], "weights": "sum"},
     "model.models[0].type_map"),
    ({"models": [{**NETWORKS[0], "fitting_net": FIT | {"atom_ener": [1.0, 2.0, 3.0]}}, TABLE], "weights": "sum"},
     "model.models[0].fitting_net.atom_ener = [1.0, 2.0, 3.0]: the energies of the elements are fitted for the whole"),
    ({"models": [{**NETWORKS[0], "fitting_net": FIT | {"numb_fparam": n}} for n in (1, 2)], "weights": "sum"},
     "model.models: numb_fparam of the fitting networks is [1, 2], expected one value"),
    ({"models": [{**NETWORKS[0], "pair_exclude_types": [[0, 1]]}], "weights": "sum"},
     "model.models[0].pair_exclude_types: unknown key"),
    ({"shared_dict": {"a": {}}}, "model.shared_dict"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changes, phrase):
    with pytest.raises(ConfigError) as refused:
        model_config_from_dict(section(**{"weights": WEIGHTS, **changes}))
    assert phrase in str(refused.value)


@pytest.mark.parametrize(("descriptor", "only_here"), [("se_e2_a", True), ("se_atten", False)])
def test_a_frozen_model_that_only_dp_ema_reads_says_so(tmp_path, descriptor, only_here):
    config, model = linear([{"descriptor": SECTIONS[descriptor], "fitting_net": FIT}, TABLE], "sum")
    write_dp(tmp_path / "a.dp", model, config)
    text = freeze(load_model(tmp_path / "a.dp"), tmp_path / "b.dp").text()
    assert ("does not read it: it has linear_ener for descriptors of mixed types only" in text) == only_here


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A folder with data and an input of two parts, the table in a file."""
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=4, seed=1)
    np.savetxt("table.txt", rows(num_types=2))
    config = tiny_input(["data"], num_steps=4, training__save_freq=2, training__enable_ema=True)
    network = {"descriptor": SECTIONS["se_atten"] | {"sel": "auto", "attn_layer": 0}, "fitting_net": FIT}
    parts = [network, {"type": "pairtab", "tab_file": "table.txt", "rcut": 4.8, "sel": 534}]
    config["model"] = section(parts, "sum", type_map=["O", "H"])
    Path("input.json").write_text(json.dumps(config))
    return config


def test_a_run_restarts_exactly_and_goes_through_all_commands(desk, capsys):
    assert cli.main(["train", "input.json", "--device", "cpu", "-v", "DEBUG"]) == 0
    assert "energy of each element: " in capsys.readouterr().err
    straight = checkpoint.load("model.ckpt-4.pt")
    assert cli.main(["train", "input.json", "--device", "cpu", "--restart", "model.ckpt-2.pt"]) == 0
    again = checkpoint.load("model.ckpt-4.pt")
    for part in ("model", "optimizer", "averages"):
        assert content_digest(again[part]) == content_digest(straight[part]), part
    assert cli.main(["freeze", "--use-ema", "-o", "water.dp"]) == 0
    Path("table.txt").unlink()  # the rows are in the files
    assert cli.main(["show", "model.ckpt.pt"]) == 0
    assert "1 x pairtab, table from 0.3 to 4.8, rcut 4.8, sel 534" in capsys.readouterr().out
    assert cli.main(["test", "-m", "water.dp", "-s", "data"]) == 0
    # other elements, with a table for them
    write_system("data", frames=4, seed=5, elements=("H", "O", "Na"))
    np.savetxt("table.txt", rows())
    desk["model"] |= {"type_map": ["Na", "O", "H"]}
    Path("input.json").write_text(json.dumps(desk))
    assert cli.main(["train", "input.json", "--device", "cpu", "--finetune", "water.dp"]) == 0
    bias = "fitting.parts.0.nets.0.layers.0.weight"
    assert checkpoint.load("model.ckpt-4.pt")["model"][bias].shape == straight["model"][bias].shape
