"""The pretended device refuses what a GPU does not forgive."""

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.pretended_gpu]
pretend_cuda = pytest.importorskip(
    "pretend_cuda", reason="only on the pretended device"
)


@pytest.fixture(autouse=True)
def _waits_are_allowed_again():
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_operations_that_mix_devices_are_refused():
    on_device, on_host = torch.ones(3, device="cuda"), torch.ones(3)
    with pytest.raises(RuntimeError, match="at least two devices, cuda:0 and cpu"):
        on_device + on_host
    with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
        on_device + torch.ones(3, device="cuda:1")
    assert torch.equal(
        (on_device + torch.tensor(2.0)).cpu(), torch.full((3,), 3.0)
    )  # a number of the host


def test_a_wait_is_counted_with_its_line_and_refused_where_none_is_allowed():
    total = torch.ones(3, device="cuda").sum()
    with pretend_cuda.counted_waits() as found:
        assert total.item() == 3
    assert found.waits == {"item": 1}
    assert list(found.places) == [("item", "a thread of autograd or of torch")]
    torch.cuda.set_sync_debug_mode("error")
    for wait in (
        total.item,
        total.cpu,
        lambda: torch.ones(2).to("cuda"),
        total.nonzero,
        torch.cuda.synchronize,
    ):
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()
    torch.ones(2).pin_memory().to("cuda", non_blocking=True)


def test_a_late_copy_and_new_memory_hold_nan():
    values, copy = torch.ones(3, device="cuda"), torch.zeros(3).pin_memory()
    copy.copy_(values, non_blocking=True)
    assert copy.isnan().all()
    torch.cuda.current_stream().record_event().synchronize()
    assert torch.equal(copy, torch.ones(3))
    assert torch.empty(5, device="cuda").cpu().isnan().all()
