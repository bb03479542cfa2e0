"""Ranks that agree, over real sockets and in one thread: while one waits, another runs."""

import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.curve_keys import CurveKeys
from mlx_dp.proto.messages.group import DistributedBackend, GroupPlace
from mlx_dp.proto.wire.curve import make_keys
from mlx_dp.worker.contract.peers import RankLostError
from mlx_dp.worker.lockstep.announcement import (
    FINGERPRINT_BYTES,
    FRAME_BYTES,
    Announcement,
    RankRows,
)
from mlx_dp.worker.lockstep.rank_exchange import RankExchange

MODEL = b"m" * FINGERPRINT_BYTES
DEADLINE_S = 200.0


def places(
    directory: Path, size: int = 2, *, curve: CurveKeys | None = None, generation: int = 1
) -> list[GroupPlace]:
    return [
        GroupPlace(
            backend=DistributedBackend.RING,
            rank=rank,
            size=size,
            addresses=tuple(f"127.0.0.1:{1024 + peer}" for peer in range(size)),
            peers=tuple(f"ipc://{directory}/{peer}" for peer in range(size)),
            generation=generation,
            curve=curve,
        )
        for rank in range(size)
    ]


Open = Callable[..., RankExchange]


@pytest.fixture
def opened() -> Iterator[Open]:
    with ExitStack() as stack:

        def make(
            place: GroupPlace,
            fingerprint: bytes = MODEL,
            clock: Callable[[], float] = lambda: 0.0,
        ) -> RankExchange:
            exchange = RankExchange(place, fingerprint, deadline_s=60.0, clock=clock)
            stack.callback(exchange.close)
            return exchange

        yield make


def silent(rank: int) -> None:
    """Waits go on."""


def rows(tokens: int) -> RankRows:
    """The logits of every other number of tokens are wanted."""
    return RankRows(tokens, tokens % 2 * tokens)


def agree(exchanges: list[RankExchange], tokens: list[int]) -> list[tuple[RankRows, ...]]:
    """Let all ranks agree, each within the wait of the one before."""
    agreed: list[tuple[RankRows, ...]] = []

    def of(index: int) -> None:
        others: list[int] = []

        def awaiting(rank: int) -> None:
            if not others and index + 1 < len(exchanges):
                others.append(rank)
                of(index + 1)

        agreed.append(exchanges[index].agree(rows(tokens[index]), awaiting))

    of(0)
    return agreed


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_learn_the_rows_of_all(short_path: Path, opened: Open, size: int) -> None:
    exchanges = [opened(place) for place in places(short_path, size)]
    for number in range(3):
        tokens = [number * 10 + rank for rank in range(size)]
        assert agree(exchanges, tokens) == [tuple(map(rows, tokens))] * size


def test_a_peer_may_announce_before_this_rank_has_a_socket(short_path: Path, opened: Open) -> None:
    first, second = places(short_path)
    late: list[tuple[RankRows, ...]] = []

    def awaiting(rank: int) -> None:
        if not late:
            late.append(opened(second).agree(rows(0), silent))

    assert opened(first).agree(rows(5), awaiting) == (rows(5), rows(0))
    assert late == [(rows(5), rows(0))]


def test_an_announcement_wakes_a_sleeper_on_the_descriptor(short_path: Path, opened: Open) -> None:
    first, second = (opened(place) for place in places(short_path))
    assert not second.poll_wanted()
    woken: list[bool] = []

    def awaiting(rank: int) -> None:
        if not woken:
            while not second.poll_wanted():
                assert select.select([second.fd], [], [], DEADLINE_S)[0], "never woken"
            woken.append(True)
            second.agree(rows(0), silent)

    assert first.agree(rows(3), awaiting) == (rows(3), rows(0))
    assert woken
    assert not second.poll_wanted()


def test_a_peer_that_never_comes_is_named(short_path: Path, opened: Open) -> None:
    now = [0.0]
    exchange = opened(places(short_path, 3)[1], clock=lambda: now[0])
    told: list[int] = []

    def awaiting(rank: int) -> None:
        told.append(rank)
        now[0] += 25.0

    with pytest.raises(RankLostError, match="rank 0 did not come to pass 0 within 60 s") as lost:
        exchange.agree(rows(1), awaiting)
    assert lost.value.rank == 0
    assert told == [0, 0, 0]


def test_a_wait_ends_with_the_error_of_its_callback(short_path: Path, opened: Open) -> None:
    def awaiting(rank: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        opened(places(short_path)[0]).agree(rows(1), awaiting)


def test_ranks_with_different_models_part(short_path: Path, opened: Open) -> None:
    first, second = places(short_path)
    exchanges = [opened(first), opened(second, b"o" * FINGERPRINT_BYTES)]
    with pytest.raises(ConfigError, match="rank 0 runs another model than rank 1"):
        agree(exchanges, [1, 1])


def test_foreign_frames_are_dropped_and_counted(short_path: Path, opened: Open) -> None:
    first, second = places(short_path)
    peer, exchange = opened(first), opened(second)
    stale = Announcement(generation=0, rank=0, number=0, rows=rows(9), fingerprint=MODEL)
    with stranger(second.peers[1]) as outbox:
        for frame in (stale.encode(), b"noise", b"x" * FRAME_BYTES):
            outbox.send(frame)
        while not exchange.poll_wanted() and exchange.dropped_frames < 3:
            assert select.select([exchange.fd], [], [], DEADLINE_S)[0], exchange.dropped_frames
    assert agree([peer, exchange], [4, 0]) == [(rows(4), rows(0))] * 2
    assert exchange.dropped_frames == 3


@contextmanager
def stranger(endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    """A socket without keys that sends to a rank."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as outbox:
        outbox.setsockopt(zmq.LINGER, 0)
        outbox.connect(endpoint)
        yield outbox


def test_with_keys_only_their_holders_are_heard(short_path: Path, opened: Open) -> None:
    keys = make_keys()
    first, second = places(short_path, curve=keys)
    peer, exchange = opened(first), opened(second)
    fake = Announcement(generation=1, rank=0, number=0, rows=rows(9), fingerprint=MODEL)
    with stranger(second.peers[1]) as outbox:
        outbox.send(fake.encode())
        assert agree([peer, exchange], [4, 1]) == [(rows(4), rows(1))] * 2
    assert exchange.dropped_frames == 0
