"""Where in a prompt a stateful model's state is kept."""

from typing import Final

SNAPSHOT_INTERVAL: Final = 64
"""Snapshots lie at multiples of it, so that prompts which part soon after share one."""


def snapshot_points(prompt_tokens: int, cached: int, kv_tokens: int) -> tuple[int, ...]:
    """Return the token counts, ascending and beyond ``cached``, at which prefill stops.

    The last boundary serves prompts that part from this one near its end, and the prompt's end
    those that go on from it. ``kv_tokens`` is how far another prompt went along with this one: if
    no state lies there, the next prompt that parts at the same place shall find one.
    """
    end = prompt_tokens - 1
    wanted = {end, _boundary(end), _boundary(min(kv_tokens, end))}
    return tuple(sorted(point for point in wanted if point > cached))


def _boundary(num_tokens: int) -> int:
    return num_tokens - num_tokens % SNAPSHOT_INTERVAL
