"""Plans the prefill chunks of the next step."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from mlx_dp.worker.contract.engine import PrefillChunk
from mlx_dp.worker.scheduling.memory_room import MemoryRoom
from mlx_dp.worker.scheduling.request_prefixes import RequestPrefixes
from mlx_dp.worker.scheduling.running_request import RunningRequest

LONG_PROMPT: Final = 64
"""At the end of a longer prompt, all its KV is copied into the batch and into the prefix cache."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A chunk before the numbers of segments are known."""

    request: RunningRequest
    num_tokens: int
    snapshot: int | None


class PrefillPlanner:
    """Plans first come, first served, except prompts whose beginning another request computes now.

    Such a request waits for the other one, its leader, and is considered again at every plan. A
    leader has begun, and requests that have begun never wait, so every wait ends.
    """

    def __init__(self, prefixes: RequestPrefixes, room: MemoryRoom) -> None:
        self._prefixes = prefixes
        self._room = room

    def plan(
        self, requests: Collection[RunningRequest], budget: int, *, decoding: bool
    ) -> tuple[PrefillChunk, ...]:
        """Plan one chunk for each of these requests, ``budget`` tokens in total.

        While others decode, the last chunk of a long prompt is its last token alone, which no chunk
        runs, and no other chunk follows it in that step: the copy of its KV delays the decode.
        """
        drafts: list[_Draft] = []
        for request in requests:
            if not budget:
                break
            if not request.begun:
                if self._must_wait(request, requests):
                    continue
                self._prefixes.begin(request)
            apart = decoding and len(request.prompt) > LONG_PROMPT
            drafts.append(self._draft(request, budget, apart=apart))
            budget -= drafts[-1].num_tokens
            if apart and not request.unfilled:
                break
        # Segment numbers stay valid from here until the step is launched.
        return tuple(self._chunk(draft) for draft in drafts)

    def _must_wait(self, request: RunningRequest, requests: Collection[RunningRequest]) -> bool:
        leader = request.leader
        if leader is not None and leader.prefills and leader in requests:
            return True
        request.leader = next(
            (
                other
                for other in requests
                if other.prefills and self._prefixes.worth_waiting(request, other)
            ),
            None,
        )
        return request.leader is not None

    def _draft(self, request: RunningRequest, budget: int, *, apart: bool) -> _Draft:
        num_tokens = request.chunk_tokens(budget)
        if apart and num_tokens == request.unfilled > 1:
            num_tokens -= 1
        point = request.fill(num_tokens)
        snapshot = None if point is None else self._prefixes.track(request, point)
        if not request.unfilled:
            self._room.row_joins(request.request_id)
            snapshot = self._prefixes.insert_prompt(request, snapshot)
        return _Draft(request, num_tokens, snapshot)

    def _chunk(self, draft: _Draft) -> PrefillChunk:
        handover = self._prefixes.hand_over(draft.request)
        return PrefillChunk(
            slot=draft.request.lease.slot,
            num_tokens=draft.num_tokens,
            prefix=handover.prefix,
            snapshot=draft.snapshot,
            saves=handover.saves,
        )
