"""Continuous-batching text generation on the page pool."""

from pagedkv.engine.engine import Engine, EngineStats, check_token_ids
from pagedkv.engine.observer import EngineObserver, NullObserver, StepReport
from pagedkv.engine.request import FinishReason, GenerationChunk, GenerationRequest, SamplingParams
from pagedkv.engine.stream import GenerationStream

__all__ = [
    "Engine",
    "EngineObserver",
    "EngineStats",
    "FinishReason",
    "GenerationChunk",
    "GenerationRequest",
    "GenerationStream",
    "NullObserver",
    "SamplingParams",
    "StepReport",
    "check_token_ids",
]
