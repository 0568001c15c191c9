"""Models on a CUDA device beside the CPU: values, derivatives with respect to parameters, Hessians;
and no wait.
"""

from contextlib import nullcontext
from copy import deepcopy

import numpy as np
import pytest
import torch
from gpu_counts import counted_waits
from linear_models import linear
from toy_models import SECTIONS, TRICLINIC, VARIANTS, batch_of, toy_atoms, toy_model

pytestmark = pytest.mark.gpu

SAME_MATH = 1e-12  # of the largest number of a tensor
MODELS = {kind: (toy_model, kind) for kind in (*SECTIONS, *VARIANTS)} | {
    "linear_ener": (linear,)
}
ON_CPUS_ONLY = [
    name for name in MODELS if "interpolated" in name
]  # whatever the input says


def numbers_of(model, batch, device, need_hessian=False, counted=counted_waits):
    """Return outputs and gradients on the CPU, by name, and the waits of a call and its backward
    pass on ``device``.
    """
    own, batch = deepcopy(model).to(device).train(), batch.to(torch.device(device))
    with counted() as waits:
        out = own(batch, need_hessian=need_hessian)
        sum(
            (value * (k + 1)).square().sum() for k, value in enumerate(out.values())
        ).backward()
    found = {name: value.detach().cpu() for name, value in out.items()}
    return found | {
        name: p.grad.cpu() for name, p in own.named_parameters() if p.grad is not None
    }, waits


def assert_same_numbers(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        bound = SAME_MATH * float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            found[name],
            value,
            rtol=0,
            atol=bound,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_on_a_gpu_has_the_numbers_and_gradients_of_the_cpu(name):
    make, *words = MODELS[name]
    _, model = make(*words)
    coord, types = toy_atoms()
    batch = batch_of(model, (coord, types, TRICLINIC), (coord[:7], types[:7], None))
    counted = nullcontext if name in ON_CPUS_ONLY else counted_waits
    (cpu, _), (gpu, waits) = (
        numbers_of(model, batch, device, counted=counted) for device in ("cpu", "cuda")
    )
    assert {"energy", "force", "virial"} < cpu.keys()
    assert_same_numbers(gpu, cpu)
    assert not waits


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ON_CPUS_ONLY])
def test_hessians_and_their_gradients_on_a_gpu_are_those_of_the_cpu(name):
    make, *words = MODELS[name]
    _, model = make(*words)
    coord, types = toy_atoms(natoms=4)
    batch = batch_of(model, (coord, types, TRICLINIC), (coord[:3], types[:3], None))
    (cpu, _), (gpu, waits) = (
        numbers_of(model, batch, device, need_hessian=True)
        for device in ("cpu", "cuda")
    )
    assert "hessian" in cpu
    assert_same_numbers(gpu, cpu)
    assert not waits


def test_parameters_of_frames_and_atoms_are_those_of_the_cpu():
    _, model = toy_model("se_e2_a", {}, {"numb_fparam": 2, "numb_aparam": 1})
    coord, types = toy_atoms()
    conditions = {
        "fparam": np.array([0.2, -0.4]),
        "aparam": np.linspace(-1, 1, len(coord))[:, None],
    }
    batch = batch_of(model, (coord, types, TRICLINIC), **conditions)
    (cpu, _), (gpu, waits) = (
        numbers_of(model, batch, device) for device in ("cpu", "cuda")
    )
    assert_same_numbers(gpu, cpu)
    assert not waits
