"""What becomes of a request whose owner is lost: it is continued elsewhere, or it ends."""

from collections.abc import Iterable

from mlx_dp.orchestrator.control.actions import BLAMELESS, Loss
from mlx_dp.orchestrator.control.grant import Grant
from mlx_dp.orchestrator.control.request_entry import RequestEntry
from mlx_dp.orchestrator.service import CONTEXT_LENGTH_EXCEEDED, Ended
from mlx_dp.proto.admission import AdmissionLimits, answer_tokens, refusal
from mlx_dp.proto.messages import FinishReason

POISON_DEATHS = 2

# No share of the traffic caps replays, as a proxy has to cap its retries: those add load to what
# is overloaded, and here the load is the same that was there before. A replay waits in the one
# queue until an owner has room; what a death has made suspect is prefilled by one owner at a time
# each, under the same budget of prompt tokens as all else, so that there is no flood; and how often
# one request may be lost is bounded below. Refusing what could go on would only lose it.


def on_trial(grants: Iterable[Grant]) -> Grant | None:
    """The one request whose doing the death of the owner of these grants was, if that is known."""
    return next((grant for grant in grants if grant.accepted and grant.on_trial), None)


def after_loss(
    entry: RequestEntry, grant: Grant, loss: Loss, *, culprit: bool, max_attempts: int
) -> Ended | None:
    """Count the loss, and return how the request ends; None: it goes back to the queue.

    ``culprit``: the owner died by its own fault, so that its requests are under suspicion.
    """
    ended = complete(entry)
    if ended is not None or loss.kind in BLAMELESS:
        return ended
    if not grant.accepted:
        entry.losses_before_accept += 1
        # A grant that never arrived is no attempt, so that it has a bound of its own: a request
        # that kills its owner before that is told must not take every worker with it.
        if entry.losses_before_accept >= max_attempts + POISON_DEATHS:
            return _worker_lost(entry.losses_before_accept, loss.detail)
        return None
    entry.crashes += culprit
    entry.losses_without_progress += not grant.made_progress
    # Whoever yields some tokens before each death makes progress, and costs a worker every time:
    # the sum of both bounds is less than what the budget of restarts lets a worker die.
    deaths = max_attempts + POISON_DEATHS if grant.made_progress else POISON_DEATHS
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
    """How the answer ends if all of it was emitted, and only the report of its end is missing."""
    if entry.emitted and entry.emitted[-1] in entry.generation.stop_token_ids:
        return Ended(reason=FinishReason.STOP)
    if len(entry.emitted) == entry.max_tokens:
        return Ended(reason=FinishReason.LENGTH)
    return None


def refit(entry: RequestEntry, limits: AdmissionLimits, *, strict: bool) -> Ended | None:
    """Cut an answer to what these limits leave of it; or return how it ends, when that is nothing.

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
        message=f"{losses} workers were lost one after another, which is enough ({detail})",
        code="worker_lost",
        status=502,
    )
