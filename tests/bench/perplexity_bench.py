"""What fewer bits of keys and values, or of linear layers' inputs, cost a real model: `./run bench perplexity`.

SmolLM2 reads a fixed text (the opening of Alice's Adventures in Wonderland, Lewis Carroll, 1865, public domain) in
windows of 2,048 tokens that begin with an empty cache, through the decoder and the paged KV in steps of up to 512
tokens, once for each variant. Every token but a window's first is scored: perplexity is exp of the mean of
-ln p(token). Logit errors are differences from the logits of float32 alone at the same position. An independent check:
transformers 5.5 in float32 on the dequantised weights has 19.5108 on these tokens, our float32 cache 19.5110.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from helpers.model_runner import BLOCK_SIZE, forward
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.compute.cpu.dense_integer import has_integer_dots
from pagedkv.compute.cpu.features import choose_isa
from pagedkv.compute.layout import KvLayout
from pagedkv.dtypes import DType
from pagedkv.model import load_model, read_model_config
from pagedkv.model.gguf_file import GgufFile
from pagedkv.model.hub import fetch_smollm2
from pagedkv.model.tokenizer_gguf import read_gguf_tokenizer
from tests.bench.report import print_table, write_result

TEXT = Path(__file__).with_name("perplexity_text.txt")
WINDOW, STEP, NUM_TOKENS = 2048, 512, 4096
DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16, DType.INT8, DType.FLOAT8_E4M3)
COLUMNS = ("variant", "KV bytes a token", "perplexity", "- float32", "mean |logit error|", "max", "same best token")


class Variant(NamedTuple):
    """How keys and values are stored, and what linear layers round their inputs to."""

    dtype: DType
    activations: str = "float32"

    def __str__(self) -> str:
        return f"KV {self.dtype}" if self.activations == "float32" else f"activations {self.activations}"


KV_VARIANTS = tuple(map(Variant, DTYPES))
INTEGER_VARIANTS = tuple(Variant(DType.FLOAT32, activations) for activations in ("int16", "int8"))


@dataclass(slots=True)
class Score:
    """Sums over the scored positions of one variant."""

    bytes_per_token: float
    num_tokens: int = 0
    negative_log_likelihood: float = 0.0
    error_sum: float = 0.0
    num_logits: int = 0
    max_error: float = 0.0
    same_best: int = 0

    def add(self, logits: np.ndarray, reference: np.ndarray, targets: Sequence[int]) -> None:
        """Score targets[i] by logits[i]; both logits are [len(targets), vocab_size]."""
        self.num_tokens += len(targets)
        self.negative_log_likelihood += float(negative_log_likelihoods(logits, targets).sum())
        errors = np.abs(logits - reference)
        self.error_sum += float(errors.sum(dtype=np.float64))
        self.num_logits += errors.size
        self.max_error = max(self.max_error, float(errors.max(initial=0.0)))
        self.same_best += int((logits.argmax(-1) == reference.argmax(-1)).sum())

    @property
    def perplexity(self) -> float:
        return math.exp(self.negative_log_likelihood / self.num_tokens)

    def as_json(self) -> dict[str, Any]:
        means = {
            "perplexity": self.perplexity,
            "mean_error": self.error_sum / self.num_logits,
            "same_best_share": self.same_best / self.num_tokens,
        }
        return asdict(self) | means


def negative_log_likelihoods(logits: np.ndarray, targets: Sequence[int]) -> np.ndarray:
    """Return -ln softmax(logits)[i, targets[i]] in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    return np.log(np.exp(shifted).sum(-1)) - shifted[np.arange(len(targets)), targets]


def score(token_ids: Sequence[int], variants: Sequence[Variant], window: int, step: int) -> dict[Variant, Score]:
    """Score the text with each variant, step by step side by side; the first is the reference."""
    path = fetch_smollm2()
    config = read_model_config(path)
    layouts = [KvLayout(config.kv_shape(v.dtype), -(-window // BLOCK_SIZE), BLOCK_SIZE) for v in variants]
    backends = [CpuBackend(layout, activations=v.activations) for v, layout in zip(variants, layouts, strict=True)]
    models = [load_model(path, backend) for backend in backends]
    scores = {v: Score(layout.block_bytes / BLOCK_SIZE) for v, layout in zip(variants, layouts, strict=True)}
    for part in (token_ids[at : at + window] for at in range(0, len(token_ids), window)):
        for start in range(0, len(part) - 1, step):
            inputs, targets = part[start : start + step], part[start + 1 : start + step + 1]
            logits = [forward(model, inputs, start, rows=range(len(targets))) for model in models]
            for variant, values in zip(variants, logits, strict=True):
                scores[variant].add(values, logits[0], targets)
    for backend in backends:
        backend.close()
    return scores


def read_text(num_tokens: int) -> list[int]:
    """Return the first tokens of the text. Raises ValueError if it has fewer."""
    path = fetch_smollm2()
    tokenizer = read_gguf_tokenizer(GgufFile(path), read_model_config(path))
    token_ids = tokenizer.encode(TEXT.read_text("utf-8"))
    if len(token_ids) < num_tokens:
        raise ValueError(f"the text has {len(token_ids)} tokens, {num_tokens} were asked for")
    return token_ids[:num_tokens]


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench perplexity", description=__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    options = parser.parse_args(argv)
    variants = KV_VARIANTS + (INTEGER_VARIANTS if has_integer_dots(choose_isa(None)) else ())
    measured = score(read_text(options.tokens), variants, WINDOW, STEP)
    scores = {str(variant): result.as_json() for variant, result in measured.items()}
    base = scores[str(variants[0])]["perplexity"]
    rows = [
        (
            name,
            f"{row['bytes_per_token']:,.0f}",
            f"{row['perplexity']:.4f}",
            f"{row['perplexity'] - base:+.4f}",
            f"{row['mean_error']:.2g}",
            f"{row['max_error']:.2g}",
            f"{100 * row['same_best_share']:.2f} %",
        )
        for name, row in scores.items()
    ]
    title = f"SmolLM2-135M on {options.tokens} tokens of prose, windows of {WINDOW}"
    print_table(title, COLUMNS, rows)
    text = "the opening of Alice's Adventures in Wonderland (Lewis Carroll, 1865, public domain)"
    print(write_result("perplexity", {"text": text, "tokens": options.tokens, "window": WINDOW, "results": scores}))
    return 0
