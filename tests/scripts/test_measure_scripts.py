"""Conclusions of the measures, which also check whether their faults happened."""

import asyncio
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hosts.script_modules import SCRIPTS

MIB = 2**20


def samples(load: Any, **grown: list[int]) -> list[Any]:
    soak = load("measuring.soak")
    flat = {"rss_nbytes": 100 * MIB, "fds": 30, "threads": 4, "socket_files": 2, "processes": 3}
    return [
        soak.Sample(
            **{**flat, "requests": 500 * at, **{name: each[at] for name, each in grown.items()}}
        )
        for at in range(30)
    ]


def kept(found: list[Any]) -> dict[str, bool]:
    """Values by the first words of each measure."""
    return {each.name.split(",")[0]: each.kept for each in found}


def test_a_flat_soak_keeps_its_bounds_whatever_it_took_to_warm_up(load):
    rss = [10 * MIB * (at + 1) for at in range(6)] + [100 * MIB] * 24
    assert all(kept(load("measuring.soak").flatness(samples(load, rss_nbytes=rss))).values())


def test_the_first_thousand_requests_do_not_count(load):
    rss = [10 * MIB * (at + 1) for at in range(20)] + [200 * MIB] * 10
    grown = samples(load, rss_nbytes=rss, requests=[50 * at for at in range(20)] + [1_000] * 10)
    assert all(kept(load("measuring.soak").flatness(grown)).values())


@pytest.mark.parametrize(("nbytes", "flat"), [(256, True), (2_048, False)])
def test_memory_may_grow_by_half_a_kibibyte_a_request(load, nbytes, flat):
    rss = [100 * MIB + 500 * at * nbytes for at in range(30)]
    found = load("measuring.soak").flatness(samples(load, rss_nbytes=rss))
    assert [each.kept for each in found] == [flat, True, True, True, True]
    assert "over 8000 requests" in found[0].name


@pytest.mark.parametrize("name", ["fds", "threads", "socket_files", "processes"])
def test_a_soak_that_grows_does_not_keep_its_bound(load, name):
    grown = samples(load, **{name: list(range(30))})
    assert [each.kept for each in load("measuring.soak").flatness(grown)].count(False) == 1


class FakeService:
    """Two workers; ``broken`` raises instead of a restart."""

    def __init__(self, broken: Exception | None = None) -> None:
        self.pids = {0: 100, 1: 101}
        self.lost = 0
        self._broken = broken

    def mark(self) -> int:
        return 0

    def deaths(self, since: int) -> int:
        return self.lost

    async def wait_ready(self, index: int, since: int) -> None:
        if self._broken is not None:
            raise self._broken


@pytest.fixture
def soaked(load, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Run a soak of ``minutes`` that takes no time, and return it."""
    module = load("measuring.soak")
    clock = SimpleNamespace(now_s=0.0)

    async def sleep(seconds: float) -> None:
        clock.now_s += seconds
        await asyncio_sleep(0)

    asyncio_sleep = asyncio.sleep
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(module, "sample", lambda service, requests: samples(load)[0])

    def run(service: FakeService, minutes: float, *, deaths_a_kill: int = 1) -> Any:
        def kill(pid: int, number: int) -> None:
            assert pid in service.pids.values()
            service.lost += deaths_a_kill

        monkeypatch.setattr(module, "os", SimpleNamespace(kill=kill))
        monkeypatch.setattr(asyncio, "sleep", sleep)
        soak = module.Soak(minutes)
        stage = SimpleNamespace(
            service=service,
            rng=random.Random(1),
            workers=lambda: range(2),
            result=SimpleNamespace(requests=0),
        )
        asyncio.run(soak.trial(stage))
        return soak

    return run


def test_a_soak_counts_its_kills_and_the_deaths_that_they_were(soaked):
    soak = soaked(FakeService(), 2.0)
    assert soak.kills >= 6
    assert all(kept(soak.measured()).values())


@pytest.mark.parametrize("deaths_a_kill", [0, 2])
def test_a_kill_that_is_no_death_and_a_death_without_a_kill_break_a_bound(soaked, deaths_a_kill):
    soak = soaked(FakeService(), 2.0, deaths_a_kill=deaths_a_kill)
    assert not kept(soak.measured())["deaths without a kill"]


def test_a_soak_with_hardly_a_kill_does_not_keep_its_bound(load):
    soak = load("measuring.soak").Soak(2.0)
    soak.kills = 5
    assert not kept(soak.measured())["kills"]


def test_kills_that_break_end_the_soak_with_their_cause(soaked):
    with pytest.raises(RuntimeError, match="worker 1 stayed away"):
        soaked(FakeService(RuntimeError("worker 1 stayed away")), 2.0)


def test_strangers_messages_that_did_not_arrive_are_reported(load, monkeypatch):
    garbage = load("measuring.garbage")
    counted = iter([3, 5, 5, 5])

    async def counters() -> dict[str, int]:
        return {"unknown_frames_total": next(counted)}

    strangers = garbage.Strangers(SimpleNamespace(counters=counters), None)
    strangers.messages = 5
    assert asyncio.run(strangers.arrived()) == 5
    strangers.messages = 6

    async def at_once(holds: Any) -> bool:
        return bool(await holds())

    monkeypatch.setattr(garbage, "eventually", at_once)
    assert asyncio.run(strangers.arrived()) == 5


@pytest.mark.parametrize(("ended_by", "held"), [(-15, True), (1, False)])
def test_a_service_that_does_not_say_that_it_lives_breaks_the_bound(load, ended_by, held):
    times = load("measuring.crowd").LiveTimes(None)
    times._program = SimpleNamespace(returncode=ended_by)
    times._seconds = [0.01] * 50
    assert times.measured("the streams", 1.0).kept is held
    times._seconds = [0.01] * 49 + [0.2]
    assert not times.measured("the streams", 1.0).kept
    times._seconds = []
    assert not times.measured("the streams", 1.0).kept


def test_fewer_streams_at_once_than_were_asked_for_break_the_bound(load, monkeypatch):
    module = load("measuring.crowd")
    monkeypatch.setattr(module, "address", lambda service: ("127.0.0.1", 1))
    crowd = module.Crowd(None)
    crowd._most_running = 99
    assert not kept(crowd.measured(100))["most streams at once"]
    assert kept(crowd.measured(99))["most streams at once"]


@pytest.mark.system
def test_the_liveness_prober_ends_with_its_service():
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "measuring/live.py"), "127.0.0.1", "1"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "refused" in done.stderr
