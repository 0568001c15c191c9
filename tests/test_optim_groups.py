"""Groups of parameters: learning rates and weight decays of their own in every optimizer, restarts, wrong patterns."""

import json
import re

import numpy as np
import pytest
import torch
from config_inputs import write
from helpers import assert_same, tiny_input
from test_train import load
from test_train_sharing import desk as desk
from test_train_sharing import input_of
from torch import nn

from deepmd_ema import cli
from deepmd_ema.config import config_from_dict
from deepmd_ema.config.schema import optim as sections
from deepmd_ema.errors import ConfigError
from deepmd_ema.model.build import build_models
from deepmd_ema.optim.build import (
    build_optimizer,
    describe_groups,
    guarded_step,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
    split_by_pattern,
)

KINDS = ["Adam", "AdamW", "AdaMuon", "HybridMuon", "AdamWScheduleFree", "SOAP"]
RATE = 0.02
Group = sections.GroupConfig


def network():
    """Return parameters of two parts with the same shapes."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"weight": (6, 5), "1.weight": (5, 7), "bias": (5,), "1.bias": (7,)}
    names = [f"{part}.{name}" for part in ("first", "second") for name in shapes]
    return {n: nn.Parameter(torch.randn(shapes[n.split(".", 1)[1]], generator=generator).double()) for n in names}


def build(kind, named, **options):
    return build_optimizer(getattr(sections, f"{kind}Config")(**options), named)


def train(optimizer, named, rate, steps=3):
    """Take steps by gradients that depend on the name and the number of the step."""
    for step in range(steps):
        for name, p in named.items():
            generator = torch.Generator().manual_seed(len(name) + 100 * step)
            p.grad = torch.randn(p.shape, generator=generator).double()
        set_learning_rate(optimizer, rate)
        guarded_step(optimizer, torch.zeros(()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_updated_as_by_an_optimizer_of_its_own(kind):
    named, apart = network(), network()
    groups = [Group(pattern="first.*", lr_scale=0.25, weight_decay=0.3)]
    train(build(kind, named, weight_decay=0.1, groups=groups), named, RATE)
    for part, rate, decay in (("first", 0.25 * RATE, 0.3), ("second", RATE, 0.1)):
        own = {name: p for name, p in apart.items() if name.startswith(part)}
        train(build(kind, own, weight_decay=decay), own, rate)
    assert all(torch.equal(p, apart[name]) for name, p in named.items())
    assert not any(torch.equal(p, network()[name]) for name, p in named.items())


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_weight_decay_a_group_has_that_of_the_optimizer(kind):
    named, same = network(), network()
    train(build(kind, named, weight_decay=0.1, groups=[Group(pattern="first.*")]), named, RATE)
    train(build(kind, same, weight_decay=0.1), same, RATE)
    for name, p in named.items():  # matrices are in other stacks
        torch.testing.assert_close(p, same[name], rtol=0, atol=1e-6 if kind in KINDS[2:] else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_continue_by_name_when_groups_change(kind):
    named, other = network(), network()
    optimizer, regrouped = build(kind, named), build(kind, other, groups=[Group(pattern="*.1.*", lr_scale=2)])
    train(optimizer, named, RATE)
    state = optimizer_state(optimizer, named)
    load_optimizer_state(regrouped, other, state)
    assert_same(optimizer_state(regrouped, other), state)


def test_the_first_pattern_that_matches_counts_and_the_rest_is_in_no_group():
    names = {name: name for name in network()}
    groups = [Group(pattern="*.bias"), Group(pattern="first.*"), Group(pattern="f*")]
    biases, first, none, rest = split_by_pattern(groups, names)
    assert biases == ["first.bias", "first.1.bias", "second.bias", "second.1.bias"]
    assert first == ["first.weight", "first.1.weight"]
    assert none == []
    assert rest == ["second.weight", "second.1.weight"]


def test_parameters_that_are_not_trained_do_not_count():
    named = network()
    named["first.weight"].requires_grad_(False)
    groups = [Group(pattern="first.*", lr_scale=0.5, weight_decay=0), Group(pattern="*.bias")]
    assert describe_groups(groups, dict(zip(named, named)), named) == [
        "first.*: 47 trained parameters, learning rate x 0.5, weight decay 0",
        "*.bias: 12 trained parameters, learning rate x 1",
        "others: 65 trained parameters",
    ]
    assert describe_groups([], dict(zip(named, named)), named) == []


def test_a_pattern_that_matches_nothing_is_named_with_names_that_there_are():
    named = network()
    groups = [Group(pattern="firts.*"), Group(pattern="second"), Group(pattern="second.*")]
    with pytest.raises(ConfigError) as caught:
        build("Adam", named, groups=groups)
    first, second = str(caught.value).splitlines()
    assert 'optimizer.groups[0].pattern = "firts.*": no parameter has such a name. Expected a pattern of a' in first
    assert "Some of the 8 names: first.weight, first.1.weight, first.bias, " in first
    assert 'optimizer.groups[1].pattern = "second": no parameter' in second


def test_a_parameter_that_tasks_share_is_matched_by_each_of_its_names():
    config = config_from_dict(input_of("all"))
    models = build_models({name: task.model for name, task in config.tasks.items()}, config.links)
    shared, rest = split_by_pattern([Group(pattern="ice.descriptor.*")], models.first_names())
    assert shared
    assert all(name.startswith("water.descriptor.") for name in shared)
    assert rest
    assert all(".fitting." in name for name in rest)


GROUPS = [{"pattern": "descriptor.*", "lr_scale": 0.1, "weight_decay": 0}]
MISTAKES = {
    "no pattern": ([{"lr_scale": 0.1}], "optimizer.groups[0].pattern: required, but missing."),
    "a factor of zero": ([{"pattern": "*", "lr_scale": 0}], "optimizer.groups[0].lr_scale = 0: expected a number > 0."),
    "another key": ([{"pattern": "*", "lr": 1}], "optimizer.groups[0].lr: unknown key"),
    "no list": ({"pattern": "*"}, "optimizer.groups = {"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_groups_are_named(name):
    groups, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=re.escape(message)):
        config_from_dict(tiny_input(["data"], optimizer={"type": "Adam", "groups": groups}))


def test_the_kalman_filter_has_no_groups():
    with pytest.raises(ConfigError, match=r"optimizer\.groups: unknown key here\. It belongs to type Adam or AdamW or"):
        config_from_dict(tiny_input(["data"], optimizer={"type": "LKF", "groups": GROUPS}))


@pytest.fixture
def run(tmp_path, monkeypatch, water_like, capsys):
    """Return a function that calls a command with an input of these groups: run(groups, *words)."""
    monkeypatch.chdir(tmp_path)

    def called(groups, *words, **changes):
        optimizer = {"type": "AdamW", "groups": groups}
        options = {"optimizer": optimizer, "training__save_freq": 2, "training__disp_freq": 1, **changes}
        config = tiny_input([water_like], num_steps=4, model__descriptor__sel="auto", **options)
        (tmp_path / "input.json").write_text(json.dumps(config))
        code = cli.main([*words, "input.json"])
        found = capsys.readouterr()
        return code, re.sub(" +", " ", found.out + found.err)

    return called


def test_a_run_has_the_rates_of_its_groups_and_shows_that_of_the_schedule(run, tmp_path):
    code, text = run(GROUPS, "train")
    assert code == 0
    assert "optimizer AdamW, weight decay 0.001, 1 group of parameters" in text
    assert " group descriptor.*: 192 trained parameters, learning rate x 0.1, weight decay 0\n" in text
    assert " group others: 706 trained parameters\n" in text
    grouped, rates = load(tmp_path / "model.ckpt-2.pt"), np.genfromtxt("lcurve.out", names=True)["lr"]
    run([], "train")
    assert np.array_equal(rates, np.genfromtxt("lcurve.out", names=True)["lr"])
    plain = load(tmp_path / "model.ckpt-2.pt")["model"]
    run([], "train", learning_rate__start_lr=1e-30, learning_rate__stop_lr=1e-31)
    first = load(tmp_path / "model.ckpt-2.pt")["model"]
    for name in grouped["optimizer"]["state"]:
        part, whole = ((weights[name] - first[name]).abs().max().item() for weights in (grouped["model"], plain))
        assert part == pytest.approx(whole * (0.1 if name.startswith("descriptor.") else 1), rel=0.2), name


def test_a_restart_continues_to_the_last_bit_and_other_groups_are_refused(run, tmp_path):
    assert run(GROUPS, "train")[0] == 0
    whole = load(tmp_path / "model.ckpt-4.pt")
    assert run(GROUPS, "train", "--restart", "model.ckpt-2.pt")[0] == 0
    assert_same(whole, load(tmp_path / "model.ckpt-4.pt"))
    code, text = run([], "train", "--restart", "model.ckpt-2.pt")
    assert code == 2
    groups = '[{"pattern": "descriptor.*", "lr_scale": 0.1, "weight_decay": 0.0}]'
    assert f"optimizer.groups: {groups} in the checkpoint" in text
    code, text = run([], "train", "--allow-config-change", "--restart", "model.ckpt-2.pt")
    assert code == 0
    assert "the restart continues with a change. optimizer.groups" in text


@pytest.mark.parametrize("command", ["train", "check"])
def test_a_wrong_pattern_ends_a_command_with_names_that_there_are(run, command):
    code, text = run([{"pattern": "descriptors.*"}], command)
    assert code == 2
    assert re.search(
        r'input.json(:\d+)?: optimizer.groups\[0\].pattern = "descriptors.\*": no parameter has such', text
    )
    assert "descriptor.embeddings.0.layers.0.weight, " in text
    assert "Traceback" not in text


def test_check_shows_the_sizes_of_groups(run):
    code, text = run(GROUPS, "check")
    assert code == 0
    assert re.search(r" group +descriptor\.\*: 192 trained parameters, learning rate x 0\.1, weight decay 0\n", text)


def test_tasks_train_with_groups_of_what_they_share(desk, capsys):
    config = input_of("all")
    config["optimizer"] = {"type": "Adam", "groups": [{"pattern": "*.descriptor.*", "lr_scale": 0.01}]}
    write(desk, config)
    assert cli.main(["train", "input.json"]) == 0
    text = re.sub(" +", " ", capsys.readouterr().err)
    assert re.search(r" group \*\.descriptor\.\*: \d+ trained parameters, learning rate x 0\.01\n", text)
