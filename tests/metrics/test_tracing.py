"""Spans of requests, collected in memory."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from helpers.scripted_engine import collect, make_prompt, scripted_engine, submit
from pagedkv.engine import FinishReason, GenerationRequest, SamplingParams
from pagedkv.metrics.recorder import Recorder
from pagedkv.metrics.tracing import ObserverGroup, RequestTracer, make_tracer

TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.fixture
def traced():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield RequestTracer(provider.get_tracer("test")), exporter
    provider.shutdown()


def by_name(exporter, name):
    return [span for span in exporter.get_finished_spans() if span.name == name]


async def test_request_is_one_span_under_the_callers_with_its_phases_in_order(traced):
    tracer, exporter = traced
    async with scripted_engine(observer=tracer) as (engine, _, _):
        context = f"00-{TRACE_ID}-{PARENT_ID}-01"
        await collect(engine.submit(GenerationRequest(make_prompt(9), SamplingParams(max_tokens=3), None, context)))
    (request,) = by_name(exporter, "text_completion")
    assert f"{request.context.trace_id:032x}" == TRACE_ID
    assert f"{request.parent.span_id:016x}" == PARENT_ID
    assert request.attributes["gen_ai.usage.input_tokens"] == 9
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)
    phases = [span for span in exporter.get_finished_spans() if span is not request]
    assert [span.name for span in phases] == ["queue", "prefill", "decode"]
    assert {span.parent.span_id for span in phases} == {request.context.span_id}
    assert request.start_time <= phases[0].start_time <= phases[0].end_time <= phases[1].start_time


async def test_preemption_is_an_event_and_goes_back_to_the_queue(traced):
    tracer, exporter = traced
    async with scripted_engine(num_blocks=12, block_size=8, observer=tracer) as (engine, _, _):
        streams = [submit(engine, make_prompt(24, seed), max_tokens=40) for seed in range(4)]
        await asyncio.gather(*map(collect, streams))
    requests = by_name(exporter, "text_completion")
    events = [event for span in requests for event in span.events]
    assert events
    assert {event.name for event in events} == {"preempted"}
    assert len(by_name(exporter, "queue")) == len(requests) + len(events)
    assert not tracer._live


async def test_a_swap_is_two_events_and_goes_back_to_the_phase_that_it_interrupted(traced):
    tracer, exporter = traced
    options = {"num_blocks": 12, "block_size": 8, "num_host_blocks": 64, "preemption": "swap"}
    async with scripted_engine(observer=tracer, **options) as (engine, _, _):
        streams = [submit(engine, make_prompt(24, seed), max_tokens=40) for seed in range(4)]
        await asyncio.gather(*map(collect, streams))
    swapped = [span for span in by_name(exporter, "text_completion") if span.events]
    assert swapped
    for span in swapped:
        assert {event.name for event in span.events} == {"preempted", "swap_out", "swap_in"}
        assert all(event.attributes["bytes"] > 0 for event in span.events if event.name.startswith("swap_"))
        preempted = [event for event in span.events if event.name == "preempted"]
        assert {(event.attributes["mode"], event.attributes["tokens_lost"]) for event in preempted} == {("swap", 0)}
        phases = [
            part
            for part in exporter.get_finished_spans()
            if part.parent and part.parent.span_id == span.context.span_id
        ]
        names = [phase.name for phase in sorted(phases, key=lambda phase: phase.start_time)]
        assert names == ["queue", "prefill", "decode", *["queue", "decode"] * len(preempted)]


def test_device_error_marks_the_span(traced):
    tracer, exporter = traced
    tracer.on_queued("a", 1, "not a traceparent")
    tracer.on_finished("a", FinishReason.ERROR, 1, 0)
    (request,) = by_name(exporter, "text_completion")
    assert not request.status.is_ok
    assert request.attributes["error.type"] == "device_error"


def test_without_an_endpoint_there_is_no_tracer():
    assert make_tracer({}.get) is None


def test_a_group_tells_every_observer():
    one, two = Recorder(), Recorder()
    group = ObserverGroup((one, two))
    group.on_queued("a", 5, None)
    group.on_finished("a", FinishReason.STOP, 5, 0)
    for recorder in (one, two):
        assert recorder.store.counter("pagedkv_prompt_tokens_total").value == 5
        assert recorder.store.counter("pagedkv_request_success_total", "stop").value == 1
