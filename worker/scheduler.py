"""Who runs in this owner, and what the next step does. No sockets, no arrays, no clock."""

from dataclasses import dataclass

from mlx_dp.kvcache.lease import OwnerPools, Shortage
from mlx_dp.proto.admission import AdmissionLimits, refusal, reserved_tokens
from mlx_dp.proto.messages import (
    Abort,
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    Submit,
    TokenChunk,
    Tokens,
)
from mlx_dp.proto.model_shape import ModelShape
from mlx_dp.proto.ownership import OwnerCapacity
from mlx_dp.worker.engine import Drawn, PrefillChunk, StepPlan
from mlx_dp.worker.running_request import RunningRequest
from mlx_dp.worker.submit_check import fault


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step yielded: the frame to send, and the slots to release after that, in order."""

    tokens: Tokens | None
    finished_slots: tuple[int, ...]


class Scheduler:
    """The requests of one owner, in the order of their admission.

    A slot is given back in one order, whoever ends the request: the engine removes it, then
    ``release`` frees the pools' share and returns the report. So no report of an end can be sent
    before the slot that it promises is free.
    """

    def __init__(self, capacity: OwnerCapacity, shape: ModelShape, context_length: int) -> None:
        self._limits = AdmissionLimits(
            context_length=context_length, pool_tokens=capacity.pool_tokens
        )
        self._vocab_size = shape.vocab_size
        self._pools = OwnerPools(capacity, hybrid=shape.hybrid)
        self._by_slot: dict[int, RunningRequest] = {}
        self._by_id: dict[int, RunningRequest] = {}
        self._draining = False

    @property
    def draining(self) -> bool:
        return self._draining

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return len(self._by_slot)

    @property
    def prefilling(self) -> int:
        """Those of them that have no token yet."""
        return sum(request.has_no_token for request in self._by_slot.values())

    @property
    def waiting(self) -> int:
        """Those of them that have tokens to prefill."""
        return sum(request.unfilled > 0 for request in self._by_slot.values())

    @property
    def decoding(self) -> int:
        """Those of them that the next step decodes."""
        return sum(request.decodes for request in self._by_slot.values())

    @property
    def reserved_tokens(self) -> int:
        return self._pools.reserved_tokens

    @property
    def auxiliary_used(self) -> int:
        return self._pools.auxiliary_used

    def submit(self, submit: Submit) -> RunningRequest | Rejected:
        """Give a request its slot, or say why not; then it holds nothing here."""
        refused = self._refusal(submit)
        if refused is not None:
            return refused
        tokens = reserved_tokens(len(submit.prompt_ids), submit.max_tokens)
        lease = self._pools.lease(submit.request_id, tokens)
        match lease:
            case Shortage.SLOTS:
                return _rejected(
                    submit, RejectReason.NO_SLOT, f"all {self.running} request slots are taken"
                )
            case Shortage.TOKENS:
                return _rejected(
                    submit,
                    RejectReason.NO_TOKENS,
                    f"{tokens} KV tokens are needed and {self._pools.free_tokens} are free",
                )
            case _:
                request = RunningRequest(submit, lease)
        self._by_slot[lease.slot] = request
        self._by_id[submit.request_id] = request
        return request

    def _refusal(self, submit: Submit) -> Rejected | None:
        if self._draining:
            return _rejected(submit, RejectReason.DRAINING, "this worker is draining")
        if (running := self._by_id.get(submit.request_id)) is not None:
            return _rejected(
                submit,
                RejectReason.INVALID,
                f"request {submit.request_id} runs here already, with epoch {running.submit.epoch}",
            )
        if (wrong := fault(submit, self._vocab_size)) is not None:
            return _rejected(submit, RejectReason.INVALID, wrong)
        too_long = refusal(self._limits, len(submit.prompt_ids), submit.max_tokens)
        if too_long is not None:
            return _rejected(submit, RejectReason.TOO_LONG, too_long)
        return None

    def abort(self, abort: Abort) -> int | None:
        """End a request, and return the slot to release, or None when there is none to end.

        Unknown requests are no error, as they may have finished while the verb was under way. A
        verb of an older epoch means an earlier grant; one of a newer epoch means that the grant
        here is stale, and ends it.
        """
        request = self._by_id.get(abort.request_id)
        if request is None or abort.epoch < request.submit.epoch:
            return None
        assert request.finish is None, f"request {abort.request_id} was not released"
        request.finish = FinishReason.ABORT
        return request.lease.slot

    def drain(self) -> None:
        """Accept nothing more."""
        self._draining = True

    def plan(self, budget: int) -> StepPlan:
        """Plan the next step's chunks, first come first served, up to ``budget`` tokens."""
        assert budget >= 1, budget
        chunks: list[PrefillChunk] = []
        for slot, request in self._by_slot.items():
            if num_tokens := request.plan(budget):
                chunks.append(PrefillChunk(slot=slot, num_tokens=num_tokens))
                budget -= num_tokens
        return StepPlan(prefill=tuple(chunks))

    def absorb(self, drawn: tuple[Drawn, ...]) -> Outcome:
        """Count a step's tokens, and find the requests that they finish."""
        chunks: list[TokenChunk] = []
        finished: list[int] = []
        for token in drawn:
            request = self._by_slot[token.slot]
            chunks.append(
                TokenChunk(
                    request_id=request.submit.request_id,
                    epoch=request.submit.epoch,
                    index=request.num_tokens,
                    ids=(token.token,),
                    logprobs=() if token.logprob is None else (token.logprob,),
                )
            )
            request.take(token.token)
            if request.finish is not None:
                finished.append(token.slot)
        return Outcome(
            tokens=Tokens(chunks=tuple(chunks)) if chunks else None,
            finished_slots=tuple(finished),
        )

    def release(self, slot: int) -> Finished:
        """Free what a finished request held, and return the report of its end."""
        request = self._by_slot.pop(slot)
        assert request.finish is not None, f"request {request.submit.request_id} has not finished"
        del self._by_id[request.submit.request_id]
        self._pools.release(request.lease)
        return Finished(
            request_id=request.submit.request_id,
            epoch=request.submit.epoch,
            reason=request.finish,
            num_tokens=request.num_tokens,
        )

    def check(self) -> None:
        """Verify the books; for idle moments and the ends of tests."""
        self._pools.check()
        assert self._by_id.keys() == {
            request.submit.request_id for request in self._by_slot.values()
        }
        if not self._by_slot:
            assert self.reserved_tokens == 0, self.reserved_tokens
            assert self.auxiliary_used == 0, self.auxiliary_used


def _rejected(submit: Submit, reason: RejectReason, message: str) -> Rejected:
    return Rejected(
        request_id=submit.request_id, epoch=submit.epoch, reason=reason, message=message
    )
