"""What one large message costs everybody else: `./run bench large-messages`.

The server is a process of its own with a tiny model; another process calls GetUsage every 10 ms all the while; this one
sends each message several times, packed beforehand. A message holds nobody up if the other's longest wait stays within
50 ms of its longest while nothing else happens, which is measured before each.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from pagedkv.v1 import generation_pb2, kv_cache_pb2, tensor_pb2
from tests.bench.report import print_table, write_result
from tests.helpers.process import ServiceProcess
from tests.helpers.tiny_models import HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, make_tiny_model

ALLOWED_MS = 50.0  # beyond the quiet maximum
QUIET_SECONDS, TAIL_SECONDS, CALL_SECONDS = 2.0, 0.3, 60.0
COLUMNS = ("message", "MiB", "answer", "ms until it", "quiet maximum", "longest wait", "median of rounds", "held up")
OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))
FLOAT32 = tensor_pb2.DATA_TYPE_FLOAT32


@dataclass(frozen=True, slots=True)
class Message:
    """A method and the bytes of its request."""

    name: str
    method: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Figure:
    """What became of a message, and what the other client saw meanwhile: milliseconds, the worst of all rounds."""

    message: str
    megabytes: float
    answer: str
    answer_ms: float
    quiet_ms: float
    longest_ms: float
    median_ms: float

    @property
    def is_within(self) -> bool:
        return self.longest_ms <= self.quiet_ms + ALLOWED_MS


def make_messages() -> Iterator[Message]:
    """Yield every kind of large message, one at a time: together they would be a gigabyte."""
    cache, generation = kv_cache_pb2, generation_pb2
    names = [f"sequence-{at}" for at in range(1_000_000)]
    ids = np.arange(8_000_000, dtype=np.int32) & 127
    slopes = cache.AttentionOptions(alibi_slopes=np.ones(4_000_000, np.float32))
    rows = _tensor(31 * 2**20, NUM_KV_HEADS)
    half = _tensor(15 * 2**20, NUM_KV_HEADS)
    attended = _tensor(30 * 2**20, NUM_HEADS)
    text = "word " * (8 * 2**20 // 5)
    requests = {
        "Allocate, 8M token ids": cache.AllocateRequest(sequence_id="a", token_ids=ids),
        "Allocate, 30 MB request id": cache.AllocateRequest(sequence_id="a", request_id="x" * 30_000_000),
        "Allocate, 33 MB salt": cache.AllocateRequest(sequence_id="a", salt=bytes(33_000_000)),
        "Allocate, 33 MB sequence id": cache.AllocateRequest(sequence_id="\u20ac" * 11_000_000),
        "Free, 1M ids": cache.FreeRequest(sequence_ids=names),
        "Free, 16M empty ids": cache.FreeRequest(sequence_ids=[""] * 16_000_000),
        "SwapOut, 1M ids": cache.SwapOutRequest(sequence_ids=names),
        "Append, 2 x 15 MiB of rows": cache.AppendRequest(sequence_id="rows", keys=half, values=half, layer=0),
        "Append, 31 MiB of keys": cache.AppendRequest(sequence_id="rows", keys=rows, layer=0),
        "Append, 4M token ids": cache.AppendRequest(sequence_id="rows", layer=0, token_ids=ids[:4_000_000]),
        "Append, shape of 4M extents": cache.AppendRequest(
            sequence_id="rows", keys=tensor_pb2.Tensor(shape=ids[:4_000_000])
        ),
        "Attend, 4M slopes": cache.AttendRequest(sequence_ids=["rows"], options=slopes),
        "Attend, 1M ids": cache.AttendRequest(sequence_ids=names),
        "Attend, 8M query lengths": cache.AttendRequest(sequence_ids=["rows"], query_lengths=ids),
        "Attend, 8M positions": cache.AttendRequest(sequence_ids=["rows"], positions=ids),
        "Attend, 30 MiB of queries": cache.AttendRequest(
            sequence_ids=["rows"],
            queries=attended,
            query_lengths=[attended.shape[0]],
            options=cache.AttentionOptions(window=1),
        ),
        "ListSequences, 33 MB page token": cache.ListSequencesRequest(page_token="1" * 33_000_000),
        "GetSequence, 33 MB id": cache.GetSequenceRequest(sequence_id="x" * 33_000_000),
        "Tokenize, 8 MB": generation.TokenizeRequest(text=text),
        "Detokenize, 8M token ids": generation.DetokenizeRequest(token_ids=ids),
        "Generate, 8 MB of text": generation.GenerateRequest(text=generation.TextPrompt(text=text)),
        "Generate, 8M token ids": generation.GenerateRequest(tokens=generation.TokenPrompt(token_ids=ids)),
        "Generate, 1M stop strings": _sampling(stop=["ab"] * 1_000_000),
        "Generate, 8M stop token ids": _sampling(stop_token_ids=ids),
        "Generate, 1M chat messages": generation.GenerateRequest(
            chat=generation.ChatPrompt(messages=[generation.ChatMessage(role="user", content="a")] * 1_000_000)
        ),
    }
    while requests:
        name = next(iter(requests))
        request = requests.pop(name)
        service = "KvCache" if request.DESCRIPTOR.file is kv_cache_pb2.DESCRIPTOR else "Generation"
        method = f"/pagedkv.v1.{service}/{type(request).__name__.removesuffix('Request')}"
        yield Message(name, method, request.SerializeToString())
    yield Message("Allocate, 11M unknown fields", "/pagedkv.v1.KvCache/Allocate", b"\xf8\x07\x01" * 11_000_000)
    yield Message("Append, 16M empty tensors", "/pagedkv.v1.KvCache/Append", b"\x12\x00" * 16_000_000)
    yield Message("Free, 33 MB of zeros", "/pagedkv.v1.KvCache/Free", bytes(33_000_000))
    yield Message("Free, 60 MB, beyond the limit", "/pagedkv.v1.KvCache/Free", bytes(60_000_000))


def _tensor(num_bytes: int, num_heads: int) -> tensor_pb2.Tensor:
    num_rows = num_bytes // (4 * num_heads * HEAD_DIM)
    data = np.random.default_rng(0).standard_normal((num_rows, num_heads, HEAD_DIM), np.float32).tobytes()
    return tensor_pb2.Tensor(data_type=FLOAT32, shape=(num_rows, num_heads, HEAD_DIM), data=data)


def _sampling(**options: Any) -> generation_pb2.GenerateRequest:
    prompt = generation_pb2.TextPrompt(text="word")
    return generation_pb2.GenerateRequest(text=prompt, sampling=generation_pb2.SamplingOptions(**options))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench large-messages", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="times that each message is sent")
    parser.add_argument("--only", default="", help="only messages whose name contains this")
    parser.add_argument("--probe", metavar="ADDRESS", help="be the other client of the server at this address")
    options = parser.parse_args(argv)
    if options.probe:
        return probe(options.probe)
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_model(Path(directory), overrides={"llama.context_length": 131_072})
        arguments = ("serve", str(model), "--blocks", "12288", "--backend", "cpu")
        with ServiceProcess(*arguments) as service:
            figures = bench(service.address, options.rounds, options.only)
    print_table("Waits of another client, milliseconds", COLUMNS, [row(figure) for figure in figures])
    if not options.only:
        path = write_result("large_messages", {"unit": "ms", "figures": [asdict(figure) for figure in figures]})
        print(f"written to {path}")
    return 0 if all(figure.is_within for figure in figures) else 1


def probe(address: str) -> int:
    """Call GetUsage every 10 ms until stdin ends, and tell when each call began and how long it took."""
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary("/pagedkv.v1.KvCache/GetUsage")
        print("ready", flush=True)
        while True:
            started = time.monotonic()
            call(b"", timeout=CALL_SECONDS)
            print(started, time.monotonic(), flush=True)
            time.sleep(max(0.0, 0.01 - (time.monotonic() - started)))


class Probe:
    """The other client, in a process of its own: a busy sender in this one would hold it up too."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def longest(self, begin: float, end: float) -> float:
        """Return the longest call, in milliseconds, of those that ran at some time in [begin, end]."""
        longest = 0.0
        assert self._process.stdout is not None
        for line in self._process.stdout:
            started, ended = map(float, line.split())
            if ended >= begin:
                longest = max(longest, ended - started)
            if started > end:
                break
        return longest * 1e3


@contextmanager
def probing(address: str) -> Iterator[Probe]:
    """Run the other client until the block ends."""
    command = [sys.executable, "-m", "tests.bench", "large-messages", "--probe", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Probe(process)
        finally:
            process.kill()


def bench(address: str, num_rounds: int, only: str) -> list[Figure]:
    """Send every message and return its figure."""
    with probing(address) as other, grpc.insecure_channel(address, options=OPTIONS) as channel:
        channel.unary_unary("/pagedkv.v1.KvCache/Allocate")(
            kv_cache_pb2.AllocateRequest(sequence_id="rows").SerializeToString()
        )
        figures = []
        for message in make_messages():
            if only in message.name:
                figures.append(bench_message(channel, other, message, num_rounds))
                print(*row(figures[-1]), sep="  ")
        return figures


def bench_message(channel: grpc.Channel, other: Probe, message: Message, num_rounds: int) -> Figure:
    """Send one message several times."""
    waits, times = [], []
    begin = time.monotonic()
    time.sleep(QUIET_SECONDS)
    quiet = other.longest(begin, time.monotonic())
    for _ in range(num_rounds):
        begin = time.monotonic()
        answer = send(channel, message)
        times.append((time.monotonic() - begin) * 1e3)
        time.sleep(TAIL_SECONDS)
        waits.append(other.longest(begin, time.monotonic()))
    megabytes = len(message.data) / 2**20
    return Figure(message.name, megabytes, answer, max(times), quiet, max(waits), median(waits))


def send(channel: grpc.Channel, message: Message) -> str:
    """Send a message and return the name of its status."""
    is_stream = message.method.endswith("/Generate")
    call = (channel.unary_stream if is_stream else channel.unary_unary)(message.method)
    try:
        answer = call(message.data, timeout=CALL_SECONDS)
        if is_stream:
            next(iter(answer))
            answer.cancel()
    except grpc.RpcError as error:
        return str(error.code().name)
    return "OK"


def row(figure: Figure) -> tuple[object, ...]:
    """Return the figure as a line of the table."""
    times = (figure.answer_ms, figure.quiet_ms, figure.longest_ms, figure.median_ms)
    verdict = "no" if figure.is_within else "YES"
    return (figure.message, f"{figure.megabytes:.1f}", figure.answer, *(f"{value:.0f}" for value in times), verdict)
