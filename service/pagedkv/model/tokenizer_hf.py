"""The tokenizer of a Hugging Face directory: tokenizer.json and what stands beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizersTokenizer

from pagedkv.errors import InvalidModelFile
from pagedkv.model.chat_template import ChatTemplate
from pagedkv.model.config import ModelConfig, library_refusals, refuse_option
from pagedkv.model.end_tokens import end_texts_of, looks_like_control
from pagedkv.model.hf_config import read_json_file
from pagedkv.model.hf_special import named_special_tokens
from pagedkv.model.mapped_file import read_bytes
from pagedkv.model.pre_tokenizers import QUICK_PATTERNS
from pagedkv.model.seals import Seals
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
    plain = _load(path, path.read_bytes())
    to_bytes = _find_byte_rule(path, definition)
    vocabulary = plain.get_vocab(with_added_tokens=False)
    added = {token.content: token_id for token_id, token in plain.get_added_tokens_decoder().items()}
    known = vocabulary | added
    named = named_special_tokens(directory)
    options = read_json_file(directory / "tokenizer_config.json")
    source = _read_template(directory, options)
    ends = config.eos_token_ids | _further_ends(known, named, source)
    control = {token.content: i for i, token in plain.get_added_tokens_decoder().items() if token.special}
    control |= _disguised(known, named, ends)
    single_words = (token.content for token in plain.get_added_tokens_decoder().values() if token.single_word)
    seals = Seals(control, single_words)
    token_bytes = _token_bytes(vocabulary, added, to_bytes)
    token_bytes |= dict.fromkeys(control.values(), None)
    bos_token_id = _begin_id(known, named, config)
    return Tokenizer(
        _load_sealed(path, definition, control, seals),
        [token_bytes.get(token_id, b"") for token_id in range(config.vocab_size)],
        SpecialTokens(control, bos_token_id, _adds_bos(plain, bos_token_id, options), ends),
        vocab_size=config.vocab_size,
        seals=seals,
        strips_space=_strips_space(definition),
        chat_template=None if source is None else ChatTemplate(source, named),
    )


def _load(path: Path, data: bytes) -> TokenizersTokenizer:
    with library_refusals(path, "not a tokenizer"):
        encoder = TokenizersTokenizer.from_buffer(data)
        encoder.no_padding()
        encoder.no_truncation()
        encoder.encode(_SAMPLE)  # some faults show only now
    return encoder


def _begin_id(known: Mapping[str, int], named: Mapping[str, str | list[str]], config: ModelConfig) -> int | None:
    text = named.get("bos_token")
    return known.get(text, config.bos_token_id) if isinstance(text, str) else config.bos_token_id


def _further_ends(
    known: Mapping[str, int], named: Mapping[str, str | list[str]], template: str | None
) -> frozenset[int]:
    """Return the end token by name, and the well-known end texts that the model's chat template writes."""
    texts = {text for text in end_texts_of(known) if template is not None and text in template}
    eos = named.get("eos_token")
    return frozenset(known[text] for text in (*texts, eos) if isinstance(text, str) and text in known)


def _load_sealed(
    path: Path, definition: dict[str, Any], control: Mapping[str, int], seals: Seals
) -> TokenizersTokenizer:
    """Return the encoder that knows the control tokens by their seals, and finds each of them inside a text.

    A normaliser may keep tokens that are looked for in normalised text from ever being found: then in the text itself.
    """
    encoder = _load(path, json.dumps(_seal(definition, control, seals)).encode())
    if all(_finds(encoder, seals.rename(text), token_id) for text, token_id in control.items()):
        return encoder
    return _load(path, json.dumps(_seal(definition, control, seals, {"normalized": False})).encode())


def _finds(encoder: TokenizersTokenizer, seal: str, token_id: int) -> bool:
    return token_id in encoder.encode(f"a{seal}a", add_special_tokens=False).ids


def _disguised(known: Mapping[str, int], named: Mapping[str, str | list[str]], ends: frozenset[int]) -> dict[str, int]:
    """Return the control tokens that tokenizer.json does not declare as such: ones named elsewhere, and ends."""
    texts = {text for value in named.values() for text in ([value] if isinstance(value, str) else value)}
    texts |= {text for text, token_id in known.items() if token_id in ends}
    return {text: known[text] for text in texts if text in known and looks_like_control(text)}


def _seal(
    definition: dict[str, Any], control: Mapping[str, int], seals: Seals, changes: Mapping[str, bool] | None = None
) -> dict[str, Any]:
    """Return the definition with the control tokens renamed to their seals, and their flags changed."""
    changes = {"special": True, "single_word": False, **(changes or {})}  # single words: `Seals` has seen to them
    entries = [_seal_entry(entry, seals, changes) for entry in definition.get("added_tokens") or []]
    declared = {entry["content"] for entry in entries}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for text, token_id in control.items():
        if seals.rename(text) not in declared:
            entries.append({"id": token_id, "content": seals.rename(text), **flags, **changes})
    splitter = _quicken(definition.get("pre_tokenizer"))
    model = _seal_model(definition["model"], seals)
    return definition | {"added_tokens": entries, "model": model, "pre_tokenizer": splitter}


def _quicken(step: Any) -> Any:
    """Return a pre-tokenizer with the same matches whose patterns take time in proportion to the text."""
    if isinstance(step, list):
        return [_quicken(item) for item in step]
    if not isinstance(step, dict):
        return step
    pattern = step.get("Regex")
    if isinstance(pattern, str):
        return {**step, "Regex": QUICK_PATTERNS.get(pattern, pattern)}
    return {key: _quicken(value) for key, value in step.items()}


def _seal_entry(entry: dict[str, Any], seals: Seals, changes: Mapping[str, bool]) -> dict[str, Any]:
    text = entry["content"]
    return {**entry, **changes, "content": seals.rename(text)} if text in seals else entry


def _seal_model(model: dict[str, Any], seals: Seals) -> dict[str, Any]:
    sealed = dict(model)
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        sealed["vocab"] = {seals.rename(text): token_id for text, token_id in vocabulary.items()}
    elif isinstance(vocabulary, list):
        sealed["vocab"] = [[seals.rename(text), score] for text, score in vocabulary]
    if isinstance(model.get("unk_token"), str):
        sealed["unk_token"] = seals.rename(model["unk_token"])
    if model.get("merges"):
        sealed["merges"] = [merge for merge in model["merges"] if not _makes_control(merge, seals)]
    return sealed


def _makes_control(merge: str | list[str], seals: Seals) -> bool:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left + right in seals or left in seals or right in seals


def _token_bytes(
    vocabulary: Mapping[str, int], added: Mapping[str, int], to_bytes: Callable[[str], bytes]
) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {token_id: to_bytes(text) for text, token_id in vocabulary.items()}
    return found | {token_id: text.encode() for text, token_id in added.items()}


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


def _adds_bos(encoder: TokenizersTokenizer, bos_token_id: int | None, options: dict[str, Any]) -> bool:
    """The tokenizer's own post-processor decides, unless its configuration states it."""
    stated = options.get("add_bos_token")
    if stated is not None and not isinstance(stated, bool):
        raise InvalidModelFile(f"tokenizer_config.json: add_bos_token must be true or false, got {shown(stated)}")
    if stated and bos_token_id is None:
        raise InvalidModelFile("tokenizer_config.json: add_bos_token is true, but no bos_token is known")
    if stated is not None:
        return stated
    first = encoder.encode("", add_special_tokens=True).ids[:1]
    return bos_token_id is not None and first == [bos_token_id]


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path, _MAX_TEMPLATE_BYTES).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidModelFile(f"{path}: is not UTF-8 at byte {error.start}", file=path) from error


def _read_template(directory: Path, options: dict[str, Any]) -> str | None:
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
    return source
