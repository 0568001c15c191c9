"""DPA4C against DeePMD-kit: energies, forces, virials, gradients, calibration; its harmonics and its sums."""

import json
from pathlib import Path

import pytest
import torch
from golden.make_dpa4c import CASES, FITTINGS, TYPE_MAP, direction, frames, weights
from toy_models import batch_of

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.infer.load import load_model
from deepmd_ema.infer.potential import Potential
from deepmd_ema.model.build import build_model
from deepmd_ema.model.ops.operations import REFERENCE, use_operations

GOLDEN = json.loads((Path(__file__).parent / "golden" / "dpa4c.json").read_text())
VALUES, GRADIENTS = 1e-10, 1e-8  # relative


def name_there(name):
    """Return the name of a parameter in DeePMD-kit."""
    for here, there in (
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
    ):
        name = name.replace(here, there)
    return name


def golden_model(case, **changes):
    section = {"type": "dpa4c", "precision": "float64", **CASES[case], **changes}
    fitting = {"type": "dpa4_ener", "precision": "float64", **FITTINGS.get(case, {})}
    model = build_model(
        model_config_from_dict({"type_map": TYPE_MAP, "descriptor": section, "fitting_net": fitting}), 0
    )
    named = {name_there(name): parameter for name, parameter in model.named_parameters()}
    assert {name: list(parameter.shape) for name, parameter in named.items()} == GOLDEN[case]["shapes"]
    with torch.no_grad():
        for name, parameter in named.items():
            value = weights(name, tuple(parameter.shape))
            if value is not None:
                parameter.copy_(torch.tensor(value))
        model.descriptor.type_embedding.adam_type_embedding[-1] = 0
    coord, kinds, box = frames()
    both = batch_of(model, *((coord[k], kinds, box[k]) for k in range(2)))
    model.descriptor.apply_statistics(model.descriptor.measure(both))
    return model, named, batch_of(model, (coord[0], kinds, box[0]))


def assert_close(found, expected, error):
    expected = torch.as_tensor(expected, dtype=torch.float64)
    assert float((found.detach() - expected).abs().max()) <= error * float(expected.abs().max())


@pytest.mark.parametrize("way", ["by pair", "by element", "series"])
@pytest.mark.parametrize("case", CASES)
def test_energies_forces_virials_and_gradients_are_those_of_deepmd_kit(case, way):
    model, named, batch = golden_model(case)
    expected = GOLDEN[case]
    assert_close(model.descriptor.feature_spread, expected["stddev"], VALUES)
    channels = CASES[case]["channels"]
    assert_close(model.descriptor.feature_mean[-2 - channels :][:2], expected["mean"], VALUES)
    if way == "series":
        model.descriptor.interpolation.use(160)
    if way == "by pair":
        use_operations(model, REFERENCE)
    model.train()
    out = model(batch)
    energy, force, virial = out["energy"].sum(), batch.in_file_order(out["force"]), out["virial"].reshape(9)
    error = 1e-9 if way == "series" else VALUES  # what a series may have
    assert_close(energy, expected["energy"], error)
    assert_close(force, expected["force"], error)
    assert_close(virial, expected["virial"], error)
    loss = 0.7 * energy + (force * torch.tensor(direction("force", force.shape))).sum()
    loss = loss + (virial * torch.tensor(direction("virial", virial.shape))).sum()
    gradients = torch.autograd.grad(loss, list(named.values()))
    for name, gradient in zip(named, gradients):
        projected, size = expected["gradients"][name]
        found = float((gradient.numpy() * direction(name, gradient.shape)).sum())
        assert abs(found - projected) <= GRADIENTS * max(size, 1e-6), name


@pytest.mark.parametrize(("file", "case"), [("dpa4c.dp", "degree_4"), ("dpa4c.pt", "small")])
def test_files_of_deepmd_kit_give_its_numbers(file, case):
    loaded = load_model(Path(__file__).parent / "golden" / file)
    coord, kinds, box = frames()
    found = Potential(loaded, device="cpu").evaluate(coord[:1], kinds, box[:1])
    expected = GOLDEN[case]
    assert_close(torch.from_numpy(found.energy), [expected["energy"]], VALUES)
    assert_close(torch.from_numpy(found.force[0]), expected["force"], VALUES)
