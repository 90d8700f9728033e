"""A model's own chat template: checked conversations in, text with its written runs out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from pagedkv.config import require
from pagedkv.errors import InvalidArgument
from pagedkv.model.limits import MAX_MESSAGES, MAX_ROLE_LENGTH, MAX_TEXT_BYTES
from pagedkv.template.process import RenderingFailed, TemplateProcesses


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation and the lengths of its runs, said by messages and written by the template in turn."""

    text: str
    run_lengths: Sequence[int]

    def written_spans(self) -> Iterator[tuple[int, int]]:
        """Yield the spans [start, end) that the template wrote."""
        ends = accumulate(self.run_lengths)
        return (
            (end - length, end) for at, (length, end) in enumerate(zip(self.run_lengths, ends, strict=True)) if at % 2
        )


class ChatTemplate:
    """A template and the special tokens that the model's files name for it (`bos_token` and so on).

    Nothing of it runs before the first conversation: a template that does not parse fails conversations only.
    Rendering is bounded in processor time, memory and output (see `pagedkv.template`).
    """

    def __init__(self, source: str, special: Mapping[str, str | Sequence[str]] | None = None) -> None:
        self._processes = TemplateProcesses(source, special or {})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> RenderedChat:
        """Render. Blocks until another process has done so: not for the event loop.

        With `continue_final_message` the text ends with what the template leaves of the last message, for the model to
        go on with it. Raises InvalidArgument (field messages) for malformed messages, and with the template's own words
        for ones that it refuses, or takes too long over.
        """
        check_messages(messages)
        request = {
            "messages": [{"role": turn["role"], "content": turn["content"]} for turn in messages],
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "continue_final_message": continue_final_message,
        }
        try:
            return RenderedChat(*self._processes.render(request))
        except RenderingFailed as error:
            raise InvalidArgument(f"the chat template refuses them: {error}", field="messages") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidArgument unless each message has a role and a content of text, within the limits."""
    count = len(messages)
    require(1 <= count <= MAX_MESSAGES, "messages", f"must hold 1 to {MAX_MESSAGES} messages", count, MAX_MESSAGES)
    num_bytes = 0
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or len(role) > MAX_ROLE_LENGTH or not role.isidentifier():
            what = f"must be a name such as user, of at most {MAX_ROLE_LENGTH} characters, got {str(role)[:80]!r}"
            raise InvalidArgument(what, field=f"messages[{index}].role", limit=MAX_ROLE_LENGTH)
        if not isinstance(content, str):
            kind = type(content).__name__
            raise InvalidArgument(f"must be text, got {kind}", field=f"messages[{index}].content")
        try:
            num_bytes += len(content.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InvalidArgument("is not valid Unicode", field=f"messages[{index}].content") from error
        what = f"must hold at most {MAX_TEXT_BYTES} bytes of text together"
        require(num_bytes <= MAX_TEXT_BYTES, f"messages[{index}].content", what, num_bytes, MAX_TEXT_BYTES)
