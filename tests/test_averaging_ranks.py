"""Averages on two processes that are swapped in: every rank computes with the whole average, whatever its layout."""

import hashlib

import pytest
import torch
from averaging_nets import Net, copies, move
from parallel_runs import run_ranks

from deepmd_ema.averaging import AverageBank, EmaProfile

pytestmark = pytest.mark.timeout(480)


def digest(tensors):
    return hashlib.sha256(b"".join(t.double().numpy().tobytes() for t in tensors.values())).hexdigest()


def swap_as_a_rank(layout, sharded):
    """Average a network, sharded or not, over some steps as a rank; return digests of what is seen in a swap."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    net, whole = Net(width=5), Net(width=5)  # 5 rows: parts of two sizes
    whole.load_state_dict(net.state_dict())
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(net, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    bank = AverageBank(net, [EmaProfile("ema", 0.5, warmup=False, layout=layout)])
    expected = AverageBank(whole, [EmaProfile("ema", 0.5, warmup=False)])
    for step in range(3):
        move(whole, step)
        with torch.no_grad():
            for mine, source in zip(net.parameters(), whole.parameters()):
                if sharded:
                    from torch.distributed.tensor import distribute_tensor

                    mine.copy_(distribute_tensor(source.detach(), mine.device_mesh, mine.placements))
                else:
                    mine.copy_(source)
        bank.update()
        expected.update()
    x = torch.ones(1, 3, dtype=torch.float64)
    live = net(x).item()
    with bank.swapped_in("ema"), expected.swapped_in("ema"):
        averaged, right = net(x).item(), whole(x).item()
        held = copies(net) if not sharded else {"": torch.zeros(())}
    after = net(x).item()
    torch.distributed.destroy_process_group()
    return averaged == right, averaged != live, after == live, digest(held)


@pytest.mark.parametrize(("layout", "sharded"), [("local_shard", False), ("local_shard", True), ("full_tensor", True)])
def test_every_rank_computes_with_the_whole_average(layout, sharded):
    ended = [e.value for e in run_ranks(2, swap_as_a_rank, layout, sharded)]
    assert [e[:3] for e in ended] == [(True, True, True)] * 2
    assert ended[0][3] == ended[1][3]
