"""The requests that hold a slot, in the order of their admission."""

from collections.abc import Iterator

from mlx_dp.proto.capacity.request_limits import next_tokens
from mlx_dp.worker.scheduling.running_request import RunningRequest


class RunningRequests:
    """Finds requests by slot and by id, and counts them by phase."""

    def __init__(self) -> None:
        self._by_slot: dict[int, RunningRequest] = {}
        self._by_id: dict[int, RunningRequest] = {}

    def __len__(self) -> int:
        return len(self._by_slot)

    def __iter__(self) -> Iterator[RunningRequest]:
        yield from self._by_slot.values()

    def at(self, slot: int) -> RunningRequest:
        return self._by_slot[slot]

    def find(self, request_id: int) -> RunningRequest | None:
        return self._by_id.get(request_id)

    @property
    def youngest(self) -> RunningRequest:
        return self._by_slot[next(reversed(self._by_slot))]

    @property
    def prefilling(self) -> int:
        """The number of requests without a token yet."""
        return sum(request.has_no_token for request in self)

    @property
    def waiting(self) -> int:
        """The number of requests with tokens to prefill."""
        return sum(request.unfilled > 0 for request in self)

    @property
    def decoding(self) -> int:
        """The number of requests that the next step decodes."""
        return sum(request.decodes for request in self)

    @property
    def reserved_tokens(self) -> int:
        """KV tokens that the requests have or need next."""
        return sum(
            next_tokens(len(r.submit.prompt_ids) + r.num_tokens, r.submit.max_tokens - r.num_tokens)
            for r in self
        )

    def add(self, request: RunningRequest) -> None:
        assert request.lease.slot not in self._by_slot, request.lease
        assert request.request_id not in self._by_id, request.request_id
        self._by_slot[request.lease.slot] = request
        self._by_id[request.request_id] = request

    def remove(self, request: RunningRequest) -> None:
        del self._by_slot[request.lease.slot]
        del self._by_id[request.request_id]

    def check(self) -> None:
        assert self._by_id == {request.request_id: request for request in self}, self._by_id
        assert all(slot == request.lease.slot for slot, request in self._by_slot.items())
