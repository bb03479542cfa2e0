"""How much memory the bodies of all requests together may take."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from mlx_dp.orchestrator.openai.errors import overloaded
from mlx_dp.orchestrator.service import RETRY_BUSY_S

FREE_NBYTES: Final = 64 * 2**10
"""Each body's first bytes count for nothing, so that a few large ones shut out no small one."""


class BodyRoom:
    """Invariant: ``held_nbytes`` is what the bodies that are held now have beyond the free part."""

    def __init__(self, most_nbytes: int) -> None:
        self._most_nbytes = most_nbytes
        self.held_nbytes = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Give what takes each chunk's size, and raises ApiError when there is no room for it."""
        size = counted = 0

        def take(nbytes: int) -> None:
            nonlocal size, counted
            size += nbytes
            more = max(0, size - FREE_NBYTES) - counted
            if more and self.held_nbytes + more > self._most_nbytes:
                error = overloaded(
                    429, "too many large bodies are under way", retry_after_s=RETRY_BUSY_S
                )
                error.headers["connection"] = "close"
                raise error
            counted += more
            self.held_nbytes += more

        try:
            yield take
        finally:
            self.held_nbytes -= counted
