"""A kind of cache is one strategy and one row of a table; no other code needs to know it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, ConcatenateKVCache, KVCache, RotatingKVCache

from mlx_dp.kvcache import kinds
from mlx_dp.kvcache.kinds import UNKNOWN, CacheKind, LeafArrays, Store, kind_of
from mlx_dp.kvcache.kv_row import LayerKV
from mlx_dp.kvcache.layout import inspect_caches
from mlx_dp.kvcache.row_content import fill_caches, read_caches
from mlx_dp.proto.messages.batching import Batching
from mlx_dp.worker.loading.batch_check import choose_form
from mlx_dp.worker.loading.loaded_model import LoadedModel, load
from tests.support.models.tiny_models import DENSE

pytestmark = pytest.mark.mlx


class ConcatenatedKV(CacheKind):
    """mlx-lm's cache that joins arrays at each token, which none of its models makes by itself."""

    name = "concatenated KV"
    store = Store.TOKENS

    def matches(self, cache: Any) -> bool:
        return type(cache) is ConcatenateKVCache

    def read(self, cache: Any, length: int) -> LeafArrays | None:
        return LayerKV(cache.keys, cache.values).tokens(0, length)

    def fill(
        self, cache: Any, content: LeafArrays, *, length: int, room: int, surplus: int
    ) -> None:
        cache.keys, cache.values = content
        cache.offset = length

    def empty(self, cache: Any) -> LeafArrays | None:
        return LayerKV(cache.keys, cache.values).tokens(0, 0)

    def nbytes(self, cache: Any) -> int:
        return LayerKV(cache.keys, cache.values).nbytes // int(cache.offset)

    def repeat(self, cache: Any, rows: int) -> None:
        cache.keys = mx.repeat(cache.keys, rows, axis=0)
        cache.values = mx.repeat(cache.values, rows, axis=0)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "KINDS", (*kinds.KINDS, ConcatenatedKV()))


def concatenating(directory: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """A llama that makes caches of the new kind."""

    def make_cache(model: Any) -> list[Any]:
        return [ConcatenateKVCache() for _ in model.layers]

    monkeypatch.setattr(llama.Model, "make_cache", make_cache)
    return load(DENSE["llama"].write(directory))


def test_kinds_are_told_by_the_caches_that_models_make():
    made = [KVCache(), RotatingKVCache(8), ArraysCache(2), RotatingKVCache(8, keep=2), object()]
    stores = [kind_of(cache).store for cache in made]
    assert stores == [Store.TOKENS, Store.WINDOW, Store.STATE, Store.NONE, Store.NONE]


def test_a_model_whose_kind_has_no_row_in_the_table_runs_one_by_one(tmp_path, monkeypatch):
    loaded = concatenating(tmp_path, monkeypatch)
    assert {leaf.kind for leaf in loaded.layout.leaves} == {UNKNOWN}
    assert choose_form(loaded).reason == "no batch can hold ConcatenateKVCache caches"


@pytest.mark.usefixtures("known")
def test_a_model_whose_kind_has_a_row_in_the_table_runs_in_a_batch(tmp_path, monkeypatch):
    loaded = concatenating(tmp_path, monkeypatch)
    assert loaded.layout.describe() == f"{len(loaded.layout.leaves)} concatenated KV"
    assert choose_form(loaded).batching is Batching.SEVERAL_SLABS
    monkeypatch.undo()
    assert loaded.shape == load(tmp_path).shape


@pytest.mark.usefixtures("known")
def test_what_a_cache_of_a_new_kind_holds_comes_out_and_goes_into_another():
    caches = [KVCache(), ConcatenateKVCache()]
    for cache in caches:
        cache.update_and_fetch(*(mx.random.normal((1, 2, 5, 4)) for _ in range(2)))
    layout = inspect_caches(caches)
    content = read_caches(layout, caches, 5)
    assert content is not None
    others: list[Any] = [KVCache(), ConcatenateKVCache()]
    fill_caches(layout, others, content.kv, None, length=5, room=8)
    for cache, other in zip(caches, others, strict=True):
        assert other.offset == 5
        np.testing.assert_array_equal(
            np.array(other.keys[..., :5, :]), np.array(cache.keys[..., :5, :])
        )
