"""Rotary position embeddings: the frequency table of each kind of scaling."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from pagedkv.compute.backend import Float32Array, Rotation
from pagedkv.errors import InvalidModelFile

ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How a model rotates queries and keys.

    `kind` is one of ROPE_KINDS. `original_context` is the length the model was trained at before scaling and
    `context` the length it is served at. `interleaved` pairs (2i, 2i + 1), else (i, i + half). `attention_factor`
    multiplies cos and sin; None means the kind's own. `truncate` rounds the ends of YaRN's ramp to whole dimensions.
    `divisors` divides the frequencies one by one (GGUF's rope_freqs tensor); it replaces `kind` llama3 there.
    """

    base: float
    rotary_dim: int
    interleaved: bool
    kind: str = "default"
    factor: float = 1.0
    original_context: int = 0
    context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    divisors: tuple[float, ...] | None = None

    def check(self) -> None:
        """Raise InvalidModelFile unless the parameters fit each other; each by itself is within its limits."""
        if self.base <= 1:
            raise InvalidModelFile(f"rope base {self.base} must be above 1")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise InvalidModelFile(
                f"rope low_freq_factor {self.low_freq_factor} must be below high_freq_factor {self.high_freq_factor}"
            )
        if self.divisors is not None and len(self.divisors) != self.rotary_dim // 2:
            raise InvalidModelFile(f"{len(self.divisors)} frequency divisors for {self.rotary_dim // 2} frequencies")

    def inv_freq(self) -> Float32Array:
        """Return the angle a position [rotary_dim / 2], scaling applied."""
        table = {
            "default": self._plain,
            "linear": lambda: self._plain() / self.factor,
            "dynamic": self._dynamic,
            "llama3": self._llama3,
            "yarn": self._yarn,
        }[self.kind]()
        if self.divisors is not None:
            table = table / np.array(self.divisors)
        return table.astype(np.float32)

    def rotation(self) -> Rotation:
        """Return what the backend's operations take."""
        return Rotation(self.inv_freq(), self.interleaved, self.scale)

    @property
    def scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return yarn_scale(self.factor) if self.kind == "yarn" else 1.0

    def _plain(self, base: float | None = None) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        return np.asarray((self.base if base is None else base) ** -exponents)

    def _dynamic(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Dynamic NTK at the served length.

        The formula wants the sequence's length, but keys lie rotated in blocks that sequences of many lengths
        share, so there must be one table: the formula's at the longest sequence.
        """
        length = max(self.context, self.original_context)
        stretch = self.factor * length / self.original_context - (self.factor - 1)
        return self._plain(self.base * stretch ** (self.rotary_dim / (self.rotary_dim - 2)))

    def _llama3(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between interpolated."""
        plain = self._plain()
        turns = self.original_context * plain / (2 * math.pi)  # rotations over the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return plain * (kept + (1 - kept) / self.factor)

    def _yarn(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """YaRN (arXiv 2309.00071, section 3.2): as llama3, but the ramp runs over the dimension's index."""
        plain = self._plain()
        low, high = self._yarn_dimension(self.beta_fast), self._yarn_dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        ramp = (np.arange(self.rotary_dim // 2) - low) / (high - low or 0.001)
        kept = 1 - np.clip(ramp, 0.0, 1.0)
        return plain * (kept + (1 - kept) / self.factor)

    def _yarn_dimension(self, turns: float) -> float:
        """Return the dimension that makes this many turns over the original context."""
        wavelength = self.original_context / (turns * 2 * math.pi)
        return self.rotary_dim * math.log(wavelength) / (2 * math.log(self.base))


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """Return what YaRN multiplies cos and sin by (arXiv 2309.00071, eq. 22); `weight` is DeepSeek's mscale."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
