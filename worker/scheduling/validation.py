"""Validation: rejects requests that can never run here, before they reach the model."""

from collections.abc import Iterator

from mlx_dp.proto.capacity.request_limits import AdmissionLimits, refusal
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.events import Rejected, RejectReason
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.scheduling.running_request import engine_request
from mlx_dp.worker.scheduling.running_requests import RunningRequests


def rejected(submit: Submit, reason: RejectReason, message: str) -> Rejected:
    """Return the event that rejects a request."""
    return Rejected(
        request_id=submit.request_id, epoch=submit.epoch, reason=reason, message=message
    )


class RequestValidator:
    """Checks requests against the model, the limits and the running requests; rejects all in a
    drain.
    """

    def __init__(self, limits: AdmissionLimits, engine: Engine) -> None:
        self._limits = limits
        self._engine = engine
        self._vocab_size = engine.facts.shape.vocab_size
        self.draining = False

    def refuse(self, submit: Submit, running: RunningRequests) -> Rejected | None:
        """Return the rejection of a request that cannot run; None: it can."""
        if self.draining:
            return rejected(submit, RejectReason.DRAINING, "this worker is draining")
        if (same := running.find(submit.request_id)) is not None:
            return rejected(
                submit,
                RejectReason.INVALID,
                f"request {submit.request_id} runs here already, with epoch {same.submit.epoch}",
            )
        if (wrong := _fault(submit, self._vocab_size)) is not None:
            return rejected(submit, RejectReason.INVALID, wrong)
        if (wrong := self._engine.fault(engine_request(submit))) is not None:
            return rejected(submit, RejectReason.INVALID, clip_text(wrong))
        too_long = refusal(self._limits, len(submit.prompt_ids), submit.max_tokens)
        if too_long is not None:
            return rejected(submit, RejectReason.TOO_LONG, too_long)
        return None


def _fault(submit: Submit, vocab_size: int) -> str | None:
    """Return what is wrong with the request itself, or None.

    The controller checks the ids as well. MLX reads foreign memory past a table's end, so neither
    side relies on the other.
    """
    for field, ids in _token_ids(submit):
        # The codec rejects negative ids.
        if ids and (worst := max(ids)) >= vocab_size:
            return f"{field}: token id {worst} is outside of the vocabulary of {vocab_size}"
    if len(submit.output_ids) >= submit.max_tokens:
        return (
            f"max_tokens is {submit.max_tokens}, and {len(submit.output_ids)} output_ids leave "
            "nothing to generate"
        )
    if submit.output_ids and submit.output_ids[-1] in submit.stop_token_ids:
        return f"output_ids end with the stop token {submit.output_ids[-1]}: the answer is complete"
    return None


def _token_ids(submit: Submit) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ids that index a table. Stop tokens do not: some lie beyond the logits."""
    yield "prompt_ids", submit.prompt_ids
    yield "output_ids", submit.output_ids
    yield "logit_bias", tuple(token for token, _ in submit.params.logit_bias)
