"""Randomness that depends on the request's seed and the position, and on nothing else."""

from typing import Final

_MASK: Final = 2**64 - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit words that key the draw of the token at this absolute position.

    A splitmix64 hash (Steele, Lea and Flood, 2014), so that neighbouring seeds and positions have
    unrelated keys; MLX's counter-based generator takes any two words.
    """
    mixed = _mix(_mix(seed) + position * _GOLDEN)
    return mixed >> 32, mixed & 0xFFFFFFFF


def _mix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
