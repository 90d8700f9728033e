"""The error that 8-bit KV is stated to have: perplexity and logits of the real model beside the float32 cache."""

from __future__ import annotations

import numpy as np
import pytest

from pagedkv.dtypes import DType
from tests.bench.perplexity_bench import DTYPES, Score, negative_log_likelihoods, read_text, score

NUM_TOKENS = 160
PERPLEXITY_BOUND = {DType.FLOAT16: 0.001, DType.BFLOAT16: 0.005, DType.INT8: 0.02, DType.FLOAT8_E4M3: 0.06}


@pytest.fixture(scope="module")
def scores():
    """All element types over two windows, the second shorter, in several steps."""
    return score(read_text(NUM_TOKENS), DTYPES, window=96, step=40)


@pytest.mark.parametrize("dtype", PERPLEXITY_BOUND)
def test_perplexity_of_a_smaller_kv_stays_within_its_bound_of_float32(scores, dtype):
    ratio = scores[dtype].perplexity / scores[DType.FLOAT32].perplexity
    assert abs(np.log(ratio)) <= PERPLEXITY_BOUND[dtype]


def test_logit_error_grows_as_the_bits_of_the_kv_shrink(scores):
    errors = [scores[dtype].error_sum for dtype in DTYPES]
    assert errors[0] == 0 < errors[1]
    assert errors == sorted(errors)


def test_every_token_but_the_first_of_a_window_is_scored_once(scores):
    assert {score.num_tokens for score in scores.values()} == {NUM_TOKENS - 2}


def test_8_bit_kv_takes_a_scale_and_a_byte_where_float32_takes_four(scores):
    float32 = scores[DType.FLOAT32].bytes_per_token
    assert scores[DType.INT8].bytes_per_token == float32 / 4 * (1 + 4 / 64) == scores[DType.FLOAT8_E4M3].bytes_per_token


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
