"""The asyncio client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import numpy.typing as npt

from pagedkv.client.failure import to_exception
from pagedkv.client.target import is_loopback_target
from pagedkv.client.tensors import DTYPES, to_array, to_tensor
from pagedkv.client.types import Allocation, Attention, Audit, CacheInfo, Chunk, ModelInfo, SequenceInfo, Swap, Usage
from pagedkv.errors import InvalidArgument, TransportError
from pagedkv.v1 import generation_pb2, generation_pb2_grpc, kv_cache_pb2, kv_cache_pb2_grpc

T = TypeVar("T")
Array = npt.NDArray[Any]

_IDEMPOTENT = {
    "pagedkv.v1.KvCache": ("GetCacheInfo", "GetSequence", "ListSequences", "GetUsage", "Audit", "SwapOut", "SwapIn"),
    "pagedkv.v1.Generation": ("GetModelInfo", "Tokenize", "Detokenize"),
}
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [
                {"service": service, "method": method} for service, methods in _IDEMPOTENT.items() for method in methods
            ],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}
_FINISH_REASONS = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: None,
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_CANCELLED: "cancelled",
}


class AsyncClient:
    """A connection to a pagedkv server, to be used as an async context manager.

    Arrays are NumPy arrays: float32, float16 or bfloat16 (float64 is rounded). Calls raise the exceptions of
    `pagedkv.errors` that the server raised, with their figures, or TransportError. `timeout` is seconds for each call
    but `generate` and `step`; None waits for ever.
    """

    def __init__(self, target: str, *, timeout: float | None = None, max_message_bytes: int = 64 * 2**20) -> None:
        self._timeout = timeout
        self._channel = grpc.aio.insecure_channel(
            target,
            options=[
                ("grpc.max_receive_message_length", max_message_bytes),
                ("grpc.max_send_message_length", max_message_bytes),
                ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
                ("grpc.enable_http_proxy", int(not is_loopback_target(target))),
            ],
        )
        self._kv_cache: Any = kv_cache_pb2_grpc.KvCacheStub(self._channel)  # type: ignore[no-untyped-call]
        self._generation: Any = generation_pb2_grpc.GenerationStub(self._channel)  # type: ignore[no-untyped-call]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; running calls are cancelled."""
        await self._channel.close()

    # -- cache --------------------------------------------------------------------------------------------------

    async def info(self) -> CacheInfo:
        """Return the pool's geometry."""
        got = await self._call(self._kv_cache.GetCacheInfo, kv_cache_pb2.GetCacheInfoRequest())
        return CacheInfo(
            num_blocks=got.block_count,
            block_size=got.block_size,
            num_layers=got.layer_count,
            num_heads=got.head_count,
            num_kv_heads=got.kv_head_count,
            head_dim=got.head_dim,
            dtype=DTYPES[got.data_type],
            backend=got.backend,
            max_sequence_tokens=got.sequence_token_limit,
            block_bytes=got.block_bytes,
            num_host_blocks=got.host_block_count,
        )

    async def allocate(
        self,
        sequence_id: str,
        token_ids: Sequence[int] | None = None,
        *,
        salt: bytes | None = None,
        request_id: str = "",
    ) -> Allocation:
        """Start a sequence on the cached blocks of its prefix.

        Give token ids only where equal ids under one salt mean equal K and V. Raises SequenceExists, SequenceTooLong.
        """
        request = kv_cache_pb2.AllocateRequest(
            sequence_id=sequence_id, token_ids=_ids(token_ids), salt=salt, request_id=request_id
        )
        return Allocation((await self._call(self._kv_cache.Allocate, request)).cached_token_count)

    async def append(
        self,
        sequence_id: str,
        keys: Array,
        values: Array,
        *,
        layer: int | None = None,
        position: int | None = None,
        token_ids: Sequence[int] | None = None,
    ) -> int:
        """Write K and V [num_tokens, num_kv_heads, head_dim] of a layer, or [num_layers, ...] of all (layer None).

        With a position the call may be repeated safely. Returns the layer's length. Raises PositionMismatch,
        OutOfBlocks, SequenceTooLong; a failed call changed nothing.
        """
        request = kv_cache_pb2.AppendRequest(
            sequence_id=sequence_id,
            keys=to_tensor(keys, "keys"),
            values=to_tensor(values, "values"),
            layer=layer,
            position=position,
            token_ids=_ids(token_ids),
        )
        return int((await self._call(self._kv_cache.Append, request)).token_count)

    async def attend(self, sequence_ids: Sequence[str], queries: Array, *, layer: int, **options: Any) -> Attention:
        """Attend queries [sum(query_lens), num_heads, head_dim] to sequences of one layer.

        Options: `query_lens` (1 each), `keys` and `values` to write first, their `positions` and `token_ids`, and
        `scale`, `window`, `soft_cap`, `alibi_slopes` [num_heads], `sinks` [num_heads].
        """
        request = make_attend_request(sequence_ids, queries, layer=layer, **options)
        return _attention(await self._call(self._kv_cache.Attend, request))

    def step(self) -> AsyncStep:
        """Open a stream of attend calls, for a decoder's layer loop: `async with client.step() as step`."""
        return AsyncStep(self._kv_cache.Step())

    async def fork(self, parent_id: str, child_id: str, *, request_id: str = "") -> int:
        """Start a sequence that shares all blocks of another; returns its length."""
        request = kv_cache_pb2.ForkRequest(parent_id=parent_id, child_id=child_id, request_id=request_id)
        return int((await self._call(self._kv_cache.Fork, request)).token_count)

    async def truncate(self, sequence_id: str, num_tokens: int) -> None:
        """Keep the first tokens only."""
        request = kv_cache_pb2.TruncateRequest(sequence_id=sequence_id, token_count=num_tokens)
        await self._call(self._kv_cache.Truncate, request)

    async def free(self, sequence_ids: str | Sequence[str]) -> None:
        """End a sequence, or several: all or none."""
        await self._call(self._kv_cache.Free, kv_cache_pb2.FreeRequest(sequence_ids=_names(sequence_ids)))

    async def swap_out(self, sequence_ids: str | Sequence[str]) -> Swap:
        """Move a sequence, or several (all or none), to host memory; safe to repeat.

        Raises SwapUnavailable if the server has no host pool, OutOfHostBlocks if it cannot take them.
        """
        request = kv_cache_pb2.SwapOutRequest(sequence_ids=_names(sequence_ids))
        return _swap(await self._call(self._kv_cache.SwapOut, request))

    async def swap_in(self, sequence_ids: str | Sequence[str]) -> Swap:
        """Move a sequence, or several (all or none), back; safe to repeat. Raises OutOfBlocks."""
        request = kv_cache_pb2.SwapInRequest(sequence_ids=_names(sequence_ids))
        return _swap(await self._call(self._kv_cache.SwapIn, request))

    async def sequence(self, sequence_id: str) -> SequenceInfo:
        """Return one sequence with its block table."""
        request = kv_cache_pb2.GetSequenceRequest(sequence_id=sequence_id)
        return _sequence((await self._call(self._kv_cache.GetSequence, request)).sequence)

    async def sequences(self) -> list[SequenceInfo]:
        """Return all live sequences, the oldest first."""
        found: list[SequenceInfo] = []
        token = ""
        while True:
            request = kv_cache_pb2.ListSequencesRequest(page_size=1000, page_token=token)
            page = await self._call(self._kv_cache.ListSequences, request)
            found += map(_sequence, page.sequences)
            token = page.next_page_token
            if not token:
                return found

    async def usage(self) -> Usage:
        """Return the blocks by state."""
        got = await self._call(self._kv_cache.GetUsage, kv_cache_pb2.GetUsageRequest())
        return Usage(
            free=got.free_count,
            cached=got.cached_count,
            private=got.private_count,
            shared=got.shared_count,
            pinned=got.pinned_count,
            in_flight=got.in_flight_count,
            total=got.total_count,
            num_tokens=got.token_count,
            host_free=got.host_free_count,
            host_private=got.host_private_count,
            host_shared=got.host_shared_count,
            host_total=got.host_total_count,
            num_swapped=got.swapped_sequence_count,
            swapped_tokens=got.swapped_token_count,
        )

    async def audit(self) -> Audit:
        """Let the server recompute and compare everything."""
        got = await self._call(self._kv_cache.Audit, kv_cache_pb2.AuditRequest())
        return Audit(got.ok, tuple(got.findings))

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: str | None = None,
        *,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, str]] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int = 0,
        top_p: float | None = None,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        skip_special: bool = True,
        continue_final_message: bool = False,
        salt: bytes | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[Chunk]:
        """Stream a generation from a prompt, token ids or chat messages (exactly one of them).

        `continue_final_message` lets the model go on with the last of the messages, which must be of the assistant.
        Closing the iterator early cancels the generation and frees its blocks.
        """
        request = generation_pb2.GenerateRequest(
            **_prompt(prompt, token_ids, messages, continue_final_message),
            sampling=generation_pb2.SamplingOptions(
                max_tokens=max_tokens,
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                seed=seed,
                stop=stop,
                stop_token_ids=_ids(stop_token_ids, "stop_token_ids"),
                ignore_eos=ignore_eos,
                keep_special=not skip_special,
            ),
            salt=salt,
        )
        call = self._generation.Generate(request, timeout=timeout)
        try:
            async for message in call:
                yield _chunk(message)
        except grpc.aio.AioRpcError as error:
            raise to_exception(error) from None
        finally:
            call.cancel()

    async def model_info(self) -> ModelInfo:
        """Return the served model's description."""
        got = await self._call(self._generation.GetModelInfo, generation_pb2.GetModelInfoRequest())
        return ModelInfo(got.architecture, got.vocabulary_size, got.token_limit, tuple(got.eos_token_ids))

    async def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Return a text's token ids."""
        request = generation_pb2.TokenizeRequest(text=text, omit_special=not add_special, parse_special=parse_special)
        return list((await self._call(self._generation.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of token ids."""
        request = generation_pb2.DetokenizeRequest(token_ids=_ids(token_ids), keep_special=not skip_special)
        return str((await self._call(self._generation.Detokenize, request)).text)

    async def _call(self, method: Any, request: Any) -> Any:
        return await _checked(method(request, timeout=self._timeout))


class AsyncStep:
    """An open stream of attend calls, answered in order."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def attend(self, sequence_ids: Sequence[str], queries: Array, *, layer: int, **options: Any) -> Attention:
        """Like AsyncClient.attend, without the cost of a new call. An error ends the stream."""
        request = make_attend_request(sequence_ids, queries, layer=layer, **options)
        try:
            await self._call.write(request)
            response = await self._call.read()
        except grpc.aio.AioRpcError as error:
            raise to_exception(error) from None
        except asyncio.InvalidStateError:  # what gRPC raises for a write to a call that is over
            raise TransportError("the stream has ended", code=(await self._call.code()).name) from None
        if response is grpc.aio.EOF:
            raise TransportError("the server ended the stream", code=grpc.StatusCode.UNAVAILABLE.name)
        return _attention(response)

    async def close(self) -> None:
        """End the stream."""
        self._call.cancel()


def make_attend_request(
    sequence_ids: Sequence[str],
    queries: Array,
    *,
    layer: int,
    query_lens: Sequence[int] | None = None,
    keys: Array | None = None,
    values: Array | None = None,
    positions: Sequence[int] | None = None,
    token_ids: Sequence[int] | None = None,
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Sequence[float] | Array | None = None,
    sinks: Sequence[float] | Array | None = None,
) -> kv_cache_pb2.AttendRequest:
    """Return the message of one attend call."""
    return kv_cache_pb2.AttendRequest(
        sequence_ids=sequence_ids,
        queries=to_tensor(queries, "queries"),
        layer=layer,
        query_lengths=_ids(query_lens, "query_lens"),
        keys=None if keys is None else to_tensor(keys, "keys"),
        values=None if values is None else to_tensor(values, "values"),
        positions=positions,
        token_ids=_ids(token_ids),
        options=kv_cache_pb2.AttentionOptions(
            scale=scale,
            window=window,
            soft_cap=soft_cap,
            alibi_slopes=[] if alibi_slopes is None else list(alibi_slopes),
            sinks=[] if sinks is None else list(sinks),
        ),
    )


async def _checked(call: Awaitable[T]) -> T:
    """Await a call; its status becomes our exception."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise to_exception(error) from None


def _ids(numbers: Sequence[int] | None, field: str = "token_ids") -> Sequence[int]:
    """Check that the numbers fit the wire's int32."""
    if numbers is None:
        return ()
    for at, number in enumerate(numbers):
        if not -(2**31) <= number < 2**31:
            raise InvalidArgument(f"must fit 32 bits, got {number}", field=f"{field}[{at}]", value=number)
    return [int(number) for number in numbers]


def _names(sequence_ids: str | Sequence[str]) -> Sequence[str]:
    return [sequence_ids] if isinstance(sequence_ids, str) else sequence_ids


def _swap(message: kv_cache_pb2.SwapOutResponse | kv_cache_pb2.SwapInResponse) -> Swap:
    return Swap(message.block_count, message.byte_count, message.kept_block_count)


def _prompt(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    messages: Sequence[Mapping[str, str]] | None,
    continue_final_message: bool,
) -> dict[str, Any]:
    if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
        raise InvalidArgument("give exactly one of prompt, token_ids and messages", field="prompt")
    if continue_final_message and messages is None:
        raise InvalidArgument("needs messages", field="continue_final_message")
    if prompt is not None:
        return {"text": generation_pb2.TextPrompt(text=prompt)}
    if token_ids is not None:
        return {"tokens": generation_pb2.TokenPrompt(token_ids=_ids(token_ids))}
    turns = [generation_pb2.ChatMessage(role=turn["role"], content=turn["content"]) for turn in messages or ()]
    return {"chat": generation_pb2.ChatPrompt(messages=turns, continue_final_message=continue_final_message)}


def _attention(message: Any) -> Attention:
    return Attention(to_array(message.output), to_array(message.lse), message.compute_seconds)


def _sequence(message: kv_cache_pb2.Sequence) -> SequenceInfo:
    return SequenceInfo(
        message.sequence_id,
        message.token_count,
        tuple(message.layer_lengths),
        tuple(message.block_table),
        message.cached_token_count,
        message.state == kv_cache_pb2.SEQUENCE_STATE_SWAPPED,
        tuple(message.host_block_table),
    )


def _chunk(message: generation_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        message.text,
        tuple(message.token_ids),
        _FINISH_REASONS[message.finish_reason],
        message.prompt_token_count,
        message.cached_token_count,
        message.output_token_count,
    )
