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
    rows = [[what, figure, f"`./run bench {name}`"] for what, figure, name in _rows()]
    parts = (
        f"Medians on {machine['cores']} cores of a shared {machine['cpu']} ({', '.join(machine['isa'])}), "
        f"{machine['date']}; such machines are noisy, so compare ratios.",
        _table(["what", "figure", "command"], rows),
        _generate_table(),
        _attention_table("attention", "Decode attention", "limit", "read bandwidth"),
        _attention_table("prefill", "Prefill attention", "peak", "FMA rate"),
        _sensitivity(),
    )
    return "\n\n".join((BEGIN, *parts)) + "\n"


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _rows() -> Iterator[tuple[str, str, str]]:
    yield from _fragmentation_rows()
    yield from _cache_rows()
    yield from _rpc_rows()
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


def _generate_table() -> str:
    results = _load("generate")
    concurrency = [row["concurrency"] for row in results["results"]]
    rates: dict[str, list[str]] = {}
    for row in (*results["results"], *results["peers"]):
        rates.setdefault(row["system"], []).append(f"{row['prefill']:.0f} / {_rate(row)}")
    busy = ", on a busy machine" if results["load_before"] > BUSY else ""
    options = results["options"]
    command = "generate" if options["peers"] is None else "generate --peers"
    title = (
        f"SmolLM2-135M, prompts of {options['prompt_tokens']} tokens and {options['new_tokens']} new ones{busy} "
        f"(`./run bench {command}`; pagedkv through gRPC):"
    )
    head = ["prefill / decode, tokens/s", *(f"{number} at once" for number in concurrency)]
    return title + "\n\n" + _table(head, [[system, *cells] for system, cells in rates.items()])


def _rate(row: dict[str, Any]) -> str:
    return "-" if row["decode"] is None else f"{row['decode']:.0f}"


def _attention_table(name: str, title: str, limit: str, limit_name: str) -> str:
    """Return a table of all shapes and dtypes: the share of the limit, and the others' times in multiples of ours."""
    results = _load(name)
    rows: dict[str, list[str]] = {}
    shapes = dict.fromkeys(_shape(row["shape"]) for row in results["results"])
    for row in results["results"]:
        rows.setdefault(row["dtype"], []).append(_times(row["milliseconds"], limit))
    command = f"{name} --peers" if results["peers"] else name
    text = (
        f"{title}, block size {results['block_size']}: our share of the {limit_name}, then the time that others "
        f"take, each in its fastest form, as a multiple of ours (`./run bench {command}`):"
    )
    return text + "\n\n" + _table(["", *shapes], [[dtype, *cells] for dtype, cells in rows.items()])


def _shape(shape: dict[str, int]) -> str:
    heads = f"{shape['num_heads']}/{shape['num_kv_heads']} × {shape['head_dim']}"
    query = shape["query_len"]
    if query == 1:
        return f"{shape['batch']} at {shape['context']:,}, heads {heads}"
    return f"{query:,} tokens on {shape['context'] - query:,}"


def _times(times: dict[str, dict[str, float]], limit: str) -> str:
    best: dict[str, float] = {}
    for label, time in times.items():
        if label not in ("ours", limit):
            system = "our float16" if label == "float16" else label.split()[0]
            best[system] = min(time["median"], best.get(system, time["median"]))
    ratios = "".join(f", {system} {time / times['ours']['median']:.2f}" for system, time in best.items())
    return f"{times[limit]['median'] / times['ours']['median']:.2f}{ratios}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _perplexity_rows() -> Iterator[tuple[str, str, str]]:
    results = _load("perplexity")
    base, *others = results["results"].values()
    for name, row in zip(list(results["results"])[1:], others, strict=True):
        difference = row["perplexity"] - base["perplexity"]
        what = f"SmolLM2-135M, {results['tokens']:,} tokens of prose, {name} beside float32"
        figure = f"perplexity {base['perplexity']:.3f} {difference:+.4f}, mean logit error {row['mean_error']:.2g}"
        yield what, figure, "perplexity"
