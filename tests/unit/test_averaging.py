"""Averages of the weights: the documented interface, parts of models, tasks, restarts, shards,
mistakes.
"""

import ast
import io
import logging
import pickle
import subprocess
import sys
import textwrap
from contextlib import contextmanager, nullcontext
from functools import reduce

import pytest
import torch
from averaging_nets import (
    PLAIN,
    POWER,
    WARM,
    EveryOther,
    Net,
    Recorded,
    assert_same,
    copies,
    make_net,
    move,
    on_device,
    through_staging,
    train,
)

import deepmd_ema.averaging
from deepmd_ema.averaging import AverageBank, EmaProfile, PowerProfile, SwaProfile
from deepmd_ema.errors import CheckpointError, ConfigError

# what nobody should have to import for an average of weights
HEAVY = {"h5py", "vesin", "dargs", "tqdm", "ase", "matplotlib"}
PACKAGES = {"averaging", "config", "distributed", "errors", "findings", "text", "utils"}


def test_the_example_of_the_documentation_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    text = deepmd_ema.averaging.__doc__.partition("::\n")[2].partition(
        "\nA bank can be pickled"
    )[0]
    names = {}
    exec(compile(ast.parse(textwrap.dedent(text)), "example", "exec"), names)
    bank, published = names["bank"], names["published"]
    assert bank.names == ("ema", "slow", "p1", "flat")
    assert bank.info("ema")["updates"] == 100
    assert bank.info("slow")["updates"] == 10
    assert_same(
        copies(published),
        {name: tensor.float() for name, tensor in bank.weights("p1").items()},
    )


def test_copy_to_publishes_an_average_into_a_module_of_the_same_shape():
    net = make_net()
    bank = AverageBank({"water": net, "ice": Net(width=2)}, [PLAIN])
    train(net, bank, range(1))
    other = Net(dtype=torch.float32)
    bank.copy_to("ema", other, task="water")
    averages = {
        name: bank.weights("ema")[f"water.{name}"].to(value.dtype)
        for name, value in copies(other).items()
    }
    assert_same(copies(other), averages)
    with pytest.raises(
        CheckpointError, match=r"first.weight is \(2, 3\) there, \(5, 3\) here"
    ):
        bank.copy_to("ema", other, task="ice")


def test_a_bank_can_be_pickled_with_its_network_and_continues():
    net = make_net()
    bank = AverageBank(
        net, [WARM, PowerProfile("p", 3.0, update_every=2, device="cpu")]
    )
    train(net, bank, range(4))
    module, again = pickle.loads(pickle.dumps((net, bank)))
    train(net, bank, range(4, 7))
    assert again.info("ema")["updates"] == 4
    train(module, again, range(4, 7))
    for name in ("live", *bank.names):
        assert_same(again.weights(name), bank.weights(name))
    assert again.info("p") == bank.info("p")


def test_importing_averages_imports_neither_the_trainer_nor_what_reads_data():
    code = (
        "import sys, torch; before = set(sys.modules); import deepmd_ema.averaging; "
        "print(*sorted(set(sys.modules) - before))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not {name.partition(".")[0] for name in found} & HEAVY
    packages = {name.split(".")[1] for name in found if name.startswith("deepmd_ema.")}
    assert packages == PACKAGES


def test_names_that_clash_are_an_error():
    with pytest.raises(
        ConfigError, match="averages ema, flat, ema: the names must differ"
    ):
        AverageBank(make_net(), [PLAIN, SwaProfile("flat"), WARM])


@pytest.mark.parametrize(
    "profile",
    [
        EmaProfile("ema", half_life=2, half_life_unit="epochs"),
        SwaProfile("flat", start_epoch=3),
    ],
)
def test_a_length_in_epochs_is_an_error_that_says_what_to_give(profile):
    with pytest.raises(
        ConfigError, match=r"averaging: a length in epochs.*Give it in steps"
    ):
        AverageBank(make_net(), [profile])


@pytest.fixture
def net():
    return make_net()


def test_a_parameter_that_is_switched_on_starts_from_its_live_value(net, caplog):
    caplog.set_level(logging.INFO)
    net.first.requires_grad_(False)
    bank = AverageBank(net, [PLAIN])
    move(net, 0)
    bank.update()
    state, second = bank.state_dict(), bank.weights("ema")["second.weight"]
    net.first.requires_grad_(True)
    with torch.no_grad():
        net.first.weight.fill_(3.0)
    bank.update()
    expected = torch.lerp(second, net.second.weight.detach(), 1 - 0.9)
    assert torch.equal(bank.weights("ema")["first.weight"], net.first.weight)
    assert torch.equal(bank.weights("ema")["second.weight"], expected)
    restarted = AverageBank(net, [PLAIN])
    restarted.load_state_dict(state)
    assert torch.equal(restarted.weights("ema")["second.weight"], second)
    assert "first.weight, first.bias was not averaged before" in caplog.text
    net.first.requires_grad_(False)
    train(net, bank, range(3, 5))
    net.first.requires_grad_(True)
    bank.update()
    assert torch.equal(
        bank.weights("ema")["first.weight"], net.first.weight
    )  # and starts again
    assert bank.info("ema")["updates"] == 5


@pytest.mark.parametrize("profile", [PLAIN, POWER])
def test_a_tensor_shared_by_tasks_has_one_average_and_a_task_may_be_idle_come_and_go(
    profile,
):
    water, ice = make_net(), Net()
    ice.first = water.first
    bank, apart = (
        AverageBank({"water": water, "ice": ice}, [profile]),
        AverageBank(water, [profile]),
    )
    idle = copies(ice)
    for step in range(50):
        move(water, step)
        bank.update()
        apart.update()
    weights, alone = bank.weights("ema"), apart.weights("ema")
    assert len(bank["ema"].tensors) == 6
    assert_same(
        {
            n.removeprefix("water."): t
            for n, t in weights.items()
            if n.startswith("water.")
        },
        alone,
    )
    of_ice = {n: t for n, t in weights.items() if n.startswith("ice.")}
    assert torch.equal(of_ice["ice.first.weight"], alone["first.weight"])
    assert torch.equal(
        of_ice["ice.second.weight"], idle["second.weight"]
    )  # without a drift
    saved = bank.state_dict()
    of_file = saved["profiles"]["ema"]["weights"]
    assert of_file["water.first.weight"] is of_file["ice.first.weight"]
    removed, added = (
        AverageBank({"ice": ice}, [profile]),
        AverageBank({"water": water, "ice": ice}, [profile]),
    )
    removed.load_state_dict(saved)
    assert_same(removed.weights("ema"), of_ice)
    added.load_state_dict(removed.state_dict())
    assert_same(
        {n: t for n, t in added.weights("ema").items() if n.startswith("ice.")}, of_ice
    )
    assert torch.equal(added.weights("ema")["water.second.weight"], water.second.weight)


def test_buffers_are_averaged_on_request_and_integers_never(net):
    profile = EmaProfile("ema", 0.9, warmup=False, buffers="average")
    bank = AverageBank(net, [profile, EmaProfile("copy", 0.9, warmup=False)])
    history = [net.mean.clone()]
    for step in range(5):
        move(net, step)
        net.mean = net.mean + step  # as a forward pass may
        net.atomic_number.add_(1)
        net.cache.add_(1)
        bank.update()
        history.append(net.mean.clone())
    live = copies(net)
    weights = bank.weights("ema")
    assert torch.allclose(
        weights["mean"],
        reduce(lambda average, mean: 0.9 * average + 0.1 * mean, history),
        rtol=1e-13,
    )
    assert torch.equal(weights["atomic_number"], live["atomic_number"])
    assert weights["atomic_number"].dtype == torch.int64
    assert list(weights) == list(live)
    assert torch.equal(bank.weights("copy")["mean"], live["mean"])
    with bank.swapped_in("ema"):
        assert torch.equal(net.mean, weights["mean"])
        assert torch.equal(bank.weights("copy")["mean"], live["mean"])
    assert_same(copies(net), live)


KINDS = [
    WARM,
    EmaProfile("slow", 0.999, start_step=7, update_every=3),
    EmaProfile("late", 0.9, start_step=20),
    PowerProfile.from_sigma_rel("p1", 0.1),
    PowerProfile("p2", 3.0, update_every=4, start_step=2, dtype="float64"),
    SwaProfile("flat", start_step=5, buffers="average"),
    SwaProfile("host", device="cpu", dtype="float32"),
    SwaProfile("even", should_update=EveryOther(0, 0)),
]


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize(("dtype", "at"), [(torch.float32, 1), (torch.bfloat16, 11)])
def test_a_restart_continues_every_average_bitwise(dtype, staged, at):
    with through_staging() if staged else nullcontext():
        net, other = make_net(dtype=dtype), Net(dtype=dtype)
        bank = AverageBank(net, KINDS)
        for step in range(at):
            advance(net, bank, step)
        torch.save(bank.state_dict(), file := io.BytesIO())
        file.seek(0)
        other.load_state_dict(copies(net))
        restarted = AverageBank(other, KINDS)
        restarted.load_state_dict(torch.load(file, weights_only=True))
    for step in range(at, 31):
        advance(net, bank, step)
        advance(other, restarted, step)
    assert_same(copies(net), copies(other))
    for name in bank.names:
        assert_same(bank.weights(name), restarted.weights(name))
        assert bank.info(name) == restarted.info(name)
        assert bank.info(name)["updates"] > 0
    assert {t.dtype for t in restarted["host"].tensors} == {torch.float32}


def advance(net, bank, step):
    move(net, step)
    net.mean.add_(0.25)
    bank.update(epoch=step / 10)


def test_every_setting_that_changed_is_warned_of_and_counts_from_now_on(net, caplog):
    bank = AverageBank(net, [PowerProfile("p", 3.0), EmaProfile("e", 0.9), PLAIN])
    train(net, bank, range(5))
    state = bank.state_dict()
    others = [
        PowerProfile("p", 6.0, update_every=2),
        SwaProfile("e"),
        EmaProfile("ema", 0.5, warmup=False),
    ]
    again = AverageBank(net, others)
    again.load_state_dict(state)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "average p: update_every was 1 in the checkpoint and is 2 from now on",
        "average p: gamma was 3.0 in the checkpoint and is 6.0 from now on",
        "average e: was of type ema in the checkpoint and is swa from now on",
        "average ema: decay was 0.9 in the checkpoint and is 0.5 from now on",
    ]
    assert again.info("p")["updates"] == 2  # 5 steps, of which each update has 2 now
    assert again.info("ema")["decay"] == 0.5
    assert_same(again.weights("p"), bank.weights("p"))


def moved_to(net, step):
    """Make all weights equal to ``step``."""
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(float(step))


@pytest.mark.parametrize(("before", "after"), [(10, 1), (1, 10)])
def test_equal_weights_of_all_steps_stay_so_when_updates_are_rarer_or_more_frequent(
    net, before, after
):
    bank = AverageBank(net, [SwaProfile("flat", update_every=before)])
    for step in range(1, 201):
        if step == 101:
            state = bank.state_dict()
            bank = AverageBank(net, [SwaProfile("flat", update_every=after)])
            bank.load_state_dict(state)
        moved_to(net, step)
        bank.update()
    for name, _ in net.named_parameters():
        value = bank.weights("flat")[name]
        torch.testing.assert_close(value, torch.full_like(value, 103), rtol=0, atol=3)


def test_an_average_that_starts_later_than_in_the_file_starts_anew(net):
    bank = AverageBank(net, [EmaProfile("late", 0.9)])
    for step in range(1, 31):
        if step == 11:
            state = bank.state_dict()
            bank = AverageBank(net, [EmaProfile("late", 0.9, start_step=20)])
            bank.load_state_dict(state)
        moved_to(net, step)
        bank.update()
        if 11 <= step <= 20:
            for name, _ in net.named_parameters():
                value = bank.weights("late")[name]
                torch.testing.assert_close(value, torch.full_like(value, step))
    assert bank.info("late")["updates"] == 10


SHARDED = [
    PLAIN,
    EmaProfile("whole", 0.9, warmup=False, layout="full_tensor"),
    SwaProfile("wide", layout="full_tensor", dtype="float64", start_step=2),
    SwaProfile("host", device="cpu", buffers="average"),
]


@contextmanager
def sharded_references(tmp_path):
    """Two equal networks, the first of them sharded over one process."""
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        net, reference = make_net(), make_net()
        fully_shard(net, mesh=mesh, reshard_after_forward=False)
        yield net, reference
    finally:
        torch.distributed.destroy_process_group()


def train_by_gradients(model, bank, steps):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        optimizer.step()
        bank.update()


@pytest.mark.parametrize("staged", [False, True], ids=["direct", "staged"])
@pytest.mark.parametrize("profile", SHARDED, ids=lambda p: p.name)
def test_a_sharded_module_sees_the_average_and_gets_its_weights_back(
    tmp_path, profile, staged
):
    with sharded_references(tmp_path) as (net, reference):
        if staged:
            with through_staging():
                bank = AverageBank(net, [profile])
        else:
            bank = AverageBank(net, [profile])
        reference_bank, name = AverageBank(reference, [profile]), profile.name
        train_by_gradients(net, bank, 5)
        train_by_gradients(reference, reference_bank, 5)
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
        shards = [profile for profile in SHARDED if profile.layout == "local_shard"]
        bank, whole = AverageBank(net, shards), AverageBank(net, [SHARDED[1]])
        for name in ("full_tensor", "redistribute", "from_local"):
            monkeypatch.setattr(
                DTensor, name, lambda *_, **__: pytest.fail("communication")
            )
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
