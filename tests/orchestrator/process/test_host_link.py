import pytest

from mlx_dp.orchestrator.process.host_link import FIRST_SILENCE_S, HostLink, Lost
from mlx_dp.proto.host_messages import Alive, Deny, Join, Launch, Ping, SignalWorker, Welcome

JOIN = Join(rank=2, host="mac2", pid=7)
LAUNCH = Launch(identity="w2-a", model_path="", model_fingerprint="", log_level="info")


@pytest.fixture
def link() -> HostLink:
    return HostLink(JOIN, heard_at=0.0)


def test_it_asks_for_its_place_until_it_has_it_and_then_says_that_it_lives(link) -> None:
    assert link.due(0.0) == JOIN
    assert link.due(0.1) is None
    assert link.due(0.5) == JOIN
    assert link.take(Welcome(beat_s=2.0, silence_s=20.0), 0.6) is None
    assert link.due(1.0) is None
    assert link.due(2.5) == Alive()


def test_without_an_answer_the_controller_counts_as_gone(link) -> None:
    assert link.due(FIRST_SILENCE_S) == JOIN
    lost = link.due(FIRST_SILENCE_S + 0.1)
    assert isinstance(lost, Lost)
    assert not lost.final
    assert lost.reason.startswith("the controller was not heard for 5.1 s: it is not there yet, or")


def test_silence_is_measured_by_what_the_controller_says_it_to_be(link) -> None:
    link.take(Welcome(beat_s=2.0, silence_s=20.0), 1.0)
    link.take(Ping(), 10.0)
    assert link.due(30.0) == Alive()
    assert link.due(30.1) == Lost("the controller was not heard for 20.1 s", final=False)


@pytest.mark.parametrize("final", [True, False])
def test_a_refusal_ends_the_connection(link, final) -> None:
    assert link.take(Deny(reason="no", final=final), 0.0) == Lost("no", final)


@pytest.mark.parametrize("order", [LAUNCH, SignalWorker(identity="w2-a", signal=9)])
def test_orders_are_handed_on(link, order) -> None:
    assert link.take(order, 0.0) == order
