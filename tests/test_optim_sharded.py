"""Optimizers with parameters or state distributed give the numbers of one process: two gloo processes, uneven parts."""

import os
from unittest import mock

import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from deepmd_ema.averaging import AverageBank, EmaProfile
from deepmd_ema.config.schema import optim as sections
from deepmd_ema.optim.build import build_optimizer, optimizer_state

CPU = torch.device("cpu")
ROUNDING = 1e-9  # the norm of an update is a sum of two parts, in float32
OWN = ["AdaMuon", "HybridMuon", "AdamWScheduleFree", "SOAP"]


class Net(nn.Module):
    """Matrices of 7 and 3 rows, two of them of one shape, an array of three dims, vectors, one of a single entry."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def draw(*shape):
            return nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))

        self.first, self.second, self.cube = draw(7, 5), draw(3, 7), draw(5, 2, 3)
        self.reference = draw(7, 5)
        self.bias, self.single = draw(7), draw(1)

    def forward(self, x):
        y = torch.tanh(x @ (self.first.T * self.reference.T.sin()) + self.bias) @ self.second.T
        return (y.square().sum() + (self.cube * self.single).sin().sum()) * 0.3


def train(net, optimizer, steps=4):
    """Train, the second step skipped; the weights are in ``net``."""
    own = getattr(optimizer, "optim", optimizer)  # of a ZeroRedundancyOptimizer
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(4, 5)
    for k in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.zero_grad()
        net(x).backward()
        own.found_inf = torch.tensor(float(k == 1))
        optimizer.step()


def build(net, kind, shared=False):
    return build_optimizer(getattr(sections, f"{kind}Config")(), net.named_parameters(), shared)


def compare_shards(kind, rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    net, reference = Net(), Net()
    fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    optimizer, whole = build(net, kind), build(reference, kind)
    train(net, optimizer)
    train(reference, whole)
    assert net.first.to_local().shape[0] == (4, 3)[rank]
    for (name, p), q, old in zip(net.named_parameters(), reference.parameters(), Net().parameters()):
        assert isinstance(p, DTensor)
        torch.testing.assert_close(p.full_tensor(), q, rtol=0, atol=ROUNDING, msg=name)
        assert (q - old).abs().max() > 1e-4, name
        for key, value in optimizer.state[p].items():
            value = value.full_tensor() if isinstance(value, DTensor) else value
            torch.testing.assert_close(value, whole.state[q][key], rtol=1e-6, atol=1e-8, msg=f"{name} {key}")


def compare_shared_state(kind, rank):
    net, reference = Net(), Net()
    optimizer = build(net, kind, shared=True)
    train(net, optimizer)
    train(reference, build(reference, kind))
    assert len(optimizer.optim.state) < 5
    exact = kind != "SOAP"  # whose product of two matrices at once rounds in another way than that of one
    for p, q in zip(net.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=0, atol=0 if exact else ROUNDING)


def count_messages(kind, rank):
    """A step sends the weights of each rank at once, and averages that were built before follow them."""
    net = Net()
    bank = AverageBank(net, [EmaProfile("ema", 0.5, warmup=False)])
    optimizer = build(net, kind, shared=True)
    first = {name: p.detach().clone() for name, p in net.named_parameters()}
    with mock.patch("torch.distributed.broadcast", wraps=torch.distributed.broadcast) as broadcast:
        train(net, optimizer, steps=1)
    assert broadcast.call_count == torch.distributed.get_world_size()
    bank.update()
    for name, average in bank.weights("ema").items():
        torch.testing.assert_close(average, (first[name] + net.get_parameter(name).detach()) / 2)
    with bank.swapped_in("ema"):
        assert torch.equal(net.first, bank.weights("ema")["first"])


def gather_on_the_host(kind, rank):
    """The state reaches rank 0 through the group that is given, not through the default one."""
    net, group = Net(), torch.distributed.new_group(backend="gloo")
    optimizer = build(net, kind, shared=True)
    with mock.patch("torch.distributed.gather_object", wraps=torch.distributed.gather_object) as gather:
        found = optimizer_state(optimizer, net.named_parameters(), group=group)
    assert [call.kwargs["group"] for call in gather.call_args_list] == [group]
    assert sorted(found["state"]) == (sorted(name for name, _ in net.named_parameters()) if rank == 0 else [])


def on_rank(rank, folder, check, kind):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    try:
        check(kind, rank)
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    # gloo's threads may still run when the interpreter goes down, which aborts the process now and then
    os._exit(0)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("check", [count_messages, gather_on_the_host])
@pytest.mark.parametrize("kind", ["Adam", "AdaMuon"])
def test_what_ranks_exchange_at_stage_1(tmp_path, kind, check):
    mp.spawn(on_rank, (str(tmp_path), check, kind), nprocs=2, join=True)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("check", [compare_shards, compare_shared_state])
def test_the_updates_are_those_of_one_process(tmp_path, kind, check):
    mp.spawn(on_rank, (str(tmp_path), check, kind), nprocs=2, join=True)
