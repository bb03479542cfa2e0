"""Two instances behind nginx, with the configuration that LOAD_BALANCERS.md gives."""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.support.hosts.served import Served, wait_until

pytestmark = pytest.mark.system

PAGE: Final = Path(__file__).resolve().parents[2] / "LOAD_BALANCERS.md"
NGINX: Final = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
INSTANCE: Final = ("--engine", "fake", "--fake-decode-rate", "50", "--max-running-requests", "8")
COMPLETION: Final = {"model": "fake", "prompt": "hello", "ignore_eos": True}


class Balanced:
    """Two instances and the nginx in front of them."""

    def __init__(self, port: int, instances: list[Served]) -> None:
        self.port = port
        self.instances = instances

    def running(self) -> int:
        loads = [instance.get("/v1/loads")[1] for instance in self.instances]
        return sum(int(load["aggregate"]["total_running_reqs"]) for load in loads)

    def ask(self, *, stream: bool, max_tokens: int) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=200.0)
        body = json.dumps({**COMPLETION, "stream": stream, "max_tokens": max_tokens})
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request("POST", "/v1/completions", body, headers | {"X-Request-Id": "mine"})
        return connection.getresponse()


def configuration(folder: Path, port: int, instances: list[Served]) -> str:
    """The document's own example, with other ports, as a process of this test only."""
    [example] = re.findall(r"^```nginx\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    addresses = {"8000": str(port)}
    for name, instance in zip(("8001", "8002"), instances, strict=True):
        addresses[name] = instance.url.rpartition(":")[2]
    for name, number in addresses.items():
        assert f"127.0.0.1:{name}" in example
        example = example.replace(f"127.0.0.1:{name}", f"127.0.0.1:{number}")
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    return (
        "daemon off; master_process off;\n"
        f"pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}\n{example}\n}}\n"
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1.0).close()
    except OSError:
        return False
    return True


@pytest.fixture
def balanced(tmp_path: Path) -> Iterator[Balanced]:
    if NGINX is None:
        pytest.skip("nginx is not installed")
    with ExitStack() as stack:
        instances = [stack.enter_context(Served(*INSTANCE)) for _ in range(2)]
        for instance in instances:
            instance.wait_until_ready()
        port = free_port()
        file = tmp_path / "nginx.conf"
        file.write_text(configuration(tmp_path, port, instances))
        nginx = subprocess.Popen(
            [NGINX, "-p", str(tmp_path), "-c", str(file)], stderr=subprocess.DEVNULL
        )
        stack.callback(nginx.wait)
        stack.callback(nginx.kill)
        wait_until(lambda: answers(port), "nginx listens")
        yield Balanced(port, instances)


def test_events_come_one_by_one_and_a_client_that_leaves_frees_its_slot(
    balanced: Balanced,
) -> None:
    with balanced.ask(stream=True, max_tokens=4000) as answer:
        assert answer.status == 200
        assert answer.headers.get_all("X-Request-Id") == ["mine"]
        # 4,000 tokens take 80 s: events that arrive now arrive while they are generated.
        assert answer.readline().startswith(b"data: ")
        wait_until(lambda: balanced.running() == 1, "the request runs")
    wait_until(lambda: balanced.running() == 0, "its slot is free")


def test_an_instance_that_drains_loses_no_request(balanced: Balanced) -> None:
    ends: list[tuple[int, bool]] = []

    def ask(number: int) -> None:
        stream = number % 2 == 0
        with balanced.ask(stream=stream, max_tokens=5) as answer:
            ends.append((answer.status, not stream or answer.read().endswith(b"[DONE]\n\n")))

    # A long response holds the drain open, so that both its refusals and its exit are met.
    leaving = balanced.instances[0]
    held = threading.Thread(target=lambda: list(leaving.stream({**COMPLETION, "max_tokens": 50})))
    held.start()
    wait_until(lambda: balanced.running() == 1, "the long answer runs")
    clients = [threading.Thread(target=ask, args=(number,)) for number in range(40)]
    for number, client in enumerate(clients):
        if number == 5:
            leaving.signal(signal.SIGTERM)
        client.start()
        client.join(0.05)
    for thread in (*clients, held):
        thread.join(30.0)
        assert not thread.is_alive()
    assert ends == [(200, True)] * len(clients)
    assert leaving.exit_status() == 0
