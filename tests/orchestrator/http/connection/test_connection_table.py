"""The choice of the connection that is closed when all places are taken."""

from hypothesis import given
from hypothesis import strategies as st

from mlx_dp.orchestrator.http.connection.connection_table import ConnectionTable


class FakeClient:
    def __init__(self) -> None:
        self.gave_way = False
        self.checked_at: list[float] = []

    def check_deadlines(self, now: float) -> None:
        self.checked_at.append(now)

    def close_idle(self) -> None:
        self.gave_way = True


def test_the_one_that_waits_longest_gives_way() -> None:
    table = ConnectionTable(3)
    first, second, third, fourth, fifth = (FakeClient() for _ in range(5))
    assert all(table.try_add(client) for client in (first, second, third))
    table.set_waiting(first, False)
    table.set_waiting(first, True)
    assert table.try_add(fourth)
    assert second.gave_way
    assert not first.gave_way
    assert table.try_add(fifth)
    assert third.gave_way
    assert len(table) == 3
    table.check()


def test_no_connection_is_closed_while_served() -> None:
    table = ConnectionTable(2)
    served = [FakeClient(), FakeClient()]
    for client in served:
        assert table.try_add(client)
        table.set_waiting(client, False)
    late = FakeClient()
    assert not table.try_add(late)
    assert not any(client.gave_way for client in served)
    table.remove(served[0])
    assert table.try_add(late)


def test_a_client_that_was_refused_takes_no_place_by_what_it_does_later() -> None:
    table = ConnectionTable(1)
    here, refused = FakeClient(), FakeClient()
    table.try_add(here)
    table.set_waiting(here, False)
    assert not table.try_add(refused)
    table.set_waiting(refused, True)
    table.remove(refused)
    table.check()
    assert len(table) == 1


def test_a_sweep_checks_all_connections_though_some_leave_in_it() -> None:
    table = ConnectionTable(10)

    class Leaving(FakeClient):
        def check_deadlines(self, now: float) -> None:
            super().check_deadlines(now)
            table.remove(self)

    everybody = [Leaving() for _ in range(5)]
    for client in everybody:
        table.try_add(client)
    table.check_deadlines(7.0)
    assert [client.checked_at for client in everybody] == [[7.0]] * 5
    assert len(table) == 0


@given(st.lists(st.tuples(st.sampled_from(["add", "wait", "serve", "remove"]), st.integers(0, 7))))
def test_places_are_never_counted_twice(steps: list[tuple[str, int]]) -> None:
    table = ConnectionTable(4)
    known = [FakeClient() for _ in range(8)]
    inside: set[int] = set()
    for step, index in steps:
        client = known[index]
        match step:
            case "add" if index not in inside:
                if table.try_add(client):
                    inside.add(index)
                inside -= {other for other in inside if known[other].gave_way}
                for other in known:
                    other.gave_way = False
            case "wait" | "serve":
                table.set_waiting(client, step == "wait")
            case "remove":
                table.remove(client)
                inside.discard(index)
        table.check()
        assert len(table) == len(inside)
