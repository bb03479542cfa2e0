"""Replay: decides whether a request whose owner is lost continues elsewhere, or ends."""

from collections.abc import Iterable

from mlx_dp.orchestrator.api import CONTEXT_LENGTH_EXCEEDED, Ended
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.workers.actions import BLAMELESS, Loss
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, answer_tokens, refusal
from mlx_dp.proto.messages.events import FinishReason

POISON_CRASHES = 2

# Replays are not capped to a share of the traffic, unlike the retries of a proxy. Retries add load
# to an overloaded service; a replay is load that was there before. It waits in the one queue until
# an owner has room. A suspect request is prefilled at an owner that takes no other meanwhile, under
# the same budget of prompt tokens as all others, so replays cannot flood owners. The number of
# losses of one request is bounded below. Refusing a replay would only fail a request that could
# continue.


def find_sole_suspect(grants: Iterable[Grant]) -> Grant | None:
    """Return the grant of the one request that can have crashed its owner, if that is certain."""
    return next((grant for grant in grants if grant.accepted and grant.is_sole_suspect), None)


def count_loss(
    entry: RequestEntry, grant: Grant, loss: Loss, *, culprit: bool, max_attempts: int
) -> Ended | None:
    """Count the loss, and return how the request ends; None: requeue it.

    ``culprit``: the owner crashed by its own fault, so its requests are suspect.
    """
    ended = completion_of(entry)
    if ended is not None or loss.kind in BLAMELESS:
        return ended
    if not grant.accepted:
        entry.losses_before_accept += 1
        # A loss before acceptance is not an attempt: the grant may never have arrived. It still has
        # a bound, since a request that crashes its owner so early must not crash every worker.
        if entry.losses_before_accept >= max_attempts + POISON_CRASHES:
            return _worker_lost(entry.losses_before_accept, loss.detail)
        return None
    entry.crashes += culprit
    entry.losses_without_progress += not grant.made_progress
    # A request that yields some tokens before each crash makes progress, but costs a worker each
    # time: the sum of both bounds is less than the restarts in the budget of a worker.
    max_crashes = max_attempts + POISON_CRASHES if grant.made_progress else POISON_CRASHES
    if culprit and entry.crashes >= max_crashes:
        return Ended(
            reason=FinishReason.ERROR,
            message=f"{entry.crashes} workers were lost while they ran this request",
            code="request_crashed_worker",
            status=500,
        )
    if entry.losses_without_progress >= max_attempts:
        return _worker_lost(entry.losses_without_progress, loss.detail)
    return None


def completion_of(entry: RequestEntry) -> Ended | None:
    """Return how the request ends if all its tokens have arrived; only ``Finished`` is missing."""
    if entry.emitted and entry.emitted[-1] in entry.generation.stop_token_ids:
        return Ended(reason=FinishReason.STOP)
    if len(entry.emitted) == entry.max_tokens:
        return Ended(reason=FinishReason.LENGTH)
    return None


def refit_answer(entry: RequestEntry, limits: AdmissionLimits, *, strict: bool) -> Ended | None:
    """Clamp ``max_tokens`` to these limits; return how the request ends if no token is left.

    ``strict``: a length that the client has set is never clamped.
    """
    prompt_tokens, asked = len(entry.generation.prompt_ids), entry.generation.max_tokens
    left = answer_tokens(limits, prompt_tokens, asked)
    needed = asked if strict and asked is not None else left
    reason = refusal(limits, prompt_tokens, needed)
    if reason is not None:
        return Ended(
            reason=FinishReason.ERROR, message=reason, code=CONTEXT_LENGTH_EXCEEDED, status=400
        )
    if len(entry.emitted) >= left:
        return Ended(reason=FinishReason.LENGTH)
    entry.max_tokens = left if entry.emitted else None
    return None


def _worker_lost(losses: int, detail: str) -> Ended:
    return Ended(
        reason=FinishReason.ERROR,
        message=f"gave up after {losses} worker losses ({detail})",
        code="worker_lost",
        status=502,
    )
