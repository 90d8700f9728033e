"""The gRPC server: services, health, reflection, limits and drain."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pagedkv.cache import CacheManager
from pagedkv.compute.backend import Backend
from pagedkv.config import require
from pagedkv.engine import Engine
from pagedkv.errors import DeviceError, InvalidArgument
from pagedkv.loopback import is_loopback
from pagedkv.rpc.generation import GenerationService, NoModelService
from pagedkv.rpc.health import HealthService
from pagedkv.rpc.interceptors import CallLimits, ErrorInterceptor, NullRpcObserver, RpcObserver
from pagedkv.rpc.kv_cache import KvCacheService
from pagedkv.rpc.limits import CacheLimits
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
    max_message_bytes: int = 64 * 2**20
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
    ) -> None:
        self._config = config
        observer = observer or NullRpcObserver()
        call_limits = CallLimits(config.max_inflight_bytes, config.max_streams, config.max_watches)
        cache_limits = CacheLimits(config.max_message_bytes, config.max_sequences, config.max_known_tokens)
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(observer, call_limits)],
            options=_channel_options(config),
        )
        self._health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._engine = engine
        self._kv_cache = KvCacheService(cache, backend, self._note_device_failure, observer, cache_limits)
        kv_cache_pb2_grpc.add_KvCacheServicer_to_server(self._kv_cache, self._server)  # type: ignore[no-untyped-call]
        generation = NoModelService() if engine is None else GenerationService(engine)
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, self._server)  # type: ignore[no-untyped-call]
        reflection.enable_server_reflection(
            (*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME),
            self._server,
        )
        self._served = _SERVICES if engine is not None else _SERVICES[:1]
        self._failure: DeviceError | None = None
        if engine is not None:
            engine.on_failure = self._note_device_failure
        self.port = 0

    @property
    def is_healthy(self) -> bool:
        """False from the moment the device failed."""
        return self._failure is None

    async def start(self) -> None:
        """Bind and serve. Raises InvalidArgument if the port is taken."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{self._config.port}")
        except RuntimeError as error:
            raise InvalidArgument(f"cannot listen on {host}:{self._config.port}: in use?", field="port") from error
        await self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_seconds: float) -> None:
        """Report NOT_SERVING and end the watches, refuse new calls, give running ones the grace, cancel the rest."""
        self._health.stop()
        await self._server.stop(grace_seconds)

    def _note_device_failure(self, error: DeviceError) -> None:
        """Report NOT_SERVING from now on, and answer by the error whatever needs the device, through either service."""
        if self._failure is not None:
            return
        self._failure = error
        self._kv_cache.fail(error)
        if self._engine is not None:
            self._engine.fail(error)
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _set_health(self, status: int) -> None:
        for service in ("", *self._served):
            self._health.set(service, status)


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
