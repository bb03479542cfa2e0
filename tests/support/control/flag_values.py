"""Command lines as values, for tests."""

from mlx_dp.orchestrator.config.flags import (
    FakeFlags,
    Flags,
    HttpFlags,
    ModelFlags,
    OwnerFlags,
    QueueFlags,
    RemoteFlags,
)
from mlx_dp.proto.messages.commands import EngineKind

FAKE_MODEL = ModelFlags(engine=EngineKind.FAKE)


def flags(
    *,
    model: ModelFlags = FAKE_MODEL,
    owners: OwnerFlags | None = None,
    queue: QueueFlags | None = None,
    http: HttpFlags | None = None,
    fake: FakeFlags | None = None,
    remote: RemoteFlags | None = None,
) -> Flags:
    return Flags(
        model=model,
        owners=owners or OwnerFlags(),
        queue=queue or QueueFlags(),
        http=http or HttpFlags(),
        fake=fake or FakeFlags(),
        remote=remote or RemoteFlags(),
    )
