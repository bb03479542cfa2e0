"""From the options to what each worker is told to load."""

from mlx_dp.orchestrator.options import ServeOptions
from mlx_dp.proto.messages import Start


def worker_starts(options: ServeOptions) -> tuple[Start, ...]:
    """One ``Start`` per worker, in the order of their owners."""
    worker = options.worker
    return tuple(
        Start(
            engine=worker.engine,
            model_path="" if worker.model_path is None else str(worker.model_path),
            share=share,
            memory_nbytes=worker.memory_nbytes,
            context_length=worker.context_length,
            chunked_prefill_size=worker.chunked_prefill_size,
            prefix_cache=worker.prefix_cache,
            heartbeat_interval_s=worker.heartbeat_interval_s,
            fake=worker.fake,
        )
        for share in options.ownership.slices
    )
