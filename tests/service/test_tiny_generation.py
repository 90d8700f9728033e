"""A real, tiny model through engine and wire on each backend: the NumPy reference's tokens, however asked for."""

from __future__ import annotations

import asyncio
import urllib.request

import pytest

from helpers.model_runner import generate_greedily, load_on_numpy
from helpers.tiny_models import make_tiny_model
from helpers.waiting import PATIENCE, until
from helpers.whole_service import whole_service
from pagedkv.errors import SequenceTooLong

PROMPT = [7, 99, 250, 31, 4, 4, 180, 66, 12, 290, 3, 54, 201, 17, 88, 140, 9, 5]
NUM_TOKENS = 6


@pytest.fixture(params=["cpu", "cuda"])
def backend(request):
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(model):
    """What the NumPy reference generates greedily, as a function of the prompt."""
    loaded = load_on_numpy(model)
    return lambda prompt, num_tokens=NUM_TOKENS: generate_greedily(loaded, prompt, num_tokens)


def prompts(count, length=17):
    return [[(at * 37 + index * 101 + index) % 290 + 3 for index in range(length)] for at in range(count)]


async def generate(client, prompt, num_tokens=NUM_TOKENS, **options):
    stream = client.generate(token_ids=prompt, max_tokens=num_tokens, ignore_eos=True, **options)
    return [chunk async for chunk in stream]


def tokens(chunks):
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
async def test_greedy_tokens_are_those_of_the_reference(tmp_path, backend, arch):
    path = make_tiny_model(tmp_path, arch=arch)
    expected = generate_greedily(load_on_numpy(path), PROMPT, 4)
    async with whole_service(path, backend) as running:
        assert running.service.backend.name == backend
        assert tokens(await generate(running.client, PROMPT, 4)) == expected


async def test_tokens_are_streamed_as_they_come_and_the_text_is_theirs(model, reference, backend):
    async with whole_service(model, backend) as running:
        chunks = await generate(running.client, PROMPT)
        text = await running.client.detokenize(reference(PROMPT))
    assert tokens(chunks) == reference(PROMPT)
    assert len(chunks[0].token_ids) < NUM_TOKENS  # the first text is sent at once; later ones may come together
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_prompts_of_all_lengths_at_once_in_small_steps_give_what_each_gives_alone(model, reference, backend):
    """Steps of 16 tokens: prompts are computed in parts, while others decode."""
    asked = [prompt[:length] for prompt, length in zip(prompts(5, 40), (1, 15, 16, 17, 40), strict=True)]
    async with whole_service(model, backend, max_batch_tokens=16, max_num_seqs=8) as running:
        together = await asyncio.gather(*(generate(running.client, prompt, 4) for prompt in asked))
    assert [tokens(chunks) for chunks in together] == [reference(prompt, 4) for prompt in asked]


async def test_a_prompt_in_the_cache_is_found_and_gives_the_same_tokens(model, reference, backend):
    async with whole_service(model, backend) as running:
        cold, warm = await generate(running.client, PROMPT), await generate(running.client, PROMPT)
        longer = await generate(running.client, [*PROMPT, *reference(PROMPT)[:-1], 8], 2)
    assert [chunks[-1].num_cached_tokens for chunks in (cold, warm, longer)] == [0, 16, 16]
    assert tokens(warm) == tokens(cold) == reference(PROMPT)
    assert tokens(longer) == reference([*PROMPT, *reference(PROMPT)[:-1], 8], 2)


async def test_preempted_requests_are_computed_again_and_give_the_same_tokens(model, reference, backend):
    """Four prompts of 17 tokens with 20 to come need 12 blocks; there are 7."""
    async with whole_service(model, backend, blocks=7, metrics_port=0) as running:
        found = await asyncio.gather(*(generate(running.client, prompt, 20) for prompt in prompts(4)))
        metrics = await asyncio.to_thread(read, f"{running.service.metrics_url}/metrics")
        assert running.service.cache.audit().ok
    preemptions = [line for line in metrics.splitlines() if line.startswith("pagedkv_num_preemptions_total{")]
    assert sum(float(line.split()[-1]) for line in preemptions) > 0
    assert [tokens(chunks) for chunks in found] == [reference(prompt, 20) for prompt in prompts(4)]


def read(url):
    with urllib.request.urlopen(url, timeout=PATIENCE) as response:
        return response.read().decode()


async def test_every_repeated_step_counts_as_one_kernel_and_no_operation_counts_twice(model, reference, backend):
    """A step is recorded, or captured, once and repeated: the repeats are kernels of the metrics all the same.

    The CPU backend repeats the prompt's step too; elsewhere its operations count, once a layer.
    """
    async with whole_service(model, backend, metrics_port=0) as running:
        await generate(running.client, PROMPT)
        samples = (await asyncio.to_thread(read, f"{running.service.metrics_url}/metrics")).splitlines()
    names = ("decode_step", "prefill_step", "attend", "write_kv", "linear")
    launches = {name: figure(samples, "launches", name) for name in names}
    assert launches["decode_step"] == NUM_TOKENS - 1
    is_repeated = running.service.backend.repeats_prompts
    assert launches["prefill_step"] == (1 if is_repeated else 0)
    assert launches["attend"] == launches["write_kv"] == (0 if is_repeated else 2)
    assert (launches["linear"] == 0) == is_repeated
    assert figure(samples, "seconds", "decode_step") > 0


def figure(samples, what, kernel):
    (line,) = [line for line in samples if line.startswith(f'pagedkv_kernel_{what}_total{{kernel="{kernel}"}}')]
    return float(line.split()[-1])


async def test_a_stop_text_ends_the_stream_before_it(model, reference, backend):
    async with whole_service(model, backend) as running:
        prompt, count, stop = await find_stop(running.client, reference)
        chunks = await generate(running.client, prompt, stop=[stop])
        text = await running.client.detokenize(reference(prompt)[:count])
    assert "".join(chunk.text for chunk in chunks) == text
    assert (chunks[-1].finish_reason, chunks[-1].num_output_tokens) == ("stop", count + 1)


async def find_stop(client, reference):
    """Return a prompt, and a text that first comes after some tokens of its output."""
    for prompt in prompts(20):
        texts = [await client.detokenize([token_id]) for token_id in reference(prompt)]
        for at in range(1, NUM_TOKENS):
            if texts[at].isascii() and texts[at] and texts[at] not in "".join(texts[:at]):
                return prompt, at, texts[at]
    raise AssertionError("no output has such a text")


async def test_a_cancelled_stream_gives_its_blocks_back_while_others_go_on(model, reference, backend):
    async with whole_service(model, backend) as running:
        other = asyncio.ensure_future(generate(running.client, PROMPT))
        stream = running.client.generate(token_ids=prompts(1)[0], max_tokens=900, ignore_eos=True)
        await anext(stream)
        await stream.aclose()
        assert tokens(await other) == reference(PROMPT)
        await until(lambda: not running.service.cache.sequence_ids(), "end of the sequences")
        usage = running.service.cache.usage()
        assert usage.free + usage.cached == usage.total


async def test_seeded_sampling_gives_the_same_tokens_again(model, backend):
    async with whole_service(model, backend) as running:
        options = {"temperature": 1.0, "top_p": 0.9, "seed": 5}
        first, again = [tokens(await generate(running.client, PROMPT, **options)) for _ in range(2)]
        other = tokens(await generate(running.client, PROMPT, **{**options, "seed": 6}))
    assert first == again != other


async def test_a_prompt_beyond_the_models_context_is_refused(model, backend):
    async with whole_service(model, backend, max_model_len=40) as running:
        with pytest.raises(SequenceTooLong) as caught:
            await generate(running.client, prompts(1, 40)[0])
        assert caught.value.limit == 39
        assert tokens(await generate(running.client, prompts(1, 38)[0], 9))[1:] != []
