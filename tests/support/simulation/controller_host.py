"""The controller's process: the real core, which acts while it is awake."""

import random
from functools import partial
from typing import Final

from mlx_dp.orchestrator.control.core import ControlCore
from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.state.grant import Grant
from mlx_dp.orchestrator.control.workers.actions import RemoveOwner
from mlx_dp.orchestrator.control.workers.fleet import ControlPorts
from mlx_dp.orchestrator.control.workers.kill_ladder import KillLimits
from mlx_dp.orchestrator.control.workers.liveness import LivenessLimits
from mlx_dp.orchestrator.control.workers.start_queue import StartLimits
from mlx_dp.orchestrator.control.workers.supervisor import SupervisorLimits
from mlx_dp.orchestrator.options import HttpOptions, QueueOptions, ServeOptions, WorkerOptions
from mlx_dp.orchestrator.restart_budget import RestartLimits
from mlx_dp.proto.capacity.ownership import Limits, divide
from mlx_dp.proto.capacity.parallel import resolve_topology
from mlx_dp.proto.messages.commands import EngineKind, FakeEngineOptions
from tests.support.simulation.agenda import Act, Agenda
from tests.support.simulation.grants import GrantWatch
from tests.support.simulation.schedule import CONTEXT_LENGTH, VOCAB_SIZE, Setting

CHUNK_TOKENS: Final = 64
LIVENESS: Final = LivenessLimits(
    hang_timeout_s=3.0,
    slowest_prefill_tokens_per_s=100.0,
    accept_timeout_s=2.0,
    release_timeout_s=3.0,
)
WINDOW_S: Final = 3.0
REQUEST_TIMEOUT_S: Final = 120.0


def limits_of(setting: Setting) -> ControlLimits:
    """Short times, so that a run is short as well."""
    return ControlLimits(
        max_attempts=setting.max_attempts,
        restart_drain_s=1.0,
        liveness=LIVENESS,
        supervisor=SupervisorLimits(
            start=StartLimits(hello_timeout_s=1.0, form_timeout_s=2.0, start_timeout_s=2.0),
            kill=KillLimits(abort_grace_s=0.5, exit_grace_s=0.5, dismiss_grace_s=0.5),
            restart=RestartLimits(
                max_restarts=setting.max_restarts,
                window_s=WINDOW_S,
                first_delay_s=0.05,
                longest_delay_s=0.4,
                healthy_s=1.0,
            ),
        ),
    )


def options_of(setting: Setting) -> ServeOptions:
    topology = resolve_topology(
        dp_size=setting.size,
        tp_size=None,
        enable_dp_attention=setting.group,
    )
    owners = topology.attn_dp_size
    return ServeOptions(
        http=HttpOptions(served_model_name="fake"),
        queue=QueueOptions(
            max_queued_requests=setting.max_queued,
            queue_timeout_s=REQUEST_TIMEOUT_S,
            request_timeout_s=REQUEST_TIMEOUT_S,
            load_balance_method=setting.method,
        ),
        worker=WorkerOptions(
            engine=EngineKind.FAKE,
            chunked_prefill_size=CHUNK_TOKENS,
            prefix_cache=setting.prefix_cache,
            fake=FakeEngineOptions(
                vocab_size=VOCAB_SIZE,
                context_length=CONTEXT_LENGTH,
                pool_tokens=setting.pool,
                hybrid=setting.hybrid,
            ),
        ),
        ownership=divide(topology, Limits(max_running_requests=setting.slots * owners)),
    )


class WatchedCore(ControlCore):
    """Reports losses to the watch, before their consequences."""

    watch: GrantWatch

    def owner_lost(self, gone: RemoveOwner, grants: tuple[Grant, ...]) -> None:
        self.watch.gave_up(gone)
        super().owner_lost(gone, grants)


class ControllerHost:
    """Runs the core's entry points. Events during a sleep are handled at the wake-up."""

    def __init__(
        self, setting: Setting, agenda: Agenda, rng: random.Random, watch: GrantWatch
    ) -> None:
        self._setting = setting
        self._watch = watch
        self._agenda = agenda
        self._rng = rng
        self._missed: list[Act] = []
        self._arrival_due = False
        self._limits = limits_of(setting)
        self.asleep = False
        self.woke_at = agenda.now
        """The time of its last wake-up, or of the next one."""
        self.acted = False
        """Something has happened since the last check."""
        self.core: WatchedCore

    def open(self, outside: ControlPorts) -> None:
        self.core = WatchedCore(
            options_of(self._setting),
            outside,
            self._limits,
            self._agenda.clock,
            random.Random(self._rng.getrandbits(32)),
            self._settle_after,
        )
        self.core.watch = self._watch
        self.core.begin()
        self._tick_after()

    def do(self, act: Act) -> None:
        """Act now, or at the wake-up."""
        if self.asleep:
            self._missed.append(act)
            return
        self.acted = True
        act()

    def sleep(self, for_s: float) -> None:
        self.asleep = True
        self.woke_at = max(self.woke_at, self._agenda.now + for_s)
        self._agenda.after(for_s, self._wake)

    def _wake(self) -> None:
        if self._agenda.now < self.woke_at:
            return
        self.asleep = False
        missed, self._missed = self._missed, []
        self._rng.shuffle(missed)
        for act in missed:
            self._agenda.after(0.0, partial(self.do, act))

    def arrived(self) -> None:
        """Messages wait to be drained."""
        if not self._arrival_due:
            self._arrival_due = True
            self.do(self._drain)

    def _drain(self) -> None:
        self._arrival_due = False
        self.core.on_arrival()

    def _tick_after(self) -> None:
        self._agenda.after(self._limits.tick_s, lambda: self.do(self._tick))

    def _tick(self) -> None:
        self.core.tick()
        self._tick_after()

    def _settle_after(self, delay_s: float) -> None:
        self._agenda.after(delay_s, lambda: self.do(self.core.settle_exits))
