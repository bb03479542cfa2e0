"""The worker as the controller starts it: a real process with a real socket."""

import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from mlx_dp.proto.exit_codes import ExitCode
from mlx_dp.proto.messages.commands import EngineKind, FakeEngineOptions, Shutdown, Submit
from mlx_dp.proto.messages.events import (
    Accepted,
    Failed,
    FailureKind,
    Finished,
    FinishReason,
    Heartbeat,
    Hello,
    Ready,
    Tokens,
)

pytestmark = pytest.mark.system


def test_two_of_four_attention_owners_get_two_slots_each(
    controller, worker_process, shares, start_message
) -> None:
    slices = shares(dp_size=4, dp_attention=True, requests=8)
    for share in (slices[0], slices[3]):
        process = worker_process(f"w{share.owner}-test")
        assert controller.receive_until(Hello).pid == process.pid
        controller.send(start_message(share))
        assert controller.receive_until(Ready).capacity.request_slots == 2
        controller.send(Shutdown())
        assert process.wait(timeout=200) == ExitCode.OK


def test_a_hybrid_owner_gets_one_request_and_four_auxiliary_slots(
    controller, worker_process, shares, start_message
) -> None:
    share = shares(dp_size=4, dp_attention=True, requests=8, auxiliary=16)[0]
    worker_process()
    controller.receive_until(Hello)
    controller.send(start_message(share, fake=FakeEngineOptions(hybrid=True)))
    capacity = controller.receive_until(Ready).capacity
    assert (capacity.request_slots, capacity.auxiliary_slots) == (1, 4)


def test_a_refused_start_says_why_without_a_traceback(
    controller, worker_process, shares, start_message
) -> None:
    share = shares(dp_size=4, dp_attention=True, requests=8, auxiliary=15)[0]
    process = worker_process()
    controller.receive_until(Hello)
    controller.send(start_message(share, fake=FakeEngineOptions(hybrid=True)))
    while isinstance(message := controller.receive(), Heartbeat):
        pass
    assert isinstance(message, Failed)
    assert message.kind is FailureKind.CONFIG
    assert "15 leaves 3" in message.message
    assert "at least 16" in message.message
    _, errors = process.communicate(timeout=200)
    assert process.returncode == ExitCode.CONFIG
    assert "Traceback" not in errors


def test_a_request_runs_to_its_end(controller, worker_process, shares, start_message) -> None:
    (share,) = shares(requests=4)
    worker_process()
    controller.receive_until(Hello)
    controller.send(start_message(share))
    controller.receive_until(Ready)
    controller.send(Submit(request_id=7, epoch=1, prompt_ids=(72, 105), max_tokens=30))
    assert controller.receive_until(Accepted).slot == 0
    answer: list[int] = []
    while len(answer) < 30:
        (chunk,) = controller.receive_until(Tokens).chunks
        assert chunk.index == len(answer)
        answer.extend(chunk.ids)
    finished = controller.receive_until(Finished)
    assert (finished.reason, finished.num_tokens) == (FinishReason.LENGTH, 30)
    assert all(len(word) == 5 for word in bytes(answer).decode().split())


@pytest.mark.parametrize(
    ("busy", "number"),
    [
        (True, signal.SIGINT),
        (True, signal.SIGHUP),
        (False, signal.SIGTERM),
        pytest.param(True, signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(False, signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(False, signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_what_is_sent_to_a_whole_service_is_not_for_its_workers(
    busy: bool, number: signal.Signals, controller, worker_process, shares, start_message
) -> None:
    (share,) = shares(requests=4)
    process = worker_process()
    # While it is being started, and while it serves.
    controller.receive_until(Hello)
    process.send_signal(number)
    controller.send(start_message(share, fake=FakeEngineOptions(decode_tokens_per_s=100.0)))
    controller.receive_until(Ready)
    if busy:
        controller.send(Submit(request_id=1, epoch=1, prompt_ids=(1,), max_tokens=8_000))
        controller.receive_until(Tokens)
    process.send_signal(number)
    controller.receive_until(Tokens if busy else Heartbeat)
    controller.receive_until(Tokens if busy else Heartbeat)
    controller.send(Shutdown())
    assert process.wait(timeout=200) == ExitCode.OK


def test_a_worker_that_prints_more_than_is_read_goes_on(
    controller, worker_process, shares, start_message
) -> None:
    (share,) = shares(requests=4)
    process = worker_process()
    controller.receive_until(Hello)
    controller.send(start_message(share))
    controller.receive_until(Ready)
    # It warns of each, and its output is not read: several times the capacity of a pipe.
    for _ in range(3_000):
        controller.send(start_message(share))
    controller.send(Submit(request_id=7, epoch=1, prompt_ids=(72, 105), max_tokens=3))
    controller.receive_until(Finished)
    controller.send(Shutdown())
    _, errors = process.communicate(timeout=200)
    assert process.returncode == ExitCode.OK
    assert errors.count("ignored a second Start") < 3_000


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGUSR1])
def test_a_worker_shows_its_stacks_when_it_is_ended_for_a_hang_or_asked(
    number: signal.Signals, controller, worker_process, shares, start_message
) -> None:
    (share,) = shares()
    process = worker_process()
    controller.receive_until(Hello)
    controller.send(start_message(share))
    controller.receive_until(Ready)
    process.send_signal(number)
    while "most recent call first" not in (line := process.stderr.readline()):
        assert line, "the worker ended without a word"
    if number is signal.SIGABRT:
        assert process.wait(timeout=200) == -signal.SIGABRT
    else:
        controller.send(Submit(request_id=7, epoch=1, prompt_ids=(72, 105), max_tokens=3))
        controller.receive_until(Finished)


def test_a_missing_model_ends_the_start_with_a_sentence(
    controller, worker_process, shares, start_message
) -> None:
    (share,) = shares()
    process = worker_process()
    controller.receive_until(Hello)
    start = replace(start_message(share), engine=EngineKind.MLX, model_path="/nowhere/at/all")
    controller.send(start)
    while isinstance(message := controller.receive(), Heartbeat):
        pass
    assert isinstance(message, Failed)
    assert "/nowhere/at/all" in message.message
    assert process.wait(timeout=200) == ExitCode[message.kind.name]


FAKE_LIFE = """
import sys
from mlx_dp.proto.messages.commands import EngineKind, Shutdown, Start, Submit
from mlx_dp.proto.capacity.ownership import OwnerSlice
from mlx_dp.proto.capacity.parallel import ParallelState
from mlx_dp.worker.startup import run_worker

start = Start(
    engine=EngineKind.FAKE, model_path="", share=OwnerSlice(parallel=ParallelState()),
    memory_nbytes=None, context_length=None, chunked_prefill_size=512, prefix_cache=True,
    heartbeat_interval_s=1.0,
)
submit = Submit(request_id=1, epoch=1, prompt_ids=(1, 2), max_tokens=5)

class Wire:
    congested = False
    malformed_frames = 0
    commands = [[start], [submit], [], [], [], [], [], [], [Shutdown()]]
    heard = []
    def send(self, message): self.heard.append(message.tag)
    def drain(self): return self.commands.pop(0)
    def wait(self, timeout_s): return True

run_worker(Wire())
assert Wire.heard.count("tokens") == 5 and "finished" in Wire.heard, Wire.heard
print(sorted({"mlx", "mlx_lm", "numpy", "transformers"} & set(sys.modules)))
"""


def test_a_life_with_the_fake_engine_loads_no_device_library() -> None:
    lived = subprocess.run([sys.executable, "-c", FAKE_LIFE], capture_output=True, text=True)
    assert lived.stderr == ""
    assert lived.stdout.strip() == "[]"


def test_the_parent_watch_stands_before_any_library_is_loaded() -> None:
    script = (
        "import sys\n"
        "import mlx_dp.worker.__main__\n"
        "print(sorted({'mlx', 'zmq', 'msgspec', 'psutil'} & set(sys.modules)))"
    )
    listed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert listed.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_help_is_given(arguments: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "mlx_dp.worker", *arguments], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert "usage: python -m mlx_dp.worker" in shown.stdout


@pytest.mark.parametrize("arguments", [[], ["serve"], ["dance"]])
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str]) -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "mlx_dp.worker", *arguments], capture_output=True, text=True
    )
    assert shown.returncode == ExitCode.USAGE
