"""The owner's one memory budget: rows, cached prefixes and snapshots together.

In bytes, and in buffers where the device counts them.
"""

from typing import Protocol


class HeldMemory(Protocol):
    """The part of an engine that the budget needs."""

    @property
    def held_nbytes(self) -> int: ...

    @property
    def held_buffers(self) -> int: ...

    @property
    def row_buffers(self) -> int: ...

    def growth_nbytes(self) -> int: ...

    def compact(self) -> None: ...


class Evictable(Protocol):
    """The part of the prefix cache that the budget needs."""

    @property
    def nbytes(self) -> int: ...

    def evict(self) -> bool: ...


class MemoryRoom:
    """Compares held and promised memory with the budget; None: no budget.

    Promised memory: the rows of requests whose prompts are incomplete, and, until a step is
    launched, the copies into the prefix cache that it plans. Cached prefixes are evicted before
    anything else is refused.
    """

    def __init__(
        self,
        engine: HeldMemory,
        cache: Evictable | None,
        budget_nbytes: int | None,
        *,
        buffer_limit: int | None = None,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._budget_nbytes = budget_nbytes
        self._buffer_limit = buffer_limit
        self._rows: dict[int, int] = {}
        self._rows_nbytes = 0
        self._joining: list[int] = []
        self._copies_nbytes = 0
        self._row_left = False

    def expect_row(self, request_id: int, nbytes: int) -> None:
        """Promise the memory of an admitted request's row, until its prompt is complete."""
        assert request_id not in self._rows, f"request {request_id} is promised a row already"
        self._rows[request_id] = nbytes
        self._rows_nbytes += nbytes

    def row_joins(self, request_id: int) -> None:
        """Record that the planned step allocates the row."""
        self._joining.append(request_id)

    def row_left(self, request_id: int) -> None:
        """Record that a request was removed, whether it had a row or not."""
        self._rows_nbytes -= self._rows.pop(request_id, 0)
        self._row_left = True

    def step_launched(self) -> None:
        """Drop the promises of the plan: the engine holds that memory now."""
        for request_id in self._joining:
            self._rows_nbytes -= self._rows.pop(request_id)
        self._joining.clear()
        self._copies_nbytes = 0

    def try_evict_for(self, nbytes: int) -> bool:
        """Evict cached prefixes until this much fits beside the next step; return whether it does.

        Evicts nothing if evicting everything would not be enough.
        """
        excess = self._excess_nbytes(nbytes)
        if excess > (0 if self._cache is None else self._cache.nbytes):
            return False
        while excess > 0 or self._lacks_buffers():
            if not self._evict():
                return False
            excess = self._excess_nbytes(nbytes)
        return True

    def promise(self, nbytes: int) -> None:
        """Promise memory for a copy into the prefix cache that the planned step makes."""
        self._copies_nbytes += nbytes

    def try_make_room(self, nbytes: int) -> bool:
        """As ``try_evict_for``, and compact if necessary. False: requests hold the memory."""
        if self.try_evict_for(nbytes):
            return True
        if not self._row_left:
            return False
        self._compact()
        return self.try_evict_for(nbytes)

    def evict_excess(self) -> None:
        """Evict until the budget is kept or nothing is left: the last request may exceed the
        budget.
        """
        while self._excess_nbytes(0) > 0 and self._evict():
            pass

    def idle(self) -> None:
        """Compact while nothing runs, so that free rows do not cost cached prefixes."""
        budget = self._budget_nbytes
        if budget is not None and self._row_left and 2 * self._engine.held_nbytes > budget:
            self._compact()

    @property
    def accounted_nbytes(self) -> int:
        """Held memory, the growth of the next step, and promised memory."""
        held = self._engine.held_nbytes + self._engine.growth_nbytes()
        return held + self._rows_nbytes + self._copies_nbytes

    def check(self) -> None:
        assert self._rows_nbytes == sum(self._rows.values()), (self._rows_nbytes, self._rows)
        assert not self._joining, self._joining

    def _excess_nbytes(self, nbytes: int) -> int:
        if self._budget_nbytes is None:
            return 0
        return self.accounted_nbytes + nbytes - self._budget_nbytes

    def _lacks_buffers(self) -> bool:
        """Whether one more request, or its prefix, would exceed the device's number of buffers."""
        if self._buffer_limit is None:
            return False
        return self._engine.held_buffers + self._engine.row_buffers > self._buffer_limit

    def _evict(self) -> bool:
        return self._cache is not None and self._cache.evict()

    def _compact(self) -> None:
        self._engine.compact()
        self._row_left = False
