"""The terminal: whatever it cannot show is replaced and never an error."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console


def make_console(*, stderr: bool = False) -> Console:
    """Return a console without automatic highlighting."""
    forgive(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, highlight=False)


def forgive(stream: TextIO) -> None:
    """Have a stream write "?" for a character that its encoding does not know."""
    if hasattr(stream, "reconfigure") and stream.errors == "strict":
        stream.reconfigure(errors="replace")
