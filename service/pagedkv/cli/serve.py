"""`pagedkv serve`: build the service, say what it got, run until told to stop."""

from __future__ import annotations

import asyncio
import gc
import signal

from rich.console import Console

from pagedkv.cli.assemble import Service, build_service
from pagedkv.cli.options import ServeOptions
from pagedkv.cli.progress import CompileProgress


def run_serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends at once."""
    console = Console(stderr=True, highlight=False)
    with CompileProgress(console) as progress:
        service = build_service(options, on_compile=progress.update, say=console.print)
    asyncio.run(_serve(service, console))


async def _serve(service: Service, console: Console) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await service.start()
    gc.freeze()  # model, kernels and modules live as long as the process; a full collection would walk them all
    console.print(f"[bold green]ready[/] gRPC on {service.address}")
    if service.metrics_url:
        console.print(f"      metrics and page map on {service.metrics_url}/")
    await stop.wait()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)
    console.print(f"draining, up to {service.options.drain_seconds:g} s (again to stop at once)")
    await service.stop()
