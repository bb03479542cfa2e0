"""Errors that cross the borders of folders."""


class ConfigError(Exception):
    """The configuration does not allow a start.

    Raised before any request is served, by both processes. The message is one sentence in the
    user's own terms: the flag, its value, and what would work. It is printed without a traceback,
    and does not cause a restart.
    """


class ProtocolError(Exception):
    """A frame or a message broke the protocol between controller and worker.

    It says nothing about the request it names: the sender is at fault, not the client.
    """
