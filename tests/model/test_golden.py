"""SmolLM2 against a float64 forward of another implementation (golden/smollm2_greedy.json)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from helpers.model_runner import BLOCK_SIZE, forward
from helpers.numpy_dense import NumpyBackend
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.model import load_model, read_model_config

CASES = json.loads((Path(__file__).parent / "golden" / "smollm2_greedy.json").read_text("utf-8"))["cases"]
DECIDED_GAP, LOGIT_TOLERANCE = 0.05, 0.02


BACKENDS = {"numpy": NumpyBackend, "cpu": CpuBackend, "cpu-int16": partial(CpuBackend, activations="int16")}


@pytest.fixture(scope="module", params=BACKENDS.values(), ids=BACKENDS)
def model(request, smollm2):
    backend = request.param(KvLayout(read_model_config(smollm2).kv_shape(), 16, BLOCK_SIZE))
    yield load_model(smollm2, backend)
    backend.close()


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_greedy_path_follows_the_golden_tokens_wherever_they_are_decided(model, case):
    """One pass over prompt and golden output gives every step's logits at once."""
    prompt, output = case["prompt_token_ids"], case["greedy_token_ids"]
    rows = range(len(prompt) - 1, len(prompt) + len(output) - 1)
    logits = forward(model, [*prompt, *output[:-1]], rows=rows)
    decided = np.array(case["top1_minus_top2_logit"]) > DECIDED_GAP
    np.testing.assert_array_equal(logits.argmax(-1)[decided], np.array(output)[decided])
    ids, values = zip(*case["first_step_top5_logits"], strict=True)
    np.testing.assert_allclose(logits[0][list(ids)], values, atol=LOGIT_TOLERANCE)


def test_decode_steps_continue_a_chunked_prefill_as_one_pass_does(model, request):
    case = CASES[0]
    prompt, output = case["prompt_token_ids"], case["greedy_token_ids"][:6]
    whole = forward(model, [*prompt, *output], rows=range(len(prompt) - 1, len(prompt) + len(output)))
    table = [11, 3]
    forward(model, prompt[:3], table=table, rows=[])
    steps = [forward(model, prompt[3:], 3, table=table)]
    steps += [forward(model, [token], len(prompt) + i, table=table) for i, token in enumerate(output)]
    tolerance = 1e-2 if "int16" in request.node.name else 2e-3  # a last bit of float32 may be a step of an int16
    np.testing.assert_allclose(np.concatenate(steps), whole, atol=tolerance)


def test_tokenizer_encodes_every_golden_prompt_and_decodes_every_output(model):
    for case in CASES:
        assert model.tokenizer.encode(case["prompt"], parse_special=True) == case["prompt_token_ids"]
        assert model.tokenizer.decode(case["greedy_token_ids"], skip_special=False) == case["text"]
