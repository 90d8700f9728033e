"""Traces have the published means; a bad CSV names its lines and runs nothing."""

from __future__ import annotations

import numpy as np
import pytest

from tests.bench import fragmentation_bench
from tests.bench.traces import GENERATORS, PUBLISHED_MEANS, TraceError, TraceRequest, generate_trace, read_trace

AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.mark.parametrize("workload", PUBLISHED_MEANS)
@pytest.mark.parametrize("generator", GENERATORS)
def test_generated_trace_has_the_published_means(workload, generator):
    trace = generate_trace(workload, 20_000, generator=generator, seed=3)
    means = np.mean([[request.num_prompt_tokens, request.num_output_tokens] for request in trace], axis=0)
    assert means == pytest.approx(PUBLISHED_MEANS[workload], rel=0.04)
    assert max(request.num_tokens for request in trace) <= 2048


def test_read_trace_takes_the_azure_columns_sorts_and_starts_at_zero(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE_HEADER + "2023-11-16 18:17:05.0000000,7,8\n2023-11-16 18:17:03.9799600,374,44\n")
    assert read_trace(path) == [TraceRequest(0.0, 374, 44), TraceRequest(pytest.approx(1.02004), 7, 8)]


def test_read_trace_with_bad_rows_names_each_line_and_returns_nothing(tmp_path, capsys):
    path = tmp_path / "trace.csv"
    path.write_text(AZURE_HEADER + "0,1,1\n1,x,1\n2,0,1\n3,1\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    for part in ("3 bad rows", "line 3: invalid literal", "line 4: token counts", "line 5: list index"):
        assert part in str(caught.value)
    assert fragmentation_bench.main(["--csv", str(path), "--out", str(tmp_path)]) == 1
    assert "3 bad rows" in capsys.readouterr().out
    assert not list(tmp_path.glob("*.svg"))


def test_read_trace_without_a_known_column_is_refused(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("when,in,out\n")
    with pytest.raises(TraceError, match="no column for the arrival"):
        read_trace(path)
