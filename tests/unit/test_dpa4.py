"""DPA-4 and DPA4C: numbers of DeePMD-kit, rotations into frames, blocks in bfloat16."""

import json
from pathlib import Path

import pytest
import torch
from golden.drawn import fill, frames, loss_of, projections
from toy_models import TRICLINIC, batch_of, toy_atoms, toy_model

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.model.build import build_model
from deepmd_ema.model.families.dpa4 import module as dpa4_module
from deepmd_ema.model.families.dpa4.rotations import quaternions
from deepmd_ema.model.families.dpa4c.moments import slopes
from deepmd_ema.model.ops.operations import REFERENCE, use_operations

GOLDEN = Path(__file__).parents[1] / "golden"  # made_by: see golden/README.md
CASES = {
    kind: json.loads((GOLDEN / f"{kind}.json").read_text())
    for kind in ("dpa4", "dpa4c")
}
SAME_MATH, SERIES, GRADIENTS = (
    1e-11,
    1e-9,
    1e-8,
)  # relative; SERIES: what tables of polynomials may have
RENAMED = {
    "dpa4": (
        ("descriptor.layers.", "descriptor.blocks."),
        ("so2_conv.mixing.", "so2_conv."),
        ("so2_conv.attention.", "so2_conv."),
        ("fitting.nets.", "fitting_net.filter_layers.networks."),
    ),
    "dpa4c": (
        ("fitting.nets.", "fitting_net.nets._module_networks."),
        ("radial.embedding.", "radial_embedding."),
        ("radial.mode_head.", "radial_mode_head."),
        ("radial.adam_freqs", "radial_basis.adam_freqs"),
        (".linear.", "."),
        (".layers.0.weight", ".layers.0.w"),
        (".layers.1.weight", ".layers.1.w"),
        (".layers.2.weight", ".layers.2.w"),
        (".matrix", ".w"),
        (".bias", ".b"),
    ),
}


def model_of(kind, name):
    """Return the model of a case, its parameters by DeePMD-kit's names with the numbers that they
    had, and a frame.
    """
    case = CASES[kind][name]
    model, named = build_model(model_config_from_dict(case["model"]), 0), {}
    for path, parameter in model.named_parameters():
        for here, there in RENAMED[kind]:
            path = path.replace(here, there)
        named[path] = parameter
    fill(named.items())
    coord, types, boxes = frames(1 if kind == "dpa4" else 2)
    batches = [batch_of(model, (one, types, box)) for one, box in zip(coord, boxes)]
    if kind == "dpa4c":
        model.descriptor.type_embedding.adam_type_embedding.data[-1] = 0
        both = batch_of(model, *((one, types, box) for one, box in zip(coord, boxes)))
        model.descriptor.apply_statistics(model.descriptor.measure(both))
    if "version" in case:
        model.descriptor.version_tensor.fill_(case["version"])
    return model, named, batches[0]


def assert_close(found, expected, error=SAME_MATH):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert float(
        (torch.as_tensor(found).detach() - expected).abs().max()
    ) <= error * float(expected.abs().max())


@pytest.mark.parametrize(
    ("kind", "name", "way"),
    [
        (kind, name, way)
        for kind, ways in (
            ("dpa4", ["cpu", "reference"]),
            ("dpa4c", ["cpu", "reference", "series"]),
        )
        for name in CASES[kind]
        for way in ways
    ],
)
def test_numbers_and_gradients_are_those_of_deepmd_kit(kind, name, way):
    model, named, batch = model_of(kind, name)
    expected, error = CASES[kind][name], SERIES if way == "series" else SAME_MATH
    if kind == "dpa4c":
        descriptor = model.descriptor
        assert_close(descriptor.feature_spread, expected["stddev"])
        channels = expected["model"]["descriptor"]["channels"]
        assert_close(descriptor.feature_mean[-2 - channels :][:2], expected["mean"])
    if way == "series":
        model.descriptor.interpolation.use(160)
    if way == "reference":
        use_operations(model, REFERENCE)
    out = model.train()(batch)
    found = (
        out["energy"].sum(),
        batch.in_file_order(out["force"]),
        out["virial"].reshape(9),
    )
    for key, value in zip(("energy", "force", "virial"), found):
        assert_close(value, expected[key], error)
    gradients = torch.autograd.grad(
        loss_of(*found), list(named.values()), materialize_grads=True
    )
    ours, theirs = (
        torch.tensor(one)
        for one in (projections(dict(zip(named, gradients))), expected["gradients"])
    )
    torch.testing.assert_close(
        ours, theirs, rtol=GRADIENTS, atol=error * float(theirs.abs().max())
    )


@pytest.mark.parametrize(
    ("file", "case"), [("dpa4c.dp", "degree_4"), ("dpa4c.pt", "small")]
)
def test_files_of_deepmd_kit_give_its_numbers(file, case):
    coord, types, box = frames(2)
    found = Potential(load_model(GOLDEN / file), device="cpu").evaluate(
        coord[:1], types, box[:1]
    )
    assert_close(found.energy, [CASES["dpa4c"][case]["energy"]])
    assert_close(found.force[0], CASES["dpa4c"][case]["force"])


@pytest.mark.parametrize("roll", [0.3, 2.0])
@pytest.mark.parametrize("case", ["example", "streams", "both_atoms", "directions"])
def test_results_do_not_depend_on_the_rotation_of_frames_about_their_axes(
    monkeypatch, case, roll
):
    model, _, batch = model_of("dpa4", case)
    before = model(batch, create_graph=False)

    def rolled(direction):
        angle = roll * (1 + direction[:, 0])  # another one for each pair
        w, x, y, z = quaternions(direction).unbind(-1)
        c, s = torch.cos(angle / 2), torch.sin(angle / 2)
        return torch.stack(
            [c * w - s * z, c * x - s * y, c * y + s * x, c * z + s * w], -1
        )

    monkeypatch.setattr(dpa4_module, "quaternions", rolled)
    after = model(batch, create_graph=False)
    for name in ("energy", "force", "virial"):
        scale = float(before[name].abs().max())
        torch.testing.assert_close(
            after[name], before[name], rtol=0, atol=1e-11 * scale
        )


@pytest.mark.gpu
@pytest.mark.parametrize("use_amp", [False, True])
def test_blocks_are_computed_in_bfloat16_in_training_on_a_gpu(use_amp):
    """A float64 model stays in float64: autocast does not touch it."""
    _, model = toy_model("dpa4", {"precision": "float32", "use_amp": use_amp})
    batch = batch_of(model, (*toy_atoms(), TRICLINIC))
    expected = model(batch, create_graph=False)["energy"]
    model, there = model.to("cuda"), batch.to(torch.device("cuda"))
    in_validation = float(
        (model.eval()(there, create_graph=False)["energy"].cpu() - expected).abs().max()
    )
    in_training = float(
        (model.train()(there)["energy"].detach().cpu() - expected).abs().max()
    )
    assert in_validation < 1e-4
    assert (1e-4 < in_training < 1e-1) == use_amp


def test_derivatives_of_harmonics_are_the_same_whatever_was_in_memory():
    """They are a part of the model that no checkpoint has: a restart computes them anew."""
    generator = torch.Generator().manual_seed(1)
    tables = set()
    for _ in range(8):
        # what a fit may find in memory that it does not set
        left = [
            torch.randint(
                -(2**30), 2**30, (4 << k,), dtype=torch.int32, generator=generator
            )
            for k in range(5)
            for _ in range(4)
        ]
        del left
        tables.add(slopes.__wrapped__(3).numpy().tobytes())
    assert len(tables) == 1
