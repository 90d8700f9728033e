"""The garbage collector passes over what lives as long as the service."""

from __future__ import annotations

import gc
import os
import signal
from io import StringIO

import pytest
from rich.console import Console

from pagedkv.cli.options import ServeOptions
from pagedkv.cli.serve import _serve
from pagedkv.config import KvShape


class Lines(StringIO):
    """Notes in its events that the service is ready, and has it drain."""

    def __init__(self, events):
        super().__init__()
        self._events = events

    def write(self, text):
        if "ready" in text:
            self._events.append("ready")
            os.kill(os.getpid(), signal.SIGTERM)
        return super().write(text)


@pytest.fixture
def usual_signals():
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in usual.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("usual_signals")
async def test_serve_exempts_what_it_started_with_from_collection(monkeypatch):
    events = []
    monkeypatch.setattr(gc, "freeze", lambda: events.append("freeze"))
    options = ServeOptions(model=None, shape=KvShape(1, 8, 2, 64), blocks=2, port=0, metrics_port=None, backend="cpu")
    assert await _serve(options, Console(file=Lines(events))) == 0
    assert events == ["freeze", "ready"]
