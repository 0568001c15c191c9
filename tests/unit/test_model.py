"""Parts of the model, one by one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from toy_models import (
    TRICLINIC,
    batch_of,
    evaluate,
    model_section,
    toy_atoms,
    toy_model,
)

from deepmd_ema.config import model_config_from_dict
from deepmd_ema.errors import DataError
from deepmd_ema.model.build import build_model
from deepmd_ema.model.nn.activation import activation

ACTIVATIONS = (
    "tanh",
    "relu",
    "relu6",
    "softplus",
    "sigmoid",
    "gelu",
    "gelu_tf",
    "silu",
    "silut",
    "silut:5.5",
    "none",
    "linear",
    "None",
    "ReLU",
)
# activation at -3, -0.3, 0.5, 3.2 and 6.5, printed by DeePMD-kit 3.2.0 (its ActivationFn)
VALUES = {
    "tanh": [-0.99505475, -0.29131261, 0.46211716, 0.9966824, 0.99999548],
    "relu6": [0.0, 0.0, 0.5, 3.2, 6.0],
    "softplus": [0.04858735, 0.55435524, 0.97407698, 3.23995333, 6.50150231],
    "sigmoid": [0.04742587, 0.42555748, 0.62245933, 0.96083428, 0.99849882],
    "gelu": [-0.00363739, -0.11462908, 0.34571401, 3.19813043, 6.5],
    "gelu_tf": [-0.00363739, -0.11462908, 0.34571401, 3.19813043, 6.5],
    "silu": [-0.14227762, -0.12766724, 0.31122967, 3.07466969, 6.49024232],
    "silut": [-0.14227762, -0.12766724, 0.31122967, 3.07197163, 3.85673857],
    "silut:2": [-0.14227762, -0.12766724, 0.31122967, 2.62560139, 2.76148513],
    "none": [-3.0, -0.3, 0.5, 3.2, 6.5],
}


@pytest.mark.parametrize("name", sorted(VALUES))
def test_activation_functions_have_the_values_of_deepmd_kit(name):
    z = torch.tensor([-3.0, -0.3, 0.5, 3.2, 6.5], dtype=torch.float64)
    np.testing.assert_allclose(
        activation(name).value(z).numpy(), VALUES[name], atol=6e-9
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_derivative_of_an_activation_function_is_its_derivative(name):
    z = torch.linspace(-7, 7, 57, dtype=torch.float64) + 0.01
    z.requires_grad_()
    act = activation(name)
    y = act.value(z)
    (derivative,) = torch.autograd.grad(y.sum(), z, create_graph=True)
    torch.testing.assert_close(act.derivative(z, y), derivative, rtol=1e-12, atol=1e-12)
    if name.lower() not in ("relu", "relu6", "none", "linear"):
        (second,) = torch.autograd.grad(derivative.sum(), z, retain_graph=True)
        (ours,) = torch.autograd.grad(act.derivative(z, act.value(z)).sum(), z)
        torch.testing.assert_close(ours, second, rtol=1e-10, atol=1e-12)


def test_an_isolated_atom_has_the_energy_given_in_the_config():
    _, model = toy_model(
        descriptor_changes={"set_davg_zero": True},
        fitting_changes={"atom_ener": [-1.5, None, 0.0]},
    )
    model.descriptor.mean.zero_()
    model.fitting.bias_atom_e.zero_()
    out = evaluate(model, *(([[0.0, 0, 0]], [t], None) for t in range(3)))
    bias = model.out_bias.numpy().ravel()
    np.testing.assert_allclose(out["energy"][[0, 2]], bias[[0, 2]], rtol=1e-14)
    assert abs(out["energy"][1] - bias[1]) > 1e-3


def test_missing_parameters_are_named():
    _, model = toy_model(fitting_changes={"numb_fparam": 2})
    with pytest.raises(
        DataError, match="this model needs fparam: 2 numbers for each frame"
    ):
        evaluate(model, (*toy_atoms(), None))
    _, model = toy_model(fitting_changes={"numb_aparam": 3})
    with pytest.raises(
        DataError, match="this model needs aparam: 3 numbers for each atom"
    ):
        evaluate(model, (*toy_atoms(), None))


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("descriptor", {"descriptor_changes": {"trainable": False}}),
        ("fitting", {"fitting_changes": {"trainable": [True, False, True]}}),
    ],
)
def test_a_part_that_is_not_trained_gets_no_gradients(part, changes):
    _, model = toy_model(**changes)
    model.train()
    out = model(batch_of(model, (*toy_atoms(), TRICLINIC)))
    (out["energy"].sum() + out["force"].square().sum()).backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is None) == name.startswith(part), name


def test_seeds_of_the_parts_come_before_the_seed_of_the_run():
    config = model_config_from_dict(model_section())
    own = replace(config, descriptor=replace(config.descriptor, seed=4))
    one, two = build_model(own, 1).state_dict(), build_model(own, 2).state_dict()
    assert torch.equal(
        one["descriptor.embeddings.0.layers.0.weight"],
        two["descriptor.embeddings.0.layers.0.weight"],
    )
    assert not torch.equal(
        one["fitting.nets.0.layers.0.weight"], two["fitting.nets.0.layers.0.weight"]
    )
    nets = [one[f"descriptor.embeddings.{k}.layers.0.weight"] for k in range(9)]
    assert not torch.equal(nets[0], nets[1])
