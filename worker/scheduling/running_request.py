"""One request that holds a slot, in the scheduler."""

from dataclasses import dataclass, field

from mlx_dp.kvcache.prefix.lease import Lease
from mlx_dp.kvcache.prefix.prefix_cache import PrefillStart
from mlx_dp.proto.fields import clip_text
from mlx_dp.proto.messages.commands import Submit
from mlx_dp.proto.messages.events import Accepted, Finished, FinishReason, Preempted, Prefilled
from mlx_dp.worker.contract.engine import EngineRequest


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request that waits, begins, prefills its prompt, and decodes until ``finish`` is set."""

    submit: Submit
    lease: Lease
    prompt: tuple[int, ...] = field(init=False)
    """All tokens to prefill, including the part of the answer from an earlier owner."""
    answer: list[int] = field(init=False)
    """The answer so far, including the part from an earlier owner."""
    planned_tokens: int = field(init=False)
    """Tokens of the answer, including those under way."""
    filled: int = 0
    """Tokens of the prompt that are cached or planned."""
    cached_tokens: int | None = None
    """None: the request has not begun."""
    snapshot_points: tuple[int, ...] = ()
    """Token counts beyond ``filled`` at which its state will be kept."""
    tracked: dict[int, int] = field(default_factory=dict)
    """The auxiliary slots of the states kept so far, by token count."""
    leader: "RunningRequest | None" = None
    """The request whose prefill this one waits for."""
    finish: FinishReason | None = None
    error: str = ""
    """The error that ended it, if one did."""
    saved: bool = False
    """Whether the prefix cache has taken its KV and states."""

    def __post_init__(self) -> None:
        self.prompt = self.submit.prompt_ids + self.submit.output_ids
        self.answer = list(self.submit.output_ids)
        self.planned_tokens = len(self.answer)

    @property
    def request_id(self) -> int:
        return self.submit.request_id

    @property
    def unfilled(self) -> int:
        return len(self.prompt) - self.filled

    @property
    def begun(self) -> bool:
        return self.cached_tokens is not None

    @property
    def prefills(self) -> bool:
        return self.begun and self.unfilled > 0

    @property
    def decodes(self) -> bool:
        """Whether the next step decodes it: its prompt is complete, and tokens are left to draw."""
        return not self.unfilled and self.planned_tokens < self.submit.max_tokens

    @property
    def spent(self) -> bool:
        """Whether the last of its ``max_tokens`` is under way."""
        return not self.unfilled and self.planned_tokens == self.submit.max_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the answer so far, including the part from an earlier owner."""
        return len(self.answer)

    @property
    def has_no_token(self) -> bool:
        """Whether this owner has drawn no token of it yet."""
        return self.num_tokens == len(self.submit.output_ids)

    @property
    def fed_ids(self) -> tuple[int, ...]:
        """The tokens that launched steps have fed. No step feeds a token that is not known yet."""
        if self.unfilled:
            return self.prompt[: self.filled]
        fed = len(self.submit.prompt_ids) + self.planned_tokens - 1
        ids = self.submit.prompt_ids + tuple(self.answer)
        assert fed <= len(ids), f"request {self.request_id}: {fed} fed of {len(ids)} known"
        return ids[:fed]

    @property
    def accepted(self) -> Accepted:
        return Accepted(request_id=self.request_id, epoch=self.submit.epoch, slot=self.lease.slot)

    @property
    def was_prefilled(self) -> Prefilled:
        assert self.cached_tokens is not None, f"request {self.request_id} has not begun"
        return Prefilled(
            request_id=self.request_id,
            epoch=self.submit.epoch,
            cached_tokens=self.cached_tokens,
        )

    @property
    def preempted(self) -> Preempted:
        return Preempted(
            request_id=self.request_id, epoch=self.submit.epoch, num_tokens=self.num_tokens
        )

    @property
    def finished(self) -> Finished:
        assert self.finish is not None, f"request {self.request_id} has not finished"
        return Finished(
            request_id=self.request_id,
            epoch=self.submit.epoch,
            reason=self.finish,
            num_tokens=self.num_tokens,
            message=self.error,
        )

    @property
    def engine_request(self) -> EngineRequest:
        return engine_request(self.submit)

    def begin(self, beginning: PrefillStart) -> None:
        """Set the cached part of the prompt, which is not computed."""
        assert not self.begun, f"request {self.request_id} begins twice"
        self.cached_tokens = self.filled = beginning.num_tokens
        self.snapshot_points = beginning.snapshot_points
        self.leader = None

    def chunk_tokens(self, budget: int) -> int:
        """Return the tokens of its next chunk. It ends at the next snapshot point at latest."""
        end = self.filled + min(self.unfilled, budget)
        # The point at the prompt's end needs no stop: the prompt's last token is not run.
        points = (point for point in self.snapshot_points if point < len(self.prompt) - 1)
        return min(end, next(points, end)) - self.filled

    def fill(self, num_tokens: int) -> int | None:
        """Plan a chunk; return the snapshot point that it reaches, if any."""
        self.filled += num_tokens
        if not self.unfilled:
            self.planned_tokens += 1
        # The prompt's last token is not run.
        reached = min(self.filled, len(self.prompt) - 1)
        if reached not in self.snapshot_points:
            return None
        self.snapshot_points = tuple(p for p in self.snapshot_points if p != reached)
        return reached

    def fail(self, error: str) -> None:
        """End the request with an error."""
        assert self.finish is None, f"request {self.request_id} ended: {self.finish}"
        self.finish = FinishReason.ERROR
        self.error = clip_text(error)

    def add_token(self, token: int) -> None:
        """Count one token. A stop token is part of the answer and ends it."""
        assert self.finish is None, f"request {self.request_id} ended: {self.finish}"
        assert not self.unfilled, f"request {self.request_id} has {self.unfilled} to prefill"
        self.answer.append(token)
        if token in self.submit.stop_token_ids:
            self.finish = FinishReason.STOP
        elif self.num_tokens == self.submit.max_tokens:
            self.finish = FinishReason.LENGTH


def engine_request(submit: Submit) -> EngineRequest:
    """Convert a Submit to the engine's request."""
    return EngineRequest(
        prompt_ids=submit.prompt_ids,
        output_ids=submit.output_ids,
        max_tokens=submit.max_tokens,
        params=submit.params,
        grammar=submit.grammar,
        stop_token_ids=submit.stop_token_ids,
    )
