"""The command `pagedkv`: obeys signals from its first moment, before anything that takes time is imported."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line and exit with its code; 143 after SIGTERM and 130 after SIGINT, also as process 1."""
    signal.signal(signal.SIGTERM, _end)
    try:
        from pagedkv.cli.app import run

        code = run()
    except KeyboardInterrupt:
        _end(signal.SIGINT, None)
    sys.exit(code)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    from pagedkv.unfinished import end_process

    end_process(128 + number)
