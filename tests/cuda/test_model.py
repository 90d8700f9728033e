"""Whole models on the CUDA backend over the virtual GPU."""

from __future__ import annotations

import numpy as np
import pytest

from helpers.cuda import make_virtual_backend
from helpers.model_runner import BLOCK_SIZE, forward, generate_greedily, load_on_numpy
from helpers.tiny_models import make_tiny_model
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType
from pagedkv.model import load_model, read_model_config

PROMPT = [7, 99, 250, 31, 4, 4, 180, 66, 12, 290, 3, 54, 201, 17, 88, 140, 9, 5]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_tiny_models_logits_and_greedy_tokens_equal_the_reference(tmp_path, arch):
    path = make_tiny_model(tmp_path, arch=arch, format="gguf")
    layout = KvLayout(read_model_config(path).kv_shape(), 16, BLOCK_SIZE)
    backend, driver = make_virtual_backend(layout, weight_dtype=DType.FLOAT32)
    model, reference = load_model(path, backend), load_on_numpy(path)
    np.testing.assert_allclose(forward(model, PROMPT), forward(reference, PROMPT), atol=2e-5)
    assert generate_greedily(model, PROMPT, 4) == generate_greedily(reference, PROMPT, 4)
    backend.close()
    driver.assert_clean()
