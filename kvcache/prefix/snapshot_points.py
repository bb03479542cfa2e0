"""The positions in a prompt at which a stateful model's state is kept."""

from typing import Final

SNAPSHOT_INTERVAL: Final = 64
"""Snapshots lie at multiples of this, so that prompts that differ soon after share one."""


def snapshot_points(prompt_tokens: int, cached: int, kv_tokens: int) -> tuple[int, ...]:
    """Return the token counts, ascending and beyond ``cached``, at which prefill stops.

    The last multiple of the interval serves prompts that differ near this one's end; the prompt's
    end serves prompts that continue it. ``kv_tokens`` is the length that another prompt shares with
    this one: a state is kept there, so that the next prompt that differs at the same place finds
    it.
    """
    end = prompt_tokens - 1
    wanted = {end, _boundary(end), _boundary(min(kv_tokens, end))}
    return tuple(sorted(point for point in wanted if point > cached))


def _boundary(num_tokens: int) -> int:
    return num_tokens - num_tokens % SNAPSHOT_INTERVAL
