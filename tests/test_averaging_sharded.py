"""Averages of sharded weights, on one process; several are the matter of the tests of parallel training."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from averaging_nets import PLAIN, Net, Recorded, assert_same, copies, make_net, on_device, through_staging

from deepmd_ema.averaging import AverageBank, EmaProfile, SwaProfile

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")

KINDS = [
    PLAIN,
    EmaProfile("whole", 0.9, warmup=False, layout="full_tensor"),
    SwaProfile("wide", layout="full_tensor", dtype="float64", start_step=2),
    SwaProfile("host", device="cpu", buffers="average"),
]


@contextmanager
def sharded_references(tmp_path):
    """Two equal networks, the first of them sharded over one process."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        net, reference = make_net(), make_net()
        fully_shard(net, mesh=mesh, reshard_after_forward=False)
        yield net, reference
    finally:
        torch.distributed.destroy_process_group()


def train(model, bank, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        bank.update()


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("profile", KINDS, ids=lambda p: p.name)
def test_a_sharded_module_sees_the_average_and_gets_its_weights_back(tmp_path, profile, staged):
    with sharded_references(tmp_path) as (net, reference):
        if staged:
            with through_staging():
                bank = AverageBank(net, [profile])
        else:
            bank = AverageBank(net, [profile])
        reference_bank, name = AverageBank(reference, [profile]), profile.name
        train(net, bank, 5)
        train(reference, reference_bank, 5)
        assert_same(bank.weights(name), reference_bank.weights(name))
        x = torch.ones(2, 3, dtype=torch.float64)
        live = net(x)
        with bank.swapped_in(name), reference_bank.swapped_in(name):
            assert torch.equal(net(x), reference(x))
            assert not torch.equal(net(x), live)
            assert_same(bank.weights("live"), reference_bank.weights("live"))
            assert_same(bank.weights(name), reference_bank.weights(name))
        assert torch.equal(net(x), live)
        again, other = AverageBank(net, [profile]), Net()
        again.load_state_dict(reference_bank.state_dict())
        assert_same(again.weights(name), bank.weights(name))
        assert again.info(name) == bank.info(name)
        bank.copy_to(name, other)
        assert_same(copies(other), reference_bank.weights(name))


@pytest.mark.parametrize("host_knows", [True, False])
def test_an_update_of_shards_does_not_communicate(tmp_path, monkeypatch, host_knows):
    from torch.distributed.tensor import DTensor

    with sharded_references(tmp_path) as (net, _):
        shards = [profile for profile in KINDS if profile.layout == "local_shard"]
        bank, whole = AverageBank(net, shards), AverageBank(net, [KINDS[1]])
        for name in ("full_tensor", "redistribute", "from_local"):
            monkeypatch.setattr(DTensor, name, lambda *_, **__: pytest.fail("communication"))
        with nullcontext() if host_knows else on_device(), Recorded() as seen:
            bank.update(torch.ones(()))
        assert seen.names
        assert not [name for name in seen.names if not name.startswith("aten::")]
        with pytest.raises(pytest.fail.Exception):  # what does communicate is noticed
            whole.update()


def test_frozen_weights_of_a_sharded_module_are_whole_in_the_averaged_model(tmp_path):
    with sharded_references(tmp_path) as (net, reference):
        net.first.requires_grad_(False)
        bank = AverageBank(net, [PLAIN])
        weights = bank.weights("ema")
        assert type(weights["first.weight"]) is torch.Tensor
        assert_same(weights, copies(reference))
