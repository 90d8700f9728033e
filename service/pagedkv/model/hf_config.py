"""ModelConfig from a Hugging Face directory's JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagedkv.errors import InvalidModelFile
from pagedkv.model.config import Fields, ModelConfig, refuse_architecture, refuse_option
from pagedkv.model.rope import ROPE_KINDS, RopeConfig
from pagedkv.model.safetensors_file import parse_json

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_STRETCHED_KINDS = ("linear", "dynamic")


def read_json_file(path: Path, *, required: bool = False) -> dict[str, Any]:
    """Return a JSON object; empty if the file is missing and not required."""
    if not path.is_file():
        if required:
            raise InvalidModelFile(f"{path}: is missing", file=path)
        return {}
    return parse_json(path, path.read_bytes())


def read_hf_config(directory: Path) -> ModelConfig:
    """Return the configuration. Raises UnsupportedModel by name, InvalidModelFile naming file and key."""
    path = directory / "config.json"
    fields = Fields(path, read_json_file(path, required=True))
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
        rms_epsilon=fields.number("rms_norm_eps", 1e-6),
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
    end = _resolve(directory, tokenizer, "eos_token")
    begin = _resolve(directory, tokenizer, "bos_token")
    if begin is None and "bos_token" not in tokenizer:
        begin = min(config.token_ids("bos_token_id"), default=None)
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
            if isinstance(entry, dict) and entry.get("content") == text and token_id.isdigit():
                return int(token_id)
    added = read_json_file(directory / "tokenizer.json").get("added_tokens")
    for entry in added if isinstance(added, list) else []:
        if isinstance(entry, dict) and entry.get("content") == text and isinstance(entry.get("id"), int):
            return int(entry["id"])
    return None


def _find_architecture(fields: Fields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else fields.get("model_type")
    if isinstance(name, str) and name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    if not names and name in _ARCHITECTURES.values():
        return str(name)
    raise refuse_architecture(fields.path, name)


def _refuse_options(fields: Fields) -> None:
    if fields.get("hidden_act") not in (None, "silu"):
        raise refuse_option(fields.path, "hidden_act", fields.get("hidden_act"), "silu")
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise refuse_option(fields.path, "quantization", method, "none (use GGUF for quantised weights)")


def _read_rope(fields: Fields, head_dim: int) -> RopeConfig:
    """Read the scaling block under its new or old name, and its kind under `rope_type` or the old `type`."""
    block = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(block, dict):
        raise fields.fail("rope_scaling", "must be an object")
    scaling = Fields(fields.path, block)
    kind = scaling.choice("rope_type", scaling.choice("type", "default"))
    if kind not in ROPE_KINDS:
        raise refuse_option(fields.path, "rope scaling", kind, ", ".join(ROPE_KINDS))
    length = fields.count("max_position_embeddings", 2048)
    factor = 1.0 if kind == "default" else scaling.number("factor")
    original = length if kind in _STRETCHED_KINDS else scaling.count("original_max_position_embeddings", length)
    partial = fields.number("partial_rotary_factor", scaling.number("partial_rotary_factor", 1.0))
    attention = scaling.get("attention_factor")
    return RopeConfig(
        base=scaling.number("rope_theta", fields.number("rope_theta", 10000.0)),
        rotary_dim=int(head_dim * partial),
        interleaved=False,
        kind=kind,
        factor=factor,
        original_context=original,
        context=_served_length(kind, length, original, factor),
        low_freq_factor=scaling.number("low_freq_factor", None if kind == "llama3" else 1.0),
        high_freq_factor=scaling.number("high_freq_factor", None if kind == "llama3" else 4.0),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=None if attention is None else scaling.number("attention_factor"),
    )


def _served_length(kind: str, length: int, original: int, factor: float) -> int:
    """Linear and dynamic state the unscaled length, llama3 the scaled one, YaRN either."""
    if kind in _STRETCHED_KINDS:
        return int(length * factor)
    return max(length, int(original * factor)) if kind == "yarn" else length


def _read_windows(fields: Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    """Mistral's window holds for all layers; Qwen's only where switched on, from `max_window_layers` on."""
    if fields.get("sliding_window") is None:
        return (None,) * num_layers
    window = fields.count("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, list) or len(kinds) != num_layers:
            raise fields.fail("layer_types", f"must list {num_layers} layers")
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if architecture == "mistral":
        return (window,) * num_layers
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    first = fields.get("max_window_layers")
    if first is None:
        first = 28  # the configuration class's default
    if type(first) is not int:
        raise fields.fail("max_window_layers", "must be a whole number")
    return tuple(window if layer >= first else None for layer in range(num_layers))
