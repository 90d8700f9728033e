"""Sampling: limits, extremes, independence of requests."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedkv.engine import SamplingParams
from pagedkv.engine.sampler import Sampler
from pagedkv.errors import InvalidArgument, NumericalError

LOGITS = np.random.default_rng(0).normal(0, 3, 32).astype(np.float32)


def draw(num: int = 200, logits: np.ndarray = LOGITS, **params: object) -> list[int]:
    sampler = Sampler(SamplingParams(**{"temperature": 1.0, "seed": 1, **params}))
    return [sampler.sample(logits) for _ in range(num)]


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6])
def test_gn11_tiny_temperature_is_greedy(temperature):
    assert set(draw(5, LOGITS + 40, temperature=temperature)) == {int(np.argmax(LOGITS))}


@pytest.mark.parametrize("temperature", [1e-3, 5e-3])
def test_gn11_small_temperature_is_finite_and_used_as_given(temperature):
    close = np.array([40.0, 40.0 - temperature, -40.0], dtype=np.float32)
    counts = np.bincount(draw(2000, close, temperature=temperature), minlength=3)
    assert counts[2] == 0
    assert counts[1] / 2000 == pytest.approx(1 / (1 + np.e), abs=0.04)


@pytest.mark.parametrize("top_k", [0, 32, 33, 10**6])
def test_gn09_top_k_at_or_above_the_vocabulary_is_no_limit(top_k):
    assert draw(top_k=top_k) == draw()


def test_gn09_top_k_of_one_is_greedy():
    assert set(draw(top_k=1)) == {int(np.argmax(LOGITS))}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.0),
        ("top_p", 1.0000001),
        ("top_p", -0.1),
        ("top_p", float("nan")),
        ("top_k", -1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("stop", ("",)),
        ("seed", -1),
    ],
)
def test_gn08_sampling_parameter_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(InvalidArgument) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field


def test_gn08_tiny_top_p_keeps_the_best_token():
    assert set(draw(top_p=1e-9)) == {int(np.argmax(LOGITS))}


def test_gn06_a_seed_fixes_the_draws_whatever_other_samplers_do():
    alone = draw(20, seed=42)
    sampler, other = Sampler(SamplingParams(temperature=1.0, seed=42)), Sampler(SamplingParams(temperature=1.0))
    together = []
    for _ in range(20):
        other.sample(LOGITS)
        together.append(sampler.sample(LOGITS))
    assert together == alone


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}])
def test_gn18_a_row_without_finite_logits_is_a_numerical_error(bad, params):
    with pytest.raises(NumericalError):
        draw(1, np.full(32, bad, dtype=np.float32), **params)


def test_gn18_one_nan_among_finite_logits_is_a_numerical_error():
    logits = LOGITS.copy()
    logits[3] = np.nan
    with pytest.raises(NumericalError):
        draw(1, logits)


@given(st.integers(1, 32), st.floats(0.01, 1.0))
def test_sampler_top_k_and_top_p_draw_only_from_the_smallest_set_that_reaches_them(top_k, top_p):
    order = np.argsort(-LOGITS)[:top_k]
    shares = np.exp(LOGITS[order].astype(np.float64))
    shares /= shares.sum()
    allowed = order[: int(np.sum(np.cumsum(shares) < top_p - 1e-12)) + 1]
    assert set(draw(30, top_k=top_k, top_p=top_p)) <= set(allowed.tolist())


def test_sampler_draws_follow_the_softmax():
    logits = np.log(np.array([0.5, 0.3, 0.2], dtype=np.float32))
    assert np.bincount(draw(20_000, logits), minlength=3) / 20_000 == pytest.approx([0.5, 0.3, 0.2], abs=0.015)
