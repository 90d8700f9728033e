"""The tokenizer of a Hugging Face directory: tokenizer.json and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizersTokenizer

from pagedkv.errors import InvalidModelFile
from pagedkv.model.chat_template import ChatTemplate
from pagedkv.model.config import ModelConfig, library_refusals, refuse_option
from pagedkv.model.hf_config import read_json_file, special_text
from pagedkv.model.mapped_file import read_bytes
from pagedkv.model.shown import shown
from pagedkv.model.token_text import byte_level_bytes, sentencepiece_bytes
from pagedkv.model.tokenizer import SpecialTokens, Tokenizer

_SAMPLE = "Hello, world 123\n\u00e9\u4e16\U0001f600"
_MAX_TEMPLATE_BYTES = 1 << 20
_SENTENCEPIECE_STEPS = ("Replace", "ByteFallback", "Fuse", "Strip", "Metaspace")


def read_hf_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer:
    """Load the tokenizer. Raises InvalidModelFile naming the file, UnsupportedModel naming an unknown decoder."""
    path = directory / "tokenizer.json"
    definition = read_json_file(path, required=True)
    with library_refusals(path, "not a tokenizer"):
        encoder = TokenizersTokenizer.from_file(str(path))
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode(_SAMPLE)  # some faults show only now
    options = read_json_file(directory / "tokenizer_config.json")
    to_bytes = _find_byte_rule(path, definition)
    added = encoder.get_added_tokens_decoder()
    special = {token.content: token_id for token_id, token in added.items() if token.special}
    token_bytes: list[bytes | None] = [b""] * max([config.vocab_size, *(i + 1 for i in added)])
    for text, token_id in encoder.get_vocab(with_added_tokens=False).items():
        if token_id < len(token_bytes):
            token_bytes[token_id] = to_bytes(text)
    for token_id, token in added.items():
        token_bytes[token_id] = None if token.special else token.content.encode()
    return Tokenizer(
        encoder,
        token_bytes,
        SpecialTokens(special, config.bos_token_id, _adds_bos(encoder, config, options), config.eos_token_ids),
        vocab_size=config.vocab_size,
        strips_space=_strips_space(definition),
        chat_template=_read_template(directory, options),
    )


def _decoder_steps(definition: dict[str, Any]) -> list[dict[str, Any]]:
    decoder = definition.get("decoder") or {}
    return list(decoder.get("decoders", [])) if decoder.get("type") == "Sequence" else [decoder]


def _find_byte_rule(path: Path, definition: dict[str, Any]) -> Callable[[str], bytes]:
    kinds = [step.get("type") for step in _decoder_steps(definition)]
    if "ByteLevel" in kinds:
        return byte_level_bytes
    if kinds and all(kind in _SENTENCEPIECE_STEPS for kind in kinds):
        return sentencepiece_bytes
    raise refuse_option(path, "decoder", kinds, "ByteLevel, SentencePiece with byte fallback")


def _strips_space(definition: dict[str, Any]) -> bool:
    """Whether decoding takes one space off the front of a text."""
    for step in _decoder_steps(definition):
        if step.get("type") == "Strip" and step.get("start", 0) > 0:
            return True
        if step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
    return False


def _adds_bos(encoder: TokenizersTokenizer, config: ModelConfig, options: dict[str, Any]) -> bool:
    """The tokenizer's own post-processor decides, unless its configuration states it."""
    stated = options.get("add_bos_token")
    if stated is not None and not isinstance(stated, bool):
        raise InvalidModelFile(f"tokenizer_config.json: add_bos_token must be true or false, got {shown(stated)}")
    if stated and config.bos_token_id is None:
        raise InvalidModelFile("tokenizer_config.json: add_bos_token is true, but no bos_token is known")
    if stated is not None:
        return stated
    first = encoder.encode("", add_special_tokens=True).ids[:1]
    return config.bos_token_id is not None and first == [config.bos_token_id]


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, _MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidModelFile(f"{path}: is not UTF-8 at byte {error.start}", file=path) from error


def _read_template(directory: Path, options: dict[str, Any]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    source = _read_text(path) if path.is_file() else options.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = named[-1].get("template") if named else None
    if source is None:
        return None
    if not isinstance(source, str):
        path = directory / "tokenizer_config.json"
        raise InvalidModelFile(f"{path}: chat_template must be a string, got {shown(source)}", file=path)
    texts = {name: special_text(options, name) or "" for name in ("bos_token", "eos_token")}
    return ChatTemplate(source, **texts)
