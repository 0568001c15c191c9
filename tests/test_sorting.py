"""Numpy helpers."""

import numpy as np
import pytest

from deepmd_ema.geometry import rank_in_group, small_int, stable_argsort


@pytest.mark.parametrize("bound", [7, 1 << 16, 1 << 17])
def test_the_order_is_stable_for_small_and_large_integers(bound):
    keys = np.random.default_rng(0).integers(0, bound, 500) // 2 * 2
    np.testing.assert_array_equal(stable_argsort(keys, bound), np.argsort(keys, kind="stable"))


def test_ranks_count_within_each_group():
    ranks, sizes = rank_in_group(np.array([0, 0, 2, 2, 2, 3]), 5)
    assert ranks.tolist() == [0, 1, 0, 1, 2, 0]
    assert sizes.tolist() == [2, 0, 3, 1, 0]


@pytest.mark.parametrize("bound", [1, 256, 257, 1 << 16, (1 << 16) + 1])
def test_the_type_holds_every_number_below_the_bound(bound):
    assert np.iinfo(small_int(bound)).max >= bound - 1
