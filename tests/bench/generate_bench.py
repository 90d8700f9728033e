"""Text generation through the gRPC service itself: prefill, decode and memory at 1, 8 and 32 concurrent requests."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from pagedkv.client import AsyncClient
from tests.bench.report import write_result

PUBLISHED = {  # tokens/s on another machine (2 cores, AVX-512 + AMX): prefill of 512, decode alone, decode at 8
    "llama.cpp": (240, 71, 102),
    "transformers": (937, 24, 70),
    "OpenVINO GenAI": (1823, 61, 215),
    "vLLM CPU": (1828, 23, 149),
}


@dataclass(slots=True)
class LoadFigures:
    """Medians over the rounds, at one concurrency."""

    concurrency: int
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    first_token_seconds: float
    resident_mib: float


def main(argv: Sequence[str]) -> int:
    """Start a service, load it, print the table, write the JSON."""
    parser = argparse.ArgumentParser(prog="./run bench generate", description=__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args(argv)
    process, address = _start_service(options)
    try:
        figures = asyncio.run(_measure(address, psutil.Process(process.pid), options))
    finally:
        process.terminate()
        process.wait(30)
    _print(figures, options)
    write_result("generate", {"options": vars(options), "results": [asdict(figure) for figure in figures]})
    return 0


def _start_service(options: argparse.Namespace) -> tuple[subprocess.Popen[str], str]:
    needed = max(options.concurrency) * (options.prompt_tokens + options.new_tokens + 16)
    command = [Path(sys.executable).parent / "pagedkv", "serve", "smollm2", "--port=0", "--metrics-port=-1"]
    command += [f"--blocks={needed // 16 + 1}", f"--dtype={options.dtype}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"gRPC on (\S+)", line):
            return process, found.group(1)
    raise RuntimeError(f"the service ended with code {process.wait()}")


async def _measure(address: str, process: psutil.Process, options: argparse.Namespace) -> list[LoadFigures]:
    figures = []
    async with AsyncClient(address) as client:
        vocab_size = 40_000  # any ids do; distinct prompts keep the prefix cache out of the figures
        await _one(client, [7] * 32, 4)
        for concurrency in options.concurrency:
            rounds = [
                await _round(client, concurrency, options, first_id=(1 + concurrency * 97 + at * 31) % vocab_size)
                for at in range(options.rounds)
            ]
            prefill, decode, first = (median(column) for column in zip(*rounds, strict=True))
            resident = process.memory_info().rss / 2**20
            figures.append(LoadFigures(concurrency, prefill, decode, first, resident))
    return figures


async def _round(
    client: AsyncClient, concurrency: int, options: argparse.Namespace, first_id: int
) -> tuple[float, float, float]:
    """Return prefill and decode tokens/s over all requests together, and the median time to first token.

    Decoding is counted while every request decodes: from the last first token to the first last one.
    """
    prompts = [
        [100 + (first_id + 1009 * at + 7 * position) % 40_000 for position in range(options.prompt_tokens)]
        for at in range(concurrency)
    ]
    started = time.perf_counter()
    times = await asyncio.gather(*(_one(client, prompt, options.new_tokens) for prompt in prompts))
    last_first, first_end = max(stamps[0] for stamps in times), min(stamps[-1] for stamps in times)
    prefill = concurrency * options.prompt_tokens / (last_first - started)
    decoded = sum(last_first < stamp <= first_end for stamps in times for stamp in stamps)
    return prefill, decoded / (first_end - last_first), median(stamps[0] - started for stamps in times)


async def _one(client: AsyncClient, prompt: list[int], new_tokens: int) -> list[float]:
    """Return when each token came."""
    stamps: list[float] = []
    async for chunk in client.generate(token_ids=prompt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True):
        stamps += [time.perf_counter()] * len(chunk.token_ids)
    return stamps


def _print(figures: Sequence[LoadFigures], options: argparse.Namespace) -> None:
    shape = f"{options.prompt_tokens} prompt + {options.new_tokens} new tokens, KV {options.dtype}"
    table = Table(title=f"SmolLM2-135M through gRPC, {shape}")
    for heading in ("concurrent", "prefill tokens/s", "decode tokens/s", "first token s", "resident MiB"):
        table.add_column(heading, justify="right")
    for row in figures:
        values = (row.prefill_tokens_per_second, row.decode_tokens_per_second)
        table.add_row(
            str(row.concurrency),
            *(f"{v:.0f}" for v in values),
            f"{row.first_token_seconds:.2f}",
            f"{row.resident_mib:.0f}",
        )
    console = Console(width=110)
    console.print(table)
    published = "; ".join(f"{name} {' / '.join(map(str, row))}" for name, row in PUBLISHED.items())
    console.print(f"Published elsewhere, prefill / decode alone / at 8: {published}", highlight=False)
