import pytest

from mlx_dp.orchestrator.process.remote.host_link import (
    FIRST_SILENCE_S,
    ControllerPlace,
    HostLink,
    LinkLost,
)
from mlx_dp.proto.messages.host_messages import (
    Alive,
    Deny,
    Join,
    Launch,
    Ping,
    SignalWorker,
    Welcome,
)
from mlx_dp.proto.wire.connection_state import ConnectionState as State

PLACE = ControllerPlace(endpoint="tcp://there:1", keys="k")
JOIN = Join(rank=2, host="mac2", pid=7)
LAUNCH = Launch(identity="w2-a", model_path="", model_fingerprint="", log_level="info")
FAULTS = [
    (State.UNREACHED, "k", "nothing listens at --controller tcp://there:1: start", False),
    (State.KEY_REFUSED, "k", "does not know the worker's key in --keys k: copy its .pub", True),
    (State.BROKEN_OFF, "k", "is not the controller of controller.pub in --keys k: copy", True),
    (State.BROKEN_OFF, "", "wants keys, or it is none: give the directory", True),
    (State.OTHER_MECHANISM, "", "wants keys, or it is none: give the directory", True),
    (State.OTHER_MECHANISM, "k", "has no keys, and --keys k was given: leave it out", True),
    (State.READY, "k", "does not answer: see its log", False),
    (State.GREETING, "", "does not answer: see its log", False),
]


@pytest.fixture
def link() -> HostLink:
    return HostLink(JOIN, PLACE, heard_at=0.0)


def test_it_asks_for_its_place_until_it_has_it_and_then_says_that_it_lives(link) -> None:
    assert link.poll(0.0, State.READY) == JOIN
    assert link.poll(0.1, State.READY) is None
    assert link.poll(0.5, State.READY) == JOIN
    assert link.handle(Welcome(heartbeat_s=2.0, silence_s=20.0), 0.6) is None
    assert link.poll(1.0, State.READY) is None
    assert link.poll(2.5, State.READY) == Alive()


@pytest.mark.parametrize(("state", "keys", "words", "final"), FAULTS)
def test_a_controller_that_does_not_answer_is_told_by_its_cause(state, keys, words, final) -> None:
    place = ControllerPlace(endpoint="tcp://there:1", keys=keys)
    link = HostLink(JOIN, place, heard_at=0.0)
    assert link.poll(FIRST_SILENCE_S, state) == JOIN
    lost = link.poll(FIRST_SILENCE_S + 0.1, state)
    assert isinstance(lost, LinkLost)
    assert words in lost.reason
    assert lost.final is final


def test_keys_that_were_right_once_do_not_end_it() -> None:
    link = HostLink(JOIN, PLACE, heard_at=0.0, had_place=True)
    lost = link.poll(FIRST_SILENCE_S + 0.1, State.KEY_REFUSED)
    assert isinstance(lost, LinkLost)
    assert not lost.final


def test_silence_is_measured_by_what_the_controller_says_it_to_be(link) -> None:
    link.handle(Welcome(heartbeat_s=2.0, silence_s=20.0), 1.0)
    link.handle(Ping(), 10.0)
    assert link.poll(30.0, State.READY) == Alive()
    assert link.poll(30.1, State.READY) == LinkLost(
        "the controller was not heard for 20 s", final=False
    )


@pytest.mark.parametrize("final", [True, False])
def test_a_refusal_ends_the_connection(link, final) -> None:
    assert link.handle(Deny(reason="no", final=final), 0.0) == LinkLost("no", final)


@pytest.mark.parametrize("order", [LAUNCH, SignalWorker(identity="w2-a", signal=9)])
def test_orders_are_handed_on(link, order) -> None:
    assert link.handle(order, 0.0) == order
