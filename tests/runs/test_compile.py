"""Compiled models: no graph break, one graph for all tasks and sizes, and the numbers and gradients
of eager mode.
"""

import re
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from config_inputs import write
from helpers import assert_same as assert_same_checkpoints
from helpers import compile_with, tiny_input, write_system, wrong_forces
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
)
from toy_models import (
    SECTIONS,
    TRICLINIC,
    batch_of,
    model_section,
    toy_atoms,
    toy_model,
)
from training_runs import load

from deepmd_ema import cli
from deepmd_ema.config import model_config_from_dict
from deepmd_ema.config.schema.descriptor import DESCRIPTORS
from deepmd_ema.config.schema.model import Link
from deepmd_ema.config.schema.optim import EnerLossConfig
from deepmd_ema.config.schema.training import CompileConfig
from deepmd_ema.distributed.world import World
from deepmd_ema.infer import evaluate as evaluating
from deepmd_ema.model import compiler as compiling
from deepmd_ema.model.build import build_model, share_parts
from deepmd_ema.model.compiler import Compiler, pad_for
from deepmd_ema.model.energy import run
from deepmd_ema.training.loss import EnergyLoss

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]  # dynamo's own; compiling takes time

SMALL = {"neuron": [2], "axis_neuron": 2, "nlayers": 1}
# without the block of se_e3_tebd, and with fewer networks: the time to trace a graph grows with
# their number
ONE_SIDE = {"type_one_side": True}
SMALLER = {
    "dpa2": {"use_three_body": False},
    "dpa4": {"n_blocks": 1, "mixing_layers": 1},
    "hybrid": {
        "list": [
            SECTIONS["se_e2_a"] | {"neuron": [2], "axis_neuron": 2} | ONE_SIDE,
            SECTIONS["se_e3"] | {"neuron": [2], "rcut": 3.5},
        ]
    },
}
NET = {"neuron": [2], "numb_fparam": 1, "numb_aparam": 2}
LOSS = EnerLossConfig(start_pref_v=1, limit_pref_v=1)
TRACED = CompileConfig(backend="aot_eager")
# what two tasks share; without an embedding of elements the third way is the fourth
WAYS = {
    "all": [("descriptor", 0), ("fitting_net", 0)],
    "the fitting network": [("fitting_net", 0)],
    "the type embedding": [("descriptor", 1)],
    "nothing": [],
}
# elements of the atoms, and the cell: sizes 0 and 1 and equal numbers are where torch makes graphs
# of their own
FRAMES = [
    ((0, 0, 1, 1, 2, 2), TRICLINIC),
    ((1, 0, 1, 1, 2), TRICLINIC),
    ((1,), None),
    ((0, 2, 2, 0), None),
]


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    yield
    torch._dynamo.reset()


def batches_of(model):
    rng = np.random.default_rng(0)
    for types, box in FRAMES:
        labels = {
            "energy": rng.normal(),
            "force": rng.normal(size=(len(types), 3)),
            "virial": rng.normal(size=9),
        }
        conditions = {
            "fparam": rng.normal(size=1),
            "aparam": rng.normal(size=(len(types), 2)),
        }
        yield batch_of(
            model,
            (toy_atoms(1, len(types))[0], types, box),
            labels=labels,
            **conditions,
        )


def outputs_loss_and_gradients(call, model, batch):
    out = call(model, batch)
    loss, shown = EnergyLoss(LOSS, 0.01, World())(out, batch, 0.005)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(
        loss, parameters, allow_unused=True, materialize_grads=True
    )
    return [
        *(v.detach() for v in out.values()),
        loss.detach(),
        *shown.values(),
        *gradients,
    ]


def assert_same(found, expected, tolerance=1e-10):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def two_tasks(descriptor, way):
    """Return the models of two tasks that share parts, with numbers of their own in every buffer
    that is not shared.
    """
    toy = partial(toy_model, descriptor, SMALL | SMALLER.get(descriptor, {}), NET)
    models = {
        name: toy(seed=seed)[1].train() for name, seed in (("water", 3), ("ice", 4))
    }
    links = [
        Link(task, part, part, level)
        for task in models
        for part, level in WAYS[way]
        if not level or hasattr(models[task].descriptor, "type_embedding")
    ]
    share_parts(
        models,
        [
            Link(link.task, link.part, link.key, link.level * (link.task == "ice"))
            for link in links
        ],
    )
    with torch.no_grad():
        for number, model in enumerate(models.values()):
            model.out_bias += number
            model.fitting.get_buffer("fparam_avg").add_(0.0)
    return models


# se_atten_v2 is se_atten with other options; se_e2_a and se_e3 are parts of the hybrid one; other
# tests have se_e2_r
@pytest.mark.parametrize(
    "descriptor", sorted({*DESCRIPTORS} - {"se_atten", "se_e2_a", "se_e2_r", "se_e3"})
)
def test_tasks_of_one_structure_share_one_graph_for_all_sizes_however_they_share_parts(
    descriptor,
):
    compiler = Compiler(TRACED)
    for way in WAYS:
        models = two_tasks(descriptor, way)
        for model in models.values():
            if not compiler.graphs:
                compiler.trace(model, next(batches_of(model)))
            for batch in batches_of(model):
                found = outputs_loss_and_gradients(compiler, model, batch)
                assert_same(found, outputs_loss_and_gradients(run, model, batch))
    assert sum(counters["graph_break"].values()) == 0
    assert [graph.purpose for graph in compiler.graphs] == ["training"]
    assert counters["stats"]["unique_graphs"] == 1
    if torch.__version__ < "2.14":  # which looks at the numbers of dpa4c twice
        assert [metrics.restart_reasons for metrics in get_compilation_metrics()] == [
            set()
        ]  # traced once


@pytest.mark.parametrize(("packed", "dynamic"), [(True, False), (False, True)])
def test_batches_padded_and_packed_ahead_share_a_graph_and_have_the_loss_of_the_batch(
    packed, dynamic, monkeypatch
):
    compiler = Compiler(CompileConfig(backend="aot_eager", dynamic=dynamic))
    _, model = toy_model("se_e2_r", SMALL | ONE_SIDE, NET)
    loss = EnergyLoss(LOSS, 0.01, World())
    for batch in [*batches_of(model.train())][: None if dynamic else 2]:
        padded = pad_for(compiler.options, model.layout)(batch)
        if packed:
            padded = padded.pack().to(torch.device("cpu"))
        found = []
        for call, one in ((compiler, padded), (run, batch)):
            total, shown = loss(call(model, one), one, 0.005)
            found.append(
                [
                    total.detach(),
                    *shown.values(),
                    *torch.autograd.grad(total, list(model.parameters())),
                ]
            )
        assert_same(*found)
    assert len(compiler.graphs) == 1 if dynamic else len(compiler.graphs) <= 2
    # finite numbers of compiled code are not computed again
    monkeypatch.setattr("deepmd_ema.model.compiler.run", None)
    compiler(model, padded)


TINY = {
    "model__descriptor": {
        "type": "se_e2_r",
        "sel": [20, 20],
        "rcut": 4.0,
        "rcut_smth": 1.0,
        "neuron": [2],
        **ONE_SIDE,
    },
    "model__fitting_net": {"neuron": [2]},
    "training__compile_options": {"backend": "aot_eager"},
    "training__enable_ema": True,
    "training__save_freq": 3,
    "training__disp_freq": 2,
    "validating": {
        "full_validation": True,
        "ema_full_validation": True,
        "validation_freq": 3,
        "full_val_start": 0,
    },
}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    for n, natoms in enumerate((5, 7)):
        write_system(tmp_path / f"train_{n}", frames=4, natoms=natoms, seed=n)
    write_system(tmp_path / "validation", frames=3, natoms=6, seed=9)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(folder, *arguments, **changes):
    """Train in a folder of its own and return the last checkpoints, live and averaged."""
    folder.mkdir(exist_ok=True)
    systems = [folder.parent / f"train_{n}" for n in (0, 1)]
    write(
        folder,
        tiny_input(
            systems, [folder.parent / "validation"], num_steps=6, **(TINY | changes)
        ),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", *arguments, "input.json"]) == 0
    return [load(folder / name) for name in ("model.ckpt-6.pt", "model_ema.ckpt-6.pt")]


def test_a_run_is_the_eager_one_to_rounding_and_a_restart_of_it_is_bitwise(
    desk, caplog
):
    caplog.set_level("INFO")
    eager = train(desk / "eager")
    whole = train(desk / "whole", training__enable_compile=True)
    assert_same(
        [*whole[0]["model"].values(), *whole[1]["model"].values()],
        [*eager[0]["model"].values(), *eager[1]["model"].values()],
    )
    assert (desk / "whole" / "val_ema.log").read_text() == (
        desk / "eager" / "val_ema.log"
    ).read_text()
    torch._dynamo.reset()
    first = str(desk / "whole" / "model.ckpt-3.pt")
    parts = train(desk / "parts", "--restart", first, training__enable_compile=True)
    for one, other in zip(whole, parts):
        assert_same_checkpoints(one["model"], other["model"])
    purposes = [
        r.args[1] for r in caplog.records if r.message.startswith("compiled graph")
    ]
    assert purposes == ["training", "validation"] * 2
    assert "compiled  2 graphs in" in caplog.text


def warnings_of(caplog):
    return [
        r.getMessage()
        for r in caplog.records
        if r.levelname == "WARNING" and "evaluated eagerly" in r.getMessage()
    ]


def no_code(graph, inputs):
    raise NotImplementedError("no kernel for this")


@pytest.mark.parametrize("backend", [wrong_forces, no_code])
def test_a_run_whose_compiled_code_is_wrong_or_not_made_warns_once_and_is_the_eager_run(
    desk, caplog, backend
):
    eager = train(desk / "eager")
    caplog.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", compile_with(backend))
        found = train(desk / "wrong", training__enable_compile=True)
    for one, other in zip(eager, found):
        assert_same_checkpoints(one["model"], other["model"])
    (warning,) = warnings_of(caplog)
    assert warning.startswith("training.enable_compile: ")
    if backend is no_code:
        assert "could not compile the model (NotImplementedError: " in warning
    else:
        assert re.search(
            r"force -?0 instead of -?0\.\d+ \(difference [01]\..* of 0\.\d+; rounding gives less",
            warning,
        )
    assert warning.endswith("Steps and validation are evaluated eagerly.")
    assert "compiled  " not in caplog.text


@pytest.mark.parametrize("backend", [wrong_forces, no_code])
def test_a_later_graph_that_is_wrong_or_not_made_leaves_the_run_eager_with_one_warning(
    caplog, backend
):
    """A graph for each size: the first is right, the second is not.

    A graph that was not made ended the run.
    """
    _, model = toy_model("se_e2_r", SMALL | ONE_SIDE, NET)
    first, second, *_ = batches_of(model.train())
    compiler = Compiler(CompileConfig(backend="aot_eager", dynamic=False))
    assert compiler.trace(model, first) == ""
    compiler._run = torch.compile(run, backend=backend, dynamic=False)
    torch._dynamo.reset()
    found = outputs_loss_and_gradients(compiler, model, second)
    assert_same(found, outputs_loss_and_gradients(run, model, second))
    assert len(warnings_of(caplog)) == 1
    assert not compiler.serves(model)


def test_an_error_that_is_not_the_compilers_is_raised_and_nothing_is_refused(
    caplog, monkeypatch
):
    def fail(*_, **__):
        raise ZeroDivisionError("of the model")

    _, model = toy_model("se_e2_r", SMALL | ONE_SIDE, NET)
    batch = next(batches_of(model.train()))
    compiler = Compiler(TRACED)
    monkeypatch.setattr(model.descriptor, "forward", fail)
    with pytest.raises(ZeroDivisionError, match="of the model"):
        compiler(model, batch)
    assert not warnings_of(caplog)
    assert compiler.serves(model)


def test_gradients_by_parameters_are_compared():
    def wrong(graph, inputs):
        def evaluate(*args):
            return [
                x.detach() + 2 * (x - x.detach()) if x.requires_grad else x
                for x in graph.forward(*args)
            ]

        return evaluate

    _, model = toy_model("se_e2_r", SMALL | ONE_SIDE, NET)
    batch = next(batches_of(model.train()))
    compiler = Compiler(TRACED)
    compiler._run = torch.compile(run, backend=wrong, dynamic=True)
    assert "gradient by " in compiler.trace(model, batch)
    assert compiler.trace(model.eval(), batch) == ""


class Distorted:
    """In the place of ``torch.compile``: eager code with one parameter that is another, or has
    another gradient.
    """

    def __init__(self, name, factor=1.0, factor_of_gradient=1.0):
        self.name, self.factor, self.factor_of_gradient = (
            name,
            factor,
            factor_of_gradient,
        )

    def __call__(self, function, **_):
        return self.run

    def run(self, model, batch):
        p = model.get_parameter(self.name)
        value = self.factor * (p.detach() + self.factor_of_gradient * (p - p.detach()))
        return torch.func.functional_call(model, {self.name: value}, (batch,))


# layers and blocks are alike: the time grows with their number, squared
SHORT = {"neuron": [2, 4], "n_blocks": 1, "mixing_layers": 1}
# a gradient of dpa3 and dpa4 is 0 whatever the weights are: what the last layer computes for a next
# one, one choice
WITHOUT_GRADIENT = re.compile(
    r"layers\.[12]\.(edge|angle)_(self|update|angle|angle_out)\b|router"
)


@pytest.mark.parametrize("descriptor", sorted(DESCRIPTORS))
def test_wrong_code_of_a_fresh_model_is_refused_whatever_parameter_it_is_about(
    descriptor, monkeypatch, caplog
):
    """Weights that begin at 0 left most gradients of dpa4 at 0, so that code without them
    passed.
    """
    changes = SHORT if descriptor == "dpa3" else {**SHORT, "nlayers": 2}
    model = build_model(
        model_config_from_dict(model_section(descriptor, changes, NET)), 3
    )
    coord, types = toy_atoms(1)
    batch = batch_of(
        model, (coord, types, None), fparam=np.ones(1), aparam=coord[:, :2]
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    evaluate, eager = compiling._numbers, {}

    def numbers(function, model, batch, scale):
        """Return the numbers; those of eager code, which are the same for each parameter, are
        computed once.
        """
        if function is not run:
            return evaluate(function, model, batch, scale)
        if model.training not in eager:
            eager[model.training] = evaluate(function, model, batch, scale), dict(scale)
        scale.update(eager[model.training][1])
        return eager[model.training][0]

    monkeypatch.setattr(compiling, "_numbers", numbers)
    names = [
        n
        for n, p in model.named_parameters()
        if p.numel() and not WITHOUT_GRADIENT.search(n)
    ]
    for name in names:
        monkeypatch.setattr(torch, "compile", Distorted(name, factor_of_gradient=1.5))
        reason = Compiler(TRACED).trace(model.train(), batch)
        assert reason.startswith(
            f"code compiled by torch {torch.__version__} gives other numbers: gradient by "
        ), name
        monkeypatch.setattr(torch, "compile", Distorted(name, factor=3.0))
        is_refused = "gives other numbers" in Compiler(TRACED).trace(
            model.eval(), batch
        )
        assert is_refused or name.endswith(
            "message_node_grid_product.scalar_gate.weight"
        ), name  # of 1e-9
    monkeypatch.setattr(torch, "compile", Distorted(names[0]))
    assert [
        Compiler(TRACED).trace(model.train(mode), batch) for mode in (True, False)
    ] == ["", ""]
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )
    assert torch.equal(torch.get_rng_state(), state)


def small_compiler(monkeypatch, code):
    """Return a compiler whose code is that of a function, a model of it, and a batch."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: code)
    _, model = toy_model("se_e2_r", SMALL | ONE_SIDE, NET)
    return Compiler(TRACED), model.train(), next(batches_of(model))


def test_steps_are_compared_once_more_after_20_and_validation_where_it_is_due(
    monkeypatch, caplog
):
    wrong = []

    def code(model, batch):
        out = run(model, batch)
        return out | {"force": (1.3 if model.training in wrong else 1.0) * out["force"]}

    compiler, model, batch = small_compiler(monkeypatch, code)
    assert compiler.trace(model, batch) == ""
    wrong.append(True)
    for _ in range(19):
        compiler(model, batch)
    assert not warnings_of(caplog)
    found = compiler(model, batch)["force"]
    assert torch.equal(found, run(model, batch)["force"])
    assert "gives other numbers: force" in warnings_of(caplog)[0]
    assert not compiler.serves(model)

    caplog.clear()
    compiler = Compiler(TRACED)
    compiler(model.eval(), batch)  # the first one is compared
    wrong.append(False)
    compiler(model, batch)
    assert not warnings_of(caplog)
    compiler.due.add(False)
    compiler(model, batch)
    assert "Validation is evaluated eagerly." in warnings_of(caplog)[0]


def test_numbers_that_are_not_finite_are_a_difference_on_either_side(
    monkeypatch, caplog
):
    def code(model, batch):
        return {
            name: value * (torch.nan if name == "energy" else 1.0)
            for name, value in run(model, batch).items()
        }

    compiler, model, batch = small_compiler(monkeypatch, code)
    assert "gives other numbers: energy nan instead of" in compiler.trace(model, batch)
    found = compiler(model, batch)  # later, between two comparisons
    assert torch.equal(found["energy"], run(model, batch)["energy"])
    assert (
        "gives energies that are not finite, eager code finite ones"
        in warnings_of(caplog)[0]
    )
    assert not compiler.serves(model)
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    compiler, *_ = small_compiler(monkeypatch, run)
    assert "nan instead of nan" in compiler.trace(model, batch)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_in_reduced_precision_the_bound_is_what_eager_numbers_lose(factor, monkeypatch):
    """It was 0.78 in bfloat16, so that forces 1.3 times too large passed."""
    generator = torch.Generator().manual_seed(0)
    reduced = [True]

    def rounded(model, batch):
        out = run(model, batch)
        noise = {
            n: 2**-9 * reduced[0] * torch.randn(v.shape, generator=generator).to(v)
            for n, v in out.items()
        }
        return {
            name: value + noise[name] * value.detach().abs().amax()
            for name, value in out.items()
        }

    def code(model, batch):
        out = rounded(model, batch)
        return out | {"force": out["force"] + (factor - 1) * out["force"].detach()}

    @contextmanager
    def full(model):
        reduced[0] = False
        yield
        reduced[0] = True

    compiler, model, batch = small_compiler(monkeypatch, code)
    monkeypatch.setattr(compiling, "run", rounded)
    monkeypatch.setattr(compiling, "_has_reduced_products", lambda model: True)
    monkeypatch.setattr(compiling, "_full_precision", full)
    reason = compiler.trace(model, batch)
    assert ("gives other numbers: force" in reason) == (factor > 1), reason


def test_full_precision_is_that_of_the_parameters_and_ends(monkeypatch):
    _, model = toy_model("dpa4", {"use_amp": True})
    torch.set_float32_matmul_precision("high")
    try:
        with compiling._full_precision(model.train()):
            assert not model.descriptor.section.use_amp
            assert torch.get_float32_matmul_precision() == "highest"
        assert model.descriptor.section.use_amp
        assert torch.get_float32_matmul_precision() == "high"
        model.eval().descriptor.infers_in_bfloat16 = True
        with compiling._full_precision(model):
            assert not model.descriptor.infers_in_bfloat16
        assert model.descriptor.infers_in_bfloat16
    finally:
        torch.set_float32_matmul_precision("highest")


def test_errors_of_a_compiled_model_are_those_of_the_eager_one(
    desk, capsys, caplog, monkeypatch
):
    train(desk / "run")
    monkeypatch.setattr(evaluating, "CompileConfig", lambda: TRACED)
    command = [
        "test",
        "-m",
        str(desk / "run" / "model_ema.ckpt.pt"),
        "-s",
        str(desk / "validation"),
    ]
    found = []
    for more in ([], ["--compile"]):
        capsys.readouterr()
        assert cli.main([*command, *more]) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert counters["stats"]["unique_graphs"] >= 1
    torch._dynamo.reset()
    caplog.clear()
    monkeypatch.setattr(torch, "compile", compile_with(wrong_forces))
    assert cli.main([*command, "--compile"]) == 0
    assert capsys.readouterr().out == found[0]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("--compile: code compiled by torch")
    assert warning.endswith("The test is evaluated eagerly.")
