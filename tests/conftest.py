"""Fixtures for every folder of tests."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

pytest_plugins = ["model_fixtures"]


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory for sockets, whose paths hold 103 bytes on macOS: pytest's own take 57 there."""
    with TemporaryDirectory(prefix="t", dir="/tmp") as path:
        yield Path(path)
