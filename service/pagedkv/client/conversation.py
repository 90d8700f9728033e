"""Chat messages: a role and a content each, nothing else; what else they hold is refused, never dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pagedkv.client.arguments import items, refuse, text
from pagedkv.v1 import generation_pb2


def to_turns(messages: Any) -> list[generation_pb2.ChatMessage]:
    """Return the turns of a conversation; contents given as text parts are joined, with nothing between them.

    Raises InvalidArgument that names the place, such as `messages[0].content`.
    """
    turns = items("messages", messages, "messages")
    if not turns:
        refuse("messages", "must hold at least one", turns, 1)
    return [_to_turn(f"messages[{at}]", message) for at, message in enumerate(turns)]


def _to_turn(field: str, message: Any) -> generation_pb2.ChatMessage:
    if not isinstance(message, Mapping):
        refuse(field, "must be a mapping of role and content", message, "a mapping")
    for name in message:
        if name not in ("role", "content"):
            refuse(f"{field}.{name}", "is not known, a message has role and content", message[name], "role, content")
    for name in ("role", "content"):
        if name not in message:
            refuse(f"{field}.{name}", "is required", None, "role, content")
    role, content = text(f"{field}.role", message["role"]), _join(f"{field}.content", message["content"])
    return generation_pb2.ChatMessage(role=role, content=content)


def _join(field: str, content: Any) -> str:
    if isinstance(content, str):
        return text(field, content)
    if not isinstance(content, (list, tuple)) or not content:
        refuse(field, "must be a string or a list of text parts", content, "a string, or text parts")
    return "".join(_part_text(field, at, part) for at, part in enumerate(content))


def _part_text(field: str, at: int, part: Any) -> str:
    """Return the text of {"type": "text", "text": ...}; errors name the content, as its parts have no field."""
    if not isinstance(part, Mapping) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, Mapping) else part
        refuse(field, f'part {at} must be of type "text"', kind, "text")
    if set(part) != {"type", "text"}:
        refuse(field, f"part {at} must have type and text, and nothing else", sorted(map(str, part)), "type, text")
    if not isinstance(part["text"], str):
        refuse(field, f"the text of part {at} must be a string", part["text"], "a string")
    return text(field, part["text"])
