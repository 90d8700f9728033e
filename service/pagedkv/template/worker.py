"""The process that renders: reads a template, then conversations, and answers each within its bounds.

Frames on both pipes are a length of 4 bytes, little-endian, and that many bytes. A template that runs too long is ended
by the kernel with the whole process, whatever it is at; memory is bounded by the kernel too. The parent starts another.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
from typing import IO, Any, Final

from jinja2 import Template

from pagedkv.template.environment import ChatEnvironment, special_texts
from pagedkv.template.origin import LAST, Text, origins_of, runs_of, said, written

MEMORY_BYTES: Final = 512 * 2**20  # beyond what the interpreter has taken at its start
MAX_RENDERED_BYTES: Final = 2 * 2**20  # of UTF-8
_MAX_MESSAGE = 1_000  # characters of an error
_LENGTH = struct.Struct("<I")


class _Refused(Exception):
    """The conversation cannot be rendered, for a reason in its text."""


def main() -> None:
    """Serve standard input until it ends."""
    reader, writer = sys.stdin.buffer, sys.stdout.buffer
    _bound_memory()
    setup = json.loads(read_frame(reader) or "{}")
    renderer = _Renderer(setup) if setup else None
    while renderer is not None and (frame := read_frame(reader)) is not None:
        signal.setitimer(signal.ITIMER_PROF, setup["cpu_seconds"])  # nobody handles its signal: it ends the process
        answer = renderer.answer(frame)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        write_frame(writer, answer)


def read_frame(reader: IO[bytes]) -> bytes | None:
    """Return the next frame, None at the end."""
    head = reader.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = reader.read(length)
    return data if len(data) == length else None


def write_frame(writer: IO[bytes], data: bytes) -> None:
    """Send a frame."""
    writer.write(_LENGTH.pack(len(data)))
    writer.write(data)
    writer.flush()


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Renderer:
    def __init__(self, setup: dict[str, Any]) -> None:
        self._source: str = setup["source"]
        self._special = special_texts(setup["special"])
        self._template: Template | None = None

    def answer(self, frame: bytes) -> bytes:
        """Return a line of JSON, {"runs": ...} or {"error": ...}, and after the former's the text."""
        try:
            text = self._render(json.loads(frame))
            data = str.__str__(text).encode("utf-8")
            if len(data) > MAX_RENDERED_BYTES:
                raise _Refused(f"it puts out {len(data)} bytes, limit {MAX_RENDERED_BYTES}")
            return json.dumps({"runs": runs_of(text)}).encode() + b"\n" + data
        except MemoryError:
            return _error(f"it takes more than {MEMORY_BYTES >> 20} MiB of memory")
        except RecursionError:
            return _error("it is nested too deeply")
        except Exception as error:  # a template is a program: anything it does wrong is about these messages
            return _error(str(error) or type(error).__name__)

    def _render(self, request: dict[str, Any]) -> Text:
        if self._template is None:
            self._template = ChatEnvironment().from_string(self._source)
        given = request["messages"]
        last = len(given) - 1
        messages = [
            {"role": written(turn["role"]), "content": said(turn["content"], last=at == last)}
            for at, turn in enumerate(given)
        ]
        context = {"tools": None, "documents": None, **self._special}
        text = self._template.render(
            messages=messages, add_generation_prompt=request["add_generation_prompt"], **context
        )
        assert isinstance(text, Text)
        return _cut_behind_last(text) if request["continue_final_message"] else text


def _cut_behind_last(text: Text) -> Text:
    """Return the text up to the last character of the last message that is left in it."""
    end = origins_of(text).rfind(LAST) + 1
    if not end:
        raise _Refused("it leaves nothing of the last message to be continued")
    return text[:end]


def _error(message: str) -> bytes:
    return json.dumps({"error": message[:_MAX_MESSAGE]}).encode() + b"\n"
