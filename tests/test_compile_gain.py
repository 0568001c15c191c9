"""The gain of compiled training: when compiling pays off, and that measuring it changes nothing."""

import json
import logging
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import tiny_input, write_system
from test_interpolation import one_batch
from toy_models import toy_model

from deepmd_ema.cli.main import main
from deepmd_ema.config import config_from_dict
from deepmd_ema.dist.world import World
from deepmd_ema.model import compile_gain
from deepmd_ema.model.compile_gain import Gain, Work, measure_gain
from deepmd_ema.model.compiler import CompileOptions
from deepmd_ema.model.energy import run
from deepmd_ema.model.interpolation.series import MIN_TERMS
from deepmd_ema.model.tabulated import interpolations_of
from deepmd_ema.run_check import check
from deepmd_ema.training.assembly import assemble
from deepmd_ema.training.estimate import Cost

FASTER = Gain(42.0, 0.5, 0.25)
SLOWER = Gain(42.0, 0.21, 0.25)


class Eager:
    """A compiler, as far as a gain needs one, that has taken 10 s."""

    options, seconds = CompileOptions(), 10.0

    def __call__(self, model, batch):
        return run(model, batch)


def test_compiling_pays_off_after_the_steps_that_save_its_time():
    assert FASTER.break_even == 168
    text = (
        "gradients of a step take 0.25 s compiled and 0.5 s eager, so that 42 s of compiling pays off after 168 steps"
    )
    assert FASTER.describe() == text
    assert FASTER.warning(168) == ""
    assert f"{text}. 167 steps will be taken. Set it to false, unless" in FASTER.warning(167)


def test_compiled_steps_that_are_slower_are_warned_of_however_long_the_run_is():
    assert (
        "0.25 s compiled and 0.21 s eager, so that 42 s of compiling never pays off. Set it to false."
        in SLOWER.warning(10**9)
    )


def test_times_are_the_shortest_of_rounds_after_the_first_by_the_batches_of_a_task_in_a_step(monkeypatch):
    _, model = toy_model("se_e2_r")
    work = Work(1.5, model.train(), one_batch(model), True)
    times = {"eager": iter([9.0, 0.2, 0.1, 0.2] * 2), "compiled": iter([5.0, 0.06, 0.05, 0.06] * 2)}
    monkeypatch.setattr(
        compile_gain, "_seconds", lambda call, *_: next(times["eager" if call.func is run else "compiled"])
    )
    gain = measure_gain(Eager(), [work, work._replace(batches=0.5)])
    assert gain.eager == pytest.approx(2 * 0.1)
    assert gain.compiled == pytest.approx(2 * 0.05)
    assert gain.seconds == pytest.approx(10 + 2 * (5 - 0.05))  # the first use compiles the backward pass


@pytest.mark.parametrize("need_virial", [True, False])
def test_measuring_leaves_the_model_and_the_random_numbers_as_they_are(need_virial):
    _, model = toy_model("se_e2_a_interpolated", {"neuron": [4, 8]})
    (interpolation,) = interpolations_of(model.train()).values()
    interpolation.use(MIN_TERMS)
    before, random = {n: t.clone() for n, t in model.state_dict().items()}, torch.get_rng_state()
    gain = measure_gain(Eager(), [Work(1.0, model, one_batch(model), need_virial)])
    assert 0 < gain.compiled < 10
    assert 0 < gain.eager < 10
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (interpolation.terms, interpolation.needed) == (MIN_TERMS, 0)
    assert torch.equal(random, torch.get_rng_state())


def test_check_shows_and_warns_when_compiling_does_not_pay_off(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_system("data", frames=8)
    Path("input.json").write_text(json.dumps(tiny_input(["data"], num_steps=8)))
    numbers = dict.fromkeys(Cost.__dataclass_fields__, 1) | {"num_steps": 8}
    command = ["check", "input.json", "--time"]
    monkeypatch.setattr(check, "measure_steps", lambda *_: Cost(**numbers | {"gain": FASTER}))
    assert main(command) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "compiling gradients of a step take 0.25 s compiled" in out
    assert re.search(r"\d\. training\.enable_compile = true: .* 8 steps will be taken", out)
    monkeypatch.setattr(check, "measure_steps", lambda *_: Cost(**numbers | {"gain": SLOWER}))
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cost"]["measured"]["compiling"] == {
        "compiling_s": 42.0, "eager_gradients_s": 0.21, "compiled_gradients_s": 0.25, "break_even_steps": None,
    }  # fmt: skip
    assert "never pays off" in found["warnings"][-1]


def test_a_batch_for_which_eager_code_lacks_memory_does_not_end_a_compiled_run(monkeypatch, caplog):
    def lack(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    caplog.set_level(logging.INFO, "deepmd_ema")
    monkeypatch.setattr(assemble, "measure_gain", lack)
    config = config_from_dict(tiny_input(["data"]))
    _, model = toy_model("se_e2_r")
    compiler = SimpleNamespace(in_training=True, gain=None)
    models = SimpleNamespace(compiler=compiler, by_task={"": model})
    prepared = SimpleNamespace(config=config, models=models, shares={"": 1.0})
    needs = {"need_hessian": False, "need_virial": True}
    task = SimpleNamespace(name="", loss=SimpleNamespace(needs=lambda _: needs))
    assemble._measure_gain(prepared, [task], {"": one_batch(model)}, 10, World(), nullcontext)
    assert compiler.gain is None
    assert "eager code needs more memory than there is" in caplog.text
