"""A real server on a free loopback port, in this process, over a real backend."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from pagedkv.cache import CacheManager
from pagedkv.compute.backend import Backend
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import CacheConfig, KvShape
from pagedkv.rpc.server import Server, ServerConfig

SHAPE = KvShape(num_layers=2, num_heads=4, num_kv_heads=2, head_dim=64)
BackendFactory = Callable[..., Backend]


class DefaultBackend:
    """What `serving` opens unless it is told otherwise; the fixture `backend` of tests/rpc sets it."""

    make: BackendFactory = CpuBackend


@dataclass
class Serving:
    """A running server with what is behind it."""

    server: Server
    cache: CacheManager
    backend: Any
    engine: Any = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


@asynccontextmanager
async def serving(
    make_backend: BackendFactory | None = None,
    *,
    shape: KvShape = SHAPE,
    num_blocks: int = 64,
    block_size: int = 16,
    make_engine: Callable[[Backend, CacheManager], Any] | None = None,
    max_sequence_tokens: int | None = None,
    num_host_blocks: int = 0,
    **config: Any,
) -> AsyncIterator[Serving]:
    """Serve on this event loop until the block ends."""
    host: dict[str, Any] = {"num_host_blocks": num_host_blocks} if num_host_blocks else {}
    backend = (make_backend or DefaultBackend.make)(KvLayout(shape, num_blocks, block_size), **host)
    cache = CacheManager(
        CacheConfig(
            num_blocks,
            block_size,
            shape.num_layers,
            max_sequence_tokens=max_sequence_tokens,
            num_host_blocks=num_host_blocks,
        )
    )
    engine = make_engine(backend, cache) if make_engine else None
    if engine is not None:
        await engine.start()
    server = Server(ServerConfig(port=0, **config), cache=cache, backend=backend, engine=engine)
    await server.start()
    try:
        yield Serving(server, cache, backend, engine)
    finally:
        await server.stop(0)
        if engine is not None:
            await engine.stop(0)
        backend.close()


@contextmanager
def serving_in_thread(*args: Any, **kwargs: Any) -> Iterator[Serving]:
    """Serve on a loop of its own in a thread, for blocking tests."""
    started, stop, found = threading.Event(), None, {}

    async def run() -> None:
        nonlocal stop
        stop = asyncio.Event()
        async with serving(*args, **kwargs) as served:
            found.update(served=served, loop=asyncio.get_running_loop())
            started.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    if not started.wait(120):
        raise RuntimeError("the server did not start")
    try:
        yield found["served"]
    finally:
        found["loop"].call_soon_threadsafe(stop.set)
        thread.join()
