"""Request /live of a service at intervals, from a process of its own.

Prints the seconds of each response, one per line, until it is terminated.
"""

import http.client
import sys
import time
from typing import Final

PAUSE_S: Final = 0.1
TIMEOUT_S: Final = 60.0


def ask(connection: http.client.HTTPConnection) -> float:
    """Return the seconds of one response. Raises OSError when the response is wrong."""
    began_s = time.monotonic()
    connection.request("GET", "/live")
    answer = connection.getresponse()
    answer.read()
    if answer.status != http.client.OK:
        raise OSError(f"GET /live returned {answer.status}")
    return time.monotonic() - began_s


def main(host: str, port: int) -> None:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    while True:
        print(ask(connection), flush=True)
        time.sleep(PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
