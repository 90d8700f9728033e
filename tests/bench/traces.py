"""Workloads: arrivals with prompt and output lengths, generated from published means or read from a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

MAX_SEQUENCE_TOKENS = 2048  # the model of the vLLM paper's Figure 2, OPT-13B

# Mean tokens (input, output) of the vLLM paper's Figure 11.
PUBLISHED_MEANS = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
GENERATORS = ("gamma2", "exponential", "lognormal")
_SIGMA = 1.0  # of the logarithm: right-skewed with a tail to the limit, as the figure shows


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request: when it comes (seconds) and how long its prompt and its output are (tokens, at least 1)."""

    arrival_seconds: float
    num_prompt_tokens: int
    num_output_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens of the finished sequence."""
        return self.num_prompt_tokens + self.num_output_tokens


class TraceError(ValueError):
    """A trace file has bad rows; the message names each line and reason."""


def generate_trace(workload: str, num_requests: int, *, generator: str = "gamma2", seed: int = 0) -> list[TraceRequest]:
    """Return requests whose lengths have the workload's published means, all there from the start (saturation)."""
    rng = np.random.default_rng(seed)
    prompt_mean, output_mean = PUBLISHED_MEANS[workload]
    prompts = _draw_lengths(rng, generator, prompt_mean, num_requests)
    outputs = _draw_lengths(rng, generator, output_mean, num_requests)
    outputs = np.minimum(outputs, MAX_SEQUENCE_TOKENS - prompts)
    return [TraceRequest(0.0, int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]


def _draw_lengths(rng: np.random.Generator, generator: str, mean: float, size: int) -> np.ndarray:
    """Draw lengths in [1, 2047]; the untruncated mean is raised until the truncated one meets the published mean."""
    scale = mean
    for _ in range(50):
        lengths = np.clip(
            np.rint(_draw(np.random.default_rng(1), generator, scale, 200_000)), 1, MAX_SEQUENCE_TOKENS - 1
        )
        scale *= mean / lengths.mean()
    return np.clip(np.rint(_draw(rng, generator, scale, size)), 1, MAX_SEQUENCE_TOKENS - 1).astype(np.int64)


def _draw(rng: np.random.Generator, generator: str, mean: float, size: int) -> np.ndarray:
    if generator == "lognormal":
        return rng.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, size)
    if generator == "exponential":
        return rng.exponential(mean, size)
    if generator == "gamma2":
        return rng.gamma(2.0, mean / 2, size)
    raise ValueError(f"generator must be one of {GENERATORS}, got {generator!r}")


_COLUMNS = {
    "arrival": ("timestamp", "arrival", "arrival_seconds", "time"),
    "prompt": ("contexttokens", "prompt", "prompt_tokens", "num_prompt_tokens", "input_tokens"),
    "output": ("generatedtokens", "output", "output_tokens", "num_output_tokens"),
}


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a CSV file with a header: an arrival (seconds or a timestamp), prompt tokens, output tokens.

    The column names of the public Azure LLM inference traces are known. Raises TraceError naming every bad line;
    nothing is returned then.
    """
    with path.open(newline="") as file:
        reader = csv.reader(file)
        columns = _find_columns(path, next(reader, []))
        rows = list(_parse_rows(reader, columns))
    errors = [row for row in rows if isinstance(row, str)]
    if errors:
        more = f"\n... and {len(errors) - 10} more" if len(errors) > 10 else ""
        raise TraceError(f"{path}: {len(errors)} bad rows\n" + "\n".join(errors[:10]) + more)
    requests = sorted((row for row in rows if isinstance(row, TraceRequest)), key=lambda row: row.arrival_seconds)
    if not requests:
        raise TraceError(f"{path}: no rows")
    first = requests[0].arrival_seconds
    return [TraceRequest(r.arrival_seconds - first, r.num_prompt_tokens, r.num_output_tokens) for r in requests]


def _find_columns(path: Path, header: list[str]) -> tuple[int, int, int]:
    names = [name.strip().lower() for name in header]
    found = []
    for kind, known in _COLUMNS.items():
        at = next((names.index(name) for name in known if name in names), None)
        if at is None:
            raise TraceError(f"{path}: line 1: no column for the {kind}; one of {', '.join(known)} is needed")
        found.append(at)
    return found[0], found[1], found[2]


def _parse_rows(reader: Iterator[list[str]], columns: tuple[int, int, int]) -> Iterator[TraceRequest | str]:
    for line, row in enumerate(reader, start=2):
        if not row:
            continue
        try:
            arrival, prompt, output = (row[column].strip() for column in columns)
            request = TraceRequest(_parse_arrival(arrival), int(prompt), int(output))
            if min(request.num_prompt_tokens, request.num_output_tokens) < 1:
                raise ValueError("token counts must be at least 1")
        except (ValueError, IndexError) as error:
            yield f"line {line}: {error}"
        else:
            yield request


def _parse_arrival(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return datetime.fromisoformat(text[:26]).timestamp()
