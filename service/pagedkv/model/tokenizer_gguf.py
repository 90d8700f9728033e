"""Rebuild a tokenizer from the vocabulary that a GGUF file carries."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as TokenizersTokenizer

from pagedkv.errors import InvalidModelFile
from pagedkv.model.chat_template import ChatTemplate
from pagedkv.model.config import Fields, ModelConfig, library_refusals, refuse_option
from pagedkv.model.gguf_file import GgufSource
from pagedkv.model.shown import shown
from pagedkv.model.token_text import byte_level_bytes, sentencepiece_bytes
from pagedkv.model.tokenizer import SpecialTokens, Tokenizer

_UNDEFINED, _NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(7)
_MAX_CONTROL_TOKENS = 1 << 16
_MAX_PIECE = 128  # characters of a SentencePiece token
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"

# Pre-tokenizer name -> the patterns that split a text, one after another.
_SPLITS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
}
_WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3")  # a piece that is a token needs no merges
_NFC = ("qwen2", "deepseek-r1-qwen")


def read_gguf_tokenizer(file: GgufSource, config: ModelConfig) -> Tokenizer:
    """Build the tokenizer. Raises UnsupportedModel naming a model or pre-tokenizer that is not known."""
    return _Builder(file, config).build()


class _Builder:
    def __init__(self, file: GgufSource, config: ModelConfig) -> None:
        self._path: Path = file.path
        self._metadata = file.metadata
        self._config = config
        self._tokens: list[str] = self._list("tokens", str)
        self._types: list[int] = self._read_types()
        if len(self._types) != len(self._tokens) or len(self._tokens) > config.vocab_size:
            raise self._fail(
                f"{len(self._tokens)} tokens, {len(self._types)} types, a vocabulary of {config.vocab_size}"
            )

    def _read_types(self) -> list[int]:
        if self._metadata.get("tokenizer.ggml.token_type") is None:
            return [_NORMAL] * len(self._tokens)
        types = self._list("token_type", int)
        wrong = next((index for index, kind in enumerate(types) if not _UNDEFINED <= kind <= _BYTE), None)
        if wrong is not None:
            raise self._fail_item("token_type", wrong, f"must be from {_UNDEFINED} to {_BYTE}", types[wrong])
        if types.count(_CONTROL) > _MAX_CONTROL_TOKENS:
            raise self._fail(
                f"tokenizer.ggml.token_type has {types.count(_CONTROL)} control tokens, at most {_MAX_CONTROL_TOKENS}"
            )
        return types

    def build(self) -> Tokenizer:
        model = self._metadata.get("tokenizer.ggml.model")
        if model == "gpt2":
            return self._finish(self._byte_level(), byte_level_bytes, strips_space=False)
        if model == "llama":
            adds_space = Fields(self._path, self._metadata, "tokenizer.ggml.").flag("add_space_prefix", True)
            return self._finish(self._sentencepiece(adds_space), sentencepiece_bytes, strips_space=adds_space)
        raise refuse_option(self._path, "tokenizer model", model, "gpt2, llama")

    def _byte_level(self) -> TokenizersTokenizer:
        name = self._metadata.get("tokenizer.ggml.pre", "default")
        if not isinstance(name, str) or name not in _SPLITS:
            raise refuse_option(self._path, "pre-tokenizer", name, ", ".join(_SPLITS))
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        encoder = self._make(merges, ignore_merges=name in _WHOLE_WORDS)
        if name in _NFC:
            encoder.normalizer = normalizers.NFC()
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _SPLITS[name]]
        encoder.pre_tokenizer = pre_tokenizers.Sequence(
            [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        encoder.decoder = decoders.ByteLevel()
        return encoder

    def _sentencepiece(self, adds_space: bool) -> TokenizersTokenizer:
        """SentencePiece's BPE joins the pair whose result scores best: the same as merges ranked by that score."""
        unknown = next((t for t, kind in zip(self._tokens, self._types, strict=True) if kind == _UNKNOWN), None)
        encoder = self._make(self._scored_merges(), unk_token=unknown, byte_fallback=True, fuse_unk=True)
        replace = normalizers.Replace(" ", _SPACE)
        encoder.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if adds_space else replace
        return encoder

    def _scored_merges(self) -> list[tuple[str, str]]:
        scores = self._list("scores", float)
        if len(scores) != len(self._tokens):
            raise self._fail(f"{len(scores)} scores for {len(self._tokens)} tokens")
        wrong = next((index for index, score in enumerate(scores) if not math.isfinite(score)), None)
        if wrong is not None:
            raise self._fail_item("scores", wrong, "must be a finite number", scores[wrong])
        usable = {token: i for i, token in enumerate(self._tokens) if self._types[i] in (_NORMAL, _USER_DEFINED)}
        longest = max(usable, key=len, default="")
        if len(longest) > _MAX_PIECE:  # every way to cut a piece in two is tried
            rule = f"must have at most {_MAX_PIECE} characters, has {len(longest)}"
            raise self._fail_item("tokens", usable[longest], rule, longest)
        found: list[tuple[float, int, int]] = []
        for token, index in usable.items():
            pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            local = [(usable[a], usable[b]) for a, b in pairs if a in usable and b in usable]
            found += [(-scores[index], *pair) for pair in sorted(local)]
        found.sort(key=lambda merge: merge[0])  # stable: equal scores keep the vocabulary's order
        return [(self._tokens[left], self._tokens[right]) for _, left, right in found]

    def _make(self, merges: list[Any], **options: Any) -> TokenizersTokenizer:
        vocabulary = {token: index for index, token in enumerate(self._tokens)}
        with library_refusals(self._path, "the vocabulary and its merges do not fit"):
            encoder = TokenizersTokenizer(models.BPE(vocabulary, merges, **options))
        control = [AddedToken(t, special=True, normalized=False) for t in self._of_type(_CONTROL)]
        user = [AddedToken(t, special=False, normalized=False) for t in self._of_type(_USER_DEFINED)]
        encoder.add_special_tokens(control)
        encoder.add_tokens(user)
        return encoder

    def _of_type(self, kind: int) -> list[str]:
        return [token for token, token_type in zip(self._tokens, self._types, strict=True) if token_type == kind]

    def _finish(self, encoder: TokenizersTokenizer, to_bytes: Any, *, strips_space: bool) -> Tokenizer:
        config = self._config
        source = self._metadata.get("tokenizer.chat_template")
        if source is not None and not isinstance(source, str):
            raise self._fail(f"tokenizer.chat_template must be a string, got {shown(source)}")
        return Tokenizer(
            encoder,
            [self._token_bytes(index, to_bytes) for index in range(len(self._tokens))],
            SpecialTokens(
                {t: i for i, t in enumerate(self._tokens) if self._types[i] == _CONTROL and t},
                config.bos_token_id,
                config.add_bos,
                config.eos_token_ids,
            ),
            vocab_size=config.vocab_size,
            strips_space=strips_space,
            chat_template=None
            if not isinstance(source, str)
            else ChatTemplate(
                source,
                bos_token=self._text(config.bos_token_id),
                eos_token=self._text(self._metadata.get("tokenizer.ggml.eos_token_id")),
            ),
        )

    def _token_bytes(self, index: int, to_bytes: Any) -> bytes | None:
        token, kind = self._tokens[index], self._types[index]
        if kind == _CONTROL:
            return None
        if kind == _USER_DEFINED and to_bytes is byte_level_bytes:
            return token.encode()
        if kind == _UNUSED or (kind == _UNKNOWN and to_bytes is sentencepiece_bytes):
            return b""
        return bytes(to_bytes(token))

    def _text(self, token_id: Any) -> str:
        return self._tokens[token_id] if type(token_id) is int and token_id < len(self._tokens) else ""

    def _list(self, key: str, kind: type) -> list[Any]:
        values = self._metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(values, list):
            raise self._fail(f"tokenizer.ggml.{key} must be a list of {kind.__name__}, got {shown(values)}")
        wrong = next((index for index, value in enumerate(values) if type(value) is not kind), None)
        if wrong is not None:
            raise self._fail_item(key, wrong, f"must be of type {kind.__name__}", values[wrong])
        return values

    def _fail_item(self, key: str, index: int, rule: str, value: object) -> InvalidModelFile:
        return self._fail(f"tokenizer.ggml.{key}[{index}] {rule}, got {shown(value)}")

    def _fail(self, what: str) -> InvalidModelFile:
        return InvalidModelFile(f"{self._path}: {what}", file=self._path)
