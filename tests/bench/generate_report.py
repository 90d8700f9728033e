"""The generation benchmark's tables and its JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.bench.generate_figures import Rates
from tests.bench.report import WIDTH, write_result

OURS = "pagedkv"
_SLACK_MIB = 400  # what the service may take besides the file and the pool
BUSY = 0.5


@dataclass(frozen=True, slots=True)
class SystemNote:
    """What a reader must know of a system that ran; `greedy` counts golden tokens that it met before it differed."""

    name: str
    version: str
    how: str
    load_seconds: float
    greedy: int


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run found. `limits` holds prefill and decode tokens/s by concurrency."""

    options: Mapping[str, Any]
    notes: Sequence[SystemNote]
    missing: Mapping[str, str]
    rates: Sequence[Rates]
    limits: Mapping[int, tuple[float, float]]
    file_mib: float
    pool_mib: float
    golden_tokens: int
    load_before: float  # processes that wanted a core in the minute before the start

    @property
    def memory_bound_mib(self) -> float:
        """What the service may hold: the file, the pool, and the slack."""
        return self.file_mib + self.pool_mib + _SLACK_MIB

    def of(self, concurrency: int) -> list[Rates]:
        return [rate for rate in self.rates if rate.concurrency == concurrency]


def print_run(run: Run) -> None:
    """Print the systems, the figures and what was not there."""
    console = Console(width=WIDTH, highlight=False)
    console.print(_systems_table(run))
    console.print(_rates_table(run))
    if run.load_before > BUSY:
        console.print(f"The machine was busy before the start (load {run.load_before:.1f}): take no figure for good.")
    for name, reason in run.missing.items():
        console.print(f"{name}: not timed, {reason}")
    console.print(
        "decode: median over slices of the time in which all requests decode; p10: the fastest tenth of them. limit: "
        "reading the file and pagedkv's KV once a step, or float32 multiply-adds, both measured between the turns.\n"
        "ratio: pagedkv's figure over this one. golden tokens: how many of the float64 reference's first came.\n"
        f"pagedkv may hold the file, the pool and {_SLACK_MIB} MiB, together {run.memory_bound_mib:.0f} MiB."
    )


def save_run(run: Run) -> None:
    """Write results/generate.json; `results` are pagedkv's figures, `peers` the others'."""
    rows = [asdict(rate) | _limit_json(run, rate) for rate in run.rates]
    write_result(
        "generate",
        {
            "options": dict(run.options),
            "systems": [asdict(note) for note in run.notes],
            "missing": dict(run.missing),
            "unit": "tokens/s",
            "load_before": run.load_before,
            "golden_tokens": run.golden_tokens,
            "memory_bound_mib": run.memory_bound_mib,
            "results": [row for row in rows if row["system"] == OURS],
            "peers": [row for row in rows if row["system"] != OURS],
        },
    )


def _limit_json(run: Run, rate: Rates) -> dict[str, float]:
    prefill, decode = run.limits[rate.concurrency]
    return {"prefill_limit": prefill, "decode_limit": decode}


def _systems_table(run: Run) -> Table:
    table = Table(title="Systems, all on the same cores, one at a time", title_justify="left")
    table.add_column("system", no_wrap=True)
    table.add_column("version")
    table.add_column("how")
    table.add_column("load s", justify="right")
    table.add_column("golden tokens", justify="right")
    for note in run.notes:
        greedy = f"{note.greedy} of {run.golden_tokens}"
        table.add_row(note.name, note.version, note.how, f"{note.load_seconds:.1f}", greedy)
    return table


def _rates_table(run: Run) -> Table:
    options = run.options
    shape = f"{options['prompt_tokens']} prompt + {options['new_tokens']} new tokens a request"
    table = Table(title=f"SmolLM2-135M, {shape}, tokens/s of all requests together", title_justify="left")
    table.add_column("at once, system", no_wrap=True)
    headings = ("prefill", "decode", "decode\np10", "decode /\nlimit", "first\ntoken s", "resident\nMiB")
    for heading in (*headings, "prefill\nratio", "decode\nratio"):
        table.add_column(heading, justify="right")
    for concurrency in run.limits:
        ours, *others = run.of(concurrency)
        for rate in (ours, *others):
            table.add_row(*_rate_cells(rate, ours, run.limits[concurrency][1]))
        table.add_section()
    return table


def _rate_cells(rate: Rates, ours: Rates, decode_limit: float) -> list[str]:
    return [
        f"{rate.concurrency:2} {rate.system}",
        f"{rate.prefill:.0f}",
        _number(rate.decode, ".0f"),
        _number(rate.decode_p10, ".0f"),
        _number(rate.decode and rate.decode / decode_limit, ".2f"),
        f"{rate.first_token_seconds:.2f}",
        f"{rate.resident_mib:.0f}",
        *([""] * 2 if rate is ours else [f"{ours.prefill / rate.prefill:.2f}x", _ratio(ours.decode, rate.decode)]),
    ]


def _number(value: float | None, format_: str) -> str:
    return "-" if value is None else format(value, format_)


def _ratio(ours: float | None, theirs: float | None) -> str:
    return "-" if ours is None or theirs is None else f"{ours / theirs:.2f}x"
