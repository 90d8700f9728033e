"""The generation benchmark's tables fit a page and say what was missing; the README says what the results say."""

from __future__ import annotations

import json

from rich.console import Console

from tests.bench import generate_report, readme_bench
from tests.bench.generate_figures import Rates
from tests.bench.generate_report import Run, SystemNote

NAMES = ("pagedkv", "transformers fp32", "OpenVINO GenAI")


def make_run(**changes) -> Run:
    rates = [Rates(name, c, 1234.5, 56.7 * c, 60.1 * c, 12.34, 3456.7) for c in (1, 32) for name in NAMES]
    how = "over gRPC, weights as stored, KV float32, activations float32"
    values = {
        "options": {"prompt_tokens": 512, "new_tokens": 128, "peers": []},
        "notes": [SystemNote(name, "transformers 5.19.0, torch 2.13.0+cpu", how, 123.4, 16) for name in NAMES],
        "missing": {"llama.cpp": "pip install failed: no compiler"},
        "rates": rates,
        "limits": {1: (2000.0, 200.0), 32: (2000.0, 600.0)},
        "file_mib": 90.0,
        "pool_mib": 500.0,
        "golden_tokens": 16,
        "load_before": 0.1,
    }
    return Run(**values | changes)


def printed(run: Run, monkeypatch) -> str:
    console = Console(width=110, record=True, file=open("/dev/null", "w"), highlight=False)  # noqa: SIM115
    monkeypatch.setattr(generate_report, "Console", lambda **_: console)
    generate_report.print_run(run)
    console.file.close()
    return console.export_text()


def test_tables_with_long_names_fit_110_columns_and_cut_no_name_or_figure(monkeypatch):
    text = printed(make_run(), monkeypatch)
    assert max(map(len, text.splitlines())) <= 110
    assert "…" not in text
    for wanted in ("32 transformers fp32", "1814", "0.28", "12.34", "1.00x", "16 of 16"):
        assert wanted in text


def test_table_names_a_peer_that_was_missing_and_why(monkeypatch):
    assert "llama.cpp: not timed, pip install failed: no compiler" in printed(make_run(), monkeypatch)


def test_busy_machine_is_said_and_a_quiet_one_is_not(monkeypatch):
    assert "busy" not in printed(make_run(), monkeypatch)
    assert "busy before the start (load 3.2)" in printed(make_run(load_before=3.2), monkeypatch)


def test_memory_bound_is_the_file_the_pool_and_400_mib():
    assert make_run().memory_bound_mib == 990


def test_decode_rate_that_nobody_had_is_shown_as_none(monkeypatch):
    rates = [Rates(name, c, 1000.0, None, None, 1.0, 1.0) for c in (1, 32) for name in NAMES]
    assert " - │" in printed(make_run(rates=rates), monkeypatch)


def test_saved_results_keep_the_peers_apart_and_every_figure_beside_its_limit(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.bench.report.RESULTS", tmp_path)
    generate_report.save_run(make_run())
    saved = json.loads((tmp_path / "generate.json").read_text())
    assert [row["concurrency"] for row in saved["results"]] == [1, 32]
    assert {row["system"] for row in saved["peers"]} == set(NAMES[1:])
    assert saved["results"][1]["decode_limit"] == 600
    assert saved["missing"]["llama.cpp"].startswith("pip")


def test_readme_numbers_are_those_of_the_results():
    """After a benchmark wrote its results, `./run bench readme` carries them over."""
    readme = (readme_bench.ROOT / "README.md").read_text()
    found = readme_bench.SECTION.search(readme)
    assert found is not None
    assert found.group().strip() == readme_bench.make_section().strip()
