"""Requests go to the owner of their prefix, and a popular prefix overloads no owner."""

import random
from dataclasses import dataclass, field

import pytest

from mlx_dp.orchestrator.api import Generation, Granted
from mlx_dp.orchestrator.control.routing.policies import EXPLICIT_RANK
from mlx_dp.orchestrator.control.routing.prefix_affinity import (
    COLD,
    HIT,
    LOAD,
    PREFIX_AFFINITY,
    REQUEST_TOKENS,
)
from mlx_dp.orchestrator.control.routing.prefix_index import BLOCK_TOKENS
from mlx_dp.orchestrator.options import QueueOptions
from tests.support.control.control_world import Reader, World, serve_options
from tests.support.control.fake_worker import expected, generation, ready

LONG = (5,) * 1024
"""The worth of a prefix: four requests in a batch."""


def world_of(owners: int, slots: int = 64) -> World:
    queue = QueueOptions(load_balance_method=PREFIX_AFFINITY, max_queued_requests=10_000)
    world = World(serve_options(owners, queue=queue))
    world.readies = {
        owner: ready(slots=slots, pool=10**6, context=10**6) for owner in range(owners)
    }
    return world.bring_up()


def ask(world: World, prompt: tuple[int, ...], max_tokens: int = 2, **wanted) -> Reader:
    return Reader(world.core.submit(generation(prompt, max_tokens, **wanted)))


def granted(reader: Reader) -> tuple[int, str]:
    (grant,) = reader.read().grants
    return grant.dp_rank, grant.reason


def served(world: World, prompt: tuple[int, ...], **wanted) -> tuple[int, str]:
    """Send one request, and wait for its end."""
    reader = ask(world, prompt, **wanted)
    world.run_workers(4)
    assert reader.read().ended is not None
    return granted(reader)


def test_a_second_turn_goes_to_where_the_first_one_was() -> None:
    world = world_of(3)
    assert served(world, LONG) == (0, COLD)
    assert served(world, (1, 2) * 200) == (1, COLD)
    assert served(world, (*LONG, 7, 8)) == (0, HIT)
    assert served(world, (1, 2) * 150) == (1, HIT)
    assert world.core.counters.grants == {COLD: 2, HIT: 2}


def test_an_answer_is_part_of_what_its_owner_holds() -> None:
    world = world_of(2)
    first = ask(world, (3,) * 60, max_tokens=200)
    other = ask(world, (3,) * 60, max_tokens=1)
    world.run_workers(200)
    assert [granted(first)[0], granted(other)[0]] == [0, 1]
    history = ((3,) * 60) + tuple(first.ids)
    assert served(world, (*history, 9)) == (0, HIT)


def test_tokens_of_a_cancelled_request_are_held_too() -> None:
    world = world_of(2)
    left = ask(world, (3,) * 60, max_tokens=900)
    world.run_workers(200)
    left.answer.cancel()
    world.run_workers(2)
    assert served(world, (1,)) == (1, COLD)
    assert served(world, (*(3,) * 60, *left.read().ids, 9)) == (0, HIT)


def test_the_last_token_of_a_prompt_is_never_found() -> None:
    world = world_of(2)
    block = (3,) * BLOCK_TOKENS
    assert [served(world, block), served(world, block)] == [(0, COLD), (1, COLD)]
    assert served(world, (*block, 4))[1] == HIT


def test_what_is_cached_is_no_work_ahead() -> None:
    world = world_of(2)
    served(world, LONG)
    together = [granted(ask(world, (*LONG, n))) for n in range(6)]
    assert together == [(0, HIT)] * 4 + [(1, LOAD), (0, HIT)]


def test_salts_do_not_share() -> None:
    world = world_of(2)
    assert served(world, LONG, salt="a") == (0, COLD)
    assert served(world, LONG, salt="b") == (1, COLD)
    assert served(world, LONG, salt="a") == (0, HIT)


def test_short_prompts_without_a_full_block_take_turns() -> None:
    world = world_of(3)
    assert [served(world, (1, 2, 3)) for _ in range(4)] == [
        (0, COLD),
        (1, COLD),
        (2, COLD),
        (0, COLD),
    ]


def test_work_ahead_outweighs_a_prefix() -> None:
    world = world_of(2)
    served(world, LONG)
    busy = ask(world, (9,) * 4000, rank=0)
    assert granted(busy) == (0, EXPLICIT_RANK)
    # The prefix would save less than the wait would cost.
    assert granted(ask(world, (*LONG, 7))) == (1, LOAD)
    world.run_workers(4)
    assert granted(ask(world, (*LONG, 8))) == (0, HIT)


def test_an_owner_without_room_is_passed_over() -> None:
    world = world_of(2, slots=1)
    served(world, LONG)
    ask(world, (1,), max_tokens=50, rank=0)
    assert granted(ask(world, (*LONG, 7))) == (1, LOAD)


@pytest.mark.parametrize("act", ["restart", "flush"])
def test_what_an_owner_has_dropped_is_forgotten(act: str) -> None:
    world = world_of(2)
    assert served(world, LONG) == (0, COLD)
    if act == "restart":
        world.worker(0).kill()
        world.recover()
    else:
        world.core.begin_flush()
        world.settle()
    assert served(world, LONG) == (1, COLD)


def test_a_grant_that_was_never_sent_is_not_held() -> None:
    world = world_of(2)
    world.congested = {world.worker(0).identity}
    assert served(world, LONG) == (1, COLD)
    world.congested = set()
    world.pass_time(0.6)
    assert served(world, (*LONG, 3)) == (1, HIT)


@dataclass
class Load:
    """Requests with a popular prefix, faster than they end; returns the owners' grants."""

    world: World
    prefix: tuple[int, ...]
    random: random.Random
    open: list[tuple[Generation, Reader]] = field(default_factory=list)
    grants: list[Granted] = field(default_factory=list)
    widest: int = 0

    def run(self, turns: int, a_turn: int) -> None:
        for turn in range(turns):
            for _ in range(a_turn):
                own = tuple(self.random.randrange(97) for _ in range(self.random.randint(1, 40)))
                wanted = generation(self.prefix + own, self.random.randint(5, 40), seed=turn)
                self.open.append((wanted, Reader(self.world.core.submit(wanted))))
                self.measure()
            self.world.run_workers()
            if turn % 2 == 0:
                self.world.pass_time(0.1)
            self.collect()

    def measure(self) -> None:
        running = [len(owner.grants) for owner in self.world.core.ranks.owners()]
        self.widest = max(self.widest, max(running) - min(running))

    def collect(self) -> None:
        for wanted, reader in tuple(self.open):
            if reader.read().ended is not None:
                assert reader.ids == expected(wanted, wanted.max_tokens or 0)
                self.grants += reader.grants
                self.open.remove((wanted, reader))


@pytest.mark.parametrize("owners", [2, 4])
@pytest.mark.parametrize("prefix_tokens", [512, 2048])
def test_a_popular_prefix_floods_no_owner_and_starves_none(owners: int, prefix_tokens: int) -> None:
    load = Load(world_of(owners), (5,) * prefix_tokens, random.Random(owners))
    load.run(60, owners)
    # The difference is at most the worth of the prefix, in requests, and of their own tokens.
    assert load.widest <= prefix_tokens / REQUEST_TOKENS + 2
    served_by = [sum(grant.dp_rank == owner for grant in load.grants) for owner in range(owners)]
    assert min(served_by) > 0.7 * len(load.grants) / owners, served_by
    # Each owner computes the prefix once, and nearly all find it.
    cold = sum(grant.reason != HIT for grant in load.grants)
    assert cold <= 2 * owners, [grant.reason for grant in load.grants]


def test_many_conversations_stay_where_they_are_while_the_load_is_even() -> None:
    world = world_of(4)
    shuffled = random.Random(7)
    talks = [tuple(shuffled.randrange(97) for _ in range(300)) for _ in range(24)]
    homes: list[set[int]] = [set() for _ in talks]
    for turn in range(6):
        readers = [ask(world, talk, max_tokens=3, seed=n) for n, talk in enumerate(talks)]
        world.run_workers(6)
        for n, reader in enumerate(readers):
            owner, reason = granted(reader)
            homes[n].add(owner)
            assert turn == 0 or reason == HIT, (turn, n, reason)
            talks[n] += (*reader.ids, *[shuffled.randrange(97) for _ in range(40)])
    assert all(len(home) == 1 for home in homes)
    assert all(sum(home == {owner} for home in homes) == 6 for owner in range(4))
