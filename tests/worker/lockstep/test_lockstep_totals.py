"""A rank's counters of its passes."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from mlx_dp.proto.messages.events import PassTotals
from mlx_dp.worker.lockstep.lockstep import Lockstep

pytestmark = pytest.mark.mlx


class LatePeer:
    """Comes to every pass half a second late."""

    fd = 5

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def agree(self, rows: Any, awaiting: Any) -> tuple[Any, ...]:
        self.now += 0.5
        return (rows,)


class Watch:
    def awaiting(self, rank: int) -> None: ...

    def agreed(self, peer_tokens: int) -> None: ...


def make() -> Lockstep:
    peer = LatePeer()
    lockstep = Lockstep(mx.distributed.init(), Watch(), peer.clock)
    lockstep.bind(SimpleNamespace(blocks=(), records=(), calls=()), peer)
    return lockstep


def test_passes_count_with_the_wait_for_peers_and_idle_ones_apart() -> None:
    lockstep = make()
    lockstep.begin(3, 3)
    lockstep.end()
    lockstep.take_part()
    assert lockstep.totals == PassTotals(passes=2, idle_passes=1, waited_s=1.0)


def test_waits_for_peers_that_still_load_are_no_waits_of_serving() -> None:
    lockstep = make()
    lockstep.take_part()
    lockstep.watch(Watch())
    assert lockstep.totals == PassTotals(passes=0, idle_passes=0, waited_s=0.0)
