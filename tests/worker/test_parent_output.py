"""A worker's output while its controller does not read it."""

import os
import time

from mlx_dp.worker.parent_output import ParentOutput


def test_an_unread_pipe_costs_a_moment_once_and_lost_output_is_reported() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    output = ParentOutput(writing)
    began_s = time.monotonic()
    for number in range(10_000):
        print(f"line {number:06}", file=output)
    # 10,000 waits of 50 ms would be 500 s.
    assert time.monotonic() - began_s < 60.0
    said = os.read(reading, 2**20)
    output.write("again\n")
    said += os.read(reading, 2**20)
    lines = said.decode().splitlines()
    assert lines[-1] == "again"
    (notice,) = [line for line in lines if "were dropped here" in line]
    whole = [line for line in lines if len(line) == len("line 000000")]
    assert int(notice.split()[0]) + len(whole) == 10_000
    os.close(reading)
    output.write("nobody is there\n")
    os.close(writing)


def test_a_burst_is_not_lost_while_the_reader_is_a_little_late() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    output = ParentOutput(writing)
    output.write("x" * 65_536)
    os.read(reading, 65_536)
    output.write("y\n")
    assert os.read(reading, 10) == b"y\n"
    os.close(reading)
    os.close(writing)
