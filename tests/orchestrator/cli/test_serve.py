"""Set-up before the service runs."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_dp.orchestrator.cli import serve
from tests.support.http.scripted_service import OPTIONS


@pytest.fixture
def unfrozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("unfrozen")
def test_full_collections_need_not_look_at_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    class Run:
        def __init__(self, *_: object, **__: object) -> None: ...

        async def run(self) -> int:
            frozen.append(gc.get_freeze_count())
            return 0

    class Side:
        launcher = SimpleNamespace(host_of=None)
        addresses = None

        @asynccontextmanager
        async def running(self, give_up: object) -> AsyncIterator[None]:
            yield

    for name in ("create_app", "EmbeddedServer", "ControlPorts"):
        monkeypatch.setattr(serve, name, lambda *_, **__: None)
    controller = SimpleNamespace(give_up=None)
    monkeypatch.setattr(serve, "Controller", lambda *_, **__: controller)
    monkeypatch.setattr(serve, "ServiceRun", Run)
    options: Any = SimpleNamespace(http=OPTIONS, worker=SimpleNamespace(log_level="info"))
    side: Any = Side()
    channel: Any = SimpleNamespace(keep_endpoint=lambda: None)
    nothing: Any = None
    assert asyncio.run(serve._run(options, nothing, side, channel, nothing, nothing)) == 0
    assert frozen[0] > 1000
