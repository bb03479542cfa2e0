"""Prefix index: a bounded estimate, in blocks, of the prefixes that each owner caches."""

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Final

BLOCK_TOKENS: Final = 64
"""Prefixes are compared at multiples of this length, as workers keep them."""

_KEY_NBYTES: Final = 8


class PrefixKeys:
    """One key for each full block of a growing sequence of tokens.

    A key is a hash of the salt and of all tokens up to the end of its block. Two sequences that
    share a key by accident, once in 2**64, are routed as if they shared a prefix.
    """

    __slots__ = ("_keys", "_last", "_partial_block")

    def __init__(self, cache_salt: str) -> None:
        self._last = _digest(cache_salt.encode("utf-8", "surrogatepass"))
        self._keys: list[bytes] = []
        self._partial_block: array[int] = array("i")

    @property
    def num_tokens(self) -> int:
        return len(self._keys) * BLOCK_TOKENS + len(self._partial_block)

    @property
    def keys(self) -> Sequence[bytes]:
        return self._keys

    def extend(self, ids: Sequence[int]) -> None:
        self._partial_block.extend(ids)
        blocks = len(self._partial_block) // BLOCK_TOKENS
        for block in range(blocks):
            tokens = self._partial_block[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS]
            self._last = _digest(self._last + tokens.tobytes())
            self._keys.append(self._last)
        del self._partial_block[: blocks * BLOCK_TOKENS]


class PrefixIndex:
    """The blocks that each owner is thought to hold, the least recently used first.

    Invariant: an owner that has a block has all blocks before it. Each use of a block also uses the
    earlier blocks, and counts them as used later, so that they are evicted later.
    """

    def __init__(self) -> None:
        self._held: Final[dict[int, OrderedDict[bytes, None]]] = {}

    def add_blocks(self, dp_rank: int, keys: Sequence[bytes], max_blocks: int) -> None:
        """Note that an owner has these blocks now, and at most ``max_blocks`` in all."""
        held = self._held.setdefault(dp_rank, OrderedDict())
        # In reverse, so that the end of a sequence is evicted first.
        for key in reversed(keys):
            held[key] = None
            held.move_to_end(key)
        while len(held) > max_blocks:
            held.popitem(last=False)

    def held_tokens(self, dp_rank: int, keys: Sequence[bytes]) -> int:
        """Tokens from the start of the sequence with these keys that an owner has."""
        held = self._held.get(dp_rank)
        if not held:
            return 0
        # By the invariant, the held blocks come first.
        return bisect_left(keys, True, key=lambda key: key not in held) * BLOCK_TOKENS

    def dp_ranks(self) -> Iterator[int]:
        """The ranks of the owners that hold any block."""
        return iter(self._held)

    def forget_owner(self, dp_rank: int) -> None:
        """Note that an owner holds no block any more."""
        self._held.pop(dp_rank, None)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_KEY_NBYTES).digest()
