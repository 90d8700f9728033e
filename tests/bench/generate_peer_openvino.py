"""OpenVINO GenAI as a peer: its continuous batching pipeline, stepped by hand."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Peer:
    """The exported model; attention and products in the precision that OpenVINO picks for the processor."""

    def __init__(self, model: str, num_threads: int, max_sequences: int, max_tokens: int, **_: Any) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 2  # GB
        scheduler.max_num_seqs = max_sequences
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        options = {"INFERENCE_NUM_THREADS": num_threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", options)
        self.version = f"OpenVINO GenAI {openvino_genai.__version__.split('-')[0]}"
        self.pid = os.getpid()

    def generate(self, prompts: list[list[int]], new_tokens: int, recorder: Any) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = new_tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = [
            self._pipeline.add_request(index, openvino.Tensor(np.array([prompt], np.int64)), config)
            for index, prompt in enumerate(prompts)
        ]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for index, handle in enumerate(handles):
                if handle.can_read():
                    for output in handle.read().values():
                        recorder.add(index, *output.generated_ids)

    def close(self) -> None:
        """Nothing to stop."""
