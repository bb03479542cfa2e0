"""Validation: rejects requests that can never run here, before anything of them nears a model."""

from collections.abc import Iterator

from mlx_dp.proto.capacity.request_limits import AdmissionLimits, refusal
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages.protocol import Rejected, RejectReason, Submit
from mlx_dp.worker.contract.engine import Engine
from mlx_dp.worker.scheduling.running_request import engine_request
from mlx_dp.worker.scheduling.running_requests import RunningRequests


def rejected(submit: Submit, reason: RejectReason, message: str) -> Rejected:
    """Say that a request was not taken."""
    return Rejected(
        request_id=submit.request_id, epoch=submit.epoch, reason=reason, message=message
    )


class RequestValidator:
    """Checks requests against the model, the limits and those that run; rejects all in a drain."""

    def __init__(self, limits: AdmissionLimits, engine: Engine) -> None:
        self._limits = limits
        self._engine = engine
        self._vocab_size = engine.facts.shape.vocab_size
        self.draining = False

    def refuse(self, submit: Submit, running: RunningRequests) -> Rejected | None:
        """Say why a request can never run, or not while these are running."""
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
    """Say what is wrong with a request in itself, or None.

    The controller has checked the ids as well. MLX reads foreign memory past a table's end, so
    that neither side relies on the other.
    """
    for field, ids in _token_ids(submit):
        # The codec lets no negative id pass.
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
    """What indexes a table. Stop tokens do not: a model's own may lie beyond its logits."""
    yield "prompt_ids", submit.prompt_ids
    yield "output_ids", submit.output_ids
    yield "logit_bias", tuple(token for token, _ in submit.params.logit_bias)
