"""A server whose engine runs the scripted decoder, for tests of the Generation service."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from types import SimpleNamespace
from typing import Any

from helpers.scripted_engine import VOCAB_SIZE, ByteTokenizer, ScriptedDecoder, hashed_next_token
from helpers.server import Serving, serving
from pagedkv.cache import CacheManager
from pagedkv.compute.backend import Backend
from pagedkv.config import EngineConfig, KvShape
from pagedkv.engine import Engine

EOS = 0
_SMALL_SHAPE = KvShape(1, 1, 1, 64)  # the script writes no K and V


class TextTokenizer(ByteTokenizer):
    """One token a byte, both ways."""

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: list[int], *, skip_special: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], *, continue_final_message: bool = False) -> list[int]:
        text = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
        return self.encode(text.removesuffix("\n") if continue_final_message else text)


class _OnDevice:
    """Hands the script's logits out as a tensor of the backend, as real decoders do."""

    def __init__(self, decoder: ScriptedDecoder, backend: Backend) -> None:
        self._decoder, self._backend = decoder, backend

    def forward(self, step: Any) -> Any:
        return self._backend.from_host(self._decoder.forward(step))


def slow_decoder(seconds: float = 0.002) -> ScriptedDecoder:
    """Return a decoder that takes a while for each step, as real ones do."""
    return ScriptedDecoder(before_step=lambda step: time.sleep(seconds))


def generating(
    decoder: ScriptedDecoder | None = None,
    *,
    tokenizer: ByteTokenizer | None = None,
    limits: dict[str, Any] | None = None,
    context_length: int = 20_000,
    num_blocks: int = 2_048,
    **server: Any,
) -> AbstractAsyncContextManager[Serving]:
    """Serve a scripted model on this event loop."""

    def make_engine(backend: Backend, cache: CacheManager) -> Engine:
        return Engine(
            backend=backend,
            cache=cache,
            decoder=_OnDevice(decoder or ScriptedDecoder(), backend),  # type: ignore[arg-type]
            tokenizer=tokenizer or TextTokenizer(),  # type: ignore[arg-type]
            model_config=SimpleNamespace(  # type: ignore[arg-type]
                architecture="scripted",
                vocab_size=VOCAB_SIZE,
                context_length=context_length,
                eos_token_ids=frozenset((EOS,)),
            ),
            config=EngineConfig(**(limits or {})),
        )

    return serving(make_engine=make_engine, shape=_SMALL_SHAPE, num_blocks=num_blocks, **server)


def expected_tokens(
    prompt: list[int], num_tokens: int, next_token: Callable[[int, int], int] = hashed_next_token
) -> list[int]:
    """Walk the script that the decoder follows."""
    found, last = [], prompt[-1]
    for position in range(len(prompt) - 1, len(prompt) - 1 + num_tokens):
        last = next_token(last, position)
        found.append(last)
    return found
