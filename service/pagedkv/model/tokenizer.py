"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagedkv.errors import InvalidArgument
from pagedkv.model.chat_template import ChatTemplate


class TextEncoder(Protocol):
    """The part of `tokenizers.Tokenizer` used here."""

    encode_special_tokens: bool  # True: control tokens in a text are ordinary text

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """Return an encoding with `.ids`."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Control tokens by text, and which of them begins a text."""

    ids: dict[str, int]
    bos_token_id: int | None = None
    add_bos: bool = False
    eos_token_ids: frozenset[int] = frozenset()


class Tokenizer:
    """A model's tokenizer. Safe to call from any thread.

    `token_bytes[id]` holds what each token adds to a text, `None` for control tokens. `strips_space` says that
    encoding puts a space before a text, which decoding a whole text takes away again.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        token_bytes: Sequence[bytes | None],
        special: SpecialTokens,
        *,
        vocab_size: int,
        strips_space: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_token_id = special.bos_token_id
        self.add_bos = special.add_bos
        self.eos_token_ids = special.eos_token_ids
        self._encoder = encoder
        self._lock = threading.Lock()  # the encoder's mode is state
        self._token_bytes = token_bytes
        self._special_ids = special.ids
        self._special_texts = {token_id: text.encode() for text, token_id in special.ids.items()}
        longest_first = sorted(special.ids, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
        self._strips_space = strips_space
        self._chat_template = chat_template

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text.

        Control tokens written in the text stay ordinary text unless `parse_special`. With `add_special` the begin
        token is put first if the model wants one, exactly once: not again where the (parsed) text starts with it.
        Raises InvalidArgument for text that is not valid Unicode.
        """
        ids = self._encode(_check_text(text), parse_special)
        return self._with_bos(ids) if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence; bytes that form no character become replacement marks."""
        text = b"".join(self._bytes(token_id, skip_special) for token_id in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text; nothing for control tokens and for ids without a token."""
        return self._bytes(token_id, skip_special=True)

    def apply_chat_template(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation, the begin token exactly once if the model wants one.

        Control tokens count where the template writes them, never in what the messages say. Raises InvalidArgument
        (field messages) for malformed messages, for ones that the template refuses, and for a model without one.
        """
        if self._chat_template is None:
            raise InvalidArgument("the model has no chat template; send a prompt", field="messages")
        rendered = self._chat_template.render(messages, add_generation_prompt, tuple(self._special_ids))
        if rendered.mark is None:
            return self._with_bos(self._encode(rendered.text, parse_special=True))
        return self._with_bos(self._encode_marked(rendered.text, rendered.mark))

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        with self._lock:
            self._encoder.encode_special_tokens = not parse_special
            return list(self._encoder.encode(text, add_special_tokens=False).ids)

    def _encode_marked(self, text: str, mark: str) -> list[int]:
        """Encode a text whose control tokens all count, but for those that a mark has broken up."""
        assert self._special_pattern is not None  # a mark is only ever put into a control token
        ids: list[int] = []
        start = 0
        for match in self._special_pattern.finditer(text):
            ids += self._encode(text[start : match.start()].replace(mark, ""), parse_special=False)
            ids.append(self._special_ids[match.group()])
            start = match.end()
        return ids + self._encode(text[start:].replace(mark, ""), parse_special=False)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.add_bos or self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]

    def _bytes(self, token_id: int, skip_special: bool) -> bytes:
        if not 0 <= token_id < self.vocab_size:
            raise InvalidArgument(
                f"must be in [0, {self.vocab_size})", field="token_ids", value=token_id, limit=self.vocab_size
            )
        data = self._token_bytes[token_id] if token_id < len(self._token_bytes) else b""
        if data is None:
            return b"" if skip_special else self._special_texts.get(token_id, b"")
        return data


def _check_text(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"is not valid Unicode at character {error.start}", field="prompt") from error
    return text
