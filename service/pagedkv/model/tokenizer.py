"""Text to token ids and back, over the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagedkv.config import require
from pagedkv.errors import InvalidArgument
from pagedkv.model.chat_template import ChatTemplate
from pagedkv.model.limits import MAX_DECODED_BYTES, MAX_TEXT_BYTES
from pagedkv.model.seals import Seals

_NUM_JOINED = 2**14  # tokens put together in one go: joining holds the interpreter


class TextEncoder(Protocol):
    """The part of `tokenizers.Tokenizer` used here."""

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Sequence[Any]:
        """Return an encoding with `.ids` for each text; other threads run meanwhile."""


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Control tokens by text, which of them begins a text, and the tokens that end one."""

    ids: dict[str, int]
    bos_token_id: int | None = None
    add_bos: bool = False
    eos_token_ids: frozenset[int] = frozenset()


class Tokenizer:
    """A model's tokenizer. Safe to call from any thread.

    The encoder knows the control tokens by their seals (see `seals`). `token_bytes[id]` holds what each token adds to a
    text, `None` for control tokens. `strips_space` says that encoding puts a space before a text, which decoding a
    whole text takes away again.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        token_bytes: Sequence[bytes | None],
        special: SpecialTokens,
        *,
        vocab_size: int,
        seals: Seals | None = None,
        strips_space: bool = False,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.bos_token_id = special.bos_token_id
        self.add_bos = special.add_bos
        self.eos_token_ids = special.eos_token_ids
        self._encoder = encoder
        self._seals = seals or Seals(special.ids)
        self._token_bytes = token_bytes
        self._special_texts = {token_id: text for text, token_id in special.ids.items()}
        self._strips_space = strips_space
        self._chat_template = chat_template

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return the ids of a text.

        Control tokens written in the text stay ordinary text unless `parse_special`. With `add_special` the begin
        token is put first if the model wants one, exactly once: not again where the (parsed) text starts with it.
        Raises InvalidArgument for text that is not valid Unicode or longer than MAX_TEXT_BYTES.
        """
        check_text("prompt", text)
        ids = self._encode(self._seals.seal(text) if parse_special else text)
        return self._with_bos(ids) if add_special else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of a whole sequence; bytes that form no character become replacement marks.

        Raises InvalidArgument for an id outside the vocabulary and for ids that stand for more than MAX_DECODED_BYTES.
        """
        data = bytearray()
        for at in range(0, len(ids), _NUM_JOINED):
            data += b"".join([self._bytes(token_id, skip_special) for token_id in ids[at : at + _NUM_JOINED]])
            what = f"must stand for at most {MAX_DECODED_BYTES} bytes of text"
            require(len(data) <= MAX_DECODED_BYTES, "token_ids", what, len(data), MAX_DECODED_BYTES)
        text = data.decode("utf-8", "replace")
        return text.removeprefix(" ") if self._strips_space else text

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text; nothing for control tokens and for ids without a token."""
        return self._bytes(token_id, skip_special=True)

    def special_text(self, token_id: int) -> str:
        """Return the text of a control token; nothing for any other."""
        return self._special_texts.get(token_id, "")

    def apply_chat_template(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Return the ids of a conversation, the begin token exactly once if the model wants one.

        Control tokens count where the template writes them, never in what the messages say, and the whole rendering is
        encoded at once. A last message of the assistant is continued with `continue_final_message`, and only then
        allowed. Blocks while another process renders: not for the event loop. Raises InvalidArgument (field messages)
        for malformed messages, for ones that the template refuses, and for a model without one.
        """
        if self._chat_template is None:
            raise InvalidArgument("the model has no chat template; send a prompt", field="messages")
        if add_generation_prompt or continue_final_message:
            _check_last(messages, continue_final_message)
        rendered = self._chat_template.render(messages, add_generation_prompt, continue_final_message)
        return self._with_bos(self._encode(self._seals.seal(rendered.text, rendered.written_spans())))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

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
            return b"" if skip_special else self.special_text(token_id).encode()
        return data


def check_text(field: str, text: str) -> None:
    """Raise InvalidArgument for text that is not valid Unicode or too long."""
    try:
        num_bytes = len(text) if len(text) > MAX_TEXT_BYTES else len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"is not valid Unicode at character {error.start}", field=field) from error
    require(num_bytes <= MAX_TEXT_BYTES, field, f"must be at most {MAX_TEXT_BYTES} bytes", num_bytes, MAX_TEXT_BYTES)


def _check_last(messages: Sequence[dict[str, Any]], continue_final_message: bool) -> None:
    """Whose message is last decides whether it is answered or continued."""
    last_role = messages[-1].get("role") if messages else None
    if continue_final_message:
        what = "must end with a message of the assistant for continue_final_message"
        require(last_role == "assistant", "messages", what, last_role)
    elif last_role == "assistant":
        raise InvalidArgument(
            "the last is of the assistant: set continue_final_message to have it continued, or end with another role",
            field="messages",
        )
