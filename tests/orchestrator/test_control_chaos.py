"""Workers die, hang and lie at random moments, by seed; every answer is exact all the same."""

import random
from collections import Counter, deque
from dataclasses import replace

import pytest
from control_world import Reader, World, expected, generation, ready, serve_options

from mlx_dp.orchestrator.control.limits import ControlLimits
from mlx_dp.orchestrator.control.restart_budget import RestartLimits
from mlx_dp.orchestrator.control.router import METHODS
from mlx_dp.orchestrator.control.supervisor import SupervisorLimits
from mlx_dp.orchestrator.options import QueueOptions
from mlx_dp.orchestrator.service import Generation, OverloadedError
from mlx_dp.proto.messages import FinishReason

FAULTS = ("request_crashed_worker", "worker_lost", "queue_timeout", "request_timeout", "no_worker")

REPEATED = ("accepted", "prefilled", "tokens", "preempted", "finished")


class Chaos:
    """One run. The same seed gives the same run."""

    def __init__(self, seed: int, *, group: bool, faults: bool) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        patient = RestartLimits(max_restarts=10**6, first_delay_s=0.05, longest_delay_s=0.2)
        limits = ControlLimits(
            max_attempts=10**6 if faults else 3, supervisor=SupervisorLimits(restart=patient)
        )
        size = self.random.randint(2, 4)
        queue = QueueOptions(
            max_queued_requests=30,
            load_balance_method=self.random.choice(METHODS),
        )
        options = serve_options(size, group=group, queue=queue)
        self.world = World(options, limits=limits, seed=seed)
        self.world.readies = {
            index: ready(
                slots=self.random.randint(1, 4),
                pool=self.random.choice((60, 200, None)),
                memory_tokens=self.random.choice((60, 90, None)),
            )
            for index in range(size)
        }
        self.world.bring_up()
        self.readers: list[tuple[Generation, Reader]] = []
        self.cancelled: set[int] = set()
        self.refused = 0

    def run(self, events: int) -> None:
        actions = [self.submit] * 6 + [self.turn_one] * 20 + [self.deliver] * 10
        actions += [self.pass_time] * 6 + [self.cancel]
        if self.faults:
            actions += [self.kill, self.hang, self.repeat, self.congest, self.cut]
        for _ in range(events):
            self.random.choice(actions)()
            self.world.core.check()
            self.verify()
        self.quiesce()

    def submit(self) -> None:
        prompt = tuple(self.random.randrange(97) for _ in range(self.random.randint(1, 20)))
        wanted = generation(
            prompt,
            self.random.randint(1, 30),
            seed=self.random.randrange(100),
            rank=self.random.choice((None, None, None, 0, 1)),
        )
        if self.random.random() < 0.3:
            stop = expected(wanted, 30)[self.random.randrange(30)]
            wanted = replace(wanted, stop_token_ids=(stop,))
        try:
            self.readers.append((wanted, Reader(self.world.core.submit(wanted))))
        except OverloadedError:
            self.refused += 1

    def turn_one(self) -> None:
        alive = self.world.alive()
        if alive:
            self.random.choice(alive).turn()

    def deliver(self) -> None:
        self.world.core.on_arrival()

    def pass_time(self) -> None:
        self.world.pass_time(0.1, beats=True)
        self.world.greet()

    def cancel(self) -> None:
        if self.readers:
            _, reader = self.random.choice(self.readers)
            reader.read()
            if reader.ended is None:
                self.cancelled.add(reader.answer.request_id)
            reader.answer.cancel()

    def kill(self) -> None:
        alive = self.world.alive()
        if alive and self.random.random() < 0.3:
            self.random.choice(alive).die(self.random.choice((-9, -11, 0, 1)))

    def hang(self) -> None:
        alive = self.world.alive()
        if alive and self.random.random() < 0.1:
            self.random.choice(alive).stopped = True

    def repeat(self) -> None:
        """A message arrives twice, the second time later."""
        if not self.world.arrived:
            return
        messages = list(self.world.arrived)
        first = self.random.randrange(len(messages))
        if getattr(messages[first][1], "tag", "") in REPEATED:
            again = self.random.randint(first + 1, len(messages))
            messages.insert(again, messages[first])
            self.world.arrived = deque(messages)

    def congest(self) -> None:
        self.world.congested = {
            worker.identity for worker in self.world.alive() if self.random.random() < 0.2
        }

    def cut(self) -> None:
        alive = self.world.alive()
        if alive and self.random.random() < 0.05:
            self.world.cut.add(self.random.choice(alive).identity)

    def verify(self) -> None:
        """No answer has a wrong, missing or repeated token, and none goes on after its end."""
        for wanted, reader in self.readers:
            reader.read()
            assert reader.ids == expected(wanted, len(reader.ids)), wanted
            if reader.ended is not None:
                self.verify_end(wanted, reader)

    def verify_end(self, wanted: Generation, reader: Reader) -> None:
        assert reader.ended is not None
        match reader.ended.reason:
            case FinishReason.LENGTH:
                assert len(reader.ids) == wanted.max_tokens
            case FinishReason.STOP:
                assert reader.ids[-1] in wanted.stop_token_ids
            case FinishReason.ABORT:
                assert reader.answer.request_id in self.cancelled
            case FinishReason.ERROR:
                assert self.faults, reader.ended
                assert reader.ended.code in FAULTS, reader.ended

    def quiesce(self) -> None:
        """Without further faults everything ends, and every slot is free on both sides."""
        self.world.congested.clear()
        for worker in self.world.alive():
            worker.stopped = False
        for _ in range(2000):
            if self.world.core.desk.idle:
                break
            self.world.pass_time(0.1)
            self.world.greet()
            self.world.turn()
        for _ in range(20):
            self.world.pass_time(0.1)
            self.world.greet()
            self.world.turn()
        self.verify()
        assert all(reader.ended is not None for _, reader in self.readers)
        assert len(self.world.core.answers) == 0
        for owner in self.world.core.book.owners():
            assert not owner.leases, owner.leases
            assert not self.world.worker(owner.index).running
        self.reconcile()

    def reconcile(self) -> None:
        tally = self.world.core.tally
        assert tally.requests_started == len(self.readers)
        ends = tally.requests_ok + tally.requests_error + tally.requests_aborted
        assert tally.requests_started == ends
        assert tally.generated_by_owner.total() == sum(
            len(reader.ids) for _, reader in self.readers
        )
        assert tally.worker_deaths == tally.worker_restarts
        errors = Counter(
            reader.ended.code
            for _, reader in self.readers
            if reader.ended is not None and reader.ended.reason is FinishReason.ERROR
        )
        assert tally.errors == errors


@pytest.mark.parametrize("seed", range(10))
def test_without_faults_every_request_ends_well(seed: int) -> None:
    chaos = Chaos(seed, group=False, faults=False)
    chaos.run(400)
    assert chaos.world.core.tally.requests_error == 0
    assert chaos.world.core.tally.worker_deaths == 0
    assert chaos.world.core.tally.requests_ok > 0


@pytest.mark.parametrize("seed", range(30))
def test_replicas_may_die_at_any_token(seed: int) -> None:
    Chaos(seed, group=False, faults=True).run(500)


@pytest.mark.parametrize("seed", range(15))
def test_members_of_a_group_may_die_at_any_token(seed: int) -> None:
    Chaos(seed, group=True, faults=True).run(400)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [Chaos(7, group=False, faults=True) for _ in range(2)]
    for chaos in runs:
        chaos.run(300)
    first, second = (chaos.world.core.tally for chaos in runs)
    assert first == second
    assert first.worker_deaths > 0
