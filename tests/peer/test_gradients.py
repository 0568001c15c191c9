"""The loss of a batch and its gradient by every parameter, beside DeePMD-kit's."""

from __future__ import annotations

import json
from pathlib import Path

import gradients
import numpy as np
import pytest

from deepmd_ema.data.collate import collate
from deepmd_ema.interop.dp import read_dp

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "gradients.json").read_text())
TOLERANCE = 1e-8  # relative to the length of an array of gradients


@pytest.mark.parametrize("name", GOLDEN["models"])
def test_the_loss_and_its_gradients_are_those_of_deepmd_kit(name):
    data = gradients.batch_of(name, gradients.systems_of(name)[-1])
    found = gradients.summary(gradients.our_gradients(name.removesuffix(gradients.WITH_HESSIAN), data))
    expected = {path: numbers for path, numbers in GOLDEN["models"][name].items() if path != gradients.MASKED}
    assert found.keys() == expected.keys()
    longest = max(length for length, _ in expected.values())
    for path, numbers in expected.items():
        # an array whose gradient vanishes holds rounding of the others
        assert found[path] == pytest.approx(numbers, rel=0, abs=TOLERANCE * max(numbers[0], 1e-12 * longest)), path


def test_atoms_without_an_energy_count_in_the_loss_and_deepmd_kit_leaves_them_out():
    """Both losses from one prediction: over all atoms, and over those whose type is not in atom_exclude_types."""
    name = "se_e2_a_excluded"
    config, model, _ = read_dp(gradients.GOLDEN / f"{name}.dp")
    data = gradients.batch_of(name, gradients.SYSTEMS[-1])
    batch = collate(gradients.frames_of(config, data), model.layout)
    found = {key: value.detach() for key, value in model(batch).items()}
    force = batch.in_file_order(found["force"]).numpy().reshape(data["force"].shape)
    counted = ~np.isin(data["types"], config.atom_exclude_types)
    for path, chosen in ((gradients.LOSS, np.ones_like(counted)), (gradients.MASKED, counted)):
        errors = {"e": found["energy"].numpy() - data["energy"].ravel(), "v": found["virial"].numpy() - data["virial"],
                  "f": (force - data["force"])[:, chosen]}  # fmt: skip
        size, share = chosen.sum(), gradients.LR / gradients.START_LR
        loss = sum(
            (share * gradients.SHARED[f"start_pref_{term}"] + (1 - share) * gradients.SHARED[f"limit_pref_{term}"])
            * np.mean(error**2) / (1 if term == "f" else size)
            for term, error in errors.items()
        )  # fmt: skip
        assert loss == pytest.approx(GOLDEN["models"][name][path][0], rel=TOLERANCE)
