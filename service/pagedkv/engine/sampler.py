"""Choose the next tokens from rows of logits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pagedkv.engine.request import GREEDY_TEMPERATURE, SamplingParams
from pagedkv.errors import NumericalError

FloatArray = npt.NDArray[np.float32]


class Sampler:
    """One request's sampling: its parameters and its own random stream, independent of every other request."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = np.random.Generator(np.random.Philox(params.seed))
        self.is_greedy = params.temperature <= GREEDY_TEMPERATURE or params.top_k == 1  # the arg max, no randomness

    def sample(self, logits: FloatArray) -> int:
        """Return a token id for logits [vocab_size] float32.

        Raises NumericalError if a logit is NaN or no logit is finite: nothing sensible can be drawn from such a row.
        """
        best = int(np.argmax(logits))  # NumPy's arg max returns the first NaN if there is one
        if not np.isfinite(logits[best]):
            raise NumericalError("the model's logits for this request are not finite", logit=float(logits[best]))
        if self.is_greedy:
            return best
        return self._draw(logits)

    def _draw(self, logits: FloatArray) -> int:
        candidates = self._top_k(logits)
        scaled = candidates_scores(logits, candidates) / self._params.temperature
        probabilities = np.exp(scaled - scaled.max())
        if self._params.top_p < 1.0:
            candidates, probabilities = self._top_p(candidates, probabilities)
        cumulative = np.cumsum(probabilities)
        drawn = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        chosen = min(drawn, len(cumulative) - 1)
        return chosen if candidates is None else int(candidates[chosen])

    def _top_k(self, logits: FloatArray) -> npt.NDArray[np.intp] | None:
        top_k = self._params.top_k
        if top_k == 0 or top_k >= len(logits):
            return None
        return np.argpartition(logits, -top_k)[-top_k:]

    def _top_p(
        self, candidates: npt.NDArray[np.intp] | None, probabilities: npt.NDArray[np.float64]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64]]:
        """Keep the smallest set of most likely tokens whose share reaches top_p; at least one."""
        order = np.argsort(-probabilities, kind="stable")
        cumulative = np.cumsum(probabilities[order])
        kept = order[: int(np.searchsorted(cumulative, self._params.top_p * cumulative[-1])) + 1]
        return (kept if candidates is None else candidates[kept]), probabilities[kept]


def sample_greedy(logits: FloatArray) -> list[int] | None:
    """Return the arg max of each row of logits [num_rows, vocab_size] float32; None if any row has none to draw."""
    best = logits.argmax(axis=1)
    return best.tolist() if np.isfinite(logits[np.arange(len(logits)), best]).all() else None


async def sample_rows(samplers: Sequence[Sampler], logits: FloatArray) -> Sequence[int | Exception]:
    """Return a token id for each row of logits [num_rows, vocab_size], or the error that the row alone ends with."""

    def sample() -> list[int | Exception]:
        return [_sample_row(sampler, row) for sampler, row in zip(samplers, logits, strict=True)]

    if all(sampler.is_greedy for sampler in samplers):
        return sample_greedy(logits) or sample()
    return await asyncio.to_thread(sample)  # sorting a vocabulary for top-p takes milliseconds


def _sample_row(sampler: Sampler, row: FloatArray) -> int | Exception:
    try:
        return sampler.sample(row)
    except Exception as error:  # whatever it is, it is this row's alone
        return error


def candidates_scores(logits: FloatArray, candidates: npt.NDArray[np.intp] | None) -> npt.NDArray[np.float64]:
    """Return the logits of the candidates (None: of all tokens) as float64."""
    return (logits if candidates is None else logits[candidates]).astype(np.float64)
