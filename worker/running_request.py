"""One request that holds a slot, as the scheduler knows it."""

from dataclasses import dataclass, field

from mlx_dp.kvcache.lease import Lease
from mlx_dp.proto.messages import Accepted, FinishReason, Submit
from mlx_dp.worker.engine import EngineRequest


@dataclass(slots=True)
class RunningRequest:
    """``num_tokens`` counts the whole answer; ``finish`` is set once nothing more may be drawn."""

    submit: Submit
    lease: Lease
    unfilled: int = field(init=False)
    """Tokens of prompt and ``output_ids`` that no step has been planned for yet."""
    num_tokens: int = field(init=False)
    planned_tokens: int = field(init=False)
    """``num_tokens`` and those that are under way."""
    finish: FinishReason | None = None

    def __post_init__(self) -> None:
        self.unfilled = len(self.submit.prompt_ids) + len(self.submit.output_ids)
        self.num_tokens = len(self.submit.output_ids)
        self.planned_tokens = self.num_tokens

    @property
    def decodes(self) -> bool:
        """The next step decodes it: its prompt is in, and its budget is not spent."""
        return not self.unfilled and self.planned_tokens < self.submit.max_tokens

    @property
    def has_no_token(self) -> bool:
        """No token since it was granted here."""
        return self.num_tokens == len(self.submit.output_ids)

    @property
    def accepted(self) -> Accepted:
        return Accepted(
            request_id=self.submit.request_id,
            epoch=self.submit.epoch,
            slot=self.lease.slot,
        )

    @property
    def engine_request(self) -> EngineRequest:
        return EngineRequest(
            prompt_ids=self.submit.prompt_ids,
            output_ids=self.submit.output_ids,
            max_tokens=self.submit.max_tokens,
            params=self.submit.params,
        )

    def plan(self, budget: int) -> int:
        """Plan its part in a step, and return the tokens of ``budget`` that it takes."""
        if self.decodes:
            self.planned_tokens += 1
            return 0
        num_tokens = min(self.unfilled, budget)
        self.unfilled -= num_tokens
        if num_tokens and not self.unfilled:
            self.planned_tokens += 1
        return num_tokens

    def take(self, token: int) -> None:
        """Count one token. A stop token is part of the answer and ends it."""
        assert self.finish is None, f"request {self.submit.request_id} ended: {self.finish}"
        assert not self.unfilled, f"request {self.submit.request_id} has {self.unfilled} to prefill"
        self.num_tokens += 1
        if token in self.submit.stop_token_ids:
            self.finish = FinishReason.STOP
        elif self.num_tokens == self.submit.max_tokens:
            self.finish = FinishReason.LENGTH
