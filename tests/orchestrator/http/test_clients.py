"""Who has to go when all places are taken."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.http.clients import Clients


class FakeClient:
    def __init__(self) -> None:
        self.gave_way = False
        self.checked_at: list[float] = []

    def check(self, now: float) -> None:
        self.checked_at.append(now)

    def give_way(self) -> None:
        self.gave_way = True


def test_the_one_that_waits_longest_gives_way() -> None:
    clients = Clients(3)
    first, second, third, fourth, fifth = (FakeClient() for _ in range(5))
    assert all(clients.admit(client) for client in (first, second, third))
    clients.waits(first, False)
    clients.waits(first, True)
    assert clients.admit(fourth)
    assert second.gave_way
    assert not first.gave_way
    assert clients.admit(fifth)
    assert third.gave_way
    assert len(clients) == 3
    clients.check()


def test_nobody_is_cut_off_while_served() -> None:
    clients = Clients(2)
    served = [FakeClient(), FakeClient()]
    for client in served:
        assert clients.admit(client)
        clients.waits(client, False)
    late = FakeClient()
    assert not clients.admit(late)
    assert not any(client.gave_way for client in served)
    clients.leave(served[0])
    assert clients.admit(late)


def test_a_client_that_was_refused_takes_no_place_by_what_it_does_later() -> None:
    clients = Clients(1)
    here, refused = FakeClient(), FakeClient()
    clients.admit(here)
    clients.waits(here, False)
    assert not clients.admit(refused)
    clients.waits(refused, True)
    clients.leave(refused)
    clients.check()
    assert len(clients) == 1


def test_a_sweep_asks_everybody_though_some_leave_in_it() -> None:
    clients = Clients(10)

    class Leaving(FakeClient):
        def check(self, now: float) -> None:
            super().check(now)
            clients.leave(self)

    everybody = [Leaving() for _ in range(5)]
    for client in everybody:
        clients.admit(client)
    clients.sweep(7.0)
    assert [client.checked_at for client in everybody] == [[7.0]] * 5
    assert len(clients) == 0


@given(st.lists(st.tuples(st.sampled_from(["admit", "wait", "serve", "leave"]), st.integers(0, 7))))
def test_places_are_never_counted_twice(steps: list[tuple[str, int]]) -> None:
    clients = Clients(4)
    known = [FakeClient() for _ in range(8)]
    inside: set[int] = set()
    for step, index in steps:
        client = known[index]
        match step:
            case "admit" if index not in inside:
                if clients.admit(client):
                    inside.add(index)
                inside -= {other for other in inside if known[other].gave_way}
                for other in known:
                    other.gave_way = False
            case "wait" | "serve":
                clients.waits(client, step == "wait")
            case "leave":
                clients.leave(client)
                inside.discard(index)
        clients.check()
        assert len(clients) == len(inside)
