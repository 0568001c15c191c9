"""Averages of other distributions: found by entry points, treated like those of dp-ema."""

import json
import logging
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from averaging_nets import on_device, weights_of_steps
from fake_average import CycleAverage, OddAverage
from helpers import tiny_input
from packages import install

from deepmd_ema import cli, train
from deepmd_ema.averaging import AverageBank
from deepmd_ema.config import CustomAverage, config_from_dict
from deepmd_ema.config.schema.averaging import AVERAGES
from deepmd_ema.errors import ConfigError

GROUP = "deepmd_ema.averages"
MINE = {
    "name": "mine",
    "type": "cycle",
    "period": 2,
    "full_validation": True,
    "lcurve": True,
}
VALIDATED = {"validation_freq": 1, "full_val_start": 0}


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """The distribution of the averages is installed for one test, in a folder on ``sys.path``."""
    folder = tmp_path / "site"
    install(
        folder,
        "fake-average",
        {k: f"fake_average:{k.title()}Average" for k in ("cycle", "odd")},
        group=GROUP,
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        logging.getLogger("deepmd_ema"), "handlers", [logging.NullHandler()]
    )
    return folder


def config(training, valid, averaging=(MINE,), num_steps=5):
    options = {
        "training__averaging": list(averaging),
        "training__save_freq": 2,
        "training__disp_freq": 1,
    }
    return tiny_input(
        [training], [valid], num_steps=num_steps, validating=VALIDATED, **options
    )


@pytest.mark.parametrize(
    "rule",
    [
        CycleAverage(name="a", period=3),
        CycleAverage(name="a", period=5, update_every=2),
        OddAverage(name="a"),
    ],
)
def test_it_has_the_weights_of_its_formula_counted_on_the_host_and_on_the_device(rule):
    """Its own rule says which steps count, else an update has the decays of all its steps."""
    expected, odd = torch.zeros(13, dtype=torch.float64), rule.type == "odd"
    expected[0] = 1
    for step in range(1, 13):
        if step % 2 == 1 if odd else step % rule.update_every == 0:
            done = range(step - rule.update_every, step)
            decay = (
                0.5
                if odd
                else math.prod((t % rule.period) / (t % rule.period + 1) for t in done)
            )
            expected *= decay
            expected[step] += 1 - decay
    for where in (nullcontext(), on_device()):
        with where:
            torch.testing.assert_close(
                weights_of_steps(rule, 12)[0], expected, rtol=1e-14, atol=0
            )


def test_it_is_validated_shown_frozen_ranked_and_restarted_like_any_other(
    water_like, water_like_valid, capsys
):
    power = {"type": "power", "snapshots": True, "snapshot_freq": 1}
    bank = [
        MINE,
        {"name": "odd", "type": "odd"},
        {**power, "name": "p3", "gamma": 3},
        {**power, "name": "p9", "gamma": 9},
    ]
    Path("input.json").write_text(
        json.dumps(config(water_like, water_like_valid, bank))
    )

    def run(*words):
        assert cli.main(list(words)) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        return out + err

    assert "mine: cycle, period 2" in run("check", "input.json")
    run("train", "input.json", "--device", "cpu")
    assert "mine: cycle, period 2, 5 updates, looks back" in run(
        "show", "model.ckpt.pt"
    )
    assert len(list(Path().glob("best_mine.ckpt-*.pt"))) == 1
    run("freeze", "-c", "model.ckpt.pt", "--average", "mine", "-o", "mine.dp")
    assert "cycle, period 2" in run("show", "mine.dp")
    ranked = run("posthoc", ".", "--shapes", "none").splitlines()
    assert [line.split()[1] for line in ranked if line.startswith("mine ")] == [
        "-"
    ]  # it has no relative width
    names = [
        "model.ckpt-5.pt",
        "model_mine.ckpt-5.pt",
        "model_odd.ckpt-5.pt",
        "lcurve_mine.out",
        "val_mine.log",
    ]
    whole = {name: Path(name).read_bytes() for name in names}
    run("train", "input.json", "--restart", "model.ckpt-2.pt", "--device", "cpu")
    assert {name: Path(name).read_bytes() for name in names} == whole


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"perod": 4},
            r"training\.averaging\[0\]\.perod: unknown key\. Did you mean period\?",
        ),
        (
            {"period": 0},
            r"training\.averaging\[0\]\.period = 0: expected a whole number > 0",
        ),
        (
            {"type": "cycles"},
            r'type = "cycles": unknown\. Did you mean cycle\? Known: ema, .*cycle, odd',
        ),
        (
            {"decay": 0.9},
            r"training\.averaging\[0\]\.decay: unknown key here\. It belongs to type ema",
        ),
        (
            {"type": "odd", "update_every": 3, "period": None},
            "update_every = 3: type odd says itself which steps count",
        ),
    ],
)
def test_mistakes_in_its_section_are_named(changes, message):
    entry = {
        key: value for key, value in {**MINE, **changes}.items() if value is not None
    }
    with pytest.raises(ConfigError, match=message):
        config_from_dict(config("train", "valid", [entry]))


# ---- where its package is not installed


def test_a_restart_names_the_type_whose_package_is_missing_or_leaves_its_weights_behind(
    water_like, water_like_valid, site, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, "deepmd_ema")
    train(config(water_like, water_like_valid, num_steps=2), device="cpu")
    monkeypatch.setattr(
        sys, "path", [folder for folder in sys.path if folder != str(site)]
    )
    assert "cycle" not in AVERAGES
    said = r'averaging\[0\]\.type = "cycle": unknown\. Known: .* package is installed\.'
    with pytest.raises(ConfigError, match=said):
        train(
            config(water_like, water_like_valid, num_steps=4),
            restart="model.ckpt.pt",
            device="cpu",
        )
    without = config(water_like, water_like_valid, [], num_steps=4)
    assert train(without, restart="model.ckpt.pt", device="cpu").step == 4
    assert "the averages of the checkpoint (mine) are left behind" in caplog.text
    assert cli.main(["freeze", "-c", "model_mine.ckpt.pt", "-o", "mine.dp"]) == 0


def rule(kind, decay_at):
    """Return an average of one weight with these decays."""
    section = type(
        kind,
        (CustomAverage,),
        {"type": kind, "decay_at": lambda _, done: decay_at(done)},
    )
    return dataclass(frozen=True, kw_only=True)(section)(name="a")


def test_decays_that_no_average_can_have_are_refused_before_training():
    for kind, decay_at, said in (
        (
            "grows",
            lambda done: done,
            "'grows' is 2 after 2 steps, expected a number from 0 to 1",
        ),
        (
            "branches",
            lambda done: 0.1 if done < 100 else 0.9,
            "'branches' fails for tensors of steps .*Use operations",
        ),
    ):
        with pytest.raises(ConfigError, match=f"decay_at of type {said}"):
            AverageBank(torch.nn.Linear(3, 2), [rule(kind, decay_at)])


# ---- packages

BROKEN = {
    "raises": (
        "raise OSError('no library')",
        "cannot be imported (OSError: no library). Repair or uninstall",
    ),
    "other_base": (
        "from deepmd_ema.config.schema.averaging import EmaProfile as RULE",
        "expected a subclass of deepmd_ema.config.schema.averaging.CustomAverage.",
    ),
    "no_decay": (
        "from dataclasses import dataclass\nfrom deepmd_ema.config import CustomAverage\n"
        "@dataclass(frozen=True, kw_only=True)\nclass RULE(CustomAverage):\n    type = 'broken'",
        "has a section without decay_at.",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_matters_only_where_its_average_is_requested(
    site, capsys, monkeypatch, source, message
):
    install(
        site, "broken-average", {"broken": "broken:RULE"}, group=GROUP, broken=source
    )
    monkeypatch.syspath_prepend(
        site.parent / "again"
    )  # what was found before is read again
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ConfigError) as caught:
        config_from_dict(config("train", "valid", [{"name": "a", "type": "broken"}]))
    assert "the package broken-average 1.0 adds this type, but " in str(caught.value)
    assert message in str(caught.value)
    config_from_dict(config("train", "valid"))
    assert cli.main(["doc", "training.averaging"]) == 0
    assert (
        'average "broken" is not listed: the package broken-average 1.0'
        in capsys.readouterr().err
    )


# ---- ranks
