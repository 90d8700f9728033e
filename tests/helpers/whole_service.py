"""A whole service in this process, as the command line puts it together, with a model, on either backend."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from helpers.cuda import virtual_opener
from helpers.waiting import PATIENCE
from pagedkv.cli.assemble import Service, build_service
from pagedkv.cli.options import ServeOptions
from pagedkv.client import AsyncClient
from pagedkv.dtypes import DType
from virtual_gpu import VirtualDriver
from virtual_gpu.profile import Profile


@dataclass
class Running:
    """A started service, a client of it, and the virtual device below it, if there is one."""

    service: Service
    client: AsyncClient
    driver: VirtualDriver | None
    is_to_fault: bool = False  # set by a test that plants a fault; else there may be none at the end


@asynccontextmanager
async def whole_service(
    model: Path, backend: str, *, memory_bytes: int = 32 << 20, host_bytes: int = 32 << 20, **options: Any
) -> AsyncIterator[Running]:
    """Serve the model until the block ends; on CUDA with float32 weights, over the virtual GPU."""
    given: dict[str, Any] = {"blocks": 64, "drain_seconds": 0.0, "metrics_port": None, **options}
    settings = ServeOptions(model=str(model), shape=None, port=0, backend=backend, **given)
    if backend == "cuda":
        driver = VirtualDriver(Profile(memory_bytes=memory_bytes, host_bytes=host_bytes))
        service = build_service(settings, open_backend=virtual_opener(driver, weight_dtype=DType.FLOAT32))
    else:
        driver, service = None, build_service(settings)
    await service.start()
    try:
        async with AsyncClient(service.address, timeout=PATIENCE) as client:
            running = Running(service, client, driver)
            yield running
    finally:
        await service.stop()
    if driver is not None and not running.is_to_fault:
        driver.assert_clean()
