"""Errors about the model that was requested."""

from mlx_dp.proto.errors import ConfigError


class ModelSourceError(ConfigError):
    """The model that ``--model`` names is missing or unusable; nothing was loaded."""
