"""Special tokens that the files of a Hugging Face directory name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pagedkv.model.hf_config import read_json_file

_LISTS = ("additional_special_tokens", "extra_special_tokens")


def named_special_tokens(directory: Path) -> dict[str, str | list[str]]:
    """Return every named special token by its name, and the lists of further ones.

    A name is a key that ends in `_token`, in special_tokens_map.json or tokenizer_config.json (which wins), or any key
    of the latter's `extra_special_tokens`; a token is a string or an object with `content`.
    """
    found: dict[str, str | list[str]] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        found |= _named(read_json_file(directory / file))
    return found


def _named(options: Mapping[str, Any]) -> dict[str, str | list[str]]:
    found: dict[str, str | list[str]] = {}
    extra = options.get("extra_special_tokens")
    given = {**options, **extra} if isinstance(extra, dict) else options
    for name, value in given.items():
        text = token_text(value)
        if text is not None and (name.endswith("_token") or (isinstance(extra, dict) and name in extra)):
            found[name] = text
        elif name in _LISTS and isinstance(value, list):
            found[name] = [text for text in map(token_text, value) if text is not None]
    return found


def token_text(value: Any) -> str | None:
    """Return the text of a token that is a string or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
