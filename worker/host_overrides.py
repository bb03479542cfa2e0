"""A remote host's overrides of Start: model path, memory, trust in the model's code."""

from dataclasses import dataclass, replace

from mlx_dp.proto.messages.commands import Start


@dataclass(frozen=True, slots=True, kw_only=True)
class HostOverrides:
    """Values of this host that replace those of ``Start``. None: not overridden."""

    model_path: str | None = None
    memory_nbytes: int | None = None
    trust_remote_code: bool | None = None
    """Whether code of the model may run on this host."""

    def apply(self, start: Start) -> Start:
        if self.model_path is not None:
            start = replace(start, model_path=self.model_path)
        if self.memory_nbytes is not None:
            start = replace(start, memory_nbytes=self.memory_nbytes)
        if self.trust_remote_code is not None:
            start = replace(start, trust_remote_code=self.trust_remote_code)
        return start
