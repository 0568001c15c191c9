"""Functions of torch beside its documented interface that are used here exist, with the arguments they are given.

With another torch the test of a line that is gone fails, and says which file needs a look.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion


def gone(what, where):
    return f"torch {torch.__version__}: {what} is not what {where} expects"


@pytest.mark.parametrize(("version", "guards"), [
    ("2.10", "settle_shards of distributed/tensors.py and the refusal in interop/pt2.py"),
    ("2.11", "the filter of warnings in checkpoint/sharded.py"),
    ("2.13", "options and advice in interop/pt2.py, and the other name of forward_sync_buffers in training/modes.py"),
])  # fmt: skip
def test_what_guards_against_an_older_torch_goes_when_that_is_not_supported(version, guards):
    text = (Path(__file__).resolve().parent.parent / "pyproject.toml").read_text()
    lowest = TorchVersion(re.search(r'"torch>=([\d.]+)"', text)[1])
    assert lowest < version, f"torch before {version} cannot be installed: remove {guards}"


def test_the_number_of_a_backward_pass_differs_from_pass_to_pass_and_is_minus_one_outside():
    from deepmd_ema.model.ops.cpu.engine import backward_pass

    seen = []
    x = torch.ones(1, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda _: seen.append(backward_pass()))
    y.backward(retain_graph=True)
    y.backward()
    assert len(set(seen)) == 2, gone("torch._C._current_graph_task_id", "model/ops.cpu.engine.py")
    assert backward_pass() == -1


def test_a_module_holds_its_buffers_in_a_dictionary_and_names_those_that_files_leave_out():
    module = torch.nn.Module()
    module.register_buffer("kept", torch.zeros(1))
    module.register_buffer("left_out", torch.zeros(1), persistent=False)
    held = set(module._buffers), module._non_persistent_buffers_set, dict(module._parameters)
    assert held == ({"kept", "left_out"}, {"left_out"}, {}), gone("torch.nn.Module._buffers", "averaging/storage.py")


def test_data_parallel_training_knows_one_name_of_the_option_of_buffers():
    from torch.nn.parallel import DistributedDataParallel

    names = {"forward_sync_buffers", "broadcast_buffers"} & set(inspect.signature(DistributedDataParallel).parameters)
    assert names, gone("DistributedDataParallel(forward_sync_buffers=...)", "train/parallel.py")


def test_options_of_the_compiler_have_the_names_that_are_set():
    import torch._dynamo
    import torch.fx.experimental._config as shapes

    for name in ("recompile_limit", "optimize_ddp"):
        assert hasattr(torch._dynamo.config, name), gone(f"torch._dynamo.config.{name}", "model/compiler.py")
    assert hasattr(shapes, "use_duck_shape"), gone("torch.fx.experimental._config.use_duck_shape", "model/compiler.py")
