"""Upper bounds of the kernels of a training step on a CUDA device, which never waits; errors and
waits are noticed.
"""

import pytest
from gpu_counts import IS_PRETENDED, STEPS, CountedSteps, count_step
from helpers import trains_in

from deepmd_ema.training.trainer import Callback

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_no_more_kernels_than_in_the_table_and_no_wait(name, tmp_path):
    counts = count_step(tmp_path / "run", name)
    assert counts.kernels <= STEPS[name][-1], counts.describe()
    assert not counts.waits, counts.describe()
    assert not counts.atomic, counts.describe()


@pytest.fixture
def start(tmp_path, monkeypatch, water_like):
    """Return a function that trains on the GPU in a folder of its own."""
    return trains_in(
        tmp_path,
        monkeypatch,
        [[water_like]],
        {"training__disp_freq": 100},
        device="cuda",
    )


class ReadsAWeight(Callback):
    """Reads a number from the device in each step."""

    def after_update(self, trainer):
        next(trainer.validator.models.parameters()).flatten()[0].item()


class CountedReads(CountedSteps, ReadsAWeight):
    """Counts the steps of a run, in which it reads a number."""


@pytest.mark.skipif(
    not IS_PRETENDED, reason="waits are counted on the pretended device only"
)
def test_a_number_that_a_step_reads_is_a_wait_with_its_line(start):
    watched = CountedReads()
    start("run", 7, callback=watched)
    (place,) = watched.counts[0].waits
    assert "trainer.py:" in place
