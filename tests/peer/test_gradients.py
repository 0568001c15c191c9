"""The loss of a batch and its gradient by every parameter, beside DeePMD-kit's."""

import json
from pathlib import Path

import gradients
import pytest

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "gradients.json").read_text()
)
TOLERANCE = 1e-8  # relative to the length of an array of gradients


@pytest.mark.parametrize("name", GOLDEN["models"])
def test_the_loss_and_its_gradients_are_those_of_deepmd_kit(name):
    found = gradients.summary(gradients.our_gradients(name))
    expected = {
        path: numbers
        for path, numbers in GOLDEN["models"][name].items()
        if path != gradients.MASKED
    }
    assert found.keys() == expected.keys()
    longest = max(length for length, _ in expected.values())
    for path, numbers in expected.items():
        # an array whose gradient vanishes holds rounding of the others
        assert found[path] == pytest.approx(
            numbers, rel=0, abs=TOLERANCE * max(numbers[0], 1e-12 * longest)
        ), path
