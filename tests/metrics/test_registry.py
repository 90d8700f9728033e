"""The registry's own laws."""

from __future__ import annotations

import re

import grpc
import pytest

from pagedkv.compute.backend import SUPPORTED_KV_DTYPES
from pagedkv.engine import FinishReason
from pagedkv.metrics.registry import CODE, DTYPE, FINISHED_REASON, METHOD, METRICS, OTHER, STATE, MetricType
from pagedkv.v1 import generation_pb2, kv_cache_pb2

BASE_UNITS = {"", "blocks", "bytes", "ratio", "seconds", "tokens", "sequences", "requests"}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_metric_follows_the_naming_conventions(metric):
    assert re.fullmatch(r"pagedkv_[a-z0-9_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert metric.name.endswith("_ratio") == (metric.unit == "ratio")
    assert metric.unit in BASE_UNITS
    assert metric.help.endswith(".")
    assert bool(metric.buckets) == (metric.type is MetricType.HISTOGRAM)
    assert list(metric.buckets) == sorted(set(metric.buckets))


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_metric_labels_are_closed_sets_and_no_ids(metric):
    for label in metric.labels:
        assert not re.search(r"(^|_)id$|user|session|request_id|sequence_id|model", label.name)
        assert 1 <= len(label.values) == len(set(label.values)) <= 31
        assert all(re.fullmatch(r"[A-Za-z0-9_/]+", value) for value in label.values)


def test_rpc_methods_are_those_of_the_protos():
    services = (
        kv_cache_pb2.DESCRIPTOR.services_by_name["KvCache"],
        generation_pb2.DESCRIPTOR.services_by_name["Generation"],
    )
    served = {f"{service.name}/{method.name}" for service in services for method in service.methods}
    assert set(METHOD.values) == served | {OTHER}


def test_codes_reasons_and_dtypes_are_those_of_the_code():
    assert set(CODE.values) == {code.name for code in grpc.StatusCode} | {OTHER}
    assert set(FINISHED_REASON.values) == {str(reason) for reason in FinishReason} | {OTHER}
    assert {str(dtype) for dtype in SUPPORTED_KV_DTYPES} <= set(DTYPE.values)
    assert len(STATE.values) == 6
