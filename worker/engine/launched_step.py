"""A step under way on the device."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mlx_dp.proto.messages.events import TokenLogprob
from mlx_dp.worker.sampling.sampler import SampledStep


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """The draws of a step, still lazy: row ``i`` belongs to ``keys[i]``.

    ``faults`` has the reason, by key, for rows that could not be sampled with their parameters.
    """

    keys: tuple[int, ...]
    sampled: SampledStep
    faults: Mapping[int, str] = field(default_factory=dict)

    def read_tokens(self) -> list[tuple[int, int]]:
        """Wait for the device; return (key, token) of every row."""
        tokens: list[int] = self.sampled.tokens.tolist()  # type: ignore[assignment]
        return list(zip(self.keys, tokens, strict=True))

    def read(self) -> list[tuple[int, int, TokenLogprob | None]]:
        """Wait for the device; return (key, token, log-probability) of every row."""
        logprobs = self.sampled.read_logprobs()
        return [
            (key, token, logprobs.get(row)) for row, (key, token) in enumerate(self.read_tokens())
        ]
