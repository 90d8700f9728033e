"""The gRPC server: services, health, reflection, limits and drain."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2

from pagedkv.cache import CacheManager
from pagedkv.compute.backend import Backend
from pagedkv.config import require
from pagedkv.engine import Engine
from pagedkv.errors import DeviceLost
from pagedkv.loopback import is_loopback
from pagedkv.rpc.generation import GenerationService, NoModelService
from pagedkv.rpc.interceptors import CallLimits, ErrorInterceptor, NullRpcObserver, RpcObserver
from pagedkv.rpc.kv_cache import KvCacheService
from pagedkv.rpc.limits import CacheLimits
from pagedkv.rpc.listener import Listener
from pagedkv.v1 import generation_pb2, generation_pb2_grpc, kv_cache_pb2, kv_cache_pb2_grpc

_COUNTS = (
    "max_streams",
    "max_watches",
    "max_connections",
    "max_sequences",
    "max_known_tokens",
    "min_ping_interval_ms",
)
_SERVICES = (
    kv_cache_pb2.DESCRIPTOR.services_by_name["KvCache"].full_name,
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the server listens and what it accepts. Port 0 takes a free one.

    Over all clients: `max_inflight_bytes` of requests that are not answered yet (answers come to three times that at
    most), `max_streams` open Generate and Step calls, `max_watches` open streams of the health and reflection services,
    `max_connections`, `max_sequences` live sequences (about 1 KiB each), which began with `max_known_tokens` (4 bytes
    each for the id, and for each block). Besides, each connection has up to eight messages on their way in.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    insecure: bool = False
    max_message_bytes: int = 32 * 2**20  # receiving 57 MiB held the loop for 60 to 85 ms, 30 MiB for 40
    max_inflight_bytes: int = 256 * 2**20
    max_streams: int = 4096
    max_watches: int = 1024
    max_connections: int = 1024
    max_sequences: int = 16_384
    max_known_tokens: int = 2**27
    min_ping_interval_ms: int = 5_000  # clients that ping every 10 s must not come too early by a hair

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "port", "must be in [0, 65535]", self.port, 65535)
        require(self.max_message_bytes >= 2**20, "max_message_bytes", "must be at least 1 MiB", self.max_message_bytes)
        for field in _COUNTS:
            require(getattr(self, field) >= 1, field, "must be at least 1", getattr(self, field), 1)
        most, largest = self.max_inflight_bytes, self.max_message_bytes
        fits = most >= 2 * largest
        require(fits, "max_inflight_bytes", f"must be at least twice max_message_bytes ({largest})", most, 2 * largest)
        safe = self.insecure or is_loopback(self.host)
        require(safe, "host", "is not loopback and there is no TLS; say --insecure to bind it all the same", self.host)


class Server:
    """Serves one cache, and one engine if a model is served. Build and use it on the event loop."""

    def __init__(
        self,
        config: ServerConfig,
        *,
        cache: CacheManager,
        backend: Backend,
        engine: Engine | None = None,
        observer: RpcObserver | None = None,
        listener: Listener | None = None,
    ) -> None:
        """Put the services behind a listener that has started, or behind one of its own."""
        self._listener = listener or make_listener(config)
        self._observer = observer or NullRpcObserver()
        self._call_limits = _call_limits(config)
        self._is_started, self._is_open = listener is not None, False
        self._engine = engine
        self._backend = backend
        server: Any = self._listener
        cache_limits = CacheLimits(config.max_message_bytes, config.max_sequences, config.max_known_tokens)
        self._kv_cache = KvCacheService(cache, backend, self._observer, cache_limits)
        kv_cache_pb2_grpc.add_KvCacheServicer_to_server(self._kv_cache, server)  # type: ignore[no-untyped-call]
        generation = NoModelService() if engine is None else GenerationService(engine)
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, server)  # type: ignore[no-untyped-call]
        self._served = _SERVICES if engine is not None else _SERVICES[:1]
        self.failed = asyncio.Event()  # set once the device is lost: the process should end and be started anew

    @property
    def is_healthy(self) -> bool:
        """False from the moment the device is lost."""
        return self._backend.health.failure is None

    @property
    def is_ready(self) -> bool:
        """Whether calls are taken: not before `start`, not after a failure, not once it drains."""
        return self._is_open and self.is_healthy

    @property
    def port(self) -> int:
        """Where it listens; valid after `start`."""
        return self._listener.port

    async def start(self) -> None:
        """Listen, unless the listener does already, and take calls. Raises InvalidArgument if the port is taken."""
        if not self._is_started:
            await self._listener.start()
        self._listener.open(ErrorInterceptor(self._observer, self._call_limits), self._served)
        self._is_open = True
        self._backend.health.watch_on(asyncio.get_running_loop(), self._note_device_failure)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls while the port is open, let running ones end within the grace, end the rest, close.

        A generation that is cut off gets its text so far and that it was cancelled; other calls get Draining.
        """
        self._is_open = False
        await self._listener.drain(grace_seconds)
        if self._engine is not None:
            await self._engine.stop()
        await self._listener.close()

    def hurry(self) -> None:
        """End the grace of a `stop` now."""
        self._listener.hurry()

    def _note_device_failure(self, error: DeviceLost) -> None:
        """Report NOT_SERVING from now on: whatever needs the device is answered by the error."""
        self._listener.tell_health(health_pb2.HealthCheckResponse.NOT_SERVING, self._served)
        self.failed.set()


def make_listener(config: ServerConfig) -> Listener:
    """Return the listener of a server that is still to be built, to be started at once."""
    return Listener(
        config.host,
        config.port,
        services=_SERVICES,
        interceptor=ErrorInterceptor(NullRpcObserver(), _call_limits(config)),
        options=_channel_options(config),
    )


def _call_limits(config: ServerConfig) -> CallLimits:
    return CallLimits(config.max_inflight_bytes, config.max_streams, config.max_watches)


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        # pings keep a connection alive through a long silent prefill, or idle
        ("grpc.http2.min_ping_interval_without_data_ms", config.min_ping_interval_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss
    ]
