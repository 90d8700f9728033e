"""Progress of a first start: it compiles kernels, once for each machine."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pagedkv.unfinished import undone_if_ended

_PATIENCE_SECONDS = 0.7  # loading compiled kernels from disk is quicker and needs no bar


class CompileProgress:
    """A bar that appears only if kernels are really compiled."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("Compiling kernels (first start only)"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=console,
            transient=False,
        )
        self._console = console
        self._held = ExitStack()
        self._task: TaskID | None = None
        self._show = threading.Timer(_PATIENCE_SECONDS, self._progress.start)
        self._show.daemon = True

    def __enter__(self) -> CompileProgress:
        self._held.enter_context(undone_if_ended(self._console.show_cursor))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._show.cancel()
        if self._progress.live.is_started:
            self._progress.stop()
        self._held.close()

    def update(self, done: int, total: int, name: str) -> None:
        """Show that `done` of `total` kernels are compiled and `name` is next (or was last)."""
        if self._task is None:
            self._show.start()
            self._task = self._progress.add_task(name, total=total)
        self._progress.update(self._task, completed=done, total=total, description=name)
