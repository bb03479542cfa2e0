"""Private directories for sockets, and who removes them."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.socket_directory import SocketDirectory

HOLD = """
import sys, time
from pathlib import Path
from mlx_dp.proto.socket_directory import SocketDirectory
print(SocketDirectory(Path(sys.argv[1])).path, flush=True)
time.sleep(60)
"""


def test_it_is_private_and_removed_at_close(tmp_path: Path) -> None:
    made = SocketDirectory(tmp_path)
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    (made.path / "workers").touch()
    made.close()
    made.close()
    assert os.listdir(tmp_path) == []


def test_two_of_them_live_side_by_side(tmp_path: Path) -> None:
    first, second = SocketDirectory(tmp_path), SocketDirectory(tmp_path)
    assert first.path != second.path
    assert first.path.exists()
    first.close()
    second.close()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mlx-dp-file").touch()
    (tmp_path / "mlx-dp-other").mkdir()
    (tmp_path / "mlx-dp-link").symlink_to(tmp_path / "mlx-dp-other")
    SocketDirectory(tmp_path).close()
    assert len(os.listdir(tmp_path)) == 3


def test_a_base_that_does_not_exist_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no socket directory can be made in"):
        SocketDirectory(tmp_path / "nowhere")


@pytest.mark.system
def test_a_killed_process_leaves_its_directory_to_the_next_start(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        path = Path(child.stdout.readline().strip())
        SocketDirectory(tmp_path).close()
        assert path.exists(), "the directory of a live process was swept"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert path.exists()
    SocketDirectory(tmp_path).close()
    assert not path.exists()
