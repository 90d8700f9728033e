"""The garbage collector passes over what lives as long as the service."""

from __future__ import annotations

import gc
import os
import signal
from io import StringIO
from types import SimpleNamespace

from rich.console import Console

from pagedkv.cli.serve import _serve


async def test_serve_exempts_what_it_started_with_from_collection(monkeypatch):
    events = []
    monkeypatch.setattr(gc, "freeze", lambda: events.append("freeze"))

    async def start():
        events.append("start")
        os.kill(os.getpid(), signal.SIGTERM)

    async def stop():
        events.append("stop")

    service = SimpleNamespace(
        start=start, stop=stop, address="", metrics_url=None, options=SimpleNamespace(drain_seconds=0)
    )
    await _serve(service, Console(file=StringIO()))
    assert events == ["start", "freeze", "stop"]
