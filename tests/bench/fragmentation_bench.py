"""How much of the KV memory holds tokens: paging against contiguous reservation, on equal memory and equal load."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.replay import CAUSES, ReplayResult, replay
from tests.bench.report import write_result
from tests.bench.traces import GENERATORS, PUBLISHED_MEANS, TraceError, TraceRequest, generate_trace, read_trace

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
SYSTEMS = ("Max", "Pow2", "Oracle", *(f"paged {size}" for size in BLOCK_SIZES))
PAPER = {"Max": 20.4, "Pow2": 26.8, "Oracle": 38.2, "paged 16": 96.3}  # vLLM paper, Figure 2, token states in %
COLOURS = {"tokens": "#0072b2", "reserved": "#e69f00", "internal": "#d55e00", "external": "#999999"}
LABELS = {
    "tokens": "holds a token",
    "reserved": "reserved for later",
    "internal": "never used (internal)",
    "external": "free, unusable or rounding (external)",
}


def main(argv: Sequence[str]) -> int:
    """Run the study and write the table, the plots and the JSON."""
    parser = argparse.ArgumentParser(prog="./run bench fragmentation", description=__doc__)
    parser.add_argument("--requests", type=int, default=1000, help="requests of each generated trace (default 1000)")
    parser.add_argument(
        "--slots", type=int, default=15728, help="memory in token slots (default 15728: 12 GB for OPT-13B)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="replay this trace instead: arrival, prompt tokens, output tokens")
    parser.add_argument("--step-seconds", type=float, default=0.03, help="how long a step of a CSV trace takes")
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results"))
    options = parser.parse_args(argv)
    console = Console(width=130)
    try:
        studies = _studies(options)
    except (TraceError, OSError) as error:
        console.print(f"[red]error[/] {error}", highlight=False)
        return 1
    results = {}
    for title, trace in studies.items():
        results[title] = [replay(n, trace, options.slots, step_seconds=options.step_seconds) for n in SYSTEMS]
        _print_table(console, title, trace, results[title])
        _plot(options.out / f"fragmentation-{title.split()[0]}.svg", title, results[title])
    sensitivity = _measure_sensitivity(options) if options.csv is None else {}
    _print_sensitivity(console, sensitivity)
    figures = {title: [_as_json(result) for result in rows] for title, rows in results.items()}
    write_result(
        "fragmentation",
        {"options": {k: str(v) for k, v in vars(options).items()}, "results": figures, "sensitivity": sensitivity},
    )
    return 0


def _studies(options: argparse.Namespace) -> dict[str, list[TraceRequest]]:
    if options.csv is not None:
        return {options.csv.stem: read_trace(options.csv)}
    return {
        f"{name} (gamma lengths of shape 2, seed {options.seed})": generate_trace(
            name, options.requests, seed=options.seed
        )
        for name in PUBLISHED_MEANS
    }


def _print_table(console: Console, title: str, trace: Sequence[TraceRequest], rows: Sequence[ReplayResult]) -> None:
    mean_prompt = sum(request.num_prompt_tokens for request in trace) / len(trace)
    mean_output = sum(request.num_output_tokens for request in trace) / len(trace)
    table = Table(title=f"{title}: {len(trace)} requests, mean {mean_prompt:.1f} + {mean_output:.1f} tokens")
    for heading in ("memory", "tokens %", "paper %", "reserved %", "internal %", "external %"):
        table.add_column(heading, justify="left" if heading == "memory" else "right")
    for heading in ("sequences", "peak", "refusals", "preemptions", "steps"):
        table.add_column(heading, justify="right")
    for row in rows:
        shares = [f"{100 * row.shares[cause]:.1f}" for cause in CAUSES]
        paper = f"{PAPER[row.name]:.1f}" if row.name in PAPER and title.startswith("sharegpt") else ""
        counts = (row.peak_concurrent, row.num_refusals, row.num_preemptions, row.num_steps)
        table.add_row(row.name, shares[0], paper, *shares[1:], f"{row.mean_concurrent:.1f}", *map(str, counts))
    console.print(table)


def _measure_sensitivity(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the share of memory holding tokens, in %, by "workload, generator" and memory."""
    traces = {
        f"{workload}, {generator}": generate_trace(workload, options.requests, generator=generator, seed=options.seed)
        for workload in PUBLISHED_MEANS
        for generator in GENERATORS
    }
    return {
        name: {memory: 100 * replay(memory, trace, options.slots).shares["tokens"] for memory in PAPER}
        for name, trace in traces.items()
    }


def _print_sensitivity(console: Console, sensitivity: dict[str, dict[str, float]]) -> None:
    if not sensitivity:
        return
    table = Table(title="Sensitivity: share of memory holding tokens (%), by length generator of equal means")
    table.add_column("workload, generator")
    for memory in PAPER:
        table.add_column(memory, justify="right")
    for name, shares in sensitivity.items():
        table.add_row(name, *(f"{share:.1f}" for share in shares.values()))
    console.print(table)


def _plot(path: Path, title: str, rows: Sequence[ReplayResult]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    left = [0.0] * len(rows)
    names = [row.name.replace("paged", "block size") for row in rows]
    for cause in CAUSES:
        widths = [100 * row.shares[cause] for row in rows]
        axes.barh(names, widths, left=left, label=LABELS[cause], color=COLOURS[cause])
        left = [at + width for at, width in zip(left, widths, strict=True)]
    for at, row in enumerate(rows):
        axes.text(1, at, f"{100 * row.shares['tokens']:.1f} %", va="center", color="white", fontsize=9)
    axes.invert_yaxis()
    axes.set(xlim=(0, 100), xlabel="share of KV memory, %, while requests wait", title=title)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with plt.rc_context({"svg.hashsalt": "pagedkv"}):  # or each run names its clip paths anew
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _as_json(result: ReplayResult) -> dict[str, object]:
    return {field: getattr(result, field) for field in result.__slots__}
