"""transformers as a peer: one static batch through `generate`, which has no continuous batching of its own here."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM


class Peer:
    """The model in float32 or bfloat16, scaled_dot_product_attention, key-value cache on."""

    def __init__(self, model: str, dtype: str, num_threads: int, **_: Any) -> None:
        torch.set_num_threads(num_threads)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.pid = os.getpid()

    def generate(self, prompts: list[list[int]], new_tokens: int, recorder: Any) -> None:
        ids = torch.tensor(prompts)

        def stamp(sequences: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            for index, token_id in enumerate(sequences[:, -1].tolist()):
                recorder.add(index, token_id)
            return torch.zeros(len(sequences), dtype=torch.bool)

        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            stopping_criteria=[stamp],
        )

    def close(self) -> None:
        """Nothing to stop."""
