"""Attention and auxiliary layers are told apart by the caches that a model makes."""

from dataclasses import replace

import pytest

pytest.importorskip("mlx.core")

from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from mlx_dp.kvcache.kinds import Store
from mlx_dp.kvcache.layout import CacheLayout, inspect_caches
from tests.support.architectures.fields import WINDOW
from tests.support.models.tiny_models import HYBRID_MODELS, SLIDING_MODELS, TINY_MODELS, TinyModel

pytestmark = pytest.mark.mlx


def layout_of(tiny: TinyModel) -> CacheLayout:
    return inspect_caches(make_prompt_cache(tiny.build()))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_attention_is_attention_whatever_its_attributes_are_called(name):
    # Among them n_head and num_attention_heads, self_attn and attention, fused projections.
    layout = layout_of(TINY_MODELS[name])
    assert layout.attention == (0, 1)
    assert not layout.auxiliary
    assert not layout.other_kinds
    assert not layout.hybrid
    assert not layout.stateful


def test_a_layer_with_projections_but_no_attention_is_auxiliary():
    # lfm2's first layer is a convolution; qwen3_next's linear attention has q, k and v.
    assert layout_of(HYBRID_MODELS["lfm2"]).auxiliary == (0,)
    assert layout_of(HYBRID_MODELS["qwen3_next"]).auxiliary == (0,)


def test_of_four_layers_with_attention_at_1_and_3_the_pool_holds_two():
    tiny = HYBRID_MODELS["qwen3_next"]
    layout = layout_of(replace(tiny, extra={**tiny.extra, "num_hidden_layers": 4}))
    assert layout.attention == (1, 3)
    assert layout.auxiliary == (0, 2)
    assert layout.hybrid


def test_caches_are_counted_and_not_layers():
    # As in models that loop over their layers, or that have layers without a cache.
    layout = inspect_caches([KVCache() for _ in range(5)])
    assert layout.attention == (0, 1, 2, 3, 4)
    assert inspect_caches([]).attention == ()
    mixed = inspect_caches([KVCache(), RotatingKVCache(4), ArraysCache(2)])
    assert (mixed.attention, mixed.auxiliary) == ((0, 1), (2,))


def test_a_list_that_holds_a_state_beside_kv_is_mixed_and_makes_a_hybrid():
    layout = inspect_caches([CacheList(ArraysCache(2), KVCache()), KVCache()])
    assert layout.mixed == (0,)
    assert layout.attention == (1,)
    assert layout.hybrid


@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_sliding_windows_are_attention_with_their_width(name):
    layout = layout_of(SLIDING_MODELS[name])
    assert WINDOW in layout.kv_windows
    assert len(layout.kv_windows) == len(layout.leaves) == len(layout.attention)
    assert not layout.other_kinds
    assert not layout.hybrid
    assert layout.stateful


def test_what_a_list_holds_counts_leaf_by_leaf():
    layout = inspect_caches([CacheList(KVCache(), RotatingKVCache(8)), KVCache()])
    assert layout.attention == (0, 1)
    assert layout.kv_windows == (None, 8, None)
    assert [len(entry) for entry in layout.entries] == [2, 1]
    assert not layout.other_kinds


def test_every_unknown_kind_is_named_once_and_in_order():
    class Chunks(KVCache):
        """A cache with a meaning of its own is none that we know, whatever it derives from."""

    layout = inspect_caches(
        [QuantizedKVCache(), RotatingKVCache(8, keep=4), QuantizedKVCache(), CacheList(Chunks())]
    )
    assert layout.other_kinds == ("QuantizedKVCache", "RotatingKVCache", "Chunks")
    assert layout.attention == layout.auxiliary == layout.mixed == ()


def test_a_state_is_one_by_any_class_that_derives_from_its():
    class Named(ArraysCache):
        """Some models make their own."""

    assert inspect_caches([Named(2)]).auxiliary == (0,)


class TestWhereAPrefixCanBeContinued:
    def test_plain_kv_can_be_anywhere(self):
        layout = inspect_caches([KVCache(), CacheList(KVCache(), KVCache())])
        assert (layout.stateful, layout.trims_to) == (False, 0)

    def test_a_window_can_be_cut_back_until_the_narrowest_is_full(self):
        layout = inspect_caches([RotatingKVCache(9), KVCache(), RotatingKVCache(5)])
        assert (layout.stateful, layout.trims_to) == (True, 5)

    def test_a_state_can_never_be_cut_back(self):
        layout = inspect_caches([RotatingKVCache(9), ArraysCache(2)])
        assert (layout.stateful, layout.trims_to) == (True, 0)


def test_leaves_go_back_into_the_lists_that_they_came_from():
    caches = [KVCache(), CacheList(ArraysCache(2), KVCache()), CacheList(KVCache())]
    layout = inspect_caches(caches)
    leaves = layout.flatten(caches)
    assert [leaf.store for leaf in layout.leaves] == [
        Store.TOKENS,
        Store.STATE,
        Store.TOKENS,
        Store.TOKENS,
    ]
    nested = layout.nest(leaves)
    assert nested[0] is caches[0]
    assert [type(cache) for cache in nested[1:]] == [CacheList, CacheList]
    assert layout.flatten(nested) == leaves


def test_people_are_told_what_a_model_keeps():
    layout = inspect_caches(
        [KVCache(), CacheList(ArraysCache(2), KVCache()), RotatingKVCache(8), QuantizedKVCache()]
    )
    assert layout.describe() == "2 KV, 1 state, 1 window 8, 1 QuantizedKVCache"


def test_looking_twice_changes_nothing():
    caches = make_prompt_cache(HYBRID_MODELS["lfm2"].build())
    assert inspect_caches(caches) == inspect_caches(caches)
    assert all(cache.empty() for cache in caches)
