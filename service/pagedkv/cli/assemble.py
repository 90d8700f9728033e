"""Put the parts together: backend, cache, model, engine, gRPC server, metrics server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from pagedkv.cache import CacheManager
from pagedkv.cli.backends import OnProgress, Say, open_backend, open_pools, working_bytes
from pagedkv.cli.options import ServeOptions
from pagedkv.compute.backend import Backend
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import CacheConfig, EngineConfig, KvShape
from pagedkv.engine import Engine
from pagedkv.errors import InvalidArgument
from pagedkv.metrics.http import MetricsServer
from pagedkv.metrics.service import ServiceMetrics
from pagedkv.model import LoadedModel, ModelConfig, load_model, read_model_config
from pagedkv.model.hub import fetch_smollm2
from pagedkv.rpc.server import Server, ServerConfig

BackendOpener = Callable[[ServeOptions, KvShape, OnProgress, Say], CpuBackend | CudaBackend]


@dataclass(slots=True)
class Service:
    """Everything that runs in one process. Built off the loop (loading takes seconds), started on it."""

    options: ServeOptions
    layout: KvLayout
    backend: Backend
    model: LoadedModel | None
    cache: CacheManager
    engine: Engine | None = None
    server: Server | None = None
    metrics_server: MetricsServer | None = None

    @property
    def address(self) -> str:
        """Where the gRPC server listens; valid after `start`."""
        assert self.server is not None
        return f"{self.options.host}:{self.server.port}"

    @property
    def metrics_url(self) -> str | None:
        """Base URL of the metrics server, None if it is off."""
        return None if self.metrics_server is None else f"http://{self.options.host}:{self.metrics_server.port}"

    async def start(self) -> None:
        """Start the engine and both servers; the service is ready when this returns."""
        metrics = ServiceMetrics(self.cache, self.layout, backend_name=self.backend.name)
        metrics.watch_backend(self.backend)
        if self.model is not None:
            self.engine = Engine(
                backend=self.backend,
                cache=self.cache,
                decoder=self.model.decoder,
                tokenizer=self.model.tokenizer,
                model_config=self.model.config,
                config=_engine_config(self.options, self.backend.num_host_blocks),
                observer=metrics.engine_observer,
            )
            metrics.watch_engine(self.engine)
            await self.engine.start()
        self.server = server = Server(
            ServerConfig(host=self.options.host, port=self.options.port, insecure=self.options.insecure),
            cache=self.cache,
            backend=self.backend,
            engine=self.engine,
            observer=metrics.rpc_observer,
        )
        metrics.watch_health(lambda: server.is_healthy)
        await server.start()
        if self.options.metrics_port is not None:
            self.metrics_server = MetricsServer(metrics, host=self.options.host, port=self.options.metrics_port)
            await self.metrics_server.start()

    async def stop(self) -> None:
        """Drain: refuse new work, let streams go on for `drain_seconds`, then release everything."""
        grace = self.options.drain_seconds
        if self.server is not None:
            await self.server.stop(grace)
        if self.engine is not None:
            await self.engine.stop(0.0)
        if self.metrics_server is not None:
            await self.metrics_server.stop()
        await asyncio.to_thread(self.backend.close)


def build_service(
    options: ServeOptions,
    *,
    open_backend: BackendOpener = open_backend,
    on_compile: OnProgress = lambda done, total, name: None,
    say: Say = lambda line: None,
) -> Service:
    """Open the backend, load the model and compile what it needs. Blocks for seconds; if it fails, nothing stays open.

    Raises InvalidArgument for options that do not fit the model or the machine, UnsupportedModel, DeviceError.
    """
    path = None if options.model is None else _resolve_model(options.model, say)
    config = None if path is None else read_model_config(path)
    shape = options.shape if config is None else config.kv_shape(options.dtype)
    assert shape is not None
    backend = open_backend(options, shape, on_compile, say)
    try:
        model = (
            None if path is None else load_model(path, backend, lambda line: say(f"[bold]weights[/]  {escape(line)}"))
        )
        backend.warm_up()
        open_pools(backend, options, say, working_bytes(options, config))
    except BaseException:
        backend.close()
        raise
    layout = backend.layout
    cache = CacheManager(
        CacheConfig(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            num_layers=shape.num_layers,
            max_sequence_tokens=_sequence_limit(options, config),
            num_host_blocks=backend.num_host_blocks,
        )
    )
    return Service(options, layout, backend, model, cache)


def _resolve_model(model: str, say: Say) -> Path:
    if model == "smollm2":
        return fetch_smollm2(say)
    path = Path(model)
    if not path.exists():
        raise InvalidArgument(f'is neither "smollm2" nor an existing file or directory: {model!r}', field="model")
    return path


def _sequence_limit(options: ServeOptions, config: ModelConfig | None) -> int | None:
    limits = [options.max_model_len, None if config is None else config.context_length]
    return min((limit for limit in limits if limit is not None), default=None)


def _engine_config(options: ServeOptions, num_host_blocks: int) -> EngineConfig:
    return EngineConfig(
        preemption=options.preemption or ("swap" if num_host_blocks else "recompute"),
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
        max_model_len=options.max_model_len,
    )
