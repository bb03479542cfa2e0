"""One architecture's tiny model on disk, and mlx-lm's output with it."""

from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.models.oracle import (
    SoloAnswer,
    Ties,
    assert_greedy,
    first_difference,
    greedy_alone,
)
from tests.support.models.tiny_models import ARCHITECTURES


class ModelUnderTest:
    """Written and loaded once for all scenarios; remembers mlx-lm's output."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = ARCHITECTURES[name].write(directory)
        self._model, _ = load_model(self.directory)
        self._answers: dict[tuple[int, ...], SoloAnswer] = {}

    @property
    def cache_kinds(self) -> tuple[str, ...]:
        """The kinds of mlx-lm's caches, in the order of their first use."""
        return tuple(dict.fromkeys(_kind(cache) for cache in make_prompt_cache(self._model)))

    @property
    def whole_nbytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self._model.parameters()))

    def hold(self, prompt: tuple[int, ...], ids: list[int], ties: Ties) -> None:
        """Compare a response, or the beginning of one, with mlx-lm's own."""
        if not ids:
            return
        whole = self._answer(prompt, len(ids))
        cut = SoloAnswer(
            ids=whole.ids[: len(ids)],
            runners_up=whole.runners_up[: len(ids)],
            gaps=whole.gaps[: len(ids)],
            stopped=False,
        )
        if first_difference(ids, cut) is None:
            ties.compared += len(ids)
            return
        assert_greedy(self._model, prompt, ids, max_tokens=len(ids), ties=ties)

    def _answer(self, prompt: tuple[int, ...], length: int) -> SoloAnswer:
        """Return the longest output so far, of at least this many tokens."""
        known = self._answers.get(prompt)
        if known is None or len(known.ids) < length:
            known = self._answers[prompt] = greedy_alone(self._model, prompt, length)
        return known


def _kind(cache: Any) -> str:
    if isinstance(cache, CacheList):
        return f"({', '.join(_kind(part) for part in cache.caches)})"
    return type(cache).__name__.removesuffix("Cache")
