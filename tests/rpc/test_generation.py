"""Generation over the wire: streams, their ends, and the blocks that every end gives back."""

import asyncio
import contextlib
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

import grpc
import pytest

from helpers.generation_server import EOS, TextTokenizer, expected_tokens, generating, slow_decoder
from helpers.scripted_engine import VOCAB_SIZE, ScriptedDecoder, make_prompt
from helpers.server import serving
from helpers.waiting import PATIENCE, until
from pagedkv import errors
from pagedkv.client import AsyncClient, Client
from pagedkv.v1 import generation_pb2, generation_pb2_grpc

pytestmark = pytest.mark.usefixtures("backend")


async def collect(stream):
    return [chunk async for chunk in stream]


async def assert_freed(served, seconds=10.0):
    """No sequence is left after a while, and the pool is sound; 10,000 tokens of a slow decoder take 20 s at least."""
    await until(lambda: not served.cache.sequence_ids(), "end of the sequences", seconds)
    usage = served.cache.usage()
    assert usage.free + usage.cached == usage.total
    assert served.cache.audit().ok


@contextlib.asynccontextmanager
async def generation(decoder=None, **options):
    async with generating(decoder, **options) as served, AsyncClient(served.address) as client:
        yield served, client
        await assert_freed(served)


async def test_stream_is_what_the_model_says():
    prompt = list(make_prompt(40))
    async with generation() as (_, client):
        chunks = await collect(client.generate(token_ids=prompt, max_tokens=30))
    expected = expected_tokens(prompt, 30)
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
    assert "".join(chunk.text for chunk in chunks) == bytes(expected).decode()
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert (chunks[-1].num_prompt_tokens, chunks[-1].num_output_tokens) == (40, 30)


async def test_text_tokens_and_chat_give_the_same_stream_for_the_same_prompt():
    text = "user: hi\n"
    async with generation() as (_, client):
        streams = [
            await collect(client.generate(text, max_tokens=9)),
            await collect(client.generate(token_ids=list(text.encode()), max_tokens=9)),
            await collect(client.generate(messages=[{"role": "user", "content": "hi"}], max_tokens=9)),
        ]
    texts = {"".join(chunk.text for chunk in chunks) for chunks in streams}
    assert texts == {bytes(expected_tokens(list(text.encode()), 9)).decode()}


async def test_stream_ends_at_the_models_end_unless_told_to_go_on():
    async with generation(ScriptedDecoder(lambda token_id, position: EOS)) as (_, client):
        assert (await collect(client.generate("a", max_tokens=5)))[-1].finish_reason == "stop"
        assert (await collect(client.generate("a", max_tokens=5, ignore_eos=True)))[-1].num_output_tokens == 5


async def test_repeated_prompt_is_found_in_the_cache_unless_salted():
    prompt = list(make_prompt(100))
    async with generation() as (_, client):
        found = [
            (await collect(client.generate(token_ids=prompt, max_tokens=1, salt=salt)))[-1].num_cached_tokens
            for salt in (None, None, b"a", b"a")
        ]
    assert found == [0, 96, 0, 96]


async def test_model_calls_answer():
    async with generation() as (_, client):
        info = await client.model_info()
        assert (info.architecture, info.vocab_size, info.max_tokens, info.eos_token_ids) == (
            "scripted",
            VOCAB_SIZE,
            20_000,
            (EOS,),
        )
        assert await client.tokenize("h\u00e9") == list("h\u00e9".encode())
        assert await client.detokenize(list("h\u00e9".encode())) == "h\u00e9"
        with pytest.raises(errors.InvalidArgument, match=r"token_ids\[1\]"):
            await client.detokenize([1, VOCAB_SIZE])


BAD_OPTIONS = {
    "GN-17 token id V": ("prompt_token_ids[1]", {"token_ids": [1, VOCAB_SIZE]}),
    "GN-17 token id -1": ("token_ids[0]", {"token_ids": [-1]}),
    "GN-17 token id 2^31": ("token_ids[0]", {"token_ids": [2**31]}),
    "GN-17 token id 2^62": ("token_ids[0]", {"token_ids": [2**62]}),
    "GN-17 no token ids": ("prompt", {"token_ids": []}),
    "empty text": ("prompt", {"prompt": ""}),
    "no prompt": ("prompt", {}),
    "two prompts": ("prompt", {"prompt": "a", "token_ids": [1]}),
    "max_tokens 0": ("max_tokens", {"prompt": "a", "max_tokens": 0}),
    "NaN temperature": ("temperature", {"prompt": "a", "temperature": float("nan")}),
    "temperature -1": ("temperature", {"prompt": "a", "temperature": -1.0}),
    "top_k -1": ("top_k", {"prompt": "a", "top_k": -1}),
    "top_p 0": ("top_p", {"prompt": "a", "top_p": 0.0}),
    "top_p NaN": ("top_p", {"prompt": "a", "top_p": float("nan")}),
    "empty stop text": ("stop", {"prompt": "a", "stop": ["b", ""]}),
    "stop token V": ("stop_token_ids[0]", {"prompt": "a", "stop_token_ids": [VOCAB_SIZE]}),
}


async def test_bad_options_are_refused_by_field():
    async with generation() as (served, client):
        for case, (field, options) in BAD_OPTIONS.items():
            with pytest.raises(errors.InvalidArgument) as caught:
                await collect(client.generate(**options))
            assert caught.value.field == field, case
        assert served.cache.stats.allocated_blocks == 0
        assert (await collect(client.generate("a", max_tokens=2)))[-1].num_output_tokens == 2


async def test_empty_text_is_refused_though_the_tokenizer_makes_a_token_of_it():
    class BeginningTokenizer(TextTokenizer):
        def encode(self, text, **options):
            return [1, *super().encode(text)]

    async with generation(tokenizer=BeginningTokenizer()) as (_, client):
        with pytest.raises(errors.InvalidArgument) as caught:
            await collect(client.generate(""))
        assert caught.value.field == "prompt"
        assert (await collect(client.generate("a", max_tokens=1)))[-1].num_prompt_tokens == 2


async def test_request_without_a_prompt_is_refused_by_the_server():
    async with generation() as (served, _), grpc.aio.insecure_channel(served.address) as channel:
        stub = generation_pb2_grpc.GenerationStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="prompt") as caught:
            await stub.Generate(generation_pb2.GenerateRequest()).read()
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_prompts_that_can_never_run_are_refused():
    async with generation(num_blocks=8, context_length=100) as (_, client):
        with pytest.raises(errors.SequenceTooLong) as too_long:
            await collect(client.generate(token_ids=make_prompt(100)))
        assert too_long.value.limit == 99
        with pytest.raises(errors.SequenceTooLong) as too_large:
            await collect(client.generate(token_ids=make_prompt(129)))
        assert (too_large.value.num_tokens, too_large.value.limit) == (129, 100)


@pytest.mark.parametrize(
    "limited", [{"num_blocks": 32}, {"max_sequence_tokens": 512}, {"limits": {"max_model_len": 512}}]
)
@pytest.mark.parametrize("kind", ["tokens", "text", "chat"])
async def test_sd15_a_prompt_of_600_tokens_where_512_are_allowed_is_too_long_by_name(limited, kind):
    """Whatever allows no more than 512: the pool, the cache or the engine; the model would take 8,192."""
    prompts = {
        "tokens": {"token_ids": make_prompt(600)},
        "text": {"prompt": "a" * 600},
        "chat": {"messages": [{"role": "user", "content": "a" * 593}]},
    }
    async with generation(context_length=8192, **limited) as (served, client):
        with pytest.raises(errors.SequenceTooLong, match="600 tokens, limit 512") as caught:
            await collect(client.generate(**prompts[kind]))
        assert caught.value.limit == 512
        assert not served.cache.sequence_ids()
        chunks = await collect(client.generate(token_ids=make_prompt(511), max_tokens=9))
        assert chunks[-1].num_output_tokens == 1


async def test_closing_the_iterator_frees_the_blocks():
    async with generation(slow_decoder()) as (served, client):
        stream = client.generate(token_ids=make_prompt(50), max_tokens=10_000)
        for _ in range(3):
            await anext(stream)
        assert served.cache.sequence_ids()
        await stream.aclose()
        await assert_freed(served)


async def test_many_streams_closed_early_leave_no_task_behind_gr_02():
    async with generation(slow_decoder()) as (served, client):
        await client.usage()
        before = len(asyncio.all_tasks())

        async def two_chunks(seed):
            stream = client.generate(token_ids=make_prompt(20, seed), max_tokens=10_000)
            await anext(stream)
            await anext(stream)
            await stream.aclose()

        await asyncio.gather(*map(two_chunks, range(40)))
        await assert_freed(served)
        await asyncio.wait_for(client.usage(), PATIENCE)
        await until(lambda: len(asyncio.all_tasks()) <= before, "end of the streams' tasks")


async def test_deadline_frees_the_blocks_of_a_long_stream_gr_15():
    async with generation(slow_decoder()) as (served, client):
        with pytest.raises(errors.TransportError) as caught:
            await collect(client.generate(token_ids=make_prompt(50), max_tokens=10_000, timeout=0.3))
        assert caught.value.code == "DEADLINE_EXCEEDED"
        await assert_freed(served)


async def test_deadline_in_the_past_starts_nothing_gr_15():
    async with generation(slow_decoder()) as (_, client):
        with pytest.raises(errors.TransportError, match="DEADLINE"):
            await collect(client.generate("a", max_tokens=10_000, timeout=-1))


async def test_deadline_while_queued_means_never_run_gr_15():
    decoder = slow_decoder()
    async with generation(decoder, limits={"max_num_seqs": 1}) as (served, client):
        running = client.generate(token_ids=make_prompt(20), max_tokens=10_000)
        await anext(running)
        with pytest.raises(errors.TransportError, match="DEADLINE"):
            await collect(client.generate(token_ids=[7] * 20, timeout=0.3))
        await until(lambda: not served.engine.stats.num_waiting, "end of the request that waits")
        assert len(served.cache.sequence_ids()) == 1
        await running.aclose()
        await assert_freed(served)
    assert all(7 not in step.token_ids for step in decoder.steps)


async def test_waiting_requests_beyond_the_limit_are_refused_at_once_gr_10():
    async with generation(slow_decoder(), limits={"max_num_seqs": 1, "max_waiting": 2}) as (served, client):
        streams = [client.generate(token_ids=make_prompt(20), max_tokens=10_000) for _ in range(3)]
        await anext(streams[0])
        waiting = [asyncio.ensure_future(anext(stream)) for stream in streams[1:]]
        await until(lambda: served.engine.stats.num_waiting == 2, "two requests that wait")
        with pytest.raises(errors.QuotaExceeded):
            await asyncio.wait_for(collect(client.generate("a")), PATIENCE)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def test_slow_reader_holds_no_blocks_and_slows_nobody_gr_05():
    """The engine goes on without the reader; what waits for it grows together and arrives whole."""
    texts = {token_id: bytes([token_id]) * 20_000 for token_id in range(97, 123)}
    async with generation(tokenizer=TextTokenizer(texts)) as (served, client):
        slow = client.generate(token_ids=make_prompt(20), max_tokens=500)
        first = await anext(slow)
        quick = await asyncio.wait_for(collect(client.generate("a", max_tokens=50)), PATIENCE)
        assert quick[-1].num_output_tokens == 50
        await assert_freed(served, PATIENCE)
        rest = await collect(slow)
    expected = expected_tokens(list(make_prompt(20)), 500)
    received = [first, *rest]
    assert [token_id for chunk in received for token_id in chunk.token_ids] == expected
    assert sum(len(chunk.text) for chunk in received) == 500 * 20_000
    assert len(received) < 450  # a reader with its window full gets many tokens at once


async def test_server_without_a_model_says_so_in_every_call(backend):
    async with serving() as served, AsyncClient(served.address) as client:
        calls = [client.model_info(), client.tokenize("a"), client.detokenize([1]), collect(client.generate("a"))]
        for call in calls:
            with pytest.raises(errors.TransportError, match="serves no model") as caught:
                await call
            assert caught.value.code == "UNIMPLEMENTED"
        assert (await client.info()).backend == backend


async def test_child_processes_start_beside_running_streams_gr_06():
    """Whoever embeds the server may start others: one that is executed, and a worker that is spawned."""
    async with generation(slow_decoder()) as (_, client):
        stream = client.generate(token_ids=make_prompt(20), max_tokens=10_000)
        await anext(stream)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "print(6 * 7)", stdout=asyncio.subprocess.PIPE
        )
        assert await asyncio.wait_for(child.communicate(), PATIENCE) == (b"42\n", None)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as workers:
            assert await asyncio.wait_for(asyncio.wrap_future(workers.submit(abs, -7)), PATIENCE) == 7
        await anext(stream)
        await stream.aclose()


async def test_blocking_client_streams_and_cancels():
    async with generation(slow_decoder()) as (served, _):

        def use() -> list[int]:
            with Client(served.address) as client:
                whole = list(client.generate("abc", max_tokens=5))
                for _ in client.generate("abc", max_tokens=10_000):
                    break
                return [token_id for chunk in whole for token_id in chunk.token_ids]

        assert await asyncio.to_thread(use) == expected_tokens(list(b"abc"), 5)
        await assert_freed(served)
