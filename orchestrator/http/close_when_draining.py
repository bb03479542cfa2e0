"""Ends keep-alive connections of a service that is about to go."""

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_dp.orchestrator.service import Service, ServiceStatus

_ENDING: Final = (ServiceStatus.DRAINING, ServiceStatus.DEAD)
_CLOSE: Final = (b"connection", b"close")


class CloseWhenDraining:
    """Adds ``Connection: close`` to all that is said while the service drains.

    A client or balancer would otherwise keep its connection to a process that refuses what comes
    next, and would lose the request that it sends when the process goes. Every answer is told, so
    this stands outside of all other parts.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start" and self._ends():
                kept = [pair for pair in message["headers"] if pair[0].lower() != _CLOSE[0]]
                message["headers"] = [*kept, _CLOSE]
            await send(message)

        await self._app(scope, receive, send_last)

    def _ends(self) -> bool:
        return self._service.state().status in _ENDING
