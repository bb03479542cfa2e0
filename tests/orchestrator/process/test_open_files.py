"""The limit of open files."""

import resource

import pytest

from mlx_dp.orchestrator.process import open_files
from mlx_dp.orchestrator.process.open_files import WANTED, raise_open_files

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
    """``most``: what the system takes, whatever its hard limit says."""
    limits = [(soft, hard)]

    def set_limits(_: int, wanted: tuple[int, int]) -> None:
        if most != INFINITE and wanted[0] > most:
            raise ValueError("not allowed")
        limits.append(wanted)

    monkeypatch.setattr(open_files.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(open_files.resource, "setrlimit", set_limits)
    assert raise_open_files() == found
    assert limits[-1] == (found, hard)
