"""The last tokens of a row, in their order in time or as a ring."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.kvcache.kv_row import LayerKV, from_ring, to_ring
from tests.support.batches.kv_reference import random_row

pytestmark = pytest.mark.mlx


@pytest.mark.parametrize("window", [1, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 9, 23])
def test_a_ring_has_every_token_at_its_position_modulo_the_window(length, window):
    row = random_row(np.random.default_rng(1), length, (window,))
    kept = min(length, window)
    in_time = LayerKV(*(mx.array(a[None, :, length - kept :]) for a in row.layers[0]))
    ring = to_ring(in_time, length)
    for found, expected in zip(ring, row.ring(0), strict=True):
        np.testing.assert_array_equal(np.array(found[0]), expected)
    for found, expected in zip(from_ring(ring, length), in_time, strict=True):
        assert mx.array_equal(found, expected)


def test_a_copy_is_the_same_and_of_its_own():
    kv = LayerKV(mx.ones((1, 1, 4, 2)), mx.ones((1, 1, 4, 2)))
    copy = kv.tokens(1, 3).copied()
    kv.keys[:] = 0
    assert copy.keys.shape == (1, 1, 2, 2)
    assert copy.keys.all().item()
    assert kv.tokens(2, 2).copied().nbytes == 0


def test_a_copy_of_a_little_does_not_hold_the_whole():
    kv = LayerKV(*(mx.zeros((1, 1, 2**20, 4)) for _ in range(2)))
    mx.eval(kv)
    whole = mx.get_active_memory()
    copy = kv.tokens(5, 9).copied()
    mx.eval(copy)
    del kv
    assert mx.get_active_memory() < whole - 30 * 2**20
    assert copy.nbytes == 2 * 4 * 4 * 4
