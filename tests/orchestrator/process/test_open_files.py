"""The limit of open files."""

import os
import resource
from collections.abc import Callable, Iterator

import pytest

from mlx_dp.orchestrator.process import open_files
from mlx_dp.orchestrator.process.open_files import WANTED, check_open_files, raise_open_files

INFINITE = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "most", "found"),
    [
        (256, INFINITE, INFINITE, WANTED),
        (256, INFINITE, 10_240, 10_240),
        (256, INFINITE, 0, 256),
        (1024, 4096, INFINITE, 4096),
        (4096, 4096, INFINITE, 4096),
        (1_000_000, 1_000_000, INFINITE, 1_000_000),
        (INFINITE, INFINITE, INFINITE, INFINITE),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, most: int, found: int
) -> None:
    """``most``: the system's own maximum, below any hard limit."""
    limits = [(soft, hard)]

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        if most != INFINITE and wanted[0] > most:
            raise ValueError("not allowed")
        limits.append(wanted)

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(open_files.resource, "setrlimit", set_limits)
    assert raise_open_files() == found
    assert limits[-1] == (found, hard)


@pytest.fixture
def leave_free() -> Iterator[Callable[[int], None]]:
    """Lower the limit so far that only this many more files can be opened."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count: int) -> None:
        taken = {int(name) for name in os.listdir("/dev/fd")}
        free = (number for number in range(limits[0]) if number not in taken)
        # The one that listed them is closed by now.
        last = [next(free) for _ in range(count)][-1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (last, limits[1]))

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_files_that_can_be_opened_are_told_from_such_that_cannot(
    leave_free: Callable[[int], None],
) -> None:
    leave_free(8)
    check_open_files(8)
    with pytest.raises(OSError, match="Too many open files"):
        check_open_files(9)
    # Neither has kept any.
    check_open_files(8)
