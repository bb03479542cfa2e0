"""Tells the controller how a worker's loop fares, in the middle of a step as well."""

from collections.abc import Callable
from typing import Final

from mlx_dp.worker.engine import Engine
from mlx_dp.worker.held_verbs import HeldVerbs
from mlx_dp.worker.prefill_pace import PrefillPace
from mlx_dp.worker.pulse import Moment, Pulse
from mlx_dp.worker.scheduler import Scheduler
from mlx_dp.worker.step_timer import StepTime


class Beats:
    """Sends the loop's heartbeats. In a group it is also what passes tell of themselves.

    ``step`` counts the loop's steps. A step lasts as long as the passes that it is part of, so
    the tokens of the peers in them count like one's own.
    """

    def __init__(
        self,
        channel: HeldVerbs,
        engine: Engine,
        scheduler: Scheduler,
        pulse: Pulse,
        clock: Callable[[], float],
    ) -> None:
        self._channel: Final = channel
        self._engine: Final = engine
        self._scheduler: Final = scheduler
        self._pulse: Final = pulse
        self._clock: Final = clock
        self._pace: Final = PrefillPace()
        self._own_tokens = 0
        self._peer_tokens = 0
        self._peer_tokens_before = 0
        self.step = 0

    @property
    def due_in(self) -> float:
        """Seconds to the next heartbeat; 0 when it is due."""
        return self._pulse.due_in(self._clock())

    def begin(self, own_tokens: int) -> None:
        """A step begins with so many prompt tokens under way, those of the step before included."""
        self._own_tokens = own_tokens
        self._peer_tokens_before, self._peer_tokens = self._peer_tokens, 0
        self._tell()

    def launched(self, own_tokens: int) -> None:
        """The step is launched, and so many prompt tokens may still be under way.

        The step before it is done, whose tokens the controller must not allow time for any more.
        """
        self._own_tokens = own_tokens
        self.step += 1
        self._tell()

    def took(self, step: StepTime) -> None:
        """A step was measured: its prompt tokens tell how long the next ones may take."""
        # A step that blocks is measured itself, any other while the next one is under way.
        blocks = self._engine.launch_blocks
        peer_tokens = self._peer_tokens if blocks else self._peer_tokens_before
        self._pace.observe(step.duration_s, step.prefilled + peer_tokens)

    def rest(self) -> None:
        """Nothing of one's own is under way."""
        self._own_tokens = 0
        self._peer_tokens_before, self._peer_tokens = self._peer_tokens, 0

    def if_due(self) -> bool:
        """Send a heartbeat if it is time."""
        if self.due_in > 0.0:
            return False
        self._beat()
        return True

    def awaiting(self, rank: int) -> None:
        """A pass waits for this rank, and the controller may be the one to know why."""
        if self.due_in <= 0.0:
            self._beat(awaits_rank=rank)
        self._channel.listen()

    def agreed(self, peer_tokens: int) -> None:
        """A pass begins, in which the peers run so many tokens."""
        self._peer_tokens += peer_tokens
        self._tell()

    @property
    def _step_tokens(self) -> int:
        return self._own_tokens + self._peer_tokens + self._peer_tokens_before

    def _tell(self) -> None:
        # The controller has to hear of a step before it: no beat leaves while the device computes.
        if not self._pulse.tells(self._step_tokens):
            self._beat()

    def _beat(self, awaits_rank: int | None = None) -> None:
        moment = Moment(
            step=self.step,
            step_tokens=self._step_tokens,
            malformed_frames=self._channel.malformed_frames,
            awaits_rank=awaits_rank,
            prefill_token_s=self._pace.token_s,
        )
        self._channel.send(
            self._pulse.beat(self._clock(), moment, scheduler=self._scheduler, engine=self._engine)
        )
