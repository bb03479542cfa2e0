"""The passes of a rank, counted."""

from mlx_dp.proto.messages.events import PassTotals
from mlx_dp.worker.lockstep.pass_counter import PassCounter


def test_passes_without_own_rows_are_counted_apart_and_waits_add_up() -> None:
    counter = PassCounter()
    counter.count(tokens=4, waited_s=0.5)
    counter.count(tokens=0, waited_s=0.25)
    assert counter.totals == PassTotals(passes=2, idle_passes=1, waited_s=0.75)


def test_what_came_before_a_restart_does_not_count() -> None:
    counter = PassCounter()
    counter.count(tokens=0, waited_s=20.0)
    counter.restart()
    counter.count(tokens=4, waited_s=0.5)
    assert counter.totals == PassTotals(passes=1, idle_passes=0, waited_s=0.5)
