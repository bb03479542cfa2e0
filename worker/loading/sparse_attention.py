"""Models with sparse attention, which attend to a limited number of chosen tokens."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_CHOICES: Final = {"index_topk": 8, "index_topk_blocks": 1, "index_block_size": 8}
"""The attributes of mlx-lm's modules that limit the number, with a small value for the check."""


@contextmanager
def narrowed(model: Any) -> Iterator[bool]:
    """Lower a model's limit of chosen tokens, so that it chooses among few already.

    Yields whether the model chooses at all. With fewer tokens than the limit such a model uses all,
    so a check with short prompts would prove nothing.
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
