"""Rounded activations on the real model: what they change of its predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from helpers.model_runner import BLOCK_SIZE, forward
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cpu.dense_integer import has_integer_dots
from pagedkv.compute.cpu.features import choose_isa
from pagedkv.compute.layout import KvLayout
from pagedkv.model import load_model, read_model_config

CASES = json.loads((Path(__file__).parent / "golden" / "smollm2_greedy.json").read_text("utf-8"))["cases"]


def golden_logits(path: Path, activations: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits before each token of the golden texts but the first of each, and these tokens."""
    backend = CpuBackend(KvLayout(read_model_config(path).kv_shape(), 16, BLOCK_SIZE), activations=activations)
    model = load_model(path, backend)
    logits, targets = [], []
    for case in CASES:
        text = [*case["prompt_token_ids"], *case["greedy_token_ids"]]
        logits.append(forward(model, text[:-1], rows=range(len(text) - 1)).copy())
        targets += text[1:]
    backend.close()
    return np.concatenate(logits).astype(np.float64), np.array(targets)


def mean_log_likelihood(logits: np.ndarray, targets: np.ndarray) -> float:
    shifted = logits - logits.max(-1, keepdims=True)
    return float((shifted[np.arange(len(targets)), targets] - np.log(np.exp(shifted).sum(-1))).mean())


@pytest.mark.skipif(not has_integer_dots(choose_isa()), reason="this machine has no AVX-512 VNNI")
@pytest.mark.parametrize(("activations", "mean_error", "change"), [("int16", 0.002, 0.0005), ("int8", 0.4, 0.02)])
def test_rounded_activations_keep_the_model_predictions(smollm2, activations, mean_error, change):
    """The mean error of a logit, and the change of the golden texts' likelihood in nats a token."""
    exact, targets = golden_logits(smollm2, "float32")
    rounded, _ = golden_logits(smollm2, activations)
    assert np.abs(rounded - exact).mean() <= mean_error
    assert abs(mean_log_likelihood(rounded, targets) - mean_log_likelihood(exact, targets)) <= change
