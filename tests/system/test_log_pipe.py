"""Standard error that is not read, closed or full: the service starts, serves and ends."""

import json
import os
import signal
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.hosts.served import COMMAND, DEADLINE_S, wait_until

pytestmark = pytest.mark.system

FAKE = ("--engine", "fake", "--dp-size", "2")


class Quiet:
    """A service whose log cannot be read: its port identifies it."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=DEADLINE_S) as answer:
            return str(answer.read().decode())

    def up(self) -> bool:
        assert self.process.poll() is None, self.process.returncode
        try:
            health = json.loads(self.get("/health"))
        except OSError:
            return False
        return len(health["owners"]) == 2 if "owners" in health else True

    def complete(self) -> None:
        body = json.dumps({"model": "fake", "prompt": "x", "max_tokens": 3}).encode()
        request = urllib.request.Request(
            self._url + "/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 3

    def dropped(self) -> float:
        (line,) = [
            line
            for line in self.get("/metrics").splitlines()
            if line.startswith("mlx_dp:log_lines_dropped_total")
        ]
        return float(line.split()[-1])


@contextmanager
def quiet(*arguments: str, redirection: str, stderr: int | None = None) -> Iterator[Quiet]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, *arguments, "--port", str(port)]
    process = subprocess.Popen(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *command],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
    )
    try:
        made = Quiet(port, process)
        wait_until(made.up, "it serves")
        yield made
    finally:
        process.kill()
        process.wait()


def test_an_unread_pipe_freezes_nothing_and_lost_lines_are_counted() -> None:
    reading, writing = os.pipe()
    with quiet(*FAKE, "--log-level", "debug", redirection="1>&2", stderr=writing) as served:
        os.close(writing)
        # An access line each: far more than the pipe and our buffer hold.
        long = "x" * 4_000
        for _ in range(120):
            assert json.loads(served.get(f"/health?{long}"))
        served.complete()
        wait_until(lambda: served.dropped() > 0, "lines are counted as dropped")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30.0) == 0
        said = b""
        while chunk := os.read(reading, 65_536):
            said += chunk
        assert b"listening on" in said
    os.close(reading)


def test_a_reader_that_comes_back_is_told_what_it_missed_and_the_last_words() -> None:
    reading, writing = os.pipe()
    with quiet(*FAKE, "--log-level", "debug", redirection="1>&2", stderr=writing) as served:
        os.close(writing)
        long = "x" * 4_000
        for _ in range(120):
            served.get(f"/health?{long}")
        assert served.dropped() > 0
        served.process.send_signal(signal.SIGTERM)
        with open(reading, "rb") as late:
            said = late.read().decode()
        assert served.process.wait(30.0) == 0
    assert "lines were dropped here" in said
    assert "draining 0 requests" in said


@pytest.mark.parametrize(
    "redirection",
    [
        pytest.param(
            "2>/dev/full >/dev/full",
            marks=pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full"),
        ),
        "2>&- >&- <&-",
        pytest.param("2>&1 | head -n 1", marks=pytest.mark.slow),
    ],
)
def test_it_starts_and_serves_with_a_broken_log(redirection: str) -> None:
    if "|" in redirection:
        # The shell's own pipe, whose reader ends after one line: SIGPIPE must not end the
        # service.
        head = subprocess.Popen(
            ["head", "-n", "1"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
        )
        assert head.stdin is not None
        with quiet(*FAKE, redirection="1>&2", stderr=head.stdin.fileno()) as served:
            head.stdin.close()
            head.wait(60.0)
            served.complete()
            served.process.send_signal(signal.SIGTERM)
            assert served.process.wait(60.0) == 0
        return
    with quiet(*FAKE, redirection=redirection) as served:
        served.complete()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60.0) == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_refusal_keeps_its_status_where_it_cannot_be_said() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run([*COMMAND, "--load-balance-method", "x"], stdout=full, stderr=full)
    assert ended.returncode == 2
