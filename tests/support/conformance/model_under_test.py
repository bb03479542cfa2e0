"""One architecture's tiny model on disk, and what mlx-lm answers with it."""

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
    solo_greedy,
)
from tests.support.models.tiny_models import ARCHITECTURES

LONGEST_ANSWER = 12
"""As many tokens are asked of mlx-lm for every prompt, so that one answer serves all scenarios."""


class ModelUnderTest:
    """Written and loaded once for all scenarios; remembers mlx-lm's answers."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = ARCHITECTURES[name].write(directory)
        self._model, _ = load_model(self.directory)
        self._answers: dict[tuple[int, ...], SoloAnswer] = {}

    @property
    def cache_kinds(self) -> tuple[str, ...]:
        """The kinds of mlx-lm's caches, in the order of the first of each."""
        return tuple(dict.fromkeys(_kind(cache) for cache in make_prompt_cache(self._model)))

    @property
    def whole_nbytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self._model.parameters()))

    def hold(self, prompt: tuple[int, ...], ids: list[int], ties: Ties) -> None:
        """Compare an answer, or the beginning of one, with mlx-lm's own."""
        if prompt not in self._answers:
            self._answers[prompt] = solo_greedy(self._model, prompt, LONGEST_ANSWER)
        whole = self._answers[prompt]
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


def _kind(cache: Any) -> str:
    if isinstance(cache, CacheList):
        return f"({', '.join(_kind(part) for part in cache.caches)})"
    return type(cache).__name__.removesuffix("Cache")
