"""Replay: decides whether a request whose owner is lost continues elsewhere, or ends."""

from collections.abc import Iterable

from mlx_dp.orchestrator.api import CONTEXT_LENGTH_EXCEEDED, Ended
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.state.request_entry import RequestEntry
from mlx_dp.orchestrator.control.workers.actions import BLAMELESS, Loss
from mlx_dp.proto.capacity.request_limits import AdmissionLimits, answer_tokens, refusal
from mlx_dp.proto.messages.protocol import FinishReason

POISON_CRASHES = 2

# Replays are not capped to a share of the traffic, as the retries of a proxy have to be. Retries
# add load to what is overloaded; a replay is load that was there before. It waits in the one queue
# until an owner has room. A suspect request is prefilled at an owner that takes no other meanwhile,
# under the same budget of prompt tokens as all others, so replays cannot flood owners. How often
# one request may be lost is bounded below. Refusing one that could continue would only lose it.


def on_trial(grants: Iterable[Grant]) -> Grant | None:
    """The grant of the one request that crashed the owner of these grants, if that is known."""
    return next((grant for grant in grants if grant.accepted and grant.on_trial), None)


def after_loss(
    entry: RequestEntry, grant: Grant, loss: Loss, *, culprit: bool, max_attempts: int
) -> Ended | None:
    """Count the loss, and return how the request ends; None: it is queued again.

    ``culprit``: the owner crashed by its own fault, so that its requests are suspect.
    """
    ended = complete(entry)
    if ended is not None or loss.kind in BLAMELESS:
        return ended
    if not grant.accepted:
        entry.losses_before_accept += 1
        # A grant that never arrived is no attempt, so it has a bound of its own: a request that
        # crashes its owner before its acceptance is sent must not crash every worker.
        if entry.losses_before_accept >= max_attempts + POISON_CRASHES:
            return _worker_lost(entry.losses_before_accept, loss.detail)
        return None
    entry.crashes += culprit
    entry.losses_without_progress += not grant.made_progress
    # A request that yields some tokens before each crash makes progress, but costs a worker each
    # time: the sum of both bounds is less than the restarts in the budget of a worker.
    deaths = max_attempts + POISON_CRASHES if grant.made_progress else POISON_CRASHES
    if culprit and entry.crashes >= deaths:
        return Ended(
            reason=FinishReason.ERROR,
            message=f"{entry.crashes} workers were lost while they ran this request",
            code="request_crashed_worker",
            status=500,
        )
    if entry.losses_without_progress >= max_attempts:
        return _worker_lost(entry.losses_without_progress, loss.detail)
    return None


def complete(entry: RequestEntry) -> Ended | None:
    """How the answer ends if all of it was emitted, and only its ``Finished`` is missing."""
    if entry.emitted and entry.emitted[-1] in entry.generation.stop_token_ids:
        return Ended(reason=FinishReason.STOP)
    if len(entry.emitted) == entry.max_tokens:
        return Ended(reason=FinishReason.LENGTH)
    return None


def refit(entry: RequestEntry, limits: AdmissionLimits, *, strict: bool) -> Ended | None:
    """Cut the answer to what these limits leave; return how it ends when they leave nothing.

    ``strict``: a length that the client has set is never cut.
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
