"""Routes that need no API key. All others do, unknown ones included."""

from typing import Final

OPEN_PATHS: Final = frozenset({"/live", "/health", "/metrics"})

# Routers read these before they send anything, and without the key.
METADATA_PATHS: Final = frozenset(
    {
        "/get_load",
        "/get_model_info",
        "/get_server_info",
        "/model_info",
        "/server_info",
        "/v1/loads",
        "/v1/models",
        "/version",
    }
)
_ONE_MODEL: Final = "/v1/models/"
_READING: Final = ("GET", "HEAD")


def is_open(method: str, path: str, *, open_metadata: bool) -> bool:
    if path in OPEN_PATHS:
        return True
    known = path in METADATA_PATHS or path.startswith(_ONE_MODEL)
    return open_metadata and known and method in _READING
