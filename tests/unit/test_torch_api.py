"""Functions of torch beside its documented interface that are used here exist, with the arguments
they are given.

With another torch the test of a line that is gone fails, and says which file needs a look.
"""

import re
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion


@pytest.mark.parametrize(
    ("version", "guards"),
    [
        (
            "2.10",
            "settle_shards of distributed/tensors.py and the refusal in interop/pt2.py",
        ),
        ("2.11", "the filter of warnings in checkpoint/sharded.py"),
        (
            "2.13",
            "options and advice in interop/pt2.py, and the other name of forward_sync_buffers in "
            "training/modes.py",
        ),
    ],
)
def test_what_guards_against_an_older_torch_goes_when_that_is_not_supported(
    version, guards
):
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    lowest = TorchVersion(re.search(r'"torch>=([\d.]+)"', text)[1])
    assert lowest < version, (
        f"torch before {version} cannot be installed: remove {guards}"
    )


def test_the_number_of_a_backward_pass_differs_from_pass_to_pass_and_is_minus_one_outside():
    from deepmd_ema.model.ops.cpu.engine import backward_pass

    seen = []
    x = torch.ones(1, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda _: seen.append(backward_pass()))
    y.backward(retain_graph=True)
    y.backward()
    assert len(set(seen)) == 2, (
        f"torch {torch.__version__}: torch._C._current_graph_task_id is another, or gone"
    )
    assert backward_pass() == -1
