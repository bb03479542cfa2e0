"""The finalizer of splitmix64 (Steele, Lea and Flood, 2014): hashes of numbers, and draws' keys.

A draw's randomness depends on the request's seed and the position, and on nothing else.
"""

from typing import Final

GOLDEN: Final = 0x9E3779B97F4A7C15
MASK: Final = 2**64 - 1


def scramble(value: int) -> int:
    """Return 64 bits, each of which depends on all 64 low bits of ``value``."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit words that key the draw of the token at this absolute position.

    A splitmix64 hash, so that neighbouring seeds and positions have unrelated keys; MLX's
    counter-based generator takes any two words.
    """
    mixed = scramble(scramble(seed + GOLDEN) + (position + 1) * GOLDEN)
    return mixed >> 32, mixed & 0xFFFFFFFF
