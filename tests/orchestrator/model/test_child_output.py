import os
import re
import subprocess
import sys

import psutil
import pytest

from mlx_dp.orchestrator.model.child_output import run_child
from mlx_dp.proto.errors import ConfigError


def test_json_lines_arrive_in_order_and_other_output_is_ignored(fake_python):
    fake_python(
        """echo '{"done": 1}'; echo noise; echo '{not json'; echo "{\\"args\\": \\"$*\\"}" """
    )
    lines = []
    run_child(["convert", "a", "b"], lines.append)
    assert lines[0] == {"done": 1}
    watch = rf"--parent-pid {os.getpid()} --death-fd \d+"
    assert re.fullmatch(rf"-m mlx_dp\.worker convert {watch} a b", lines[1]["args"])


def test_an_error_line_becomes_the_error(fake_python):
    fake_python("""echo '{"error": "no such tensor"}'; exit 1""")
    with pytest.raises(ConfigError, match=r"^no such tensor$"):
        run_child(["convert"], lambda line: None)


def test_a_crash_is_told_with_its_last_words(fake_python):
    fake_python("echo first >&2; echo boom >&2; exit 3")
    with pytest.raises(ConfigError, match="'convert' failed with status 3: boom"):
        run_child(["convert"], lambda line: None)


def test_a_kill_is_told_with_the_memory_hint(fake_python):
    fake_python("kill -9 $$")
    with pytest.raises(ConfigError, match=r"signal 9 \(9 is often a lack of memory\)"):
        run_child(["probe"], lambda line: None)


def test_a_child_that_hangs_is_stopped(fake_python):
    fake_python("exec sleep 600")
    with pytest.raises(ConfigError, match=r"'probe' took longer than 0\.2 s"):
        run_child(["probe"], lambda line: None, timeout_s=0.2)


def test_an_error_of_ours_ends_the_child(fake_python):
    fake_python("""echo '{"pid": '$$'}'; exec sleep 600""")

    def fail(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_child(["convert"], fail)


@pytest.mark.system
@pytest.mark.mlx
def test_a_child_ends_with_a_parent_that_is_killed(tmp_path):
    # Reading the configuration blocks for ever, as a long conversion would.
    os.mkfifo(tmp_path / "config.json")
    body = (
        "import sys; from mlx_dp.orchestrator.model.child_output import run_child; "
        "run_child(['probe', sys.argv[1]], print)"
    )
    with subprocess.Popen([sys.executable, "-c", body, str(tmp_path)]) as parent:
        try:
            child = _wait_for_child(parent.pid)
        finally:
            parent.kill()
    gone, left = psutil.wait_procs([child], timeout=200.0)
    for orphan in left:
        orphan.kill()
    assert gone == [child], left


def _wait_for_child(pid):
    """Wait until the child reads its model, so that the parent watch is in place."""
    parent = psutil.Process(pid)
    while True:
        for child in parent.children():
            if "probe" in child.cmdline() and child.num_threads() > 1:
                return child
