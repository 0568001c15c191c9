"""SOAP: the numbers of its algorithm, bases of eigenvectors, steps skipped, sides without a basis,
CUDA graphs.
"""

from types import SimpleNamespace

import pytest
import torch
from config_inputs import spoiled
from torch import nn

from deepmd_ema.config import config_from_dict
from deepmd_ema.config.schema.optim import SOAPConfig
from deepmd_ema.optim.build import build_optimizer, guarded_step, set_learning_rate
from deepmd_ema.training.modes import launches_graphs, why_no_graphs

LR = 0.01
SAME_MATH = (
    1e-9  # bases are of covariances with a ridge of 1e-6, which amplifies rounding
)
IN_FLOAT32 = 1e-6  # Adam of vectors
OPTIONS = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.97,
    "shampoo_beta": 0.8,
    "weight_decay": 0.05,
}


def network():
    """Return matrices, two of them of one shape, an array of three dims, some with dims of size 1,
    and a vector.
    """
    generator = torch.Generator().manual_seed(4)
    shapes = {
        "a": (6, 4),
        "b": (6, 4),
        "wide": (3, 9),
        "cube": (3, 2, 4),
        "thin": (1, 5, 3),
    }
    shapes |= {"bias": (7,), "col": (5, 1)}
    return {
        name: nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64))
        for name, s in shapes.items()
    }


def gradients_of(step, named):
    generator = torch.Generator().manual_seed(50 + step)
    return {
        name: torch.randn(p.shape, generator=generator, dtype=torch.float64)
        for name, p in named.items()
    }


def take(optimizer, named, number, found_inf=0.0):
    for name, gradient in gradients_of(number, named).items():
        named[name].grad = gradient if not found_inf else gradient * torch.nan
    set_learning_rate(optimizer, LR)
    guarded_step(optimizer, torch.tensor(found_inf), number)


def reference(weights, gradients, frequency, longest=1000):
    """Return a matrix after steps by algorithm 3 of arXiv:2409.11321, and its bases."""
    b1, b2, bs, decay = OPTIONS.values()
    w = weights.reshape(next(size for size in weights.shape if size != 1), -1)
    mean, square = torch.zeros_like(w), torch.zeros_like(w)
    sides = [torch.zeros(n, n, dtype=w.dtype) for n in w.shape]
    u, v = (torch.eye(n, dtype=w.dtype) for n in w.shape)
    for t, gradient in enumerate(gradients, 1):
        g = gradient.reshape(w.shape)
        mean = b1 * mean + (1 - b1) * g
        square = b2 * square + (1 - b2) * (u.T @ g @ v) ** 2
        direction = (
            (u.T @ mean @ v) / (1 - b1**t) / ((square / (1 - b2**t)).sqrt() + 1e-8)
        )
        w = (1 - LR * decay) * w - LR * u @ direction @ v.T
        sides = [
            bs * s + (1 - bs) * product for s, product in zip(sides, (g @ g.T, g.T @ g))
        ]
        if t <= frequency or t % frequency == 0:
            bases = []
            for side, basis in zip(sides, (u, v)):
                ridge = (
                    1e-6
                    * side.trace()
                    / len(side)
                    * torch.eye(len(side), dtype=w.dtype)
                )
                bases.append(
                    basis
                    if len(side) > longest
                    else torch.linalg.qr((side + ridge) @ basis)[0]
                )
            u, v = bases
    return w.reshape(weights.shape), u, v


@pytest.mark.parametrize("frequency", [1, 4])
@pytest.mark.parametrize("longest", [1000, 8, 5])
def test_matrices_are_updated_by_the_algorithm(frequency, longest):
    named = network()
    config = SOAPConfig(
        **OPTIONS, precondition_frequency=frequency, max_precond_dim=longest
    )
    optimizer = build_optimizer(config, named)
    for number in range(1, 14):
        take(optimizer, named, number)
    for name in ("a", "b", "wide", "cube", "thin"):
        gradients = [gradients_of(number, named)[name] for number in range(1, 14)]
        expected, u, v = reference(
            network()[name].detach(), gradients, frequency, longest
        )
        torch.testing.assert_close(
            named[name].detach(), expected, rtol=SAME_MATH, atol=SAME_MATH, msg=name
        )
        for side, basis in (("left", u), ("right", v)):
            assert (side in optimizer.state[named[name]]) == (len(basis) <= longest)
            if len(basis) <= longest:
                found = optimizer.state[named[name]][f"{side}_basis"]
                torch.testing.assert_close(
                    found, basis, rtol=1e-6, atol=1e-6, msg=f"{name} {side}"
                )


def test_vectors_are_updated_as_by_adamw():
    named, other = network(), network()
    optimizer = build_optimizer(SOAPConfig(**OPTIONS), named)
    b1, b2, _, decay = OPTIONS.values()
    adamw = torch.optim.AdamW(other.values(), lr=LR, betas=(b1, b2), weight_decay=decay)
    for number in range(1, 8):
        take(optimizer, named, number)
        for name, gradient in gradients_of(number, other).items():
            other[name].grad = gradient
        adamw.step()
    for name in ("bias", "col"):
        torch.testing.assert_close(named[name], other[name], rtol=0, atol=IN_FLOAT32)
    assert (named["a"] - other["a"]).abs().max() > 1e-3


def test_steps_with_soap_are_not_launched_as_cuda_graphs():
    config = config_from_dict(spoiled({"optimizer": {"type": "SOAP"}}))
    world = SimpleNamespace(device=torch.device("cuda"), size=1)
    assert why_no_graphs(config, world) == "SOAP changes its bases in some steps only"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_steps_of_one_rank_that_shards_are_not_launched_as_cuda_graphs(stage):
    config = config_from_dict(spoiled({"training.zero_stage": stage}))
    world = SimpleNamespace(device=torch.device("cuda"), size=1)
    assert (
        why_no_graphs(config, world)
        == "a step at zero_stage 1 to 3 has collectives, also with one rank"
    )


@pytest.mark.parametrize(
    ("cuda", "options", "launches"),
    [
        ("13.0", {}, True),
        (None, {}, False),  # a torch for other devices
        ("13.0", {"training.enable_compile": True}, False),
        ("13.0", {"training.accumulate": 2}, False),
        ("13.0", {"training.cuda_graphs": False}, False),
        (None, {"training.cuda_graphs": True}, True),
    ],
)
def test_steps_on_a_gpu_are_launched_as_cuda_graphs_where_nothing_forbids_it(
    monkeypatch, cuda, options, launches
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    config = config_from_dict(spoiled(options))
    assert (
        launches_graphs(config, SimpleNamespace(device=torch.device("cuda"), size=1))
        is launches
    )
    assert not launches_graphs(
        config, SimpleNamespace(device=torch.device("cpu"), size=1)
    )
