"""A GGUF file's tensors and metadata, read with types."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_dp.proto.errors import ConfigError


class GgufFile:
    """One GGUF file, as MLX reads it.

    Q4_0, Q4_1 and Q8_0 tensors stay packed as ``weight``, ``scales`` and ``biases`` in groups of
    32; MLX expands every other type to floats.
    """

    def __init__(
        self,
        arrays: dict[str, mx.array],
        metadata: dict[str, Any],
        *,
        name: str = "the GGUF file",
    ) -> None:
        self.arrays = arrays
        self._name = name
        self._metadata = metadata

    @classmethod
    def read(cls, path: Path) -> "GgufFile":
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ConfigError(
                    f"{path} is not a GGUF file, since it does not start with 'GGUF': download it "
                    "again, or name another"
                )
        try:
            loaded: Any = mx.load(str(path), format="gguf", return_metadata=True)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"MLX cannot read the GGUF file {path} ({error}): it is incomplete or damaged, so "
                "download it again, or name another"
            ) from error
        arrays, metadata = loaded
        return cls(arrays, metadata, name=f"the GGUF file {path}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._metadata)

    def has(self, key: str) -> bool:
        return key in self._metadata

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise ConfigError(f"{self._name} has a key {key} that is {value!r}, not a whole number")

    def real(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, int | float):
            return float(value)
        raise ConfigError(f"{self._name} has a key {key} that is {value!r}, not a number")

    def flag(self, key: str, default: bool) -> bool:
        return bool(self._value(key, default))

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if isinstance(value, str):
            return value
        raise ConfigError(f"{self._name} has a key {key} that is {value!r}, not text")

    def strings(self, key: str) -> list[str]:
        value = self._value(key, None)
        if isinstance(value, list):
            return [str(item) for item in value]
        raise ConfigError(f"{self._name} has a key {key} that is not a list of texts")

    def integers(self, key: str) -> list[int]:
        value = self._value(key, None)
        if isinstance(value, list):
            return [int(item) for item in value]
        raise ConfigError(f"{self._name} has a key {key} that is not a list of numbers")

    def reals(self, key: str) -> list[float]:
        value = self._value(key, None)
        if isinstance(value, list):
            return [float(item) for item in value]
        raise ConfigError(f"{self._name} has a key {key} that is not a list of numbers")

    def _value(self, key: str, default: object) -> object:
        """The plain Python value: MLX gives numbers as arrays, strings and lists as they are."""
        value = self._metadata.get(key, default)
        if value is None:
            raise ConfigError(f"{self._name} has no key {key}")
        return value.tolist() if isinstance(value, mx.array) else value
