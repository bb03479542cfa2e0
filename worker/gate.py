"""What an owner refuses on arrival, however empty it is."""

from mlx_dp.proto.admission import AdmissionLimits, refusal
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages import Rejected, RejectReason, Submit
from mlx_dp.worker.engine import Engine
from mlx_dp.worker.running_request import engine_request
from mlx_dp.worker.running_requests import RunningRequests
from mlx_dp.worker.submit_check import fault


def rejected(submit: Submit, reason: RejectReason, message: str) -> Rejected:
    """Say that a request was not taken."""
    return Rejected(
        request_id=submit.request_id, epoch=submit.epoch, reason=reason, message=message
    )


class Gate:
    """Lets through what can run here, until the owner drains."""

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
        if (wrong := fault(submit, self._vocab_size)) is not None:
            return rejected(submit, RejectReason.INVALID, wrong)
        if (wrong := self._engine.fault(engine_request(submit))) is not None:
            return rejected(submit, RejectReason.INVALID, clip_text(wrong))
        too_long = refusal(self._limits, len(submit.prompt_ids), submit.max_tokens)
        if too_long is not None:
            return rejected(submit, RejectReason.TOO_LONG, too_long)
        return None
