"""`pagedkv demo`: from nothing to a streamed answer, through the same service and client that everyone uses."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from pagedkv.cli.assemble import Service, build_service
from pagedkv.cli.options import ServeOptions
from pagedkv.cli.progress import CompileProgress
from pagedkv.client import AsyncClient

_MAX_TOKENS = 64
_FOLLOW_UP = "And what is the capital of Italy?"


@dataclass(slots=True)
class _Answer:
    text: str
    num_tokens: int
    num_cached_tokens: int
    first_token_seconds: float
    seconds: float


async def run_demo(question: str, threads: int | None) -> None:
    """Serve SmolLM2 on a free port, ask the question and a follow-up, print what the cache did."""
    console = Console(highlight=False)
    options = ServeOptions(
        model="smollm2", shape=None, port=0, metrics_port=None, memory="256MiB", threads=threads, drain_seconds=1.0
    )
    with CompileProgress(console) as progress:
        service = await asyncio.to_thread(build_service, options, on_compile=progress.update, say=console.print)
    await service.start()
    try:
        await _talk(service, console, question)
    finally:
        await service.stop()


async def _talk(service: Service, console: Console, question: str) -> None:
    console.print(f"[bold]service[/]  gRPC on {service.address}\n")
    async with AsyncClient(service.address) as client:
        messages = [{"role": "user", "content": question}]
        first = await _ask(client, messages, console)
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": _FOLLOW_UP}]
        second = await _ask(client, messages, console)
        usage = await client.usage()
    num_tokens, seconds = first.num_tokens + second.num_tokens, first.seconds + second.seconds
    used = usage.cached + usage.private + usage.shared
    console.print(
        f"[bold]{num_tokens / seconds:.0f} tokens/s[/], "
        f"first token after {first.first_token_seconds * 1e3:.0f} and {second.first_token_seconds * 1e3:.0f} ms, "
        f"{used} of {usage.total} blocks used, "
        f"{second.num_cached_tokens} prefix tokens of the follow-up hit in the cache",
        soft_wrap=True,
    )


async def _ask(client: AsyncClient, messages: list[dict[str, str]], console: Console) -> _Answer:
    console.print(f"[bold cyan]>[/] {escape(messages[-1]['content'])}")
    answer = _Answer("", 0, 0, 0.0, 0.0)
    started = time.perf_counter()
    async for chunk in client.generate(messages=messages, max_tokens=_MAX_TOKENS, temperature=0.0):
        if not answer.num_tokens:
            answer.first_token_seconds = time.perf_counter() - started
        answer.text += chunk.text
        answer.num_tokens += len(chunk.token_ids)
        answer.num_cached_tokens = max(answer.num_cached_tokens, chunk.num_cached_tokens)
        console.print(chunk.text, end="", soft_wrap=True, markup=False)
    answer.seconds = time.perf_counter() - started
    console.print("\n")
    return answer
