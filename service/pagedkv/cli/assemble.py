"""Put the parts together: backend, cache, model, engine, gRPC server, metrics server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.markup import escape

from pagedkv.cache import CacheManager
from pagedkv.cli.backends import (
    OnProgress,
    Say,
    is_asked_too_much,
    open_backend,
    open_cpu,
    open_pools,
    reason_for_cpu,
    working_bytes,
)
from pagedkv.cli.front import Front, open_front
from pagedkv.cli.models import SMOLLM2, check_model, model_name
from pagedkv.cli.options import ServeOptions
from pagedkv.compute.backend import Backend
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import CacheConfig, KvShape, require
from pagedkv.engine import Engine
from pagedkv.errors import DeviceError
from pagedkv.metrics.service import ServiceMetrics
from pagedkv.model import LoadedModel, ModelConfig, load_model, read_model_config
from pagedkv.model.hub import fetch_smollm2
from pagedkv.rpc.server import Server

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
    front: Front | None = None

    @property
    def address(self) -> str:
        """Where the gRPC server listens; valid after `start`."""
        assert self.front is not None
        return self.front.address

    @property
    def metrics_url(self) -> str | None:
        """Base URL of the metrics server, None if it is off; valid after `start`."""
        assert self.front is not None
        return self.front.metrics_url

    async def start(self, front: Front | None = None) -> None:
        """Start the engine and take calls at a front that is open, or at one of its own; ready when this returns.

        If it fails, everything is released.
        """
        try:
            self.front = front or await open_front(self.options)
            await self._start(self.front)
        except BaseException:
            await self.stop()
            raise

    async def _start(self, front: Front) -> None:
        name = None if self.options.model is None else model_name(self.options.model)
        metrics = ServiceMetrics(self.cache, self.layout, backend_name=self.backend.name, model_name=name)
        metrics.watch_backend(self.backend)
        if self.model is not None:
            self.engine = self._make_engine(self.model, metrics)
            metrics.watch_engine(self.engine)
            await self.engine.start()
        self.server = server = Server(
            front.config,
            cache=self.cache,
            backend=self.backend,
            engine=self.engine,
            observer=metrics.rpc_observer,
            listener=front.listener,
        )
        metrics.watch_health(lambda: server.is_healthy)
        metrics.watch_readiness(lambda: server.is_ready)
        await server.start()
        if front.metrics_server is not None:
            front.metrics_server.show(metrics)

    def _make_engine(self, model: LoadedModel, metrics: ServiceMetrics) -> Engine:
        return Engine(
            backend=self.backend,
            cache=self.cache,
            decoder=model.decoder,
            tokenizer=model.tokenizer,
            model_config=model.config,
            config=self.options.engine_config("swap" if self.backend.num_host_blocks else "recompute"),
            observer=metrics.engine_observer,
        )

    async def stop(self) -> None:
        """Drain: refuse new work, let calls go on for `drain_seconds`, end the rest, then release everything."""
        if self.server is not None:
            await self.server.stop(self.options.drain_seconds)
        if self.front is not None:
            await self.front.close()
        await asyncio.to_thread(self.backend.close)


def build_service(
    options: ServeOptions,
    *,
    open_backend: BackendOpener = open_backend,
    on_compile: OnProgress = lambda done, total, name: None,
    say: Say = lambda line: None,
) -> Service:
    """Open the backend, load the model and compile what it needs. Blocks for seconds; if it fails, nothing stays open.

    The backend "auto" is a GPU's if everything gets ready on it, else the CPU's, which says why. Raises InvalidArgument
    for options that do not fit the model or the machine, UnsupportedModel, DeviceError.
    """
    path = None if options.model is None else _resolve_model(options.model, say)
    config = None if path is None else read_model_config(path)
    max_sequence_tokens = _sequence_limit(options, config)
    shape = options.shape if config is None else config.kv_shape(options.dtype)
    assert shape is not None
    arguments = options, shape, on_compile, say
    try:
        backend, model = _open(open_backend, path, config, *arguments)
    except DeviceError as error:
        if options.backend != "auto" or is_asked_too_much(options, error):
            raise
        backend, model = _open(partial(open_cpu, reason=reason_for_cpu(error)), path, config, *arguments)
    layout = backend.layout
    cache = CacheManager(
        CacheConfig(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            num_layers=shape.num_layers,
            max_sequence_tokens=max_sequence_tokens,
            num_host_blocks=backend.num_host_blocks,
        )
    )
    return Service(options, layout, backend, model, cache)


def _open(
    opener: BackendOpener,
    path: Path | None,
    config: ModelConfig | None,
    options: ServeOptions,
    shape: KvShape,
    on_compile: OnProgress,
    say: Say,
) -> tuple[CpuBackend | CudaBackend, LoadedModel | None]:
    """Open a backend and get it ready, with the model if there is one; if it fails, nothing stays open."""
    backend = opener(options, shape, on_compile, say)
    try:
        model = (
            None if path is None else load_model(path, backend, lambda line: say(f"[bold]weights[/]  {escape(line)}"))
        )
        backend.warm_up()
        open_pools(backend, options, say, working_bytes(options, config))
    except BaseException:
        backend.close()
        raise
    return backend, model


def _resolve_model(model: str, say: Say) -> Path:
    check_model(model)
    return fetch_smollm2(say) if model == SMOLLM2 else Path(model)


def _sequence_limit(options: ServeOptions, config: ModelConfig | None) -> int | None:
    if config is None:
        return options.max_model_len
    asked, limit = options.max_model_len, config.context_length
    require(asked is None or asked <= limit, "max_model_len", f"is beyond the model's context of {limit}", asked, limit)
    return asked or limit
