"""No code of ours unpickles: a message from outside must never be able to run code.

ruff's S301 and TID251 see ``pickle`` itself; this finds its relatives, in the source text.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parent.parent

MODULES: Final = frozenset(
    {
        "pickle",
        "_pickle",
        "pickletools",
        "cloudpickle",
        "dill",
        "joblib",
        "marshal",
        "shelve",
        # Both unpickle whatever arrives on their socket.
        "multiprocessing.connection",
        "multiprocessing.managers",
    }
)
# Methods of pyzmq, and an argument of numpy.load.
NAMES: Final = frozenset({"recv_pyobj", "send_pyobj", "allow_pickle"})
CALLS: Final = frozenset({"torch.load"})


def is_banned_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def unpickling(source: str) -> Iterator[str]:
    """Everything in ``source`` that may unpickle: modules, names, calls, and such strings."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                found = [alias.name for alias in node.names if is_banned_module(alias.name)]
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{alias.name}" for alias in node.names]
                found = [name for name in names if is_banned_module(name) or name in CALLS]
            case ast.Attribute(attr=name) if name in NAMES or ast.unparse(node) in CALLS:
                found = [name]
            case ast.Name(id=name) if name in NAMES:
                found = [name]
            case ast.keyword(arg=str(name)) if name in NAMES:
                found = [name]
            case ast.Constant(value=str(name)) if name in NAMES or is_banned_module(name):
                found = [name]
            case _:
                found = []
        yield from found


def test_nothing_unpickles() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for folder in ("orchestrator", "worker", "kvcache", "proto", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in unpickling(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import cloudpickle as cp",
        "from dill import loads",
        "def f():\n    from marshal import loads",
        "import os, shelve",
        "from multiprocessing import connection",
        "from multiprocessing.connection import Client",
        "importlib.import_module('pickle')",
        "message = socket.recv_pyobj()",
        "getattr(socket, 'send_pyobj')(1)",
        "import torch\ntorch.load(path)",
        "from torch import load",
        "np.load(path, allow_pickle=True)",
        "options = {'allow_pickle': True}",
    ],
)
def test_a_planted_unpickling_is_found(source: str) -> None:
    assert list(unpickling(source))


@pytest.mark.parametrize(
    "source",
    [
        "'''Never pickle: messages are msgpack.'''",
        "import multiprocessing",
        "import marshalled",
        "mx.load(path)",
        "torch.loads",
    ],
)
def test_what_does_not_unpickle_passes(source: str) -> None:
    assert not list(unpickling(source))
