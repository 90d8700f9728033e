"""What wraps every call: exceptions become statuses without leaking text, and each call is observed."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import grpc
from grpc.aio import AbortError, ServerInterceptor

from pagedkv.errors import InvalidArgument, PagedKvError
from pagedkv.rpc.admission import BytesInFlight, OpenStreams, ReceivingTurns
from pagedkv.rpc.intake import LARGE_BYTES, Parser, parser_of
from pagedkv.rpc.status import code_of, refusal, to_status

_log = logging.getLogger(__name__)
_PREFIX = "/pagedkv.v1."
_TURNS = 8  # messages that one connection may have received at a time


class RpcObserver(Protocol):
    """Hears about every finished call and swap; must return at once and never raise."""

    def on_rpc(self, method: str, code: str, seconds: float) -> None:
        """Note a call, as "KvCache/Attend", its status code's name and how long it took."""

    def on_swap(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Note bytes copied "out" to host memory or "in" again, and how long that took."""


class NullRpcObserver:
    """Ignores everything."""

    def on_rpc(self, method: str, code: str, seconds: float) -> None:
        """Ignore."""

    def on_swap(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Ignore."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """What may be under way at once over all clients: bytes of requests, streams of ours, streams of other services."""

    max_inflight_bytes: int
    max_streams: int
    max_watches: int


class ErrorInterceptor(ServerInterceptor):
    """Reads the requests; turns our exceptions into their statuses, all others into INTERNAL with an id for the log.

    Calls beyond the limits are refused with QuotaExceeded.
    """

    def __init__(self, observer: RpcObserver, limits: CallLimits) -> None:
        self._observer = observer
        self._in_flight = BytesInFlight(limits.max_inflight_bytes)
        self._turns = ReceivingTurns(_TURNS)
        self._streams = OpenStreams("max_streams", limits.max_streams)
        self._watches = OpenStreams("max_watches", limits.max_watches)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handlers of all services."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        parse = parser_of(method, handler.request_deserializer)
        read = partial(self._read_stream if handler.request_streaming else self._read, parse)
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        serialize = _serializer(handler.response_serializer)
        # a handler of streams runs before its first message is received; the others' would all be received at once
        if handler.response_streaming:
            call = self._wrap_stream(method, behaviour, read)
            return grpc.stream_stream_rpc_method_handler(call, response_serializer=serialize)
        return grpc.stream_unary_rpc_method_handler(
            self._wrap_unary(method, behaviour, read), response_serializer=serialize
        )

    def _wrap_unary(self, method: str, behaviour: Any, read: Any) -> Any:
        async def call(_: Any, context: Any) -> Any:
            started = time.perf_counter()
            try:
                response = await behaviour(await read(context), context)
            except BaseException as error:
                await self._fail(method, context, error, time.perf_counter() - started)
            self._note(method, "OK", time.perf_counter() - started)
            return response

        return call

    def _wrap_stream(self, method: str, behaviour: Any, read: Any) -> Any:
        streams = self._streams if method.startswith(_PREFIX) else self._watches

        async def call(_: Any, context: Any) -> AsyncIterator[Any]:
            started = time.perf_counter()
            try:
                with streams.another(), ExitStack() as held:
                    async for response in behaviour(await read(context, held), context):
                        yield response
            except BaseException as error:
                await self._fail(method, context, error, time.perf_counter() - started)
            self._note(method, "OK", time.perf_counter() - started)

        return call

    async def _read(self, parse: Parser, context: Any, held: ExitStack | None = None) -> Any:
        """Receive and parse the one request of a call; its bytes count until the call is over, its answer sent."""
        self._in_flight.check(0)
        data = await self._turns.receive(context)
        if data is grpc.aio.EOF:
            raise InvalidArgument("is missing", field="request")
        num_bytes = self._in_flight.take(len(data))
        context.add_done_callback(lambda _: self._in_flight.give_back(num_bytes))
        return await _parsed(parse, data)

    async def _read_stream(self, parse: Parser, context: Any, held: ExitStack) -> AsyncIterator[Any]:
        """Return the requests of a stream; the bytes of each count until the next one is asked for, or `held` ends."""

        async def requests() -> AsyncIterator[Any]:
            while (data := await context.read()) is not grpc.aio.EOF:
                await self._in_flight.room_for(len(data))
                held.enter_context(self._in_flight.holding(len(data)))
                yield await _parsed(parse, data)
                held.close()

        return requests()

    def _note(self, method: str, code: str, seconds: float) -> None:
        if not method.startswith(_PREFIX):
            return
        method = method.removeprefix(_PREFIX)
        _log.debug("%s %s after %.1f ms", method, code, seconds * 1_000)
        self._observer.on_rpc(method, code, seconds)

    async def _fail(self, method: str, context: Any, error: BaseException, seconds: float) -> None:
        """End the call with the error's status; always raises."""
        if isinstance(error, PagedKvError):
            error.__traceback__ = None  # its frames, this one among them, hold the request until the next collection
            self._note(method, code_of(error).name, seconds)
            await context.abort_with_status(to_status(error))
        if isinstance(error, AbortError):
            raise error
        if isinstance(error, GeneratorExit) or (isinstance(error, asyncio.CancelledError) and _is_callers(context)):
            self._note(method, "CANCELLED", seconds)
            raise error
        error_id = secrets.token_hex(6)
        _log.error("%s failed [%s]", method, error_id, exc_info=error)
        self._note(method, "INTERNAL", seconds)
        message = f"internal error {error_id}; the server's log explains it"
        await context.abort_with_status(refusal(grpc.StatusCode.INTERNAL, PagedKvError.reason, message))


async def _parsed(parse: Parser, data: bytes) -> Any:
    """Parse a message, a large one off the loop."""
    return await asyncio.to_thread(parse, data) if len(data) > LARGE_BYTES else parse(data)


def _is_callers(context: Any) -> bool:
    """Whether a cancellation came with the call and not from inside the server."""
    task = asyncio.current_task()
    return bool(context.cancelled() or context.done() or (task is not None and task.cancelling()))


def _serializer(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Let a handler answer with bytes that are ready to be sent."""
    return lambda response: response if isinstance(response, bytes) else serialize(response)
