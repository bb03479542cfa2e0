"""Request /live of a service at intervals, from a process that does nothing else.

Prints the seconds that each answer took, one a line, until it is ended.
"""

import http.client
import sys
import time
from typing import Final

PAUSE_S: Final = 0.1
TIMEOUT_S: Final = 60.0


def ask(connection: http.client.HTTPConnection) -> float:
    """Return the seconds that an answer takes. Raises OSError where it is not the right one."""
    began_s = time.monotonic()
    connection.request("GET", "/live")
    answer = connection.getresponse()
    answer.read()
    if answer.status != http.client.OK:
        raise OSError(f"/live says {answer.status}")
    return time.monotonic() - began_s


def main(host: str, port: int) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    while True:
        print(ask(connection), flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
