"""ModelConfig from a Hugging Face directory's JSON files."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from pagedkv.errors import InvalidModelFile
from pagedkv.model.config import EPSILONS, ROPE_BASES, Fields, ModelConfig, naming, refuse_architecture, refuse_option
from pagedkv.model.mapped_file import read_bytes
from pagedkv.model.rope import ROPE_KINDS, RopeConfig, yarn_scale
from pagedkv.model.safetensors_file import parse_json
from pagedkv.model.shown import shown

_DIGITS = re.compile(r"[0-9]{1,9}")
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_STRETCHED_KINDS = ("linear", "dynamic")
_LAYER_KINDS = ("full_attention", "sliding_attention")
_QUANTIZATIONS = ("quantization_config", "compression_config")
_MSCALES = (0.0, 1e6)
_MAX_JSON_BYTES = 1 << 26  # twice the largest tokenizer.json there is; parsed, it takes up to 32 times as much


def read_json_file(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing and not required."""
    if not path.is_file():
        if required:
            raise InvalidModelFile(f"{path}: is missing", file=path)
        return {}
    return parse_json(path, read_bytes(path, _MAX_JSON_BYTES))


def read_hf_config(directory: Path) -> ModelConfig:
    """Return the configuration. Raises UnsupportedModel by name, InvalidModelFile naming file and key."""
    path = directory / "config.json"
    with naming(path):
        return _read_config(directory, Fields(path, read_json_file(path, required=True)))


def _read_config(directory: Path, fields: Fields) -> ModelConfig:
    architecture = _find_architecture(fields)
    _refuse_options(fields)
    num_heads, hidden_size = fields.count("num_attention_heads"), fields.count("hidden_size")
    head_dim = fields.count("head_dim", max(1, hidden_size // num_heads))
    num_layers = fields.layer_count("num_hidden_layers")
    rope = _read_rope(fields, head_dim)
    bos_token_id, end_token_ids = read_special_ids(directory, fields)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.count("num_key_value_heads", num_heads),
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=fields.count("intermediate_size"),
        vocab_size=fields.count("vocab_size"),
        context_length=rope.context,
        rope=rope,
        rms_epsilon=fields.number("rms_norm_eps", 1e-6, EPSILONS),
        tied_embeddings=fields.flag("tie_word_embeddings", False),
        windows=_read_windows(fields, architecture, num_layers),
        eos_token_ids=end_token_ids,
        bos_token_id=bos_token_id,
    )


def read_special_ids(directory: Path, config: Fields) -> tuple[int | None, frozenset[int]]:
    """Return the begin id and the end ids of config.json, generation_config.json and the tokenizer, joined.

    The tokenizer's begin token wins over config.json's id.
    """
    path = directory / "generation_config.json"
    generation = Fields(path, read_json_file(path))
    tokenizer = read_json_file(directory / "tokenizer_config.json")
    ends = config.token_ids("eos_token_id") | generation.token_ids("eos_token_id")
    stated = config.token_ids("bos_token_id")
    end = _resolve(directory, tokenizer, "eos_token")
    begin = _resolve(directory, tokenizer, "bos_token")
    if begin is None and "bos_token" not in tokenizer:
        begin = min(stated, default=None)
    return begin, ends | ({end} if end is not None else frozenset())


def special_text(tokenizer_config: dict[str, Any], name: str) -> str | None:
    """Return the text of `bos_token` or `eos_token`, which is a string or an object with `content`."""
    value = tokenizer_config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _resolve(directory: Path, tokenizer_config: dict[str, Any], name: str) -> int | None:
    text = special_text(tokenizer_config, name)
    if text is None:
        return None
    declared = tokenizer_config.get("added_tokens_decoder")
    if isinstance(declared, dict):
        for token_id, entry in declared.items():
            if isinstance(entry, dict) and entry.get("content") == text and _DIGITS.fullmatch(token_id):
                return int(token_id)
    path = directory / "tokenizer.json"
    added = read_json_file(path).get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == text:
            return Fields(path, entry, block=f"added_tokens {shown(text)}: ").count("id", least=0)
    return None


def _find_architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    if names is not None and not isinstance(names, list):
        raise fields.fail("architectures", "must be a list of names")
    name = names[0] if names else fields.get("model_type")
    if isinstance(name, str) and name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    if not names and name in _ARCHITECTURES.values():
        return str(name)
    raise refuse_architecture(fields.path, name)


def _refuse_options(fields: Fields) -> None:
    if fields.get("hidden_act") not in (None, "silu"):
        raise refuse_option(fields.path, "hidden_act", fields.get("hidden_act"), "silu")
    for name in _QUANTIZATIONS:
        block = fields.get(name)
        if block is not None:
            method = block.get("quant_method") if isinstance(block, dict) else block
            raise refuse_option(fields.path, name, method, "none (use GGUF for quantised weights)")


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read the scaling block whole: a key of it that nothing here reads is refused by name."""
    scaling = _rope_block(fields)
    kind = _rope_kind(scaling)
    length = fields.count("max_position_embeddings", 2048)
    partial = scaling.number("partial_rotary_factor", fields.number("partial_rotary_factor", 1.0))
    base = scaling.number("rope_theta", fields.number("rope_theta", 10000.0, ROPE_BASES), ROPE_BASES)
    options = _scaling_options(kind, scaling, length, fields.count("original_max_position_embeddings", length))
    scaling.refuse_unread()
    rope = RopeConfig(
        base=base, rotary_dim=int(head_dim * partial), interleaved=False, kind=kind, original_context=length
    )
    rope = replace(rope, **options)
    return replace(rope, context=_served_length(kind, length, rope.original_context, rope.factor))


def _rope_block(fields: Fields) -> Fields:
    """Return the block under its new or its old name."""
    names = [name for name in ("rope_parameters", "rope_scaling") if fields.get(name) is not None]
    blocks = {name: fields.get(name) for name in names}
    for name, block in blocks.items():
        if not isinstance(block, dict):
            raise fields.fail(name, "must be an object")
    if len(blocks) == 2 and blocks["rope_parameters"] != blocks["rope_scaling"]:
        raise fields.fail("rope_scaling", "contradicts rope_parameters: give one of them")
    name, block = next(iter(blocks.items()), ("rope_scaling", {}))
    return Fields(fields.path, block, block=f"{name}.")


def _rope_kind(scaling: Fields) -> str:
    """Return the kind, which stands under `rope_type` or under the old `type`."""
    old = scaling.choice("type", "default")
    kind = scaling.choice("rope_type", old)
    if scaling.get("type") is not None and old != kind:
        raise scaling.fail("type", f"contradicts rope_type {shown(kind)}")
    if kind not in ROPE_KINDS:
        raise refuse_option(scaling.path, scaling.label("rope_type"), kind, ", ".join(ROPE_KINDS))
    return kind


def _scaling_options(kind: str, scaling: Fields, length: int, original: int) -> dict[str, Any]:
    """Return what this kind of scaling adds to a RopeConfig, as the functions of the transformers library read it."""
    if kind in _STRETCHED_KINDS:
        if scaling.count("original_max_position_embeddings", length) != length:
            raise scaling.fail("original_max_position_embeddings", f"must be max_position_embeddings ({length})")
        return {"factor": scaling.number("factor")}
    if kind == "default":
        scaling.refuse_other("factor", 1.0)
        return {}
    original = scaling.count("original_max_position_embeddings", original)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {name: scaling.number(name) for name in names} | {"original_context": original}
    scaling.flag("finetuned", False)  # tells of the training only
    factor = scaling.number("factor", length / original if original < length else None)
    return {
        "factor": factor,
        "original_context": original,
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "truncate": scaling.flag("truncate", True),
        "attention_factor": _attention_factor(scaling, factor),
    }


def _attention_factor(scaling: Fields, factor: float) -> float | None:
    """Return YaRN's stated factor, or the quotient of DeepSeek's two weights where both are given and not 0."""
    weights = [scaling.number(name, 0.0, _MSCALES) for name in ("mscale", "mscale_all_dim")]
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    return yarn_scale(factor, weights[0]) / yarn_scale(factor, weights[1]) if all(weights) else None


def _served_length(kind: str, length: int, original: int, factor: float) -> int:
    """Linear and dynamic state the unscaled length, llama3 the scaled one, YaRN either."""
    if kind in _STRETCHED_KINDS:
        return int(length * factor)
    return max(length, int(original * factor)) if kind == "yarn" else length


def _read_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral's window holds for all layers; Qwen's only where switched on, from `max_window_layers` on.

    Llama's attention has none. Where `layer_types` names the layers, it decides.
    """
    window = None if fields.get("sliding_window") is None else fields.count("sliding_window")
    switched_on = fields.flag("use_sliding_window", architecture == "mistral")
    first = fields.count("max_window_layers", 28, least=0)  # the configuration class's default
    kinds = _layer_kinds(fields, num_layers)
    if kinds is not None:
        return _listed_windows(fields, architecture, kinds, window)
    if architecture == "llama" and switched_on:
        raise refuse_option(fields.path, "use_sliding_window", True, "false (llama has no window)")
    if architecture == "mistral":
        return (window,) * num_layers
    return tuple(window if switched_on and layer >= first else None for layer in range(num_layers))


def _layer_kinds(fields: Fields, num_layers: int) -> list[str] | None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise fields.fail("layer_types", f"must list {num_layers} layers")
    for kind in kinds:
        if kind not in _LAYER_KINDS:
            raise refuse_option(fields.path, "layer_types", kind, ", ".join(_LAYER_KINDS))
    return kinds


def _listed_windows(fields: Fields, architecture: str, kinds: list[str], window: int | None) -> tuple[int | None, ...]:
    is_sliding = [kind == "sliding_attention" for kind in kinds]
    if any(is_sliding) and architecture == "llama":
        raise refuse_option(fields.path, "layer_types", "sliding_attention", "full_attention (llama has no window)")
    if any(is_sliding) and (window is None or fields.get("use_sliding_window") is False):
        raise fields.fail("sliding_window", "must be given and switched on where layer_types names sliding_attention")
    return tuple(window if slides else None for slides in is_sliding)
