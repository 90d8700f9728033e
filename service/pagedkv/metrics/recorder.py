"""What happens, as it happens: counters and histograms kept by the observers of engine, calls, cache and kernels."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any, Concatenate, Final, ParamSpec

from pagedkv.engine import FinishReason, StepReport
from pagedkv.metrics.registry import METRICS, MetricType
from pagedkv.metrics.series import SeriesStore

_log = logging.getLogger(__name__)
_TRACE_CONTEXT: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
_TIMED_KERNELS: Final = {  # operations of a backend, and the kernel's name in the metrics
    "attend": "attend",
    "write_kv": "write_kv",
    "rope_write_kv": "write_kv",
    "copy_blocks": "copy_blocks",
    "merge_states": "merge_states",
    "linear": "linear",
    "linear_many": "linear",
}
_SHOWN_FROM_THE_START: Final = (
    "leases_expired",
    "requests_received",
    "request_success",
    "prompt_tokens",
    "generation_tokens",
    "computed_tokens",
    "num_preemptions",
    "preempted_tokens",
    "swap_bytes",
    "swap_seconds",
    "metric_errors",
    "kernel_seconds",
    "kernel_launches",
)
P = ParamSpec("P")


def _guarded(method: Callable[Concatenate[Recorder, P], None]) -> Callable[Concatenate[Recorder, P], None]:
    """Count and log what goes wrong: a fault in a figure never stops the work that it is about."""

    @functools.wraps(method)
    def call(self: Recorder, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.note_fault(method.__name__)

    return call  # type: ignore[return-value]  # functools.wraps names `self`


@dataclass(slots=True)
class _LiveRequest:
    trace_id: str | None
    is_scheduled: bool = False


class Recorder:
    """Observes the engine, the RPC server, the cache and the kernels. Its methods never raise."""

    def __init__(self) -> None:
        self.store = SeriesStore()
        self.num_generated_tokens = 0
        self._requests: dict[str, _LiveRequest] = {}
        for name in _SHOWN_FROM_THE_START:
            metric = METRICS[f"pagedkv_{name}_total"]
            for values in product(*(label.values for label in metric.labels)):
                self.store.counter(metric.name, *values)
        for metric in METRICS.values():
            if metric.type is MetricType.HISTOGRAM and not metric.labels:
                self.store.histogram(metric.name)

    # -- engine -------------------------------------------------------------------------------------------------

    @_guarded
    def on_queued(self, request_id: str, num_prompt_tokens: int, trace_context: str | None) -> None:
        """See EngineObserver."""
        self._requests[request_id] = _LiveRequest(trace_id_of(trace_context))
        self.store.counter("pagedkv_requests_received_total").inc()
        self.store.counter("pagedkv_prompt_tokens_total").inc(num_prompt_tokens)

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
        self.store.counter("pagedkv_num_preemptions_total", mode, reason).inc()
        self.store.counter("pagedkv_preempted_tokens_total", mode).inc(num_tokens_lost)

    @_guarded
    def on_finished(
        self, request_id: str, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """See EngineObserver."""
        self._requests.pop(request_id, None)
        self.store.counter("pagedkv_request_success_total", str(reason)).inc()

    @_guarded
    def on_step(self, report: StepReport) -> None:
        """See EngineObserver."""
        self.store.histogram("pagedkv_batch_size_sequences").observe(report.num_sequences)
        self.store.histogram("pagedkv_step_duration_seconds").observe(report.seconds)
        self.store.counter("pagedkv_computed_tokens_total", "prefill").inc(report.num_prefill_tokens)
        self.store.counter("pagedkv_computed_tokens_total", "decode").inc(report.num_decode_tokens)

    # -- calls, cache, device -----------------------------------------------------------------------------------

    @_guarded
    def on_rpc(self, method: str, code: str, seconds: float) -> None:
        """Note a finished call of `method` ("KvCache/Attend") with the name of its status code."""
        self.store.histogram("pagedkv_rpc_duration_seconds", method, code).observe(seconds)

    @_guarded
    def on_evicted(self, idle_seconds: float, lifetime_seconds: float) -> None:
        """See CacheObserver."""
        self.store.histogram("pagedkv_kv_block_idle_before_evict_seconds").observe(idle_seconds)
        self.store.histogram("pagedkv_kv_block_lifetime_seconds").observe(lifetime_seconds)

    @_guarded
    def on_reused(self, gap_seconds: float) -> None:
        """See CacheObserver."""
        self.store.histogram("pagedkv_kv_block_reuse_gap_seconds").observe(gap_seconds)

    @_guarded
    def on_kernel(self, kernel: str, seconds: float) -> None:
        """Note one launch; may be called on the device's thread."""
        self.store.counter("pagedkv_kernel_seconds_total", kernel).inc(seconds)
        self.store.counter("pagedkv_kernel_launches_total", kernel).inc()

    @_guarded
    def on_swap(self, direction: str, num_bytes: int, seconds: float, request_id: str = "") -> None:
        """See EngineObserver and RpcObserver."""
        self.store.counter("pagedkv_swap_bytes_total", direction).inc(num_bytes)
        self.store.counter("pagedkv_swap_seconds_total", direction).inc(seconds)

    @_guarded
    def on_lease_expired(self) -> None:
        """Note a sequence freed because its lease ran out."""
        self.store.counter("pagedkv_leases_expired_total").inc()

    def note_fault(self, where: str) -> None:
        """Count and log a fault inside the metrics."""
        _log.warning("metrics: %s saw an impossible value", where, exc_info=True)
        self.store.counter("pagedkv_metric_errors_total").inc()

    # -- private ------------------------------------------------------------------------------------------------

    def _note_generated(self) -> None:
        self.num_generated_tokens += 1
        self.store.counter("pagedkv_generation_tokens_total").inc()

    def _observe(self, name: str, seconds: float, request: _LiveRequest | None) -> None:
        self.store.histogram(name).observe(seconds, None if request is None else request.trace_id)


class KernelTimer:
    """Has a backend's operations report the device time of each; what runs inside another is part of that one."""

    def __init__(self, backend: Any, recorder: Recorder) -> None:
        self._backend, self._recorder = backend, recorder
        self._is_inside = False  # operations run on the device's thread, one after another
        for name, kernel in _TIMED_KERNELS.items():
            if hasattr(backend, name):
                setattr(backend, name, self._timed(getattr(backend, name), lambda *args, kernel=kernel: kernel))
        if hasattr(backend, "repeat"):
            backend.repeat = self._timed(backend.repeat, _name_step)

    def _timed(self, operation: Callable[..., Any], name_kernel: Callable[..., str]) -> Any:
        @functools.wraps(operation)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return operation(*args, **kwargs)
            self._is_inside = True
            stop = self._backend.stopwatch(functools.partial(self._recorder.on_kernel, name_kernel(*args)))
            try:
                result = operation(*args, **kwargs)
            except BaseException:
                with suppress(Exception):  # what the operation met says more than what a failed device answers now
                    stop()
                raise
            finally:
                self._is_inside = False
            stop()
            return result

        return call


def _name_step(shape: Hashable, *_: Any) -> str:
    """Return the kernel that a repeated step of the decoder counts as."""
    return "prefill_step" if isinstance(shape, tuple) and shape[-1] == "prompts" else "decode_step"


def trace_id_of(trace_context: str | None) -> str | None:
    """Return the trace id of a W3C traceparent, None for an absent or malformed one."""
    found = _TRACE_CONTEXT.fullmatch(trace_context or "")
    return found.group(1) if found else None
