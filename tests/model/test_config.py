"""What is read before any weight: architectures, rope scaling, end ids, tied embeddings."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.model_runner import forward, load_on_numpy
from helpers.tiny_models import CONTEXT, HEAD_DIM, make_tiny_model, tiny_weights, write_json
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model import read_model_config

PROMPT = [5, 9, 40, 200, 13]


def read_with(tmp_path, **overrides):
    return read_model_config(make_tiny_model(tmp_path, format="hf", overrides=overrides))


@pytest.mark.parametrize("arch", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("format", ["gguf", "hf"])
def test_configuration_states_the_pool_s_shape(tmp_path, arch, format):
    config = read_model_config(make_tiny_model(tmp_path, arch=arch, format=format))
    shape = config.kv_shape(DType.FLOAT16)
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (2, 8, 2, 64)
    assert config.architecture == ("llama" if format == "gguf" and arch == "mistral" else arch)
    assert config.context_length == CONTEXT
    assert config.eos_token_ids >= {2}


def test_foreign_architecture_is_refused_by_name_before_any_weight_exists(tmp_path):
    path = make_tiny_model(tmp_path, format="hf", overrides={"architectures": ["MambaForCausalLM"]})
    (path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModel, match=r"MambaForCausalLM.*supported: llama, mistral, qwen2, qwen3"):
        read_model_config(path)


@pytest.mark.parametrize(
    ("overrides", "needle"),
    [
        ({"head_dim": 48}, "head_dim 48"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "KV heads"),
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"eos_token_id": "two"}, "eos_token_id"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": 0}, "rope_scaling must be an object, got 0"),
        ({"rope_parameters": ""}, "rope_parameters must be an object"),
    ],
)
def test_option_that_is_not_implemented_or_not_sound_is_refused_by_name(tmp_path, overrides, needle):
    with pytest.raises(UnsupportedModel, match=needle):
        read_with(tmp_path, **overrides)


def test_mixture_of_experts_in_a_llama_file_is_refused(tmp_path):
    with pytest.raises(UnsupportedModel, match="expert_count"):
        read_model_config(make_tiny_model(tmp_path, overrides={"llama.expert_count": 8}))


def test_sliding_window_holds_for_all_of_mistral_and_for_qwen_only_where_switched_on(tmp_path):
    def windows(name, arch, **overrides):
        return read_model_config(
            make_tiny_model(tmp_path / name, arch=arch, format="hf", overrides={"sliding_window": 8, **overrides})
        ).windows

    assert windows("a", "mistral") == (8, 8)
    assert windows("b", "qwen2", use_sliding_window=False) == (None, None)
    assert windows("c", "qwen2", use_sliding_window=True, max_window_layers=1) == (None, 8)
    assert windows("d", "qwen3", layer_types=["sliding_attention", "full_attention"]) == (8, None)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)
HF_KEYS = [
    "architectures",
    "model_type",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "vocab_size",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "sliding_window",
    "layer_types",
    "quantization_config",
]


@pytest.fixture(scope="module")
def fuzzed_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("fuzz"), format="hf")


@settings(max_examples=300, deadline=None)
@given(changes=st.dictionaries(st.sampled_from(HF_KEYS), JSON_VALUES, min_size=1, max_size=2))
def test_configuration_with_arbitrary_values_is_read_or_refused_with_our_own_error(fuzzed_model, changes):
    content = json.loads((fuzzed_model / "config.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        write_json(Path(directory) / "config.json", content | changes)
        with suppress(UnsupportedModel):
            read_model_config(Path(directory)).rope.inv_freq()


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(["rope_type", "factor", "rope_theta", "beta_fast", "attention_factor"]), value=JSON_VALUES)
def test_rope_block_with_arbitrary_values_is_read_or_refused_with_our_own_error(fuzzed_model, name, value):
    content = json.loads((fuzzed_model / "config.json").read_text())
    content["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0, name: value}
    with tempfile.TemporaryDirectory() as directory:
        write_json(Path(directory) / "config.json", content)
        with suppress(UnsupportedModel):
            read_model_config(Path(directory)).rope.inv_freq()


# --- LD-04: rope scaling. Reference formulas are written out term by term, one frequency at a time.

BASE, HALF = 10000.0, HEAD_DIM // 2


def plain_table(base=BASE):
    return [base ** (-2 * i / HEAD_DIM) for i in range(HALF)]


def llama3_table(factor, low, high, original):
    table = []
    for frequency in plain_table():
        wavelength = 2 * math.pi / frequency
        if wavelength < original / high:
            table.append(frequency)
        elif wavelength > original / low:
            table.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            table.append((1 - smooth) * frequency / factor + smooth * frequency)
    return table


def yarn_table(factor, original, fast=32.0, slow=1.0):
    def dimension(turns):
        return HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = max(math.floor(dimension(fast)), 0), min(math.ceil(dimension(slow)), HEAD_DIM - 1)
    table = []
    for i, frequency in enumerate(plain_table()):
        ramp = min(max((i - low) / (high - low), 0), 1)
        table.append(frequency / factor * ramp + frequency * (1 - ramp))
    return table


SCALINGS = [
    ({"factor": 4.0}, "linear", [f / 4 for f in plain_table()], CONTEXT * 4),
    (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
        "llama3",
        llama3_table(8.0, 1.0, 4.0, 512),
        CONTEXT,
    ),
    (
        {"factor": 16.0},
        "dynamic",
        plain_table(BASE * (16 * (16 * CONTEXT) / CONTEXT - 15) ** (HEAD_DIM / (HEAD_DIM - 2))),
        CONTEXT * 16,
    ),
    ({"factor": 16.0, "original_max_position_embeddings": CONTEXT}, "yarn", yarn_table(16.0, CONTEXT), CONTEXT * 16),
]


@pytest.mark.parametrize("block_name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize(("block", "kind", "expected", "context"), SCALINGS, ids=[row[1] for row in SCALINGS])
def test_ld_04_frequency_table_equals_the_formula(tmp_path, block_name, key, block, kind, expected, context):
    config = read_with(tmp_path, **{block_name: {**block, key: kind}})
    np.testing.assert_allclose(config.rope.inv_freq(), np.array(expected), rtol=1e-6)
    assert config.context_length == context
    assert config.rope.scale == pytest.approx(0.1 * math.log(16) + 1 if kind == "yarn" else 1.0)


@pytest.mark.parametrize(("block", "kind", "expected", "context"), SCALINGS, ids=[row[1] for row in SCALINGS])
def test_ld_04_logits_at_far_positions_use_the_scaled_table(tmp_path, block, kind, expected, context):
    """Replacing the decoder's table by the formula's changes nothing; replacing it by the plain one does."""
    path = make_tiny_model(tmp_path, format="hf", overrides={"rope_scaling": {**block, "rope_type": kind}})
    model = load_on_numpy(path)
    positions = [0, 10, 5000, 20000, 20001]
    logits = forward(model, PROMPT, positions=positions)
    model.decoder._rotation = replace(model.decoder._rotation, inv_freq=np.array(expected, np.float32))
    np.testing.assert_allclose(forward(model, PROMPT, positions=positions), logits, atol=2e-2)
    model.decoder._rotation = replace(model.decoder._rotation, inv_freq=np.array(plain_table(), np.float32))
    assert np.abs(forward(model, PROMPT, positions=positions) - logits).max() > 0.1


def test_ld_04_unknown_rope_scaling_is_refused_by_name(tmp_path):
    with pytest.raises(UnsupportedModel, match="longrope"):
        read_with(tmp_path / "a", rope_scaling={"type": "longrope", "factor": 2.0})
    with pytest.raises(UnsupportedModel, match="longrope"):
        read_model_config(make_tiny_model(tmp_path / "b", overrides={"llama.rope.scaling.type": "longrope"}))


def test_ld_04_scaling_without_its_factor_is_refused(tmp_path):
    with pytest.raises(InvalidModelFile, match="factor"):
        read_with(tmp_path, rope_scaling={"rope_type": "linear"})


def test_ld_04_gguf_scaling_and_frequency_divisors_are_used(tmp_path):
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = read_model_config(make_tiny_model(tmp_path / "a", overrides=linear))
    np.testing.assert_allclose(config.rope.inv_freq(), np.array(plain_table()) / 4, rtol=1e-6)
    divisors = np.linspace(1, 8, HALF, dtype=np.float32)
    config = read_model_config(make_tiny_model(tmp_path / "b", weights={"rope_freqs.weight": divisors}))
    np.testing.assert_allclose(config.rope.inv_freq(), np.array(plain_table()) / divisors, rtol=1e-6)


# --- LD-06, LD-07: the output head


def test_ld_06_tied_model_with_an_equal_head_loads_silently(tmp_path):
    path = make_tiny_model(tmp_path / "a", format="hf")
    head = tiny_weights("llama", 0, True, read_model_config(path).vocab_size)["model.embed_tokens.weight"]
    both = make_tiny_model(tmp_path / "b", format="hf", weights={"lm_head.weight": head})
    np.testing.assert_array_equal(forward(load_on_numpy(both), PROMPT), forward(load_on_numpy(path), PROMPT))


def test_ld_06_tied_model_with_another_head_uses_the_embedding_and_warns(tmp_path):
    path = make_tiny_model(tmp_path / "a", format="hf")
    head = np.ones((read_model_config(path).vocab_size, 64), np.float32)
    both = make_tiny_model(tmp_path / "b", format="hf", weights={"lm_head.weight": head})
    with pytest.warns(UserWarning, match=r"lm_head\.weight.*the embedding is used"):
        model = load_on_numpy(both)
    np.testing.assert_array_equal(forward(model, PROMPT), forward(load_on_numpy(path), PROMPT))


@pytest.mark.parametrize("format", ["gguf", "hf"])
def test_ld_07_tied_model_holds_its_embedding_once(tmp_path, format):
    tied = load_on_numpy(make_tiny_model(tmp_path / "a", format=format))
    untied = load_on_numpy(make_tiny_model(tmp_path / "b", format=format, tied=False))
    assert tied.config.tied_embeddings
    assert not untied.config.tied_embeddings
    assert tied.decoder._weights.head is tied.decoder._weights.embedding
    loaded = [model.decoder._ops.num_weights_loaded for model in (tied, untied)]
    assert loaded[1] == loaded[0] + 1


def test_ld_07_untied_model_without_a_head_is_refused(tmp_path):
    path = make_tiny_model(tmp_path, format="hf", overrides={"tie_word_embeddings": False})
    with pytest.raises(InvalidModelFile, match=r"lm_head\.weight.*missing"):
        load_on_numpy(path)


# --- LD-15: end ids


@pytest.mark.parametrize("listed", [5, [5], [5, 6]])
def test_ld_15_end_ids_of_all_sources_are_joined(tmp_path, listed):
    path = make_tiny_model(tmp_path, format="hf", overrides={"eos_token_id": 9})
    write_json(path / "generation_config.json", {"eos_token_id": listed})
    wanted = {9, 2} | set(listed if isinstance(listed, list) else [listed])
    assert read_model_config(path).eos_token_ids == wanted
    assert load_on_numpy(path).config.eos_token_ids == wanted


def test_ld_15_without_generation_config_the_model_s_own_end_id_counts(tmp_path):
    path = make_tiny_model(tmp_path, format="hf", overrides={"eos_token_id": [7]})
    write_json(path / "tokenizer_config.json", {})
    assert read_model_config(path).eos_token_ids == {7}


def test_ld_15_model_without_any_end_id_loads_with_a_warning(tmp_path):
    path = make_tiny_model(tmp_path, format="hf", overrides={"eos_token_id": None})
    write_json(path / "tokenizer_config.json", {})
    with pytest.warns(UserWarning, match="no end token"):
        assert load_on_numpy(path).config.eos_token_ids == frozenset()


def test_ld_15_gguf_joins_end_of_text_end_of_turn_and_the_turn_s_control_token(tmp_path):
    overrides = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7}
    config = read_model_config(make_tiny_model(tmp_path, overrides=overrides))
    assert config.eos_token_ids == {5, 7, 0, 2}  # 0 <|endoftext|>, 2 <|im_end|> are control tokens of the file


def test_configuration_is_read_without_the_weight_files(tmp_path):
    path = make_tiny_model(tmp_path / "a", format="hf", num_shards=3)
    shutil.copytree(path, tmp_path / "b", ignore=shutil.ignore_patterns("*.safetensors*"))
    assert read_model_config(tmp_path / "b") == read_model_config(path)
