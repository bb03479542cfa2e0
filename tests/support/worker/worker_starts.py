"""The ``Start`` command for a model directory of a test."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlx_dp.proto.capacity.ownership import Limits, divide
from mlx_dp.proto.capacity.parallel import resolve_topology
from mlx_dp.proto.messages.commands import EngineKind, Start
from mlx_dp.worker.loading import device


def mlx_start(
    directory: Path, *, requests: int = 4, chunk: int = 512, memory_nbytes: int | None = None
) -> Start:
    """A ``Start`` for one replica, through the division that the controller makes."""
    topology = resolve_topology(dp_size=1, tp_size=None, enable_dp_attention=False)
    return Start(
        engine=EngineKind.MLX,
        model_path=str(directory),
        share=divide(topology, Limits(max_running_requests=requests)).slices[0],
        memory_nbytes=memory_nbytes,
        context_length=None,
        chunked_prefill_size=chunk,
        prefix_cache=True,
        heartbeat_interval_s=60.0,
    )


@contextmanager
def no_warm_up() -> Iterator[None]:
    """Workers that start here serve no made-up requests first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "warm_up_s", lambda: 0.0)
        yield
