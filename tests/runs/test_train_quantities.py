"""Runs of models of dipoles, polarizabilities, properties and DOS: metrics, restarts, ranks, a task
beside energies.
"""

import json
from functools import cache

import numpy as np
import pytest
from helpers import assert_same, tiny_input, trains_in
from parallel_cases import assert_same_run
from parallel_runs import train as train_ranks
from quantity_runs import COMMON, RUNS, STEPS, with_energies, write_labelled
from toy_models import SECTIONS
from training_runs import StopAfter, load
from two_tasks import DATA

from deepmd_ema.errors import Interrupted
from deepmd_ema.training.run import run_training

pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labelled")
    return [write_labelled(folder / "train", 1)], [write_labelled(folder / "valid", 2)]


def rows_of(file):
    """Return the head and the rows of numbers of a table."""
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    numbers = [
        [float(word) for word in line.split()]
        for line in lines
        if not line.startswith("#")
    ]
    return lines[0].removeprefix("#").split(), np.array(numbers)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_ranks_by_the_errors_of_its_quantity_and_a_restart_is_bitwise(
    kind, data, tmp_path, monkeypatch, capsys
):
    options, letters, columns = RUNS[kind]
    start = trains_in(tmp_path, monkeypatch, data, {**COMMON, **options})
    whole = start("whole", STEPS)
    for log, best in (("val.log", "best"), ("val_ema.log", "best_ema")):
        head, rows = rows_of(whole / log)
        assert [name.partition("(")[0] for name in head[1:]] == [
            f"{q}_{e}" for q in letters for e in ("MAE", "RMSE")
        ]
        assert (rows[:, 0] == [4, 8, 12]).all()
        assert np.isfinite(rows).all()
        lowest = min((row[1], int(row[0])) for row in rows)[1]
        assert (
            (whole / f"{best}.ckpt.pt")
            .resolve()
            .name.startswith(f"{best}.ckpt-{lowest}.")
        )
    names, rows = rows_of(whole / "lcurve.out")
    assert {f"{column}_{part}" for column in columns for part in ("trn", "val")} == set(
        names
    ) - {
        "step",
        "lr",
    }
    assert rows[-1][names.index(f"{min(columns)}_trn")] > 0
    with pytest.raises(Interrupted, match=f"after step 6 of {STEPS}"):
        start("parts", STEPS, callback=StopAfter(6))
    parts = start("parts", STEPS, restart="model.ckpt.pt")
    assert_same_end(whole, parts)


def assert_same_end(whole, parts):
    """The last checkpoints and all tables of two runs are the same to the bit; best files have the
    same names.
    """
    for name in ("model", "model_ema"):
        assert_same(
            load(whole / f"{name}.ckpt-{STEPS}.pt"),
            load(parts / f"{name}.ckpt-{STEPS}.pt"),
            name,
        )
    for file in (*whole.glob("*.out"), *whole.glob("val*.log")):
        assert file.read_bytes() == (parts / file.name).read_bytes(), file.name
    assert {file.name for file in whole.glob("best*")} == {
        file.name for file in parts.glob("best*")
    }


def test_a_run_of_dipoles_learns_them(data, tmp_path, monkeypatch):
    rates = {"type": "exp", "start_lr": 0.02, "stop_lr": 1e-3, "decay_steps": 75}
    options = {
        **RUNS["dipole"][0],
        "model__fitting_net__neuron": [7, 7],
        "learning_rate": rates,
    }
    names, rows = rows_of(
        trains_in(tmp_path, monkeypatch, data, options)("run", 150) / "lcurve.out"
    )
    first, last = rows[[0, -1], names.index("rmse_local_dipole_val")]
    assert last < 0.3 * first


@pytest.fixture(scope="module")
def ranks(data, tmp_path_factory):
    """Return a function that gives the folder of a run on two processes, or from step 4 of that at
    stage 0.
    """
    base = tmp_path_factory.mktemp("ranks")

    @cache
    def run(stage, restarted=False):
        folder, options = base / f"{stage}{restarted}", {**COMMON, **RUNS["dipole"][0]}
        options |= {
            "training__zero_stage": stage,
            "training__training_data__batch_size": 1,
        }
        how = (
            {
                "origin": run(0),
                "restart": "model.ckpt-4.pt",
                "allow_config_change": stage > 0,
            }
            if restarted
            else {}
        )
        train_ranks(folder, 2, tiny_input(*data, num_steps=STEPS, **options), **how)
        return folder

    return run


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_continue_at_every_stage_as_one_does_at_stage_0(ranks, stage):
    assert_same_run(ranks(stage, restarted=True), ranks(0))


def test_energies_and_dipoles_share_a_descriptor(data, tmp_path, monkeypatch):
    """Both are validated by their own errors, and a restart is bitwise."""

    def start(name, **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        (folder / "input.json").write_text(json.dumps(with_energies(data)))
        run_training("input.json", device="cpu", **how)
        return folder

    whole = start("whole")
    for task, letters in (("energy", "EFS"), ("dipole", "DW")):
        head, _ = rows_of(whole / f"val_{task}.log")
        assert [name.partition("(")[0] for name in head[1::2]] == [
            f"{letter}_MAE" for letter in letters
        ]
    with pytest.raises(Interrupted):
        start("parts", callback=StopAfter(6))
    assert_same_end(whole, start("parts", restart="model.ckpt.pt"))


@pytest.mark.parametrize("kind", ["se_e2_a", "se_atten", "dpa2", "dpa3"])
def test_two_ranks_train_energies_and_dipoles_as_one_process_does(kind, data, tmp_path):
    """A shared descriptor is sharded on its own, and each task has its own way into it."""
    changes = (
        {"model__descriptor": {**SECTIONS[kind], "seed": 1}}
        if kind != "se_e2_a"
        else {}
    )
    for ranks, stage in ((1, 0), (2, 3)):
        sizes = {f"training__{section}__batch_size": 2 // ranks for section in DATA}
        values = with_energies(data, training__zero_stage=stage, **changes, **sizes)
        train_ranks(tmp_path / f"{ranks}", ranks, values)
    assert_same_run(tmp_path / "1", tmp_path / "2")
