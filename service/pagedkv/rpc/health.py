"""The standard health service, whose watches end with the last word that the server stops serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_Response: Final = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # its package has no types
    """Tells whoever asks or watches which services are served. Use it on the server's event loop.

    The one that comes with gRPC lets its watches go on when the server stops, which then waits its whole grace.
    """

    def __init__(self) -> None:
        self._status: dict[str, int] = {}
        self._is_stopping = False
        self._changed = asyncio.Event()

    def set(self, service: str, status: int) -> None:
        """Tell this status of a service from now on; "" is the server as a whole. Nothing changes after `stop`."""
        if not self._is_stopping:
            self._status[service] = status
            self._notify()

    def stop(self) -> None:
        """Tell NOT_SERVING of every service from now on; watches end once they have told it."""
        self._is_stopping = True
        self._status = dict.fromkeys(self._status, _Response.NOT_SERVING)
        self._notify()

    async def Check(self, request: Any, context: Any) -> Any:
        """Tell the status of one service."""
        status = self._status.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Response(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Tell the status of one service now and whenever it changes; it may be unknown yet."""
        told = None
        while True:
            changed, is_last = self._changed, self._is_stopping
            status = self._status.get(request.service, _Response.SERVICE_UNKNOWN)
            if status != told:
                yield _Response(status=status)
                told = status
            if is_last:
                return
            await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
