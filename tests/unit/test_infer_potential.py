"""The Python interface: shapes, one message for each wrong array, kept neighbors, copies, threads
and processes.
"""

import copy
import os
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers import toy_frame
from infer_models import let_slots_differ, write_run
from infer_models import potential as potential
from infer_models import run as run
from toy_models import TABLE, TRICLINIC, toy_atoms, toy_model

import deepmd_ema
from deepmd_ema.data.loader import ATOMS_AT_ONCE
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.geometry import KeptPairs
from deepmd_ema.infer.load import LoadedModel, Provenance, load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.model.tabulated import interpolations_of

EXACT = {"rtol": 0, "atol": 0}
SAME_MATH = {"rtol": 1e-11, "atol": 1e-11}
NATOMS = 12


@pytest.fixture(scope="module")
def frames():
    rng = np.random.default_rng(3)
    made = [toy_frame(rng, NATOMS) for _ in range(3)]
    return np.stack([m[0] for m in made]), made[0][1], np.stack([m[2] for m in made])


def potential_of(*toy, **changes):
    """Return the potential of a toy model."""
    config, model = toy_model(*toy, **changes)
    return Potential(
        LoadedModel(model, config, Provenance("toy", "frozen")), device="cpu"
    )


def same(one, two, tolerance=EXACT):
    for name in ("energy", "force", "virial", "atom_energy"):
        np.testing.assert_allclose(
            getattr(one, name), getattr(two, name), **tolerance, err_msg=name
        )


def test_every_accepted_shape_means_the_same(potential, frames, monkeypatch):
    coord, types, box = frames
    expected = potential.evaluate(coord, types, box)
    shapes = {
        "energy": (3,),
        "force": (3, NATOMS, 3),
        "virial": (3, 9),
        "atom_energy": (3, NATOMS),
    }
    assert {name: value.shape for name, value in vars(expected).items()} == shapes
    assert all(value.dtype == np.float64 for value in vars(expected).values())
    np.testing.assert_allclose(
        expected.atom_energy.sum(1), expected.energy, **SAME_MATH
    )
    symbols = ["OH"[t] for t in types]
    same(
        potential.evaluate(coord.reshape(3, -1), types.tolist(), box.reshape(3, 9)),
        expected,
    )
    same(potential.evaluate(coord, np.tile(types, (3, 1)), box), expected)
    one = potential.evaluate(coord[0], types, box[0])
    same(potential.evaluate(coord[0].ravel(), symbols, box[0].ravel()), one)
    np.testing.assert_allclose(one.energy, expected.energy[:1], **SAME_MATH)
    for most in (1, 2 * NATOMS):  # in portions
        monkeypatch.setitem(ATOMS_AT_ONCE, "cpu", most)
        same(potential.evaluate(*frames), expected, SAME_MATH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([[0, 0, 0]], [-1]),
            r"-1 is no place in type_map \['O', 'H'\] \(from 0\). Leave virtual atoms out",
        ),
        (([[0, 0, 0]], ["o"]), "element 'o' is not in the model. Did you mean O"),
        (([[0, 0, 0]], []), "at least one atom"),
        (
            ([[0, 0, 0]], [0, 0]),
            r"coord: shape \(1, 3\), expected \(F, 2, 3\), \(F, 6\) or \(2, 3\) for 2 atoms",
        ),
        (([[0, 0, np.nan]], [0]), r"coord: \[0, 2\] is not a finite number"),
        (([[0, 0, 0]], [0], [1, 1, 1]), r"box: shape \(3,\), expected \(1, 3, 3\)"),
        (([[0, 0, 0]], [0], np.zeros(9)), "box: frame 0 has a cell without volume"),
        (
            ([[0, 0, 0]], [0], None, None, [1.0]),
            "aparam: given, but this model takes none",
        ),
    ],
)
def test_a_wrong_array_gets_one_message(potential, arguments, message):
    with pytest.raises(UserError, match=message):
        potential.evaluate(*arguments)


def test_parameters_of_frames_and_atoms_reach_the_model(tmp_path, frames):
    coord, types, box = frames
    path, _ = write_run(
        tmp_path, model__fitting_net__numb_fparam=2, model__fitting_net__numb_aparam=1
    )
    potential = Potential(path)
    frame, atom = (
        np.arange(6.0).reshape(3, 2),
        np.linspace(0, 1, 3 * NATOMS).reshape(3, NATOMS, 1),
    )
    found = potential.evaluate(coord, types, box, frame, atom)
    single = potential.evaluate(
        coord[1], types, box[1], frame[1], atom[1], kept=KeptPairs(1.0)
    )
    np.testing.assert_allclose(single.energy, found.energy[1:2], **SAME_MATH)
    everywhere = potential.evaluate(coord, types, box, frame[1], atom[1])
    np.testing.assert_allclose(everywhere.energy[1], found.energy[1], **SAME_MATH)
    assert abs(everywhere.energy[0] - found.energy[0]) > 1e-6
    with pytest.raises(UserError, match="fparam: this model needs 2 numbers per frame"):
        potential.evaluate(coord, types, box, aparam=atom)
    with pytest.raises(
        UserError, match="aparam: this model needs 12 x 1 numbers per frame"
    ):
        potential.evaluate(coord, types, box, frame)
    with pytest.raises(
        UserError, match=r"fparam: shape \(\), expected \(3, 2\) or \(2,\)"
    ):
        potential.evaluate(coord, types, box, 1.0, atom)


def test_the_package_offers_the_class_and_its_facts(run):
    potential = deepmd_ema.Potential(run[0].parent)
    assert potential.type_map == ("O", "H")
    assert potential.rcut == 4.0
    with pytest.raises(AttributeError, match="no attribute 'Potentail'"):
        deepmd_ema.Potentail  # noqa: B018
    for name in ("model.ckpt-7.pt", "model.ckpt-7", "model.ckpt.pt", "checkpoint", "."):
        assert load_model(run[0].parent / name).info.step == 7


def test_the_average_of_a_training_checkpoint_is_the_averaged_file(
    run, frames, tmp_path
):
    live, averaged = run
    inside = load_model(live, use_average=True)
    same(Potential(inside).evaluate(*frames), Potential(averaged).evaluate(*frames))
    assert (
        abs(
            Potential(live).evaluate(*frames).energy
            - Potential(inside).evaluate(*frames).energy
        ).max()
        > 1e-6
    )
    text = (
        "averaged weights (ema) of step 7: decay 0.99, 7 updates, looks back 4.5 steps "
        "on average"
    )
    assert inside.info.describe() == load_model(averaged).info.describe() == text
    assert load_model(live).info.describe() == "live weights of step 7"
    with pytest.raises(
        CheckpointError,
        match=r"no averaged weights in this checkpoint: training.enable_ema was false",
    ):
        load_model(write_run(tmp_path, averages=False)[0], use_average=True)
    with pytest.raises(
        CheckpointError,
        match=r"no average is called 'slow'. Give --average one of: ema",
    ):
        load_model(live, average="slow")
    with pytest.raises(
        CheckpointError, match="holds the weights 'ema', not the average 'slow'"
    ):
        load_model(averaged, average="slow")


def test_atoms_in_one_place_or_nearer_than_a_table_begins_are_named(potential, frames):
    """Energies and forces were nan without a word."""
    coord, types, box = frames[0].copy(), frames[1], frames[2]
    coord[1, 7] = coord[1, 2] + box[1, 0]
    words = (
        r"frame 1 \(from 0\): atoms (2|7) \([OH]\) and (2|7) \([OH]\) are \S+ angstrom apart, and "
        r"the model has no"
    )
    for kept in (None, KeptPairs(1.0)):
        with pytest.raises(UserError, match=words):
            potential.evaluate(coord, types, box, kept=kept)
    table = potential_of("se_e2_a", **TABLE)
    with pytest.raises(
        UserError,
        match=r"\) are 0.25 angstrom apart, and the table of .* covers 0.3 to 4 angstrom",
    ):
        table.evaluate([[0.0, 0, 0], [0.25, 0, 0]], [0, 1])
    assert np.isfinite(table.evaluate([[0.0, 0, 0], [0.35, 0, 0]], [0, 1]).energy).all()
    with pytest.raises(
        UserError, match=r"atom 0 \(O\) and an image of it are 0.29 angstrom apart"
    ):
        table.evaluate([[0.0, 0, 0]], [0], np.diag([0.29, 4.0, 4.0]))


def test_numbers_that_are_not_finite_are_reported(run, frames):
    loaded = load_model(run[0])
    loaded.model.out_bias.fill_(np.nan)
    with pytest.raises(
        UserError, match="the model gives no finite energies and forces"
    ):
        Potential(loaded, device="cpu").evaluate(*frames)


# ---- neighbors that are kept between frames

ATTENTION = {
    "type": "se_atten",
    "rcut": 4.0,
    "rcut_smth": 0.5,
    "sel": 100,
    "neuron": [4, 8],
    "attn_layer": 0,
}
BY_TYPE = {
    "type": "se_e2_a",
    "rcut": 4.0,
    "rcut_smth": 0.5,
    "sel": [60, 60],
    "neuron": [4, 8],
    "axis_neuron": 2,
}
KEPT = {
    "by_type": {},
    "by_distance": {"model__descriptor": ATTENTION},
    "excluded_types": {"model__descriptor__exclude_types": [[0, 1]]},
    "excluded_pairs": {"model__pair_exclude_types": [[0, 1]]},
    "few_slots": {"model__descriptor__sel": [4, 60]},
    # parts that read the first slots of the list, which the nearest neighbors must be in
    "few_slots_of_a_part": {
        "model__descriptor": {
            "type": "hybrid",
            "list": [ATTENTION, ATTENTION | {"rcut": 3.0, "sel": 2}],
        }
    },
    "few_slots_of_a_part_by_type": {
        "model__descriptor": {
            "type": "hybrid",
            "list": [BY_TYPE, BY_TYPE | {"rcut": 3.0, "sel": [3, 4]}],
        }
    },
    # of a part of a part
    "few_slots_inside_of_a_part": {
        "model": {
            "type": "linear_ener",
            "type_map": ["O", "H"],
            "weights": "sum",
            "models": [
                {
                    "descriptor": {
                        "type": "hybrid",
                        "list": [ATTENTION, ATTENTION | {"rcut": 3.0, "sel": 2}],
                    },
                    "fitting_net": {"neuron": [4]},
                },
                {"descriptor": ATTENTION, "fitting_net": {"neuron": [4]}},
            ],
        }
    },
}


@pytest.mark.parametrize("case", KEPT)
def test_whatever_changes_between_two_frames_is_noticed(tmp_path, case):
    """Also by a list of its own for each image of a band, and if slots have means of their own, as
    files may have.
    """
    loaded = load_model(write_run(tmp_path, **KEPT[case])[0])
    for slots_differ in (False, True):
        if slots_differ:
            let_slots_differ(loaded.model)
        potential, rng = Potential(loaded, device="cpu"), np.random.default_rng(4)
        coord, types, box = toy_frame(rng, NATOMS)
        kept, other = KeptPairs(1.0), KeptPairs(1.0)
        teleported = coord.copy()
        teleported[[0, 5]] = coord[[5, 0]]
        for frame in (
            (coord, types, box),
            (coord, types[::-1], box),
            (coord, types, box),
            (coord, types, 1.01 * box),
            (coord, types, None),
            (coord + 0.01, types, None),
            (coord[1:], types[1:], box),
            (coord, types, box),
            (coord + rng.normal(scale=0.05, size=coord.shape), types, box),
            (coord + rng.uniform(-0.25, 0.25, size=coord.shape), types, box),
            (teleported, types, box),
            (coord + box[0], types, box),
            (30.0 * np.arange(NATOMS)[:, None] * np.eye(3)[0], types, None),
            (
                coord,
                types,
                0.6 * box,
            ),  # smaller than the cutoff: atoms see their images
        ):
            for one, (c, t, b) in ((kept, frame), (other, (coord, types, box))):
                found, fresh = (
                    potential.evaluate(c, t, b, kept=one),
                    potential.evaluate(c, t, b),
                )
                same(
                    found,
                    fresh,
                    {"rtol": 0, "atol": 1e-12 * max(1.0, np.abs(fresh.energy).max())},
                )


# ---- copies, threads, processes


@pytest.mark.parametrize(
    "make",
    [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize("descriptor", ["se_e2_a", "dpa2"])
def test_a_potential_that_was_used_can_be_copied(descriptor, make):
    """Neither could be pickled, and tables that dpa2 makes inside torch.func could not be
    copied.
    """
    potential, kept = (
        potential_of(descriptor, {"interpolate": "always"}),
        KeptPairs(1.0),
    )
    frame = (*toy_atoms(0, 9), TRICLINIC)
    known = potential.evaluate(*frame, kept=kept)
    assert all(
        interpolation.tables.made
        for interpolation in interpolations_of(potential._model).values()
    )
    made = make(potential)
    same(made.evaluate(*frame, kept=make(kept)), known)
    made._model.out_bias.add_(1.0)
    same(potential.evaluate(*frame, kept=kept), known)


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, lambda: torch.autocast("cpu"), lambda: torch.device("meta")],
)
def test_modes_of_torch_change_nothing(tmp_path, mode):
    single = {
        "model__descriptor__precision": "float32",
        "model__fitting_net__precision": "float32",
    }
    path, _ = write_run(tmp_path, model__descriptor__interpolate="always", **single)
    outside, frame = (
        Potential(path, device="cpu"),
        toy_frame(np.random.default_rng(3), NATOMS),
    )
    known = outside.evaluate(*frame)
    with mode():
        inside = Potential(path, device="cpu")
        same(inside.evaluate(*frame), known)
        same(outside.evaluate(*frame), known)
    same(inside.evaluate(*frame), known)


@pytest.mark.parametrize("interpolate", ["always", "never"])
def test_four_threads_with_one_potential_get_the_numbers_of_one(interpolate):
    shared = potential_of("se_e2_a", {"interpolate": interpolate})
    systems = [
        [(coord + 0.01 * step, types, TRICLINIC) for step in range(8)]
        for coord, types in map(toy_atoms, range(4))
    ]
    known = [
        [
            potential_of("se_e2_a", {"interpolate": interpolate}).evaluate(*f)
            for f in one
        ]
        for one in systems
    ]
    begin = threading.Barrier(4)

    def evaluate(frames):
        kept = KeptPairs(1.0)
        begin.wait()  # together, also where the first call prepares something
        return [
            (shared.evaluate(*frame), shared.evaluate(*frame, kept=kept))
            for frame in frames
        ]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(evaluate, systems))
    for expected, of_thread in zip(known, found):
        for one, both in zip(expected, of_thread):
            for prediction in both:
                same(one, prediction, {"rtol": 0, "atol": 1e-10})


FORKED = """
import os, sys, numpy, torch
from deepmd_ema.infer.potential import Potential
torch.set_num_threads(2)
potential = Potential(sys.argv[1], device="cpu")
coord, types = numpy.random.default_rng(0).uniform(0, 9, (300, 3)), [0, 1] * 150
known = potential.evaluate(coord, types, 10 * numpy.eye(3)).energy
torch.randn(1000, 1000).matmul(torch.randn(1000, 1000)).tanh().sum()
child = os.fork()
if child == 0:
    found = potential.evaluate(coord, types, 10 * numpy.eye(3)).energy
    os._exit(0 if abs(found - known).max() < 1e-2 else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_process_that_forks_evaluates_with_one_thread(run):
    """It waited for threads that only its parent has."""
    done = subprocess.run(
        [sys.executable, "-c", FORKED, run[0]],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "torch computes with one thread here. Start processes with" in done.stderr
