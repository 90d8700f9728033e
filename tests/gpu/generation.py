"""Tokens a second from end to end: engine, cache, decoder and device, without the wire."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.cache import CacheManager
from pagedkv.compute.backend import WeightData
from pagedkv.compute.cuda.backend import CudaBackend
from pagedkv.compute.layout import KvLayout
from pagedkv.config import CacheConfig, EngineConfig
from pagedkv.dtypes import DType
from pagedkv.engine import Engine, GenerationRequest, SamplingParams
from pagedkv.model import Decoder, ModelConfig, load_model, read_model_config
from pagedkv.model.hub import cache_directory
from pagedkv.model.mapped_file import TensorEntry
from pagedkv.model.rope import RopeConfig
from pagedkv.model.weights import HF_NAMES, WeightPlan

SMOLLM2 = cache_directory() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_PROMPT = 16  # tokens before a decode


def make_config(tiny: bool) -> ModelConfig:
    """Return SmolLM2-135M's geometry, or a small one."""
    layers, heads, kv_heads, hidden, inner, vocabulary = (
        (2, 4, 2, 64, 96, 300) if tiny else (30, 9, 3, 576, 1536, 49152)
    )
    return ModelConfig(
        architecture="llama",
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        hidden_size=hidden,
        intermediate_size=inner,
        vocab_size=vocabulary,
        context_length=8192,
        rope=RopeConfig(base=1e5, rotary_dim=64, interleaved=True),
        rms_epsilon=1e-5,
        tied_embeddings=True,
        windows=(None,) * layers,
    )


class RandomWeights:
    """A source of random 16-bit weights by Hugging Face's names, all cut from one block of random numbers."""

    def __init__(self, config: ModelConfig) -> None:
        heads, kv_heads, hidden = config.num_heads * 64, config.num_kv_heads * 64, config.hidden_size
        shapes = {HF_NAMES.embedding: (config.vocab_size, hidden), HF_NAMES.norm: (hidden,)}
        inner = config.intermediate_size
        matrices = {"q": (heads, hidden), "k": (kv_heads, hidden), "v": (kv_heads, hidden), "o": (hidden, heads)}
        matrices |= {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        for layer in range(config.num_layers):
            vectors = {"attention_norm": (hidden,), "mlp_norm": (hidden,)}
            for name, shape in (matrices | vectors).items():
                shapes[f"{HF_NAMES.layer[name].format(layer)}.weight"] = shape
        self._numbers = np.random.default_rng(0).standard_normal(1 << 16).astype(np.float32)
        self.tensors: Mapping[str, TensorEntry] = {
            name: TensorEntry(name, "F16", shape, 0, 2 * int(np.prod(shape))) for name, shape in shapes.items()
        }

    def path_of(self, name: str) -> Path:
        """Return what stands for the file in errors."""
        return Path("random")

    def weight(self, name: str) -> WeightData:
        """Return a matrix of variance 1 / columns, or a vector of ones."""
        shape = self.tensors[name].shape
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.0
        values = np.resize(self._numbers * scale, shape) if scale else np.ones(shape)
        return WeightData("F16", shape, values.astype(np.float16).reshape(-1).view(np.uint8))


class OneCharacterTokens:
    """The part of a tokenizer that an engine needs."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return a letter for every token."""
        return b"x"

    def special_text(self, token_id: int) -> str:
        """Return "": no token is a control token."""
        return ""


def measure(tiny: bool, options: dict[str, Any], model: Path | None = None) -> dict[str, Any]:
    """Return the model's name and, by case, seconds a step and tokens a second."""
    path = None if tiny else model or (SMOLLM2 if SMOLLM2.is_file() and find_spec("gguf") else None)
    config = make_config(tiny) if path is None else read_model_config(path)
    layout = KvLayout(config.kv_shape(DType.FLOAT16), 64 if tiny else 2048, 16)
    backend = CudaBackend(layout, **options)
    try:
        if path is None:
            plan = WeightPlan(Path("random"), config, RandomWeights(config), HF_NAMES)  # type: ignore[arg-type]
            decoder = Decoder(config, backend.submit(lambda: plan.load(backend)).result(), backend)
        else:
            decoder = load_model(path, backend).decoder
        backend.warm_up()
        rows = asyncio.run(_measure_all(backend, decoder, config, tiny))
    finally:
        backend.close()
    name = path.stem if path else f"random Llama, {config.num_layers} layers of {config.hidden_size}"
    return {"model": name, "weight_bytes": 2 * num_parameters(config), "rows": rows}


def num_parameters(config: ModelConfig) -> int:
    """Return how many weights a step reads, the embedding once as the head."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = 2 * config.hidden_size * (heads + kv_heads) + 3 * config.hidden_size * config.intermediate_size
    return config.num_layers * layer + config.vocab_size * config.hidden_size


async def _measure_all(backend: CudaBackend, decoder: Decoder, config: ModelConfig, tiny: bool) -> list[dict[str, Any]]:
    layout = backend.layout
    engine = Engine(
        backend=backend,
        cache=CacheManager(CacheConfig(layout.num_blocks, layout.block_size, config.num_layers, prefix_caching=False)),
        decoder=decoder,
        tokenizer=OneCharacterTokens(),  # type: ignore[arg-type]
        model_config=config,
        config=EngineConfig(max_num_seqs=128, max_batch_tokens=2048),
    )
    await engine.start()
    try:
        length, num_tokens = (20, 4) if tiny else (512, 64)
        rows = [await _prefill(engine, length, 1 if tiny else 5)]
        for count in (1, 2) if tiny else (1, 8, 32, 128):
            rows.append(await _decode(engine, count, num_tokens))
    finally:
        await engine.stop()
    return rows


async def _prefill(engine: Engine, length: int, repeats: int) -> dict[str, Any]:
    seconds = []
    for seed in range(repeats + 1):
        started = time.perf_counter()
        await _generate(engine, length, 1, seed)
        seconds.append(time.perf_counter() - started)
    median = statistics.median(seconds[1:])  # the first one meets kernels and memory for the first time
    return {
        "what": "prefill",
        "shape": f"one prompt of {length}",
        "seconds": median,
        "tokens_per_second": length / median,
    }


async def _decode(engine: Engine, count: int, num_tokens: int) -> dict[str, Any]:
    """Time `count` requests, in a second run, from when all have their first token until the first of them ends."""
    for seed in (0, 1):
        runs = await asyncio.gather(*(_generate(engine, _PROMPT, num_tokens, seed * 1000 + at) for at in range(count)))
    begin, end = max(times[0] for times in runs), min(times[-1] for times in runs)
    made = sum(1 for times in runs for at in times if begin < at <= end)
    seconds = (end - begin) * count / made
    shape = f"{count} at once, {num_tokens} after {_PROMPT}"
    return {"what": "decode", "shape": shape, "seconds": seconds, "tokens_per_second": count / seconds}


async def _generate(engine: Engine, prompt_length: int, num_tokens: int, seed: int) -> list[float]:
    """Run one request and return the moment of each of its tokens."""
    ids = np.random.default_rng(seed).integers(0, engine.model_config.vocab_size, prompt_length)
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    moments: list[float] = []
    async for chunk in engine.submit(GenerationRequest(tuple(ids.tolist()), sampling)):
        moments += [time.perf_counter()] * len(chunk.token_ids)
    return moments
