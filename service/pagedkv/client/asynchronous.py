"""The asyncio client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack
from weakref import WeakSet

import grpc

from pagedkv.client import answers
from pagedkv.client.arguments import INT32_MAX, integer, optional, seconds, text, texts
from pagedkv.client.channel import channel_options
from pagedkv.client.failure import cut_off, to_exception
from pagedkv.client.requests import (
    allocate_request,
    append_request,
    detokenize_request,
    fork_request,
    generate_request,
    make_attend_request,
    tokenize_request,
    truncate_request,
)
from pagedkv.client.target import check_target
from pagedkv.client.types import (
    Allocation,
    Array,
    AttendOptions,
    Attention,
    Audit,
    CacheInfo,
    Chunk,
    ModelInfo,
    SequenceInfo,
    Swap,
    Usage,
)
from pagedkv.errors import TransportError
from pagedkv.v1 import generation_pb2, generation_pb2_grpc, kv_cache_pb2, kv_cache_pb2_grpc

T = TypeVar("T")


class AsyncClient:
    """A connection to a pagedkv server, to be made and used on an asyncio event loop, as an async context manager.

    Arrays are NumPy's, PyTorch's or whatever has `__dlpack__`, `__array__` or `__array_interface__`: float32, float16
    or bfloat16 as they are, float64 rounded to float32, 8-bit floats as float16. What comes back are float32 arrays
    of the caller's own. Calls raise the exceptions of `pagedkv.errors` that the server raised, with their figures,
    InvalidArgument for arguments that no message can hold, or TransportError. `timeout` is seconds for each call but
    `generate` and `step`; None waits for ever. A server that was away is found again within about a second.

    Other event loops, such as trio's, are not supported: use Client in a thread.
    """

    def __init__(self, target: str, *, timeout: float | None = None, max_message_bytes: int = 32 * 2**20) -> None:
        self._target = check_target(target)
        self._timeout = optional(seconds, "timeout", timeout)
        limit = integer("max_message_bytes", max_message_bytes, 1, INT32_MAX)
        _check_loop()
        self._is_closed = False
        self._steps: WeakSet[AsyncStep] = WeakSet()
        self._channel = grpc.aio.insecure_channel(self._target, options=channel_options(self._target, limit))
        self._kv_cache: Any = kv_cache_pb2_grpc.KvCacheStub(self._channel)  # type: ignore[no-untyped-call]
        self._generation: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls end with TransportError. Idempotent."""
        self._is_closed = True
        for step in list(self._steps):
            await step.close()
        await self._channel.close()

    # -- cache --------------------------------------------------------------------------------------------------

    async def info(self) -> CacheInfo:
        """Return the pool's geometry."""
        return answers.to_cache_info(await self._call(self._kv_cache.GetCacheInfo, kv_cache_pb2.GetCacheInfoRequest()))

    async def allocate(
        self,
        sequence_id: str,
        token_ids: Sequence[int] | Array | None = None,
        *,
        salt: bytes | None = None,
        request_id: str = "",
    ) -> Allocation:
        """Start a sequence on the cached blocks of its prefix.

        Give token ids only where equal ids under one salt mean equal K and V. Raises SequenceExists, SequenceTooLong.
        """
        request = allocate_request(sequence_id, token_ids, salt, request_id)
        return Allocation((await self._call(self._kv_cache.Allocate, request)).cached_token_count)

    async def append(
        self,
        sequence_id: str,
        keys: Array,
        values: Array,
        *,
        layer: int | None = None,
        position: int | None = None,
        token_ids: Sequence[int] | Array | None = None,
    ) -> int:
        """Write K and V [num_tokens, num_kv_heads, head_dim] of a layer, or [num_layers, ...] of all (layer None).

        With a position the call may be repeated safely. Returns the layer's length. Raises PositionMismatch,
        OutOfBlocks, SequenceTooLong; a failed call changed nothing.
        """
        request = append_request(sequence_id, keys, values, layer=layer, position=position, token_ids=token_ids)
        return int((await self._call(self._kv_cache.Append, request)).token_count)

    async def attend(
        self, sequence_ids: str | Sequence[str], queries: Array, *, layer: int, **options: Unpack[AttendOptions]
    ) -> Attention:
        """Attend queries [sum(query_lens), num_heads, head_dim] to sequences of one layer.

        Options: `query_lens` (1 each), `keys` and `values` to write first, their `positions` and `token_ids`, and
        `scale`, `window`, `soft_cap`, `alibi_slopes` [num_heads], `sinks` [num_heads].
        """
        request = make_attend_request(sequence_ids, queries, layer=layer, **options)
        return answers.to_attention(await self._call(self._kv_cache.Attend, request))

    def step(self) -> AsyncStep:
        """Open a stream of attend calls, for a decoder's layer loop: `async with client.step() as step`."""
        step = AsyncStep(self._open(self._kv_cache.Step), self._answered)
        self._steps.add(step)
        return step

    async def fork(self, parent_id: str, child_id: str, *, request_id: str = "") -> int:
        """Start a sequence that shares all blocks of another; returns its length."""
        request = fork_request(parent_id, child_id, request_id)
        return int((await self._call(self._kv_cache.Fork, request)).token_count)

    async def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Keep the first tokens only."""
        await self._call(self._kv_cache.Truncate, truncate_request(sequence_id, num_tokens))

    async def free(self, sequence_ids: str | Sequence[str]) -> None:
        """End a sequence, or several: all or none."""
        request = kv_cache_pb2.FreeRequest(sequence_ids=texts("sequence_ids", sequence_ids))
        await self._call(self._kv_cache.Free, request)

    async def swap_out(self, sequence_ids: str | Sequence[str]) -> Swap:
        """Move a sequence, or several (all or none), to host memory; safe to repeat.

        Raises SwapUnavailable if the server has no host pool, OutOfHostBlocks if it cannot take them.
        """
        request = kv_cache_pb2.SwapOutRequest(sequence_ids=texts("sequence_ids", sequence_ids))
        return answers.to_swap(await self._call(self._kv_cache.SwapOut, request))

    async def swap_in(self, sequence_ids: str | Sequence[str]) -> Swap:
        """Move a sequence, or several (all or none), back; safe to repeat. Raises OutOfBlocks."""
        request = kv_cache_pb2.SwapInRequest(sequence_ids=texts("sequence_ids", sequence_ids))
        return answers.to_swap(await self._call(self._kv_cache.SwapIn, request))

    async def sequence(self, sequence_id: str) -> SequenceInfo:
        """Return one sequence with its block table."""
        request = kv_cache_pb2.GetSequenceRequest(sequence_id=text("sequence_id", sequence_id))
        return answers.to_sequence((await self._call(self._kv_cache.GetSequence, request)).sequence)

    async def sequences(self) -> list[SequenceInfo]:
        """Return all live sequences, the oldest first."""
        found: list[SequenceInfo] = []
        token = ""
        while True:
            request = kv_cache_pb2.ListSequencesRequest(page_size=1000, page_token=token)
            page = await self._call(self._kv_cache.ListSequences, request)
            found += map(answers.to_sequence, page.sequences)
            token = page.next_page_token
            if not token:
                return found

    async def usage(self) -> Usage:
        """Return the blocks by state."""
        return answers.to_usage(await self._call(self._kv_cache.GetUsage, kv_cache_pb2.GetUsageRequest()))

    async def audit(self) -> Audit:
        """Let the server recompute and compare everything."""
        got = await self._call(self._kv_cache.Audit, kv_cache_pb2.AuditRequest())
        return Audit(got.ok, tuple(got.findings))

    # -- generation ---------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | Array | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] | Array = (),
        ignore_eos: bool = False,
        skip_special: bool = True,
        continue_final_message: bool = False,
        salt: bytes | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """Stream a generation from a prompt, token ids or chat messages (exactly one of them).

        A message is {"role": ..., "content": ...}; the content is a string or a list of {"type": "text", "text": ...},
        which are joined. `continue_final_message` lets the model go on with the last of them, which must be of the
        assistant; without `skip_special` control tokens are shown as text. Closing the iterator early cancels the
        generation and frees its blocks.
        """
        request = generate_request(
            prompt,
            token_ids,
            messages,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            skip_special=skip_special,
            continue_final_message=continue_final_message,
            salt=salt,
        )
        return self._stream(request, optional(seconds, "timeout", timeout))

    async def model_info(self) -> ModelInfo:
        """Return the served model's description."""
        request = generation_pb2.GetModelInfoRequest()
        return answers.to_model_info(await self._call(self._generation.GetModelInfo, request))

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return a text's token ids."""
        request = tokenize_request(text, add_special, parse_special)
        return list((await self._call(self._generation.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int] | Array, *, skip_special: bool = True) -> str:
        """Return the text of token ids."""
        request = detokenize_request(token_ids, skip_special)
        return str((await self._call(self._generation.Detokenize, request)).text)

    async def _stream(self, request: generation_pb2.GenerateRequest, timeout: float | None) -> AsyncIterator[Chunk]:
        call = self._open(self._generation.Generate, request, timeout=timeout)
        try:
            messages = aiter(call)
            while (message := await self._answered(anext(messages, None))) is not None:
                yield answers.to_chunk(message)
        finally:
            call.cancel()

    async def _call(self, method: Any, request: Any) -> Any:
        return await self._answered(self._open(method, request, timeout=self._timeout))

    def _open(self, method: Callable[..., T], *args: Any, **options: Any) -> T:
        """Begin a call."""
        try:
            return method(*args, **options)
        except grpc.aio.UsageError:  # gRPC's error for a closed channel
            raise cut_off(is_closed=True) from None

    async def _answered(self, call: Awaitable[T]) -> T:
        """Await a call; its status becomes our exception."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise to_exception(error, self._target) from None
        except grpc.aio.UsageError:
            raise cut_off(is_closed=True) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise cut_off(is_closed=self._is_closed) from None  # gRPC's cancellation, though nobody cancelled this task


class AsyncStep:
    """An open stream of attend calls, answered in order; tasks that share it take turns."""

    def __init__(self, call: Any, answered: Callable[[Awaitable[Any]], Awaitable[Any]]) -> None:
        self._call, self._answered = call, answered
        self._turn = asyncio.Lock()
        self._running: asyncio.Future[Any] | None = None
        self._is_over = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def attend(
        self, sequence_ids: str | Sequence[str], queries: Array, *, layer: int, **options: Unpack[AttendOptions]
    ) -> Attention:
        """Like AsyncClient.attend, without the cost of a new call.

        What ends a call early, an error of the server's or a cancelled task, ends the stream.
        """
        request = make_attend_request(sequence_ids, queries, layer=layer, **options)
        async with self._turn:
            if self._is_over:
                code = await self._call.code() if self._call.done() else grpc.StatusCode.CANCELLED
                raise TransportError("the stream has ended", code=code.name)
            self._running = asyncio.ensure_future(self._exchange(request))
            try:
                response = await self._answered(self._running)
            except BaseException:
                await self.close()  # or the next one might get this one's answer
                raise
        if response is grpc.aio.EOF:
            raise TransportError("the server ended the stream", code=grpc.StatusCode.UNAVAILABLE.name)
        return answers.to_attention(response)

    async def close(self) -> None:
        """End the stream; an attend that waits ends with TransportError."""
        self._is_over = True
        self._call.cancel()
        if self._running is not None:
            self._running.cancel()  # gRPC lets a write wait for ever if its call is cancelled before it is connected

    async def _exchange(self, request: kv_cache_pb2.AttendRequest) -> Any:
        with contextlib.suppress(
            asyncio.InvalidStateError
        ):  # gRPC's, where the server has ended the call: read says how
            await self._call.write(request)
        return await self._call.read()


def _check_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        message = (
            "AsyncClient needs a running asyncio event loop; without one, or under trio, use pagedkv.client.Client"
        )
        raise RuntimeError(message) from None
