"""ModelConfig from a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagedkv.errors import InvalidModelFile
from pagedkv.model.config import Fields, ModelConfig, refuse_architecture, refuse_option
from pagedkv.model.end_tokens import end_texts_of
from pagedkv.model.gguf_file import GgufFile
from pagedkv.model.pre_tokenizers import WORD_RULES
from pagedkv.model.rope import RopeConfig

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say llama
_ROPE_KINDS = {"none": "default", "linear": "linear", "yarn": "yarn"}
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_BOS_BY_DEFAULT = tuple(name for name, rule in WORD_RULES.items() if rule.adds_bos)


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Return the configuration. Raises UnsupportedModel by name, InvalidModelFile naming the key."""
    path, architecture = file.path, file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise refuse_architecture(path, architecture)
    fields = Fields(path, file.metadata, f"{architecture}.")
    if fields.get("expert_count"):
        raise refuse_option(path, "expert_count", fields.get("expert_count"), "0 (dense models)")
    num_heads, hidden_size = fields.count("attention.head_count"), fields.count("embedding_length")
    head_dim = fields.count("attention.key_length", max(1, hidden_size // num_heads))
    if fields.count("attention.value_length", head_dim) != head_dim:
        raise refuse_option(path, "value_length", fields.get("attention.value_length"), f"key_length ({head_dim})")
    num_layers, context_length = fields.layer_count("block_count"), fields.count("context_length")
    window = fields.get("attention.sliding_window") or None
    tokens = Fields(path, file.metadata, "tokenizer.ggml.")
    bos_token_id = min(tokens.token_ids("bos_token_id"), default=None)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        vocab_size=_vocab_size(file),
        context_length=context_length,
        rope=_read_rope(file, fields, head_dim, context_length),
        rms_epsilon=fields.number("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in file.tensors,
        windows=(None if window is None else fields.count("attention.sliding_window"),) * num_layers,
        eos_token_ids=_end_token_ids(tokens),
        bos_token_id=bos_token_id,
        add_bos=_adds_bos(tokens, bos_token_id),
    )


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise InvalidModelFile(f"{file.path}: tensor 'token_embd.weight' is missing", file=file.path)
    return file.tensors["token_embd.weight"].shape[0]


def _read_rope(file: GgufFile, fields: Fields, head_dim: int, context_length: int) -> RopeConfig:
    kind = fields.choice("rope.scaling.type", "none")
    if kind not in _ROPE_KINDS:
        raise refuse_option(file.path, "rope.scaling.type", kind, ", ".join(_ROPE_KINDS))
    rope = RopeConfig(
        base=fields.number("rope.freq_base", 10000.0),
        rotary_dim=fields.count("rope.dimension_count", head_dim),
        # Converters reorder the q and k rows of llama files so that neighbours form a pair; they leave the others.
        interleaved=file.metadata["general.architecture"] == "llama",
        kind=_ROPE_KINDS[kind],
        factor=fields.number("rope.scaling.factor", 1.0),
        original_context=fields.count("rope.scaling.original_context_length", context_length),
        context=context_length,
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
        divisors=_read_divisors(file),
    )
    if rope.kind == "yarn" and fields.get("rope.scaling.attn_factor") is not None:  # it multiplies YaRN's own
        return replace(rope, attention_factor=rope.scale * fields.number("rope.scaling.attn_factor"))
    return rope


def _read_divisors(file: GgufFile) -> tuple[float, ...] | None:
    """Return Llama 3's frequency divisors, which GGUF stores as a tensor."""
    entry = file.tensors.get("rope_freqs.weight")
    if entry is None:
        return None
    if entry.kind != "F32":
        raise refuse_option(file.path, "type of rope_freqs.weight", entry.kind, "F32")
    values = file.weight(entry.name).data.view(np.float32)
    if not np.isfinite(values).all() or not (values > 0).all():
        raise InvalidModelFile(f"{file.path}: tensor 'rope_freqs.weight' must hold positive numbers", file=file.path)
    return tuple(float(value) for value in values)


def _end_token_ids(tokens: Fields) -> frozenset[int]:
    ids = frozenset[int]().union(*(tokens.token_ids(key) for key in _END_KEYS))
    names = tokens.get("tokens")
    if not isinstance(names, list):
        return ids
    end_texts = end_texts_of(name for name in names if isinstance(name, str))
    return ids | {index for index, name in enumerate(names) if name in end_texts}


def _adds_bos(tokens: Fields, bos_token_id: int | None) -> bool:
    """A stated flag decides; without it SentencePiece and Llama 3 files mean yes, if they name the token at all."""
    stated = tokens.get("add_bos_token")
    if stated is None:
        by_default = tokens.get("model") == "llama" or tokens.get("pre") in _BOS_BY_DEFAULT
        return by_default and bos_token_id is not None
    if stated and bos_token_id is None:
        raise tokens.fail("bos_token_id", "must be given where add_bos_token is true")
    return tokens.flag("add_bos_token", False)
