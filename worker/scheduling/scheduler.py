"""The requests that run in this owner, and the next step's plan. No sockets, arrays, clock."""

from dataclasses import dataclass

from mlx_dp.kvcache.prefix.lease import OwnerPools, Shortage
from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, next_tokens
from mlx_dp.proto.messages.commands import Abort, Flush, Submit
from mlx_dp.proto.messages.events import (
    Finished,
    FinishReason,
    Flushed,
    Preempted,
    Prefilled,
    Rejected,
    RejectReason,
    TokenChunk,
    Tokens,
)
from mlx_dp.worker.contract.engine import Drawn, Engine, StepPlan
from mlx_dp.worker.scheduling.memory_room import MemoryRoom
from mlx_dp.worker.scheduling.prefill_planner import PrefillPlanner
from mlx_dp.worker.scheduling.request_prefixes import EndSaves, RequestPrefixes
from mlx_dp.worker.scheduling.running_request import RunningRequest
from mlx_dp.worker.scheduling.running_requests import RunningRequests
from mlx_dp.worker.scheduling.validation import RequestValidator, rejected


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a step: the events to send, then the slots to release, in order.

    Requests in ``spent_slots`` decode no more, so their KV and state can be saved now.
    """

    prefilled: tuple[Prefilled, ...]
    tokens: Tokens | None
    finished_slots: tuple[int, ...]
    spent_slots: tuple[int, ...]


class Scheduler:
    """The requests of one owner, in the order of their admission.

    A slot is released in the same order however its request ends: ``take_saves``, removal from the
    engine, then ``release``, which frees the slots and returns the event. So no end of a request is
    reported before its slot is free. Preemption follows the same order, and saves nothing.
    """

    def __init__(self, capacity: OwnerCapacity, engine: Engine, context_length: int) -> None:
        facts = engine.facts
        prefix_facts = PrefixFacts(
            shape=facts.shape,
            stateful=facts.stateful,
            trims_to=facts.trims_to,
            page_nbytes=facts.page_nbytes,
        )
        limits = AdmissionLimits(context_length=context_length, pool_tokens=capacity.pool_tokens)
        self._validator = RequestValidator(limits, engine)
        self._engine = engine
        self._pools = OwnerPools(capacity, prefix_facts, engine, prefix_cache=facts.prefix_cache)
        self._room = MemoryRoom(
            engine, self._pools.cache, capacity.cache_nbytes, buffer_limit=facts.buffer_limit
        )
        self._prefixes = RequestPrefixes(self._pools.cache, self._room, prefix_facts)
        self._planner = PrefillPlanner(self._prefixes, self._room)
        self.requests = RunningRequests()

    @property
    def draining(self) -> bool:
        return self._validator.draining

    @property
    def auxiliary_used(self) -> int:
        return self._pools.auxiliary_used

    @property
    def cached_tokens(self) -> int:
        return self._prefixes.num_tokens

    @property
    def cached_nbytes(self) -> int:
        return self._prefixes.nbytes

    def submit(self, submit: Submit) -> RunningRequest | Rejected:
        """Give a request its slot, or reject it; a rejected request holds nothing here."""
        refused = self._validator.refuse(submit, self.requests)
        if refused is not None:
            return refused
        held = len(submit.prompt_ids) + len(submit.output_ids)
        tokens = next_tokens(held, submit.max_tokens - len(submit.output_ids))
        nbytes = self._engine.row_nbytes(tokens)
        lease = self._pools.lease(submit.request_id)
        match lease:
            case Shortage.SLOTS:
                message = f"all {len(self.requests)} request slots are taken"
                return rejected(submit, RejectReason.NO_SLOT, message)
            case Shortage.STATES:
                message = f"all auxiliary slots are in use by {len(self.requests)} requests"
                return rejected(submit, RejectReason.NO_SLOT, message)
            case _:
                request = RunningRequest(submit, lease)
        # A request that is alone always runs: no other request could ever make room for it.
        if len(self.requests) and not self._room.try_make_room(nbytes):
            self._prefixes.drop_request(request)
            self._pools.release(lease)
            message = f"the next {tokens} KV tokens take {nbytes} bytes, which are not free"
            return rejected(submit, RejectReason.NO_TOKENS, message)
        self.requests.add(request)
        self._room.expect_row(submit.request_id, nbytes)
        return request

    def abort(self, abort: Abort) -> int | None:
        """End a request; return the slot to release, or None if there is none to end.

        An unknown request is no error: it may have finished while the abort was under way. An abort
        with an older epoch concerns an earlier grant. A newer epoch means that the grant here is
        stale, so the request ends.
        """
        request = self.requests.find(abort.request_id)
        if request is None or abort.epoch < request.submit.epoch:
            return None
        assert request.finish is None, f"request {abort.request_id} was not released"
        request.finish = FinishReason.ABORT
        return request.lease.slot

    def drain(self) -> None:
        """Reject new requests from now on."""
        self._validator.draining = True

    def flush(self, flush: Flush) -> Flushed:
        """Drop the cached prefixes."""
        freed = self._prefixes.flush()
        return Flushed(flush_id=flush.flush_id, num_tokens=freed.num_tokens, nbytes=freed.nbytes)

    def victim(self) -> int | None:
        """Make room for the next step; return the slot to preempt where nothing else helps.

        The youngest goes first, so that the oldest ends in any case; the last one stays.
        """
        if not len(self.requests) or self._room.try_make_room(0):
            return None
        if len(self.requests) == 1:
            self._room.evict_excess()
            return None
        return self.requests.youngest.lease.slot

    def preempt(self, slot: int) -> Preempted:
        """Free the slots of a request that the engine has removed; return the event."""
        request = self.requests.at(slot)
        if not request.saved:
            self._prefixes.drop_request(request)
        self._remove(request)
        return request.preempted

    def plan(self, budget: int) -> StepPlan:
        """Plan the next step's chunks, up to ``budget`` tokens."""
        assert budget >= 1, budget
        unfilled: list[RunningRequest] = []
        decoding = False
        for request in self.requests:
            if request.unfilled:
                unfilled.append(request)
            elif request.decodes:
                request.planned_tokens += 1
                decoding = True
        return StepPlan(prefill=self._planner.plan(unfilled, budget, decoding=decoding))

    def launched(self) -> None:
        """Record that the planned step was launched."""
        self._room.step_launched()

    def absorb(self, drawn: tuple[Drawn, ...]) -> Outcome:
        """Record a step's tokens; return the events and the requests that they finish."""
        prefilled: list[Prefilled] = []
        chunks: list[TokenChunk] = []
        finished: list[int] = []
        for token in drawn:
            request = self.requests.at(token.slot)
            if token.fault is not None:
                request.fail(token.fault)
                finished.append(token.slot)
                continue
            if request.has_no_token:
                prefilled.append(request.was_prefilled)
            chunks.append(
                TokenChunk(
                    request_id=request.request_id,
                    epoch=request.submit.epoch,
                    index=request.num_tokens,
                    ids=(token.token,),
                    logprobs=() if token.logprob is None else (token.logprob,),
                )
            )
            request.add_token(token.token)
            if request.finish is not None:
                finished.append(token.slot)
        return Outcome(
            prefilled=tuple(prefilled),
            tokens=Tokens(chunks=tuple(chunks)) if chunks else None,
            finished_slots=tuple(finished),
            spent_slots=tuple(
                request.lease.slot
                for request in self.requests
                if request.spent and request.finish is None
            ),
        )

    def take_saves(self, slot: int) -> EndSaves | None:
        """Return the saves of an ended request, once, before the engine removes it."""
        request = self.requests.at(slot)
        over = request.spent or request.finish is not None
        assert over, f"request {request.request_id} has not ended"
        if request.saved:
            return None
        request.saved = True
        return self._prefixes.insert_ended(request)

    def release(self, slot: int) -> Finished:
        """Free a finished request's slots; return the event of its end."""
        request = self.requests.at(slot)
        assert request.finish is not None, f"request {request.request_id} has not finished"
        assert request.saved, f"request {request.request_id}: take_saves() comes first"
        self._remove(request)
        return request.finished

    def _remove(self, request: RunningRequest) -> None:
        self.requests.remove(request)
        self._pools.release(request.lease)
        self._room.row_left(request.request_id)

    def idle(self) -> None:
        """Free unused memory while nothing runs."""
        assert not len(self.requests), f"{len(self.requests)} requests are still running"
        self._room.idle()

    def check(self) -> None:
        """Assert that all counts are consistent. For idle moments and the end of tests."""
        self._pools.check()
        self._room.check()
        self.requests.check()
