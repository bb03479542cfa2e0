"""Parses the output of ``mlx.launch``: which node ended, and why."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from mlx_dp.orchestrator.process.remote.host_file import Host
from mlx_dp.orchestrator.process.remote.host_login import LOCAL_HOST
from mlx_dp.orchestrator.process.stop_signals import EXIT_CONFIG

_ESCAPES: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_NODE_ENDED: Final = re.compile(
    r"Node with rank (?P<rank>[0-9]{1,5}) (?:exited with code (?P<status>-?[0-9]{1,5})|was killed)"
)
_OWN_TRACE: Final = re.compile(r"Exception in thread \S+ \(_thread_fn\):")
"""mlx.launch fails to stop nodes that it has not heard of yet, or that have a terminal."""
_ERROR: Final = "mlx-dp: error: "
_CONNECTION_LOST: Final = 255
"""ssh's exit status when its connection was lost."""


def without_escapes(line: str) -> str:
    """The line without colours and cursor movements."""
    return _ESCAPES.sub("", line).rstrip()


@dataclass(slots=True)
class LaunchOutput:
    """The output of one run of the launcher. ``ended``: the first node that ended, or None."""

    hosts: Sequence[Host]
    ended: int | None = None
    status: int | None = None
    _refusal: str = ""
    _last: str = ""
    _tracing: bool = False

    def feed(self, line: str) -> bool:
        """Parse a line without escapes; return True if it is worth showing."""
        if self._track_traceback(line):
            return False
        found = _NODE_ENDED.search(line)
        if found is not None:
            if self.ended is None:
                self.ended = int(found["rank"])
                self.status = None if found["status"] is None else int(found["status"])
            return False
        if line.startswith(_ERROR):
            self._refusal = line.removeprefix(_ERROR)
        self._last = line or self._last
        return bool(line)

    def _track_traceback(self, line: str) -> bool:
        """Track the launcher's own tracebacks; return True for their lines."""
        if _OWN_TRACE.match(line):
            self._tracing = True
            return True
        if not self._tracing:
            return False
        # A traceback ends with the first line that is not indented.
        self._tracing = line.startswith((" ", "Traceback "))
        return True

    @property
    def final(self) -> bool:
        """A host refused its configuration, and would refuse it again."""
        return self.status == EXIT_CONFIG and bool(self._refusal)

    def cause(self, launcher_ending: str) -> str:
        """Say why this run ended. ``launcher_ending``: how the launcher itself ended."""
        if self.ended is None:
            said = f": {self._last}" if self._last else ""
            return f"mlx.launch {launcher_ending}{said}"
        host = self._host(self.ended)
        place = f"rank {self.ended} on {host}"
        if self.status == _CONNECTION_LOST and host != LOCAL_HOST:
            return f"{place}: its ssh connection was lost"
        how = "was killed" if self.status is None else f"exited with status {self.status}"
        said = f": {self._refusal}" if self._refusal else ", and its last lines say why"
        return f"{place}: mlx-dp worker {how}{said}"

    def _host(self, rank: int) -> str:
        return self.hosts[rank].ssh if rank < len(self.hosts) else "an unknown host"
