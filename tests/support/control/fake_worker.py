"""A worker as a controller sees it: a process, an end of the wire, and an engine that counts."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, assert_never

from mlx_dp.orchestrator.api import Generation
from mlx_dp.proto.capacity.model_shape import ModelShape
from mlx_dp.proto.capacity.ownership import OwnerCapacity
from mlx_dp.proto.capacity.request_limits import next_tokens
from mlx_dp.proto.errors import ProtocolError
from mlx_dp.proto.messages.commands import Abort, Down, Drain, Flush, Shutdown, Start, Submit
from mlx_dp.proto.messages.events import (
    Accepted,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Flushed,
    Hello,
    Preempted,
    Prefilled,
    Ready,
    Rejected,
    RejectReason,
    TokenChunk,
    TokenLogprob,
    Tokens,
    Up,
    WorkerPhase,
)
from mlx_dp.proto.messages.sampling_params import SamplingParams
from mlx_dp.proto.wire.codec import decode_up, encode
from tests.support.control.heartbeats import heartbeat

VOCAB = 97
SHAPE = ModelShape(
    num_layers=2,
    attention_layers=2,
    auxiliary_layers=0,
    kv_bytes_per_token=64,
    auxiliary_bytes_per_slot=0,
    vocab_size=VOCAB,
    context_length=1000,
    weights_nbytes=1,
)


def ready(
    *,
    slots: int = 2,
    pool: int | None = 1000,
    context: int = 1000,
    memory_tokens: int | None = None,
) -> Ready:
    """``memory_tokens``: the memory budget, in tokens of running requests."""
    return Ready(
        capacity=OwnerCapacity(
            request_slots=slots,
            auxiliary_slots=0,
            pool_tokens=pool,
            cache_nbytes=None if memory_tokens is None else SHAPE.request_nbytes(memory_tokens),
        ),
        shape=SHAPE,
        context_length=context,
        device="fake",
        load_s=0.0,
    )


def generation(
    prompt: tuple[int, ...] = (1, 2, 3),
    max_tokens: int | None = 4,
    *,
    seed: int = 0,
    rank: int | None = None,
    stop: tuple[int, ...] = (),
    salt: str = "",
) -> Generation:
    return Generation(
        prompt_ids=prompt,
        max_tokens=max_tokens,
        stop_token_ids=stop,
        params=SamplingParams(seed=seed),
        routed_dp_rank=rank,
        cache_salt=salt,
    )


def expected(generation: Generation, num_tokens: int) -> list[int]:
    """The next token of this request from any worker."""
    key = hash((generation.prompt_ids, generation.params.seed))
    return [(key + position * 7) % VOCAB for position in range(num_tokens)]


@dataclass
class Running:
    submit: Submit
    num_tokens: int
    prefilled: bool = False

    @property
    def held_tokens(self) -> int:
        return len(self.submit.prompt_ids) + self.num_tokens


def _next_tokens(submit: Submit) -> int:
    held = len(submit.prompt_ids) + len(submit.output_ids)
    return next_tokens(held, submit.max_tokens - len(submit.output_ids))


class Site(Protocol):
    """The surroundings of a worker."""

    auto_ready: bool
    """Whether a started worker becomes ready by itself."""
    deaf_to_abort: bool
    """Whether a process outlives SIGABRT."""
    arrived: deque[tuple[str, Up | ProtocolError]]
    """The wire to the controller."""
    started: list[int]

    def ready_of(self, index: int) -> Ready: ...


@dataclass
class FakeWorker:
    """One incarnation: a process, its end of the wire, and an engine that counts."""

    world: Site
    index: int
    identity: str
    on_exit: Callable[[int], None]
    pid: int
    commands: deque[Down] = field(default_factory=deque)
    running: dict[int, Running] = field(default_factory=dict)
    alive: bool = True
    stopped: bool = False
    serving: bool = False
    draining: bool = False
    step: int = 0
    start: Start | None = None
    signals: list[str] = field(default_factory=list)
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)
    """Salts and prompts whose KV is cached."""

    @property
    def halted(self) -> bool:
        return self.stopped and self.alive

    def abort(self) -> None:
        self.signals.append("abort")
        if not self.world.deaf_to_abort:
            self.die(-6)

    def kill(self) -> None:
        self.signals.append("kill")
        self.die(-9)

    def die(self, status: int) -> None:
        if self.alive:
            self.alive = False
            self.on_exit(status)

    def send_event(self, event: Up) -> None:
        if self.alive:
            self.world.arrived.append((self.identity, decode_up(encode(event))))

    def hello(self) -> None:
        self.send_event(Hello(pid=self.pid))

    def receive(self) -> None:
        """Read every message that was sent to it."""
        while self.commands and self.alive and not self.stopped:
            self._receive(self.commands.popleft())

    def _receive(self, message: Down) -> None:
        match message:
            case Start():
                self.start = message
                self.world.started.append(self.index)
                if self.world.auto_ready:
                    self.become_ready()
            case Submit():
                self._submit(message)
            case Abort():
                running = self.running.get(message.request_id)
                if running is not None and running.submit.epoch <= message.epoch:
                    self.finish(message.request_id, FinishReason.ABORT)
            case Flush():
                freed = sum(len(prompt) for _, prompt in self.cached)
                self.cached.clear()
                self.send_event(
                    Flushed(flush_id=message.flush_id, num_tokens=freed, nbytes=2 * freed)
                )
            case Drain():
                self.draining = True
            case Shutdown():
                self.die(0)
            case _:
                assert_never(message)

    def become_ready(self) -> None:
        self.serving = True
        self.send_event(self.world.ready_of(self.index))

    def _submit(self, submit: Submit) -> None:
        capacity = self.world.ready_of(self.index).capacity
        assert submit.request_id not in self.running
        refused = None
        if self.draining:
            refused = RejectReason.DRAINING
        elif len(self.running) >= capacity.request_slots:
            refused = RejectReason.NO_SLOT
        elif self.running and not self._fits(_next_tokens(submit)):
            refused = RejectReason.NO_TOKENS
        if refused is not None:
            self.send_event(
                Rejected(
                    request_id=submit.request_id,
                    epoch=submit.epoch,
                    reason=refused,
                    message="full",
                )
            )
            return
        self.running[submit.request_id] = Running(submit, len(submit.output_ids))
        self.send_event(Accepted(request_id=submit.request_id, epoch=submit.epoch, slot=0))

    def run_once(self) -> None:
        """Run the worker's loop once: receive, then a token for every request."""
        if not self.alive or self.stopped:
            return
        self.receive()
        if not self.alive or not self.running:
            return
        self.step += 1
        self._make_room()
        self._prefill()
        chunks = []
        for running in self.running.values():
            submit = running.submit
            whole = expected(
                generation(submit.prompt_ids, seed=submit.params.seed), running.num_tokens + 1
            )
            chunks.append(
                TokenChunk(
                    request_id=submit.request_id,
                    epoch=submit.epoch,
                    index=running.num_tokens,
                    ids=(whole[-1],),
                    logprobs=self._logprobs(running),
                )
            )
            running.num_tokens += 1
        self.send_event(Tokens(chunks=tuple(chunks)))
        for chunk in chunks:
            running = self.running[chunk.request_id]
            if chunk.ids[0] in running.submit.stop_token_ids:
                self.finish(chunk.request_id, FinishReason.STOP)
            elif running.num_tokens == running.submit.max_tokens:
                self.finish(chunk.request_id, FinishReason.LENGTH)

    @staticmethod
    def _logprobs(running: Running) -> tuple[TokenLogprob, ...]:
        """Other log-probabilities at each position, when the request asks for them."""
        if running.submit.params.logprobs is None:
            return ()
        return (TokenLogprob(logprob=-float(running.num_tokens)),)

    def _make_room(self) -> None:
        """Preempt the youngest request until the next step fits, as a worker does, but not all."""
        while len(self.running) > 1 and not self._fits(len(self.running)):
            self.preempt(next(reversed(self.running)))

    def _fits(self, num_tokens: int) -> bool:
        budget = self.world.ready_of(self.index).capacity.cache_nbytes
        return budget is None or SHAPE.request_nbytes(self.held_tokens + num_tokens) <= budget

    @property
    def held_tokens(self) -> int:
        return sum(running.held_tokens for running in self.running.values())

    def preempt(self, request_id: int) -> None:
        running = self.running.pop(request_id)
        self.send_event(
            Preempted(
                request_id=request_id,
                epoch=running.submit.epoch,
                num_tokens=running.num_tokens,
            )
        )

    def _prefill(self) -> None:
        for request_id, running in self.running.items():
            if running.prefilled:
                continue
            running.prefilled = True
            submit = running.submit
            key = (submit.cache_salt, submit.prompt_ids)
            cached = len(submit.prompt_ids) - 1 if key in self.cached else 0
            self.cached.add(key)
            self.send_event(
                Prefilled(request_id=request_id, epoch=submit.epoch, cached_tokens=cached)
            )

    def finish(self, request_id: int, reason: FinishReason) -> None:
        running = self.running.pop(request_id)
        self.send_event(
            Finished(
                request_id=request_id,
                epoch=running.submit.epoch,
                reason=reason,
                num_tokens=running.num_tokens,
            )
        )

    def lose_peer(self, rank: int | None) -> None:
        self.send_event(Failed(kind=FailureKind.PEER_LOST, message="no answer", lost_rank=rank))

    def send_heartbeat(self, **changes: Any) -> None:
        if self.stopped:
            return
        sent = heartbeat(
            phase=WorkerPhase.SERVING if self.serving else WorkerPhase.LOADING,
            step=self.step,
            running=len(self.running),
            rss_nbytes=1,
            device_nbytes=2,
        )
        self.send_event(replace(sent, **changes))

    def fail(self, kind: FailureKind, message: str = "no good", status: int = 3) -> None:
        self.send_event(Failed(kind=kind, message=message))
        self.die(status)
