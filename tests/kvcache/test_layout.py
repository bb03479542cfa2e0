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
from tiny_models import HYBRID_MODELS, SLIDING_MODELS, TINY_MODELS, TinyModel

from mlx_dp.kvcache.layout import CacheLayout, inspect_caches

pytestmark = pytest.mark.mlx


def layout_of(tiny: TinyModel) -> CacheLayout:
    return inspect_caches(make_prompt_cache(tiny.build()))


@pytest.mark.parametrize("name", TINY_MODELS)
def test_attention_is_attention_whatever_its_attributes_are_called(name):
    # Among them n_head and num_attention_heads, self_attn and attention, fused projections.
    layout = layout_of(TINY_MODELS[name])
    assert layout.attention == (0, 1)
    assert not layout.other
    assert not layout.hybrid


def test_a_layer_with_projections_but_no_attention_is_auxiliary():
    # lfm2's first layer is a convolution; qwen3_next's linear attention has q, k and v.
    assert layout_of(HYBRID_MODELS["lfm2"]).auxiliary == (0,)
    assert layout_of(HYBRID_MODELS["qwen3_next"]).auxiliary == (0,)


def test_of_four_layers_with_attention_at_1_and_3_the_pool_holds_two():
    tiny = HYBRID_MODELS["qwen3_next"]
    layout = layout_of(replace(tiny, extra={**tiny.extra, "num_hidden_layers": 4}))
    assert layout.attention == (1, 3)
    assert layout.auxiliary == (0, 2)
    assert layout.pool_index(3) == 1
    assert layout.hybrid


def test_caches_are_counted_and_not_layers():
    # As in models that loop over their layers, or that have layers without a cache.
    layout = inspect_caches([KVCache() for _ in range(5)])
    assert layout.attention == (0, 1, 2, 3, 4)
    assert inspect_caches([]).attention == ()


def test_a_list_that_holds_a_state_beside_kv_is_mixed_and_makes_a_hybrid():
    layout = inspect_caches([CacheList(ArraysCache(2), KVCache()), KVCache()])
    assert layout.mixed == (0,)
    assert layout.attention == (1,)
    assert layout.hybrid


@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_sliding_windows_are_named(name):
    layout = layout_of(SLIDING_MODELS[name])
    assert layout.other_kinds == ("RotatingKVCache",)


def test_every_unknown_kind_is_named_once_and_in_order():
    layout = inspect_caches(
        [QuantizedKVCache(), RotatingKVCache(8), QuantizedKVCache(), CacheList(KVCache())]
    )
    assert layout.other == (0, 1, 2, 3)
    assert layout.other_kinds == ("QuantizedKVCache", "RotatingKVCache", "CacheList")


def test_looking_twice_changes_nothing():
    caches = make_prompt_cache(HYBRID_MODELS["lfm2"].build())
    assert inspect_caches(caches) == inspect_caches(caches)
    assert all(cache.empty() for cache in caches)
