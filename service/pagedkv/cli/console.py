"""The terminal: whatever it cannot show is replaced and never an error."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from rich.console import Console

from pagedkv.errors import InvalidArgument


def make_console(*, stderr: bool = False) -> Console:
    """Return a console without automatic highlighting."""
    forgive(sys.stderr if stderr else sys.stdout)
    return Console(stderr=stderr, highlight=False)


def as_text(argument: str, field: str) -> str:
    """Return an argument of the command line as the text it is, whatever the locale. Raises InvalidArgument."""
    try:
        return os.fsencode(argument).decode()
    except UnicodeError as error:
        raise InvalidArgument(f"is not UTF-8: {error}", field=field) from error


def forgive(stream: TextIO) -> None:
    """Have a stream write "?" for a character that its encoding does not know."""
    if hasattr(stream, "reconfigure") and stream.errors == "strict":
        stream.reconfigure(errors="replace")
