"""Private directories for sockets, and their removal."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.wire.socket_directory import REFRESH_S, SocketDirectory, refresh_due

DAY_S = 86_400.0
HOLD = """
import sys, time
from pathlib import Path
from mlx_dp.proto.wire.socket_directory import SocketDirectory
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


@pytest.fixture
def made(tmp_path: Path) -> Iterator[SocketDirectory]:
    directory = SocketDirectory(tmp_path)
    yield directory
    directory.close()


@pytest.mark.parametrize(
    ("age_s", "due"),
    [(0.0, False), (REFRESH_S - 1, False), (REFRESH_S, True), (4 * DAY_S, True), (-60.0, True)],
)
def test_times_are_refreshed_after_hours_and_where_the_clock_was_set_back(
    age_s: float, due: bool
) -> None:
    assert refresh_due(1000 * DAY_S, 1000 * DAY_S + age_s) is due


def test_all_that_lies_in_it_is_kept_in_use(made: SocketDirectory) -> None:
    for name in ("workers", "g0-1"):
        (made.path / name).touch()
    kept = [made.path, *made.path.iterdir()]
    assert len(kept) == 4
    began = time.time()
    for day in (1.0, 2.0, 4.0):
        now = began + day * DAY_S
        made.refresh(now)
        for path in kept:
            found = path.stat()
            assert (found.st_atime, found.st_mtime) == (pytest.approx(now), pytest.approx(now))
    made.refresh(now + REFRESH_S / 2)
    assert (made.path / "workers").stat().st_mtime == pytest.approx(now)


@pytest.mark.parametrize("whole", [True, False], ids=["directory", "lock"])
def test_what_was_removed_is_made_again_and_still_guarded(
    made: SocketDirectory, tmp_path: Path, whole: bool
) -> None:
    if whole:
        shutil.rmtree(made.path)
    else:
        (made.path / "lock").unlink()
    made.refresh(time.time())
    assert stat.S_IMODE(made.path.stat().st_mode) == 0o700
    assert os.listdir(made.path) == ["lock"]
    SocketDirectory(tmp_path).close()
    assert made.path.exists(), "the next start has swept it"
    made.close()
    assert os.listdir(tmp_path) == []


def test_a_name_that_is_taken_is_one_sentence(made: SocketDirectory) -> None:
    shutil.rmtree(made.path)
    made.path.touch()
    with pytest.raises(OSError, match=f"^the socket directory {made.path} is gone and cannot be"):
        made.refresh(time.time())
    made.path.unlink()


def test_nothing_is_made_again_after_the_end(made: SocketDirectory) -> None:
    made.close()
    made.refresh(time.time())
    assert not made.path.exists()


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
