"""The benchmark's GGUF model as a Hugging Face directory, for peers that read nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from pagedkv.model import read_model_config
from pagedkv.model.config import ModelConfig
from pagedkv.model.gguf_file import GgufFile
from pagedkv.model.tokenizer import Tokenizer
from pagedkv.model.tokenizer_gguf import read_gguf_tokenizer
from pagedkv.model.weights import GGUF_NAMES, HF_NAMES

_NUMPY = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}


def make_hf_directory(source: Path, target: Path) -> Path:
    """Write the Llama-family model of a GGUF file to `target` in float32, every weight as it dequantises; return it.

    Writes config.json, model.safetensors, tokenizer.json and tokenizer_config.json; the last file written marks a
    whole directory, which is not written again.
    """
    if (target / "config.json").exists():
        return target
    target.mkdir(parents=True, exist_ok=True)
    config, file = read_model_config(source), GgufFile(source)
    save_file(_tensors(file, config), target / "model.safetensors", metadata={"format": "pt"})
    (target / "tokenizer.json").write_text(_tokenizer_json(read_gguf_tokenizer(file, config)), "utf-8")
    _write_json(target / "tokenizer_config.json", _tokenizer_config(file))
    _write_json(target / "config.json", _hf_config(config))
    return target


def _tokenizer_json(tokenizer: Tokenizer) -> str:
    """Return the encoder's definition with the control tokens' own texts in the place of their seals."""
    encoder: Any = tokenizer._encoder
    definition: str = encoder.to_str()
    for text in tokenizer._special_texts.values():
        definition = definition.replace(tokenizer._seals.rename(text), json.dumps(text, ensure_ascii=False)[1:-1])
    return definition


def dequantize(file: GgufFile, name: str) -> np.ndarray:
    """Return a tensor as float32 in its shape."""
    weight = file.weight(name)
    if weight.kind in _NUMPY:
        return weight.data.view(_NUMPY[weight.kind]).astype(np.float32).reshape(weight.shape)
    kind = gguf.GGMLQuantizationType[weight.kind]
    rows = weight.data.reshape(-1, gguf.quant_shape_to_byte_shape(weight.shape[-1:], kind)[0])
    return gguf.quants.dequantize(rows, kind).reshape(weight.shape)


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Return rows [num_heads * head_dim, columns], reordered from interleaved rotary pairs to half-split ones."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _tensors(file: GgufFile, config: ModelConfig) -> dict[str, np.ndarray]:
    tensors = {HF_NAMES.embedding: dequantize(file, GGUF_NAMES.embedding)}
    tensors[HF_NAMES.norm] = dequantize(file, GGUF_NAMES.norm)
    if not config.tied_embeddings:
        tensors[HF_NAMES.head] = dequantize(file, GGUF_NAMES.head)
    heads = {"q": config.num_heads, "k": config.num_kv_heads} if config.rope.interleaved else {}
    for layer in range(config.num_layers):
        for part, pattern in GGUF_NAMES.layer.items():
            name = f"{pattern.format(layer)}.weight"
            if name in file.tensors:
                values = dequantize(file, name)
                values = unpermute(values, heads[part]) if part in heads else values
                tensors[f"{HF_NAMES.layer[part].format(layer)}.weight"] = values
    return tensors


def _hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.rms_epsilon,
        "rope_theta": config.rope.base,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.base},
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": min(config.eos_token_ids),
        "torch_dtype": "float32",
    }


def _tokenizer_config(file: GgufFile) -> dict[str, Any]:
    tokens = file.metadata["tokenizer.ggml.tokens"]
    texts = {f"{end}_token": tokens[file.metadata[f"tokenizer.ggml.{end}_token_id"]] for end in ("bos", "eos")}
    return {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False, **texts}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
