"""`pagedkv serve`: take the ports, build the service, say what it got, run until told to stop or until it failed."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Final

from rich.console import Console

from pagedkv.address import Hold
from pagedkv.cli.console import make_console
from pagedkv.cli.models import check_model
from pagedkv.cli.options import ServeOptions
from pagedkv.cli.progress import CompileProgress
from pagedkv.cli.threads import in_thread
from pagedkv.unfinished import end_process

if TYPE_CHECKING:
    from pagedkv.cli.assemble import Service
    from pagedkv.cli.front import Front

FAILURE_EXIT_CODE: Final = 70  # EX_SOFTWARE: the device is lost, and a new process is needed


def run_serve(options: ServeOptions) -> int:
    """Serve until SIGTERM or SIGINT, then drain; a second signal ends the grace, a third the process.

    Return the exit code: 0, or FAILURE_EXIT_CODE when the device failed. Before it is ready a signal ends the process
    at once. What is wrong about ports and the model's name is found before anything else is done: InvalidArgument.
    """
    console = make_console(stderr=True)
    hold_ports(options)
    if options.model is not None:
        check_model(options.model)
    return asyncio.run(_serve(options, console))


def hold_ports(options: ServeOptions) -> None:
    """Find out whether the ports can be had, before anything that takes time is even imported."""
    Hold(options.host, options.port, field="port").release()
    if options.metrics_port is not None:
        Hold(options.metrics_host, options.metrics_port, field="metrics_port").release()


async def _serve(options: ServeOptions, console: Console) -> int:
    signals = Signals()
    from pagedkv.cli.front import open_front  # takes a while, in which signals are obeyed

    front = await open_front(options)
    try:
        service = await in_thread(lambda: _build(options, console))
        await service.start(front)
    except BaseException:
        await front.close()
        raise
    gc.freeze()  # model, kernels and modules live as long as the process; a full collection would walk them all
    return await _run(service, front, signals, console)


def _build(options: ServeOptions, console: Console) -> Service:
    from pagedkv.cli.assemble import build_service

    with CompileProgress(console) as progress:
        return build_service(options, on_compile=progress.update, say=console.print)


def _announce(front: Front, console: Console) -> None:
    console.print(f"[bold green]ready[/] gRPC on {front.address}", soft_wrap=True)
    if front.metrics_url:
        console.print(f"      metrics and page map on {front.metrics_url}/", soft_wrap=True)


async def _run(service: Service, front: Front, signals: Signals, console: Console) -> int:
    """Say that it is ready, wait for a signal or a failure, then drain."""
    assert service.server is not None
    failed = asyncio.ensure_future(service.server.failed.wait())
    stop = asyncio.Event()
    stopped = asyncio.ensure_future(stop.wait())
    signals.then(stop.set, service.server.hurry)
    _announce(front, console)
    await asyncio.wait((failed, stopped), return_when=asyncio.FIRST_COMPLETED)
    has_failed = failed.done()
    if has_failed:
        signals.then(service.server.hurry)
        console.print("[bold red]failed[/] the device is lost; ending, so that a new process can start")
    else:
        console.print(f"draining, up to {service.options.drain_seconds:g} s (again to cut it short)")
    await service.stop()
    for waiting in (failed, stopped):
        waiting.cancel()
    return FAILURE_EXIT_CODE if has_failed else 0


class Signals:
    """What SIGTERM and SIGINT do: end the process; once it serves, first drain, then hurry, and then end it.

    The handlers are not the loop's, which would hear of a signal only when what it runs at the moment has ended.
    """

    def __init__(self) -> None:
        """Take the signals; on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._steps: list[Callable[[], object]] = []
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._obey)

    def then(self, *steps: Callable[[], object]) -> None:
        """Have each of the next signals do one of these on the loop, and only those after them end the process."""
        self._steps = list(steps)

    def _obey(self, number: int, frame: FrameType | None) -> None:
        if not self._steps:
            end_process(128 + number)
        self._loop.call_soon_threadsafe(self._steps.pop(0))
