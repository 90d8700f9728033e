"""The Generation service: prompts become requests of the engine, its chunks become messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from pagedkv.config import MAX_SALT_BYTES, check_count, check_length, require
from pagedkv.engine import (
    Engine,
    FinishReason,
    GenerationChunk,
    GenerationRequest,
    SamplingParams,
    check_token_ids,
)
from pagedkv.engine.request import MAX_STOP_TOKEN_IDS, MAX_STOPS
from pagedkv.errors import InvalidArgument
from pagedkv.model.limits import MAX_MESSAGES, MAX_TOKEN_IDS
from pagedkv.model.tokenizer import check_text
from pagedkv.rpc.status import refusal
from pagedkv.rpc.text_work import TextWork
from pagedkv.template.process import MAX_PROCESSES
from pagedkv.v1 import generation_pb2, generation_pb2_grpc

_SHORT_TEXT = 2_048  # characters that the loop turns into tokens itself, within a millisecond
_NUM_COPIED = 2**14  # ids put into a message in one go: copying them holds the interpreter
_MAX_WAITING = 1_024
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
        self._texts = TextWork("texts", 2, _MAX_WAITING)
        self._chats = TextWork("chats", MAX_PROCESSES, _MAX_WAITING)

    async def Generate(
        self, request: generation_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """Stream a generation; the end of the call, however it comes, frees its blocks at once."""
        sampling, salt = _read_sampling(request.sampling), _read_salt(request)
        generation = GenerationRequest(
            prompt_token_ids=tuple(await self._read_prompt(request)),
            sampling=sampling,
            salt=salt,
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
        text: str = request.text
        check_text("text", text)

        def tokenize() -> generation_pb2.TokenizeResponse:
            token_ids = self._tokenizer.encode(
                text, add_special=not request.omit_special, parse_special=request.parse_special
            )
            response = generation_pb2.TokenizeResponse()
            for at in range(0, len(token_ids), _NUM_COPIED):
                response.token_ids.extend(token_ids[at : at + _NUM_COPIED])
            return response

        return tokenize() if len(text) <= _SHORT_TEXT else await self._texts.run(tokenize)

    async def Detokenize(self, request: Any, context: Any) -> generation_pb2.DetokenizeResponse:
        """Return the text of token ids."""
        token_ids = request.token_ids
        check_count("token_ids", len(token_ids), MAX_TOKEN_IDS)

        def detokenize() -> generation_pb2.DetokenizeResponse:
            check_token_ids("token_ids", token_ids, self._engine.model_config.vocab_size)
            text = self._tokenizer.decode(token_ids, skip_special=not request.keep_special)
            return generation_pb2.DetokenizeResponse(text=text)

        return detokenize() if len(token_ids) <= _SHORT_TEXT else await self._texts.run(detokenize)

    async def _read_prompt(self, request: generation_pb2.GenerateRequest) -> Sequence[int]:
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            self._engine.check_prompt_length(len(request.tokens.token_ids))
            return request.tokens.token_ids
        if kind == "text":
            return await self._encode(request.text.text)
        if kind == "chat":
            return await self._encode_chat(request.chat)
        raise InvalidArgument("is required: text, tokens or chat", field="prompt")

    async def _encode(self, text: str) -> list[int]:
        require(bool(text), "prompt", "must not be empty", "")  # some tokenizers make one token of it
        check_text("prompt", text)
        if len(text) <= _SHORT_TEXT:
            return self._tokenizer.encode(text)
        return await self._texts.run(lambda: self._tokenizer.encode(text))

    async def _encode_chat(self, chat: generation_pb2.ChatPrompt) -> list[int]:
        check_count("messages", len(chat.messages), MAX_MESSAGES)
        messages = [{"role": turn.role, "content": turn.content} for turn in chat.messages]
        is_continued = chat.continue_final_message
        return await self._chats.run(
            lambda: self._tokenizer.apply_chat_template(messages, continue_final_message=is_continued)
        )


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


def _read_salt(request: generation_pb2.GenerateRequest) -> bytes | None:
    check_length("salt", request.salt, MAX_SALT_BYTES)
    return request.salt if request.HasField("salt") else None


def _read_sampling(options: generation_pb2.SamplingOptions) -> SamplingParams:
    check_count("stop", len(options.stop), MAX_STOPS)
    check_count("stop_token_ids", len(options.stop_token_ids), MAX_STOP_TOKEN_IDS)
    given = {name: getattr(options, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    return SamplingParams(
        **{name: value for name, value in given.items() if options.HasField(name)},  # type: ignore[arg-type]
        top_k=options.top_k,
        stop=tuple(options.stop),
        stop_token_ids=tuple(options.stop_token_ids),
        ignore_eos=options.ignore_eos,
        skip_special=not options.keep_special,
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
