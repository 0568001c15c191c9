"""Loggers of a run: what they get, what a restart continues, and that none of them can end a
training.
"""

import json
import logging
import math
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from helpers import blocks, tiny_input
from packages import install

from deepmd_ema import cli, train
from deepmd_ema.errors import Interrupted
from deepmd_ema.training.run import Callback, run_training

pytestmark = pytest.mark.timeout(600)
ARCHITECTURE = Path(__file__).parents[2] / "doc" / "architecture.md"
LINES = {"type": "lines"}


@pytest.fixture(autouse=True)
def site(here, tmp_path, monkeypatch):
    """The distribution of the loggers is installed for one test, in a folder on ``sys.path``."""
    places = {
        "lines": "fake_logger:LinesLogger",
        "raising": "fake_logger:RaisingLogger",
    }
    install(tmp_path / "site", "fake-logger", places, group="deepmd_ema.loggers")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(
        logging.getLogger("deepmd_ema"), "handlers", [logging.NullHandler()]
    )


@pytest.fixture
def values(water_like, water_like_valid):
    """An input of six steps with an average, shown every second step and validated every third."""
    validating = {"full_validation": True, "validation_freq": 3, "full_val_start": 0.0}
    average = {
        "name": "half",
        "type": "ema",
        "decay": 0.5,
        "full_validation": True,
        "lcurve": True,
    }
    options = {
        "averaging": [average],
        "disp_freq": 2,
        "save_freq": 2,
        "loggers": [LINES],
    }
    values = tiny_input(
        [water_like], [water_like_valid], num_steps=6, validating=validating
    )
    values["training"] |= options
    return values


def lines(kind=None, path="lines.txt"):
    """Return the calls of the logger, one list for each; without its first entry if they are those
    of one kind.
    """
    found = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return found if kind is None else [rest for name, *rest in found if name == kind]


def points(path="lines.txt"):
    """Return the steps at which each value was logged."""
    found = {}
    for step, of_step in lines("log", path):
        for name in of_step:
            found.setdefault(name, []).append(step)
    return found


def test_a_logger_gets_the_rows_of_every_file_under_names_that_say_which(values):
    train(values, device="cpu")
    assert lines()[0] == ["start", 0, None, 6]
    assert lines()[-1] == ["finish", "finished"]
    steps = points()
    assert (
        steps["lr"]
        == steps["train/live/rmse_f"]
        == steps["batch/half/rmse_e"]
        == [1, 2, 4, 6]
    )
    assert steps["val/live/rmse_f"] == steps["val/half/mae_e_peratom"] == [3, 6]
    logged = {
        name: value for _, of_step in lines("log") for name, value in of_step.items()
    }  # of the last step
    header, *rows = [
        line
        for line in Path("lcurve_half.out").read_text().splitlines()
        if "If there is" not in line
    ]
    last = dict(zip(header.split()[1:], map(float, rows[-1].split())))
    assert logged["batch/half/rmse_f"] == pytest.approx(last["rmse_f_val"], rel=1e-2)
    assert logged["train/half/rmse_f"] == pytest.approx(last["rmse_f_trn"], rel=1e-2)
    assert all(math.isfinite(value) for value in logged.values())


def test_a_restart_continues_what_was_logged_and_repeats_nothing(values):
    train(values, device="cpu")
    whole = points()
    longer = values | {"training": values["training"] | {"numb_steps": 9}}
    train(longer, restart="model.ckpt-2.pt", device="cpu", allow_config_change=True)
    assert lines("start") == [[0, None, 6], [2, "id-0", 9]]
    for name, steps in points().items():
        # step 9 of the validation, and the last step of the rows
        assert steps == [*whole[name], *([9] if name.startswith("val") else [8])]


def test_the_class_of_the_documentation_logs_a_run(values, tmp_path):
    source = next(
        text for text in blocks(ARCHITECTURE, "python") if "LinesLogger" in text
    ).replace('"lines"', '"text"')
    install(
        tmp_path / "site",
        "text",
        {"text": "text_logger:LinesLogger"},
        group="deepmd_ema.loggers",
        text_logger=source,
    )
    values["training"]["loggers"] = [{"type": "text", "path": "mine.txt"}]
    train(values, device="cpu")
    assert (
        Path("mine.txt").read_text().startswith("1 {'lr': 0.001, 'train/live/rmse': ")
    )


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_logger_that_raises_is_reported_once_and_ends_nothing(values, caplog, where):
    values["training"]["loggers"] = [{"type": "raising", "where": where}, LINES]
    assert train(values, device="cpu").step == 6
    said = [r.getMessage() for r in caplog.records if "logger" in r.getMessage()]
    text = f'training.loggers[0] ("raising"): ConnectionError: no answer in {where}.'
    assert said == [f"{text} The run continues without this logger."]
    assert points()["lr"] == [1, 2, 4, 6]


class _Ends(Callback):
    """Ends a run after its third step, by a signal or an error."""

    def __init__(self, error=None):
        self.error = error

    def after_step(self, trainer):
        if trainer.step == 3:
            if self.error is not None:
                raise self.error
            trainer.stop.request(signal.SIGTERM)


@pytest.mark.parametrize(
    ("error", "raised", "status"),
    [
        (None, Interrupted, "interrupted"),
        (ValueError("bad"), ValueError, "failed"),
    ],
)
def test_a_logger_gets_the_status_of_the_run_at_its_end(values, error, raised, status):
    with pytest.raises(raised):
        run_training(values, callback=_Ends(error), device="cpu")
    assert lines()[-1] == ["finish", status]


# ---- TensorBoard


def test_the_tags_of_tensorboard_are_those_of_deepmd_kit(values):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = {
        "tensorboard": True,
        "tensorboard_log_dir": "board",
        "tensorboard_freq": 3,
        "loggers": [],
    }
    values["training"] |= board
    train(values, device="cpu")
    train(values, restart="model.ckpt-2.pt", device="cpu")
    found = EventAccumulator("board").Reload()
    tags = set(found.Tags()["scalars"])
    assert {
        "Default/lr",
        "Default/rmse_f",
        "validation/live/rmse_f",
        "validation/half/mae_e_peratom",
    } <= tags
    assert [event.step for event in found.Scalars("Default/rmse_f")] == [1, 3, 6]
    assert not Path(".dp-ema.logged").exists()


# ---- packages of services, in place of which there are stubs


def test_a_package_that_is_missing_is_named_before_training(
    values, monkeypatch, capsys
):
    values["training"]["loggers"] = [
        {"type": "wandb", "project": "water"},
        {"type": "mlflow"},
    ]
    monkeypatch.setattr("deepmd_ema.report.loggers.find_spec", lambda name: None)
    Path("input.json").write_text(json.dumps(values))
    assert cli.main(["train", "input.json"]) == 2
    said = capsys.readouterr().err
    for n, name in enumerate(("wandb", "mlflow")):
        assert (
            f'training.loggers[{n}] ("{name}"): the package {name} is not installed.'
            in said
        )
        assert f'`pip install "dp-ema[{name}]"`' in said
    assert not Path("out.json").exists()


class _Service:
    """Keeps the calls of its methods, in place of an object of a service."""

    def __init__(self, calls, **attributes):
        self.calls = calls
        vars(self).update(attributes)

    def __getattr__(self, name):
        return lambda *args, **options: self.calls.append((name, args, options))


def _stub(monkeypatch, name, **attributes):
    module = ModuleType(name)
    module.__spec__ = SimpleNamespace(origin=f"{name}.py", name=name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_run_of_wandb_is_continued_by_its_id(values, monkeypatch):
    calls = []

    def init(**options):
        calls.append(("init", (), options))
        return _Service(calls, id=options["id"] or "abc")

    _stub(monkeypatch, "wandb", init=init)
    values["training"]["loggers"] = [
        {"type": "wandb", "project": "water", "mode": "offline"}
    ]
    train(values, device="cpu")
    train(
        values | {"training": values["training"] | {"numb_steps": 8}},
        restart="model.ckpt-6.pt",
        device="cpu",
    )
    starts = [options for name, _, options in calls if name == "init"]
    assert [(o["id"], o["resume"], o["project"], o["mode"]) for o in starts] == [
        (None, None, "water", "offline"),
        ("abc", "allow", "water", "offline"),
    ]
    assert starts[0]["config"]["training"]["numb_steps"] == 6
    logged = [
        (options["step"], args[0].keys())
        for name, args, options in calls
        if name == "log"
    ]
    assert [step for step, names in logged if "lr" in names] == [1, 2, 4, 6, 8]
    assert [options for name, _, options in calls if name == "finish"] == [
        {"exit_code": 0}
    ] * 2


def test_a_run_of_mlflow_is_continued_by_its_id(values, monkeypatch):
    calls = []
    client = _Service(calls, get_experiment_by_name=lambda name: None)
    client.create_experiment = lambda name: f"experiment of {name}"
    client.create_run = lambda of, run_name: SimpleNamespace(
        info=SimpleNamespace(run_id=f"{of}, {run_name}")
    )
    _stub(monkeypatch, "mlflow", MlflowClient=lambda uri: client)
    _stub(monkeypatch, "mlflow.entities", Param=lambda *of: of, Metric=lambda *of: of)
    values["training"]["loggers"] = [
        {"type": "mlflow", "experiment": "water", "name": "first"}
    ]
    train(values, device="cpu")
    train(
        values | {"training": values["training"] | {"numb_steps": 8}},
        restart="model.ckpt-6.pt",
        device="cpu",
    )
    run = "experiment of water, first"
    batches = [(args, options) for name, args, options in calls if name == "log_batch"]
    assert {args[0] for args, _ in batches} == {run}
    params = dict(
        param for _, options in batches for param in options.get("params", ())
    )
    assert params["training.numb_steps"] == "6"
    assert max(len(options.get("params", ())) for _, options in batches) <= 100
    metrics = [
        metric for args, _ in batches for metric in (args[1] if len(args) > 1 else ())
    ]
    assert [step for name, _, _, step in metrics if name == "lr"] == [1, 2, 4, 6, 8]
    others = [
        (name, *args)
        for name, args, _ in calls
        if name in ("update_run", "set_terminated")
    ]
    ended = ("set_terminated", run, "FINISHED")
    assert others == [ended, ("update_run", run), ended]
