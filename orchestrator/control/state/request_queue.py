"""The one queue of the service. A request leaves it only for an owner that has room."""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Final

from mlx_dp.orchestrator.control.state.request_entry import RequestEntry


@dataclass(frozen=True, slots=True)
class _Place:
    """The lane of a request, and the tokens that it counts for there."""

    lane: int | None
    num_tokens: int


class RequestQueue:
    """Requests in order of arrival, in one lane for those that may go anywhere and one per rank.

    Lanes exist so that a request that waits for its rank does not hold up those that may go
    elsewhere. Request ids are given in order of arrival, so the smaller id is the older request,
    also among those that come back. Invariants: each request is in exactly one lane, and the ids
    of a lane rise from its head.
    """

    def __init__(self, max_queued_requests: int) -> None:
        self._limit: Final = max_queued_requests
        self._lanes: Final[dict[int | None, OrderedDict[int, RequestEntry]]] = {}
        self._places: Final[dict[int, _Place]] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, entry: RequestEntry) -> bool:
        return entry.request_id in self._places

    @property
    def num_tokens(self) -> int:
        """Tokens to prefill for all waiting requests."""
        return self._num_tokens

    @property
    def limit(self) -> int:
        return self._limit

    @property
    def full(self) -> bool:
        return len(self._places) >= self._limit

    def put(self, entry: RequestEntry) -> None:
        """Add at the end. The caller has checked ``full``."""
        self._enter(entry)

    def put_back(self, entry: RequestEntry) -> None:
        """Add ahead of all younger requests, even beyond the limit: it was admitted before."""
        self._enter(entry)
        lane = self._lanes[entry.pinned]
        lane.move_to_end(entry.request_id, last=False)
        # Few, since a requeued request is mostly older than all others in the queue.
        older = [*takewhile(lambda waiting: waiting < entry.request_id, islice(lane, 1, None))]
        for request_id in reversed(older):
            lane.move_to_end(request_id, last=False)

    def _enter(self, entry: RequestEntry) -> None:
        assert entry.request_id not in self._places, f"{entry.request_id} is queued already"
        place = _Place(entry.pinned, entry.num_tokens)
        self._places[entry.request_id] = place
        self._lanes.setdefault(place.lane, OrderedDict())[entry.request_id] = entry
        self._num_tokens += place.num_tokens

    def remove(self, entry: RequestEntry) -> None:
        """Remove from any place, in constant time."""
        place = self._places.pop(entry.request_id)
        lane = self._lanes[place.lane]
        del lane[entry.request_id]
        if not lane:
            del self._lanes[place.lane]
        self._num_tokens -= place.num_tokens

    def heads(self) -> list[RequestEntry]:
        """The first request of each lane, the oldest first: one of them goes next."""
        heads = [next(iter(lane.values())) for lane in self._lanes.values()]
        if len(heads) > 1:
            heads.sort(key=lambda entry: entry.request_id)
        return heads

    def check(self) -> None:
        """Assert the invariants; for idle loops and tests."""
        seen: set[int] = set()
        for name, lane in self._lanes.items():
            assert lane, f"lane {name} is empty"
            assert list(lane) == sorted(lane), (name, list(lane))
            assert all(self._places[request_id].lane == name for request_id in lane), name
            assert seen.isdisjoint(lane), seen & lane.keys()
            seen |= lane.keys()
        assert seen == self._places.keys(), seen ^ self._places.keys()
        assert self._num_tokens == sum(place.num_tokens for place in self._places.values())
