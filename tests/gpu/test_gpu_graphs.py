"""Training steps as functions of static buffers, and as CUDA graphs where there is a real GPU."""

import json

import pytest
import torch
from gpu_counts import IS_PRETENDED
from helpers import assert_same, tiny_input
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from training_runs import WITH_AVERAGES, StopAfter, load

from deepmd_ema.errors import Interrupted
from deepmd_ema.training import step as steps
from deepmd_ema.training.run import run_training
from deepmd_ema.training.trainer import Callback

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS = 50
SEVERAL = {
    "training__averaging": [
        {"type": "ema", "name": "slow", "decay": 0.9},
        {"type": "ema", "name": "seldom", "decay": 0.8, "update_every": 3},
        {"type": "power", "name": "late", "sigma_rel": 0.1, "start_step": 7},
        {"type": "ema", "name": "host", "decay": 0.9, "device": "cpu"},
    ]
}


class Calls(TorchDispatchMode):
    """Records the operations below autograd with their arguments, of tensors those that a graph
    would record.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        shown = tree_map(
            lambda a: (a.dtype, a.shape) if isinstance(a, torch.Tensor) else a,
            (args, kwargs or {}),
        )
        if function.namespace == "aten":
            self.calls.append((str(function), str(shown)))
        return function(*args, **(kwargs or {}))


class PretendedCapture:
    """Takes the place of a CUDA graph: runs the step each time, and checks that a graph could have
    done it.

    At every use the operations are the same, with the same numbers of the host, on static memory,
    without a wait.
    """

    num_launches = 0

    def __call__(self, step):
        recorded = []

        def launch():
            PretendedCapture.num_launches += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                with Calls() as seen, pytest.MonkeyPatch.context() as patch:
                    # optimizers of torch look at it
                    patch.setattr(
                        torch.cuda, "is_current_stream_capturing", lambda: True
                    )
                    patch.setattr(torch.cuda.Stream, "is_capturing", lambda _: True)
                    updated = step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            recorded.append(seen.calls)
            for before, now in zip(recorded[0], seen.calls, strict=True):
                assert before == now
            return updated

        return launch


@pytest.fixture
def start(tmp_path, monkeypatch, water_like, water_like_valid, mixed_like):
    """Return a function that trains with CUDA graphs, which are pretended where the GPU is."""
    monkeypatch.setattr(PretendedCapture, "num_launches", 0)
    if IS_PRETENDED:
        monkeypatch.setattr(
            steps.GraphedSteps, "capture", lambda _, step: PretendedCapture()(step)
        )

    def run(name, options=None, num_steps=STEPS, graphs=True, **how):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        monkeypatch.chdir(folder)
        chosen = {**WITH_AVERAGES, "training__cuda_graphs": graphs, **(options or {})}
        config = tiny_input(
            [water_like, mixed_like], [water_like_valid], num_steps=num_steps, **chosen
        )
        (folder / "input.json").write_text(json.dumps(config))
        run_training("input.json", device="cuda", **how)
        return folder

    return run


class Watch(Callback):
    """Records the memory of a run after each step: addresses of what is kept, and bytes."""

    def __init__(self):
        self.addresses, self.allocated, self.graphs = [], [], 0

    def after_step(self, trainer):
        parameters = list(trainer.validator.models.parameters())
        optimizer = trainer.take_step._optimizer
        state = [t for p in parameters for t in optimizer.state.get(p, {}).values()]
        averages = [
            b.flat for name in trainer.bank.names for b in trainer.bank[name].buffers
        ]
        kept = [*parameters, *state, *averages, trainer.take_step._first_bad]
        self.addresses.append([t.data_ptr() for t in kept])
        self.allocated.append(torch.cuda.memory_allocated())
        self.graphs = len(trainer.graphs._graphs)


def assert_same_run(a, b):
    assert_same(load(a / f"model.ckpt-{STEPS}.pt"), load(b / f"model.ckpt-{STEPS}.pt"))
    assert (a / "lcurve.out").read_bytes() == (b / "lcurve.out").read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {},
        SEVERAL,
        {"optimizer": {"type": "HybridMuon"}, "training__gradient_max_norm": 1.0},
        {"optimizer": {"type": "AdaMuon"}, "model__descriptor__precision": "float32"},
        {
            "optimizer": {
                "type": "AdamW",
                "groups": [
                    {"pattern": "descriptor.*", "lr_scale": 0.3, "weight_decay": 0}
                ],
            }
        },
        {"optimizer": {"type": "AdamWScheduleFree"}},
    ],
    ids=[
        "Adam",
        "several averages",
        "HybridMuon",
        "AdaMuon",
        "groups",
        "schedule-free",
    ],
)
def test_captured_steps_have_the_bits_of_eager_ones_while_shapes_change(
    start, monkeypatch, options
):
    watch = Watch()
    graphed = start("graphed", options, callback=watch)
    assert watch.graphs >= 3
    if IS_PRETENDED:
        assert PretendedCapture.num_launches > STEPS / 2
    monkeypatch.setattr(steps, "CAPTURED_AT_USE", STEPS + 1)
    assert_same_run(graphed, start("eager", options))


def test_what_a_run_keeps_stays_in_its_place_and_steps_leave_no_memory_behind(start):
    watch = Watch()
    start(
        "run",
        {"training__disp_freq": 1000, "validating__full_validation": False},
        callback=watch,
    )
    assert all(addresses == watch.addresses[0] for addresses in watch.addresses)
    assert (
        len(set(watch.allocated[STEPS // 2 :])) <= watch.graphs + 1
    )  # gradients of one shape or another


def test_a_restart_with_graphs_continues_to_the_last_bit(start):
    whole = start("whole")
    with pytest.raises(Interrupted):
        start("parts", callback=StopAfter(23))
    assert_same_run(whole, start("parts", restart="model.ckpt.pt"))


def test_a_step_that_is_not_finite_is_skipped_in_a_graph_too(start):
    from deepmd_ema.errors import DivergedError

    options = {
        "learning_rate__start_lr": 1e200,
        "learning_rate__stop_lr": 1e199,
        "training__save_freq": 4,
    }
    with pytest.raises(DivergedError, match=r"step \d+: .* frame \d+"):
        start("run", options)


class FreezesAWeight(Callback):
    """Freezes one weight after step 25, so that the averages are bound anew, and records the
    captured graphs.
    """

    def __init__(self):
        self.graphs = {}

    def after_step(self, trainer):
        if trainer.step == 25:
            next(trainer.validator.models.parameters()).requires_grad_(False)
        if trainer.graphs is not None:
            self.graphs[trainer.step] = len(trainer.graphs._graphs)


def test_averages_that_are_bound_anew_are_updated_eagerly_before_they_are_captured(
    start, monkeypatch
):
    freezes = FreezesAWeight()
    graphed = start("graphed", callback=freezes)
    assert freezes.graphs[25] > 0
    assert (
        freezes.graphs[26] == 0
    )  # this step copies the numbers of updates to the device
    assert freezes.graphs[STEPS] > 0
    monkeypatch.setattr(steps, "CAPTURED_AT_USE", STEPS + 1)
    assert_same_run(graphed, start("eager", callback=FreezesAWeight()))


@pytest.mark.real_gpu("a capture that fails")
def test_a_step_that_cannot_be_captured_stays_eager(start, monkeypatch, caplog):
    def waiting(self, *given):
        updated = step(self, *given)
        if torch.cuda.is_current_stream_capturing():
            updated.ok.item()
        return updated

    step, captured = steps.GraphedSteps._step, start("captured")
    monkeypatch.setattr(steps.GraphedSteps, "_step", waiting)
    assert_same_run(captured, start("waiting"))
    assert caplog.text.count("could not capture a CUDA graph") == 1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"training__accumulate": 2},
            "a step of several batches (training.accumulate) would be",
        ),
        (
            {"optimizer": {"type": "LKF"}, "loss": {"type": "ener"}},
            "LKF draws numbers on the host in each step.",
        ),
    ],
)
def test_steps_that_no_graph_can_hold_stay_eager(start, caplog, options, why):
    start("run", options, num_steps=4)
    assert f"training.cuda_graphs has no effect: {why}" in caplog.text
