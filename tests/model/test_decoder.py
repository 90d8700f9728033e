"""The decoder's laws on tiny models: formats agree, chunks agree, batches agree."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from helpers.model_runner import forward, generate_greedily, load_on_numpy
from helpers.numpy_dense import NumpyBackend
from helpers.tiny_models import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    make_tiny_model,
    permute_rows,
    tiny_weights,
)
from pagedkv.compute.backend import AttentionBatch
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.model import StepInput, load_model, read_model_config
from pagedkv.model.gguf_file import GgufFile

ARCHITECTURES = ["llama", "mistral", "qwen2", "qwen3"]
PROMPT = [7, 99, 250, 31, 4, 4, 180, 66, 12, 290, 3, 54, 201, 17, 88, 140, 9, 5]


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum()))


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_ld_01_ld_02_gguf_and_hugging_face_logits_agree_with_grouped_heads(tmp_path, arch, dtype):
    """Formats differ in row order of q and k (llama) and in names; what is computed must not."""
    first, second = (
        forward(load_on_numpy(make_tiny_model(tmp_path / f, arch=arch, format=f, dtype=dtype)), PROMPT)
        for f in ("gguf", "hf")
    )
    assert cosine(first, second) > 0.999999
    np.testing.assert_allclose(first, second, atol=2e-5)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_greedy_decode_of_both_formats_gives_equal_tokens(tmp_path, arch):
    first, second = (
        generate_greedily(load_on_numpy(make_tiny_model(tmp_path / f, arch=arch, format=f, tied=False)), PROMPT, 16)
        for f in ("gguf", "hf")
    )
    assert first == second


@pytest.mark.parametrize(("arch", "interleaved"), [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_ld_02_only_llama_files_hold_permuted_rows_and_only_they_rotate_neighbours(tmp_path, arch, interleaved):
    path = make_tiny_model(tmp_path, arch=arch)
    file, source = GgufFile(path), tiny_weights(arch, 0, True, read_model_config(path).vocab_size)
    for part, heads in (("q", NUM_HEADS), ("k", NUM_KV_HEADS)):
        stored = file.weight(f"blk.1.attn_{part}.weight").data.view(np.float32).reshape(heads * HEAD_DIM, -1)
        expected = source[f"model.layers.1.self_attn.{part}_proj.weight"]
        np.testing.assert_array_equal(stored, permute_rows(expected, heads) if interleaved else expected)
    assert read_model_config(path).rope.interleaved is interleaved


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("chunk", [1, 5, 16, 17])
def test_chunked_prefill_equals_whole_prefill(tmp_path, arch, chunk):
    path = make_tiny_model(tmp_path, arch=arch, format="hf", overrides={"sliding_window": 6})
    whole = forward(load_on_numpy(path), PROMPT, rows=range(len(PROMPT)))
    model = load_on_numpy(path)
    parts = [
        forward(model, PROMPT[start : start + chunk], start, rows=range(len(PROMPT[start : start + chunk])))
        for start in range(0, len(PROMPT), chunk)
    ]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5)


def test_sliding_window_hides_what_lies_behind_every_layer_s_reach(tmp_path):
    """Two layers of window 4 let the last token see 7 back; without a window it sees the first token too."""
    changed = [PROMPT[0] + 1, *PROMPT[1:]]

    def differs(window):
        directory = tmp_path / str(window)
        path = make_tiny_model(directory, arch="mistral", format="hf", overrides={"sliding_window": window})
        model = load_on_numpy(path)
        return not np.array_equal(forward(model, PROMPT), forward(model, changed))

    assert not differs(4)
    assert differs(None)


def test_batch_of_prefill_and_decode_equals_each_alone(tmp_path):
    path = make_tiny_model(tmp_path)
    alone = load_on_numpy(path)
    expected = np.concatenate([forward(alone, PROMPT), forward(alone, PROMPT[3:9])])
    backend = NumpyBackend(KvLayout(read_model_config(path).kv_shape(), 16, 16))
    model = load_model(path, backend)
    forward(model, PROMPT[:-1], table=[9, 2])
    step = StepInput(
        token_ids=np.array([PROMPT[-1], *PROMPT[3:9]], np.int32),
        positions=np.array([17, *range(6)], np.int32),
        slot_mapping=np.array([4 * 16 + 1, *range(80, 86)], np.int64),
        batch=AttentionBatch(
            np.array([[9, 4], [5, 0]], np.int32), np.array([18, 6], np.int32), np.array([0, 1, 7], np.int32)
        ),
        copies=[(2, 4)],  # the block of position 16 is copied first
        logit_rows=np.array([0, 6], np.int32),
    )
    np.testing.assert_allclose(model.decoder.forward(step), expected, atol=1e-5)


def test_step_without_logit_rows_writes_keys_and_values_of_every_layer(tmp_path):
    model = load_on_numpy(make_tiny_model(tmp_path))
    logits = forward(model, PROMPT[:-1], rows=[])
    assert logits.shape == (0, model.config.vocab_size)
    continued = forward(model, PROMPT[-1:], len(PROMPT) - 1)
    whole = forward(load_on_numpy(make_tiny_model(tmp_path)), PROMPT)
    np.testing.assert_allclose(continued, whole, atol=1e-5)


def test_quantised_weights_stay_near_the_source(tmp_path):
    exact = forward(load_on_numpy(make_tiny_model(tmp_path / "a")), PROMPT)
    rounded = forward(load_on_numpy(make_tiny_model(tmp_path / "b", dtype="Q8_0")), PROMPT)
    assert 0.999 < cosine(exact, rounded) < 1


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_cpu_backend_gives_the_reference_s_logits(tmp_path, arch, dtype):
    path = make_tiny_model(tmp_path, arch=arch, dtype=dtype)
    expected = forward(load_on_numpy(path), PROMPT, rows=range(len(PROMPT)))
    backend = CpuBackend(KvLayout(read_model_config(path).kv_shape(), 16, 16), num_threads=1)
    try:
        logits = forward(load_model(path, backend), PROMPT, rows=range(len(PROMPT)))
    finally:
        backend.close()
    np.testing.assert_allclose(logits, expected, atol=5e-5)


def test_stored_weights_are_read_only_views_of_the_mapped_file(tmp_path):
    file = GgufFile(make_tiny_model(tmp_path))
    data = file.weight("blk.0.ffn_up.weight").data
    assert not data.flags.owndata
    assert not data.flags.writeable
    assert isinstance(data.base.obj if isinstance(data.base, memoryview) else data.base, mmap.mmap)
