"""Write the README's table of numbers from tests/bench/results/*.json."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.bench.generate_report import BUSY

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
BEGIN = "<!-- numbers: written by ./run bench readme, do not edit -->"
SECTION = re.compile(r"<!-- numbers:[^>]*-->.*?(?=\n## )", re.DOTALL)


def main(argv: Sequence[str]) -> int:
    """Replace the section of numbers."""
    readme = ROOT / "README.md"
    text = readme.read_text()
    readme.write_text(SECTION.sub(lambda _: make_section(), text, count=1))
    return 0


def make_section() -> str:
    """Return the section as the results have it."""
    machine = _load("cache")["machine"]
    rows = "\n".join(f"| {what} | {figure} | `./run bench {name}` |" for what, figure, name in _rows())
    return (
        f"{BEGIN}\n\nMedians on {machine['cores']} cores of a shared {machine['cpu']} ({', '.join(machine['isa'])}), "
        f"{machine['date']}; such machines are noisy, so compare ratios.\n\n"
        f"| what | figure | command |\n|---|---|---|\n{rows}\n\n{_sensitivity()}\n"
    )


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _rows() -> Iterator[tuple[str, str, str]]:
    yield from _fragmentation_rows()
    yield from _cache_rows()
    yield from _rpc_rows()
    yield from _attention_rows()
    yield from _generate_rows()
    yield from _perplexity_rows()
    cost = _load("metrics")["cost_ms"]["100000"]["scrape, text"]["median"]
    yield "one scrape at 100,000 blocks", f"{cost:.2f} ms", "metrics"


def _fragmentation_rows() -> Iterator[tuple[str, str, str]]:
    for title, rows in _load("fragmentation")["results"].items():
        share = {row["name"]: f"{100 * row['shares']['tokens']:.1f} %" for row in rows}
        figures = f"paged {share['paged 16']}, Oracle {share['Oracle']}, Pow2 {share['Pow2']}, Max {share['Max']}"
        yield f"KV memory that holds tokens, {title.split()[0]}-like trace, block size 16", figures, "fragmentation"


def _sensitivity() -> str:
    shares = {name: row for name, row in _load("fragmentation")["sensitivity"].items() if name.startswith("sharegpt")}
    figures = "; ".join(
        f"{name.split(', ')[1]} " + " / ".join(f"{share:.1f}" for share in row.values()) for name, row in shares.items()
    )
    return (
        "The traces have the means of the vLLM paper's Figure 11. Its Figure 2 has Max / Pow2 / Oracle / paged at "
        f"20.4 / 26.8 / 38.2 / 96.3 %; by the generator of the ShareGPT-like lengths this replay has {figures}."
    )


def _cache_rows() -> Iterator[tuple[str, str, str]]:
    results = _load("cache")
    measured = {(row["name"], row["num_blocks"]): row["median"] for row in results["peers"]}
    for row in results["figures"]:
        published = results["published_vllm"].get(row["name"])
        if row["num_blocks"] == 100_000 and published:
            theirs = measured.get((row["name"], 100_000))
            peer = f"{results['peer']}: {theirs:.3g}" if theirs else f"vLLM, published: {published:g}"
            command = "cache --peers" if theirs else "cache"
            yield f"{row['name']}, 100,000 blocks", f"{row['median']:.3g} µs ({peer})", command


def _rpc_rows() -> Iterator[tuple[str, str, str]]:
    for row in _load("rpc")["figures"]:
        if row["load"].startswith("SmolLM2-135M, 1 x") and row["call"] in ("Attend", "Step"):
            figure = (
                f"p50 {row['p50']:.0f} µs, p99 {row['p99']:.0f} µs, of which the kernel {row['compute_p50']:.0f} µs"
            )
            yield f"{row['call']} round trip ({row['load']})", figure, "rpc"


def _attention_rows() -> Iterator[tuple[str, str, str]]:
    results = _load("attention")
    for row in results["results"]:
        shape, times = row["shape"], row["milliseconds"]
        if (shape["batch"], shape["num_heads"]) != (16, 32):
            continue
        ours, share = times["ours"]["median"], times["limit"]["p10"] / times["ours"]["p10"]
        figure = f"{ours:.1f} ms, {share:.2f} of the read bandwidth (p10)"
        peers = {label: times[label]["median"] for label in results["peers"] if label in times}
        if peers:
            figure += ", " + ", ".join(
                f"{theirs / ours:.1f} times as fast as {label}" for label, theirs in peers.items()
            )
        what = f"decode attention {row['dtype']}, batch {shape['batch']}, context {shape['context']}, 32/8 heads of 128"
        yield what, figure, "attention --peers"


def _generate_rows() -> Iterator[tuple[str, str, str]]:
    results = _load("generate")
    for ours in results["results"]:
        figure = f"prefill {ours['prefill']:.0f}, decode {_rate(ours)} tokens/s"
        peers = [row for row in results["peers"] if row["concurrency"] == ours["concurrency"]]
        if peers:
            figure += " (" + ", ".join(f"{row['system']} {row['prefill']:.0f} / {_rate(row)}" for row in peers) + ")"
        busy = ", on a busy machine" if results["load_before"] > BUSY else ""
        what = f"SmolLM2-135M through gRPC, {ours['concurrency']} at once{busy}"
        yield what, figure, "generate" if results["options"]["peers"] is None else "generate --peers"


def _rate(row: dict[str, Any]) -> str:
    return "-" if row["decode"] is None else f"{row['decode']:.0f}"


def _perplexity_rows() -> Iterator[tuple[str, str, str]]:
    results = _load("perplexity")
    base = results["results"]["float32"]
    for dtype, row in results["results"].items():
        if row is not base:
            difference = row["perplexity"] - base["perplexity"]
            what = f"SmolLM2-135M, {results['tokens']:,} tokens of prose, KV {dtype} beside float32"
            figure = f"perplexity {base['perplexity']:.3f} {difference:+.4f}, mean logit error {row['mean_error']:.2g}"
            yield what, figure, "perplexity"
