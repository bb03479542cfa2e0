"""How the bytes of a model's weights will lie in the processes."""

from dataclasses import dataclass, replace

from mlx_dp.orchestrator.preparation import PreparedModel
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.model_shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeights:
    """``whole_nbytes`` are the model's, ``by_process`` what each process holds of them."""

    whole_nbytes: int
    by_process: tuple[int, ...]

    @property
    def total_nbytes(self) -> int:
        """What all processes hold together."""
        return sum(self.by_process)

    @property
    def repeated_nbytes(self) -> int:
        """What every process holds, of which one copy would do."""
        others = len(self.by_process) - 1
        return (self.total_nbytes - self.whole_nbytes) // others if others else 0

    @property
    def divided_nbytes(self) -> int:
        """What is held once, in parts."""
        return self.whole_nbytes - self.repeated_nbytes if len(self.by_process) > 1 else 0


def shapes_by_process(model: PreparedModel, processes: int) -> tuple[ModelShape, ...]:
    """What each process holds; nothing for the fake engine.

    Raises ConfigError when a group was asked for, and its ranks cannot divide this model.
    """
    if model.shape is None:
        return ()
    divided = model.rank_weights
    if divided is None:
        return (model.shape,) * processes
    if divided.refusal is not None:
        raise ConfigError(divided.refusal)
    assert len(divided.nbytes) == processes, (divided, processes)
    return tuple(replace(model.shape, weights_nbytes=nbytes) for nbytes in divided.nbytes)
