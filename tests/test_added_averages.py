"""Averages of other distributions: found by entry points, treated like those of dp-ema."""

from __future__ import annotations

import json
import logging
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch
from fake_average import CycleAverage, OddAverage
from helpers import assert_same, tiny_input
from packages import install
from parallel_runs import run_ranks, train_here
from test_docs import blocks

from deepmd_ema import cli, train
from deepmd_ema.averaging import AverageBank
from deepmd_ema.config import CustomAverage, config_from_dict, saved_config
from deepmd_ema.config.manual import json_schema, manual
from deepmd_ema.config.schema.averaging import AVERAGES
from deepmd_ema.errors import ConfigError
from deepmd_ema.training.run import Callback, run_training

ARCHITECTURE = Path(__file__).parents[1] / "doc" / "architecture.md"
GROUP = "deepmd_ema.averages"
MINE = {"name": "mine", "type": "cycle", "period": 2, "full_validation": True, "lcurve": True}
VALIDATED = {"validation_freq": 1, "full_val_start": 0}


@pytest.fixture(autouse=True)
def site(tmp_path, monkeypatch):
    """The distribution of the averages is installed for one test, in a folder on ``sys.path``."""
    folder = tmp_path / "site"
    install(
        folder, "fake-average", {"cycle": "fake_average:CycleAverage", "odd": "fake_average:OddAverage"}, group=GROUP
    )
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("deepmd_ema"), "handlers", [logging.NullHandler()])
    return folder


def config(water_like, water_like_valid, averaging=(MINE,), **changes):
    """Return an input of five steps."""
    return tiny_input(
        [water_like],
        [water_like_valid],
        num_steps=5,
        training__averaging=list(averaging),
        training__save_freq=2,
        training__disp_freq=1,
        validating=VALIDATED,
        **changes,
    )


class Recorded(Callback):
    """Keeps the live weights and the average of each step."""

    def __init__(self, name="mine"):
        self.name, self.live, self.average = name, [], []

    def on_start(self, trainer):
        self.live.append(trainer.bank.weights("live"))

    def after_update(self, trainer):
        self.live.append(trainer.bank.weights("live"))
        self.average.append(trainer.bank.weights(self.name))


def test_it_follows_its_formula_from_step_to_step(water_like, water_like_valid):
    seen = Recorded()
    run_training(config(water_like, water_like_valid), callback=seen, device="cpu")
    expected = seen.live[0]
    for step, (live, average) in enumerate(zip(seen.live[1:], seen.average)):
        share = 1 / (step % 2 + 1)  # of a period of 2: the live weights, then the mean with them
        expected = {name: (1 - share) * value + share * live[name] for name, value in expected.items()}
        for name, value in expected.items():  # buffers do not change
            torch.testing.assert_close(average[name], value, rtol=1e-12, atol=1e-14)


def test_the_class_of_the_documentation_has_its_formula(monkeypatch):
    source = next(text for text in blocks(ARCHITECTURE, "python") if "CustomAverage" in text)
    module = ModuleType("cycle_average")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look names up
    exec(compile(source, ARCHITECTURE, "exec"), vars(module))
    documented, here = (
        kind(name="a", period=3).decay_at(torch.arange(7.0)) for kind in (module.CycleAverage, CycleAverage)
    )
    assert torch.equal(documented, here)


def test_its_own_rule_says_which_steps_count(water_like, water_like_valid):
    seen = Recorded("odd")
    run_training(config(water_like, water_like_valid, [{"name": "odd", "type": "odd"}]), callback=seen, device="cpu")
    changed = [any(not torch.equal(a[n], b[n]) for n in a) for a, b in zip([seen.live[0], *seen.average], seen.average)]
    assert changed == [True, False, True, False, True]


def test_a_restart_continues_bitwise(water_like, water_like_valid, tmp_path):
    values = config(water_like, water_like_valid, [MINE, {"name": "odd", "type": "odd"}])
    train(values, device="cpu")
    names = [f"model{suffix}.ckpt-5.pt" for suffix in ("", "_mine", "_odd")]
    whole = {name: torch.load(name, weights_only=True) for name in names}
    rows = {name: Path(name).read_text() for name in ("lcurve_mine.out", "val_mine.log")}
    for name in names:
        Path(name).unlink()
    train(values, restart="model.ckpt-2.pt", device="cpu")
    for name, payload in whole.items():
        assert_same(torch.load(name, weights_only=True), payload)
    for name, text in rows.items():
        assert Path(name).read_text() == text


def test_it_is_validated_shown_tested_and_frozen(water_like, water_like_valid, capsys):
    power = [
        {"name": f"p{gamma}", "type": "power", "gamma": gamma, "snapshots": True, "snapshot_freq": 1}
        for gamma in (3, 9)
    ]
    Path("input.json").write_text(json.dumps(config(water_like, water_like_valid, [MINE, *power])))

    def run(*words):
        assert cli.main([str(word) for word in words]) == 0, capsys.readouterr().err
        out, err = capsys.readouterr()
        return out + err

    assert "mine: cycle, period 2" in run("check", "input.json")
    run("train", "input.json", "--device", "cpu")
    assert "mine: cycle, period 2, 5 updates, looks back" in run("show", "model.ckpt.pt")
    assert len(list(Path().glob("best_mine.ckpt-*.pt"))) == 1
    run("freeze", "-c", "model.ckpt.pt", "--average", "mine", "-o", "mine.dp")
    assert "cycle, period 2" in run("show", "mine.dp")
    ranked = run("posthoc", ".", "--shapes", "none").splitlines()
    assert [line.split()[1] for line in ranked if line.startswith("mine ")] == ["-"]  # it has no relative width


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"perod": 4}, r"training\.averaging\[0\]\.perod: unknown key\. Did you mean period\?"),
        ({"period": 0}, r"training\.averaging\[0\]\.period = 0: expected a whole number > 0"),
        (
            {"type": "cycles"},
            r'averaging\[0\]\.type = "cycles": unknown\. Did you mean cycle\? Known: ema, .*cycle, odd',
        ),
        ({"type": "mean"}, r'averaging\[0\]\.type = "mean": unknown\. Known: .* package is installed\.'),
        ({"decay": 0.9}, r"training\.averaging\[0\]\.decay: unknown key here\. It belongs to type ema"),
        ({"start_step": 2, "start_epoch": 1}, r"start_epoch = 1: start_step = 2 is given too"),
    ],
)
def test_mistakes_in_its_section_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        config_from_dict(config("train", "valid", [MINE | changes]))


def test_a_pace_beside_a_rule_of_its_own_is_refused():
    with pytest.raises(ConfigError, match=r"update_every = 3: type odd says itself which steps count\. Remove it\."):
        config_from_dict(config("train", "valid", [{"name": "odd", "type": "odd", "update_every": 3}]))


def test_the_manual_and_the_schema_know_its_options():
    assert "training.averaging[cycle].period" in manual("training.averaging")
    schema = json_schema()["anyOf"][0]["properties"]["training"]["properties"]["averaging"]
    assert "cycle" in json.dumps(schema)


# ---- where its package is not installed


@pytest.fixture
def trained(water_like, water_like_valid, site, monkeypatch):
    """The input of a run of two steps whose package is gone after it."""
    values = config(water_like, water_like_valid, training__numb_steps=2)
    train(values, device="cpu")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != str(site)])
    assert "cycle" not in AVERAGES
    values["training"]["numb_steps"] = 4
    return values


def test_a_restart_names_the_type_whose_package_is_missing(trained):
    with pytest.raises(
        ConfigError, match=r'averaging\[0\]\.type = "cycle": unknown\. Known: .* package is installed\.'
    ):
        train(trained, restart="model.ckpt.pt", device="cpu")


def test_a_restart_without_it_leaves_its_weights_behind(trained, caplog):
    caplog.set_level(logging.INFO, "deepmd_ema")
    trained["training"]["averaging"] = []
    assert train(trained, restart="model.ckpt.pt", device="cpu").step == 4
    assert "the averages of the checkpoint (mine) are left behind" in caplog.text
    assert saved_config(torch.load("model_mine.ckpt-2.pt", weights_only=True)["config"]).training.averaging == []


def test_its_weights_are_tested_and_frozen(trained, capsys, water_like_valid):
    for words in (["test", "-m", "model.ckpt.pt", "--use-ema", "-s", str(water_like_valid)],
                  ["freeze", "-c", "model_mine.ckpt.pt", "-o", "mine.dp"], ["show", "model.ckpt.pt"]):  # fmt: skip
        assert cli.main(words) == 0, capsys.readouterr().err


# ---- the rule


@dataclass(frozen=True, kw_only=True)
class Halves(CustomAverage):
    """Decays that rise with the steps."""

    type: ClassVar[str] = "halves"

    def decay_at(self, done):
        return (done + 1) / (done + 2)


def test_an_update_has_the_decays_of_all_its_steps():
    rare, each = Halves(name="a", update_every=4), Halves(name="a")
    for updates in range(5):
        steps = torch.arange(4.0 * updates, 4.0 * updates + 4, dtype=torch.float64)
        found = rare.decay_of_update(torch.tensor(updates, dtype=torch.float64))
        assert found == pytest.approx(each.decay_at(steps).prod().item(), rel=1e-14)
    always = OddAverage(name="a", update_every=3)
    assert always.decay_of_update(torch.ones(2, dtype=torch.float64)).tolist() == [0.125, 0.125]


@pytest.mark.parametrize("rule", [CycleAverage(name="a", period=3), OddAverage(name="a"), Halves(name="a")])
def test_counting_on_the_device_gives_the_same_bits(rule):
    averages = []
    for on_device in (False, True):
        torch.manual_seed(1)
        net = torch.nn.Linear(3, 2, dtype=torch.float64)
        bank = AverageBank(net, [rule])
        for step in range(7):
            with torch.no_grad():
                net.weight += 0.1 * step
            bank.apply(bank.begin(), torch.tensor(1.0) if on_device else None)
        averages.append(bank.state_dict())
    assert_same(*averages)


def test_a_bank_of_it_can_be_pickled():
    net = torch.nn.Linear(3, 2)
    bank = AverageBank(net, [CycleAverage(name="a", period=3)])
    bank.update()
    assert_same(pickle.loads(pickle.dumps(bank)).state_dict(), bank.state_dict())


@dataclass(frozen=True, kw_only=True)
class Grows(Halves):
    """Decays above one."""

    type: ClassVar[str] = "grows"

    def decay_at(self, done):
        return done


@dataclass(frozen=True, kw_only=True)
class Branches(Halves):
    """Reads a number of a tensor."""

    type: ClassVar[str] = "branches"

    def decay_at(self, done):
        return 0.1 if done < 100 else 0.9


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Grows(name="a"), r"decay_at of type 'grows' is 2 after 2 steps, expected a number from 0 to 1\."),
        (
            Branches(name="a"),
            r"decay_at of type 'branches' fails for tensors of steps \(RuntimeError: .*Use operations",
        ),
    ],
)
def test_decays_that_no_average_can_have_are_refused_before_training(rule, message):
    with pytest.raises(ConfigError, match=message):
        AverageBank(torch.nn.Linear(3, 2), [rule])


# ---- packages

HEAD = "from dataclasses import dataclass\nfrom deepmd_ema.config import CustomAverage\n"
DECORATED = f"{HEAD}@dataclass(frozen=True, kw_only=True)\n"
BROKEN = {
    "raises": ("raise OSError('no library')", "cannot be imported (OSError: no library). Repair or uninstall"),
    "no_class": (
        "RULE = 3",
        "is of type int, expected a subclass of deepmd_ema.config.schema.averaging.CustomAverage.",
    ),
    "other_class": ("RULE = int", "has section <class 'int'>, expected a dataclass."),
    "other_base": (
        "from deepmd_ema.config.schema.averaging import EmaProfile as RULE",
        "expected a subclass of deepmd_ema.config.schema.averaging.CustomAverage.",
    ),
    "undecorated": (
        f"{HEAD}class RULE(CustomAverage):\n    type = 'broken'\n    decay_at = None",
        "has a section that is not decorated as CustomAverage is.",
    ),
    "no_decay": (f"{DECORATED}class RULE(CustomAverage):\n    type = 'broken'", "has a section without decay_at."),
    "other_type": (
        f"{DECORATED}class RULE(CustomAverage):\n    type = 'whole'\n    decay_at = None",
        "has a section of type 'whole', expected 'broken'.",
    ),
}


@pytest.mark.parametrize(("source", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_package_matters_only_where_its_average_is_requested(site, capsys, monkeypatch, source, message):
    install(site, "broken-average", {"broken": "broken:RULE"}, group=GROUP, broken=source)
    monkeypatch.syspath_prepend(site.parent / "again")  # what was found before is read again
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    with pytest.raises(ConfigError) as caught:
        config_from_dict(config("train", "valid", [{"name": "a", "type": "broken"}]))
    assert "the package broken-average 1.0 adds this type, but " in str(caught.value)
    assert message in str(caught.value)
    config_from_dict(config("train", "valid"))
    assert cli.main(["doc", "training.averaging"]) == 0
    assert 'average "broken" is not listed: the package broken-average 1.0' in capsys.readouterr().err


# ---- ranks


@pytest.mark.timeout(600)
def test_two_ranks_with_sharded_weights_average_as_one(tmp_path, water_like, water_like_valid):
    for name, ranks, batch, zero_stage in (("alone", 1, 4, 0), ("shared", 2, 2, 3)):
        values = config(water_like, water_like_valid, [MINE], training__zero_stage=zero_stage)
        values["training"]["training_data"]["batch_size"] = batch
        (tmp_path / name).mkdir()
        (tmp_path / name / "input.json").write_text(json.dumps(values))
        run_ranks(ranks, train_here, str(tmp_path / name), {}, limit=300)
    one, two = (
        torch.load(tmp_path / n / "model_mine.ckpt-5.pt", weights_only=True)["model"] for n in ("alone", "shared")
    )
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=0, atol=1e-10)
