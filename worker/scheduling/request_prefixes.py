"""Moves prefixes between running requests and the prefix cache, if there is one."""

from dataclasses import dataclass
from typing import Final

from mlx_dp.kvcache.prefix.cached_prefix import Save
from mlx_dp.kvcache.prefix.common_prefix import common_prefix
from mlx_dp.kvcache.prefix.prefix_cache import Freed, Handover, PrefillStart, PrefixCache
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.proto.messages.events import FinishReason
from mlx_dp.worker.scheduling.memory_room import MemoryRoom
from mlx_dp.worker.scheduling.running_request import RunningRequest

WORTH_WAITING_TOKENS: Final = 64
"""A prompt waits for one under way if that saves it at least this many more tokens."""
_COLD: Final = PrefillStart(num_tokens=0, snapshot_points=())
_NOTHING: Final = Handover(prefix=None, saves=())


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSaves:
    """The KV and state of an ended request that the engine copies before it removes the request."""

    saves: tuple[Save, ...]
    snapshot: int | None


class RequestPrefixes:
    """Keeps a request's KV and states as far as the budget allows, and frees its other states.

    Without the prefix cache every request starts cold, and nothing is kept.
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
        """Find the cached part of the prompt."""
        if self._cache is None:
            request.begin(_COLD)
            return
        salt = request.submit.cache_salt
        request.begin(self._cache.begin(request.request_id, request.prompt, salt))

    def worth_waiting(self, request: RunningRequest, leader: RunningRequest) -> bool:
        """Whether the leader's prompt will save this one clearly more tokens than the tree does
        now.
        """
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
        held = self._cache.cached_tokens(request.prompt, salt)
        return shared - held >= WORTH_WAITING_TOKENS

    def track(self, request: RunningRequest, num_tokens: int) -> int | None:
        """Take a slot for the state after ``num_tokens`` tokens; None: memory is short."""
        nbytes = self._facts.snapshot_nbytes(num_tokens)
        if self._cache is None or not self._room.try_evict_for(nbytes):
            return None
        slot = self._cache.snapshot_slot(request.request_id)
        if slot is not None:
            self._room.promise(nbytes)
            request.tracked[num_tokens] = slot
        return slot

    def insert_prompt(self, request: RunningRequest, last_slot: int | None) -> int | None:
        """Insert a prompt that the plan completes into the tree.

        Returns the slot for the state at the prompt's end; None: the tree does not need it.
        """
        prompt = request.prompt[:-1]
        if self._cache is None or not self._try_try_make_room(request, prompt):
            return last_slot
        self._room.promise(self._segment_nbytes(request, prompt))
        taken = self._cache.insert_prompt(request.request_id, request.prompt, request.tracked)
        request.tracked = {}
        return last_slot if last_slot in taken else None

    def hand_over(self, request: RunningRequest) -> Handover:
        """Return the segments that a planned chunk reads and writes. Launch the step next."""
        return _NOTHING if self._cache is None else self._cache.hand_over(request.request_id)

    def insert_ended(self, request: RunningRequest) -> EndSaves | None:
        """Keep the KV and state of an ended request, if there are any and memory allows it."""
        if self._cache is None:
            return None
        if not request.begun or request.finish is FinishReason.ERROR:
            # The last token that was fed to a failed request is unknown here.
            self.drop_request(request)
            return None
        fed = request.fed_ids
        live_slot = request.lease.auxiliary_slot
        state_nbytes = 0 if live_slot is None else self._facts.snapshot_nbytes(len(fed))
        if not self._try_try_make_room(request, fed, state_nbytes):
            self.drop_request(request)
            return None
        saves, snapshot = self._cache.insert_ended(
            request.request_id, fed, live_slot, request.tracked
        )
        request.tracked = {}
        return EndSaves(saves=saves, snapshot=snapshot) if saves or snapshot is not None else None

    def drop_request(self, request: RunningRequest) -> None:
        """Keep nothing of a request; free its states."""
        if self._cache is not None:
            live_slot = request.lease.auxiliary_slot
            self._cache.drop_request(request.request_id, request.tracked, live_slot)
            request.tracked = {}

    def flush(self) -> Freed:
        """Drop all prefixes except those that planned chunks use."""
        return Freed(num_tokens=0, nbytes=0) if self._cache is None else self._cache.flush()

    def _try_try_make_room(
        self, request: RunningRequest, ids: tuple[int, ...], state_nbytes: int = 0
    ) -> bool:
        """Evict until the tree can take the tokens that it lacks; return whether it can."""
        nbytes = -1
        # The eviction may have dropped the beginning of these tokens.
        while (needed := self._segment_nbytes(request, ids) + state_nbytes) > nbytes:
            nbytes = needed
            if not self._room.try_evict_for(nbytes):
                return False
        return True

    def _segment_nbytes(self, request: RunningRequest, ids: tuple[int, ...]) -> int:
        assert self._cache is not None
        missing = self._cache.missing_tokens(ids, request.submit.cache_salt)
        return self._facts.segment_nbytes(missing) + self._facts.slack_nbytes if missing else 0
