"""Traces by OpenTelemetry, where its package is installed and an exporter is configured; otherwise nothing.

One span a request, in the GenAI semantic conventions, child of the caller's span where a traceparent came in. The
standard variables configure it: OTEL_EXPORTER_OTLP_ENDPOINT switches it on, OTEL_SERVICE_NAME names the service.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedkv.engine import EngineObserver, FinishReason, StepReport

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


@dataclass(slots=True)
class _Phases:
    """The open spans of one request."""

    request: Any
    context: Any
    phase: Any
    name: str = "queue"
    resumes: str = "prefill"  # the phase that follows the queue


class RequestTracer:
    """Observes the engine and writes a span "text_completion" for each request.

    Its children "queue", "prefill" and "decode" follow each other; a preemption is an event and goes back to "queue",
    and from there, after a swap, to the phase that it interrupted. Swaps are events too.
    `tracer` is an opentelemetry Tracer.
    """

    def __init__(self, tracer: Any) -> None:
        self._tracer = tracer
        self._live: dict[str, _Phases] = {}

    def on_queued(self, request_id: str, num_prompt_tokens: int, trace_context: str | None) -> None:
        """Start the request's span under the caller's."""
        from opentelemetry import trace

        request = self._tracer.start_span(
            "text_completion",
            context=_parent(trace_context),
            kind=trace.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "pagedkv",
                "gen_ai.usage.input_tokens": num_prompt_tokens,
            },
        )
        context = trace.set_span_in_context(request)
        self._live[request_id] = _Phases(request, context, self._tracer.start_span("queue", context))

    def on_scheduled(self, request_id: str, queue_seconds: float, num_cached_tokens: int) -> None:
        """End the wait; prefill begins."""
        live = self._live.get(request_id)
        if live is not None:
            self._enter(live, live.resumes)
            live.phase.set_attribute("pagedkv.cached_tokens", num_cached_tokens)

    def on_first_token(self, request_id: str, seconds: float) -> None:
        """End prefill; decode begins."""
        live = self._live.get(request_id)
        if live is not None:
            live.request.set_attribute("gen_ai.server.time_to_first_token", seconds)
            self._enter(live, "decode")

    def on_token(self, request_id: str, seconds: float) -> None:
        """Ignore: a span has no room for every token."""

    def on_preempted(self, request_id: str, mode: str, reason: str, num_tokens_lost: int) -> None:
        """Mark the preemption; the request waits again."""
        live = self._live.get(request_id)
        if live is not None:
            attributes = {"mode": mode, "reason": reason, "tokens_lost": num_tokens_lost}
            live.request.add_event("preempted", attributes)
            live.resumes = live.name if mode == "swap" and live.name != "queue" else "prefill"
            self._enter(live, "queue")

    def on_swap(self, direction: str, num_bytes: int, seconds: float, request_id: str) -> None:
        """Mark the swap."""
        live = self._live.get(request_id)
        if live is not None:
            live.request.add_event(f"swap_{direction}", {"bytes": num_bytes, "seconds": seconds})

    def on_finished(
        self, request_id: str, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """End the request's span."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        live.phase.end()
        live.request.set_attribute("gen_ai.usage.output_tokens", num_output_tokens)
        live.request.set_attribute("gen_ai.response.finish_reasons", (str(reason),))
        if reason is FinishReason.ERROR:
            from opentelemetry.trace import StatusCode

            live.request.set_status(StatusCode.ERROR)
            live.request.set_attribute("error.type", "device_error")
        live.request.end()

    def on_step(self, report: StepReport) -> None:
        """Ignore: steps belong to no single request."""

    def _enter(self, live: _Phases, name: str) -> None:
        now = time.time_ns()
        live.phase.end(now)
        live.name = name
        live.phase = self._tracer.start_span(name, live.context, start_time=now)


class ObserverGroup:
    """Tells several engine observers."""

    def __init__(self, observers: Sequence[EngineObserver]) -> None:
        self._observers = tuple(observers)

    def on_queued(self, request_id: str, num_prompt_tokens: int, trace_context: str | None) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_queued(request_id, num_prompt_tokens, trace_context)

    def on_scheduled(self, request_id: str, queue_seconds: float, num_cached_tokens: int) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_scheduled(request_id, queue_seconds, num_cached_tokens)

    def on_first_token(self, request_id: str, seconds: float) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_first_token(request_id, seconds)

    def on_token(self, request_id: str, seconds: float) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_token(request_id, seconds)

    def on_preempted(self, request_id: str, mode: str, reason: str, num_tokens_lost: int) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_preempted(request_id, mode, reason, num_tokens_lost)

    def on_swap(self, direction: str, num_bytes: int, seconds: float, request_id: str) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_swap(direction, num_bytes, seconds, request_id)

    def on_finished(
        self, request_id: str, reason: FinishReason, num_prompt_tokens: int, num_output_tokens: int
    ) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_finished(request_id, reason, num_prompt_tokens, num_output_tokens)

    def on_step(self, report: StepReport) -> None:
        """Tell all."""
        for observer in self._observers:
            observer.on_step(report)


def make_tracer(environment: Callable[[str], str | None] = os.environ.get) -> RequestTracer | None:
    """Return a tracer that exports over OTLP, None where the extra or an endpoint is missing."""
    if not any(environment(name) for name in _ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestTracer(provider.get_tracer("pagedkv"))


def _parent(trace_context: str | None) -> Any:
    if trace_context is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": trace_context})
