"""Upper bounds of the kernels of a training step on a CUDA device, which never waits; errors and waits are noticed."""

import pytest
import torch
from gpu_counts import IS_PRETENDED, STEPS, CountedSteps, StepCounts, count_step
from helpers import assert_same, trains_in
from toy_models import TRICLINIC, batch_of, toy_atoms, toy_model

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


def test_counts_are_shown_by_part_by_operation_and_by_line():
    counts = StepCounts()
    counts.operations.update(mul=3, add=1)
    counts.parts.update(model=3, loss=1)
    counts.waits.update({"item: trainer.py:7": 2})
    lines = counts.describe().splitlines()
    assert lines == [
        "4 kernels, 2 waits",
        "by part: model 3, loss 1",
        "by operation: mul 3, add 1",
        "wait 2: item: trainer.py:7",
    ]


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


def test_a_number_that_a_step_reads_is_an_error_in_the_mode_that_forbids_waits(start):
    class Forbids(ReadsAWeight):
        def after_update(self, trainer):
            torch.cuda.set_sync_debug_mode("error")
            try:
                super().after_update(trainer)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    with pytest.raises(RuntimeError, match="synchroniz"):
        start("run", 3, callback=Forbids())


def test_a_tensor_of_the_host_in_an_operation_of_the_device_is_an_error():
    on_device, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        on_device + on_host
    assert_same((on_device + torch.tensor(2.0)).cpu(), on_host + 2)  # a scalar of the host is a number


def test_a_model_on_the_device_refuses_a_batch_of_the_host():
    _, model = toy_model()
    batch = batch_of(model, (*toy_atoms(), TRICLINIC))
    with pytest.raises(RuntimeError, match="same device"):
        model.cuda()(batch)
