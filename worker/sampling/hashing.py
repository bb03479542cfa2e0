"""The finalizer of splitmix64 (Steele, Lea and Flood, 2014), for hashing numbers."""

from typing import Final

GOLDEN: Final = 0x9E3779B97F4A7C15
MASK: Final = 2**64 - 1


def scramble(value: int) -> int:
    """Return 64 bits, each of which depends on all 64 low bits of ``value``."""
    value &= MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)
