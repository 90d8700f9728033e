"""Serves one peer of the generation benchmark from the peer's own environment: `generate_peer.py KIND OPTIONS`.

Reads one JSON line a request from standard input and answers with one on standard output:
{"prompts": [[token id, ...], ...], "new_tokens": n} becomes {"stamps": [[seconds since the request, a token], ...],
"token_ids": [[...], ...], "resident_mib": x}. Every prompt gets exactly n greedy tokens, end tokens ignored.
The first line out is {"version": text, "load_seconds": x}. What the peer itself prints goes to standard error.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any


class Recorder:
    """Stamps and ids of the tokens of one request's prompts."""

    def __init__(self, num_prompts: int) -> None:
        self._started = time.perf_counter()
        self.stamps: list[list[float]] = [[] for _ in range(num_prompts)]
        self.token_ids: list[list[int]] = [[] for _ in range(num_prompts)]

    def add(self, prompt: int, *token_ids: int) -> None:
        """Note that the tokens came just now."""
        now = time.perf_counter() - self._started
        self.stamps[prompt] += [now] * len(token_ids)
        self.token_ids[prompt] += token_ids


def resident_mib(pid: int) -> float:
    """Return a process's resident memory."""
    with open(f"/proc/{pid}/status") as file:
        (line,) = (line for line in file if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def main() -> None:
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries print where they like
    started = time.perf_counter()
    peer: Any = importlib.import_module(f"generate_peer_{kind}").Peer(**options)
    print(json.dumps({"version": peer.version, "load_seconds": time.perf_counter() - started}), file=replies)
    for line in sys.stdin:
        request = json.loads(line)
        recorder = Recorder(len(request["prompts"]))
        peer.generate(request["prompts"], request["new_tokens"], recorder)
        reply = {"stamps": recorder.stamps, "token_ids": recorder.token_ids, "resident_mib": resident_mib(peer.pid)}
        print(json.dumps(reply), file=replies)
    peer.close()


if __name__ == "__main__":
    main()
