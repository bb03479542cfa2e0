"""Rolling restarts of real processes under load: no request fails, and no token is lost."""

import json
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from tests.support.hosts.served import Served, wait_until

pytestmark = pytest.mark.system

FAKE = ("--engine", "fake", "--fake-decode-rate", "200")


@pytest.fixture
def served() -> Iterator[Served]:
    with Served(*FAKE, "--dp-size", "2") as made:
        made.wait_until_ready()
        yield made


def text_of(events: list[str]) -> str:
    assert events[-1] == "[DONE]", events[-2:]
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


class Load:
    """Clients that stream the same response one after another, until they are stopped."""

    BODY = {"prompt": "hello", "max_tokens": 150, "ignore_eos": True, "seed": 7}  # noqa: RUF012

    def __init__(self, served: Served, clients: int) -> None:
        self._served = served
        self._enough = threading.Event()
        self.texts: list[str] = []
        self.errors: list[str] = []
        self._threads: list[threading.Thread] = []
        self.add(clients)

    def add(self, clients: int) -> None:
        for _ in range(clients):
            thread = threading.Thread(target=self._run, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _run(self) -> None:
        while not self._enough.is_set():
            try:
                self.texts.append(text_of(list(self._served.stream(self.BODY))))
            except (OSError, AssertionError) as error:
                self.errors.append(repr(error))
                return

    def finish(self) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a stream never ended"


def pids(served: Served) -> list[int]:
    return [worker["pid"] for worker in served.get("/workers")[1]["workers"]]


def rolled(served: Served) -> bool:
    workers = served.get("/workers")[1]["workers"]
    return all(w["status"] == "ready" and not w["restart_asked"] for w in workers)


@pytest.mark.parametrize("how", [pytest.param("route", marks=pytest.mark.slow), "signal"])
def test_a_rolling_restart_under_load_fails_no_request(served: Served, how: str) -> None:
    undisturbed = text_of(list(served.stream(Load.BODY)))
    before = pids(served)
    load = Load(served, 6)
    if how == "signal":
        served.signal(signal.SIGHUP)
        served.wait_for_line("restarting workers 0, 1, one after another")
        wait_until(lambda: rolled(served), "all are replaced")
    else:
        for index in (0, 1):
            status, body = served.post(f"/workers/{index}/restart", {})
            assert (status, body) == (202, {"restarting": [index]})
            assert served.post("/workers/0/restart", {})[0] == 409
            wait_until(lambda: rolled(served), "it is replaced")
    load.finish()
    assert load.errors == []
    assert len(load.texts) >= 6
    assert set(load.texts) == {undisturbed}
    assert not set(pids(served)) & set(before)
    workers = served.get("/workers")[1]["workers"]
    assert [(w["epoch"], w["restarts_in_window"], w["last_cause"]) for w in workers] == [
        (1, 0, "restarted on request")
    ] * 2
    assert 'mlx_dp:worker_losses_total{cause="restart"} 2.0' in served.get("/metrics")[1]


@pytest.mark.parametrize(
    "flags",
    [("--dp-size", "1"), ("--dp-size", "2", "--tp-size", "2", "--enable-dp-attention")],
    ids=["replica", "group"],
)
def test_every_request_while_the_only_domain_restarts_is_answered(
    flags: tuple[str, ...],
) -> None:
    with Served(*FAKE, "--fake-load-time", "0.5", *flags) as served:
        served.wait_until_ready()
        undisturbed = text_of(list(served.stream(Load.BODY)))
        before = pids(served)
        load = Load(served, 4)
        assert served.post("/workers/0/restart", {})[0] == 202
        wait_until(lambda: served.get("/health")[0] == 503, "no worker is left to serve")
        assert served.get("/health")[1]["status"] == "restarting"
        assert served.get("/health_generate")[0] == 503
        load.add(4)
        wait_until(lambda: rolled(served), "it is replaced")
        assert served.get("/health")[0] == 200
        load.finish()
        assert load.errors == []
        assert set(load.texts) == {undisturbed}
        assert not set(pids(served)) & set(before)


def test_each_event_of_a_death_names_worker_process_epoch_and_cause(served: Served) -> None:
    (pid, _) = pids(served)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: served.get("/workers")[1]["workers"][0]["epoch"] == 1, "it is replaced")
    wait_until(lambda: rolled(served), "it is ready")
    told = [line for line in served.lines if "worker 0: " in line and "epoch " in line]
    words = [line.partition("worker 0: ")[2].split()[0].strip(",") for line in told]
    assert words == ["started", "ready", "pid", "lost", "restarts", "started", "ready"], told
    (lost,) = [line for line in told if "lost" in line]
    assert f"pid {pid}, incarnation " in lost
    assert "epoch 0: exit: killed by SIGKILL, possibly out of memory" in lost
    worker = served.get("/workers")[1]["workers"][0]
    assert worker["last_cause"] == "killed by SIGKILL, possibly out of memory"
    assert worker["restarts_in_window"] == 1
