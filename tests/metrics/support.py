"""A cache with its metrics, a random mix of operations on it, and readers of what is exposed."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, suppress

from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from helpers.caches import make_cache
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.errors import OutOfBlocks, OutOfHostBlocks
from pagedkv.metrics.http import MetricsServer
from pagedkv.metrics.service import ServiceMetrics

SHAPE = KvShape(num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
OPENMETRICS = "application/openmetrics-text; version=1.0.0"

# An operation is its name and three small numbers, which choose sequences, prompts and lengths.
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(
            ("prompt", "reserve", "commit", "cancel", "append", "fork", "truncate", "free", "flush", "out", "in")
        ),
        st.integers(0, 5),
        st.integers(0, 5),
        st.integers(1, 40),
    ),
    max_size=30,
)


def make_metrics(num_blocks=24, block_size=8, backend_name="cpu", num_host_blocks=16, **options):
    cache = make_cache(num_blocks, block_size, num_host_blocks=num_host_blocks, **options)
    layout = KvLayout(SHAPE, num_blocks, block_size)
    return cache, ServiceMetrics(cache, layout, backend_name=backend_name)


class Mix:
    """Applies operations to a cache, whatever the order; what cannot be done is left out."""

    def __init__(self, cache):
        self.cache, self.open, self.next_id = cache, {}, 0

    def apply(self, operation):
        name, chosen, prompt, length = operation
        swapped = [sequence for sequence in self.cache.sequence_ids() if self.cache.sequence(sequence).is_swapped]
        closed = [sequence for sequence in self.cache.sequence_ids() if sequence not in (*self.open, *swapped)]
        if name == "in" or (name == "free" and prompt == 0):
            closed = swapped
        with suppress(OutOfBlocks, OutOfHostBlocks):
            getattr(self, "_" + name)(closed[chosen % len(closed)] if closed else None, prompt, length)

    def _new_id(self):
        self.next_id += 1
        return f"s{self.next_id}"

    def _prompt(self, _, prompt, length):
        token_ids = [prompt] * length
        name = self._new_id()
        num_cached = self.cache.allocate(name, token_ids).num_cached_tokens
        self.cache.commit(self.cache.reserve(name, length - num_cached))

    def _reserve(self, sequence, _, length):
        if sequence:
            self.open[sequence] = self.cache.reserve(sequence, length)

    def _append(self, sequence, _, length):
        if sequence:
            self.cache.commit(self.cache.reserve(sequence, length))

    def _commit(self, _, chosen, __):
        self._close(self.cache.commit, chosen)

    def _cancel(self, _, chosen, __):
        self._close(self.cache.cancel, chosen)

    def _close(self, close, chosen):
        if self.open:
            close(self.open.pop(list(self.open)[chosen % len(self.open)]))

    def _fork(self, sequence, *_):
        if sequence:
            self.cache.fork(sequence, self._new_id())

    def _truncate(self, sequence, _, length):
        if sequence:
            self.cache.truncate(sequence, min(length, self.cache.length(sequence)))

    def _free(self, sequence, *_):
        if sequence:
            self.cache.free(sequence)

    def _out(self, sequence, *_):
        if sequence:
            self.cache.swap_out([sequence])

    def _in(self, sequence, *_):
        if sequence:
            self.cache.swap_in([sequence])

    def _flush(self, *_):
        self.cache.flush_prefix_cache()


def scrape(metrics, accept=""):
    """Return {(sample name, label values in order): value} of a scrape, parsed by prometheus_client."""
    text, content_type = metrics.scrape(accept)
    return parse(text.decode(), content_type)


def parse(text, content_type=""):
    families = parse_openmetrics(text) if "openmetrics" in content_type else parse_text(text)
    return {
        (sample.name, tuple(sample.labels.values())): sample.value for family in families for sample in family.samples
    }


def of(samples, name):
    """Return a metric's samples by label values."""
    return {labels: value for (sample, labels), value in samples.items() if sample == name}


def value(samples, name, *labels):
    return samples[name, labels]


@asynccontextmanager
async def metrics_server(metrics, **options):
    server = MetricsServer(metrics, port=0, **options)
    await server.start()
    try:
        yield server, f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop()


def fetch(url, **headers):
    """Return (status, body, content type); for use off the loop."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=20) as response:
            return response.status, response.read(), response.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(), error.headers["Content-Type"]


async def get(url, **headers):
    return await asyncio.to_thread(fetch, url, **headers)


async def get_json(url):
    status, body, _ = await get(url)
    return status, json.loads(body)
