"""Randomness that depends on the request's seed and the position, and on nothing else."""

from mlx_dp.worker.sampling.hashing import GOLDEN, scramble


def draw_key(seed: int, position: int) -> tuple[int, int]:
    """Return the two 32-bit words that key the draw of the token at this absolute position.

    A splitmix64 hash, so that neighbouring seeds and positions have unrelated keys; MLX's
    counter-based generator takes any two words.
    """
    mixed = scramble(scramble(seed + GOLDEN) + (position + 1) * GOLDEN)
    return mixed >> 32, mixed & 0xFFFFFFFF
