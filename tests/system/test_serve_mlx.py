"""The whole service on a real model: answers from two processes, and no orphan of a load."""

import signal
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.hosts.served import Served, alive, wait_until
from tests.support.models.tiny_models import DENSE

pytestmark = [pytest.mark.system, pytest.mark.mlx]

QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 8,
    "temperature": 0,
}


def loads_library(process: psutil.Process, name: str) -> bool:
    try:
        return any(name in entry.path for entry in process.memory_maps())
    except psutil.Error:
        return False


def test_two_processes_answer_alike_at_once(tmp_path: Path) -> None:
    model = DENSE["llama"].write(tmp_path / "model")
    with Served("--model", str(model), "--served-model-name", "demo", "--dp-size", "2") as served:
        served.wait_until_ready()
        answers: dict[int, Any] = {}

        def ask(rank: int) -> None:
            body = {**QUESTION, "ignore_eos": True, "routed_dp_rank": rank}
            answers[rank] = served.post("/v1/chat/completions", body)

        clients = [threading.Thread(target=ask, args=(rank,)) for rank in (0, 1)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60.0)
        said = []
        for rank in (0, 1):
            status, answer = answers[rank]
            assert status == 200, answer
            assert answer["usage"]["completion_tokens"] == QUESTION["max_tokens"]
            said.append(answer["choices"][0]["message"]["content"])
        assert said[0] == said[1]
        _, loads = served.get("/v1/loads")
        assert [load["status"] for load in loads["loads"]] == ["ready", "ready"]
        if sys.platform == "linux":
            # The controller itself must never open the device.
            assert not loads_library(psutil.Process(served.process.pid), "libmlx")
            assert all(loads_library(worker, "libmlx") for worker in served.workers())
        served.signal(signal.SIGTERM)
        assert served.exit_status() == 0


@pytest.mark.model
def test_the_demo_model_answers_in_english(demo_model_dir: Path) -> None:
    with Served("--model", str(demo_model_dir), "--served-model-name", "demo") as served:
        served.wait_until_ready()
        status, answer = served.post("/v1/chat/completions", QUESTION)
        assert status == 200, answer
        assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads what a process has mapped")
def test_no_worker_outlives_a_controller_killed_while_mlx_is_imported(
    tmp_path: Path,
) -> None:
    model = DENSE["llama"].write(tmp_path / "model")
    with Served("--model", str(model), "--dp-size", "2") as served:
        served.wait_for_line("worker 0: started")
        (worker,) = served.workers()
        wait_until(
            lambda: loads_library(worker, "mlx/core") or loads_library(worker, "libmlx"),
            "the import began",
        )
        served.signal(signal.SIGKILL)
        wait_until(lambda: not alive(worker), "its worker is gone")
