"""Imports modules of scripts/ as the commands do, from the repository's root."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest

from tests.support.hosts.script_modules import SCRIPTS


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module by its name after ``scripts.``. Each test has them anew."""
    monkeypatch.syspath_prepend(str(SCRIPTS.parent))
    before = set(sys.modules)
    yield lambda name: importlib.import_module(f"scripts.{name}")
    for name, module in tuple(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if name not in before and path is not None and path.startswith(f"{SCRIPTS}/"):
            del sys.modules[name]
