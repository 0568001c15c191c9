"""Upper bounds of the kernels of a training step on a CUDA device, which never waits; errors and waits are noticed."""

import pytest
from gpu_counts import IS_PRETENDED, STEPS, CountedSteps, count_step
from helpers import trains_in

from deepmd_ema.training.trainer import Callback

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

# about 2 % above what `python tests/pretend_cuda tests/gpu_counts.py` prints; lower a number with the code
MAX_KERNELS = {
    "se_e2_a": 541,
    "se_e2_a, two-sided": 746,
    "se_e2_a, interpolate: always": 541,
    "se_e2_a, no average": 532,
    "se_e2_a, two averages": 553,
    "se_e2_a, average on the host": 541,
    "se_e2_a, clipping": 553,
    "se_e2_a, AdamW": 548,
    "se_e2_a, AdaMuon": 631,
    "se_e2_a, HybridMuon": 696,
    "se_e2_a, groups of AdamW": 552,
    "se_e2_a, three batches a step": 1670,
    "se_e2_a, LKF": 2823,
    "se_e2_r": 553,
    "se_e3": 660,
    "se_atten, no attention": 538,
    "se_atten, 2 layers": 1125,
    "se_atten_v2, 1 layer": 954,
    "se_e3_tebd": 462,
    "dpa2": 2574,
    "dpa3": 1428,
    "dpa3, dynamic": 1428,
    "hybrid": 1033,
    "se_e2_a with a table": 860,
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_has_no_more_kernels_than_in_the_table_and_no_wait(name, tmp_path):
    counts = count_step(tmp_path / "run", name)
    assert counts.kernels <= MAX_KERNELS[name], counts.describe()
    assert not counts.waits, counts.describe()
    assert not counts.atomic, counts.describe()


@pytest.fixture
def start(tmp_path, monkeypatch, water_like):
    """Return a function that trains on the GPU in a folder of its own."""
    return trains_in(tmp_path, monkeypatch, [[water_like]], {"training__disp_freq": 100}, device="cuda")


class ReadsAWeight(Callback):
    """Reads a number from the device in each step."""

    def after_update(self, trainer):
        next(trainer.validator.models.parameters()).flatten()[0].item()


class CountedReads(CountedSteps, ReadsAWeight):
    """Counts the steps of a run, in which it reads a number."""


@pytest.mark.skipif(not IS_PRETENDED, reason="waits are counted on the pretended device only")
def test_a_number_that_a_step_reads_is_a_wait_with_its_line(start):
    watched = CountedReads()
    start("run", 7, callback=watched)
    (place,) = watched.counts[0].waits
    assert "trainer.py:" in place
