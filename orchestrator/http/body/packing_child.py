"""Packs one body from stdin to stdout, in a process of its own.

The argument is the body's model class, as ``module:name``.
"""

import importlib
import signal
import sys
from typing import Final

import msgspec
from pydantic import BaseModel

from mlx_dp.orchestrator.http.body.packed_body import pack

LIMIT_S: Final = 20


def class_path(kind: type[BaseModel]) -> str:
    """Return the argument that names a model class."""
    return f"{kind.__module__}:{kind.__qualname__}"


def main() -> None:
    # The default action ends the process even inside the parser.
    signal.alarm(LIMIT_S)
    [path] = sys.argv[1:]
    module, _, name = path.partition(":")
    kind: type[BaseModel] = getattr(importlib.import_module(module), name)
    packed = pack(kind, sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.msgpack.encode(packed))


if __name__ == "__main__":
    main()
