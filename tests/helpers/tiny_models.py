"""Tiny random models, the same weights written as a GGUF file and as a Hugging Face directory.

Two layers, 8 query heads over 2 KV heads of dim 64, hidden size 64, about 300 tokens; made and loaded in
milliseconds. Weights depend on `arch` and `seed` only, so both formats of one model must compute the same.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as TokenizersTokenizer

NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, CONTEXT = 2, 8, 2, 64, 64, 96, 2048
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END_TOKEN_ID = 2
_WORDS = ["the", "and", "ing", "er", "Hello", "world", "Paris", "France", "is", "user", "assistant", "system"]
_HF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_NUMPY = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


@dataclass(frozen=True)
class Vocabulary:
    """What a GGUF file says about its tokenizer; control tokens come first."""

    model: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]


def make_tiny_model(
    directory: Path,
    *,
    arch: str = "llama",
    format: str = "gguf",
    seed: int = 0,
    tied: bool = True,
    dtype: str = "F32",
    num_shards: int = 1,
    vocabulary: Vocabulary | None = None,
    overrides: dict[str, Any] | None = None,
    weights: dict[str, np.ndarray] | None = None,
) -> Path:
    """Write a model and return the path to load: a .gguf file in `directory`, or `directory` itself.

    `overrides` replaces metadata keys (GGUF, full key names) or keys of config.json; None removes one. `weights`
    replaces or adds tensors by their Hugging Face names.
    """
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = vocabulary or byte_level_vocabulary()
    tensors = tiny_weights(arch, seed, tied, len(vocabulary.tokens)) | (weights or {})
    if dtype in _NUMPY:  # GGUF keeps vectors in float32: round them first, so that both formats hold the same
        tensors = {name: values.astype(_NUMPY[dtype]).astype(np.float32) for name, values in tensors.items()}
    if format == "gguf":
        path = directory / f"tiny-{arch}.gguf"
        _write_gguf(path, arch, tensors, dtype, vocabulary, overrides or {})
        return path
    _write_hf(directory, arch, tensors, dtype, tied, vocabulary, overrides or {}, num_shards)
    return directory


def tiny_weights(arch: str, seed: int, tied: bool, vocab_size: int) -> dict[str, np.ndarray]:
    """Return float32 weights by their Hugging Face names."""
    rng = np.random.default_rng([seed, sorted(_HF_ARCHITECTURES).index(arch)])
    heads, kv_heads = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def vector(size: int, mean: float) -> np.ndarray:
        return (mean + 0.1 * rng.standard_normal(size)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(vocab_size, HIDDEN), "model.norm.weight": vector(HIDDEN, 1)}
    if not tied:
        tensors["lm_head.weight"] = matrix(vocab_size, HIDDEN)
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        shapes = {
            "self_attn.q_proj": (heads, HIDDEN),
            "self_attn.k_proj": (kv_heads, HIDDEN),
            "self_attn.v_proj": (kv_heads, HIDDEN),
            "self_attn.o_proj": (HIDDEN, heads),
            "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj": (HIDDEN, INTERMEDIATE),
        }
        for name, shape in shapes.items():
            tensors[f"{prefix}{name}.weight"] = matrix(*shape)
            if arch == "qwen2" and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                tensors[f"{prefix}{name}.bias"] = vector(shape[0], 0)
        norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        if arch == "qwen3":
            norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        for name, size in norms.items():
            tensors[f"{prefix}{name}.weight"] = vector(size, 1)
    return tensors


def byte_level_vocabulary() -> Vocabulary:
    """GPT-2's alphabet of bytes, control tokens, and merges that build a few words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens, merges = [*CONTROL_TOKENS, *alphabet], []
    for word in [f"Ġ{word}" for word in _WORDS] + _WORDS:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append(f"{word[: end - 1]} {word[end - 1]}")
    types = [int(gguf.TokenType.CONTROL)] * 3 + [int(gguf.TokenType.NORMAL)] * (len(tokens) - 3)
    return Vocabulary("gpt2", tokens, types, merges, [])


def sentencepiece_vocabulary() -> Vocabulary:
    """<unk> <s> </s>, 256 byte tokens, letters, and scored pieces that build a few words."""
    kinds = gguf.TokenType
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    types = [int(kinds.UNKNOWN), int(kinds.CONTROL), int(kinds.CONTROL), *[int(kinds.BYTE)] * 256]
    for word in [f"▁{word}" for word in _WORDS]:
        tokens += [word[:end] for end in range(2, len(word) + 1) if word[:end] not in tokens]
    types += [int(kinds.NORMAL)] * (len(tokens) - len(types))
    return Vocabulary("llama", tokens, types, [], [-float(index) for index in range(len(tokens))])


def permute_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder q or k rows (or a bias) as converters do for llama files: halves of a head become neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def _write_gguf(
    path: Path, arch: str, tensors: dict[str, np.ndarray], dtype: str, vocabulary: Vocabulary, overrides: dict[str, Any]
) -> None:
    name = "llama" if arch == "mistral" else arch
    writer = gguf.GGUFWriter(path, name)
    metadata = _gguf_metadata(name, vocabulary) | overrides
    for key, value in metadata.items():
        if value is not None and key != "general.architecture":
            _add_value(writer, key, value)
    writer_names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[name],
        NUM_LAYERS,
    )
    for hf_name, values in tensors.items():
        if name == "llama" and ".q_proj." in hf_name:
            values = permute_rows(values, NUM_HEADS)
        if name == "llama" and ".k_proj." in hf_name:
            values = permute_rows(values, NUM_KV_HEADS)
        gguf_name = writer_names.get_name(hf_name, try_suffixes=(".weight", ".bias")) or hf_name
        kind = gguf.GGMLQuantizationType[dtype if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_metadata(name: str, vocabulary: Vocabulary) -> dict[str, Any]:
    byte_level = vocabulary.model == "gpt2"
    return {
        f"{name}.block_count": NUM_LAYERS,
        f"{name}.context_length": CONTEXT,
        f"{name}.embedding_length": HIDDEN,
        f"{name}.feed_forward_length": INTERMEDIATE,
        f"{name}.attention.head_count": NUM_HEADS,
        f"{name}.attention.head_count_kv": NUM_KV_HEADS,
        f"{name}.attention.key_length": HEAD_DIM,
        f"{name}.attention.value_length": HEAD_DIM,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{name}.rope.freq_base": 10000.0,
        f"{name}.rope.dimension_count": HEAD_DIM,
        "tokenizer.ggml.model": vocabulary.model,
        "tokenizer.ggml.pre": "gpt-2" if byte_level else None,
        "tokenizer.ggml.tokens": vocabulary.tokens,
        "tokenizer.ggml.token_type": vocabulary.types,
        "tokenizer.ggml.merges": vocabulary.merges or None,
        "tokenizer.ggml.scores": vocabulary.scores or None,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": END_TOKEN_ID,
        "tokenizer.ggml.add_bos_token": not byte_level,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _write_hf(
    directory: Path,
    arch: str,
    tensors: dict[str, np.ndarray],
    dtype: str,
    tied: bool,
    vocabulary: Vocabulary,
    overrides: dict[str, Any],
    num_shards: int,
) -> None:
    config = {
        "architectures": [_HF_ARCHITECTURES[arch]],
        "model_type": arch,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": len(vocabulary.tokens),
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN_ID,
    } | overrides
    write_json(directory / "config.json", {key: value for key, value in config.items() if value is not None})
    write_json(
        directory / "tokenizer_config.json",
        {
            "bos_token": "<|im_start|>",
            "eos_token": {"content": "<|im_end|>"},
            "add_bos_token": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write_tokenizer_json(directory / "tokenizer.json", vocabulary)
    stored = {name: values.astype(_NUMPY[dtype]) for name, values in tensors.items()}
    _write_shards(directory, stored, num_shards)


def _write_tokenizer_json(path: Path, vocabulary: Vocabulary) -> None:
    merges = [tuple(merge.split(" ")) for merge in vocabulary.merges]
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    tokenizer = TokenizersTokenizer(models.BPE(ids, merges))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))


def _write_shards(directory: Path, tensors: dict[str, np.ndarray], num_shards: int) -> None:
    if num_shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return
    weight_map = {}
    for shard, names in enumerate(np.array_split(sorted(tensors), num_shards)):
        file_name = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        save_file({str(name): tensors[str(name)] for name in names}, directory / file_name)
        weight_map |= {str(name): file_name for name in names}
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), "utf-8")
