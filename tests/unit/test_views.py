"""One list of neighbors in the layouts of several parts of a model; golden models of hybrid show
the rest.
"""

import torch
from toy_models import SECTIONS, batch_of, toy_model


def test_an_excluded_neighbor_does_not_matter_beyond_the_cutoff_of_a_part():
    """It was taken for an empty slot there, which has a row of its own: energies were not those of
    DeePMD-kit.
    """
    near = SECTIONS["se_e2_a"] | {"rcut": 3.0, "exclude_types": [[0, 1]]}
    _, model = toy_model("hybrid", {"list": [near, SECTIONS["se_e2_r"]]})
    part = model.descriptor.parts[0]
    inside, beyond = (
        model.descriptor(
            batch_of(model, ([[0.0, 0, 0], [0, 1.5, 0], [x, 0, 0]], [0, 2, 1], None))
        )[0][0, : part.dim_out]
        for x in (2.0, 3.5)
    )
    torch.testing.assert_close(inside, beyond, rtol=1e-14, atol=0)
