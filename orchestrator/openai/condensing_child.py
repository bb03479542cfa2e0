"""Condenses one body from stdin to stdout: a process of its own."""

import signal
import sys
from typing import Final

import msgspec

from mlx_dp.orchestrator.openai.condensed_body import KINDS, condense

LIMIT_S: Final = 20


def main() -> None:
    # The default action ends the process even inside the parser.
    signal.alarm(LIMIT_S)
    [kind] = sys.argv[1:]
    assert kind in KINDS, kind
    condensed = condense(kind, sys.stdin.buffer.read())
    sys.stdout.buffer.write(msgspec.msgpack.encode(condensed))


if __name__ == "__main__":
    main()
