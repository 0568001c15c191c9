"""DPA-4: numbers of DeePMD-kit, rotations into frames, exact products on grids, written-out layers."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from golden.make_dpa4 import CASES, atoms, drawn, options_of, projections, weights
from toy_models import TRICLINIC, batch_of, toy_atoms, toy_model

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.model.build import build_model
from deepmd_ema.model.families.dpa4 import module as dpa4_module
from deepmd_ema.model.families.dpa4.rotations import quaternions
from deepmd_ema.model.ops.operations import REFERENCE, use_operations

PEER = json.loads((Path(__file__).parent / "golden" / "dpa4.json").read_text())  # made_by: see golden/README.md
SAME_MATH = 1e-11
RENAMED = (
    ("descriptor.layers.", "descriptor.blocks."), ("so2_conv.mixing.", "so2_conv."),
    ("so2_conv.attention.", "so2_conv."), ("fitting.nets.", "fitting_net.filter_layers.networks."),
)  # fmt: skip


def in_deepmd_kit(name):
    for here, there in RENAMED:
        name = name.replace(here, there)
    return name


def model_of(case):
    """Return the model of a case and its parameters by DeePMD-kit's names, with the numbers that DeePMD-kit had."""
    _, fitting, more, version = CASES[case]
    descriptor = {"type": "dpa4", "precision": "float64", **options_of(case)}
    net = {"type": "dpa4_ener", "precision": "float64", **fitting}
    model = build_model(
        model_config_from_dict({"type_map": ["O", "H", "C"], "descriptor": descriptor, "fitting_net": net, **more})
    )
    named = {in_deepmd_kit(name): parameter for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for name, parameter in named.items():
            values = drawn(name, tuple(parameter.shape))
            if values is not None:
                parameter.copy_(torch.tensor(values))
    if version is not None:
        model.descriptor.version_tensor.fill_(version)
    return model, named


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("operations", ["cpu", "reference"])
def test_numbers_and_gradients_are_those_of_deepmd_kit(case, operations):
    model, named = model_of(case)
    if operations == "reference":
        use_operations(model, REFERENCE)
    batch = batch_of(model, atoms())
    found = model.train()(batch)
    energy, virial = found["energy"].sum(), found["virial"].reshape(9)
    force = batch.in_file_order(found["force"])
    expected = PEER[case]
    assert abs(float(energy.detach()) - expected["energy"]) < SAME_MATH * max(1, abs(expected["energy"]))
    for name, values in (("force", force), ("virial", virial)):
        want = np.array(expected[name])
        np.testing.assert_allclose(values.detach().numpy(), want, rtol=0, atol=SAME_MATH * np.abs(want).max())
    of_energy, of_force, of_virial = weights(len(force))
    loss = of_energy * energy + (force * torch.tensor(of_force)).sum() + (virial * torch.tensor(of_virial)).sum()
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    ours = np.array(projections({name: g.numpy() for name, g in zip(named, gradients, strict=True)}))
    want = np.array(expected["gradients"])
    np.testing.assert_allclose(ours, want, rtol=1e-8, atol=1e-10 * np.abs(want).max())


@pytest.mark.parametrize("roll", [0.3, 2.0])
@pytest.mark.parametrize("case", ["example", "streams", "both_atoms", "directions"])
def test_results_do_not_depend_on_the_rotation_of_frames_about_their_axes(monkeypatch, case, roll):
    model, _ = model_of(case)
    batch = batch_of(model, atoms())
    before = model(batch, create_graph=False)

    def rolled(direction):
        angle = roll * (1 + direction[:, 0])  # another one for each pair
        w, x, y, z = quaternions(direction).unbind(-1)
        c, s = torch.cos(angle / 2), torch.sin(angle / 2)
        return torch.stack([c * w - s * z, c * x - s * y, c * y + s * x, c * z + s * w], -1)

    monkeypatch.setattr(dpa4_module, "quaternions", rolled)
    after = model(batch, create_graph=False)
    for name in ("energy", "force", "virial"):
        scale = float(before[name].abs().max())
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-11 * scale)


@pytest.mark.gpu
@pytest.mark.parametrize("use_amp", [False, True])
def test_blocks_are_computed_in_bfloat16_in_training_on_a_gpu(use_amp):
    """A float64 model stays in float64: autocast does not touch it."""
    _, model = toy_model("dpa4", {"precision": "float32", "use_amp": use_amp})
    batch = batch_of(model, (*toy_atoms(), TRICLINIC))
    expected = model(batch, create_graph=False)["energy"]
    model, there = model.to("cuda"), batch.to(torch.device("cuda"))
    in_validation = float((model.eval()(there, create_graph=False)["energy"].cpu() - expected).abs().max())
    in_training = float((model.train()(there)["energy"].detach().cpu() - expected).abs().max())
    assert in_validation < 1e-4
    assert (1e-4 < in_training < 1e-1) == use_amp
