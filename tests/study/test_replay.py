"""The replay finishes every request, its shares sum to the memory, and the systems keep the paper's order."""

from __future__ import annotations

import pytest

from tests.bench.replay import CAUSES, replay
from tests.bench.traces import TraceRequest, generate_trace


@pytest.mark.parametrize("name", ["Max", "Pow2", "Oracle", "paged 1", "paged 16", "paged 256"])
def test_replay_shares_sum_to_the_memory(name):
    result = replay(name, generate_trace("alpaca", 150), 4096)
    assert sum(result.shares[cause] for cause in CAUSES) == pytest.approx(1.0)
    assert all(share >= 0 for share in result.shares.values())
    assert result.num_steps > 0


def test_replay_one_request_alone_counts_its_slots_exactly():
    """Prompt 3, output 2, blocks of 4: after the steps 4 then 5 tokens are held in 1 then 2 of 4 blocks."""
    result = replay("paged 4", [TraceRequest(0.0, 3, 2)], 16)
    assert result.num_steps == 2
    assert result.shares == {
        "tokens": pytest.approx(9 / 32),
        "reserved": 0.0,
        "internal": pytest.approx(3 / 32),
        "external": pytest.approx(20 / 32),
    }


def test_replay_keeps_the_order_of_the_paper():
    trace = generate_trace("sharegpt", 300)
    shares = [replay(name, trace, 15728).shares["tokens"] for name in ("Max", "Pow2", "Oracle", "paged 16")]
    assert shares == sorted(shares)
    assert shares[-1] > 0.9


def test_replay_refuses_a_request_that_can_never_fit():
    with pytest.raises(ValueError, match="does not fit"):
        replay("paged 16", [TraceRequest(0.0, 100, 1)], 64)
