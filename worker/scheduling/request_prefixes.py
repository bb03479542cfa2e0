"""The traffic of running requests with the prefix cache, where there is one."""

from dataclasses import dataclass
from typing import Final

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.kvcache.prefix.common_prefix import common_prefix
from mlx_dp.kvcache.prefix.prefix_cache import Beginning, Freed, Handover, PrefixCache
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.proto.messages.protocol import FinishReason
from mlx_dp.worker.scheduling.memory_room import MemoryRoom
from mlx_dp.worker.scheduling.running_request import RunningRequest

WORTH_WAITING_TOKENS: Final = 64
"""A prompt that has this many more tokens in common with one under way waits for it."""
_COLD: Final = Beginning(num_tokens=0, snapshot_points=())
_NOTHING: Final = Handover(prefix=None, saves=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The KV and state that the engine copies of a request before it is removed."""

    saves: tuple[Save, ...]
    snapshot: int | None


class RequestPrefixes:
    """Keeps of a request what the budget has room for, and frees the rest of its states.

    Without the prefix cache every request begins cold and leaves nothing.
    """

    def __init__(self, cache: PrefixCache | None, room: MemoryRoom, facts: PrefixFacts) -> None:
        self._cache = cache
        self._room = room
        self._facts = facts

    @property
    def num_tokens(self) -> int:
        return 0 if self._cache is None else self._cache.num_tokens

    @property
    def nbytes(self) -> int:
        return 0 if self._cache is None else self._cache.nbytes

    def begin(self, request: RunningRequest) -> None:
        """Find the part of the prompt that is cached."""
        if self._cache is None:
            request.begin(_COLD)
            return
        salt = request.submit.cache_salt
        request.begin(self._cache.begin(request.request_id, request.prompt, salt))

    def worth_waiting(self, request: RunningRequest, leader: RunningRequest) -> bool:
        """A prompt that is being prefilled will spare this one clearly more than the tree does."""
        salt = request.submit.cache_salt
        if self._cache is None or leader.submit.cache_salt != salt:
            return False
        shared = common_prefix(leader.prompt, request.prompt)
        shared = min(shared, len(request.prompt) - 1, len(leader.prompt) - 1)
        if self._facts.stateful:
            points = (*leader.tracked, *leader.snapshot_points)
            shared = max((point for point in points if point <= shared), default=0)
        if shared < WORTH_WAITING_TOKENS:
            return False
        held = self._cache.expected(request.prompt, salt)
        return shared - held >= WORTH_WAITING_TOKENS

    def track(self, request: RunningRequest, num_tokens: int) -> int | None:
        """Take a slot for the state after so many tokens; None: there is no room for it."""
        nbytes = self._facts.snapshot_nbytes(num_tokens)
        if self._cache is None or not self._room.try_evict_for(nbytes):
            return None
        slot = self._cache.snapshot_slot(request.request_id)
        if slot is not None:
            self._room.promise(nbytes)
            request.tracked[num_tokens] = slot
        return slot

    def prefilled(self, request: RunningRequest, last_slot: int | None) -> int | None:
        """Give the tree a prompt that the plan completes.

        Returns the slot for the state at the prompt's end, unless the tree does without it.
        """
        prompt = request.prompt[:-1]
        if self._cache is None or not self._make_room(request, prompt):
            return last_slot
        self._room.promise(self._segment_nbytes(request, prompt))
        taken = self._cache.prefilled(request.request_id, request.prompt, request.tracked)
        request.tracked = {}
        return last_slot if last_slot in taken else None

    def hand_over(self, request: RunningRequest) -> Handover:
        """Return the segments that a planned chunk reads and writes. The step comes next."""
        return _NOTHING if self._cache is None else self._cache.hand_over(request.request_id)

    def ended(self, request: RunningRequest) -> Kept | None:
        """Keep what a request has computed, where that is something and there is room for it."""
        if self._cache is None:
            return None
        if not request.begun or request.finish is FinishReason.ERROR:
            # The token that was fed last to a failed request is not known here.
            self.dropped(request)
            return None
        fed = request.fed_ids
        live_slot = request.lease.auxiliary_slot
        state_nbytes = 0 if live_slot is None else self._facts.snapshot_nbytes(len(fed))
        if not self._make_room(request, fed, state_nbytes):
            self.dropped(request)
            return None
        saves, snapshot = self._cache.ended(request.request_id, fed, live_slot, request.tracked)
        request.tracked = {}
        return Kept(saves=saves, snapshot=snapshot) if saves or snapshot is not None else None

    def dropped(self, request: RunningRequest) -> None:
        """Keep nothing of a request."""
        if self._cache is not None:
            live_slot = request.lease.auxiliary_slot
            self._cache.dropped(request.request_id, request.tracked, live_slot)
            request.tracked = {}

    def flush(self) -> Freed:
        """Drop all that no planned chunk names."""
        return Freed(num_tokens=0, nbytes=0) if self._cache is None else self._cache.flush()

    def _make_room(
        self, request: RunningRequest, ids: tuple[int, ...], state_nbytes: int = 0
    ) -> bool:
        """Make room for those of these tokens that the tree does not have."""
        nbytes = -1
        # The eviction may have taken the beginning of these very tokens.
        while (needed := self._segment_nbytes(request, ids) + state_nbytes) > nbytes:
            nbytes = needed
            if not self._room.try_evict_for(nbytes):
                return False
        return True

    def _segment_nbytes(self, request: RunningRequest, ids: tuple[int, ...]) -> int:
        assert self._cache is not None
        missing = self._cache.missing(ids, request.submit.cache_salt)
        return self._facts.segment_nbytes(missing) + self._facts.slack_nbytes if missing else 0
