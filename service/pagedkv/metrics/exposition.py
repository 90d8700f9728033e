"""Metrics as text, in the Prometheus or the OpenMetrics format, whichever the scraper asks for.

Written here because prometheus_client's own encoders take several milliseconds for these few hundred samples, on the
loop that serves requests. All that repeats from scrape to scrape, names and labels, is kept as ready text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Final

from prometheus_client.exposition import choose_encoder

from pagedkv.metrics.registry import METRICS, Metric, MetricType
from pagedkv.metrics.series import HistogramSeries, SeriesStore

Values = Mapping[tuple[str, ...], float]
_OPENMETRICS: Final = "application/openmetrics-text"


class Exposition:
    """Writes one service's metrics out. Keeps the text of every series that it has seen: a bounded number."""

    def __init__(self, store: SeriesStore) -> None:
        self._store = store
        self._prefixes: dict[tuple[str, tuple[str, ...]], str] = {}
        self._bucket_prefixes: dict[tuple[str, tuple[str, ...]], list[str]] = {}

    def render(self, live: Mapping[str, Values], accept: str) -> tuple[bytes, str]:
        """Return the text of the live values and of the store's, and its content type."""
        content_type = choose_encoder(accept)[1]
        is_openmetrics = content_type.startswith(_OPENMETRICS)
        lines: list[str] = []
        for name, metric in METRICS.items():
            family = name.removesuffix("_total") if is_openmetrics else name
            lines.append(f"# HELP {family} {metric.help}\n# TYPE {family} {metric.type}\n")
            if metric.type is MetricType.HISTOGRAM:
                for labels, series in self._store.histograms.get(name, {}).items():
                    lines.extend(self._histogram(metric, labels, series, with_exemplars=is_openmetrics))
            else:
                lines.extend(self._plain(name, live))
        if is_openmetrics:
            lines.append("# EOF\n")
        return "".join(lines).encode(), content_type

    def _plain(self, name: str, live: Mapping[str, Values]) -> Iterator[str]:
        if name in live:
            for labels, value in live[name].items():
                yield f"{self._prefix(name, labels)} {value}\n"
        else:
            for labels, series in self._store.counters.get(name, {}).items():
                yield f"{self._prefix(name, labels)} {series.value}\n"

    def _histogram(
        self, metric: Metric, labels: tuple[str, ...], series: HistogramSeries, *, with_exemplars: bool
    ) -> Iterator[str]:
        key = (metric.name, labels)
        prefixes = self._bucket_prefixes.get(key) or self._make_bucket_prefixes(metric, labels)
        cumulative = list(accumulate(series.counts))
        if with_exemplars and series.exemplars:
            for bucket, (prefix, count) in enumerate(zip(prefixes, cumulative, strict=True)):
                yield f"{prefix} {count}{_exemplar_text(series, bucket)}\n"
        else:
            for prefix, count in zip(prefixes, cumulative, strict=True):
                yield f"{prefix} {count}\n"
        yield f"{self._prefix(metric.name, labels, '_count')} {cumulative[-1]}\n"
        yield f"{self._prefix(metric.name, labels, '_sum')} {series.total}\n"

    def _prefix(self, name: str, labels: tuple[str, ...], suffix: str = "") -> str:
        key = (name + suffix, labels)
        prefix = self._prefixes.get(key)
        if prefix is None:
            prefix = self._prefixes[key] = name + suffix + _label_text(METRICS[name].label_names, labels)
        return prefix

    def _make_bucket_prefixes(self, metric: Metric, labels: tuple[str, ...]) -> list[str]:
        names = (*metric.label_names, "le")
        bounds = [*map(repr, metric.buckets), "+Inf"]
        made = [metric.name + "_bucket" + _label_text(names, (*labels, bound)) for bound in bounds]
        self._bucket_prefixes[metric.name, labels] = made
        return made


def _label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return `{name="value",...}`; the values come from closed sets and need no escaping."""
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(names, values, strict=True)) + "}" if names else ""


def _exemplar_text(series: HistogramSeries, bucket: int) -> str:
    found = series.exemplars.get(bucket)
    return "" if found is None else f' # {{trace_id="{found.trace_id}"}} {found.value} {found.time}'
