"""How a value out of an untrusted file stands in an error: on one line, and short whatever it holds."""

from __future__ import annotations

import reprlib

_WIDTH = 80


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _WIDTH
        self.maxlevel = 3

    def repr_bytes(self, value: bytes, level: int) -> str:
        """Cut before, not after."""
        return repr(value[:_WIDTH])


_SHORT = _Short()


def shown(value: object) -> str:
    """Return a representation of at most some 80 characters; never raises, never walks the whole value."""
    text = _SHORT.repr(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
