"""What happens, as it happens: counters and histograms kept by the observers of engine, calls, cache and kernels."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from typing import Any, Concatenate, Final, ParamSpec, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.metrics import MetricWrapperBase

from pagedkv.engine import FinishReason, StepReport
from pagedkv.metrics.registry import METRICS, Metric, MetricType

_log = logging.getLogger(__name__)
_TRACE_CONTEXT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_RECORDED: Final = tuple(
    METRICS[f"pagedkv_{name}"]
    for name in [
        "leases_expired_total",
        "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
        "requests_received_total",
        "request_success_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "computed_tokens_total",
        "request_queue_time_seconds",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "batch_size_sequences",
        "step_duration_seconds",
        "num_preemptions_total",
        "preempted_tokens_total",
        "swap_bytes_total",
        "swap_seconds_total",
        "rpc_duration_seconds",
        "metric_errors_total",
        "kernel_seconds_total",
        "kernel_launches_total",
    ]
)
_TIMED_KERNELS: Final = ("attend", "write_kv", "copy_blocks", "merge_states", "linear")
P = ParamSpec("P")


def _guarded(method: Callable[Concatenate[Recorder, P], None]) -> Callable[Concatenate[Recorder, P], None]:
    """Count and log what goes wrong: a fault in a figure never stops the work that it is about."""

    @functools.wraps(method)
    def call(self: Recorder, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.note_fault(method.__name__)

    return cast(Callable[Concatenate[Recorder, P], None], call)


@dataclass(slots=True)
class _LiveRequest:
    exemplar: dict[str, str] | None
    is_scheduled: bool = False


class Recorder:
    """Observes the engine, the RPC server, the cache and the kernels. Its methods never raise."""

    def __init__(self, registry: CollectorRegistry) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._metrics = {metric.name: _make(metric, registry) for metric in _RECORDED}
        self.num_generated_tokens = 0
        self._requests: dict[str, _LiveRequest] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        for metric in _RECORDED:
            if metric.name != "pagedkv_rpc_duration_seconds":  # its label sets appear with their first call
                for values in product(*(label.values for label in metric.labels)):
                    self._child(metric.name, *values)

    # -- engine -------------------------------------------------------------------------------------------------

    @_guarded
    def on_queued(self, request_id: str, num_prompt_tokens: int, trace_context: str | None) -> None:
        """See EngineObserver."""
        self._requests[request_id] = _LiveRequest(_exemplar(trace_context))
        self._child("pagedkv_requests_received_total").inc()
        self._child("pagedkv_prompt_tokens_total").inc(num_prompt_tokens)

    @_guarded
    def on_scheduled(self, request_id: str, queue_seconds: float, num_cached_tokens: int) -> None:
        """See EngineObserver; the wait after a preemption is none of the queue's."""
        request = self._requests.get(request_id)
        if request is None or not request.is_scheduled:
            self._observe("pagedkv_request_queue_time_seconds", queue_seconds, request)
        if request is not None:
            request.is_scheduled = True

    @_guarded
    def on_first_token(self, request_id: str, seconds: float) -> None:
        """See EngineObserver."""
        self._note_generated()
        self._observe("pagedkv_time_to_first_token_seconds", seconds, self._requests.get(request_id))

    @_guarded
    def on_token(self, request_id: str, seconds: float) -> None:
        """See EngineObserver."""
        self._note_generated()
        self._observe("pagedkv_inter_token_latency_seconds", seconds, self._requests.get(request_id))

    @_guarded
    def on_preempted(self, request_id: str, mode: str, reason: str, num_tokens_lost: int) -> None:
        """See EngineObserver."""
        self._bounded_child("pagedkv_num_preemptions_total", mode, reason).inc()
        self._bounded_child("pagedkv_preempted_tokens_total", mode).inc(num_tokens_lost)

    @_guarded
    def on_finished(
        self, request_id: str, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """See EngineObserver."""
        self._requests.pop(request_id, None)
        self._bounded_child("pagedkv_request_success_total", str(reason)).inc()

    @_guarded
    def on_step(self, report: StepReport) -> None:
        """See EngineObserver."""
        self._child("pagedkv_batch_size_sequences").observe(report.num_sequences)
        self._child("pagedkv_step_duration_seconds").observe(report.seconds)
        self._child("pagedkv_computed_tokens_total", "prefill").inc(report.num_prefill_tokens)
        self._child("pagedkv_computed_tokens_total", "decode").inc(report.num_decode_tokens)

    # -- calls, cache, device -----------------------------------------------------------------------------------

    @_guarded
    def on_rpc(self, method: str, code: str, seconds: float) -> None:
        """Note a finished call of `method` ("KvCache/Attend") with the name of its status code."""
        self._bounded_child("pagedkv_rpc_duration_seconds", method, code).observe(seconds)

    @_guarded
    def on_evicted(self, idle_seconds: float, lifetime_seconds: float) -> None:
        """See CacheObserver."""
        self._child("pagedkv_kv_block_idle_before_evict_seconds").observe(idle_seconds)
        self._child("pagedkv_kv_block_lifetime_seconds").observe(lifetime_seconds)

    @_guarded
    def on_reused(self, gap_seconds: float) -> None:
        """See CacheObserver."""
        self._child("pagedkv_kv_block_reuse_gap_seconds").observe(gap_seconds)

    @_guarded
    def on_kernel(self, kernel: str, seconds: float) -> None:
        """Note one launch; may be called on the device's thread."""
        self._bounded_child("pagedkv_kernel_seconds_total", kernel).inc(seconds)
        self._bounded_child("pagedkv_kernel_launches_total", kernel).inc()

    @_guarded
    def on_swap(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Note blocks swapped "in" or "out"."""
        self._child("pagedkv_swap_bytes_total", direction).inc(num_bytes)
        self._child("pagedkv_swap_seconds_total", direction).inc(seconds)

    @_guarded
    def on_lease_expired(self) -> None:
        """Note a sequence freed because its lease ran out."""
        self._child("pagedkv_leases_expired_total").inc()

    def note_fault(self, where: str) -> None:
        """Count and log a fault inside the metrics."""
        _log.warning("metrics: %s saw an impossible value", where, exc_info=True)
        self._child("pagedkv_metric_errors_total").inc()

    # -- private ------------------------------------------------------------------------------------------------

    def _note_generated(self) -> None:
        self.num_generated_tokens += 1
        self._child("pagedkv_generation_tokens_total").inc()

    def _child(self, name: str, *values: str) -> Any:
        child = self._children.get((name, *values))
        if child is None:
            child = self._metrics[name].labels(*values) if values else self._metrics[name]
            self._children[(name, *values)] = child
        return child

    def _bounded_child(self, name: str, *values: str) -> Any:
        labels = METRICS[name].labels
        return self._child(name, *(label.bounded(value) for label, value in zip(labels, values, strict=True)))

    def _observe(self, name: str, seconds: float, request: _LiveRequest | None) -> None:
        if seconds < 0:
            raise ValueError(f"{name}: a duration of {seconds} s")
        self._child(name).observe(seconds, None if request is None else request.exemplar)


def time_kernels(
    backend: Any, recorder: Recorder, clock: Callable[[], float] = time.perf_counter, names: Iterable[str] = ()
) -> None:
    """Have the backend's operations report how long they ran. Right where an operation returns when it is done."""
    for name in names or _TIMED_KERNELS:
        if hasattr(backend, name):
            setattr(backend, name, _timed(getattr(backend, name), name, recorder, clock))


def _timed(operation: Callable[..., Any], name: str, recorder: Recorder, clock: Callable[[], float]) -> Any:
    @functools.wraps(operation)
    def call(*args: Any, **kwargs: Any) -> Any:
        started = clock()
        try:
            return operation(*args, **kwargs)
        finally:
            recorder.on_kernel(name, clock() - started)

    return call


def trace_id_of(trace_context: str | None) -> str | None:
    """Return the trace id of a W3C traceparent, None for an absent or malformed one."""
    found = _TRACE_CONTEXT.fullmatch(trace_context or "")
    return found.group(1) if found else None


def _exemplar(trace_context: str | None) -> dict[str, str] | None:
    trace_id = trace_id_of(trace_context)
    return {"trace_id": trace_id} if trace_id else None


def _make(metric: Metric, registry: CollectorRegistry) -> MetricWrapperBase:
    if metric.type is MetricType.HISTOGRAM:
        return Histogram(metric.name, metric.help, metric.label_names, registry=registry, buckets=metric.buckets)
    kind = Counter if metric.type is MetricType.COUNTER else Gauge
    return kind(metric.name, metric.help, metric.label_names, registry=registry)
