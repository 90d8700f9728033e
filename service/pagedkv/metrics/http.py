"""The metrics server: /metrics, /health, /ready, the page map at / and the JSON that it lives on.

A few hundred lines of asyncio instead of a dependency: GET and HEAD only, one request a connection. It runs on the
loop that owns the cache, so every answer is of one moment. Nothing here waits for a slow reader without a limit:
heads, answers and streams have deadlines, and connections have a cap by kind (see `connections`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Final
from urllib.parse import unquote

from pagedkv.address import Hold, address_text
from pagedkv.errors import InvalidArgument, SequenceNotFound
from pagedkv.loopback import is_loopback
from pagedkv.metrics.connections import Connections, Kind
from pagedkv.metrics.service import ServiceMetrics
from pagedkv.metrics.stream import Broadcaster

_log = logging.getLogger(__name__)
_MAX_HEAD_BYTES: Final = 16 * 2**10
_DEADLINE_SECONDS: Final = 10.0
_PARTING_SECONDS: Final = 2.0
_MAX_PARTING_READS: Final = 1024
_HEARTBEAT_SECONDS: Final = 5.0
_EVENTS: Final = "/api/events"
_PROBES: Final = ("/metrics", "/health", "/ready")
_TEXTS: Final = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    431: "Request Header Fields Too Large",
    500: "Internal Server Error",
    503: "Service Unavailable",
}
_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed request head. Header names are lower case."""

    method: str
    path: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Response:
    """A whole answer."""

    status: int
    body: bytes
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


class MetricsServer:
    """Serves one service's metrics. Start and stop it on the event loop that owns the cache.

    Without metrics it serves a service that is still loading, alive and not ready, until `show`.
    """

    def __init__(self, metrics: ServiceMetrics | None, *, host: str = "127.0.0.1", port: int = 9400) -> None:
        self.port = port
        self._host = host
        self._server: asyncio.Server | None = None
        self._connections = Connections()
        self._routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/": self._page,
            "/metrics": self._scrape,
            "/health": self._health,
            "/ready": self._ready,
            "/api/blocks": self._blocks,
        }
        self._is_loading = metrics is None
        if metrics is not None:
            self.show(metrics)

    def show(self, metrics: ServiceMetrics) -> None:
        """Serve these metrics from now on."""
        self._metrics, self._broadcaster, self._is_loading = metrics, Broadcaster(metrics.frames), False

    async def start(self) -> None:
        """Bind and serve; port 0 takes a free one. Raises InvalidArgument if the port is taken."""
        hold = Hold(self._host, self.port, field="metrics_port")
        try:
            self._server = await asyncio.start_server(
                self._connect, self._host, hold.port, limit=_MAX_HEAD_BYTES, reuse_port=False
            )
        except OSError as error:
            raise InvalidArgument(
                f"cannot listen on {address_text(self._host, self.port)}: {error.strerror or error}",
                field="metrics_port",
                value=self.port,
            ) from error
        finally:
            hold.release()
        self.port = self._server.sockets[0].getsockname()[1]

    @property
    def num_connections(self) -> int:
        """Connections open now, those about to be refused included."""
        return len(self._connections.tasks)

    @property
    def num_streams(self) -> int:
        """Page maps open now."""
        return self._connections.count(Kind.STREAM)

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self._server is not None:
            self._server.close()
        tasks = self._connections.tasks
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self._is_loading:
            await self._broadcaster.stop()

    # -- connections --------------------------------------------------------------------------------------------

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.enter(task, Kind.ARRIVING)
        try:
            await self._serve(task, reader, writer)
        except (ConnectionError, TimeoutError, asyncio.CancelledError):
            writer.transport.abort()
        except Exception:
            _log.exception("the metrics server could not answer")
            writer.transport.abort()
        finally:
            self._connections.leave(task)
            writer.close()

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        request = await asyncio.wait_for(_read_request(reader), _DEADLINE_SECONDS)
        if isinstance(request, Response):
            await _send(reader, writer, request)
        elif request.path != _EVENTS or request.method != "GET" or not self._is_shown(request):
            self._connections.enter(task, Kind.PROBE if request.path in _PROBES else Kind.PAGE)
            await _send(reader, writer, await self._answer(request), with_body=request.method != "HEAD")
        elif self._connections.has_room(Kind.STREAM):
            self._connections.enter(task, Kind.STREAM)
            await self._stream(writer)
        else:
            await _send(reader, writer, _problem(503, "too many page maps are open"))

    async def _answer(self, request: Request) -> Response:
        if request.method not in ("GET", "HEAD"):
            return _problem(405, "only GET and HEAD")
        if not self._is_allowed(request):
            return _problem(403, "the Host header names another host")
        if self._is_loading and request.path != "/health":
            return _problem(503, "the service is still loading")
        route = self._routes.get(request.path)
        if route is not None:
            return await route(request)
        if request.path.startswith("/api/sequences/"):
            return self._sequence(unquote(request.path.removeprefix("/api/sequences/")))
        if request.path.startswith("/api/blocks/"):
            return self._block(request.path.removeprefix("/api/blocks/"))
        return _problem(404, "no such page")

    def _is_shown(self, request: Request) -> bool:
        return not self._is_loading and self._is_allowed(request)

    def _is_allowed(self, request: Request) -> bool:
        """Whether the Host is this one: a page elsewhere must not reach a loopback port through a name of its own."""
        return not is_loopback(self._host) or is_loopback(_host_name(request.headers.get("host", self._host)))

    # -- answers ------------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        page = resources.files("pagedkv.metrics").joinpath("pagemap.html").read_bytes()
        return Response(200, page, "text/html; charset=utf-8", {"Content-Security-Policy": _PAGE_POLICY})

    async def _scrape(self, request: Request) -> Response:
        body, content_type = self._metrics.scrape(request.headers.get("accept", ""))
        return Response(200, body, content_type)

    async def _health(self, request: Request) -> Response:
        healthy = self._is_loading or self._metrics.is_healthy()
        return Response(200 if healthy else 503, b"ok\n" if healthy else b"failed\n", "text/plain; charset=utf-8")

    async def _ready(self, request: Request) -> Response:
        ready = self._metrics.is_ready()
        return Response(200 if ready else 503, b"ready\n" if ready else b"not ready\n", "text/plain; charset=utf-8")

    async def _blocks(self, request: Request) -> Response:
        return _json(self._metrics.frames.snapshot())

    def _sequence(self, sequence_id: str) -> Response:
        try:
            return _json(self._metrics.frames.sequence(sequence_id))
        except SequenceNotFound:
            return _problem(404, "no such sequence; it may have ended")

    def _block(self, text: str) -> Response:
        found = self._metrics.frames.block(int(text)) if text.isdecimal() and len(text) < 12 else None
        return _json(found) if found is not None else _problem(404, "no such block")

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        """Send server-sent events until the reader goes or cannot keep up for ten seconds."""
        writer.write(_head(200, "text/event-stream", {"X-Accel-Buffering": "no"}))
        with self._broadcaster.subscribed() as subscriber:
            frames = subscriber.frames()
            while True:
                try:
                    frame = await asyncio.wait_for(anext(frames), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    frames, frame = subscriber.frames(), "{}"
                writer.write(b"data: " + frame.encode() + b"\n\n")
                await asyncio.wait_for(writer.drain(), _DEADLINE_SECONDS)


async def _read_request(reader: asyncio.StreamReader) -> Request | Response:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return _problem(431, "the request's head is too long")
    except asyncio.IncompleteReadError as error:
        raise ConnectionError("closed before its request was complete") from error
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[1].startswith("/") or not words[2].startswith("HTTP/1."):
        return _problem(400, "not an HTTP/1 request")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(words[0], words[1].partition("?")[0], headers)


async def _send(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, response: Response, *, with_body: bool = True
) -> None:
    headers = {"Content-Length": str(len(response.body)), **response.headers}
    writer.write(_head(response.status, response.content_type, headers) + (response.body if with_body else b""))
    await asyncio.wait_for(writer.drain(), _DEADLINE_SECONDS)
    await _part(reader, writer)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await asyncio.wait_for(writer.wait_closed(), _DEADLINE_SECONDS)


async def _part(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End our side and read what still comes: closing on unread bytes resets a connection, and the answer with it."""
    writer.write_eof()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PARTING_SECONDS):
            for _ in range(_MAX_PARTING_READS):
                if not await reader.read(_MAX_HEAD_BYTES):
                    return


def _head(status: int, content_type: str, headers: dict[str, str]) -> bytes:
    fields = {
        "Content-Type": content_type,
        "Cache-Control": "no-store",
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"HTTP/1.1 {status} {_TEXTS[status]}\r\n{lines}\r\n".encode("latin-1")


def _json(value: object) -> Response:
    return Response(200, json.dumps(value, separators=(",", ":")).encode())


def _problem(status: int, message: str) -> Response:
    return Response(status, json.dumps({"error": message}).encode() + b"\n")


def _host_name(host: str) -> str:
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
