"""Optimizers: the numbers of torch, steps that are called off, state by name, clipping, groups of
parameters.
"""

import copy
import json
import re

import numpy as np
import pytest
import torch
from helpers import assert_same, tiny_input
from shared_tasks import input_of
from torch import nn
from training_runs import load

from deepmd_ema import cli
from deepmd_ema.config import config_from_dict
from deepmd_ema.config.schema import optim as sections
from deepmd_ema.errors import CheckpointError
from deepmd_ema.model.build import build_models
from deepmd_ema.optim import guarded
from deepmd_ema.optim.build import (
    build_optimizer,
    clip_gradients,
    guarded_step,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
    split_by_pattern,
)

KINDS = ["Adam", "AdamW", "AdaMuon", "HybridMuon", "AdamWScheduleFree", "SOAP"]
RATE, SAME_MATH = 0.02, 1e-12
Group = sections.GroupConfig


def network(frozen=()):
    """Return parameters of two parts with the same shapes."""
    generator = torch.Generator().manual_seed(5)
    shapes = {"weight": (6, 5), "1.weight": (5, 7), "bias": (5,), "1.bias": (7,)}
    names = [f"{part}.{name}" for part in ("first", "second") for name in shapes]
    values = {
        n: torch.randn(shapes[n.split(".", 1)[1]], generator=generator).double()
        for n in names
    }
    return {
        n: nn.Parameter(value, requires_grad=n not in frozen)
        for n, value in values.items()
    }


def build(kind, named, **options):
    return build_optimizer(getattr(sections, f"{kind}Config")(**options), named.items())


def train(optimizer, named, steps, rate=RATE, found_inf=0.0):
    """Take steps by gradients that depend on the name and the number of the step."""
    for step in steps:
        for name, p in named.items():
            if p.requires_grad:
                generator = torch.Generator().manual_seed(len(name) + 100 * step)
                p.grad = torch.randn(p.shape, generator=generator).double() * (
                    torch.nan if found_inf else 1
                )
        set_learning_rate(optimizer, rate)
        guarded_step(optimizer, torch.tensor(found_inf), step + 1)


def everything(optimizer, named):
    """Return copies of all weights and all state."""
    return copy.deepcopy(
        [
            {n: p.detach() for n, p in named.items()},
            optimizer_state(optimizer, named.items()),
        ]
    )


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Adam", {"weight_decay": 0.1, "adam_beta1": 0.8}),
        ("AdamW", {"adam_beta2": 0.99}),
    ],
)
def test_steps_equal_those_of_torch_without_fusing(kind, options):
    named, reference = network(), network()
    optimizer, config = (
        build(kind, named, **options),
        getattr(sections, f"{kind}Config")(**options),
    )
    betas, how = (
        (config.adam_beta1, config.adam_beta2),
        {"weight_decay": config.weight_decay, "foreach": False},
    )
    plain = getattr(torch.optim, kind)(
        reference.values(), lr=RATE, betas=betas, eps=1e-8, **how
    )
    for step in range(5):
        train(optimizer, named, [step])
        for name, p in reference.items():
            p.grad = named[name].grad.clone()
        plain.step()
    for name, p in named.items():
        torch.testing.assert_close(p, reference[name], rtol=SAME_MATH, atol=SAME_MATH)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_step_called_off_changes_no_bit(kind, steps_before):
    named, reference = network(frozen=["first.bias"]), network(frozen=["first.bias"])
    optimizer, other = build(kind, named), build(kind, reference)
    train(optimizer, named, range(steps_before))
    before = everything(optimizer, named)
    assert "first.bias" not in before[1]["state"]
    train(optimizer, named, [9], found_inf=1.0)
    assert_same(before, everything(optimizer, named))
    train(optimizer, named, range(steps_before, 4))
    train(other, reference, range(4))
    assert_same(everything(optimizer, named), everything(other, reference))


@pytest.mark.parametrize("kind", KINDS)
def test_state_by_name_continues_to_the_last_bit_also_in_other_groups(kind, tmp_path):
    named = network()
    optimizer = build(kind, named)
    train(optimizer, named, range(3))
    torch.save(optimizer_state(optimizer, named.items()), tmp_path / "state.pt")
    state, other = (
        torch.load(tmp_path / "state.pt", weights_only=True),
        copy.deepcopy(named),
    )
    restored, regrouped = (
        build(kind, other),
        build(kind, other, groups=[Group(pattern="*.1.*", lr_scale=2)]),
    )
    load_optimizer_state(regrouped, other.items(), state)
    assert_same(optimizer_state(regrouped, other.items()), state)
    load_optimizer_state(restored, other.items(), state)
    for o, parameters in ((optimizer, named), (restored, other)):
        train(o, parameters, range(3, 6))
    assert_same(everything(optimizer, named), everything(restored, other))


@pytest.mark.parametrize("kind", KINDS[2:])
def test_updates_do_not_depend_on_how_many_entries_are_updated_at_once(
    kind, monkeypatch
):
    named, other = network(), network()
    train(build(kind, named), named, range(3))
    monkeypatch.setitem(guarded.BATCH_ENTRIES, "cpu", 10)
    train(build(kind, other), other, range(3))
    for name, p in named.items():
        torch.testing.assert_close(p, other[name], rtol=0, atol=1e-6)


def test_state_of_other_parameters_is_refused_by_name_and_changes_nothing():
    named = network()
    optimizer = build("Adam", named)
    state = optimizer_state(optimizer, named.items())
    state["state"]["first.bias"]["exp_avg"] = torch.ones(9)
    state["state"]["first.weight"]["exp_avg"] += 1
    with pytest.raises(
        CheckpointError,
        match=r"of another shape: first.bias.exp_avg is \(9,\) there, \(5,\) here",
    ):
        load_optimizer_state(optimizer, named.items(), state)
    assert not optimizer.state[named["first.weight"]]["exp_avg"].any()


def test_clipping_scales_all_gradients_to_the_norm():
    first, second = (
        nn.Parameter(torch.zeros(2)),
        nn.Parameter(torch.zeros(2, dtype=torch.float64)),
    )
    for limit, scale in ((None, 1), (1e6, 1), (1.0, 0.2)):
        first.grad, second.grad = (
            torch.tensor([3.0, 0.0]),
            torch.tensor([0.0, 4.0], dtype=torch.float64),
        )
        assert (
            clip_gradients([first, second, nn.Parameter(torch.ones(1))], limit).item()
            == 5
        )
        assert (first.grad[0].item(), second.grad[1].item()) == pytest.approx(
            (3 * scale, 4 * scale)
        )
    second.grad[1] = torch.nan
    assert not clip_gradients([first, second], 1.0).isfinite()
    assert clip_gradients([nn.Parameter(torch.zeros(2))], 1.0).item() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_group_is_updated_as_by_an_optimizer_of_its_own(kind):
    named, apart = network(), network()
    groups = [
        Group(pattern="first.*", lr_scale=0.25, weight_decay=0.3),
        Group(pattern="f*", lr_scale=9),
    ]
    train(build(kind, named, weight_decay=0.1, groups=groups), named, range(3))
    for part, rate, decay in (("first", 0.25 * RATE, 0.3), ("second", RATE, 0.1)):
        own = {name: p for name, p in apart.items() if name.startswith(part)}
        train(build(kind, own, weight_decay=decay), own, range(3), rate)
    assert all(torch.equal(p, apart[name]) for name, p in named.items())
    assert not any(torch.equal(p, network()[name]) for name, p in named.items())


def test_a_parameter_that_tasks_share_is_matched_by_each_of_its_names():
    config = config_from_dict(input_of("all"))
    models = build_models(
        {name: task.model for name, task in config.tasks.items()}, config.links
    )
    shared, rest = split_by_pattern(
        [Group(pattern="ice.descriptor.*")], models.first_names()
    )
    assert shared
    assert all(name.startswith("water.descriptor.") for name in shared)
    assert rest
    assert all(".fitting." in name for name in rest)


GROUPS = [{"pattern": "descriptor.*", "lr_scale": 0.1, "weight_decay": 0}]


@pytest.fixture
def run(tmp_path, monkeypatch, water_like, capsys):
    """Return a function that calls a command with an input of these groups: run(groups, *words)."""
    monkeypatch.chdir(tmp_path)

    def called(groups, *words, **changes):
        optimizer = {"type": "AdamW", "groups": groups}
        options = {
            "optimizer": optimizer,
            "training__save_freq": 2,
            "training__disp_freq": 1,
            **changes,
        }
        config = tiny_input(
            [water_like], num_steps=4, model__descriptor__sel="auto", **options
        )
        (tmp_path / "input.json").write_text(json.dumps(config))
        code = cli.main([*words, "input.json"])
        found = capsys.readouterr()
        return code, re.sub(" +", " ", found.out + found.err)

    return called


def test_a_run_has_the_rates_of_its_groups_and_a_restart_continues_it_to_the_last_bit(
    run,
):
    code, text = run(GROUPS, "train")
    assert code == 0
    assert "optimizer AdamW, weight decay 0.001, 1 group of parameters" in text
    assert (
        " group descriptor.*: 192 trained parameters, learning rate x 0.1, weight decay 0\n"
        in text
    )
    assert " group others: 706 trained parameters\n" in text
    grouped, whole = load("model.ckpt-2.pt")["model"], load("model.ckpt-4.pt")
    rates = np.genfromtxt("lcurve.out", names=True)["lr"]
    restart = ["train", "--restart", "model.ckpt-2.pt"]
    assert run(GROUPS, *restart)[0] == 0
    assert_same(whole, load("model.ckpt-4.pt"))
    code, text = run([], *restart)
    assert code == 2
    groups = '[{"pattern": "descriptor.*", "lr_scale": 0.1, "weight_decay": 0.0}]'
    assert f"optimizer.groups: {groups} in the checkpoint" in text
    assert (
        "the restart continues with a change. optimizer.groups"
        in run([], *restart, "--allow-config-change")[1]
    )
    run([], "train")
    plain = load("model.ckpt-2.pt")["model"]
    assert np.array_equal(
        rates, np.genfromtxt("lcurve.out", names=True)["lr"]
    )  # those of the schedule
    assert not any(
        torch.equal(grouped[name], plain[name])
        for name in plain
        if name.endswith("0.weight")
    )


def test_other_trained_parameters_at_a_restart_are_refused_before_the_data_are_read(
    run,
):
    assert run([], "train")[0] == 0
    restart = ["train", "--restart", "model.ckpt-2.pt", "--allow-config-change"]
    for section in ("descriptor", "fitting_net"):
        code, text = run([], *restart, **{f"model__{section}__trainable": False})
        assert code == 2
        option = rf"model\.{section}\.trainable: true in the checkpoint, \[?false"
        assert re.search(rf"{option}.*: the checkpoint holds the state", text)
        assert "or start anew from the weights with --init-model" in text


@pytest.mark.parametrize("command", ["train", "check"])
def test_patterns_that_match_nothing_end_a_command_with_names_that_there_are(
    run, command
):
    code, text = run([{"pattern": "descriptors.*"}, {"pattern": "fitting"}], command)
    assert code == 2
    said = (
        r'input.json(:\d+)?: optimizer.groups\[0\].pattern = "descriptors.\*": no parameter has '
        r"such a name. Expected"
    )
    assert re.search(said, text)
    assert "descriptor.embeddings.0.layers.0.weight, " in text
    assert 'optimizer.groups[1].pattern = "fitting": no parameter' in text
