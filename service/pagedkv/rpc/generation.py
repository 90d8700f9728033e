"""The Generation service: prompts become requests of the engine, its chunks become messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from pagedkv.config import require
from pagedkv.engine import (
    Engine,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    SamplingParams,
    check_token_ids,
)
from pagedkv.errors import InvalidArgument
from pagedkv.rpc.status import refusal
from pagedkv.v1 import generation_pb2, generation_pb2_grpc

_FINISH_REASONS = {
    None: generation_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: generation_pb2.FINISH_REASON_CANCELLED,
}


class GenerationService(generation_pb2_grpc.GenerationServicer):
    """Streams what the engine generates."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._tokenizer = engine.tokenizer

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream a generation; the end of the call, however it comes, frees its blocks at once."""
        generation = GenerationRequest(
            prompt_token_ids=tuple(self._read_prompt(request)),
            sampling=_read_sampling(request.sampling),
            salt=request.salt if request.HasField("salt") else None,
            trace_context=_trace_context(context),
        )
        stream = self._engine.submit(generation)
        context.add_done_callback(lambda _: stream.cancel())
        try:
            async for chunk in stream:
                yield _to_message(chunk)
        finally:
            stream.cancel()

    async def GetModelInfo(self, request: Any, context: Any) -> generation_pb2.GetModelInfoResponse:
        """Describe the model."""
        config = self._engine.model_config
        return generation_pb2.GetModelInfoResponse(
            architecture=config.architecture,
            vocabulary_size=config.vocab_size,
            token_limit=self._engine.max_model_len,
            eos_token_ids=sorted(config.eos_token_ids),
        )

    async def Tokenize(self, request: Any, context: Any) -> generation_pb2.TokenizeResponse:
        """Return the token ids of a text."""
        token_ids = self._tokenizer.encode(
            request.text, add_special=not request.omit_special, parse_special=request.parse_special
        )
        return generation_pb2.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(self, request: Any, context: Any) -> generation_pb2.DetokenizeResponse:
        """Return the text of token ids."""
        check_token_ids("token_ids", request.token_ids, self._engine.model_config.vocab_size)
        text = self._tokenizer.decode(list(request.token_ids), skip_special=not request.keep_special)
        return generation_pb2.DetokenizeResponse(text=text)

    def _read_prompt(self, request: generation_pb2.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            return list(request.tokens.token_ids)
        if kind == "text":
            require(bool(request.text.text), "prompt", "must not be empty", "")  # some tokenizers make one token of it
            return self._tokenizer.encode(request.text.text)
        if kind == "chat":
            messages = [{"role": turn.role, "content": turn.content} for turn in request.chat.messages]
            return self._tokenizer.apply_chat_template(messages)
        raise InvalidArgument("is required: text, tokens or chat", field="prompt")


class NoModelService(generation_pb2_grpc.GenerationServicer):
    """Answers UNIMPLEMENTED with a reason where the bare cache is served."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Refuse."""
        await _refuse(context)
        yield generation_pb2.GenerateResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        """Refuse."""
        await _refuse(context)

    async def Tokenize(self, request: Any, context: Any) -> Any:
        """Refuse."""
        await _refuse(context)

    async def Detokenize(self, request: Any, context: Any) -> Any:
        """Refuse."""
        await _refuse(context)


async def _refuse(context: Any) -> None:
    message = "this server holds a bare cache and serves no model"
    await context.abort_with_status(refusal(grpc.StatusCode.UNIMPLEMENTED, "NO_MODEL", message))


def _read_sampling(options: generation_pb2.SamplingOptions) -> SamplingParams:
    given = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    return SamplingParams(
        **{name: value for name, value in given.items() if options.HasField(name)},  # type: ignore[arg-type]
        top_k=options.top_k,
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
    )


def _trace_context(context: Any) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent":
            return str(value)
    return None


def _to_message(chunk: GenerationChunk) -> generation_pb2.GenerateResponse:
    return generation_pb2.GenerateResponse(
        text=chunk.text,
        token_ids=chunk.token_ids,
        finish_reason=_FINISH_REASONS[chunk.finish_reason],
        prompt_token_count=chunk.num_prompt_tokens,
        cached_token_count=chunk.num_cached_tokens,
        output_token_count=chunk.num_output_tokens,
    )
