"""ModelConfig from a GGUF file's metadata."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pagedkv.errors import InvalidModelFile
from pagedkv.model.config import (
    EPSILONS,
    POSITIVE,
    ROPE_BASES,
    Fields,
    ModelConfig,
    refuse_architecture,
    refuse_option,
)
from pagedkv.model.gguf_file import GgufSource
from pagedkv.model.rope import RopeConfig

_ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral files say llama
_ROPE_KINDS = {"none": "default", "linear": "linear", "yarn": "yarn"}
# Options that no operation here implements, and the value that switches each off.
_NEUTRAL_ROPE = {"scaling.yarn_ext_factor": 1.0, "scaling.yarn_attn_factor": 1.0, "scaling.yarn_log_multiplier": 0.0}
_NEUTRAL = {
    "expert_count": 0,
    "use_parallel_residual": False,
    "logit_scale": 0.0,
    "residual_scale": 0.0,
    "embedding_scale": 0.0,
    "attn_logit_softcapping": 0.0,
    "final_logit_softcapping": 0.0,
}
_DIVISORS = "rope_freqs.weight"
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn, whatever the metadata's end id says: some files name only one of two.
_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>")
_CONTROL = 3
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def read_gguf_config(file: GgufSource) -> ModelConfig:
    """Return the configuration. Raises UnsupportedModel by name, InvalidModelFile naming the key."""
    path, architecture = file.path, file.metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise refuse_architecture(path, architecture)
    fields = Fields(path, file.metadata, f"{architecture}.")
    for name, neutral in _NEUTRAL.items():
        fields.refuse_other(name, neutral)
    hidden_size = fields.count("embedding_length")
    attention = _read_attention(Fields(path, file.metadata, f"{architecture}.attention."), hidden_size)
    num_layers, context_length = fields.layer_count("block_count"), fields.count("context_length")
    rope = Fields(path, file.metadata, f"{architecture}.rope.")
    window = fields.count("attention.sliding_window", 0, least=0) or None
    tokens = Fields(path, file.metadata, "tokenizer.ggml.")
    bos_token_id = min(tokens.token_ids("bos_token_id"), default=None)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        **attention,
        hidden_size=hidden_size,
        intermediate_size=fields.count("feed_forward_length"),
        vocab_size=_vocab_size(file),
        context_length=context_length,
        rope=_read_rope(file, rope, attention["head_dim"], context_length),
        tied_embeddings="output.weight" not in file.tensors,
        windows=(window,) * num_layers,
        eos_token_ids=_end_token_ids(tokens),
        bos_token_id=bos_token_id,
        add_bos=_adds_bos(tokens, bos_token_id),
    )


def _vocab_size(file: GgufSource) -> int:
    if "token_embd.weight" not in file.tensors:
        raise InvalidModelFile(f"{file.path}: tensor 'token_embd.weight' is missing", file=file.path)
    return file.tensors["token_embd.weight"].shape[0]


def _read_attention(fields: Fields, hidden_size: int) -> dict[str, Any]:
    """Read the block `attention.*` whole: a key of it that nothing here reads is refused by name."""
    num_heads = fields.count("head_count")
    head_dim = fields.count("key_length", max(1, hidden_size // num_heads))
    if fields.count("value_length", head_dim) != head_dim:
        raise refuse_option(fields.path, "value_length", fields.get("value_length"), f"key_length ({head_dim})")
    if not fields.flag("causal", True):
        raise refuse_option(fields.path, fields.label("causal"), False, True)
    for name in ("max_alibi_bias", "clamp_kqv", "scale"):
        fields.refuse_other(name, 0.0)
    options = {
        "num_heads": num_heads,
        "num_kv_heads": fields.count("head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_epsilon": fields.number("layer_norm_rms_epsilon", limits=EPSILONS),
    }
    fields.get("sliding_window")
    fields.refuse_unread()
    return options


def _read_rope(file: GgufSource, fields: Fields, head_dim: int, context_length: int) -> RopeConfig:
    """Read the block `rope.*` whole, as llama.cpp does: without a type its factor scales linearly."""
    kind = fields.choice("scaling.type", "linear")
    if kind not in _ROPE_KINDS:
        raise refuse_option(file.path, fields.label("scaling.type"), kind, ", ".join(_ROPE_KINDS))
    rope = RopeConfig(
        base=fields.number("freq_base", 10000.0, ROPE_BASES),
        rotary_dim=fields.count("dimension_count", head_dim),
        # Converters reorder the q and k rows of llama files so that neighbours form a pair; they leave the others.
        interleaved=file.metadata["general.architecture"] == "llama",
        kind=_ROPE_KINDS[kind],
        factor=_read_factor(fields, kind),
        original_context=fields.count("scaling.original_context_length", context_length),
        context=context_length,
        beta_fast=fields.number("scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("scaling.yarn_beta_slow", 1.0),
    )
    attention = fields.number("scaling.attn_factor", 1.0)
    fields.flag("scaling.finetuned", False)  # tells of the training only
    for name, neutral in _NEUTRAL_ROPE.items():
        fields.refuse_other(name, neutral)
    fields.refuse_unread()
    # The file's factor multiplies the kind's own.
    return replace(rope, attention_factor=rope.scale * attention, divisors=_read_divisors(file, rope.rotary_dim))


def _read_factor(fields: Fields, kind: str) -> float:
    """Return the factor, under its old name too; 0 stands for none."""
    names = [name for name in ("scaling.factor", "scale_linear") if fields.get(name) not in (None, 0.0)]
    factors = [fields.number(name) for name in names]
    if len(set(factors)) > 1:
        raise fields.fail(names[1], f"contradicts {fields.label(names[0])} {factors[0]:g}")
    if kind == "none" and factors not in ([], [1.0]):
        raise refuse_option(fields.path, fields.label(names[0]), factors[0], "1 where the scaling's type is none")
    return factors[0] if factors else 1.0


def _read_divisors(file: GgufSource, rotary_dim: int) -> tuple[float, ...] | None:
    """Return Llama 3's frequency divisors, which GGUF stores as a tensor."""
    entry = file.tensors.get(_DIVISORS)
    if entry is None:
        return None
    if entry.kind != "F32":
        raise refuse_option(file.path, f"type of {_DIVISORS}", entry.kind, "F32")
    if entry.shape != (rotary_dim // 2,):
        raise InvalidModelFile(
            f"{file.path}: tensor {_DIVISORS!r} has shape {entry.shape}, must be ({rotary_dim // 2},)",
            file=file.path,
            tensor=_DIVISORS,
        )
    values = file.weight(_DIVISORS).data.view(np.float32)
    sound = (values >= POSITIVE[0]) & (values <= POSITIVE[1])
    if not sound.all():
        raise InvalidModelFile(
            f"{file.path}: tensor {_DIVISORS!r} must hold numbers from {POSITIVE[0]:g} to {POSITIVE[1]:g}, "
            f"got {values[~sound][0]}",
            file=file.path,
            tensor=_DIVISORS,
        )
    return tuple(values.tolist())


def _end_token_ids(tokens: Fields) -> frozenset[int]:
    ids = frozenset[int]().union(*(tokens.token_ids(key) for key in _END_KEYS))
    names, types = tokens.get("tokens"), tokens.get("token_type")
    if not isinstance(names, list) or not isinstance(types, list):
        return ids
    named = {
        index
        for index, (name, kind) in enumerate(zip(names, types, strict=False))
        if kind == _CONTROL and name in _END_TOKENS
    }
    return ids | named


def _adds_bos(tokens: Fields, bos_token_id: int | None) -> bool:
    """A stated flag decides; without it SentencePiece and Llama 3 files mean yes, if they name the token at all."""
    stated = tokens.get("add_bos_token")
    if stated is None:
        by_default = tokens.get("model") == "llama" or tokens.get("pre") in _BOS_BY_DEFAULT
        return by_default and bos_token_id is not None
    if stated and bos_token_id is None:
        raise tokens.fail("bos_token_id", "must be given where add_bos_token is true")
    return tokens.flag("add_bos_token", False)
