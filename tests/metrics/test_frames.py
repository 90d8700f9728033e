"""Deltas add up to the cache; the terminal view draws them."""

from __future__ import annotations

import asyncio
import base64
from array import array
from io import StringIO

import pytest
from hypothesis import given, settings
from rich.console import Console

from helpers.caches import run_prompt, write
from pagedkv.errors import InvalidArgument
from pagedkv.metrics.top import PoolView, render, size_text, stream_frames
from tests.metrics.support import OPERATIONS, Mix, make_metrics, metrics_server


class Mirror:
    """What a reader of the stream knows: the page does the same in JavaScript."""

    def __init__(self, snapshot=None):
        self.states, self.tables = bytearray(), {}
        if snapshot:
            self.apply(snapshot)

    def apply(self, frame):
        if "states" in frame:
            self.states = bytearray(base64.b64decode(frame["states"]))
        for start, count, state in frame.get("runs", ()):
            self.states[start : start + count] = bytes([state]) * count
        for name in frame.get("gone", ()):
            del self.tables[name]
        for change in frame["sequences"]:
            known = self.tables.get(change["id"], (0, []))[1]
            added = array("i", base64.b64decode(change["table"])).tolist()
            self.tables[change["id"]] = (change["tokens"], known[: change["keep"]] + added)


def assert_mirrors(mirror, cache):
    assert mirror.states == cache.pool.states
    assert mirror.tables == {
        view.sequence_id: (view.num_tokens, list(view.block_table))
        for view in map(cache.sequence, cache.sequence_ids())
    }


@settings(max_examples=60, deadline=None)
@given(OPERATIONS)
def test_deltas_after_a_snapshot_add_up_to_the_cache(operations):
    cache, metrics = make_metrics()
    mix, whole = Mix(cache), Mirror()
    whole.apply(metrics.frames.advance())
    later = None
    for number, operation in enumerate(operations):
        mix.apply(operation)
        frame = metrics.frames.advance()
        whole.apply(frame)
        if later:
            later.apply(frame)
        elif number == len(operations) // 2:
            later = Mirror(metrics.frames.snapshot())
    assert_mirrors(whole, cache)
    if later:
        assert_mirrors(later, cache)


def test_growing_sequence_sends_only_its_new_blocks():
    cache, metrics = make_metrics()
    run_prompt(cache, "a", list(range(40)))
    metrics.frames.advance()
    write(cache, "a", 8)
    (change,) = metrics.frames.advance()["sequences"]
    assert change["keep"] == 5
    assert len(base64.b64decode(change["table"])) == 4


def test_nothing_changed_sends_no_states_and_no_sequences():
    cache, metrics = make_metrics()
    run_prompt(cache, "a", list(range(40)))
    metrics.frames.advance()
    frame = metrics.frames.advance()
    assert (frame["runs"], frame["sequences"], frame["gone"]) == ([], [], [])


def drawn(view, width):
    console = Console(file=StringIO(), width=width, legacy_windows=False)
    console.print(render(view, width))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [60, 140])
def test_top_draws_the_pool_its_figures_and_the_longest_sequences(width):
    cache, metrics = make_metrics()
    run_prompt(cache, "long", list(range(40)))
    cache.fork("long", "fork [bold]")
    view = PoolView()
    assert view.apply(metrics.frames.snapshot())
    cache.allocate("later")
    write(cache, "later", 8)
    metrics.frames.advance()
    view.apply(metrics.frames.advance() | {"runs": [[5, 1, 2]], "sequences": []})
    text = drawn(view, width)
    assert "█████▓·" in text
    assert "fork [bold]" in text
    assert "shared 5" in text


@pytest.mark.parametrize("width", [50, 80, 140])
def test_top_of_a_narrow_terminal_leaves_no_figure_out(width):
    cache, metrics = make_metrics(num_blocks=640)
    run_prompt(cache, "a", list(range(400)))
    view = PoolView()
    view.apply(metrics.frames.snapshot())
    text = drawn(view, width)
    assert max(map(len, text.splitlines())) <= width
    words = " ".join(text.split())
    for state in ("free 590", "cached 0", "private 50", "shared 0", "pinned 0", "in flight 0"):
        assert state in words
    contiguous = view.figures["contiguous"]
    for name, use in (("held", "paged"), ("max", "max"), ("pow2", "pow2"), ("exact", "oracle")):
        assert f"{name} {size_text(contiguous[use])}" in words


def test_top_says_what_is_swapped_out_and_how_full_the_host_pool_is():
    cache, metrics = make_metrics()
    run_prompt(cache, "long", list(range(40)))
    cache.fork("long", "fork")
    view = PoolView()
    view.apply(metrics.frames.snapshot())
    metrics.frames.advance()
    cache.swap_out(["long", "fork"])
    view.apply(metrics.frames.advance())
    text = drawn(view, 140)
    assert "swapped out 2" in text
    assert "host blocks 5 of 16 used, 5 shared" in text
    assert text.count("swapped out") == 3
    cache.swap_in(["long"])
    view.apply(metrics.frames.advance())
    assert view.swapped == {"fork"}


def test_top_without_a_host_pool_says_nothing_of_one():
    _, metrics = make_metrics(num_host_blocks=0)
    view = PoolView()
    view.apply(metrics.frames.snapshot())
    assert "host blocks" not in drawn(view, 140)


def test_top_of_a_large_pool_stays_within_its_rows():
    _, metrics = make_metrics(num_blocks=100_000)
    view = PoolView()
    view.apply(metrics.frames.snapshot())
    assert "one cell is" in drawn(view, 100)
    assert len(drawn(view, 100).splitlines()) < 40


async def test_top_reads_a_running_services_stream_past_a_proxy_for_the_network(monkeypatch):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    cache, metrics = make_metrics()
    run_prompt(cache, "a", list(range(40)))
    async with metrics_server(metrics) as (_, url):
        frames = stream_frames(url)
        view = PoolView()
        assert view.apply(await asyncio.to_thread(next, frames))
        await asyncio.to_thread(frames.close)
    assert view.tokens == {"a": 40}


def test_top_says_where_nothing_answers():
    with pytest.raises(InvalidArgument, match="no service answers"):
        next(stream_frames("http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**31, "2.0 GiB"), (2**51, "2048.0 TiB")]
)
def test_size_text_has_binary_units(size, text):
    assert size_text(size) == text
