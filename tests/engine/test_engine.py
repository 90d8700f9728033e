"""The engine's laws: text, limits, cancellation, preemption, order. Case ids are those of tests/cases.md."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from helpers.scripted_engine import (
    VOCAB_SIZE,
    ByteTokenizer,
    ScriptedDecoder,
    assert_clean,
    collect,
    forced,
    make_prompt,
    scripted_engine,
    submit,
)
from helpers.waiting import PATIENCE, until
from pagedkv.engine import FinishReason, SamplingParams, check_token_ids
from pagedkv.errors import (
    DeviceLost,
    Draining,
    InvalidArgument,
    NumericalError,
    QuotaExceeded,
    SequenceTooLong,
)


async def generate_alone(prompt, **sampling):
    async with scripted_engine(num_blocks=512) as (engine, _, _):
        return await collect(submit(engine, prompt, **sampling))


@pytest.mark.parametrize("num_tokens", [207, 15, 16, 17, 31, 32, 33])
async def test_ba04_pool_is_clean_after_lengths_around_the_block_edge(num_tokens):
    async with scripted_engine() as (engine, cache, _):
        result = await collect(submit(engine, make_prompt(7), max_tokens=num_tokens - 7))
        assert len(result.token_ids) == num_tokens - 7
        assert_clean(cache)


async def test_ba07_refused_requests_hold_no_block():
    async with scripted_engine(context_length=256) as (engine, cache, _):
        before = cache.usage()
        for _ in range(200):
            with pytest.raises(SequenceTooLong):
                submit(engine, make_prompt(300))
        assert cache.usage() == before
        clipped = await collect(submit(engine, make_prompt(250), max_tokens=50))
        assert (len(clipped.token_ids), clipped.finish_reason) == (6, FinishReason.LENGTH)


async def test_ba13_aborted_streams_give_back_every_block():
    async with scripted_engine(num_blocks=20) as (engine, cache, _):
        for round_ in range(100):
            stream = submit(engine, make_prompt(80, seed=round_), max_tokens=100)
            num_chunks = 0
            async for _ in stream:
                num_chunks += 1
                if num_chunks == 1 + round_ % 20:
                    stream.cancel()
                    assert not cache.sequence_ids()
        last = await collect(submit(engine, make_prompt(300, seed=1000), max_tokens=4))
        assert len(last.token_ids) == 4


async def test_ba14_every_way_to_end_returns_its_place_in_the_batch():
    async with scripted_engine(max_num_seqs=4, max_batch_tokens=64) as (engine, _, _):
        streams = [submit(engine, make_prompt(20, seed), max_tokens=30) for seed in range(50)]
        for stream in streams[::2]:
            stream.cancel()
        for _ in range(3):
            with pytest.raises(InvalidArgument):
                submit(engine, [VOCAB_SIZE])
        await asyncio.gather(*(collect(stream) for stream in streams))
        assert (engine.stats.num_running, engine.stats.num_waiting) == (0, 0)
        again = await asyncio.gather(*(collect(submit(engine, make_prompt(20, seed))) for seed in range(4)))
        assert all(len(result.token_ids) == 8 for result in again)


@pytest.mark.parametrize("length", [16, 63, 64, 65, 128])
async def test_pc01_fully_cached_prompt_still_computes_its_last_token(length):
    async with scripted_engine() as (engine, _, decoder):
        prompt = make_prompt(length)
        first = await collect(submit(engine, prompt))
        second = await collect(submit(engine, prompt))
        assert second.token_ids == first.token_ids
        assert second.num_cached_tokens == (length - 1) // 16 * 16
        assert all(np.diff(step.batch.query_starts).min() > 0 for step in decoder.steps)


async def test_pc12_equal_prompts_in_one_step_never_hit_blocks_that_are_not_filled():
    async with scripted_engine() as (engine, _, _):
        prompt = make_prompt(80)
        streams = [submit(engine, prompt), submit(engine, prompt), submit(engine, (*prompt[:64], 97))]
        results = await asyncio.gather(*map(collect, streams))
        assert [result.num_cached_tokens for result in results] == [0, 0, 0]
        assert results[0].token_ids == results[1].token_ids


async def test_pc13_a_hit_by_a_live_request_does_not_spoil_the_next_hit():
    async with scripted_engine() as (engine, _, _):
        prompt = make_prompt(64)
        await collect(submit(engine, prompt))
        long_lived = submit(engine, prompt, max_tokens=500)
        cached = [(await anext(long_lived)).num_cached_tokens]
        cached.append((await collect(submit(engine, prompt))).num_cached_tokens)
        long_lived.cancel()
        cached.append((await collect(submit(engine, prompt))).num_cached_tokens)
        assert cached == [48, 48, 48]


async def test_pc15_chunked_prefill_publishes_only_full_blocks():
    seen = []
    async with scripted_engine(max_batch_tokens=20, max_num_seqs=8) as (engine, cache, decoder):
        prompt = make_prompt(100)
        decoder.before_step = lambda step: seen.append((int(step.positions[-1]) + 1, cache.probe_prefix(prompt)))
        await collect(submit(engine, prompt, max_tokens=1))
    assert [end for end, _ in seen] == [20, 40, 60, 80, 100]
    assert [hit for _, hit in seen] == [0, 16, 32, 48, 80]  # the full blocks of the chunks before this one


async def test_sd01_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody():
    async with scripted_engine(num_blocks=8) as (engine, _, _):
        with pytest.raises(SequenceTooLong) as caught:
            submit(engine, make_prompt(200))
        assert (caught.value.num_tokens, caught.value.limit) == (200, 128)
        results = await asyncio.gather(*(collect(submit(engine, make_prompt(20, seed))) for seed in range(5)))
        assert all(len(result.token_ids) == 8 for result in results)


async def test_sd02_a_prompt_beyond_the_step_budget_runs_in_chunks():
    async with scripted_engine(max_batch_tokens=64, context_length=512) as (engine, _, decoder):
        result = await collect(submit(engine, make_prompt(100)))
        assert len(result.token_ids) == 8
        assert max(len(step.token_ids) for step in decoder.steps) == 64


async def test_sd03_a_small_pool_serialises_with_bounded_preemptions():
    preempted = []

    class Observer:
        def __getattr__(self, name):
            return (lambda *args: preempted.append(args)) if name == "on_preempted" else lambda *args: None

    async with scripted_engine(num_blocks=6, observer=Observer()) as (engine, _, _):
        prompts = [make_prompt(33, seed) for seed in range(10)]
        results = await asyncio.gather(*(collect(submit(engine, prompt, max_tokens=45)) for prompt in prompts))
    assert [len(result.token_ids) for result in results] == [45] * 10
    assert len(preempted) <= 2 * len(prompts)
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == (await generate_alone(prompt, max_tokens=45)).token_ids


async def test_sd08_a_stream_waits_at_most_one_step_while_prompts_keep_arriving():
    async with scripted_engine(num_blocks=4096, max_batch_tokens=256) as (engine, _, decoder):
        stream = submit(engine, make_prompt(5), max_tokens=100)
        await anext(stream)
        arrivals = iter(range(1, 101))
        decoder.before_step = lambda step: next(arrivals, None) and submit(engine, make_prompt(200, len(decoder.steps)))
        await collect(stream)
        gaps = [1 in np.diff(step.batch.query_starts) for step in decoder.steps[1:100]]
        assert all(gaps)


@pytest.mark.parametrize("after", [1, 15, 16, 17, 60])
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
async def test_sd09_sd12_preemption_changes_no_token_and_no_text(after, times, temperature, mode):
    script = ScriptedDecoder(
        lambda token_id, position: np.sin(np.arange(VOCAB_SIZE, dtype=np.float32) * (position + 1))
    )
    sampling = {"max_tokens": 80, "temperature": temperature, "seed": 7, "ignore_eos": True}
    async with scripted_engine(decoder=ScriptedDecoder(script.next_token)) as (engine, _, _):
        expected = await collect(submit(engine, make_prompt(9), **sampling))
    async with scripted_engine(decoder=script, num_host_blocks=16, preemption=mode) as (engine, _, _):
        scheduler, left = engine._scheduler, times

        def preempt_when_due():
            nonlocal left
            if left and scheduler.running and scheduler.running[0].num_output_tokens == after + times - left:
                left -= 1
                scheduler.preempt(scheduler.running[0])
            return schedule()

        schedule, scheduler.schedule = scheduler.schedule, preempt_when_due
        result = await collect(submit(engine, make_prompt(9), **sampling))
        assert left == 0
    assert result.token_ids == expected.token_ids
    assert result.text == expected.text


@pytest.mark.parametrize("at", [16, 17, 32, 33])
async def test_sd10_sd13_a_resumed_request_prefills_all_its_tokens_and_goes_on(at):
    async with scripted_engine() as (engine, cache, decoder):
        stream = submit(engine, make_prompt(at - 3), max_tokens=43)
        for _ in range(3):
            await anext(stream)
        request = engine._scheduler.running[0]
        num_tokens = len(request.token_ids)
        engine._scheduler.preempt(request)
        cache.flush_prefix_cache()
        steps_before = len(decoder.steps)
        rest = await collect(stream)
        resumed = decoder.steps[steps_before]
        assert len(resumed.token_ids) in (num_tokens, num_tokens + 1)  # a step may have been under way
        assert resumed.token_ids.tolist() == request.token_ids[: len(resumed.token_ids)]
        assert resumed.positions.tolist() == list(range(len(resumed.token_ids)))
        assert len(request.token_ids) == at - 3 + 43
        assert rest.finish_reason is FinishReason.LENGTH
    alone = await generate_alone(make_prompt(at - 3), max_tokens=43)
    assert request.token_ids[at - 3 :] == alone.token_ids


@pytest.mark.parametrize(("length", "num_tokens"), [(62, 2), (63, 1)])
async def test_sd14_output_is_clipped_to_the_model_limit(length, num_tokens):
    async with scripted_engine(context_length=64) as (engine, _, _):
        result = await collect(submit(engine, make_prompt(length), max_tokens=10))
        assert (len(result.token_ids), result.finish_reason) == (num_tokens, FinishReason.LENGTH)


@pytest.mark.parametrize(("length", "limit"), [(64, 63), (65, 64)])
async def test_sd14_a_prompt_that_fills_the_model_is_refused(length, limit):
    async with scripted_engine(context_length=64) as (engine, _, _):
        with pytest.raises(SequenceTooLong) as caught:
            submit(engine, make_prompt(length))
        assert (caught.value.num_tokens, caught.value.limit) == (length, limit)


@pytest.mark.parametrize("max_tokens", [10**9, 2**31 - 1, 2**32])
async def test_sd16_an_enormous_output_limit_is_clipped(max_tokens):
    async with scripted_engine(context_length=512) as (engine, _, _):
        result = await collect(submit(engine, make_prompt(100), max_tokens=max_tokens))
        assert (len(result.token_ids), result.finish_reason) == (412, FinishReason.LENGTH)


async def test_sd17_the_batch_never_passes_its_limit_and_nobody_starves():
    async with scripted_engine(max_num_seqs=4, max_batch_tokens=32) as (engine, _, decoder):
        results = await asyncio.gather(*(collect(submit(engine, make_prompt(50, seed))) for seed in range(8)))
        assert all(len(result.token_ids) == 8 for result in results)
        assert max(len(step.batch.context_lens) for step in decoder.steps) <= 4


TEXTS = {1: b"ABC", 2: b"DEF", 3: b"G", 4: b"HI", 5: b"J", 6: b"X", 7: b"?\n"}


@pytest.mark.parametrize(
    ("token_ids", "stop", "text", "reason"),
    [
        ([1, 2, 3, 4, 5], "DEFGHIJ", "ABC", FinishReason.STOP),
        ([1, 2, 3, 4, 6], "DEFGHIJ", "ABCDEFGHIX", FinishReason.LENGTH),
        ([7, 1, 1, 1, 1], "\n", "?", FinishReason.STOP),
        ([1, 2, 3, 4, 4], "HIJ", "ABCDEFGHIHI", FinishReason.LENGTH),
    ],
)
async def test_gn01_gn02_stop_strings_are_cut_exactly(token_ids, stop, text, reason):
    decoder = ScriptedDecoder(forced(3, token_ids))
    async with scripted_engine(decoder=decoder, tokenizer=ByteTokenizer(TEXTS)) as (engine, _, _):
        result = await collect(submit(engine, make_prompt(3), max_tokens=5, stop=(stop,)))
        assert (result.text, result.finish_reason) == (text, reason)
        assert result.token_ids == token_ids[: len(result.token_ids)]


# After "ab" the model says <|end|> (9), which is no end of the model's own, then "cd".
NAMED_STOPS = [
    (("<|end|>",), True, "ab", 3),
    (("<|end|>",), False, "ab", 3),
    (("b<|end|>",), True, "a", 3),
    (("b<|end|>",), False, "a", 3),
    (("<|end|>c",), True, "ab", 4),
    (("bc",), True, "a", 4),
    (("bc",), False, "ab<|end|>cd", 5),
    (("end", "|>c"), False, "ab<|", 3),
    ((), True, "abcd", 5),
    ((), False, "ab<|end|>cd", 5),
]


@pytest.mark.parametrize(("stop", "skip_special", "text", "num_tokens"), NAMED_STOPS)
async def test_tk09_stop_strings_may_name_control_tokens_shown_or_not(stop, skip_special, text, num_tokens):
    tokenizer = ByteTokenizer(special={9: "<|end|>"})
    decoder = ScriptedDecoder(forced(3, [97, 98, 9, 99, 100]))
    async with scripted_engine(decoder=decoder, tokenizer=tokenizer) as (engine, _, _):
        stream = submit(engine, make_prompt(3), max_tokens=5, stop=stop, skip_special=skip_special)
        result = await collect(stream)
    assert (result.text, len(result.token_ids)) == (text, num_tokens)
    assert result.finish_reason == ("length" if text.endswith("d") else "stop")


@pytest.mark.parametrize("skip_special", [True, False])
@pytest.mark.parametrize(("stop", "text"), [((), "ab"), (("b<|end|>",), "a"), (("b<|endless|>",), "ab")])
async def test_tk09_the_token_that_ends_the_text_is_never_shown(skip_special, stop, text):
    tokenizer = ByteTokenizer(special={9: "<|end|>"})
    decoder = ScriptedDecoder(forced(3, [97, 98, 9]))
    async with scripted_engine(decoder=decoder, tokenizer=tokenizer, eos_token_ids=(9,)) as (engine, _, _):
        result = await collect(submit(engine, make_prompt(3), max_tokens=9, stop=stop, skip_special=skip_special))
    assert (result.text, result.finish_reason) == (text, "stop")


LIMITS = {
    "stop: must hold at most 64": {"stop": ("a",) * 65},
    "stop: entry 1 must hold 1 to 256": {"stop": ("a", "b" * 257)},
    "stop: entry 0 must hold 1 to 256": {"stop": ("",)},
    "stop_token_ids: must hold at most 1024": {"stop_token_ids": (1,) * 1_025},
}


@pytest.mark.parametrize("message", LIMITS)
def test_rl02_more_than_a_field_may_hold_is_refused_naming_field_limit_and_value(message):
    with pytest.raises(InvalidArgument, match=message) as caught:
        SamplingParams(**LIMITS[message])
    assert {"field", "limit", "value"} <= set(caught.value.details)


def test_rl02_token_ids_are_checked_anywhere_in_a_long_list():
    ids = list(range(100)) * 500
    check_token_ids("token_ids", ids, 100)
    for at, bad in [(0, -1), (16_384, 100), (49_999, 2**40)]:
        with pytest.raises(InvalidArgument, match=rf"token_ids\[{at}\]: must be in \[0, 100\), got {bad}"):
            check_token_ids("token_ids", [*ids[:at], bad, *ids[at + 1 :]], 100)


@pytest.mark.parametrize(("ignore_eos", "num_tokens"), [(False, 5), (True, 8)])
async def test_gn04_ignore_eos_passes_every_end_token_but_not_the_callers_own(ignore_eos, num_tokens):
    decoder = ScriptedDecoder(forced(3, [100, 101, 102, 103, 7, 104, 105, 9, 106]))
    async with scripted_engine(decoder=decoder, eos_token_ids=(2, 7)) as (engine, _, _):
        result = await collect(
            submit(engine, make_prompt(3), max_tokens=20, ignore_eos=ignore_eos, stop_token_ids=(9,))
        )
        assert (len(result.token_ids), result.finish_reason) == (num_tokens, FinishReason.STOP)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, -1])
async def test_gn16_a_stop_id_outside_the_vocabulary_is_refused(token_id):
    async with scripted_engine() as (engine, _, _):
        with pytest.raises(InvalidArgument, match=r"stop_token_ids\[1\]"):
            submit(engine, make_prompt(3), stop_token_ids=(1, token_id))


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, 2**31, 2**62])
async def test_gn17_a_prompt_id_outside_the_vocabulary_is_refused_by_position(token_id):
    async with scripted_engine() as (engine, _, _):
        with pytest.raises(InvalidArgument, match=r"prompt_token_ids\[2\]"):
            submit(engine, (1, 2, token_id))
        with pytest.raises(InvalidArgument, match="prompt"):
            submit(engine, ())


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
async def test_gn18_a_row_of_bad_logits_ends_its_own_request_only(bad):
    def script(token_id, position):
        return np.full(VOCAB_SIZE, bad, dtype=np.float32) if token_id == 98 else 97

    async with scripted_engine(decoder=ScriptedDecoder(script)) as (engine, _, _):
        good, broken = submit(engine, (97,) * 5), submit(engine, (98,) * 5)
        assert (await collect(good)).token_ids == [97] * 8
        with pytest.raises(NumericalError):
            await collect(broken)


async def test_cancel_in_the_queue_never_runs():
    async with scripted_engine(max_num_seqs=1, max_batch_tokens=16) as (engine, _, decoder):
        running, queued = submit(engine, make_prompt(5), max_tokens=20), submit(engine, (1, 2, 3))
        queued.cancel()
        await collect(running)
        assert (await collect(queued)).finish_reason is FinishReason.CANCELLED
        assert not any(1 in step.token_ids for step in decoder.steps)


async def test_a_lost_device_ends_every_request_and_refuses_new_ones():
    def explode(step):
        raise DeviceLost("the device is gone")

    async with scripted_engine(decoder=ScriptedDecoder(before_step=explode)) as (engine, _, _):
        streams = [submit(engine, make_prompt(5, seed)) for seed in range(3)]
        for stream in streams:
            with pytest.raises(DeviceLost):
                await collect(stream)
        assert not engine.is_healthy
        with pytest.raises(DeviceLost):
            submit(engine, make_prompt(5))


async def test_too_many_waiting_requests_are_refused():
    async with scripted_engine(max_waiting=2) as (engine, _, _):
        streams = [submit(engine, make_prompt(5, seed)) for seed in range(2)]
        with pytest.raises(QuotaExceeded):
            submit(engine, make_prompt(5))
        await asyncio.gather(*map(collect, streams))


async def test_stop_refuses_new_requests_and_lets_running_ones_end():
    async with scripted_engine() as (engine, _, _):
        stream = submit(engine, make_prompt(5), max_tokens=50)
        stopping = asyncio.create_task(engine.stop(5.0))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            submit(engine, make_prompt(5))
        assert len((await collect(stream)).token_ids) == 50
        await stopping


async def test_a_slow_reader_gets_everything_in_fewer_chunks():
    async with scripted_engine() as (engine, _, _):
        stream = submit(engine, make_prompt(5), max_tokens=50)
        await anext(stream)
        while engine.stats.num_running:
            await asyncio.sleep(0)
        rest = await collect(stream)
        assert len(rest.chunks) == 1
        assert len(rest.token_ids) == 49


async def test_requests_wait_while_another_holder_has_the_pool_and_run_when_it_lets_go():
    async with scripted_engine(num_blocks=8) as (engine, cache, _):
        cache.allocate("holder")
        cache.commit(cache.reserve("holder", 8 * 16))
        waiting = asyncio.create_task(collect(submit(engine, make_prompt(20))))
        await until(lambda: engine.stats.num_waiting == 1, "request that waits")
        cache.free("holder")
        assert len((await asyncio.wait_for(waiting, PATIENCE)).token_ids) == 8
