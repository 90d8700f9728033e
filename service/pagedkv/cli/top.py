"""`pagedkv top`: the page map of a running service in a terminal."""

from __future__ import annotations

import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Final

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from pagedkv.cli.console import make_console
from pagedkv.metrics.top import Frame, PoolView, render, service_url, stream_frames
from pagedkv.unfinished import undone_if_ended

_KEY_SECONDS: Final = 0.1  # a change of the terminal's size shows as soon


class Screen:
    """What is drawn, anew each time and as wide as the terminal is then."""

    def __init__(self, url: str) -> None:
        self.view = PoolView()
        self._url = url

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.view.pool:
            yield render(self.view, options.max_width, ascii_only=options.ascii_only)
        else:
            yield Text(f"connecting to {self._url} ...")


def run_top(address: str) -> None:
    """Show a service's page pool until q or Ctrl-C, or until the service ends.

    The address is a URL or host:port. Raises InvalidArgument if no service of ours answers there.
    """
    url = service_url(address)
    screen, frames = Screen(url), _Frames(url)
    live = Live(screen, console=make_console(), screen=True, auto_refresh=False)
    with suppress(KeyboardInterrupt), live, undone_if_ended(live.stop), _keys() as next_key:
        while not frames.has_ended and next_key() not in ("q", "Q"):
            for frame in frames.take():
                screen.view.apply(frame)
            live.refresh()
    if frames.has_ended:
        live.console.print(f"the service at {url} has ended", soft_wrap=True)


class _Frames:
    """Reads the service's frames on a thread, as the terminal must not wait for them."""

    def __init__(self, url: str) -> None:
        self.has_ended = False
        self._queue: SimpleQueue[Frame | Exception | None] = SimpleQueue()
        threading.Thread(target=self._read, args=(url,), daemon=True).start()

    def take(self) -> Iterator[Frame]:
        """Yield the frames that came since the last call. Raises what reading them met."""
        while not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                self.has_ended = True
            else:
                yield item

    def _read(self, url: str) -> None:
        try:
            for frame in stream_frames(url):
                self._queue.put(frame)
            self._queue.put(None)
        except Exception as error:
            self._queue.put(error)


@contextmanager
def _keys() -> Iterator[Callable[[], str]]:
    """Yield what returns the next key, or "" after a short time; without a terminal there are none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    number = sys.stdin.fileno()
    usual = termios.tcgetattr(number)

    def restore() -> None:
        termios.tcsetattr(number, termios.TCSADRAIN, usual)

    def next_key() -> str:
        ready, _, _ = select.select([number], [], [], _KEY_SECONDS)
        return os.read(number, 1).decode(errors="replace") if ready else ""

    with undone_if_ended(restore):
        tty.setcbreak(number)
        try:
            yield next_key
        finally:
            restore()


def _no_key() -> str:
    time.sleep(_KEY_SECONDS)
    return ""
