"""The error that fewer bits are stated to cost: perplexity and logits of the real model beside float32."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.compute.cpu.dense_integer import has_integer_dots
from pagedkv.compute.cpu.features import choose_isa
from pagedkv.dtypes import DType
from tests.bench.perplexity_bench import (
    INTEGER_VARIANTS,
    KV_VARIANTS,
    Score,
    Variant,
    negative_log_likelihoods,
    read_text,
    score,
)

NUM_TOKENS = 160
FLOAT32 = KV_VARIANTS[0]
PERPLEXITY_BOUND = {
    Variant(DType.FLOAT16): 0.001,
    Variant(DType.BFLOAT16): 0.005,
    Variant(DType.INT8): 0.02,
    Variant(DType.FLOAT8_E4M3): 0.06,
    Variant(DType.FLOAT32, "int16"): 0.0001,
    Variant(DType.FLOAT32, "int8"): 0.02,
}
HAS_INTEGER_DOTS = has_integer_dots(choose_isa(None))


@pytest.fixture(scope="module")
def scores():
    """All variants over two windows, the second shorter, in several steps."""
    return score(read_text(NUM_TOKENS), KV_VARIANTS + INTEGER_VARIANTS * HAS_INTEGER_DOTS, window=96, step=40)


@pytest.mark.parametrize("variant", PERPLEXITY_BOUND, ids=str)
def test_perplexity_of_fewer_bits_stays_within_its_bound_of_float32(scores, variant):
    if variant not in scores:
        pytest.skip("this CPU has no integer products of bytes")
    ratio = scores[variant].perplexity / scores[FLOAT32].perplexity
    assert abs(np.log(ratio)) <= PERPLEXITY_BOUND[variant]


def test_logit_error_grows_as_the_bits_of_the_kv_shrink(scores):
    errors = [scores[variant].error_sum for variant in KV_VARIANTS]
    assert errors[0] == 0 < errors[1]
    assert errors == sorted(errors)


def test_every_token_but_the_first_of_a_window_is_scored_once(scores):
    assert {score.num_tokens for score in scores.values()} == {NUM_TOKENS - 2}


def test_8_bit_kv_takes_a_scale_and_a_byte_where_float32_takes_four(scores):
    sizes = {variant: result.bytes_per_token for variant, result in scores.items()}
    eight_bit = sizes[FLOAT32] / 4 * (1 + 4 / 64)
    assert sizes[Variant(DType.INT8)] == eight_bit == sizes[Variant(DType.FLOAT8_E4M3)]


def test_score_of_uniform_logits_is_the_size_of_the_vocabulary():
    score = Score(1.0)
    score.add(np.full((5, 300), 7.5, np.float32), np.full((5, 300), 7.5, np.float32), [0, 1, 2, 299, 5])
    assert score.perplexity == pytest.approx(300)
    assert (score.error_sum, score.same_best) == (0, 5)


def test_negative_log_likelihoods_of_large_logits_stay_exact():
    logits = np.array([[1000.0, 1000.0], [0.0, -1000.0]], np.float32)
    np.testing.assert_allclose(negative_log_likelihoods(logits, [0, 1]), [np.log(2), 1000])


def test_text_that_is_too_short_is_refused_with_both_numbers():
    with pytest.raises(ValueError, match=r"tokens, 1000000 were asked for"):
        read_text(1_000_000)
