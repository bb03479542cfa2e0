"""The shared attention function: ours for rows in several slabs, mlx-lm's otherwise."""

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx_lm.models import base, llama
from mlx_lm.models.cache import KVCache

from mlx_dp.kvcache.batch import attention
from mlx_dp.kvcache.batch.batch_form import BatchForm
from mlx_dp.kvcache.batch.batched_kv_cache import BatchedKVCache, NotSplittableError
from mlx_dp.kvcache.batch.kv_batch import KVBatch
from mlx_dp.kvcache.kv_row import LayerKV
from tests.support.batches.kv_reference import (
    KEY_DIM,
    KV_HEADS,
    PLAIN,
    QUERY_HEADS,
    SCALE,
    random_row,
)

pytestmark = pytest.mark.mlx

LENGTHS = (1, 7, 3, 12, 5)


def batch_of(lengths=LENGTHS, *, split: bool = True, tails: bool = False) -> KVBatch:
    """The same rows at every call: in slabs of width 4, 8 and 16 where it may be split."""
    rng = np.random.default_rng(1)
    form = BatchForm(split=split, tails=tails)
    batch = KVBatch(PLAIN, form, min_width=4, slab_tokens=16, tail_tokens=2)
    for key, length in enumerate(lengths):
        batch.join(key, random_row(rng, length).content(), length=length, room=length + 1)
    return batch


def token(key: int, heads: int) -> mx.array:
    """The output of row ``key`` alone, in any place of the batch."""
    return mx.random.normal((heads, 1, KEY_DIM), key=mx.random.key(10 * key + heads))


def attend(
    batch: KVBatch, *, slabs: int | None, sinks: mx.array | None = None
) -> dict[int, np.ndarray]:
    """One layer of one step on so many slabs, through the function that models call."""
    order = batch.begin_step()
    cache = batch.caches[0]
    assert slabs in (None, len(cache.step.slab_steps))
    assert cache.split == (len(cache.step.slab_steps) > 1 or batch.tail_tokens > 0)
    mask = cache.make_mask(1)
    fresh = mx.stack([token(key, KV_HEADS) for key in order])
    keys, values = cache.update_and_fetch(fresh, fresh[..., :3])
    found = base.scaled_dot_product_attention(
        mx.stack([token(key, QUERY_HEADS) for key in order]),
        keys,
        values,
        cache=cache,
        scale=SCALE,
        mask=mask,
        sinks=sinks,
    )
    batch.end_step()
    return {key: np.array(found[index]) for index, key in enumerate(order)}


@pytest.fixture(autouse=True)
def installed():
    attention.install()


def test_installing_twice_changes_nothing():
    once = (base.scaled_dot_product_attention, llama.scaled_dot_product_attention)
    attention.install()
    assert (base.scaled_dot_product_attention, llama.scaled_dot_product_attention) == once
    assert once[0] is once[1]


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -1.0, 2.0, 0.0])])
def test_slab_by_slab_equals_one_padded_rectangle(sinks):
    in_slabs, in_one = batch_of(), batch_of(split=False)
    found = attend(in_slabs, slabs=3, sinks=sinks)
    expected = attend(in_one, slabs=1, sinks=sinks)
    for key in range(len(LENGTHS)):
        np.testing.assert_allclose(found[key], expected[key], atol=1e-6)


@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -1.0, 2.0, 0.0])])
def test_slabs_with_tails_equal_one_padded_rectangle(sinks):
    with_tails, in_one = batch_of(tails=True), batch_of(split=False)
    for step in range(5):
        # Rows move to wider slabs meanwhile, and the tails are folded.
        found = attend(with_tails, slabs=None, sinks=sinks)
        expected = attend(in_one, slabs=1, sinks=sinks)
        for key in range(len(LENGTHS)):
            np.testing.assert_allclose(found[key], expected[key], atol=1e-6, err_msg=str(step))


def test_rows_without_any_token_attend_to_their_tail_alone():
    with_tails, in_one = batch_of((0, 0), tails=True), batch_of((0, 0), split=False)
    found, expected = attend(with_tails, slabs=1), attend(in_one, slabs=1)
    for key in (0, 1):
        np.testing.assert_allclose(found[key], expected[key], atol=1e-6)


def test_a_batch_that_needs_one_slab_is_not_split():
    attend(batch_of((3, 2)), slabs=1)


def test_other_caches_get_what_mlx_lm_gives_them():
    queries = mx.random.normal((1, QUERY_HEADS, 5, KEY_DIM))
    keys = mx.random.normal((1, KV_HEADS, 5, KEY_DIM))
    for cache in (None, KVCache()):
        found = base.scaled_dot_product_attention(
            queries, keys, keys, cache=cache, scale=SCALE, mask="causal"
        )
        expected = mx.fast.scaled_dot_product_attention(
            queries, keys, keys, scale=SCALE, mask="causal"
        )
        assert mx.array_equal(found, expected)


class TestWhatCannotBeSplit:
    @pytest.fixture
    def batch(self) -> KVBatch:
        batch = batch_of()
        batch.begin_step()
        return batch

    @pytest.fixture
    def cache(self, batch: KVBatch) -> BatchedKVCache:
        assert batch.caches[0].split
        return batch.caches[0]

    @pytest.fixture
    def fresh(self) -> LayerKV:
        keys = mx.ones((len(LENGTHS), KV_HEADS, 1, KEY_DIM))
        return LayerKV(keys, keys[..., :3])

    @pytest.fixture
    def queries(self) -> mx.array:
        return mx.ones((len(LENGTHS), QUERY_HEADS, 1, KEY_DIM))

    @pytest.mark.parametrize("wish", [{"return_array": True}, {"window_size": 4}])
    def test_masks_of_the_models_own_making(self, cache, wish):
        with pytest.raises(NotSplittableError, match="masks"):
            cache.make_mask(1, **wish)

    def test_keys_that_change_between_cache_and_attention(self, cache, fresh, queries):
        keys, values = cache.update_and_fetch(*fresh)
        with pytest.raises(NotSplittableError, match="keys"):
            cache.attend(queries, LayerKV(keys * 1, values), scale=SCALE, sinks=None)

    def test_values_that_change_between_cache_and_attention(self, cache, fresh, queries):
        keys, values = cache.update_and_fetch(*fresh)
        with pytest.raises(NotSplittableError, match="values"):
            cache.attend(queries, LayerKV(keys, values * 1), scale=SCALE, sinks=None)

    def test_keys_of_an_earlier_step(self, batch, cache, fresh, queries):
        fetched = LayerKV(*cache.update_and_fetch(*fresh))
        cache.attend(queries, fetched, scale=SCALE, sinks=None)
        batch.caches[1].update_and_fetch(*fresh)
        batch.caches[1].attend(queries, fresh, scale=SCALE, sinks=None)
        batch.end_step()
        batch.begin_step()
        with pytest.raises(NotSplittableError, match="keys"):
            cache.attend(queries, fetched, scale=SCALE, sinks=None)

    def test_attention_that_never_comes(self, batch, cache, fresh):
        cache.update_and_fetch(*fresh)
        with pytest.raises(NotSplittableError, match="shared attention function"):
            batch.end_step()


@pytest.mark.parametrize("split", [True, False])
def test_layers_that_share_a_cache_attend_to_what_the_first_wrote(split):
    batch = batch_of(split=split)
    order = batch.begin_step()
    cache = batch.caches[0]
    with pytest.raises(AssertionError, match="layer 0 has written nothing yet"):
        cache.keys_and_values()
    fresh = mx.stack([token(key, KV_HEADS) for key in order])
    written = cache.update_and_fetch(fresh, fresh[..., :3])
    shared = cache.keys_and_values()
    assert [new is old for new, old in zip(shared, written, strict=True)] == [True, True]
    queries = mx.stack([token(key, QUERY_HEADS) for key in order])
    found = [
        base.scaled_dot_product_attention(
            queries, keys, values, cache=cache, scale=SCALE, mask=cache.make_mask(1)
        )
        for keys, values in (written, shared)
    ]
    assert mx.array_equal(*found)


def test_kv_that_no_attention_used_is_returned_for_evaluation():
    # Some models write KV in layers whose output they discard.
    batch = batch_of((3, 2))
    batch.begin_step()
    fresh = mx.ones((2, KV_HEADS, 1, KEY_DIM))
    fetched = batch.caches[0].update_and_fetch(fresh, fresh[..., :3])
    unseen = batch.end_step()
    assert [array is mine for array, mine in zip(unseen, fetched, strict=True)] == [True, True]


@pytest.mark.parametrize("window", [1, 2, 5, 40])
def test_a_window_hides_what_lies_before_it(window):
    batch = batch_of(split=False)
    order = batch.begin_step()
    mask = batch.caches[0].make_mask(1, window_size=window)
    assert mask is not None
    for index, key in enumerate(order):
        length = LENGTHS[key]
        expected = [length - window < at <= length for at in range(max(LENGTHS) + 1)]
        assert mask[index, 0, 0].tolist() == expected


def test_a_mask_comes_as_an_array_where_a_model_insists():
    batch = batch_of((3, 3), split=False)
    batch.begin_step()
    assert batch.caches[0].make_mask(1) is None
    mask = batch.caches[0].make_mask(1, return_array=True)
    assert mask is not None
    assert mask.shape == (2, 1, 1, 4)
    assert mask.all().item()


def test_a_mask_has_one_more_axis_for_models_that_group_their_heads():
    form = BatchForm(split=False, grouped_mask=True)
    rng = np.random.default_rng(1)
    batch = KVBatch(PLAIN, form)
    for key, length in enumerate((1, 3)):
        batch.join(key, random_row(rng, length).content(), length=length, room=8)
    batch.begin_step()
    mask = batch.caches[0].make_mask(1, return_array=True)
    assert mask is not None
    assert mask.shape == (2, 1, 1, 1, 4)
    assert mask[:, 0, 0, 0].tolist() == [[True, True, False, False], [True] * 4]
