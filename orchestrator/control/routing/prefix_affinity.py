"""Prefix affinity: a policy that weighs cached prefixes against the work of each owner."""

from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

from mlx_dp.orchestrator.control.routing.prefix_index import BLOCK_TOKENS, PrefixIndex, PrefixKeys
from mlx_dp.orchestrator.control.state.owner import Owner
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry

PREFIX_AFFINITY: Final = "prefix_affinity"
HIT: Final = "prefix_affinity_hit"
"""No owner holds more of the prompt than the chosen one."""
LOAD: Final = "prefix_affinity_load"
"""Another owner holds more of the prompt, but has more work, or no room."""
COLD: Final = "prefix_affinity_cold"
"""No owner holds any of the prompt."""
REASONS: Final = (HIT, LOAD, COLD)

REQUEST_TOKENS: Final = 256
"""The cost of one more request in the batch of an owner, in prompt tokens.

Each row makes every step of the answer slower. This bounds the effect of a popular prefix of n
tokens: its owner gets at most n / 256 requests more than the others.
"""
MAX_BLOCKS: Final = 2**16
"""Blocks of one owner in the index: 4 million tokens, in about 10 MB."""


class PrefixAffinity:
    """Minimises the tokens to prefill before and for a request, plus the cost of the batch."""

    def __init__(self) -> None:
        self._index: Final = PrefixIndex()
        self._keys: Final[WeakKeyDictionary[RequestEntry, PrefixKeys]] = WeakKeyDictionary()

    def best(self, owners: Sequence[Owner], entry: RequestEntry) -> Sequence[Owner]:
        """The cheapest owners; of those, the ones that hold most of the prompt."""
        keys = self._keys_of(entry).keys

        def cost(owner: Owner) -> tuple[int, int]:
            held = self._index.held_tokens(owner.dp_rank, keys)
            ahead = owner.unprefilled_tokens + REQUEST_TOKENS * len(owner.grants)
            return ahead + entry.num_tokens - held, -held

        costs = [cost(owner) for owner in owners]
        least = min(costs)
        return [owner for owner, each in zip(owners, costs, strict=True) if each == least]

    def reason(self, owner: Owner, entry: RequestEntry) -> str:
        """Why this owner was chosen."""
        keys = self._keys_of(entry).keys
        holders = self._index.dp_ranks()
        most = max((self._index.held_tokens(holder, keys) for holder in holders), default=0)
        if most == 0:
            return COLD
        return HIT if self._index.held_tokens(owner.dp_rank, keys) == most else LOAD

    def cached_tokens(self, owner: Owner, entry: RequestEntry) -> int:
        """Tokens of a request that an owner is thought to hold already."""
        return self._index.held_tokens(owner.dp_rank, self._keys_of(entry).keys)

    def note_held(self, owner: Owner, entry: RequestEntry) -> None:
        """Note that an owner caches, or is about to cache, all tokens of a request so far."""
        pool = owner.ready.capacity.pool_tokens
        blocks = MAX_BLOCKS if pool is None else min(MAX_BLOCKS, pool // BLOCK_TOKENS)
        self._index.add_blocks(owner.dp_rank, self._keys_of(entry).keys, blocks)

    def forget_owner(self, dp_rank: int) -> None:
        """Note that an owner has lost or dropped its cached prefixes."""
        self._index.forget_owner(dp_rank)

    def _keys_of(self, entry: RequestEntry) -> PrefixKeys:
        """The keys of all tokens of a request but the last, which is computed in any case."""
        keys = self._keys.get(entry)
        if keys is None:
            keys = self._keys[entry] = PrefixKeys(entry.generation.cache_salt)
        prompt = entry.generation.prompt_ids
        end = entry.num_tokens - 1
        if keys.num_tokens < end:
            if keys.num_tokens < len(prompt):
                keys.extend(prompt[keys.num_tokens : end])
            answer = keys.num_tokens - len(prompt)
            keys.extend(entry.emitted[answer : end - len(prompt)] if answer >= 0 else ())
        return keys
