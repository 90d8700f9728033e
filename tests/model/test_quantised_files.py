"""GGUF files of every quantised type load and compute what the gguf package's dequantiser says (NC-19)."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from compute_dense.weights import CONVERTED, make_weight
from helpers import tiny_models
from helpers.model_runner import BLOCK_SIZE, forward, load_on_numpy
from helpers.tiny_models import make_tiny_model
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.model import load_model, read_model_config
from pagedkv.model.gguf_file import _TENSOR_TYPES

PROMPT = [7, 99, 250, 31, 4, 180]
KINDS = ("Q5_0", "Q5_1", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS")


@pytest.fixture
def make_quantised(tmp_path, monkeypatch):
    """Make models whose rows are whole blocks of 256, of legal random bytes."""
    monkeypatch.setattr(tiny_models, "HIDDEN", 256)
    monkeypatch.setattr(tiny_models, "INTERMEDIATE", 256)
    quantize_values = gguf.quants.quantize

    def quantize(values, kind):
        if values.ndim == 1:
            return values / 50  # random blocks are large
        if kind.name in ("Q5_0", "Q5_1"):
            return quantize_values(values, kind)
        return make_weight(kind.name, *values.shape, 3)[0].data.reshape(len(values), -1)

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    return lambda kind: make_tiny_model(tmp_path / kind, dtype=kind)


def load_on_cpu(path):
    said: list[str] = []
    backend = CpuBackend(KvLayout(read_model_config(path).kv_shape(), 16, BLOCK_SIZE), num_threads=1)
    return backend, load_model(path, backend, said.append), said


@pytest.mark.parametrize("kind", KINDS)
def test_nc19_file_of_a_quantised_type_computes_what_its_dequantiser_says(make_quantised, kind):
    path = make_quantised(kind)
    backend, model, _ = load_on_cpu(path)
    expected = forward(load_on_numpy(path, dtype=np.float64), PROMPT)
    np.testing.assert_allclose(forward(model, PROMPT), expected, atol=2e-4 * np.abs(expected).max())
    backend.close()


def test_nc19_what_is_converted_and_the_memory_it_takes_are_said(make_quantised):
    def said_of(kind):
        backend, _, said = load_on_cpu(make_quantised(kind))
        backend.close()
        return said

    assert said_of("Q5_K") == []
    num_weights = 2 * (2 * 512 * 256 + 2 * 128 * 256 + 3 * 256 * 256) + tiny_vocabulary_size() * 256
    (line,) = said_of("Q2_K")
    stored, loaded = num_weights / 256 * 84 / 1e6, num_weights * 4 / 1e6
    assert line == (
        f"15 Q2_K tensors ({stored:,.1f} MB) become F32 at load, {loaded:,.1f} MB of memory: no kernel reads Q2_K here"
    )
    (line,) = said_of("Q3_K")
    assert f"become Q6_K at load, {num_weights / 256 * 210 / 1e6:,.1f} MB" in line


def tiny_vocabulary_size() -> int:
    return len(tiny_models.byte_level_vocabulary().tokens)


def test_nc19_every_type_with_a_formula_is_read_with_the_format_s_sizes():
    for number, (kind, block, block_bytes) in _TENSOR_TYPES.items():
        found = gguf.GGMLQuantizationType(number)
        assert (found.name, gguf.GGML_QUANT_SIZES[found]) == (kind, (block, block_bytes))
    assert {kind for kind, *_ in _TENSOR_TYPES.values()} >= {*KINDS, *CONVERTED}
