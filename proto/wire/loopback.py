"""Recognizes loopback hosts."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address or a name cannot be reached from another machine.

    Names are not looked up: one that begins with ``127.`` may belong to any host.
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
