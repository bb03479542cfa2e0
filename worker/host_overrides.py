"""What a worker that shares no machine with its controller has in place of the controller's."""

from dataclasses import dataclass, replace

from mlx_dp.proto.messages import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverrides:
    """Where the model lies here, and this device's memory. None: as ``Start`` says."""

    model_path: str | None = None
    memory_nbytes: int | None = None
    trust_remote_code: bool | None = None
    """Whose machine it is decides whether the model may bring code that is run."""

    def apply(self, start: Start) -> Start:
        if self.model_path is not None:
            start = replace(start, model_path=self.model_path)
        if self.memory_nbytes is not None:
            start = replace(start, memory_nbytes=self.memory_nbytes)
        if self.trust_remote_code is not None:
            start = replace(start, trust_remote_code=self.trust_remote_code)
        return start
