"""Errors of loaded weights before the first step: the table in the log, and the end of the run."""

import re
from pathlib import Path

import pytest
from helpers import assert_same, tiny_input, write_system
from training_runs import load

from deepmd_ema.training.run import run_training

TITLE = "errors before the first step"
ON = {"full_validation": True, "ema_full_validation": True, "validation_freq": 2}
STILL = {"learning_rate": {"start_lr": 1e-30, "stop_lr": 1e-31}}


def config_of(steps=4, **changes):
    """Return an input with live and averaged weights validated, for a folder beside those of the
    data.
    """
    given = {
        "training__save_freq": 2,
        "training__enable_ema": True,
        "validating": ON,
        **changes,
    }
    return tiny_input(["../new"], ["../valid"], num_steps=steps, **given)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folders of old and new frames, and a model trained on the old ones."""
    folder = tmp_path_factory.mktemp("before")
    for name, seed in (("old", 1), ("new", 11), ("valid", 12)):
        write_system(folder / name, frames=4, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        (folder / "pretrained").mkdir()
        patch.chdir(folder / "pretrained")
        run_training(
            config_of(
                2, training__training_data={"systems": ["../old"], "batch_size": 2}
            ),
            device="cpu",
        )
    return folder


@pytest.fixture(autouse=True)
def all_lines(caplog):
    caplog.set_level("INFO", "deepmd_ema")


@pytest.fixture
def start(base, tmp_path, monkeypatch):
    """Return a function that trains in a folder of its own, from the pretrained model unless
    another start is given.
    """

    def run(config, name="run", **how):
        folder = base / tmp_path.name / name
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("training_data", "validation_data"):
            if part in config["training"]:
                systems = config["training"][part]["systems"]
                config["training"][part]["systems"] = [
                    str(base / Path(system).name) for system in systems
                ]
        monkeypatch.chdir(folder)
        return run_training(
            config,
            **{
                "device": "cpu",
                "finetune": str(base / "pretrained" / "model.ckpt.pt"),
                **how,
            },
        )

    return run


def lines_of(caplog, words):
    """Return the lines that were logged with ``words``, those of tables one by one."""
    return [
        line
        for record in caplog.records
        for line in record.getMessage().splitlines()
        if words in line
    ]


@pytest.mark.parametrize("way", ["finetune", "init_model"])
def test_the_errors_before_are_those_of_weights_that_no_step_has_moved(
    start, base, way
):
    file = {
        "finetune": None,
        "init_model": None,
        way: str(base / "pretrained" / "model.ckpt.pt"),
    }
    moved, still = (
        start(config_of(), **file),
        start(config_of(1, **STILL), "still", **file),
    )
    assert moved.before == still.before == {"": still.errors["live"]}
    assert moved.errors["live"] != moved.before[""]


def test_the_table_and_the_last_lines_have_the_errors_before_and_after(start, caplog):
    trained = start(config_of())
    [title] = [record for record in caplog.records if TITLE in record.getMessage()]
    heads, units, row = [
        record.getMessage().split()
        for record in caplog.records[caplog.records.index(title) + 1 :][:3]
    ]
    assert (heads[:3], units[:2]) == (
        ["frames", "Energy", "Force"],
        ["meV/atom", "meV/Å"],
    )
    assert row[0] == "4"
    ends = lines_of(caplog, "before -> step 4, MAE / RMSE")
    assert [line.split()[1] for line in ends] == ["live,", "ema,"]
    for line, weights in zip(ends, ("live", "ema")):
        shown = re.search(r": E (\S+) / (\S+) -> (\S+) / (\S+) meV/atom", line).groups()
        values = [
            of[f"E:{kind}"]
            for of in (trained.before[""], trained.errors[weights])
            for kind in ("MAE", "RMSE")
        ]
        assert [float(number) for number in shown] == pytest.approx(
            [1000 * value for value in values], rel=1e-4
        )
        assert list(shown[:2]) == [row[1], row[3]]


def test_a_restart_ends_with_the_errors_before_of_the_first_start(start, caplog):
    start(config_of())
    straight, ends = load("model.ckpt-4.pt"), lines_of(caplog, "before -> step 4")
    caplog.clear()
    start(config_of(), finetune=None, restart="model.ckpt-2.pt")
    assert (lines_of(caplog, "before -> step 4"), lines_of(caplog, TITLE)) == (ends, [])
    assert_same(load("model.ckpt-4.pt")["display"], straight["display"])


@pytest.mark.parametrize(
    "config",
    [
        config_of(validating={}),
        config_of(validating={**ON, "full_val_start": 1}),
        tiny_input(["../new"]),
    ],
)
def test_without_full_validation_nothing_is_measured(start, caplog, config):
    assert start(config).before == {}
    assert lines_of(caplog, TITLE) == []
