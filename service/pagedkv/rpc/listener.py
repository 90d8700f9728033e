"""The port of the gRPC server from its first moment to its last: starting, open, draining, closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
from grpc.aio import ServerInterceptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv.address import Hold, address_text
from pagedkv.errors import Draining, InvalidArgument, PagedKvError, Starting
from pagedkv.rpc.health import HealthService
from pagedkv.rpc.reflection import enable_reflection
from pagedkv.rpc.status import to_status

# How long what is left may take, each of which is over at once unless a reader does not read:
_LAST_WORDS_SECONDS, _CUTTING_SECONDS, _CLOSING_SECONDS = 0.6, 0.1, 0.2
_HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_Status: Final = health_pb2.HealthCheckResponse


class Gate(ServerInterceptor):
    """Lets calls of our services in while it is open, answers all others by its refusal, and knows which run.

    Every call passes the interceptor that is current, the first one until `open`: statuses and observers are its.
    """

    def __init__(self, prefix: str, first: ServerInterceptor) -> None:
        self._prefix = prefix
        self._refusal: Callable[[], PagedKvError] | None = _starting
        self._inner = first
        self._running: set[asyncio.Task[Any]] = set()
        self._sending: set[asyncio.Task[Any]] = set()  # of those: not in our code, and so not to be interrupted
        self._is_cut = False
        self._idle = asyncio.Event()
        self._idle.set()

    def open(self, inner: ServerInterceptor) -> None:
        """Let calls in from now on, through this interceptor."""
        self._inner, self._refusal = inner, None

    def close(self) -> None:
        """Refuse new calls from now on; those that run go on."""
        self._refusal = _draining

    async def wait_idle(self, seconds: float) -> None:
        """Return when no call runs, or after the time."""
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return

    def cut(self) -> None:
        """End the calls that still run with Draining: now, or when the message that one is sending is sent."""
        self._is_cut = True
        for task in self._running - self._sending:
            task.cancel()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handlers of our own services, or replace them by a refusal."""
        is_ours = handler_call_details.method.startswith(self._prefix)
        refusal = self._refusal if is_ours else None

        async def choose(details: grpc.HandlerCallDetails) -> Any:
            return await continuation(details) if refusal is None else self._refusing(refusal)

        handler = await self._inner.intercept_service(choose, handler_call_details)
        return self._noted(handler) if is_ours and refusal is None else handler

    def _refusing(self, refusal: Callable[[], PagedKvError]) -> Any:
        """Return a handler that refuses; by the wire its kind of call fits all kinds."""

        async def refuse(requests: Any, context: Any) -> AsyncIterator[Any]:
            raise refusal()
            yield  # makes a stream of it

        return grpc.stream_stream_rpc_method_handler(refuse)

    def _noted(self, handler: Any) -> Any:
        """Return the handler with its calls noted while they run."""
        if handler is None:
            return None
        (kind,) = (name for name in _KINDS if getattr(handler, name) is not None)
        wrap = self._note_stream if handler.response_streaming else self._note_unary
        return handler._replace(**{kind: wrap(getattr(handler, kind))})

    def _note_unary(self, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            async with self._as_running(context):
                return await behaviour(request, context)

        return call

    def _note_stream(self, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._as_running(context) as task:
                async for response in behaviour(request, context):
                    self._sending.add(task)
                    yield response
                    self._sending.discard(task)
                    if self._is_cut:
                        raise asyncio.CancelledError

        return call

    @asynccontextmanager
    async def _as_running(self, context: Any) -> AsyncIterator[asyncio.Task[Any]]:
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._idle.clear()
        try:
            yield task
        except asyncio.CancelledError:
            if self._is_cut:
                await context.abort_with_status(to_status(_draining()))
            raise
        finally:
            self._running.discard(task)
            self._sending.discard(task)
            if not self._running:
                self._idle.set()


_KINDS: Final = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


def _starting() -> PagedKvError:
    return Starting("the server is still loading; try again soon")


def _draining() -> PagedKvError:
    return Draining("the server is shutting down")


class Listener:
    """A gRPC server that listens before there is anything to serve. Build and use it on the event loop.

    Until `open` every call of ours passes the interceptor and is refused with Starting, from `drain` on with Draining;
    health tells NOT_SERVING then.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        services: Sequence[str],
        interceptor: ServerInterceptor,
        options: Sequence[tuple[str, int]],
    ) -> None:
        self._host, self.port = host, port
        self._services = tuple(services)
        prefix = "/" + services[0].rpartition(".")[0] + "."
        self._gate = Gate(prefix, interceptor)
        self._hurry = asyncio.Event()
        self.server = grpc.aio.server(interceptors=[self._gate], options=list(options))
        self._health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        enable_reflection((*services, _HEALTH), self.server)
        self.tell_health(_Status.NOT_SERVING, services[:1])

    @property
    def address(self) -> str:
        """Where it listens, as a target of clients; valid after `start`."""
        return address_text(self._host, self.port)

    async def start(self) -> None:
        """Listen. Raises InvalidArgument if the port is taken; then the listener is closed."""
        try:
            self._take_port()
            await self.server.start()
        except BaseException:
            await self.server.stop(None)
            raise

    def _take_port(self) -> None:
        hold = Hold(self._host, self.port, field="port")
        self.port = hold.port
        try:
            self.server.add_insecure_port(self.address)
        except RuntimeError as error:
            raise InvalidArgument(f"cannot listen on {self.address}", field="port", value=self.port) from error
        finally:
            hold.release()

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Take the handlers of a service, also when the server has started."""
        self.server.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """Ignore what is a shortcut to the generic handlers, and only for a server that has not started."""

    def open(self, interceptor: ServerInterceptor, serving: Sequence[str]) -> None:
        """Let calls in through the interceptor, and tell of these services that they are served."""
        self._gate.open(interceptor)
        self.tell_health(_Status.SERVING, serving)

    def tell_health(self, status: int, services: Sequence[str]) -> None:
        """Tell a status of services from now on, and of the server as a whole."""
        for service in ("", *services):
            self._health.set(service, status)

    async def drain(self, grace_seconds: float) -> None:
        """Tell NOT_SERVING, end the watches, refuse new calls; return when none runs, after the grace, or in a hurry.

        The port stays open, so that whoever asks is told.
        """
        self._health.stop()
        self._gate.close()
        idle = asyncio.ensure_future(self._gate.wait_idle(grace_seconds))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, hurry):
            task.cancel()

    def hurry(self) -> None:
        """End a drain's grace now."""
        self._hurry.set()

    async def close(self) -> None:
        """Give calls a moment to say their last word, end the rest with Draining, close the port."""
        await self._gate.wait_idle(_LAST_WORDS_SECONDS)
        self._gate.cut()
        await self._gate.wait_idle(_CUTTING_SECONDS)
        await self.server.stop(_CLOSING_SECONDS)
