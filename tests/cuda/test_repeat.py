"""`repeat` of the CUDA backend with bodies other than a decoder's: what is captured and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from helpers.attention_cases import make_layout
from helpers.captured_twins import open_backend
from pagedkv.compute.cuda import graphs
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.dtypes import DType


@pytest.fixture
def small():
    backend, driver = open_backend(make_layout(num_blocks=2), weight_dtype=DType.FLOAT32)
    yield backend, driver
    backend.close()
    driver.assert_clean()


def repeat_rows(backend: CudaBackend, table: Any, rows: np.ndarray, **options: Any) -> np.ndarray:
    def job() -> np.ndarray:
        return backend.to_host(backend.repeat("rows", [rows], lambda arrays: backend.take_rows(table, arrays[0])))

    return backend.submit(job).result()


def test_a_step_without_padding_is_captured_for_each_number_of_rows(small):
    backend, _ = small
    values = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)
    table = backend.submit(lambda: backend.from_host(values)).result()
    for rows in ([1], [2, 3], [4, 5, 8], [0, 0, 1], [7]):
        index = np.array(rows, np.int32)
        np.testing.assert_array_equal(repeat_rows(backend, table, index), values[index])
    assert backend.graphs.num_captured == 3


@pytest.mark.parametrize("rows", [np.zeros(0, np.int32), np.zeros(65, np.int32)])
def test_no_rows_and_too_many_rows_run_as_they_are(small, rows):
    backend, _ = small
    values = np.ones((3, 16), np.float32)
    table = backend.submit(lambda: backend.from_host(values)).result()
    np.testing.assert_array_equal(repeat_rows(backend, table, rows), values[rows])
    assert not backend.graphs.num_captured


def test_a_body_that_uploads_something_else_each_time_is_not_captured(small, caplog):
    backend, _ = small
    calls: list[int] = []

    def body(arrays: Sequence[np.ndarray]) -> Any:
        calls.append(1)
        return backend.add(backend.from_host(np.full((1, 4), len(calls), np.float32)), backend.from_host(arrays[0]))

    for _ in range(2):
        x = np.ones((1, 4), np.float32)
        result = backend.submit(lambda x=x: backend.to_host(backend.repeat("changing", [x], body))).result()
        np.testing.assert_array_equal(result, np.full((1, 4), len(calls) + 1))
    assert not backend.graphs.num_captured
    assert len(caplog.records) == 1


def test_an_input_of_another_type_than_the_kernels_read_is_not_captured(small):
    backend, _ = small
    values = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)
    table = backend.submit(lambda: backend.from_host(values)).result()
    for _ in range(2):
        np.testing.assert_array_equal(repeat_rows(backend, table, np.array([3], np.int64)), values[[3]])
    assert not backend.graphs.num_captured


def test_a_graph_that_goes_while_its_launch_is_pending_ends_behind_it(small, monkeypatch):
    """Three graphs in one job, where two are kept: nothing waits for the device in between."""
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    backend, _ = small
    values = np.random.default_rng(0).standard_normal((9, 16)).astype(np.float32)
    table = backend.submit(lambda: backend.from_host(values)).result()
    steps = [np.arange(n, dtype=np.int32) for n in (1, 2, 3, 1)]

    def job() -> list[np.ndarray]:
        take = lambda arrays: backend.take_rows(table, arrays[0])  # noqa: E731
        return [backend.to_host(backend.repeat("rows", [rows], take)) for rows in steps]

    for rows, got in zip(steps, backend.submit(job).result(), strict=True):
        np.testing.assert_array_equal(got, values[rows])
    assert backend.graphs.num_captured == 4
