"""`pagedkv demo`: from nothing to a streamed answer, through the same service and client that everyone uses."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from pagedkv.cli.assemble import Service, build_service
from pagedkv.cli.console import make_console
from pagedkv.cli.options import ServeOptions
from pagedkv.cli.progress import CompileProgress
from pagedkv.cli.speed import Stopwatch
from pagedkv.cli.threads import in_thread
from pagedkv.client import AsyncClient

_MAX_TOKENS = 64
_FOLLOW_UP = "And what is the capital of Italy?"


async def run_demo(question: str, threads: int | None) -> None:
    """Serve SmolLM2 on a free port, ask the question and a follow-up, print what the cache did."""
    console = make_console()
    options = ServeOptions(
        model="smollm2", shape=None, port=0, metrics_port=None, memory="256MiB", threads=threads, drain_seconds=1.0
    )
    with CompileProgress(console) as progress:
        service = await in_thread(lambda: build_service(options, on_compile=progress.update, say=console.print))
    await service.start()
    try:
        await _talk(service, console, question)
    finally:
        await service.stop()


async def _talk(service: Service, console: Console, question: str) -> None:
    console.print(f"[bold]service[/]  gRPC on {service.address}\n")
    async with AsyncClient(service.address) as client:
        messages = [{"role": "user", "content": question}]
        first, answer = await _ask(client, messages, console)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": _FOLLOW_UP}]
        second, _ = await _ask(client, messages, console)
        usage = await client.usage()
    both, used = first + second, usage.cached + usage.private + usage.shared
    console.print(
        f"prefill [bold]{both.prefill_text}[/], decode [bold]{both.decode_text}[/], "
        f"first token after {first.prefill_seconds * 1e3:.0f} and {second.prefill_seconds * 1e3:.0f} ms, "
        f"{used} of {usage.total} blocks used, "
        f"{second.num_cached_tokens} prefix tokens of the follow-up hit in the cache",
        soft_wrap=True,
    )


async def _ask(client: AsyncClient, messages: list[dict[str, str]], console: Console) -> tuple[Stopwatch, str]:
    """Print question and answer as they come; return the answer's speeds and text."""
    console.print(f"[bold cyan]>[/] {escape(messages[-1]['content'])}")
    stopwatch, text = Stopwatch(), ""
    async for chunk in client.generate(messages=messages, max_tokens=_MAX_TOKENS, temperature=0.0):
        stopwatch.note(chunk)
        text += chunk.text
        console.print(chunk.text, end="", soft_wrap=True, markup=False)
    console.print("\n")
    return stopwatch, text
