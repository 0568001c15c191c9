"""Tables of embedding nets follow weights that are changed in ways of which torch keeps no count."""

from __future__ import annotations

import numpy as np
import pytest
from toy_models import TRICLINIC, toy_atoms, toy_model

from deepmd_ema.infer.load import LoadedModel, Provenance
from deepmd_ema.infer.potential import Potential

FRAME = (*toy_atoms(0, 9), TRICLINIC)
SAME = 1e-8  # of the largest force; tables are within 1e-9 of the largest derivative of a net


def potential_of(config, model):
    return Potential(LoadedModel(model, config, Provenance("toy", "frozen")), device="cpu")


def by_data(parameter):
    parameter.data.mul_(1.1)


def by_view_of_numpy(parameter):
    parameter.detach().numpy()[...] *= 1.1


@pytest.mark.parametrize("change", [by_data, by_view_of_numpy])
@pytest.mark.parametrize("descriptor", ["se_e2_a", "se_e2_r", "se_atten_no_attention", "dpa2"])
def test_forces_are_those_of_the_weights_of_now(descriptor, change):
    """Forces were those of the weights of before, for which the tables were made."""
    model = toy_model(descriptor, {"interpolate": "always"})
    potential = potential_of(*model)
    before = potential.evaluate(*FRAME)
    for name, parameter in model[1].named_parameters():
        if ".embedding" in name and name.endswith("weight"):  # not those of the types
            change(parameter)
    direct = toy_model(descriptor, {"interpolate": "never"})
    direct[1].load_state_dict(model[1].state_dict())
    known = potential_of(*direct).evaluate(*FRAME)
    largest = np.abs(known.force).max()
    assert np.abs(before.force - known.force).max() > 1e-2 * largest
    np.testing.assert_allclose(potential.evaluate(*FRAME).force, known.force, rtol=0, atol=SAME * largest)
