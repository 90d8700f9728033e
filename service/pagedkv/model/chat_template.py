"""Render a conversation with the model's own Jinja template, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedkv.errors import InvalidArgument, UnsupportedModel

_MAX_DEPTH = 16
_MARKS = [chr(code) for code in range(0xE000, 0xF900)]  # private use characters


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation. `mark` is None if no message holds the text of a control token; else it is a
    character that stands inside every such text and nowhere else, to be taken out after splitting."""

    text: str
    mark: str | None


class ChatTemplate:
    """A compiled template. Raises UnsupportedModel if it does not compile."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda format_: datetime.now().strftime(format_),
            bos_token=bos_token,
            eos_token=eos_token,
        )
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # RecursionError, SyntaxError of the code made from it, ...
            raise UnsupportedModel(
                f"the chat template does not compile: {str(error) or type(error).__name__}"
            ) from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, control_texts: Sequence[str]
    ) -> RenderedChat:
        """Render; texts of control tokens inside the messages come out marked (see RenderedChat).

        Raises InvalidArgument (field messages) for malformed messages and for ones that the template refuses.
        """
        check_messages(messages)
        found = [text for text in control_texts if _holds(messages, text)]
        mark = _choose_mark(messages) if found else None
        shown = messages if mark is None else _break_up(messages, sorted(found, key=len, reverse=True), mark)
        try:
            text = self._template.render(messages=shown, add_generation_prompt=add_generation_prompt)
        except InvalidArgument:
            raise
        except Exception as error:  # a template is a program: anything it does wrong is about these messages
            raise InvalidArgument(f"the chat template refuses them: {error}", field="messages") from error
        return RenderedChat(text, mark)


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidArgument unless each message has a role and a content of text."""
    if not messages:
        raise InvalidArgument("must hold at least one message", field="messages")
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role.isidentifier():
            raise InvalidArgument(f"must be a name such as user, got {role!r}", field=f"messages[{index}].role")
        if not isinstance(content, str):
            kind = type(content).__name__
            raise InvalidArgument(f"must be text, got {kind}", field=f"messages[{index}].content")
        try:
            content.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgument("is not valid Unicode", field=f"messages[{index}].content") from error


def _holds(value: Any, text: str) -> bool:
    if isinstance(value, str):
        return text in value
    if isinstance(value, Mapping):
        return any(_holds(item, text) for item in value.values())
    return isinstance(value, Sequence) and any(_holds(item, text) for item in value)


def _choose_mark(messages: Sequence[Mapping[str, Any]]) -> str:
    for mark in _MARKS:
        if not _holds(messages, mark):
            return mark
    raise InvalidArgument("use every private character of Unicode", field="messages")


def _break_up(value: Any, texts: Sequence[str], mark: str, depth: int = 0) -> Any:
    """Return a copy with the mark put after the first character of each of the texts."""
    if depth > _MAX_DEPTH:
        raise InvalidArgument("are nested too deeply", field="messages")
    if isinstance(value, str):
        for text in texts:
            value = value.replace(text, text[0] + mark + text[1:])
        return value
    if isinstance(value, Mapping):
        return {key: _break_up(item, texts, mark, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_break_up(item, texts, mark, depth + 1) for item in value]
    return value


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
