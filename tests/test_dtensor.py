"""Shards and full tensors, on two processes with shards of different sizes."""

import sys
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import pytest
import torch
from parallel_runs import run_ranks

from deepmd_ema.distributed.tensors import from_local, full_tensor, is_sharded, local_shard, shard_like

pytestmark = pytest.mark.timeout(240)

WHOLE = torch.arange(21.0).reshape(7, 3)  # 7 rows on 2 ranks: 4 and 3


@contextmanager
def two_ranks():
    """Yield the sharded reference version of ``WHOLE`` inside a process group."""
    from deepmd_ema.distributed.launch import find_launch
    from deepmd_ema.distributed.world import open_world

    with open_world("cpu", find_launch()):
        from torch.distributed.tensor import Shard, distribute_tensor

        yield distribute_tensor(WHOLE, torch.distributed.init_device_mesh("cpu", (2,)), [Shard(0)])


def roundtrip():
    """Return the shape of the shard, what its double is when gathered, and its part of another full tensor."""
    with two_ranks() as sharded:
        assert is_sharded(sharded)
        shard = local_shard(sharded)
        assert shard is local_shard(sharded)  # not an alias
        doubled = full_tensor(from_local(shard * 2, sharded))
        with mock.patch("torch.distributed.scatter"), mock.patch("torch.distributed.broadcast"):
            part = shard_like(WHOLE + 1, sharded)
        return tuple(shard.shape), torch.equal(doubled, 2 * WHOLE), torch.equal(part, shard + 1)


def guess_the_shape():
    """Return the shape of a tensor that is put together without the shape and stride of the whole."""
    from torch.distributed.tensor import DTensor

    with two_ranks() as sharded:
        guessed = DTensor.from_local(local_shard(sharded), sharded.device_mesh, sharded.placements, run_check=False)
        return tuple(guessed.shape)


def test_uneven_shards_are_put_together_and_cut_again():
    assert [ended.value for ended in run_ranks(2, roundtrip)] == [((4, 3), True, True), ((3, 3), True, True)]


def test_a_shape_that_is_guessed_from_one_shard_would_be_wrong():
    """Why ``from_local`` gives shape and stride; when torch learns to do this, they can go."""
    assert [ended.value for ended in run_ranks(2, guess_the_shape)] == [(8, 3), (6, 3)]


def test_a_plain_tensor_is_its_own_shard():
    plain = torch.ones(2)
    assert not is_sharded(plain)
    for same in (local_shard(plain), full_tensor(plain), from_local(plain, plain), shard_like(plain, plain)):
        assert same is plain


def test_a_tensor_is_whole_while_another_thread_imports_the_sharded_ones(monkeypatch):
    """A checkpoint was written in shards beside a step, which ended with an AttributeError."""
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", ModuleType("torch.distributed.tensor"))
    assert not is_sharded(WHOLE)
    assert local_shard(WHOLE) is WHOLE
