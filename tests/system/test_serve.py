"""The whole service, as processes, with the fake engine: start, refusals, signals, deaths."""

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.hosts.served import DEADLINE_S, Served, alive, wait_until

pytestmark = pytest.mark.system

FAKE = ("--engine", "fake")
SLOW = (*FAKE, "--fake-decode-rate", "50")
LONG = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True}


@pytest.fixture
def two_slow_owners() -> Iterator[Served]:
    with Served(*SLOW, "--dp-size", "2") as served:
        served.wait_until_ready()
        yield served


def running(served: Served) -> int:
    _, loads = served.get("/v1/loads")
    return int(loads["aggregate"]["total_running_reqs"])


def socket_of(worker: psutil.Process) -> Path:
    line = worker.cmdline()
    return Path(line[line.index("--endpoint") + 1].removeprefix("ipc://"))


class Client:
    """One streaming client in a thread. ``done`` says how it ended."""

    def __init__(self, served: Served, **body: object) -> None:
        self.events: list[str] = []
        self.first = threading.Event()
        self._served = served
        self._body = {**LONG, **body}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> list[str]:
        self._thread.join(60.0)
        assert not self._thread.is_alive(), "the stream never ended"
        return self.events

    def _run(self) -> None:
        try:
            for event in self._served.stream(self._body):
                self.events.append(event)
                self.first.set()
        except OSError as error:
            self.events.append(f"broken: {error}")
        self.first.set()


def test_it_starts_serves_and_drains(two_slow_owners: Served) -> None:
    served = two_slow_owners
    assert served.get("/health")[0] == 200
    status, answer = served.post(
        "/v1/completions", {"model": "fake", "prompt": "hi"} | {"max_tokens": 4}
    )
    assert status == 200
    assert answer["usage"]["completion_tokens"] <= 4
    workers = served.workers()
    assert len(workers) == 2
    served.signal(signal.SIGTERM)
    assert served.exit_status() == 0
    assert not [worker for worker in workers if alive(worker)]


def test_running_requests_finish_and_new_ones_are_refused_in_a_drain(
    two_slow_owners: Served,
) -> None:
    served = two_slow_owners
    client = Client(served)
    assert client.first.wait(DEADLINE_S)
    served.signal(signal.SIGTERM)
    wait_until(lambda: served.get("/health")[0] == 503, "health says so")
    refused, body = served.post("/v1/completions", {"model": "fake", **LONG})
    assert refused == 503
    assert "error" in body
    assert client.wait()[-1] == "[DONE]"
    assert served.exit_status() == 0


def test_what_outlasts_the_drain_ends_and_the_exit_is_still_clean() -> None:
    with Served(*FAKE, "--fake-decode-rate", "5", "--drain-timeout", "0.5") as served:
        served.wait_until_ready()
        client = Client(served, max_tokens=1000)
        assert client.first.wait(DEADLINE_S)
        served.signal(signal.SIGTERM)
        assert served.exit_status() == 0  # 200 s of its response are left.
        client.wait()


def test_a_second_signal_ends_it_at_once() -> None:
    with Served(*FAKE, "--fake-decode-rate", "5") as served:
        served.wait_until_ready()
        client = Client(served, max_tokens=1000)
        assert client.first.wait(DEADLINE_S)
        workers = served.workers()
        sockets = [socket_of(worker) for worker in workers]
        assert all(path.exists() for path in sockets)
        served.signal(signal.SIGINT)
        wait_until(lambda: served.get("/health")[0] == 503, "the drain has begun")
        served.signal(signal.SIGINT)
        # 200 s of the response are left.
        assert served.exit_status() == 128 + signal.SIGINT
        assert not any(path.parent.exists() for path in sockets)
        wait_until(lambda: not any(map(alive, workers)), "its workers are gone")


def test_health_is_503_until_a_worker_is_ready() -> None:
    with Served(*FAKE, "--fake-load-time", "300") as served:
        line = served.wait_for_line("listening on http://")
        served.url = "http://" + line.rpartition("http://")[2].split()[0]
        served.wait_for_line("worker 0: started")
        assert served.get("/health")[0] == 503
        assert served.get("/live")[0] == 200


def test_each_event_of_a_start_and_an_end_has_one_line_in_the_log() -> None:
    with Served(*FAKE, "--dp-size", "2") as served:
        served.wait_until_ready()
        served.signal(signal.SIGTERM)
        assert served.exit_status() == 0
        for owner in (0, 1):
            told = [line for line in served.lines if re.search(rf"(worker|owner) {owner}: ", line)]
            words = [line.partition(f"r {owner}: ")[2].split()[0].strip(",") for line in told]
            assert words == ["started", "ready", "pid"], told
        assert len([line for line in served.lines if "draining" in line]) == 1


def test_no_process_outlives_a_killed_controller(two_slow_owners: Served) -> None:
    served = two_slow_owners
    workers = served.workers()
    assert len(workers) == 2
    served.signal(signal.SIGKILL)
    wait_until(lambda: not any(map(alive, workers)), "its workers are gone")
    port = served.url.rpartition(":")[2]
    with Served(*FAKE, "--port", port) as again:
        again.wait_until_ready()


def test_no_process_outlives_a_controller_killed_during_the_load() -> None:
    with Served(*FAKE, "--fake-load-time", "300") as served:
        served.wait_for_line("worker 0: started")
        workers = served.workers()
        assert workers
        served.signal(signal.SIGKILL)
        wait_until(lambda: not any(map(alive, workers)), "its workers are gone")


def test_a_killed_worker_is_replaced_and_the_other_streams_on(two_slow_owners: Served) -> None:
    served = two_slow_owners
    untouched = Client(served, routed_dp_rank=1)
    assert untouched.first.wait(DEADLINE_S)
    _, info = served.get("/server_info")
    pids = {state["dp_rank"]: state["pid"] for state in info["owners"]}
    psutil.Process(pids[0]).kill()

    def replaced() -> bool:
        _, now = served.get("/server_info")
        states = {state["dp_rank"]: state for state in now["owners"]}
        return states[0]["pid"] not in (None, pids[0]) and states[0]["status"] == "ready"

    wait_until(replaced, "another worker in its place")
    events = untouched.wait()
    assert events[-1] == "[DONE]"
    assert not [event for event in events if "error" in event]
    status, _ = served.post(
        "/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": 4, "routed_dp_rank": 0}
    )
    assert status == 200
    served.signal(signal.SIGTERM)
    assert served.exit_status() == 0


def test_a_port_in_use_is_one_sentence_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with Served(*FAKE, "--port", port) as served:
            assert served.exit_status() == 2
            (line,) = served.lines
            assert line.startswith(f"mlx-dp: error: port {port} on 127.0.0.1 is in use")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--dp", "2", "--tp", "2"), "--tp-size 2 needs --enable-dp-attention"),
        pytest.param(
            ("--load-balance-method", "x"),
            "--load-balance-method 'x' is unknown",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--dp", "4", "--enable-dp-attention", "--max-mamba-cache-size", "15", "--fake-hybrid"),
            "--max-mamba-cache-size 15 leaves 3",
            marks=pytest.mark.slow,
        ),
        (("--fake-pool-tokens", "1"), "a pool of 1 KV tokens backs no request"),
    ],
)
def test_a_refusal_is_one_sentence_and_starts_nothing(
    arguments: tuple[str, ...], sentence: str
) -> None:
    with Served(*FAKE, *arguments) as served:
        assert served.exit_status() == 2
        (line,) = served.lines
        assert line.startswith(f"mlx-dp: error: {sentence}")


def test_a_model_that_is_not_there_is_one_sentence() -> None:
    with Served("--model", "/nonexistent/model") as served:
        assert served.exit_status() == 2
        (line,) = served.lines
        assert line == "mlx-dp: error: --model /nonexistent/model does not exist: check the path"


def test_an_open_endpoint_without_a_key_is_warned_of() -> None:
    with Served(*FAKE, "--host", "0.0.0.0") as served:
        served.wait_until_ready()
        assert [line for line in served.lines if "--api-key" in line]
    with Served(*FAKE, "--host", "0.0.0.0", environment={"MLX_DP_API_KEY": "k"}) as served:
        served.wait_until_ready()
        assert not [line for line in served.lines if "--api-key" in line]
        assert served.get("/v1/models")[0] == 401


@pytest.mark.parametrize(("mode", "slots"), [((), 8), (("--enable-dp-attention",), 2)])
def test_owners_serve_with_their_share_of_the_limit(mode: tuple[str, ...], slots: int) -> None:
    if mode:
        mode = (*mode, "--tp-size", "4")
    with Served(*FAKE, "--dp-size", "4", "--max-running-requests", "8", *mode) as served:
        served.wait_until_ready()
        _, loads = served.get("/v1/loads")
        assert [load["max_running_requests"] for load in loads["loads"]] == [slots] * 4


def test_the_last_workers_end_is_reported_in_one_sentence() -> None:
    with Served(*FAKE, "--max-restarts", "0") as served:
        served.wait_until_ready()
        (worker,) = served.workers()
        worker.kill()
        assert served.exit_status() == 1
        (sentence,) = [line for line in served.lines if line.startswith("mlx-dp: error: ")]
        assert "SIGKILL" in sentence
        assert "Traceback" not in served.output


def test_the_service_outlives_the_reader_of_its_logs() -> None:
    with Served(*FAKE, "--log-level", "debug") as served:
        served.wait_until_ready()
        assert served.process.stdout is not None
        os.dup2(os.open(os.devnull, os.O_RDONLY), served.process.stdout.fileno())
        (worker,) = served.workers()
        worker.kill()
        wait_until(lambda: served.get("/health")[0] == 503, "the loss is seen")
        wait_until(lambda: served.get("/health")[0] == 200, "a worker is back")
        served.signal(signal.SIGTERM)
        assert served.exit_status() == 0
