"""From an entry of an input to its average and what that does; files of averages when a run stops and continues."""

import signal

import pytest
import torch
from averaging_nets import Net, copies, make_net, move
from helpers import assert_same, tiny_input, trains_in
from test_train import InAveragedPassOfStep8, StopAfter, load

from deepmd_ema import checkpoint
from deepmd_ema.averaging import AverageBank, EmaProfile
from deepmd_ema.averaging.average import Average
from deepmd_ema.config import config_from_dict
from deepmd_ema.errors import Interrupted
from deepmd_ema.model.build import build_model
from deepmd_ema.training.prepare import tracked_averages

pytestmark = pytest.mark.timeout(120)

STEPS_PER = {"steps": 1.0, "frames": 0.5, "epochs": 8.0}
SINGLE = {"model__descriptor__precision": "float32", "model__fitting_net__precision": "float32"}


def profiles_of(*entries):
    return tracked_averages(
        config_from_dict(tiny_input(["a"], training__averaging=list(entries))), STEPS_PER, None, 100
    )


# ---- settings


@pytest.mark.parametrize(
    ("option", "value", "setting"),
    [
        ("device", "cpu", "cpu"),
        ("dtype", "float32", "float32"),
        ("layout", "full_tensor", "full_tensor"),
        ("buffers", "average", "average"),
        ("update_every", 3, 3),
        ("start_step", 7, 7),
        ("warmup", False, False),
        ("decay", 0.5, 0.5),
    ],
)
def test_an_option_of_an_entry_is_the_setting_of_its_average(option, value, setting):
    plain, changed = profiles_of({"name": "a", "decay": 0.9}, {"name": "b", "decay": 0.9, option: value})
    assert getattr(changed, option) == setting != getattr(plain, option)


def test_gamma_gives_each_step_its_weight():
    """Step t of T counts (t^4 - (t - 1)^4) / T^4 with gamma 3, and other weights with another gamma."""
    three, one = profiles_of({"name": "g3", "type": "power", "gamma": 3}, {"name": "g1", "type": "power", "gamma": 1})
    net, seen = make_net(), []
    bank = AverageBank(net, [three, one])
    for step in range(10):
        move(net, step)
        bank.update()
        seen.append(copies(net)["first.weight"])
    for name, p in (("g3", 4), ("g1", 2)):
        expected = sum(((t**p - (t - 1) ** p) / 10**p) * w for t, w in enumerate(seen, 1))
        assert torch.allclose(bank.weights(name)["first.weight"], expected, rtol=1e-13, atol=1e-14)


def test_device_says_where_an_average_is_held(monkeypatch):
    monkeypatch.setattr(Average, "seed", lambda *_: None)  # on this device there are no numbers to start from
    model = build_model(config_from_dict(tiny_input(["a"])).model).to("meta")
    bank = AverageBank(model, profiles_of({"name": "host", "decay": 0.9, "device": "cpu"}, {"name": "a", "decay": 0.9}))
    assert {t.device.type for t in bank["host"].tensors} == {"cpu"}
    assert {t.device.type for t in bank["a"].tensors} == {"meta"}


def test_dtype_says_how_wide_an_average_is_and_float64_is_the_default():
    model = build_model(config_from_dict(tiny_input(["a"], **SINGLE)).model)
    entries = [{"name": "narrow", "decay": 0.9, "dtype": "float32"}, {"name": "wide", "decay": 0.9}]
    bank = AverageBank(model, profiles_of(*entries))
    for name, dtype in (("narrow", torch.float32), ("wide", torch.float64)):
        assert {t.dtype for t in bank[name].tensors} == {dtype}
        assert bank.weights(name)["fitting.nets.0.layers.0.weight"].dtype == dtype


def test_buffers_says_whether_the_energies_of_elements_are_averaged():
    model = build_model(config_from_dict(tiny_input(["a"])).model)
    entries = [{"name": "copied", "decay": 0.5, "warmup": False}]
    entries += [{**entries[0], "name": "averaged", "buffers": "average"}]
    bank = AverageBank(model, profiles_of(*entries))
    before = model.out_bias.clone()
    model.out_bias += 1.0
    bank.update()
    assert torch.equal(bank.weights("copied")["out_bias"], before + 1)
    assert torch.equal(bank.weights("averaged")["out_bias"], before + 0.5)


@pytest.mark.parametrize("decay", [0.999, 0.9999])
def test_an_average_of_float32_weights_does_not_stay_behind_in_a_run_that_decays(decay):
    """In float32 it lost 7 to 10 % of its distance from the live weights: updates fell below its rounding."""
    generator = torch.Generator().manual_seed(0)
    net = Net(width=40, dtype=torch.float32)
    bank = AverageBank(net, [EmaProfile("default", decay), EmaProfile("narrow", decay, dtype="float32")])
    expected, steps = net.first.weight.detach().double().clone(), 12_000
    with torch.no_grad():
        for step in range(steps):
            rate = 1e-3 * 1e-3 ** (step / steps)
            net.first.weight.add_(rate * torch.randn(40, 3, generator=generator))
            bank.update()
            share = 1 - min(decay, (1 + step) / (10 + step))
            expected.lerp_(net.first.weight.double(), share)
    distance = (net.first.weight.double() - expected).norm()
    lost = {n: (bank.weights(n)["first.weight"].double() - expected).norm() / distance for n in bank.names}
    assert lost["default"] < 1e-8
    assert lost["narrow"] > 0.01  # what the option costs


# ---- files

ENTRIES = [
    {"name": "slow", "decay": 0.9, "full_validation": True},
    {"name": "p05", "type": "power", "sigma_rel": 0.05, "snapshots": True, "snapshot_freq": 3},
]
OPTIONS = {
    "training__enable_ema": True,
    "training__averaging": ENTRIES,
    "training__save_freq": 3,
    "training__max_ckpt_keep": 0,
    "validating__full_validation": True,
    "validating__ema_full_validation": True,
    "validating__validation_freq": 4,
    "validating__full_val_start": 0,
    "validating__max_best_ckpt": 1,
}
NAMES = {"ema", "slow", "p05"}


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid):
    """Return a function that trains in a folder of its own: start(name, num_steps, options, **how)."""

    return trains_in(tmp_path, monkeypatch, ([water_like], [water_like_valid]), OPTIONS)


def best_of(folder, prefix):
    return sorted(p.name for p in folder.glob(f"{prefix}.ckpt-*"))


def test_best_files_of_an_average_are_pruned_with_the_checkpoint_that_knows_of_them(start):
    """As those of the live weights: what no record names is gone after the next checkpoint."""
    folder = start("run", 6)
    stale = ["best.ckpt-900.t-1.pt", "best_ema.ckpt-900.t-1.pt", "best_slow.ckpt-900.t-2.pt"]
    for name in stale:
        (folder / name).touch()
    start("run", 9, restart="model.ckpt.pt")
    for prefix in ("best", "best_ema", "best_slow"):
        assert len(best_of(folder, prefix)) == 1
    assert not any((folder / name).exists() for name in stale)


def test_no_best_file_is_written_when_save_best_is_off(start):
    folder = start("run", 8, {"validating__save_best": False})
    assert not list(folder.glob("best*"))
    assert (folder / "val_slow.log").exists()
    assert not checkpoint.load("model.ckpt-8.pt").get("best")


@pytest.mark.parametrize("where", ["after a step", "in a validation"])
def test_a_stop_writes_the_averages_into_the_training_checkpoint(start, where):
    ask = InAveragedPassOfStep8(lambda trainer: trainer.stop.request(signal.SIGTERM))
    with pytest.raises(Interrupted):
        start("run", 20, callback=StopAfter(8) if where == "after a step" else ask)
    profiles = checkpoint.load("model.ckpt-8.pt")["averages"]["profiles"]
    assert profiles.keys() == NAMES
    for name, kept in profiles.items():
        assert kept["updates"] == 8
        own = load(f"model_{name}.ckpt-8.pt")["model"]
        assert_same(dict(kept["weights"]), {n: own[n] for n in kept["weights"]})


def test_the_row_of_a_validation_that_a_stop_broke_off_is_cut_at_each_restart(start):
    """Else a second restart from that checkpoint leaves the row of the first one, and writes it again."""
    whole = start("whole", 11)
    ask = InAveragedPassOfStep8(lambda trainer: trainer.stop.request(signal.SIGTERM))
    with pytest.raises(Interrupted):
        start("parts", 11, callback=ask)
    for _ in range(2):
        parts = start("parts", 11, restart="model.ckpt-8.pt")
        for name in ("val.log", "val_ema.log", "val_slow.log"):
            assert (whole / name).read_bytes() == (parts / name).read_bytes(), name


def steps_of(folder, series):
    return sorted(int(p.stem.rpartition("-")[2]) for p in folder.glob(f"{series}-*.pt"))


def test_files_and_snapshots_of_averages_that_a_restart_overtakes_go(start):
    """A restart from step 3 saves step 8 next: what was written at step 6 is of the branch that it has left."""
    folder = start("run", 12)
    series = ["model.ckpt", "model_ema.ckpt", "model_slow.ckpt", "model_p05.ckpt", "snapshots/model_p05.ckpt"]
    assert [steps_of(folder, name) for name in series] == [[3, 6, 9, 12]] * 5
    entries = [ENTRIES[0], {**ENTRIES[1], "snapshot_freq": 8}]
    start("run", 8, {"training__averaging": entries, "training__save_freq": 8}, restart="model.ckpt-3.pt")
    assert [steps_of(folder, name) for name in series] == [[3, 8, 9, 12]] * 5
