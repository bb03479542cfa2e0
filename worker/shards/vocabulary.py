"""Finds a model's embedding and LM head."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding
from mlx_lm.models.cache import make_prompt_cache

from mlx_dp.worker.contract.engine import UnsupportedModelError
from mlx_dp.worker.shards.block_finder import Places, find_places
from mlx_dp.worker.shards.linear_slices import (
    Span,
    is_sliceable,
    num_experts,
    output_width,
    slice_outputs,
)

_TOKENS: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyLayer:
    """An embedding or an LM head, with the inputs and outputs of one observed pass."""

    module: Any
    places: Places
    width: int
    dtype: mx.Dtype
    output_width: int
    output_dtype: mx.Dtype

    @property
    def size(self) -> int:
        """The number of tokens in the layer."""
        return output_width(self.module)

    def span(self, rank: int, ranks: int) -> Span:
        return rank * self.size // ranks, (rank + 1) * self.size // ranks

    def slices(self, rank: int, ranks: int) -> dict[str, mx.array]:
        return slice_outputs(self.module, [self.span(rank, ranks)])

    def kept_nbytes(self, rank: int, ranks: int) -> int:
        return sum(int(array.nbytes) for array in self.slices(rank, ranks).values())

    @property
    def nbytes(self) -> int:
        return sum(int(self.module[name].nbytes) for name in self.slices(0, 1))

    def put(self, module: Any) -> None:
        """Put another module in the layer's place."""
        for container, key in self.places:
            container[key] = module


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """``tied``: the embedding is also the head."""

    embedding: VocabularyLayer
    head: VocabularyLayer

    @property
    def tied(self) -> bool:
        return self.head.module is self.embedding.module

    @property
    def layers(self) -> tuple[VocabularyLayer, ...]:
        return (self.embedding,) if self.tied else (self.embedding, self.head)


@dataclass(slots=True)
class _Seen:
    lookups: list[VocabularyLayer] = field(default_factory=list)
    heads: list[VocabularyLayer] = field(default_factory=list)


class _Recorder:
    """Stands in a layer's place during the traced pass."""

    def __init__(self, module: Any, places: Places, seen: _Seen) -> None:
        self._module = module
        self._places = places
        self._seen = seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, taken: mx.array) -> mx.array:
        given: mx.array = self._module(taken)
        embeds = isinstance(self._module, Embedding | QuantizedEmbedding)
        if taken.shape[:2] == (1, _TOKENS):
            (self._seen.lookups if embeds else self._seen.heads).append(self._layer(taken, given))
        return given

    def as_linear(self, taken: mx.array) -> mx.array:
        given: mx.array = self._module.as_linear(taken)
        self._seen.heads.append(self._layer(taken, given))
        return given

    def _layer(self, taken: mx.array, given: mx.array) -> VocabularyLayer:
        return VocabularyLayer(
            module=self._module,
            places=self._places,
            width=1 if taken.ndim < 3 else taken.shape[-1],
            dtype=taken.dtype,
            output_width=given.shape[-1],
            output_dtype=given.dtype,
        )


def find_vocabulary(model: Any) -> Vocabulary:
    """Find the embedding and the head by tracing a pass, without computing it.

    Raises UnsupportedModelError for a model without exactly one of each.
    """
    seen = _Seen()
    caches = make_prompt_cache(model)
    with _recorded([found for found in find_places(model) if _has_tokens(found[0])], seen):
        logits = model(mx.zeros((1, _TOKENS), dtype=mx.int32), cache=caches)
    wide = logits.shape[-1]
    lookups = [layer for layer in seen.lookups if layer.size >= wide]
    heads = [layer for layer in seen.heads if layer.output_width >= wide]
    # Embeddings beside it, of single layers say, are looked up later, and stay whole.
    lookups = [layer for layer in lookups if layer.module is lookups[0].module]
    if len(lookups) != 1 or len(heads) != 1:
        raise UnsupportedModelError(
            f"a pass uses {len(lookups)} times an embedding and {len(heads)} times a head of the "
            "vocabulary, and only what is used once can be divided: leave out --enable-dp-lm-head"
        )
    return Vocabulary(embedding=lookups[0], head=heads[0])


def _has_tokens(module: Any) -> bool:
    if type(module) in (Embedding, QuantizedEmbedding):
        return True
    return is_sliceable(module) and num_experts(module) is None


@contextmanager
def _recorded(found: Sequence[tuple[Any, Places]], seen: _Seen) -> Iterator[None]:
    try:
        for module, places in found:
            for container, key in places:
                container[key] = _Recorder(module, places, seen)
        yield
    finally:
        for module, places in found:
            for container, key in places:
                container[key] = module
