"""Everything observed of one service, behind one object that the command line wires up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.cache import CacheManager
from pagedkv.compute.layout import KvLayout
from pagedkv.engine import EngineObserver
from pagedkv.metrics.collectors import EngineView, LiveCollector
from pagedkv.metrics.exposition import Exposition
from pagedkv.metrics.frames import FrameSource
from pagedkv.metrics.recorder import KernelTimer, Recorder
from pagedkv.metrics.tracing import ObserverGroup, make_tracer


class ServiceMetrics:
    """The metrics of one cache and, if there is one, its engine. Nothing is shared between two services."""

    def __init__(
        self, cache: CacheManager, layout: KvLayout, *, backend_name: str, model_name: str | None = None
    ) -> None:
        self.recorder = Recorder()
        self._collector = LiveCollector(cache, layout, backend_name, self.recorder)
        self._exposition = Exposition(self.recorder.store)
        cache.pool.watch(self.recorder)
        self.frames = FrameSource(
            cache,
            layout,
            backend_name,
            model_name,
            engine=lambda: self._collector.engine,
            num_generated=lambda: self.recorder.num_generated_tokens,
        )
        self.is_ready: Callable[[], bool] = lambda: self._collector.is_healthy()
        tracer = make_tracer()
        self.engine_observer: EngineObserver = (
            self.recorder if tracer is None else ObserverGroup((self.recorder, tracer))
        )

    def scrape(self, accept: str = "") -> tuple[bytes, str]:
        """Return all metrics of this moment in the format that the Accept header asks for, and its content type."""
        return self._exposition.render(self._collector.read(), accept)

    @property
    def rpc_observer(self) -> Recorder:
        """Told of every finished call."""
        return self.recorder

    def watch_engine(self, engine: EngineView) -> None:
        """Show the engine's running and waiting requests and its health from now on."""
        self._collector.engine = engine

    def is_healthy(self) -> bool:
        """Whether a restart is not needed: False once the device, or the engine itself, is lost."""
        return self._collector.is_healthy()

    def watch_health(self, is_healthy: Callable[[], bool]) -> None:
        """Ask this from now on whether the device is healthy, in place of the engine: there may be none."""
        self._collector.is_healthy = is_healthy

    def watch_readiness(self, is_ready: Callable[[], bool]) -> None:
        """Ask this from now on whether the service takes calls, which a healthy one that drains does not."""
        self.is_ready = is_ready

    def watch_backend(self, backend: Any) -> None:
        """Time the backend's kernels and show its memory from now on."""
        KernelTimer(backend, self.recorder)
        self._collector.backend_memory = backend.memory_by_use
