"""What may be wrong with a model that was asked for."""

from mlx_dp.proto.errors import ConfigError


class ModelSourceError(ConfigError):
    """The model that ``--model`` names cannot be had; nothing of it was loaded."""
