"""Dipoles, polarizabilities, properties and DOS: values, files, losses and statistics of
DeePMD-kit, and mistakes.
"""

import copy
import json
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from config_inputs import assert_refused, spoiled
from data_files import hdf5
from flat_batches import flat_batch
from helpers import tiny_input, write_system
from interchange_cases import same_bits
from parallel_runs import run_ranks
from toy_models import SECTIONS, write_dp

from deepmd_ema.config import config_from_dict, model_config_from_dict
from deepmd_ema.config.labels import LABELS
from deepmd_ema.data.collate import collate
from deepmd_ema.data.formats.discover import open_systems
from deepmd_ema.data.source import Frame, ReadSpec
from deepmd_ema.distributed.launch import find_launch
from deepmd_ema.distributed.world import World, open_world
from deepmd_ema.errors import DataError
from deepmd_ema.infer.load import load_model
from deepmd_ema.interop.deepmd_pt import write_deepmd_pt
from deepmd_ema.interop.dp import read_dp, read_tree
from deepmd_ema.model.build import build_model
from deepmd_ema.model.metrics import Errors
from deepmd_ema.model.quantity import COUNTED, SPREAD
from deepmd_ema.model.statistics import collect_statistics
from deepmd_ema.training.loss import LOSSES, LossOverBatches

GOLDEN = (
    Path(__file__).parents[1] / "golden" / "quantities"
)  # made_by: see golden/README.md
DPA4_UNUSED = (
    "config/sel/0",
    "config/use_amp",
    "config/random_gamma",
)  # entries of files of DPA-4 without effect
MODELS = sorted(file.stem for file in GOLDEN.glob("*.dp"))
SAME_MATH = 1e-10
FLOAT32_COUNTS = (
    1e-7  # DeePMD-kit divides displayed errors by numbers of atoms in float32
)


def close(found, expected, tolerance=SAME_MATH):
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max()


def frames_of(stored, system=""):
    """Return the frames that a golden file holds, with their parameters."""
    arrays = {
        key.removeprefix(system): value
        for key, value in stored.items()
        if key.startswith(system)
    }
    number = len(arrays["coord"])
    types = np.broadcast_to(arrays["atype"], arrays["coord"].shape[:2]).astype(np.int64)
    cells = arrays["box"].reshape(-1, 3, 3) if "box" in arrays else [None] * number
    more = [
        {key: arrays[key][k] for key in ("fparam", "aparam") if key in arrays}
        for k in range(number)
    ]
    return [
        Frame(coord, t, box, **one)
        for coord, t, box, one in zip(arrays["coord"], types, cells, more)
    ]


def assert_values(model, stored, system=""):
    """The values of frames and of atoms are those of a golden file."""
    batch = collate(frames_of(stored, system), model.layout)
    out = model(batch)
    whole, atomic = (out[name].detach() for name in model.labels)
    close(whole.numpy(), stored[f"{system}global"].reshape(whole.shape))
    close(
        batch.in_file_order(atomic).numpy(),
        stored[f"{system}atomic"].reshape(atomic.shape),
    )


@pytest.fixture(scope="module", params=MODELS)
def golden(request):
    config, model, _ = read_dp(GOLDEN / f"{request.param}.dp")
    return request.param, config, model


@pytest.mark.parametrize("system", ["cell_", "open_"])
def test_values_are_those_of_deepmd_kit(golden, system):
    name, _, model = golden
    assert_values(model, np.load(GOLDEN / f"{name}.npz"), system)


def test_a_model_is_written_as_deepmd_kit_writes_it_and_comes_back_to_the_bit(
    golden, tmp_path
):
    name, config, model = golden
    write_dp(tmp_path / "model.dp", model, config)
    same_bits(read_dp(tmp_path / "model.dp")[1], model)
    ours, theirs = (
        dict(leaves(read_tree(file)["model"]))
        for file in (tmp_path / "model.dp", GOLDEN / f"{name}.dp")
    )
    unused = {place for place in {*ours, *theirs} if place.endswith(DPA4_UNUSED)}
    assert set(ours) - unused == set(theirs) - unused
    for place in set(theirs) - unused:
        assert np.array_equal(ours[place], theirs[place]), place
    write_deepmd_pt(
        tmp_path / "model.pt", {"": (config, model, {"weights": "live", "step": 3})}
    )
    loaded = load_model(tmp_path / "model.pt")
    same_bits(loaded.model, model)
    assert_values(loaded.model, np.load(GOLDEN / f"{name}.npz"), "cell_")


def leaves(tree, place=""):
    """Yield place and value of what a tree holds."""
    parts = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in parts:
        yield from leaves(value, f"{place}/{key}")
    if not parts:
        yield place, tree


def test_a_checkpoint_of_deepmd_kit_gives_its_dipoles():
    assert_values(
        load_model(GOLDEN / "checkpoint.pt").model,
        dict(np.load(GOLDEN / "checkpoint.npz")),
    )


# ---- losses

double = partial(torch.tensor, dtype=torch.float64)
CASES = json.loads((GOLDEN / "losses.json").read_text())
KINDS = {"TensorLoss": "tensor", "DOSLoss": "dos", "PropertyLoss": "property"}
# options of DeePMD-kit's losses that are ours of the fitting network, and others that are none of
# ours
OF_MODEL = {"tensor_name": "type", "var_name": "property_name"}
OF_MODEL |= {name: name for name in ("numb_dos", "task_dim", "intensive")}
NOT_OURS = {*OF_MODEL, "tensor_size", "label_name", "starter_learning_rate"}


def loss_of(kind, options, fitting, world=None, excluded=()):
    """Return the loss of a model with the section ``fitting_net``, and the names of what it
    compares.
    """
    model = {"model__fitting_net": fitting, "model__atom_exclude_types": [*excluded]}
    (task,) = (
        run := config_from_dict(
            tiny_input(["data"], loss={"type": kind, **options}, **model)
        )
    ).tasks.values()
    ranks = task.metric(run.validating.validation_metric).quantity
    assert any(
        ranks == error.metric for name in task.labels for error in LABELS[name].errors
    )
    return LOSSES[kind](
        task.loss, 1e-3, world or World(), task.model
    ), task.model.fitting_net.labels


@pytest.mark.parametrize("number", range(len(CASES)))
def test_losses_and_displayed_values_are_those_of_deepmd_kit(number):
    """Of frames, of atoms, of those that a mask leaves, with a label missing, with weights of
    atoms.
    """
    case = CASES[number]
    options, kind = case["options"], KINDS[case["loss"]]
    fitting = {"type": kind} | {
        OF_MODEL[name]: value for name, value in options.items() if name in OF_MODEL
    }
    mask = np.array(case["prediction"].pop("mask", np.ones((2, 4))))
    own = {name: value for name, value in options.items() if name not in NOT_OURS}
    loss, names = loss_of(kind, own, fitting, excluded=[1] * (not mask.all()))
    labels = dict(zip([*names, "atom_weight"], case["label"].values()))
    missing = [name for name, has_label in zip(names, case["find"]) if not has_label]
    frames = [
        {
            "types": 1 - mask[k].astype(int),
            **{n: np.array(v[k]) for n, v in labels.items() if n not in missing},
        }
        for k in range(2)
    ]
    batch = flat_batch(frames, names=loss.labels)
    prediction = dict(zip(names, map(double, case["prediction"].values())))
    if names[1] in prediction:
        prediction[names[1]] = prediction[names[1]].flatten(0, 1)[batch.atom_order]
    if "out_std" in case:
        prediction[SPREAD] = double(case["out_std"])[:, 0]
    total, shown = loss(prediction, batch, case["learning_rate"])
    assert total.item() == pytest.approx(case["value"], rel=SAME_MATH)
    expected = {
        name: value
        for name, value in case["shown"].items()
        if not name.startswith("l2_")
    }
    assert list(loss.display_names) == sorted(expected)
    for name, value in expected.items():
        # DeePMD-kit divides the root of the mean by the mean of different numbers of atoms
        if len(set(mask.sum(1))) > 1 and name.startswith("rmse_global"):
            continue
        assert shown[name].item() == pytest.approx(
            value, rel=FLOAT32_COUNTS, nan_ok=True
        ), name


# a loss, its options, and the fitting network
ADDED_UP = {
    "dipole": (
        "tensor",
        {"pref": 0.7, "pref_atomic": 0.2, "enable_atomic_weight": True},
        {"type": "dipole"},
    ),
    "dos": (
        "dos",
        {
            f"{when}_pref_{term}": 0.5
            for when in ("start", "limit")
            for term in ("dos", "cdf", "acdf")
        },
        {"type": "dos", "numb_dos": 4},
    ),
    **{
        name: (
            "property",
            {"loss_func": name, "metric": ["mae", "rmse"]},
            {"type": "property", "property_name": "gap"},
        )
        for name in ("smooth_mae", "mse", "mape", "rmse")
    },
}


def labelled(names, chosen):
    """Return those frames that are chosen of four of different sizes, which lack labels in turn,
    with predictions.
    """
    rng, frames = np.random.default_rng(7), []
    for k, natoms in enumerate((2, 5, 4, 3)):
        about = {"types": rng.integers(0, 2, natoms)}
        draws = [
            {
                n: rng.normal(size=LABELS[n].shape_in_frame(natoms))
                for n in (*names, "atom_weight")
            }
            for _ in "pl"
        ]
        lacking = {1: names[0], 2: names[-1]}.get(k)
        frames.append(
            (
                {**about, **draws[0]},
                {**about, **{n: v for n, v in draws[1].items() if n != lacking}},
            )
        )
    return [frames[k] for k in chosen]


def evaluated(loss, names, chosen):
    """Return the batch of some frames, and the predictions for it."""
    guesses, labels = zip(*labelled(names, chosen))
    prediction = flat_batch(guesses, names=names).labels
    prediction[SPREAD] = torch.full((1, 1), 0.6, dtype=torch.float64)
    return flat_batch(labels, names=loss.labels), {
        name: v.requires_grad_() for name, v in prediction.items()
    }


def gradients(parts, names):
    """Return the gradients by the predictions for batches, of their atoms in the order of the
    files.
    """
    grads = [
        (name, batch, p[name].grad)
        for name in names
        for batch, p in parts
        if p[name].grad is not None
    ]
    return [
        (b.in_file_order(grad) if LABELS[name].per_atom else grad).numpy()
        for name, b, grad in grads
    ]


def measured(name, chosen, world=None):
    """Return the loss, its names, displayed values and gradients of some frames in one batch."""
    loss, names = loss_of(*ADDED_UP[name], world)
    batch, prediction = evaluated(loss, names, chosen)
    total, shown = loss(prediction, batch, 7e-4)
    total.backward()
    return (
        loss,
        names,
        {key: value.item() for key, value in shown.items()},
        gradients([(batch, prediction)], names),
    )


def on_rank(name):
    """Return the displayed values of all frames and the gradients of those of this rank."""
    with open_world("cpu", find_launch()) as world:
        return measured(name, ([0, 1, 2], [3])[world.rank], world)[2:]


@pytest.mark.parametrize("name", [name for name in ADDED_UP if name != "rmse"])
def test_batches_of_a_step_add_up_to_one_with_all_their_frames(name):
    loss, names, shown, expected = measured(name, range(4))
    parts = [evaluated(loss, names, chosen) for chosen in ([0], [1, 2], [3])]
    whole = LossOverBatches(loss, [batch for batch, _ in parts], 7e-4)
    sum(whole.add(prediction, batch) for batch, prediction in parts).backward()
    assert {
        key: value.item() for key, value in whole.displayed().items()
    } == pytest.approx(shown, rel=SAME_MATH)
    assert_gradients(gradients(parts, names), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDED_UP)
def test_two_ranks_have_the_loss_and_the_gradient_of_one_batch(name):
    _, _, shown, expected = measured(name, range(4))
    ranks = [ended.value for ended in run_ranks(2, on_rank, name)]
    for displayed, _ in ranks:
        assert displayed == pytest.approx(shown, rel=SAME_MATH)
    found = [
        part for of_rank in zip(*(parts for _, parts in ranks)) for part in of_rank
    ]
    assert_gradients(
        [part / 2 for part in found], expected
    )  # ranks average their gradients


def assert_gradients(found, expected):
    np.testing.assert_allclose(
        np.concatenate(found), np.concatenate(expected), rtol=SAME_MATH, atol=1e-14
    )


@pytest.mark.parametrize(
    ("kind", "options", "fitting"),
    [
        ("tensor", {"pref": 0.0, "pref_atomic": 1.0}, {"type": "dipole"}),
        (
            "dos",
            {
                "start_pref_ados": 1,
                "limit_pref_ados": 1,
                "start_pref_dos": 0,
                "limit_pref_dos": 0,
            },
            {"type": "dos", "numb_dos": 4},
        ),
    ],
)
def test_atoms_of_an_excluded_element_do_not_count_in_the_loss_of_atoms(
    kind, options, fitting
):
    """Neither their errors nor their number, in frames that have weights, too."""
    loss, (_, name) = loss_of(kind, options, fitting, excluded=[1])
    rng = np.random.default_rng(4)
    types = [np.array([0, 1, 0, 1, 1]), np.array([1, 0, 0])]
    shapes = [LABELS[name].shape_in_frame(len(of)) for of in types]
    weights = (0.5, 3.0)
    frames = [
        {"types": of, name: rng.normal(size=s), "weight": w}
        for of, s, w in zip(types, shapes, weights)
    ]
    batch = flat_batch(frames, names=(*loss.labels, "weight"))
    error = torch.tensor(rng.normal(size=batch.labels[name].shape))
    prediction = {name: batch.labels[name] + error}
    total, shown = loss(prediction, batch, 1e-3)
    counted = (batch.atom_type == 0).double()
    squares = error.square().mean(1)
    weight = torch.tensor(weights, dtype=torch.float64)[batch.atom_frame] * counted
    assert total.item() == pytest.approx(
        float((weight * squares).sum() / counted.sum()), rel=SAME_MATH
    )
    mean = float((counted * squares).sum() / counted.sum())
    assert next(
        v for k, v in shown.items() if "local" in k or "ados" in k
    ).item() == pytest.approx(mean**0.5)
    # metrics of atoms are over the same ones
    measured = Errors()
    measured.add({**prediction, COUNTED: counted}, batch)
    [quantity] = (error.name for error in LABELS[name].errors)
    assert measured.summary()[f"rmse_{quantity}"] == pytest.approx(
        mean**0.5, rel=SAME_MATH
    )


# ---- statistics

STATISTICS = dict(np.load(GOLDEN / "statistics.npz"))
# a bias that the input gives is for energies only; a type without labels of atoms is fitted to what
# the means of the others leave of those of frames, in DeePMD-kit as if these were not known
OTHERS = ("property_preset", "dos_missing_type")
SETS = {
    name: case
    for name, case in json.loads(str(STATISTICS["cases"])).items()
    if name not in OTHERS
}


@pytest.mark.parametrize("name", SETS)
def test_biases_and_spreads_are_those_of_deepmd_kit(name):
    label, with_frames, with_atoms, options = SETS[name]
    about = {
        "property_name": "band",
        "task_dim": 2,
        "intensive": options.get("intensive", False),
    }
    about |= {
        "type": "property",
        "distinguish_types": options.get("stats_distinguish_types", True),
    }
    fitting = {
        "polarizability": {"type": "polar"},
        "dos": {"type": "dos", "numb_dos": 4},
        "band": about,
    }[label]
    section = {
        "type_map": ["O", "H", "Na"],
        "descriptor": SECTIONS["se_e2_a"],
        "fitting_net": fitting,
    }
    config = model_config_from_dict(
        {**section, "atom_exclude_types": options.get("exclude", [])}
    )
    model, (of_frame, of_atom) = build_model(config), config.fitting_net.labels
    batches = []
    for system in sorted({*with_frames, *with_atoms}):
        types = STATISTICS[f"{system}_atype"]
        chosen = {of_frame: with_frames, of_atom: with_atoms}
        files = {
            of_frame: STATISTICS[f"{system}_{label}"],
            of_atom: STATISTICS[f"{system}_atom_{label}"],
        }
        files = {key: rows for key, rows in files.items() if system in chosen[key]}
        places = 1.3 * np.stack(
            np.unravel_index(np.arange(types.shape[1]), (2, 2, 2)), 1
        )
        frames = [
            Frame(places, t, None, {n: rows[k] for n, rows in files.items()})
            for k, t in enumerate(types)
        ]
        batches.append(collate(frames, model.layout))
    found = collect_statistics(model, config, batches)
    close(found.fit.bias, STATISTICS[f"{name}_bias"])
    if label == "band":
        close(found.fit.std, STATISTICS[f"{name}_std"])
    model.apply_statistics(found)
    close(model.out_bias[0].numpy(), STATISTICS[f"{name}_bias"])


# the labels of an atom of each element, which a model without network adds up, and options of the
# fitting network
DIAGONAL = np.eye(3).ravel()
EQUAL = dict.fromkeys(("O", "H", "Na"), (5.5, 0.0))
LAWS = {
    "energy": ({"O": -3.1, "H": 0.4, "Na": 7.0}, {}),
    "polar": (
        {"O": 2 * DIAGONAL, "H": 0.5 * DIAGONAL, "Na": DIAGONAL},
        {"type": "polar"},
    ),
    "dos": (
        {"O": [1.0, 0.0], "H": [0.2, 0.0], "Na": [3.0, 0.0]},
        {"type": "dos", "numb_dos": 2},
    ),
    "sum": ({"O": [5.5, 0.0], "H": [0.4, 0.0], "Na": [7.0, 0.0]}, {"intensive": False}),
    "mean": ({"O": [5.5, 0.0], "H": [0.4, 0.0], "Na": [7.0, 0.0]}, {"intensive": True}),
    "sum of equals": (EQUAL, {"distinguish_types": False}),
    "mean of equals": (EQUAL, {"distinguish_types": False, "intensive": True}),
}


@pytest.mark.parametrize("type_map", [["O", "H", "Na"], ["Na", "H", "O"]])
@pytest.mark.parametrize("excluded", ["", "H"])
@pytest.mark.parametrize("elements", [["OHH", "OHHH", "OHHNa", "H"], ["OHH"]])
@pytest.mark.parametrize("name", LAWS)
def test_a_model_without_network_explains_labels_that_are_sums_over_its_atoms(
    name, elements, excluded, type_map
):
    values, options = LAWS[name]
    fitting = (
        {"type": "property", "property_name": "band", "task_dim": 2}
        if "numb_dos" not in options
        else {}
    )
    fitting = options if options.get("type") else {**fitting, **options}
    fitting = fitting if name != "energy" else {}
    section = {
        "type_map": type_map,
        "descriptor": SECTIONS["se_e2_a"],
        "fitting_net": fitting,
    }
    left_out = [type_map.index(excluded)] if excluded else []
    config = model_config_from_dict({**section, "atom_exclude_types": left_out})
    model, of_frame = build_model(config), config.fitting_net.labels[0]
    frames = []
    for text in elements:
        names = re.findall("[A-Z][a-z]?", text)
        counted = [np.asarray(values[symbol]) for symbol in names if symbol != excluded]
        label = np.sum([0 * np.asarray(values["O"]), *counted], axis=0)
        if options.get("intensive"):
            label = label / max(len(counted), 1)
        types = np.array([type_map.index(symbol) for symbol in names])
        coord = np.arange(3.0 * len(names)).reshape(-1, 3)
        frames.append(Frame(coord, types, None, {of_frame: label}))
    batch = collate(frames, model.layout)
    model.apply_statistics(collect_statistics(model, config, [batch]))
    for parameter in model.fitting.parameters():
        parameter.data.zero_()
    np.testing.assert_allclose(
        model(batch)[of_frame].detach(), batch.labels[of_frame], rtol=0, atol=SAME_MATH
    )
    if config.fitting_net.type == "property":
        # the bias explains all, so that the unit of the loss is that of the labels
        assert (model.out_std == 1).all()


@pytest.mark.parametrize("intensive", [False, True])
@pytest.mark.parametrize("of_frames", [False, True])
@pytest.mark.parametrize("excluded", [[], ["H"]])
@pytest.mark.parametrize("type_map", [["O", "H", "Na"], ["Na", "H", "O"]])
def test_one_bias_of_all_elements_is_a_mean_also_with_labels_of_atoms(
    type_map, excluded, of_frames, intensive
):
    """Labels of frames count before those of atoms, and are not added to them."""
    fitting = {"type": "property", "property_name": "band", "task_dim": 1}
    fitting |= {"distinguish_types": False, "intensive": intensive}
    section = {
        "type_map": type_map,
        "atom_exclude_types": [type_map.index(name) for name in excluded],
        "descriptor": SECTIONS["se_e2_a"],
        "fitting_net": fitting,
    }
    config = model_config_from_dict(section)
    model, (of_frame, of_atom) = build_model(config), config.fitting_net.labels
    frames, coord = [], np.arange(9.0).reshape(-1, 3)
    symbols = ["O", "H", "H"]
    types = np.array([type_map.index(symbol) for symbol in symbols])
    counted = [symbol not in excluded for symbol in symbols]
    for value in (5.0, 8.0):
        of_atoms = np.array([[value], [value + 1], [value + 2]])
        labels = {of_atom: of_atoms}
        if of_frames:
            # another mean than that of the labels of atoms
            label = of_atoms[counted] - 1
            labels[of_frame] = label.mean(0) if intensive else label.sum(0)
        frames.append(Frame(coord, types, None, labels))
    statistics = collect_statistics(model, config, [collate(frames, model.layout)])
    expected = (6.5 if excluded else 7.5) - of_frames
    np.testing.assert_allclose(statistics.fit.bias, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", ["smooth_mae", "mae", "mse", "rmse"])
def test_the_loss_of_a_property_without_spread_is_finite(function):
    fitting = {"type": "property", "property_name": "band", "task_dim": 2}
    loss, (label, _) = loss_of("property", {"loss_func": function}, fitting)
    section = {
        "type_map": ["O", "H", "Na"],
        "descriptor": SECTIONS["se_e2_a"],
        "fitting_net": fitting,
    }
    model_config = model_config_from_dict(section)
    model = build_model(model_config)
    batch = collate(
        [Frame(np.eye(3), np.zeros(3, int), None, {label: np.array([3.0, 0.0])})],
        model.layout,
    )
    model.apply_statistics(collect_statistics(model, model_config, [batch]))
    for spread in (model.out_std.clone(), torch.zeros_like(model.out_std)):
        model.out_std.copy_(spread)
        total, _ = loss(model(batch), batch, 1e-3)
        gradients = torch.autograd.grad(
            total, list(model.fitting.parameters()), allow_unused=True
        )
        assert torch.isfinite(total)
        assert all(
            torch.isfinite(gradient).all()
            for gradient in gradients
            if gradient is not None
        )


# ---- mistakes and data

DIPOLE = {
    "model.fitting_net.type": "dipole",
    "loss": {"type": "tensor", "pref": 1, "pref_atomic": 0},
}
GAP = {
    "model.fitting_net": {"type": "property", "property_name": "gap"},
    "loss": {"type": "property"},
}
VALIDATED = {"validating.full_validation": True}
TABLE = {
    "model.use_srtab": [[r, 0, 0, 0] for r in (1, 2, 3)],
    "model.sw_rmin": 1,
    "model.sw_rmax": 2,
}
# an input, how it is spoiled, the only message
WRONG = [
    (
        DIPOLE,
        {"loss": {}},
        'loss.type = "ener": expected "loss": {"type": "tensor", "pref": 1, "pref_atomic": 0}',
    ),
    (
        GAP,
        {"loss": {"type": "dos"}},
        'loss.type = "dos": expected "loss": {"type": "property"}',
    ),
    (
        {},
        {"loss": {"type": "dos"}},
        'loss.type ... expected "loss": {"type": "ener"}, that of fitting_net.type ener.',
    ),
    (DIPOLE, {"loss.pref": 0}, "loss: every weight is 0 ... Set one of them."),
    (
        DIPOLE,
        {"model.descriptor.type": "se_e2_r"},
        "model.fitting_net.type: the descriptor se_e2_r has no vectors of which a dipole is made. "
        "Use se_e2_a, se_atten",
    ),
    (
        DIPOLE,
        {"model.descriptor": {"type": "hybrid", "list": [{"type": "se_e2_r"}]}},
        "model.fitting_net ... hybrid",
    ),
    (
        DIPOLE,
        {"model.fitting_net.sel_type": [0, 2]},
        "model.fitting_net.sel_type: type 2 does not exist, expected 0",
    ),
    (
        DIPOLE,
        {"model.fitting_net.sel_type": 1, "model.atom_exclude_types": [1]},
        "model.atom_exclude_types ... every",
    ),
    (
        DIPOLE,
        {"training.enable_compile": True},
        "training.enable_compile ... dipole are not compiled. Set it to",
    ),
    (
        DIPOLE,
        {"validating.compiled_infer": True},
        "validating.compiled_infer = true: models ... Set it to false.",
    ),
    (
        DIPOLE,
        {"optimizer": {"type": "LKF"}},
        'loss.type = "tensor": LKF fits energies ... Use another optimizer.',
    ),
    (
        DIPOLE,
        {"model.preset_out_bias": {"energy": [1, 2]}},
        "model.preset_out_bias: is about energies, and fitting_net.type dipole has none. Remove "
        "it.",
    ),
    (DIPOLE, TABLE, "model.use_srtab: is about energies"),
    (
        DIPOLE,
        {"training.change_bias_after_training": True},
        "training.change_bias_after_training ... Set it to false.",
    ),
    (
        DIPOLE,
        {**VALIDATED, "validating.early_stop": {"patience": 1, "metric": "E:MAE"}},
        'validating.early_stop.metric = "E:MAE": nothing of this is predicted. Choose one of D, W.',
    ),
    (
        {},
        {**VALIDATED, "validating.validation_metric": "D:MAE"},
        "validating ... Choose one of E, F, V, S.",
    ),
    (
        DIPOLE,
        {"model.fitting_net.type": "polar", "model.fitting_net.scale": [1.0]},
        "model.fitting_net.scale = [1.0]: has length 1, expected 2, one for each of type_map",
    ),
    *(
        (
            GAP,
            {"model.fitting_net.property_name": name},
            f"model.fitting_net.property_name = {json.dumps(name)}: exp",
        )
        for name in (
            "force",
            "atomic_weight",
            "coord",
            "coords",
            "cells",
            "energies",
            "virials",
            "dos",
            "atom_gap",
            "a b",
        )
    ),
    (
        GAP,
        {"loss.loss_func": "rmse", "training.accumulate": 2},
        'training.accumulate = 2: loss_func "rmse" ... Use 1,',
    ),
]


@pytest.mark.parametrize(("given", "changes", "message"), WRONG)
def test_a_mistake_is_one_line_that_says_what_to_do(given, changes, message):
    assert_refused(spoiled(copy.deepcopy({**given, **changes})), message)


@pytest.mark.parametrize("is_hdf5", [False, True])
def test_labels_of_atoms_may_have_rows_of_the_selected_ones_only(is_hdf5, tmp_path):
    system = write_system(tmp_path / "data", frames=3, natoms=5)
    is_oxygen, file = (
        np.loadtxt(system / "type.raw") == 0,
        system / "set.000" / "atomic_dipole.npy",
    )
    atomic = np.random.default_rng(0).normal(size=(3, 5, 3)) * is_oxygen[:, None]
    section = spoiled(
        {
            **copy.deepcopy(DIPOLE),
            "model.type_map": ["H", "O"],
            "model.fitting_net.sel_type": 1,
        }
    )["model"]
    spec = ReadSpec.of_model(model_config_from_dict(section), ("dipole", "atom_dipole"))
    for rows in (atomic, atomic[:, is_oxygen]):
        np.save(file, rows.reshape(3, -1))
        place = f"{hdf5(system, tmp_path / 'data.h5')}#/w" if is_hdf5 else str(system)
        (source,) = open_systems([place], spec, None, "systems")
        np.testing.assert_array_equal(source.frame(1).labels["atom_dipole"], atomic[1])
        (chunk,) = source.chunks(["atom_dipole"])
        np.testing.assert_array_equal(chunk.arrays["atom_dipole"], atomic)
    np.save(file, np.zeros((3, 6)))
    np.save(file.with_name("dipole.npy"), np.zeros((3, 4)))
    with pytest.raises(DataError) as caught:
        open_systems([str(system)], spec, None, "systems")
    ends = [problem.partition("set.000/")[2] for problem in caught.value.problems]
    assert ends == [
        "dipole.npy: shape (3, 4), expected (3, 3).",
        "atomic_dipole.npy: shape (3, 6), expected (3, 15) for 5 atoms, or (3, 9) for those of "
        "sel_type.",
    ]
