"""Blocks of options are read whole: what a key says is done, or the key is refused by name (NC-03)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny_models import CONTEXT, HEAD_DIM, make_tiny_model
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model import read_model_config
from pagedkv.model.rope import RopeConfig, yarn_scale

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": CONTEXT}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
BLOCKS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    LLAMA3,
    YARN,
]


def read_hf(tmp_path, arch="llama", **overrides):
    return read_model_config(make_tiny_model(tmp_path, arch=arch, format="hf", overrides=overrides))


def read_gguf(tmp_path, **overrides):
    named = {f"llama.{name.replace('__', '.')}": value for name, value in overrides.items()}
    return read_model_config(make_tiny_model(tmp_path, overrides=named))


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({"factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, 0.92104),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.0}, 0.1 * math.log(40) + 1),
        ({"factor": 40.0, "mscale": 0.707}, 0.1 * math.log(40) + 1),
        ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1, "attention_factor": 1.25}, 1.25),
        ({"factor": 1.0}, 1.0),
        ({"factor": 4}, 0.1 * math.log(4) + 1),
    ],
)
def test_nc03_yarn_multiplies_cos_and_sin_as_transformers_does(tmp_path, options, scale):
    config = read_hf(tmp_path, rope_scaling=YARN | options)
    assert config.rope.scale == pytest.approx(scale, abs=5e-6)
    assert config.rope.rotation().scale == config.rope.scale


def test_nc03_yarn_without_a_factor_takes_the_quotient_of_the_lengths(tmp_path):
    block = YARN | {"factor": None, "original_max_position_embeddings": CONTEXT // 8}
    config = read_hf(tmp_path / "a", rope_scaling=block)
    assert config.rope.factor == 8
    assert config.context_length == CONTEXT
    beside = {"rope_scaling": {"type": "yarn", "factor": 8.0}, "original_max_position_embeddings": CONTEXT // 8}
    assert read_hf(tmp_path / "b", **beside).rope == config.rope


def yarn_table(factor, original, fast, slow, base=10000.0, truncate=True):
    """The paper's formula, one frequency at a time."""

    def dimension(turns):
        return HEAD_DIM * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(fast), dimension(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, HEAD_DIM - 1)
    if low == high:
        high += 0.001
    table = []
    for i in range(HEAD_DIM // 2):
        frequency = base ** (-2 * i / HEAD_DIM)
        ramp = min(max((i - low) / (high - low), 0), 1)
        table.append(frequency / factor * ramp + frequency * (1 - ramp))
    return table


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("fast", "slow"), [(32, 1), (64, 2), (1.5, 1), (1, 1), (1, 32)])
@pytest.mark.parametrize("original", [2, 64, 512, 1_000_000])
def test_nc03_yarn_ramp_equals_the_formula(tmp_path, truncate, fast, slow, original):
    options = {"beta_fast": fast, "beta_slow": slow, "truncate": truncate, "original_max_position_embeddings": original}
    config = read_hf(tmp_path, rope_scaling=YARN | options)
    expected = yarn_table(16.0, original, fast, slow, truncate=truncate)
    np.testing.assert_allclose(config.rope.inv_freq(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["rope_type"])
def test_nc03_key_of_a_rope_block_that_nothing_reads_is_refused_by_name(tmp_path, name, block):
    read_hf(tmp_path / "sound", **{name: block | {"rope_theta": 5e5, "unread": None}})
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {name}\.unread 0\.5 is not supported") as caught:
        read_hf(tmp_path / "x", **{name: block | {"unread": 0.5}})
    assert "rope_theta" in str(caught.value)


@pytest.mark.parametrize(
    ("block", "needle"),
    [
        (BLOCKS[0] | {"factor": 2.0}, "factor"),
        (BLOCKS[1] | {"attention_factor": 1.1}, "attention_factor"),
        (BLOCKS[1] | {"mscale": 1.1}, "mscale"),
        (BLOCKS[2] | {"alpha": 1000.0}, "alpha"),
        (BLOCKS[2] | {"original_max_position_embeddings": 77}, "original_max_position_embeddings"),
        (LLAMA3 | {"beta_fast": 32}, "beta_fast"),
        (LLAMA3 | {"low_freq_factor": 4.0}, "low_freq_factor 4"),
        (YARN | {"type": "linear"}, "contradicts rope_type 'yarn'"),
        (YARN | {"mrope_section": [1, 2]}, "mrope_section"),
        (YARN | {"extrapolation_factor": 1.0}, "extrapolation_factor"),
        ({"full_attention": BLOCKS[1]}, "full_attention"),
        ({"factor": 8.0}, "factor"),
        ({"rope_type": "longrope", "long_factor": [1.0]}, "longrope"),
        ({"type": "mrope"}, "mrope"),
    ],
    ids=lambda value: value if isinstance(value, str) else "block",
)
def test_nc03_key_of_another_kind_of_scaling_is_refused_by_name(tmp_path, block, needle):
    with pytest.raises(UnsupportedModel, match=needle) as caught:
        read_hf(tmp_path, rope_scaling=block)
    assert "config.json" in str(caught.value)


def test_nc03_two_rope_blocks_that_contradict_are_refused(tmp_path):
    read_hf(tmp_path / "same", rope_scaling=YARN, rope_parameters=YARN)
    with pytest.raises(InvalidModelFile, match="contradicts rope_parameters"):
        read_hf(tmp_path / "x", rope_scaling=YARN, rope_parameters=LLAMA3)


@pytest.mark.parametrize(
    ("overrides", "needle"),
    [
        ({"rope__scaling__unread": 1.0}, "rope.scaling.unread"),
        ({"rope__dimension_sections": [1, 2]}, "rope.dimension_sections"),
        ({"rope__freq_base_swa": 1e6}, "rope.freq_base_swa"),
        ({"rope__scaling__yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier"),
        ({"rope__scaling__yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor"),
        ({"rope__scaling__alpha": 1000.0}, "rope.scaling.alpha"),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, "rope.scaling.factor 4"),
        ({"rope__scale_linear": 2.0, "rope__scaling__factor": 4.0}, "rope.scale_linear contradicts"),
        ({"attention__unread": 1.0}, "attention.unread"),
        ({"attention__sliding_window_pattern": 6}, "attention.sliding_window_pattern"),
        ({"attention__clamp_kqv": 8.0}, "attention.clamp_kqv"),
        ({"attention__scale": 0.5}, "attention.scale"),
        ({"attention__causal": False}, "attention.causal"),
        ({"logit_scale": 0.25}, "logit_scale"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nc03_key_of_a_gguf_block_that_nothing_reads_is_refused_by_name(tmp_path, overrides, needle):
    with pytest.raises(UnsupportedModel, match=needle) as caught:
        read_gguf(tmp_path, **overrides)
    assert "tiny-llama.gguf" in str(caught.value)


@pytest.mark.parametrize("name", ["rope__scaling__factor", "rope__scale_linear"])
def test_nc03_gguf_factor_without_a_type_scales_linearly(tmp_path, name):
    config = read_gguf(tmp_path, **{name: 4.0})
    np.testing.assert_allclose(config.rope.inv_freq(), RopeConfig(10000.0, HEAD_DIM, True).inv_freq() / 4, rtol=1e-6)


def test_nc03_gguf_attention_factor_multiplies_the_kind_s_own(tmp_path):
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__finetuned": True}
    assert read_gguf(tmp_path / "a", **yarn).rope.scale == pytest.approx(yarn_scale(4.0))
    scaled = read_gguf(tmp_path / "b", **yarn, rope__scaling__attn_factor=0.5)
    assert scaled.rope.scale == pytest.approx(0.5 * yarn_scale(4.0))
    assert read_gguf(tmp_path / "c", rope__scaling__attn_factor=0.5).rope.scale == 0.5


@pytest.mark.parametrize(
    ("arch", "overrides", "needle"),
    [
        ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ("qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window"),
        (
            "qwen3",
            {
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 8,
                "use_sliding_window": False,
            },
            "sliding_window",
        ),
        ("llama", {"sliding_window": 8, "use_sliding_window": True}, "use_sliding_window"),
        ("llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, "sliding_attention"),
        ("qwen2", {"sliding_window": 8, "max_window_layers": True}, "max_window_layers"),
        ("qwen2", {"sliding_window": True}, "sliding_window"),
        ("llama", {"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    ],
)
def test_nc03_window_or_quantisation_that_cannot_be_done_is_refused_by_name(tmp_path, arch, overrides, needle):
    with pytest.raises(UnsupportedModel, match=needle):
        read_hf(tmp_path, arch, **overrides)


@given(factor=st.floats(1, 1000), mscale=st.floats(0.01, 10), all_dim=st.floats(0.01, 10))
def test_nc03_quotient_of_two_weights_equals_the_formula(factor, mscale, all_dim):
    quotient = yarn_scale(factor, mscale) / yarn_scale(factor, all_dim)
    assert quotient == pytest.approx((0.1 * mscale * math.log(factor) + 1) / (0.1 * all_dim * math.log(factor) + 1))
