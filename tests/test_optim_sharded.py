"""Optimizers on sharded parameters give the numbers of one process: two gloo processes, parts of different size."""

import os

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from deepmd_ema import config as sections
from deepmd_ema.optim.build import build_optimizer, guarded_step

CPU = torch.device("cpu")
ROUNDING = 1e-9  # the norm of an update is a sum of two parts, in float32
KINDS = ["AdaMuon", "HybridMuon"]


class Net(nn.Module):
    """Matrices of 7 and 3 rows, an array of three dims, vectors, and a scalar-like one of a single entry."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def draw(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.first, self.second, self.cube = draw(7, 5), draw(3, 7), draw(5, 2, 3)
        self.bias, self.single = draw(7), draw(1)

    def forward(self, x):
        y = torch.tanh(x @ self.first.T + self.bias) @ self.second.T
        return (y.square().sum() + (self.cube * self.single).sin().sum()) * 0.3


def train(net, kind, steps=4):
    """Train, one step in between called off, and return nothing: the weights are in ``net``."""
    optimizer = build_optimizer(getattr(sections, kind)(), net.named_parameters(), CPU)
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.zero_grad()
        net(x).backward()
        guarded_step(optimizer, torch.tensor(float(k == 1)))
    return optimizer


def compare(rank, folder, kind):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        net, twin = Net(), Net()
        fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
        optimizer, whole = train(net, kind), train(twin, kind)
        assert net.first.to_local().shape[0] == (4, 3)[rank]
        for (name, p), q, old in zip(net.named_parameters(), twin.parameters(), Net().parameters()):
            assert isinstance(p, DTensor)
            torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=ROUNDING, msg=name)
            assert (q - old).abs().max() > 1e-4, name
            for key, value in optimizer.state[p].items():
                value = value.full_tensor() if isinstance(value, DTensor) else value
                torch.testing.assert_close(value, whole.state[q][key], rtol=1e-6, atol=1e-8, msg=f"{name} {key}")
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    # gloo's threads may still run when the interpreter goes down, which aborts the process now and then
    os._exit(0)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_and_whole_parameters_get_the_same_updates(tmp_path, kind):
    mp.spawn(compare, (str(tmp_path), kind), nprocs=2, join=True)
