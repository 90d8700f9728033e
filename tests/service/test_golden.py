"""A real model's right tokens through the service: alone, together, and from the prefix cache."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from helpers.whole_service import whole_service
from pagedkv.client import AsyncClient, Client
from pagedkv.model.hub import fetch_smollm2

GOLDEN = json.loads((Path(__file__).parents[1] / "model" / "golden" / "smollm2_greedy.json").read_text())
DECIDED_GAP = 0.05  # below it, two tokens' logits are closer than rounding may move them


def assert_follows_golden_path(token_ids, case):
    """Tokens are equal up to the first step that the golden gap leaves undecided and that went the other way."""
    pairs = zip(token_ids, case["greedy_token_ids"], case["top1_minus_top2_logit"], strict=False)
    for step, (got, expected, gap) in enumerate(pairs):
        if got != expected:
            assert gap <= DECIDED_GAP, f"step {step}: {got} for {expected}, decided by {gap}"
            return
    assert len(token_ids) == len(case["greedy_token_ids"])


def request(case):
    return {"token_ids": case["prompt_token_ids"], "max_tokens": len(case["greedy_token_ids"]), "temperature": 0.0}


def generate(client, case):
    chunks = list(client.generate(**request(case)))
    return [token_id for chunk in chunks for token_id in chunk.token_ids], chunks[-1].num_cached_tokens


@pytest.mark.parametrize("index", range(len(GOLDEN["cases"])))
def test_golden_alone_and_with_its_prompt_cached_gives_the_right_tokens(smollm2_service, index):
    case = GOLDEN["cases"][index]
    with Client(smollm2_service.address) as client:
        alone, _ = generate(client, case)
        again, num_cached_tokens = generate(client, case)
    assert_follows_golden_path(alone, case)
    assert again == alone
    assert num_cached_tokens == (len(case["prompt_token_ids"]) - 1) // 16 * 16


async def test_golden_eight_at_once_give_the_tokens_each_gives_alone(smollm2_service):
    async with AsyncClient(smollm2_service.address) as client:

        async def run(case):
            return [token_id async for chunk in client.generate(**request(case)) for token_id in chunk.token_ids]

        together = await asyncio.gather(*map(run, GOLDEN["cases"]))
        alone = [await run(case) for case in GOLDEN["cases"]]
    for token_ids, case in zip(together, GOLDEN["cases"], strict=True):
        assert_follows_golden_path(token_ids, case)
    assert together == alone


async def test_gn21_copies_in_one_batch_equal_the_single_run(smollm2_service):
    case = GOLDEN["cases"][2]
    async with AsyncClient(smollm2_service.address) as client:

        async def run():
            stream = client.generate(token_ids=case["prompt_token_ids"], max_tokens=60, temperature=0.0)
            return [token_id async for chunk in stream for token_id in chunk.token_ids]

        single = await run()
        assert await asyncio.gather(*(run() for _ in range(7))) == [single] * 7


@pytest.mark.parametrize("prefix", [16, 32, 48, 80])
def test_pc16_a_warm_prefix_gives_the_text_of_a_cold_one(smollm2_service, prefix):
    with Client(smollm2_service.address) as client:
        for suffix in (1, 15, 16, 17):
            shared = [(1000 + prefix * 7 + suffix * 131 + at * 13) % 40_000 for at in range(prefix)]
            prompt = shared + [(2000 + at * 17 + suffix) % 40_000 for at in range(suffix)]
            cold = generate(client, {"prompt_token_ids": prompt, "greedy_token_ids": range(8)})
            warm = generate(client, {"prompt_token_ids": prompt, "greedy_token_ids": range(8)})
            assert warm[0] == cold[0]
            assert warm[1] > cold[1] or len(prompt) <= 16


async def test_smollm2_over_the_virtual_gpu_gives_the_first_four_golden_tokens_of_three_prompts():
    """With the file's weights as float32, as the reference has them; all three prompts in one batch."""
    memory = {"memory_bytes": 1000 << 20, "host_bytes": 128 << 20}
    async with whole_service(fetch_smollm2(), "cuda", **memory) as running:

        async def run(case):
            stream = running.client.generate(token_ids=case["prompt_token_ids"], max_tokens=4, temperature=0.0)
            return [token_id async for chunk in stream for token_id in chunk.token_ids]

        found = await asyncio.gather(*map(run, GOLDEN["cases"][:3]))
    assert found == [case["greedy_token_ids"][:4] for case in GOLDEN["cases"][:3]]
