"""``from deepmd_ema import train``: an input or its values, the files and the errors of the run."""

import json
import logging
import signal
from pathlib import Path

import pytest
from helpers import assert_same_files, tiny_input, write_system

from deepmd_ema import Potential, train

VALIDATED = {
    "full_validation": True,
    "ema_full_validation": True,
    "validation_freq": 3,
    "full_val_start": 0.0,
}


@pytest.fixture
def config(here, tmp_path):
    """Values of an input with an average and full validation."""
    data = str(write_system(tmp_path / "data", frames=8))
    return tiny_input(
        [data],
        [data],
        num_steps=6,
        training__enable_ema=True,
        training__save_freq=3,
        validating=VALIDATED,
    )


@pytest.fixture(autouse=True)
def _messages_are_left_alone(monkeypatch):
    monkeypatch.setattr(
        logging.getLogger("deepmd_ema"), "handlers", [logging.NullHandler()]
    )


def test_values_and_the_file_that_holds_them_train_the_same(
    config, tmp_path, monkeypatch
):
    results, handler = [], signal.getsignal(signal.SIGINT)
    for name in ("values", "file"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "file":
            Path("given.json").write_text(json.dumps(config))
        results.append(
            train(config if name == "values" else "given.json", device="cpu")
        )
    (tmp_path / "file" / "given.json").unlink()
    assert_same_files(tmp_path / "values", tmp_path / "file")
    assert results[0].errors == results[1].errors
    assert signal.getsignal(signal.SIGINT) is handler


def test_what_is_returned_names_files_that_hold_the_errors_it_states(config):
    found = train(config, device="cpu")
    assert found.step == 6
    assert set(found.averages) == {"ema"}
    assert set(found.best) == set(found.errors) == {"live", "ema"}
    for file in (found.checkpoint, *found.averages.values(), *found.best.values()):
        assert Potential(file).evaluate(
            [[0.0, 0.0, 0.0], [0.0, 0.0, 1.5]], ["O", "H"], None
        ).energy.shape == (1,)
    rows = [
        line.split()
        for line in Path("val_ema.log").read_text().splitlines()
        if not line.startswith("#")
    ]
    step, *numbers = map(float, rows[-1])
    assert step == 6
    assert any(
        number == pytest.approx(1000 * found.errors["ema"]["F:RMSE"], rel=1e-2)
        for number in numbers
    )


def test_a_restart_from_python_names_the_file_that_continues_it(config, caplog):
    caplog.set_level(logging.INFO, "deepmd_ema")
    train(config, device="cpu")
    longer = config | {"training": config["training"] | {"numb_steps": 9}}
    found = train(
        longer, restart="model.ckpt.pt", device="cpu", allow_config_change=True
    )
    assert found.step == 9
    assert "dp-ema test -m model_ema.ckpt.pt --valid-data out.json" in caplog.text
