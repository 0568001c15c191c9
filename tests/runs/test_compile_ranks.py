"""Compiled models on two processes that share weights out: the numbers of eager runs, exact
restarts, few graphs.
"""

import json
import os
from unittest import mock

import pytest
import torch
from helpers import assert_same, compile_with, write_system, wrong_forces
from parallel_runs import run_ranks, train, train_here

from deepmd_ema.model.compiler import Compiler
from deepmd_ema.model.energy import run as evaluate
from deepmd_ema.training.trainer import Trainer

pytestmark = pytest.mark.timeout(480)

LAST, HALF = 4, 2
FILES = ("model", "model_ema")


def input_of(data, stage, compiled):
    """Return an input of two tasks that share a descriptor, one without virials, with frames of
    other sizes.
    """
    sections = {
        n: {
            t: {"systems": [str(data / f"{t}{n}")], "batch_size": 2}
            for t in ("water", "ice")
        }
        for n in (1, 2)
    }
    model = {
        "type_map": "elements",
        "descriptor": "radial",
        "fitting_net": {"neuron": [3], "dim_case_embd": 2},
    }
    return {
        "model": {
            "shared_dict": {
                "elements": ["O"],
                "radial": {
                    "type": "se_e2_r",
                    "sel": [30],
                    "rcut": 3.5,
                    "rcut_smth": 0.5,
                    "neuron": [2],
                },
            },
            "model_dict": {"water": model, "ice": model},
        },
        "learning_rate": {"start_lr": 0.01, "stop_lr": 0.001},
        "loss_dict": {"ice": {"start_pref_v": 1, "limit_pref_v": 1}},
        "validating": {
            "full_validation": True,
            "ema_full_validation": True,
            "validation_freq": HALF,
            "full_val_start": 0,
        },
        "training": {
            "data_dict": {
                t: {"training_data": sections[1][t], "validation_data": sections[2][t]}
                for t in sections[1]
            },
            "model_prob": {"water": 0.5, "ice": 0.5},
            "numb_steps": LAST,
            "save_freq": HALF,
            "disp_freq": 1,
            "seed": 3,
            "enable_ema": True,
            "ema_decay": 0.5,
            "gradient_max_norm": 0.5,
            "zero_stage": stage,
            "enable_compile": compiled,
            **({"compile_options": {"backend": "aot_eager"}} if compiled else {}),
        },
    }


def ends_of(folder):
    return {
        name: torch.load(folder / f"{name}.ckpt-{LAST}.pt", weights_only=True)
        for name in FILES
    }


def rows_of(folder):
    tables = sorted([*folder.glob("lcurve*.out"), *folder.glob("val*.log")])
    return {
        path.name: [r for r in path.read_text().splitlines() if r[:1] != "#"]
        for path in tables
    }


def test_a_compiled_run_of_two_ranks_is_the_eager_one_and_restarts_bitwise(tmp_path):
    """Averages of a compiled run at zero_stage 2 were validated with the live weights, which ranks
    had gathered.

    Stages 2 and 3 add up in the same order, so that a restart at the other one is bitwise too.
    """
    for k, task in enumerate(("water", "ice")):
        for n in (1, 2):
            write_system(
                tmp_path / f"{task}{n}",
                frames=4,
                natoms=4 + 3 * k,
                seed=10 * k + n,
                virial=k == 1,
                num_types=1,
            )
    eager, whole, restarted = (
        tmp_path / name for name in ("eager", "whole", "restarted")
    )
    train(eager, 2, input_of(tmp_path, 0, False))
    ranks = train(whole, 2, input_of(tmp_path, 2, True))
    again = train(
        restarted,
        2,
        input_of(tmp_path, 3, True),
        restart=str(whole / f"model.ckpt-{HALF}.pt"),
        allow_config_change=True,
    )
    for ended in (*ranks, *again):
        graphs = [
            line for line in ended.log.splitlines() if line.startswith("compiled graph")
        ]
        assert len(graphs) == 2, (
            ended.log
        )  # one for training, one for validation, of both tasks
    held = [ended.value["elements"]["live"] for ended in again]
    assert sum(held) == sum(ended.value["elements"]["live"] for ended in ranks)
    assert max(held) < sum(held)  # no rank has all weights between steps
    ends, expected, found = ends_of(whole), ends_of(eager), ends_of(restarted)
    for name in FILES:
        for key, weight in expected[name]["model"].items():
            torch.testing.assert_close(
                ends[name]["model"][key], weight, rtol=1e-10, atol=1e-10
            )
        for key in ("model", "optimizer", "averages"):
            assert_same(found[name].get(key), ends[name].get(key), f"{name} {key}")
    rows = rows_of(whole)
    assert rows == rows_of(eager)
    assert len(rows) == 5
    for name, later in rows_of(restarted).items():
        assert (
            later[-HALF if name == "lcurve.out" else -1 :]
            == rows[name][-HALF if name == "lcurve.out" else -1 :]
        )


def no_code(graph, inputs):
    raise NotImplementedError("no kernel for this")


def train_with_no_later_code_on_rank_1(folder):
    """Return the modes of the calls of a compiler in a run, for which all graphs are made anew."""
    calls, run, call = [], Trainer.run, Compiler.__call__

    def begin(self):
        if os.environ["RANK"] == "1":
            self.validator.models.compiler._run = torch.compile(
                evaluate, backend=no_code
            )
        torch._dynamo.reset()
        run(self)

    def count(self, model, batch):
        calls.append(model.training)
        return call(self, model, batch)

    with (
        mock.patch.object(Trainer, "run", begin),
        mock.patch.object(Compiler, "__call__", count),
    ):
        train_here(folder, {})
    return calls


def train_with_wrong_code_on_rank_1(folder):
    if os.environ["RANK"] == "1":
        with mock.patch.object(torch, "compile", compile_with(wrong_forces)):
            return train_here(folder, {})
    return train_here(folder, {})


@pytest.mark.parametrize(
    "function", [train_with_wrong_code_on_rank_1, train_with_no_later_code_on_rank_1]
)
def test_where_the_code_of_one_rank_is_wrong_or_later_not_made_all_ranks_are_eager(
    tmp_path, function
):
    for task in ("water", "ice"):
        for n in (1, 2):
            write_system(
                tmp_path / f"{task}{n}", frames=4, natoms=4, seed=n, num_types=1
            )
    eager, wrong = tmp_path / "eager", tmp_path / "wrong"
    train(eager, 2, input_of(tmp_path, 0, False))
    wrong.mkdir()
    (wrong / "input.json").write_text(json.dumps(input_of(tmp_path, 0, True)))
    ranks = run_ranks(2, function, str(wrong))
    lines = [
        line
        for line in ranks[0].log.splitlines()
        if "Steps and validation are evaluated eagerly." in line
    ]
    assert len(lines) == 1
    later = function is train_with_no_later_code_on_rank_1
    assert (
        "could not compile the model (NotImplementedError: " if later else "force"
    ) in lines[0]
    for name in FILES:
        for key, weight in ends_of(eager)[name][
            "model"
        ].items():  # the first step of rank 0 was compiled
            torch.testing.assert_close(
                ends_of(wrong)[name]["model"][key],
                weight,
                rtol=1e-10 * later,
                atol=1e-10 * later,
            )
    if later:
        assert [rank.value for rank in ranks] == [[True, False, False], [True]]
    assert rows_of(wrong) == rows_of(eager)
