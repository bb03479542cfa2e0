"""A step under way on the device."""

from dataclasses import dataclass

from mlx_dp.proto.messages import TokenLogprob
from mlx_dp.worker.sampling import SampledStep


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """What a step draws, still lazy: row ``i`` belongs to ``keys[i]``."""

    keys: tuple[int, ...]
    sampled: SampledStep

    def read(self) -> list[tuple[int, int, TokenLogprob | None]]:
        """Wait for the device; return (key, token, log-probability) of every row."""
        tokens: list[int] = self.sampled.tokens.tolist()  # type: ignore[assignment]
        logprobs = self.sampled.read_logprobs()
        return [
            (key, token, logprobs.get(row))
            for row, (key, token) in enumerate(zip(self.keys, tokens, strict=True))
        ]
