"""Schedule-free AdamW: the numbers of the paper, its averaged point as an average of the weights,
inputs, restarts.
"""

import math
from pathlib import Path

import pytest
import torch
from config_inputs import spoiled
from helpers import assert_same, trains_in
from shared_tasks import desk as desk
from torch import nn
from training_runs import load

from deepmd_ema.averaging import AverageBank
from deepmd_ema.config import config_from_dict
from deepmd_ema.config.rules import config_warnings
from deepmd_ema.config.schema.averaging import ScheduleFreeProfile
from deepmd_ema.config.schema.optim import AdamWScheduleFreeConfig, ExpScheduleConfig
from deepmd_ema.optim.build import build_optimizer, guarded_step, set_learning_rate
from deepmd_ema.optim.schedule import build_schedule

SAME_MATH = 1e-13
OPTIMIZER = {"type": "AdamWScheduleFree", "adam_beta1": 0.8, "r": 1.5}
CONSTANT = {
    "learning_rate__start_lr": 0.01,
    "learning_rate__stop_lr": 0.01,
    "learning_rate__warmup_steps": 5,
}


def network():
    generator = torch.Generator().manual_seed(2)
    shapes = {"weight": (4, 3), "bias": (3,), "single": (1,)}
    return {
        name: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64))
        for name, s in shapes.items()
    }


def gradients_of(step, named):
    generator = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in named.items()
    }


def weights_of(rates, r):
    """Return the weights of the points in x: of the largest rate so far, and the step to the power
    r, as a product.
    """
    largest = [max(rates[: k + 1]) for k in range(len(rates))]
    return [
        rate**2 * math.gamma(k + 1 + r) / math.gamma(k + 1)
        for k, rate in enumerate(largest)
    ]


def reference(start, rates, gradients, b1, b2, decay, r):
    """Return x, y and z after steps by arXiv:2405.15682, algorithm 1; a gradient of None moves no
    z.
    """
    x, z, v, t = start.clone(), start.clone(), torch.zeros_like(start), 0
    y, total = start.clone(), 0.0
    for rate, weight, gradient in zip(rates, weights_of(rates, r), gradients):
        if gradient is not None:
            t += 1
            v = b2 * v + (1 - b2) * gradient**2
            z = z - rate * (gradient / ((v / (1 - b2**t)).sqrt() + 1e-8) + decay * y)
        total += weight
        c = weight / total if total else 0.0
        x = (1 - c) * x + c * z
        y = b1 * x + (1 - b1) * z
    return {"x": x, "y": y, "z": z}


@pytest.mark.parametrize(("warmup", "first"), [(0, 0.0), (1, 0.0), (6, 0.25)])
@pytest.mark.parametrize(("decay", "r"), [(0.0, 0.0), (0.02, 2.5), (0.0, 12.0)])
def test_x_y_and_z_are_those_of_the_paper(decay, r, warmup, first):
    config = AdamWScheduleFreeConfig(
        adam_beta1=0.85, adam_beta2=0.99, weight_decay=decay, r=r
    )
    rate = build_schedule(
        ExpScheduleConfig(
            start_lr=0.02,
            stop_lr=0.01,
            decay_steps=4,
            warmup_steps=warmup,
            warmup_start_factor=first,
        ),
        30,
    )
    named = network()
    bank = AverageBank(
        nn.ParameterDict(named),
        [
            ScheduleFreeProfile(
                "x",
                adam_beta1=0.85,
                warmup_steps=warmup,
                warmup_start_factor=first,
                r=r,
            )
        ],
    )
    optimizer = build_optimizer(config, named, warmup=(warmup, first))
    rates, gradients = (
        [rate(step) for step in range(30)],
        [gradients_of(step, named) for step in range(30)],
    )
    for step in range(30):
        gradients[step]["bias"] = (
            None if step % 3 == 1 else gradients[step]["bias"]
        )  # another task
        for name, p in named.items():
            p.grad = gradients[step][name]
        set_learning_rate(optimizer, rates[step])
        guarded_step(optimizer, torch.zeros(()))
        bank.update()
    averaged = bank.weights("x")
    for name, p in named.items():
        expected = reference(
            network()[name].detach(),
            rates,
            [g[name] for g in gradients],
            0.85,
            0.99,
            decay,
            r,
        )
        found = {"x": averaged[name], "y": p.detach(), "z": optimizer.state[p]["z"]}
        for point, value in found.items():
            torch.testing.assert_close(
                value,
                expected[point],
                rtol=SAME_MATH,
                atol=SAME_MATH,
                msg=f"{name} {point}",
            )
        assert (averaged[name] - p).abs().max() > (1e-3 if r < 5 else 1e-4)


def test_the_averaged_point_is_added_to_the_averages_of_an_input_once():
    values = {"optimizer": {"type": "AdamWScheduleFree"}}
    config = config_from_dict(spoiled(values))
    *others, last = config.training.averaging
    assert (last.type, last.name) == ("schedule_free", "schedule_free")
    assert last.full_validation == config.validating.full_validation
    assert [a.type for a in others] == [
        a.type for a in config_from_dict(spoiled({})).training.averaging
    ]
    own = {
        **values,
        "training.averaging": [{"name": "x", "type": "schedule_free", "lcurve": True}],
    }
    found = [
        a
        for a in config_from_dict(spoiled(own)).training.averaging
        if a.type == "schedule_free"
    ]
    assert [(a.name, a.lcurve) for a in found] == [("x", True)]


@pytest.mark.parametrize(
    ("kind", "stop", "warned"),
    [("exp", 1e-3, False), ("exp", 1e-5, True), ("invsqrt", 1e-3, True)],
)
def test_a_rate_that_falls_is_warned_about(kind, stop, warned):
    rate = {"type": kind, "start_lr": 1e-3, "stop_lr": stop}
    config = config_from_dict(spoiled({"optimizer": OPTIMIZER, "learning_rate": rate}))
    found = [text for text in config_warnings(config) if "AdamWScheduleFree" in text]
    assert len(found) == warned
    assert all("learning_rate" in text and "constant" in text for text in found)


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, num_steps, options,
    **how).
    """
    return trains_in(
        tmp_path,
        monkeypatch,
        ([water_like], [water_like_valid]),
        {"optimizer": OPTIMIZER, **CONSTANT},
    )


def test_the_averaged_point_is_saved_and_validated_and_continues_under_other_names(
    start,
):
    points = [
        {"name": "a", "decay": 0.9},
        {"name": "b", "type": "schedule_free", "full_validation": True},
    ]
    options = {"validating__full_validation": True, "validating__validation_freq": 10}
    start("run", 20, {"training__averaging": points, **options})
    whole, x = load("model.ckpt-20.pt"), load("model_b.ckpt-20.pt")["model"]
    for name, state in whole["optimizer"]["state"].items():
        implied = (whole["model"][name] - 0.2 * state["z"]) / 0.8
        torch.testing.assert_close(x[name], implied, rtol=1e-10, atol=1e-10)
        assert not torch.equal(x[name], whole["model"][name])
    assert Path("val_b.log").read_text() != Path("val.log").read_text()
    assert list(Path().glob("best_b.ckpt-*"))
    points = [
        {"name": name, "type": "schedule_free"} for name in ("a", "c")
    ]  # a was another average
    start(
        "run",
        20,
        {"training__averaging": points, **options},
        restart="model.ckpt-10.pt",
    )
    again = load("model.ckpt-20.pt")
    for part in ("model", "optimizer"):
        assert_same(whole[part], again[part])
    for name in ("a", "c"):
        assert_same(
            again["averages"]["profiles"][name], whole["averages"]["profiles"]["b"]
        )
