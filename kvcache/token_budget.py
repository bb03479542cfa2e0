"""KV tokens promised to requests, against the tokens that an owner's pool has."""


class KVBudget:
    """A pool of KV tokens, of which every running request has reserved its worst case.

    ``pool_tokens`` None: the model has no attention KV, and tokens bound nothing.
    Invariant: the reservations add up to ``reserved_tokens``, which fits the pool.
    """

    def __init__(self, pool_tokens: int | None) -> None:
        assert pool_tokens is None or pool_tokens >= 0, pool_tokens
        self._pool_tokens = pool_tokens
        self._reserved = 0
        self._by_request: dict[int, int] = {}

    @property
    def pool_tokens(self) -> int | None:
        return self._pool_tokens

    @property
    def reserved_tokens(self) -> int:
        return self._reserved

    @property
    def free_tokens(self) -> int | None:
        """Tokens that nobody has reserved; None when the pool is unbounded."""
        return None if self._pool_tokens is None else self._pool_tokens - self._reserved

    def reserve(self, request_id: int, num_tokens: int) -> bool:
        """Set tokens aside for a request, or change nothing and say False."""
        assert num_tokens >= 1, num_tokens
        assert request_id not in self._by_request, f"request {request_id} reserves twice"
        if self._pool_tokens is not None and self._reserved + num_tokens > self._pool_tokens:
            return False
        self._by_request[request_id] = num_tokens
        self._reserved += num_tokens
        return True

    def release(self, request_id: int) -> None:
        """Give back all that a request has reserved."""
        assert request_id in self._by_request, f"request {request_id} has reserved nothing"
        self._reserved -= self._by_request.pop(request_id)

    def check(self) -> None:
        assert self._reserved == sum(self._by_request.values()), (self._reserved, self._by_request)
        assert self._pool_tokens is None or self._reserved <= self._pool_tokens, self._reserved
