"""System-dependent features also work without those that only Linux has."""

import subprocess
import sys

import pytest

from tests.support.hosts.script_modules import SCRIPTS

TESTS = SCRIPTS.parent / "tests"
STAGE = TESTS / "macos" / "stage.py"

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="macOS itself has nothing to imitate"),
]

QUICK = (
    "macos/test_absent.py",
    "orchestrator/process/test_launcher.py::test_a_killed_worker_is_noticed_and_reaped",
    "orchestrator/process/test_launcher.py::test_what_a_dead_worker_leaves_behind_goes_too",
    "orchestrator/http/connection/test_client_socket.py",
    "proto/wire/test_controller_channel.py::test_the_endpoint_is_private_and_removed_at_close",
    "proto/wire/test_controller_channel.py::test_two_channels_do_not_meet",
    "worker/test_parent_watch.py::test_siblings_are_gone_together",
    "system/test_serve.py::test_it_starts_serves_and_drains",
)


def test_the_quick_part_of_the_stage_passes() -> None:
    paths = [str(TESTS / name) for name in QUICK]
    done = subprocess.run(
        [sys.executable, str(STAGE), "-qx", *paths], capture_output=True, text=True, timeout=280.0
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runs inside the imitation" not in done.stdout, "it was not there"
