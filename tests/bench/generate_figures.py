"""What a generation benchmark reads from the moments at which tokens came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tests.bench.report import median_p10

_SLICE_TOKENS = 8  # of each request: decoding is rated slice by slice, so that p10 means something in a single round


@dataclass(frozen=True, slots=True)
class Reply:
    """What a system did with a batch of prompts that arrived together.

    `stamps[request]` are seconds since the batch was sent, one for each token of `token_ids[request]`.
    """

    stamps: list[list[float]]
    token_ids: list[list[int]]
    resident_mib: float


@dataclass(frozen=True, slots=True)
class Rates:
    """One system at one concurrency; rates count the tokens of all requests together.

    `decode` is the median over slices of the time in which every request decodes, `decode_p10` the rate of the
    fastest tenth of them (the 10th percentile of the time a token takes): what the machine does when left alone.
    Both are None where no request was still decoding when the last one began.
    """

    system: str
    concurrency: int
    prefill: float
    decode: float | None
    decode_p10: float | None
    first_token_seconds: float
    resident_mib: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Samples:
    """The rounds of one system at one concurrency."""

    prefill: list[float] = field(default_factory=list)
    decode_seconds: list[float] = field(default_factory=list)  # a token
    first_token: list[float] = field(default_factory=list)
    resident_mib: float = 0.0

    def add(self, reply: Reply, prompt_tokens: int) -> None:
        """Take one round in."""
        firsts = [stamps[0] for stamps in reply.stamps]
        self.prefill.append(len(firsts) * prompt_tokens / max(firsts))
        self.first_token.append(median(firsts))
        self.decode_seconds += decode_slices(reply.stamps)
        self.resident_mib = max(self.resident_mib, reply.resident_mib)

    def rates(self, system: str, concurrency: int) -> Rates:
        """Return the medians."""
        timing = median_p10(self.decode_seconds) if self.decode_seconds else None
        return Rates(
            system=system,
            concurrency=concurrency,
            prefill=median(self.prefill),
            decode=timing and 1 / timing.median,
            decode_p10=timing and 1 / timing.p10,
            first_token_seconds=median(self.first_token),
            resident_mib=self.resident_mib,
        )


def decode_slices(stamps: Sequence[Sequence[float]]) -> list[float]:
    """Return seconds a token, slice by slice, from the last first token to the first last one."""
    start, end = max(times[0] for times in stamps), min(times[-1] for times in stamps)
    moments = sorted(moment for times in stamps for moment in times if start < moment <= end)
    size = _SLICE_TOKENS * len(stamps)
    bounds = list(range(size, len(moments) + 1, size)) or [len(moments)]
    slices, before, since = [], 0, start
    for bound in bounds:
        if bound > before and moments[bound - 1] > since:
            slices.append((moments[bound - 1] - since) / (bound - before))
            before, since = bound, moments[bound - 1]
    return slices


def equal_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two texts have in common before they part."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
