"""Models that attend to a chosen few of the cached tokens, once there are more than they choose."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_CHOICES: Final = {"index_topk": 8, "index_topk_blocks": 1, "index_block_size": 8}
"""How modules of mlx-lm call the number that they choose, and a small one to try them with."""


@contextmanager
def narrowed(model: Any) -> Iterator[bool]:
    """Have a model choose among few tokens already, to see what it would do with many.

    Yields whether the model chooses at all. Below its number such a model takes every token, so
    that a check with short prompts would prove nothing.
    """
    before: list[tuple[Any, str, int]] = []
    for _, module in model.named_modules():
        for name, small in _CHOICES.items():
            value = getattr(module, name, None)
            if isinstance(value, int) and value > small:
                before.append((module, name, value))
                setattr(module, name, small)
    try:
        yield bool(before)
    finally:
        for module, name, value in before:
            setattr(module, name, value)
