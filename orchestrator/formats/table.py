"""The table of API formats. A new one is a folder beside the others and a row here."""

from collections.abc import Sequence
from typing import Any

from mlx_dp.orchestrator.formats.common.api_format import ApiFormat, Endpoint
from mlx_dp.orchestrator.formats.openai.openai_format import OpenAiFormat


class FormatTable:
    """Formats by route. The first one also serves routes that belong to no format. Immutable."""

    def __init__(self, formats: Sequence[ApiFormat]) -> None:
        self.default = formats[0]
        self.endpoints: tuple[Endpoint[Any], ...] = tuple(
            endpoint for each in formats for endpoint in each.endpoints
        )
        self._by_path = {endpoint.path: each for each in formats for endpoint in each.endpoints}
        assert len(self._by_path) == len(self.endpoints), "two formats share a path"

    @property
    def paths(self) -> frozenset[str]:
        """The routes that generate text."""
        return frozenset(self._by_path)

    def format_for(self, path: str) -> ApiFormat:
        """Return the format of a route: an endpoint's own path, or one below it."""
        while path:
            if path in self._by_path:
                return self._by_path[path]
            path = path.rpartition("/")[0]
        return self.default


def api_formats() -> FormatTable:
    """Return all formats that the server speaks."""
    return FormatTable((OpenAiFormat(),))
