"""Causes and log lines from the launcher's printed output."""

import pytest

from mlx_dp.orchestrator.process.remote.host_file import Host
from mlx_dp.orchestrator.process.remote.launch_output import LaunchOutput, without_escapes

HOSTS = (Host(ssh="mac1"), Host(ssh="mac2"), Host(ssh="127.0.0.1"))
TRACE = """Exception in thread Thread-1 (_thread_fn):
Traceback (most recent call last):
  File "threading.py", line 1045, in _bootstrap_inner
    self.run()
  File "launch.py", line 97, in terminate
    c = run(
        ^^^^
subprocess.CalledProcessError: Command 'ssh mac1' returned non-zero exit status 1.
worker: hello"""


def heard(*lines: str) -> LaunchOutput:
    output = LaunchOutput(HOSTS)
    for line in lines:
        output.feed(without_escapes(line))
    return output


def test_colours_and_moves_of_the_cursor_are_taken_out() -> None:
    line = "\x1b[33m[WARN] Node with rank 1 \x1b[1;31mexited\x1b[0m with code 255 \x1b[0m\r"
    assert without_escapes(line) == "[WARN] Node with rank 1 exited with code 255"
    assert without_escapes("\x1b]0;title\x07text") == "text"


def test_the_first_node_that_ended_is_the_cause() -> None:
    output = heard(
        "\x1b[33m[WARN] Node with rank 1 exited with code 255 \x1b[0m",
        "\x1b[33m[WARN] Node with rank 0 was killed \x1b[0m",
    )
    assert (output.ended, output.status, output.final) == (1, 255, False)
    assert output.cause("exited with status 0 (ok)") == (
        "rank 1 on mac2: its ssh connection was lost"
    )


def test_the_last_words_of_a_worker_host_are_part_of_the_cause() -> None:
    output = heard(
        "mlx-dp: error: this machine has no model directory /m: give its own",
        "[WARN] Node with rank 0 exited with code 2",
    )
    assert output.final
    assert output.cause("x") == (
        "rank 0 on mac1: mlx-dp worker exited with status 2: this machine has no model directory "
        "/m: give its own"
    )


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("Node with rank 0 was killed", "rank 0 on mac1: mlx-dp worker was killed, and its last"),
        ("Node with rank 1 exited with code 5", "mlx-dp worker exited with status 5, and its"),
        ("Node with rank 2 exited with code 255", "on 127.0.0.1: mlx-dp worker exited with status"),
        ("Node with rank 9 exited with code 1", "rank 9 on an unknown host"),
    ],
)
def test_an_end_without_a_word_of_ours_may_be_mended_by_another_try(line, cause) -> None:
    output = heard(line)
    assert cause in output.cause("x")
    assert not output.final


def test_a_launcher_that_ends_by_itself_is_told_with_its_last_line() -> None:
    assert heard("", "usage: mlx.launch", "").cause("exited with status 2 (usage)") == (
        "mlx.launch exited with status 2 (usage): usage: mlx.launch"
    )
    assert heard().cause("killed by SIGKILL") == "mlx.launch killed by SIGKILL"


def test_the_launchers_own_tracebacks_are_not_shown() -> None:
    output = LaunchOutput(HOSTS)
    assert [line for line in TRACE.splitlines() if output.feed(line)] == ["worker: hello"]
