"""ssh's messages about a host, with an ssh of the test's own in the PATH."""

import asyncio
import os
from pathlib import Path

import pytest

from mlx_dp.orchestrator.process.remote.host_login import describe_login, login_fault

PYTHON = "/opt/my env/bin/python"


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch):
    """An ssh that runs this script."""

    def make(script: str) -> Path:
        path = tmp_path / "ssh"
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n{script}\n')
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "calls"

    return make


def fault(*hosts: str) -> str | None:
    return asyncio.run(login_fault(hosts, PYTHON))


def test_each_other_host_is_asked_once_for_the_python_that_will_run_there(ssh) -> None:
    calls = ssh("exit 0")
    assert fault("mac1", "127.0.0.1", "user@mac2", "mac1") is None
    asked = "-o BatchMode=yes -o ConnectTimeout=10 -- {} test -x '/opt/my env/bin/python'"
    assert sorted(calls.read_text().splitlines()) == [
        asked.format("mac1"),
        asked.format("user@mac2"),
    ]


def test_the_words_of_ssh_are_said(ssh) -> None:
    ssh("echo 'Welcome!' >&2; echo 'me@mac2: Permission denied (publickey).' >&2; exit 255")
    assert fault("mac2") == (
        "ssh to mac2 failed (me@mac2: Permission denied (publickey)): 'ssh mac2 true' must work on "
        "this machine without a question, so try it in a terminal, or name another host in "
        "--hostfile"
    )


def test_a_host_without_our_python_is_told_so(ssh) -> None:
    ssh("exit 1")
    assert fault("mac2") == (
        f"mac2 has no {PYTHON}, which --hostfile starts there: install mlx-dp at the same place "
        "on every host"
    )


def test_a_machine_without_ssh_is_told_so(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = fault("mac2")
    assert said is not None
    assert said.startswith("ssh cannot be started, which --hostfile needs: ")


def test_silence_and_no_reason_are_said_as_such() -> None:
    assert "ssh to m did not end within 30 s" in str(describe_login("m", PYTHON, None, ""))
    assert "(it gave no reason)" in str(describe_login("m", PYTHON, 255, "\n"))
