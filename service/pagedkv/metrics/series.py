"""The numbers behind counters and histograms. Each series has one writing thread, so none needs a lock."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pagedkv.metrics.registry import METRICS, Metric, MetricType

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Exemplar:
    """One observation with the trace it belongs to."""

    trace_id: str
    value: float
    time: float


class CounterSeries:
    """A number that only rises."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Add. Raises ValueError for a negative amount, which changes nothing."""
        if not amount >= 0:
            raise ValueError(f"a counter cannot take {amount}")
        self.value += amount


class HistogramSeries:
    """Observations in buckets; `counts` has one entry a bound, and one for what is above all."""

    __slots__ = ("bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}  # the latest of each bucket

    def observe(self, value: float, trace_id: str | None = None) -> None:
        """Add an observation. Raises ValueError for a negative or undefined one, which changes nothing."""
        if not value >= 0:
            raise ValueError(f"cannot observe {value}")
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id is not None:
            self.exemplars[bucket] = Exemplar(trace_id, value, time.time())


class SeriesStore:
    """Counters and histograms by metric name and label values; values outside a label's set become "other"."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[tuple[str, ...], CounterSeries]] = {}
        self.histograms: dict[str, dict[tuple[str, ...], HistogramSeries]] = {}

    def counter(self, name: str, *values: str) -> CounterSeries:
        """Return a counter, made at the first call."""
        children = self.counters.setdefault(name, {})
        return children.get(values) or _add_child(children, _declared(name, MetricType.COUNTER), values, CounterSeries)

    def histogram(self, name: str, *values: str) -> HistogramSeries:
        """Return a histogram, made at the first call."""
        children = self.histograms.setdefault(name, {})
        metric = _declared(name, MetricType.HISTOGRAM)
        return children.get(values) or _add_child(children, metric, values, lambda: HistogramSeries(metric.buckets))


def _declared(name: str, kind: MetricType) -> Metric:
    metric = METRICS[name]
    assert metric.type is kind, name
    return metric


def _add_child(children: dict[tuple[str, ...], T], metric: Metric, values: tuple[str, ...], make: Callable[[], T]) -> T:
    bounded = tuple(label.bounded(value) for label, value in zip(metric.labels, values, strict=True))
    child = children.get(bounded)
    if child is None:
        child = children[bounded] = make()
    return child
