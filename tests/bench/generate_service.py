"""pagedkv as one system of the generation benchmark: its service in a process of its own, asked over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import psutil

import pagedkv
from pagedkv.client import AsyncClient
from tests.bench.generate_figures import Reply

_BLOCK_SIZE = 16


class System(Protocol):
    """A system under test."""

    name: str
    version: str
    how: str
    load_seconds: float

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Reply: ...

    def close(self) -> None: ...


class Service:
    """pagedkv in a process of its own, asked over gRPC; `activations` other than float32 are part of its name."""

    def __init__(self, options: argparse.Namespace, activations: str = "float32") -> None:
        dtype = options.dtype if activations == "float32" else options.rounded_dtype
        num_blocks = max(options.concurrency) * (-(-(options.prompt_tokens + options.new_tokens) // _BLOCK_SIZE) + 1)
        command = [Path(sys.executable).parent / "pagedkv", "serve", "smollm2", "--port=0", "--metrics-port=-1"]
        command += [f"--blocks={num_blocks}", f"--dtype={dtype}", f"--activations={activations}"]
        self.name = "pagedkv" if activations == "float32" else f"pagedkv {activations}"
        self.version = f"pagedkv {pagedkv.__version__}"
        self.how = f"over gRPC, weights as stored, KV {dtype}, activations {activations}"
        self.pool_tokens = num_blocks * _BLOCK_SIZE
        started = time.perf_counter()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self._address = self._find_address()
        self.load_seconds = time.perf_counter() - started

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Reply:
        return asyncio.run(self._generate(prompts, new_tokens))

    def close(self) -> None:
        self._process.terminate()
        self._process.communicate(timeout=30)

    async def _generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Reply:
        async with AsyncClient(self._address) as client:
            await client.model_info()
            started = time.perf_counter()
            answers = await asyncio.gather(*(_one(client, prompt, new_tokens, started) for prompt in prompts))
        resident = psutil.Process(self._process.pid).memory_info().rss / 2**20
        return Reply([stamps for stamps, _ in answers], [ids for _, ids in answers], resident)

    def _find_address(self) -> str:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if found := re.search(r"gRPC on (\S+)", line):
                return found.group(1)
        raise RuntimeError(f"the service ended with code {self._process.wait()}")


async def _one(
    client: AsyncClient, prompt: Sequence[int], new_tokens: int, started: float
) -> tuple[list[float], list[int]]:
    stamps: list[float] = []
    token_ids: list[int] = []
    async for chunk in client.generate(token_ids=prompt, max_tokens=new_tokens, temperature=0.0, ignore_eos=True):
        stamps += [time.perf_counter() - started] * len(chunk.token_ids)
        token_ids += chunk.token_ids
    return stamps, token_ids
