"""Standard error that is not read, that is full, or whose reader comes back."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from mlx_dp.orchestrator.process.log_stream import DroppingStream

DEADLINE_S = 30.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue


def read_all(descriptor: int, until: bytes) -> bytes:
    said = b""
    while until not in said:
        said += os.read(descriptor, 65_536)
    return said


def test_what_is_written_arrives_in_order_and_at_once(pipe: tuple[int, int]) -> None:
    stream = DroppingStream(pipe[1])
    for number in range(1000):
        print("line", number, file=stream)
    assert stream.drain(DEADLINE_S)
    assert read_all(pipe[0], b"line 999\n").splitlines()[-1] == b"line 999"
    assert stream.dropped_lines == 0


def test_an_unread_pipe_stalls_nothing_and_lost_lines_are_counted(
    pipe: tuple[int, int],
) -> None:
    stream = DroppingStream(pipe[1], max_nbytes=10_000)
    began_s = time.monotonic()
    for number in range(20_000):
        stream.write(f"line {number:06}\n")
    assert time.monotonic() - began_s < DEADLINE_S
    assert not stream.drain(0.01), "no reader"
    dropped = stream.dropped_lines
    assert dropped > 10_000
    said = read_all(pipe[0], b"line 019999\n").decode().splitlines()
    # Each line is either there or counted, the last ones are there, and each gap is reported.
    notices = [line for line in said if "dropped here" in line]
    lines = [line for line in said if line.startswith("line")]
    assert len(lines) + dropped == 20_000
    assert sum(int(line.split()[2]) for line in notices) == dropped
    assert lines == sorted(lines)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_raises_nothing() -> None:
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = DroppingStream(descriptor)
    stream.write("one\ntwo\n")
    assert stream.drain(DEADLINE_S)
    assert stream.dropped_lines == 2
    os.close(descriptor)


def test_words_reach_a_reader_that_comes_back(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    stream = DroppingStream(writing)
    os.close(reading)
    stream.write("lost\n")
    assert stream.drain(DEADLINE_S)
    fresh, again = os.pipe()
    os.dup2(again, writing)
    stream.write("heard\n")
    said = read_all(fresh, b"heard\n").decode()
    assert "1 line was dropped here" in said and said.endswith("heard\n")
    assert stream.dropped_lines == 1
    os.close(fresh)
    os.close(again)


def test_a_file_that_others_have_made_non_blocking_is_waited_for(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.set_blocking(writing, False)
    stream = DroppingStream(writing)
    text = "x" * 200_000 + "\n"
    stream.write(text)
    assert not stream.drain(0.01)
    assert read_all(reading, b"\n").decode() == text
    assert stream.drain(DEADLINE_S)
    assert stream.dropped_lines == 0


def test_the_shared_file_stays_as_it_is(pipe: tuple[int, int]) -> None:
    stream = DroppingStream(pipe[1])
    stream.write("x\n")
    assert stream.drain(DEADLINE_S)
    assert os.get_blocking(pipe[1]), "the shell and others write to the same file"


def test_it_may_be_written_in_the_middle_of_a_write(pipe: tuple[int, int]) -> None:
    """As signal handlers and finalizers do, in the same thread."""
    stream = DroppingStream(pipe[1])
    with stream._changed:
        stream.write("inner\n")
    assert read_all(pipe[0], b"\n") == b"inner\n"


def test_characters_that_no_encoding_has_are_escaped(pipe: tuple[int, int]) -> None:
    stream = DroppingStream(pipe[1])
    stream.write("é \ud800\n")
    assert read_all(pipe[0], b"\n").decode() == "é \\ud800\n"


CLOSED = """
import os, sys
for descriptor in (0, 1, 2):
    os.close(descriptor)
from mlx_dp.orchestrator.process.log_stream import open_standard_descriptors
open_standard_descriptors()
reading, writing = os.pipe()
os._exit(10 * reading + writing)
"""


def test_closed_standard_descriptors_are_not_given_to_the_next_file() -> None:
    assert subprocess.run([sys.executable, "-c", CLOSED]).returncode == 34


def test_threads_write_whole_lines(pipe: tuple[int, int]) -> None:
    stream = DroppingStream(pipe[1])

    def write(name: str) -> None:
        for _ in range(200):
            stream.write(f"{name * 50}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stream.write("end\n")
    lines = read_all(pipe[0], b"end\n").decode().splitlines()
    assert lines.count("a" * 50) == lines.count("b" * 50) == 200
