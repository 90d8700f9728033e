"""`pagedkv generate`: stream a generation from a running service to standard output."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from rich.console import Console

from pagedkv.cli.console import as_text, forgive, make_console
from pagedkv.cli.speed import Stopwatch
from pagedkv.client import AsyncClient
from pagedkv.errors import InvalidArgument


def run_generate(target: str, prompt: str, *, is_chat: bool, with_stats: bool, **options: Any) -> int:
    """Print the text as it comes, whole lines only at its end, however it ends.

    Return 1 if the server cut it off, else 0. Raises what the client raises.
    """
    forgive(sys.stdout)
    text = read_standard_input() if prompt == "-" else as_text(prompt, "prompt")
    source: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    console, stopwatch = make_console(stderr=True), Stopwatch()
    reason = asyncio.run(_stream(target, stopwatch, {**source, **options}))
    if with_stats:
        _tell(console, stopwatch, reason)
    if reason == "cancelled":
        console.print("cancelled by the server: this is not the whole answer")
    return int(reason == "cancelled")


async def _stream(target: str, stopwatch: Stopwatch, options: dict[str, Any]) -> str | None:
    """Print the text and the end of its line; return why it ended."""
    reason = None
    async with AsyncClient(target) as client:
        try:
            async for chunk in client.generate(**options):
                stopwatch.note(chunk)
                reason = chunk.finish_reason
                print(chunk.text, end="", flush=True)
        finally:
            if stopwatch.num_output_tokens or reason:
                print(flush=True)  # what is said next, an error too, is on a line of its own
    return reason


def read_standard_input() -> str:
    """Return the text there, without the end of its last line. Raises InvalidArgument."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"standard input is not UTF-8: {error}", field="prompt") from error


def _tell(console: Console, stopwatch: Stopwatch, reason: str | None) -> None:
    console.print(
        f"{reason}: {stopwatch.num_prompt_tokens} prompt tokens ({stopwatch.num_cached_tokens} cached), "
        f"{stopwatch.num_output_tokens} generated; first after {stopwatch.prefill_seconds * 1e3:.0f} ms, "
        f"prefill {stopwatch.prefill_text}, decode {stopwatch.decode_text}",
        soft_wrap=True,
    )
