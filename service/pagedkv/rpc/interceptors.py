"""What wraps every call: exceptions become statuses without leaking text, and each call is observed."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import grpc
from grpc.aio import AbortError, ServerInterceptor

from pagedkv.errors import PagedKvError, QuotaExceeded
from pagedkv.rpc.status import code_of, refusal, to_status

_log = logging.getLogger(__name__)
_PREFIX = "/pagedkv.v1."


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


class ErrorInterceptor(ServerInterceptor):
    """Turns our exceptions into their statuses, and all others into INTERNAL with an id that the log explains.

    Streams beyond `max_streams` open at once are refused with QuotaExceeded.
    """

    def __init__(self, observer: RpcObserver, max_streams: int) -> None:
        self._observer = observer
        self._max_streams = max_streams
        self._num_streams = 0

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the handlers of our own services."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_PREFIX):
            return handler
        wrap = self._wrap_stream if handler.response_streaming else self._wrap_unary
        factory = {
            (False, False): grpc.unary_unary_rpc_method_handler,
            (False, True): grpc.unary_stream_rpc_method_handler,
            (True, False): grpc.stream_unary_rpc_method_handler,
            (True, True): grpc.stream_stream_rpc_method_handler,
        }[handler.request_streaming, handler.response_streaming]
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        return factory(
            wrap(method.removeprefix(_PREFIX), behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _wrap_unary(self, method: str, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> Any:
            started = time.perf_counter()
            try:
                response = await behaviour(request, context)
            except BaseException as error:
                await self._fail(method, context, error, time.perf_counter() - started)
            self._note(method, "OK", time.perf_counter() - started)
            return response

        return call

    def _wrap_stream(self, method: str, behaviour: Any) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            started = time.perf_counter()
            self._num_streams += 1
            try:
                self._check_streams()
                async for response in behaviour(request, context):
                    yield response
            except BaseException as error:
                await self._fail(method, context, error, time.perf_counter() - started)
            finally:
                self._num_streams -= 1
            self._note(method, "OK", time.perf_counter() - started)

        return call

    def _check_streams(self) -> None:
        limit = self._max_streams
        if self._num_streams > limit:
            raise QuotaExceeded(f"{limit} streams are open already", field="max_streams", limit=limit)

    def _note(self, method: str, code: str, seconds: float) -> None:
        _log.debug("%s %s after %.1f ms", method, code, seconds * 1_000)
        self._observer.on_rpc(method, code, seconds)

    async def _fail(self, method: str, context: Any, error: BaseException, seconds: float) -> None:
        """End the call with the error's status; always raises."""
        if isinstance(error, PagedKvError):
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


def _is_callers(context: Any) -> bool:
    """Whether a cancellation came with the call and not from inside the server."""
    task = asyncio.current_task()
    return bool(context.cancelled() or context.done() or (task is not None and task.cancelling()))
