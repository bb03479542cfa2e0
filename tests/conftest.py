"""Fixtures for every folder of tests."""

import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import pytest

pytest_plugins = ["tests.support.models.model_fixtures", "tests.support.conformance.tables"]

# No test depends on how fast the machine is.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Children inherit ignored signals, as under nohup or behind a shell's &, and tests send these.
for _number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.SIG_DFL)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, whose paths hold 103 bytes on macOS: pytest's own take 57 there."""
    with TemporaryDirectory(prefix="t", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture
def low_descriptor_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that may have 1024 files open, and not more."""

    def refuse(_: int, wanted: tuple[int, int]) -> None:
        raise ValueError(f"not allowed to raise maximum limit to {wanted}")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    monkeypatch.setattr(resource, "setrlimit", refuse)
