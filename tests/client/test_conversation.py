"""NC-13: the content of a message is text or text parts; anything else is refused by name, nothing is dropped."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.generation_server import generating
from helpers.waiting import PATIENCE
from pagedkv.client import AsyncClient
from pagedkv.client.conversation import to_turns
from pagedkv.errors import InvalidArgument


def part(text):
    return {"type": "text", "text": text}


def user(content):
    return [{"role": "user", "content": content}]


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/cat.png"}}
REFUSED = {
    "no content": ("messages[0].content", [{"role": "user"}]),
    "content None": ("messages[0].content", user(None)),
    "content a number": ("messages[0].content", user(5)),
    "content bytes": ("messages[0].content", user(b"Hi")),
    "content a part outside of a list": ("messages[0].content", user(part("Hi"))),
    "no parts": ("messages[0].content", user([])),
    "an image": ("messages[0].content", user([IMAGE])),
    "an image after text": ("messages[0].content", user([part("Hi"), IMAGE])),
    "a part of no type": ("messages[0].content", user([{"text": "Hi"}])),
    "a part of an unhashable type": ("messages[0].content", user([{"type": ["text"], "text": "Hi"}])),
    "a part without its text": ("messages[0].content", user([{"type": "text"}])),
    "a part whose text is None": ("messages[0].content", user([part(None)])),
    "a part with more than text": ("messages[0].content", user([{**part("Hi"), "cache_control": {}}])),
    "a part that is a string": ("messages[0].content", user(["Hi"])),
    "a part that is None": ("messages[0].content", user([None])),
    "text that is no Unicode": ("messages[0].content", user("\ud800")),
    "a part that is no Unicode": ("messages[0].content", user([part("\udfff")])),
    "no role": ("messages[0].role", [{"content": "Hi"}]),
    "role None": ("messages[0].role", [{"role": None, "content": "Hi"}]),
    "role a number": ("messages[0].role", [{"role": 1, "content": "Hi"}]),
    "an unknown key": ("messages[0].name", [{"role": "user", "content": "Hi", "name": "Ann"}]),
    "an unknown key of no value": ("messages[0].tool_calls", [{"role": "user", "content": "Hi", "tool_calls": None}]),
    "a key that is no string": ("messages[0].1", [{"role": "user", "content": "Hi", 1: 2}]),
    "the second message": ("messages[1].content", [*user("Hi"), {"role": "assistant", "content": None}]),
    "no message": ("messages", []),
    "a message that is a string": ("messages[0]", ["Hi"]),
    "a message outside of a list": ("messages", {"role": "user", "content": "Hi"}),
    "a string": ("messages", "Hi"),
}


@pytest.mark.parametrize(("field", "messages"), REFUSED.values(), ids=REFUSED.keys())
def test_nc13_whatever_is_no_text_is_refused_by_name(field, messages):
    with pytest.raises(InvalidArgument) as caught:
        to_turns(messages)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1))
def test_nc13_text_parts_are_joined_with_nothing_between(texts):
    for parts in (list(map(part, texts)), tuple(map(part, texts))):
        (turn,) = to_turns(user(parts))
        assert (turn.role, turn.content) == ("user", "".join(texts))


async def collect(stream):
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


async def test_nc13_parts_continue_as_the_text_that_they_make():
    found = []
    async with generating() as served, AsyncClient(served.address, timeout=PATIENCE) as client:
        for content in ("Hi there", [part("Hi"), part(" there")]):
            found.append(await collect(client.generate(messages=user(content), max_tokens=5)))
    assert len(found[0]) == 5
    assert found[1] == found[0]
