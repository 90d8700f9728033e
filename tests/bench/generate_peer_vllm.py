"""vLLM's CPU backend as a peer: its engine in this process, stepped by hand, continuous batching on."""

from __future__ import annotations

import os
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine in this process: nothing spins between the turns
os.environ["VLLM_USE_AOT_COMPILE"] = "0"  # its cache of compiled models is written and never read back on a CPU
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import vllm
from vllm import EngineArgs, LLMEngine, SamplingParams


class Peer:
    """The model in `dtype`; prompts are not cached between requests."""

    def __init__(self, model: str, dtype: str, num_threads: int, max_sequences: int, max_tokens: int, **_: Any) -> None:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
        arguments = EngineArgs(
            model=model,
            dtype=dtype,
            max_model_len=max_tokens,
            max_num_seqs=max_sequences,
            enable_prefix_caching=False,
        )
        self._engine = LLMEngine.from_engine_args(arguments)
        self.version = f"vLLM {vllm.__version__}"
        self.pid = os.getpid()

    def generate(self, prompts: list[list[int]], new_tokens: int, recorder: Any) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        for index, prompt in enumerate(prompts):
            self._engine.add_request(str(index), {"prompt_token_ids": prompt}, sampling)
        counts = [0] * len(prompts)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                index, token_ids = int(output.request_id), output.outputs[0].token_ids
                recorder.add(index, *token_ids[counts[index] :])
                counts[index] = len(token_ids)

    def close(self) -> None:
        """Nothing to stop: the engine ends with the process."""
