"""Large texts and lists are refused by their limits, or worked on while every other call is answered (RL-02, RL-12)."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import grpc
import pytest

from helpers.generation_server import TextTokenizer, generating
from helpers.waiting import PATIENCE, until
from pagedkv import errors
from pagedkv.client import AsyncClient
from pagedkv.v1 import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.usefixtures("backend")
MIB = 2**20
LONG = "a" * 5_000


async def collect(stream):
    return [chunk async for chunk in stream]


class HeldTokenizer(TextTokenizer):
    """Works on a text no sooner than the test lets it, and remembers on which threads."""

    def __init__(self):
        super().__init__()
        self.go = threading.Event()
        self.threads = []

    def _hold(self):
        self.threads.append(threading.current_thread())
        assert self.go.wait(PATIENCE)

    def encode(self, text, **options):
        self._hold()
        return super().encode(text, **options)

    def decode(self, token_ids, **options):
        self._hold()
        return super().decode(list(token_ids), **options)


WORK = {
    "Tokenize": lambda client: client.tokenize(LONG),
    "Detokenize": lambda client: client.detokenize([97] * 5_000),
    "Generate, text": lambda client: collect(client.generate(LONG, max_tokens=1)),
    "Generate, chat": lambda client: collect(
        client.generate(messages=[{"role": "user", "content": "a"}], max_tokens=1)
    ),
}


@pytest.mark.parametrize("name", WORK)
async def test_rl02_rl12_other_calls_are_answered_while_a_text_is_worked_on(name):
    tokenizer = HeldTokenizer()
    async with generating(tokenizer=tokenizer) as served, AsyncClient(served.address) as client:
        work = asyncio.ensure_future(WORK[name](client))
        await until(lambda: tokenizer.threads, "start of the work")
        for _ in range(5):
            await asyncio.wait_for(client.usage(), PATIENCE)
        chunks = await asyncio.wait_for(collect(client.generate(token_ids=[97], max_tokens=3)), PATIENCE)
        assert chunks[-1].num_output_tokens == 3
        assert not work.done()
        tokenizer.go.set()
        await work
    assert all(thread.name.startswith("pagedkv-") for thread in tokenizer.threads)


def chat(*contents, role="user", **options):
    messages = [generation_pb2.ChatMessage(role=role, content=content) for content in contents]
    return {"chat": generation_pb2.ChatPrompt(messages=messages, **options)}


def sampling(**options):
    return {"tokens": {"token_ids": [1]}, "sampling": generation_pb2.SamplingOptions(**options)}


TOO_LARGE = {
    "messages": chat(*[""] * 4_097),
    "stop": sampling(stop=["a"] * 1_000_000),
    "stop_token_ids": sampling(stop_token_ids=[1] * 1_000_000),
    "salt": {"tokens": {"token_ids": [1]}, "salt": b"a" * 1_025},
    "prompt": {"text": {"text": "a" * (MIB + 1)}},
}


@contextlib.asynccontextmanager
async def stub_of():
    async with generating(tokenizer=HeldTokenizer()) as served:
        async with grpc.aio.insecure_channel(served.address) as channel:
            yield generation_pb2_grpc.GenerationStub(channel)


@pytest.mark.parametrize("field", TOO_LARGE)
async def test_rl02_generate_refuses_what_is_too_large_naming_the_field_and_starts_no_work(field):
    async with stub_of() as stub:
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: |max_request_bytes|message") as caught:
            await stub.Generate(generation_pb2.GenerateRequest(**TOO_LARGE[field])).read()
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)


async def test_rl02_prompt_tokens_beyond_the_limit_are_refused_by_their_number():
    async with generating(context_length=1_000) as served, AsyncClient(served.address) as client:
        with pytest.raises(errors.SequenceTooLong) as caught:
            await collect(client.generate(token_ids=[1] * 30_000))
    assert (caught.value.num_tokens, caught.value.limit) == (30_000, 1_000)


async def test_rl02_more_ids_than_are_turned_into_text_at_once_are_refused():
    async with generating() as served, AsyncClient(served.address) as client:
        with pytest.raises(errors.InvalidArgument) as caught:
            await client.detokenize([1] * (2**18 + 1))
        assert (caught.value.field, caught.value.details["limit"]) == ("token_ids", str(2**18))


async def test_nc17_client_asks_for_the_last_message_to_be_continued():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    async with generating() as served, AsyncClient(served.address) as client:
        chunks = await collect(client.generate(messages=messages, continue_final_message=True, max_tokens=1))
        assert chunks[-1].num_prompt_tokens == len("user: a\nassistant: b")
        with pytest.raises(errors.InvalidArgument) as caught:
            await collect(client.generate("a", continue_final_message=True))
        assert caught.value.field == "continue_final_message"


async def test_tk09_client_may_have_control_tokens_shown():
    tokenizer = TextTokenizer(special=dict.fromkeys(range(97, 123), "<x>"))
    async with generating(tokenizer=tokenizer) as served, AsyncClient(served.address) as client:
        shown = await collect(client.generate("a", max_tokens=2, skip_special=False))
        hidden = await collect(client.generate("a", max_tokens=2))
    assert "".join(chunk.text for chunk in shown) == "<x><x>"
    assert "".join(chunk.text for chunk in hidden) == ""
