"""The Python interface: shapes in, numbers out, and one message for each wrong array."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import toy_frame
from infer_models import write_run

import deepmd_ema
from deepmd_ema.data.loader import ATOMS_AT_ONCE
from deepmd_ema.errors import CheckpointError, UserError
from deepmd_ema.geometry import KeptPairs
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential

EXACT = {"rtol": 0, "atol": 0}
SAME_MATH = {"rtol": 1e-11, "atol": 1e-11}
NATOMS = 12


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def potential(run):
    return Potential(run[0], device="cpu")


@pytest.fixture(scope="module")
def frames():
    rng = np.random.default_rng(3)
    made = [toy_frame(rng, NATOMS) for _ in range(3)]
    return np.stack([m[0] for m in made]), made[0][1], np.stack([m[2] for m in made])


def same(one, two, tolerance=EXACT):
    for name in ("energy", "force", "virial", "atom_energy"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), **tolerance, err_msg=name)


def test_results_are_float64_arrays_of_the_promised_shapes(potential, frames):
    found = potential.evaluate(*frames)
    assert found.energy.shape == (3,)
    assert found.force.shape == (3, NATOMS, 3)
    assert found.virial.shape == (3, 9)
    assert found.atom_energy.shape == (3, NATOMS)
    for value in (found.energy, found.force, found.virial, found.atom_energy):
        assert isinstance(value, np.ndarray)
        assert value.dtype == np.float64
    np.testing.assert_allclose(found.atom_energy.sum(1), found.energy, **SAME_MATH)
    np.testing.assert_allclose(found.force.sum(1), 0, atol=1e-10)


def test_every_accepted_shape_means_the_same(potential, frames):
    coord, types, box = frames
    expected = potential.evaluate(coord, types, box)
    symbols = ["OH"[t] for t in types]
    same(potential.evaluate(coord.reshape(3, -1), types.tolist(), box.reshape(3, 9)), expected)
    same(potential.evaluate(coord, symbols, box), expected)
    same(potential.evaluate(coord, np.tile(types, (3, 1)), box), expected)
    one = potential.evaluate(coord[0], types, box[0])
    same(potential.evaluate(coord[0].ravel(), symbols, box[0].ravel()), one)
    same(potential.evaluate(coord[:1].tolist(), types, box[:1].tolist()), one)
    assert one.force.shape == (1, NATOMS, 3)
    np.testing.assert_allclose(one.energy, expected.energy[:1], **SAME_MATH)


def test_chunks_do_not_change_results(potential, frames, monkeypatch):
    whole = potential.evaluate(*frames)
    for most in (1, 2 * NATOMS):
        monkeypatch.setitem(ATOMS_AT_ONCE, "cpu", most)
        same(potential.evaluate(*frames), whole, SAME_MATH)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0, 0, 0]], [-1]), r"-1 is no place in type_map \['O', 'H'\] \(from 0\). Leave virtual atoms out"),
        (([[0, 0, 0]], [2]), "2 is no place in type_map"),
        (([[0, 0, 0]], ["o"]), "element 'o' is not in the model. Did you mean O"),
        (([[0, 0, 0]], []), "at least one atom"),
        (([[0, 0, 0]], [0, 0]), r"coord: shape \(1, 3\), expected \(F, 2, 3\), \(F, 6\) or \(2, 3\) for 2 atoms"),
        (([[0, 0, np.nan]], [0]), r"coord: \[0, 2\] is not a finite number"),
        (([[0, 0, 0]], [0], [1, 1, 1]), r"box: shape \(3,\), expected \(1, 3, 3\)"),
        (([[0, 0, 0]], [0], np.zeros(9)), "box: frame 0 has a cell without volume"),
        (([[0, 0, 0]], [0], None, None, [1.0]), "aparam: given, but this model takes none"),
    ],
)
def test_a_wrong_array_gets_one_message(potential, arguments, message):
    with pytest.raises(UserError, match=message):
        potential.evaluate(*arguments)


def test_parameters_of_frames_and_atoms_reach_the_model(tmp_path, frames):
    coord, types, box = frames
    path, _ = write_run(tmp_path, model__fitting_net__numb_fparam=2, model__fitting_net__numb_aparam=1)
    potential = Potential(path)
    frame, atom = np.arange(6.0).reshape(3, 2), np.linspace(0, 1, 3 * NATOMS).reshape(3, NATOMS, 1)
    found = potential.evaluate(coord, types, box, frame, atom)
    same(potential.evaluate(coord, types, box, frame, atom.reshape(3, NATOMS)), found)
    single = potential.evaluate(coord[1], types, box[1], frame[1], atom[1])
    np.testing.assert_allclose(single.energy, found.energy[1:2], **SAME_MATH)
    everywhere = potential.evaluate(coord, types, box, frame[1], atom[1])
    np.testing.assert_allclose(everywhere.energy[1], found.energy[1], **SAME_MATH)
    assert abs(everywhere.energy[0] - found.energy[0]) > 1e-6
    with pytest.raises(UserError, match="fparam: this model needs 2 numbers per frame"):
        potential.evaluate(coord, types, box, aparam=atom)
    with pytest.raises(UserError, match="aparam: this model needs 12 x 1 numbers per frame"):
        potential.evaluate(coord, types, box, frame)
    with pytest.raises(UserError, match=r"fparam: shape \(\), expected \(3, 2\) or \(2,\)"):
        potential.evaluate(coord, types, box, 1.0, atom)


def test_the_package_offers_the_class_and_its_facts(run):
    potential = deepmd_ema.Potential(run[0].parent)
    assert potential.type_map == ("O", "H")
    assert potential.rcut == 4.0
    assert potential.info.step == 7
    with pytest.raises(AttributeError, match="no attribute 'Potentail'"):
        deepmd_ema.Potentail  # noqa: B018


def test_the_average_of_a_training_checkpoint_is_the_averaged_file(run, frames):
    live, averaged = run
    inside = load_model(live, use_average=True)
    same(Potential(inside).evaluate(*frames), Potential(averaged).evaluate(*frames))
    assert abs(Potential(live).evaluate(*frames).energy - Potential(inside).evaluate(*frames).energy).max() > 1e-6
    assert inside.info.describe() == load_model(averaged).info.describe()
    assert (
        inside.info.describe()
        == "averaged weights (ema) of step 7: decay 0.99, 7 updates, looks back 4.5 steps on average"
    )
    assert load_model(live).info.describe() == "live weights of step 7"
    assert load_model(averaged, average="ema").info.weights == "ema"


def test_an_average_that_is_not_there_is_an_error(tmp_path, run):
    live, _ = write_run(tmp_path, averages=False)
    with pytest.raises(CheckpointError, match=r"no averaged weights in this checkpoint: training.enable_ema was false"):
        load_model(live, use_average=True)
    with pytest.raises(CheckpointError, match=r"no average is called 'slow'. Give --average one of: ema"):
        load_model(run[0], average="slow")
    with pytest.raises(CheckpointError, match="holds the weights 'ema', not the average 'slow'"):
        load_model(run[1], average="slow")


@pytest.mark.parametrize("name", ["model.ckpt-7.pt", "model.ckpt-7", "model.ckpt.pt", "checkpoint", "."])
def test_a_checkpoint_is_found_by_any_of_its_names(run, name):
    assert load_model(run[0].parent / name).info.step == 7


def _with_table(tmp_path):
    """Return a potential with a table of pair energies from 0.3 angstrom."""
    rows = [[r, *[0.5 * (4 - r) ** 3] * 3] for r in np.linspace(0.3, 4.0, 38)]
    options = {"use_srtab": rows, "sw_rmin": 0.7, "sw_rmax": 2.2, "smin_alpha": 0.15}
    return Potential(write_run(tmp_path, **{f"model__{name}": value for name, value in options.items()})[0], "cpu")


@pytest.mark.parametrize("skin", [None, 1.0])
def test_atoms_in_one_place_are_named(potential, frames, skin):
    """Energies and forces were nan without a word."""
    coord, types, box = frames[0].copy(), frames[1], frames[2]
    coord[1, 7] = coord[1, 2] + box[1, 0]
    kept = None if skin is None else KeptPairs(skin)
    words = r"frame 1 \(from 0\): atoms (2|7) \([OH]\) and (2|7) \([OH]\) are \S+ angstrom apart, and the model has no"
    with pytest.raises(UserError, match=words):
        potential.evaluate(coord, types, box, kept=kept)


def test_atoms_nearer_than_a_table_begins_are_named(tmp_path, frames):
    potential = _with_table(tmp_path)
    coord, types, box = frames[0][0].copy(), frames[1], frames[2][0]
    coord[7] = coord[2] + [0.25, 0, 0]
    with pytest.raises(UserError, match=r"\) are 0.25 angstrom apart, and the table of .* covers 0.3 to 4 angstrom"):
        potential.evaluate(coord, types, box)
    coord[7] = coord[2] + [0.35, 0, 0]
    assert np.isfinite(potential.evaluate(coord, types, box).energy).all()
