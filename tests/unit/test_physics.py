"""``dp-ema test --physics``: each quantity on a surface whose answer is known, and the command."""

import json

import numpy as np
import pytest
from helpers import write_system
from infer_models import write_run

from deepmd_ema.cli import main
from deepmd_ema.commands.physics import (
    FRICTION,
    PhysicsOptions,
    Surface,
    physics_of,
    run_dynamics,
    scan_bonds,
    scan_cutoff,
    shortest_distances,
)
from deepmd_ema.data.source import Frame
from deepmd_ema.geometry import find_pairs_once
from deepmd_ema.infer.potential import Prediction

WELL, RATE, LENGTH = 1.0, 1.5, 2.0  # eV, 1/angstrom, angstrom: of Morse's potential


def morse(r):
    """Return energy and its derivative."""
    decay = np.exp(-RATE * (r - LENGTH))
    return WELL * (decay**2 - 2 * decay), 2 * WELL * RATE * (decay - decay**2)


def with_bump(r):
    """Return Morse's energy with a ripple at 2.3 angstrom, and its derivative."""
    energy, slope = morse(r)
    ripple = 0.3 * np.exp(-(((r - 2.3) / 0.05) ** 2))
    return energy + ripple, slope - 2 * (r - 2.3) / 0.05**2 * ripple


def with_hole(r):
    """Return an energy without a wall, and its derivative."""
    return -2.0 / (r + 0.01), 2.0 / (r + 0.01) ** 2


class PairModel:
    """A model that is a sum over pairs."""

    type_map = ("Cu",)

    def __init__(self, pair=morse, rcut=6.0):
        self.pair, self.rcut = pair, rcut

    def evaluate(self, coord, types, box=None, fparam=None, aparam=None, kept=None):
        """Return energies and forces; virials are not needed."""
        energies, forces = [], []
        for frame in np.asarray(coord):
            i, j, vector, r = find_pairs_once(frame, box, self.rcut)
            energy, slope = self.pair(r)
            force = np.zeros_like(frame)
            push = (slope / r)[:, None] * vector
            np.add.at(force, i, push)
            np.add.at(force, j, -push)
            energies.append(energy.sum())
            forces.append(force)
        return Prediction(
            np.array(energies),
            np.array(forces),
            np.zeros((len(energies), 9)),
            np.zeros((1, 1)),
        )


def line(*places):
    """Return a frame of copper atoms on a line, at these places."""
    coord = np.zeros((len(places), 3))
    coord[:, 0] = places
    return Frame(coord, np.zeros(len(places), np.int64))


# ---- dynamics


def test_velocity_verlet_keeps_the_energy_of_a_conservative_model():
    found = run_dynamics(
        Surface(PairModel(), line(0, 2.1, 4.2)), np.zeros((1, 1)), 300.0, 1.0, 300, 3
    )
    assert not found.failure
    assert found.time == pytest.approx(0.3)
    assert abs(found.drift) < 1e-3
    assert 0 < found.spread < 1e-3


def test_a_run_with_a_wall_lasts_and_one_with_a_hole_fails_with_its_reason():
    good, bad = (
        run_dynamics(
            Surface(PairModel(pair), line(0, 2.1, 4.2)),
            np.array([[1.2]]),
            600.0,
            1.0,
            300,
            3,
            FRICTION,
        )
        for pair in (morse, with_hole)
    )
    assert (good.failure, good.time) == ("", pytest.approx(0.3))
    assert 0 < bad.time < 0.3
    assert "Cu-Cu at" in bad.failure or "eV/Å" in bad.failure or " K" in bad.failure


# ---- scans


def test_a_morse_bond_has_one_well_and_a_ripple_adds_two_extrema():
    shortest = np.array([[1.9]])
    for pair, number in ((morse, 0), (with_bump, 2)):
        (scan,) = scan_bonds(Surface(PairModel(pair), line(0, 2.0)), shortest, 0.75)
        assert scan.elements == ("Cu", "Cu")
        assert scan.distance[[0, -1]] == pytest.approx([0.75 * 1.9, 1.25 * 2.0])
        assert scan.energy == pytest.approx(pair(scan.distance)[0])
        assert scan.extrema == number


def test_a_truncated_energy_jumps_at_the_cutoff_by_its_value_there():
    rows = scan_cutoff(Surface(PairModel(rcut=4.0), line(0, 3.9)))
    energy_jump, force_jump, force_error = (1e-3 * row.value for row in rows)
    energy, slope = morse(np.array(4.0))
    assert energy_jump == pytest.approx(abs(energy), rel=1e-3)
    assert force_jump == pytest.approx(abs(slope), rel=1e-3)
    assert force_error > 1


# ---- report


def test_the_report_names_what_fails():
    frames = [line(0, 2.0), line(0, 1.9)]
    assert shortest_distances(frames, 1, 6.0) == pytest.approx(np.array([[1.9]]))
    for steps, verdict in ((50, None), (PhysicsOptions().md_steps, True)):
        good = physics_of(PairModel(rcut=12.0), frames, PhysicsOptions(md_steps=steps))
        assert steps != 50 or not good.failed
        assert (
            "the dynamics are too short for a verdict, which takes 1 ps" in good.text()
        ) == (verdict is None)
        verdicts = [
            row.ok
            for row in good.rows
            if row.quantity.startswith(("NVE", "time to failure"))
        ]
        assert all((ok is None) == (verdict is None) for ok in verdicts)
    bad = physics_of(PairModel(with_bump), frames, PhysicsOptions(md_steps=50))
    assert any(
        row.quantity == "extrema beyond one well, Cu-Cu" and row.value == 2
        for row in bad.failed
    )
    assert "FAILED" in bad.text()


@pytest.fixture
def tested(here, tmp_path, capsys):
    """Return a function that runs ``dp-ema test`` on a random model and a small system: exit code,
    stdout, stderr.
    """
    write_run(tmp_path / "run")
    write_system(tmp_path / "data", frames=3, natoms=6)
    capsys.readouterr()

    def run(*words):
        code = main(
            ["test", "-m", "run/model.ckpt.pt", "-s", "data", "--device", "cpu", *words]
        )
        return code, *capsys.readouterr()

    return run


def test_the_command_prints_a_table_with_limits_or_one_document(tested):
    code, out, _ = tested("--physics", "--md-steps", "20", "--temperature", "100")
    assert code == 0
    table = out[out.index("# physics of the model, at frame 0 of data") :]
    for quantity in (
        "NVE energy drift",
        "time to failure at 200 K",
        "energy jump at the cutoff",
        "extrema beyond",
    ):
        assert quantity in table
    code, out, _ = tested(
        "--physics", "--md-steps", "20", "--time-step", "0.25", "--json"
    )
    found = json.loads(out)
    assert code == 0
    assert found["errors"]["num_frames"] == 3
    assert found["physics"]["run"] == {
        "temperature": 300.0,
        "time_step": 0.25,
        "steps": 20,
        "seed": 1,
    }
    assert {row["ok"] for row in found["physics"]["rows"]} <= {True, False, None}
    assert json.loads(tested("--json")[1])["physics"] is None
    code, _, err = tested("--temperature", "400")
    assert (code, "--temperature: no effect without --physics" in err) == (2, True)
