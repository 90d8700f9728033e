"""A real, tiny model with the host tier on: every prompt gets its own tokens, on the CPU and over the virtual GPU."""

from __future__ import annotations

import asyncio
import random

import pytest

from helpers.model_runner import generate_greedily, load_on_numpy
from helpers.tiny_models import make_tiny_model
from helpers.whole_service import whole_service
from pagedkv.errors import InvalidArgument


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(model):
    loaded = load_on_numpy(model)
    return lambda prompt, num_tokens: generate_greedily(loaded, prompt, num_tokens)


async def generate(client, prompt, num_tokens):
    stream = client.generate(token_ids=prompt, max_tokens=num_tokens, ignore_eos=True)
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


def marked_prompt(number: int) -> list[int]:
    """A prompt full of a token that no other prompt has."""
    return [5, 6, 7 + number, 8 + number % 3, 7 + number] * 4


@pytest.mark.parametrize(("backend", "count", "num_tokens", "passes"), [("cpu", 32, 14, 3), ("cuda", 5, 14, 1)])
async def test_sc04_no_answer_holds_another_prompts_tokens(model, reference, backend, count, num_tokens, passes):
    """A pool for few prompts at once, in steps that begin more of them: 32, three times over, on the CPU."""
    prompts = [marked_prompt(number) for number in range(count)]
    expected = [reference(prompt, num_tokens) for prompt in prompts]
    options = {"blocks": 14 if backend == "cpu" else 7, "swap_blocks": 40, "block_size": 8, "max_num_seqs": 16}
    async with whole_service(model, backend, **options) as running:
        for seed in range(passes):
            order = random.Random(seed).sample(range(count), count)
            answers = await asyncio.gather(*(generate(running.client, prompts[at], num_tokens) for at in order))
            assert answers == [expected[at] for at in order]
        stats, usage = running.service.cache.stats, await running.client.usage()
    assert stats.swapped_out_blocks > 0
    assert stats.swapped_in_blocks > 0
    assert (usage.num_swapped, usage.host_free, usage.private + usage.shared) == (0, 40, 0)


async def test_sc06_a_model_goes_on_after_its_first_swap(model, reference):
    prompts = [marked_prompt(number) + [20 + number] * 20 for number in range(2)]
    async with whole_service(model, "cpu", blocks=8, swap_blocks=16) as running:
        answers = await asyncio.gather(*(generate(running.client, prompt, 56) for prompt in prompts))
        assert running.service.cache.stats.swapped_in_blocks > 0
    assert answers == [reference(prompt, 56) for prompt in prompts]


async def test_swap_memory_is_told_at_the_start_and_is_the_pools(model):
    async with whole_service(model, "cpu", swap_memory="1MiB") as running:
        info = await running.client.info()
    assert info.num_host_blocks == 2**20 // info.block_bytes > 0
    assert running.service.options.preemption is None


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"swap_memory": "10B"}, "swap_memory"),
        ({"swap_memory": "plenty"}, "swap_memory"),
        ({"swap_blocks": -1}, "swap_blocks"),
        ({"preemption": "pray"}, "preemption"),
        ({"preemption": "swap"}, "preemption"),
        ({"swap_memory": "900TiB"}, "num_blocks"),
    ],
)
async def test_a_bad_swap_option_is_refused_by_name(model, options, field):
    with pytest.raises(InvalidArgument) as caught:
        async with whole_service(model, "cpu", **options):
            pass
    assert caught.value.field == field
