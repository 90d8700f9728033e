"""The gRPC server: services, health, reflection, limits and drain."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pagedkv.cache import CacheManager
from pagedkv.compute.backend import Backend
from pagedkv.config import require
from pagedkv.engine import Engine
from pagedkv.errors import DeviceLost, InvalidArgument
from pagedkv.loopback import is_loopback
from pagedkv.rpc.generation import GenerationService, NoModelService
from pagedkv.rpc.health import HealthService
from pagedkv.rpc.interceptors import ErrorInterceptor, NullRpcObserver, RpcObserver
from pagedkv.rpc.kv_cache import KvCacheService
from pagedkv.rpc.reflection import enable_reflection
from pagedkv.v1 import generation_pb2, generation_pb2_grpc, kv_cache_pb2, kv_cache_pb2_grpc

_MIN_PING_INTERVAL_MS = 10_000  # clients may keep a connection alive through a long silent prefill
_SERVICES = (
    kv_cache_pb2.DESCRIPTOR.services_by_name["KvCache"].full_name,
    generation_pb2.DESCRIPTOR.services_by_name["Generation"].full_name,
)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where the server listens and what it accepts. Port 0 takes a free one.

    `max_streams` bounds the Generate and Step calls that are open at once, over all clients.
    """

    host: str = "127.0.0.1"
    port: int = 50051
    insecure: bool = False
    max_message_bytes: int = 64 * 2**20
    max_streams: int = 4096

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "port", "must be in [0, 65535]", self.port, 65535)
        require(self.max_message_bytes >= 2**20, "max_message_bytes", "must be at least 1 MiB", self.max_message_bytes)
        require(self.max_streams >= 1, "max_streams", "must be at least 1", self.max_streams, 1)
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
        self._server = grpc.aio.server(
            interceptors=[ErrorInterceptor(observer, config.max_streams)],
            options=_channel_options(config),
        )
        self._health = HealthService()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._engine = engine
        self._backend = backend
        self._kv_cache = KvCacheService(cache, backend, observer)
        kv_cache_pb2_grpc.add_KvCacheServicer_to_server(self._kv_cache, self._server)  # type: ignore[no-untyped-call]
        generation = NoModelService() if engine is None else GenerationService(engine)
        generation_pb2_grpc.add_GenerationServicer_to_server(generation, self._server)  # type: ignore[no-untyped-call]
        enable_reflection((*_SERVICES, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name), self._server)
        self._served = _SERVICES if engine is not None else _SERVICES[:1]
        self.port = 0

    @property
    def is_healthy(self) -> bool:
        """False from the moment the device is lost."""
        return self._backend.health.failure is None

    async def start(self) -> None:
        """Bind and serve. Raises InvalidArgument if the port is taken."""
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        try:
            self.port = self._server.add_insecure_port(f"{host}:{self._config.port}")
        except RuntimeError as error:
            raise InvalidArgument(f"cannot listen on {host}:{self._config.port}: in use?", field="port") from error
        await self._server.start()
        self._set_health(health_pb2.HealthCheckResponse.SERVING)
        self._backend.health.watch_on(asyncio.get_running_loop(), self._note_device_failure)

    async def stop(self, grace_seconds: float) -> None:
        """Report NOT_SERVING and end the watches, refuse new calls, give running ones the grace, cancel the rest."""
        self._health.stop()
        await self._server.stop(grace_seconds)

    def _note_device_failure(self, error: DeviceLost) -> None:
        """Report NOT_SERVING from now on: whatever needs the device is answered by the error."""
        self._set_health(health_pb2.HealthCheckResponse.NOT_SERVING)

    def _set_health(self, status: int) -> None:
        for service in ("", *self._served):
            self._health.set(service, status)


def _channel_options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.so_reuseport", 0),  # a second server on the port is an error, not a coin toss
    ]
