"""A device with plausible step times of every kind, and a wire to the hang check."""

import random
from dataclasses import dataclass, field
from typing import Any

from mlx_dp.orchestrator.control.state.heartbeats import Heartbeats
from mlx_dp.orchestrator.control.workers.liveness import (
    LivenessLimits,
    LivenessVerdict,
    judge,
    step_allowance_s,
)
from mlx_dp.proto.messages.commands import FakeEngineOptions
from mlx_dp.proto.messages.events import Heartbeat, Tokens, Up
from mlx_dp.worker.contract.engine import Drawn, StepPlan
from mlx_dp.worker.fake.engine import FakeEngine
from tests.support.worker.fake_channel import FakeChannel, VirtualTime

LIMITS = LivenessLimits()
SLOWDOWN = 5.0
FIRST_USE_S = 4.0
"""The largest cost of a kernel's first use. There is one for each power of two of tokens."""


class JudgedChannel(FakeChannel):
    """The controller's side: heartbeats, checked when their silence is longest."""

    def __init__(self, time: VirtualTime) -> None:
        super().__init__(time)
        self.heartbeats = Heartbeats(heard_at=0.0, progressed_at=0.0)
        self.verdicts: set[LivenessVerdict] = set()

    def verdict(self, now: float) -> LivenessVerdict:
        return judge(self.heartbeats, LIMITS, step_s=self.allowance_s, now=now)

    @property
    def allowance_s(self) -> float:
        heartbeats = self.heartbeats
        return step_allowance_s(
            LIMITS, step_tokens=heartbeats.step_tokens, prefill_token_s=heartbeats.prefill_token_s
        )

    @property
    def lost_after_s(self) -> float:
        """The time for which the worker may be silent after this last message."""
        heard_at = self.heartbeats.heard_at
        return heard_at + LIMITS.hang_timeout_s + self.allowance_s - self._time.now

    def send(self, message: Up) -> None:
        now = self._time.now
        self.verdicts.add(self.verdict(now))
        match message:
            case Heartbeat():
                self.heartbeats.note_heartbeat(message, now)
            case Tokens():
                self.heartbeats.note_tokens(now)
            case _:
                self.heartbeats.note_message(now)
        super().send(message)


@dataclass(slots=True)
class StepDevice:
    """The time of a step: that of its rows and prompt tokens, with all disturbances."""

    rng: random.Random
    token_s: float
    decode_s: float
    slowdown: float = 1.0
    first_use_s: float = FIRST_USE_S
    used: set[int] = field(default_factory=set)
    longest_s: float = 0.0

    @classmethod
    def drawn(cls, rng: random.Random) -> "StepDevice":
        """A prompt token takes 0.1 to 30 ms, and a decode alone 5 to 300 ms."""
        return cls(rng, token_s=1e-4 * 300 ** rng.random(), decode_s=0.005 * 60 ** rng.random())

    def step_s(self, prefilled: int, *, decoded: bool) -> float:
        seconds = prefilled * self.token_s + self.decode_s * decoded
        # Other replicas come and go, and the clock of a hot device varies.
        seconds *= self.slowdown * self.rng.uniform(0.8, 1.2)
        if (bucket := prefilled.bit_length()) not in self.used:
            self.used.add(bucket)
            seconds += self.rng.uniform(0.0, self.first_use_s)
        self.longest_s = max(self.longest_s, seconds)
        return seconds

    def change(self) -> None:
        """Sudden: nothing announces it."""
        self.slowdown = self.rng.choice((1.0, self.rng.uniform(1.0, SLOWDOWN), SLOWDOWN))


class HonestEngine(FakeEngine):
    """The fake engine with the times of a ``StepDevice``. ``blocks``: see ``launch_blocks``."""

    def __init__(self, device: StepDevice, *arguments: Any, blocks: bool, **named: Any) -> None:
        self.device = device
        self._blocks = blocks
        super().__init__(*arguments, **named)

    @property
    def launch_blocks(self) -> bool:
        return self._blocks

    def step(self, plan: StepPlan) -> tuple[Drawn, ...]:
        drawn = super().step(plan)
        if self._blocks and self._launched is not None:
            self._sleep(max(0.0, self._launched.done_at - self._clock()))
        return drawn

    def _duration_s(self, prefilled: int, *, decoded: bool) -> float:
        return self.device.step_s(prefilled, decoded=decoded)


def options() -> FakeEngineOptions:
    return FakeEngineOptions(context_length=40_000, pool_tokens=100_000)
