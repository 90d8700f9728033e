"""Text generation through the gRPC service itself, in turns with other systems: `./run bench generate [--peers]`.

All get the same prompts as token ids, together, and give the same number of greedy tokens to each, end tokens ignored.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pagedkv.config import ACTIVATIONS
from pagedkv.dtypes import DType
from pagedkv.model.hub import fetch_smollm2
from tests.bench.generate_figures import Rates, Reply, Samples, equal_tokens
from tests.bench.generate_limit import Machine, model_work
from tests.bench.generate_peers import PEERS, GeneratePeer
from tests.bench.generate_report import Run, SystemNote, print_run, save_run
from tests.bench.generate_service import Service, System
from tests.bench.peers import PeerUnavailable

GOLDEN = Path(__file__).parents[1] / "model" / "golden" / "smollm2_greedy.json"
GOLDEN_TOKENS = 16
VOCABULARY = 40_000  # any ids do; distinct prompts keep a prefix cache out of the figures
QUIET_SECONDS = 0.5  # idle threads spin for a while, which the next turn must not pay for


def main(argv: Sequence[str]) -> int:
    """Start the systems, load them in turns, print the tables; the JSON is written after each concurrency."""
    options, load_before = parse(argv), os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no service outlives the benchmark
    machine, service = Machine(), Service(options)
    systems: list[System] = [service]
    try:
        systems += [Service(options, activations) for activations in options.rounded]
        missing = start_peers(systems, options, machine.num_threads)
        notes, rates = warm_up(systems, missing, options.prompt_tokens), []
        work = model_work(fetch_smollm2(), DType(options.dtype))
        sizes = [size / 2**20 for size in (work.weight_bytes, service.pool_tokens * work.kv_bytes)]
        for at, (concurrency, rounds) in enumerate(zip(options.concurrency, options.rounds, strict=True)):
            rates += measure(systems, missing, machine, options, concurrency, rounds)
            measured = options.concurrency[: at + 1]
            limits = {c: machine.limits(work, options.prompt_tokens, options.new_tokens, c) for c in measured}
            run = Run(vars(options), notes, missing, rates, limits, *sizes, GOLDEN_TOKENS, load_before)
            save_run(run)
    finally:
        for system in systems:
            system.close()
        machine.close()
    print_run(run)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="./run bench generate", description=__doc__)
    names = [spec.name for spec in PEERS]
    parser.add_argument("--peers", nargs="*", metavar="NAME", help=f"all of them or some of: {', '.join(names)}")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, nargs="+", default=[2, 2, 1], help="one number for each concurrency")
    parser.add_argument("--dtype", default="float32", help="of pagedkv's KV")
    parser.add_argument("--rounded-dtype", default="float16", help="of pagedkv's KV where activations are rounded")
    rounded = "other activations of pagedkv to time beside float32; none: leave it out"
    parser.add_argument("--rounded", nargs="*", default=["int16"], choices=ACTIVATIONS[1:], help=rounded)
    options = parser.parse_args(argv)
    if unknown := set(options.peers or ()) - set(names):
        parser.error(f"unknown peers {sorted(unknown)}; known: {', '.join(names)}")
    if len(options.rounds) != len(options.concurrency):
        parser.error(f"--rounds needs {len(options.concurrency)} numbers, got {len(options.rounds)}")
    return options


def start_peers(systems: list[System], options: argparse.Namespace, num_threads: int) -> dict[str, str]:
    """Append the peers that run; return why the others do not."""
    missing: dict[str, str] = {}
    for spec in PEERS if options.peers is not None else ():
        if options.peers and spec.name not in options.peers:
            continue
        print(f"starting {spec.name} ...", file=sys.stderr)
        sizes = {"max_sequences": max(options.concurrency), "max_tokens": options.prompt_tokens + options.new_tokens}
        try:
            systems.append(GeneratePeer(spec, num_threads=num_threads, **sizes))
        except PeerUnavailable as error:
            missing[spec.name] = str(error)
    return missing


def warm_up(systems: list[System], missing: dict[str, str], prompt_tokens: int) -> list[SystemNote]:
    """Let each system complete a golden prompt, compare, and give it one prompt of the size to come."""
    case = json.loads(GOLDEN.read_text())["cases"][0]
    notes = []
    for system in list(systems):
        with leaving(system, systems, missing):
            reply = system.generate([case["prompt_token_ids"]], GOLDEN_TOKENS)
            system.generate(make_prompts(1, prompt_tokens, first_id=0), 4)
            greedy = equal_tokens(reply.token_ids[0], case["greedy_token_ids"])
            notes.append(SystemNote(system.name, system.version, system.how, system.load_seconds, greedy))
    return notes


@contextmanager
def leaving(system: System, systems: list[System], missing: dict[str, str]) -> Iterator[None]:
    """Move a peer that fails inside from `systems` to `missing`; pagedkv's own failure is the run's."""
    try:
        yield
    except PeerUnavailable as error:
        missing[system.name] = str(error)
        systems.remove(system)


def measure(
    systems: list[System],
    missing: dict[str, str],
    machine: Machine,
    options: argparse.Namespace,
    concurrency: int,
    rounds: int,
) -> list[Rates]:
    """Load all systems in turns, the machine's limits measured between them; who fails leaves `systems`."""
    samples = {system.name: Samples() for system in systems}
    for at in range(rounds):
        prompts = make_prompts(concurrency, options.prompt_tokens, first_id=1 + concurrency * 97 + at * 31)
        for system in list(systems):
            print(f"{concurrency} at once, round {at + 1} of {rounds}: {system.name}", file=sys.stderr)
            machine.sample()
            with leaving(system, systems, missing):
                samples[system.name].add(load(system, prompts, options.new_tokens), options.prompt_tokens)
    return [samples[system.name].rates(system.name, concurrency) for system in systems]


def load(system: System, prompts: Sequence[Sequence[int]], new_tokens: int) -> Reply:
    """Take one turn; every prompt must get all its tokens."""
    reply = system.generate(prompts, new_tokens)
    counts = {len(stamps) for stamps in reply.stamps}
    assert counts == {new_tokens}, f"{system.name} gave {counts} tokens, not {new_tokens}"
    time.sleep(QUIET_SECONDS)
    return reply


def make_prompts(count: int, num_tokens: int, first_id: int) -> list[list[int]]:
    """Return `count` prompts that begin differently."""
    return [
        [100 + (first_id + 1009 * at + 7 * position) % VOCABULARY for position in range(num_tokens)]
        for at in range(count)
    ]
