"""Long work beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(job: Callable[[], T]) -> T:
    """Run a job on a thread that the process need not wait for, unlike asyncio.to_thread's, and return its result."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(tell: Callable[[], None]) -> None:
        if not done.done():
            tell()

    def run() -> None:
        try:
            result = job()
        except BaseException as error:
            failure = error
            loop.call_soon_threadsafe(finish, lambda: done.set_exception(failure))
        else:
            loop.call_soon_threadsafe(finish, lambda: done.set_result(result))

    threading.Thread(target=run, name="pagedkv-work", daemon=True).start()
    return await done
