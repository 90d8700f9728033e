"""The machine's limits for text generation: bytes that must be read, multiply-adds that must be done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from pagedkv.compute.cpu.threads import WorkerPool
from pagedkv.dtypes import DType
from pagedkv.model import read_model_config
from pagedkv.model.gguf_file import GgufFile
from tests.bench.attention_common import ReadLimit
from tests.bench.dense_bench import measure_peak


@dataclass(frozen=True, slots=True)
class Work:
    """What a model costs: `layer_flops` and `head_flops` a token, `kv_flops` a token and key, bytes a step and key."""

    weight_bytes: int
    kv_bytes: int
    layer_flops: int
    head_flops: int
    kv_flops: int

    def prefill_flops(self, num_tokens: int) -> float:
        """Return what one prompt costs; only its last token needs logits."""
        return num_tokens * (self.layer_flops + self.kv_flops * (num_tokens + 1) / 2) + self.head_flops

    def decode_flops(self, context: float) -> float:
        """Return what one more token costs."""
        return self.layer_flops + self.head_flops + self.kv_flops * context

    def decode_bytes(self, concurrency: int, context: float) -> float:
        """Return what a step over `concurrency` sequences must read."""
        return self.weight_bytes + concurrency * context * self.kv_bytes


def model_work(path: Path, dtype: DType) -> Work:
    """Count a GGUF model's work from its tensors; a tied head counts as head."""
    config, file = read_model_config(path), GgufFile(path)
    matrices = {name: entry for name, entry in file.tensors.items() if len(entry.shape) == 2}
    layers = sum(entry.shape[0] * entry.shape[1] for name, entry in matrices.items() if name.startswith("blk."))
    work = Work(
        weight_bytes=sum(entry.num_bytes for entry in file.tensors.values()),
        kv_bytes=2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize,
        layer_flops=2 * layers,
        head_flops=2 * config.vocab_size * config.hidden_size,
        kv_flops=4 * config.num_layers * config.num_heads * config.head_dim,
    )
    file.close()
    return work


class Machine:
    """Read bandwidth and float32 multiply-add peak, sampled between the turns of a run."""

    def __init__(self) -> None:
        self._workers = WorkerPool()
        self._read = ReadLimit()
        self.num_threads = self._workers.num_threads
        self.read_gb_per_s: list[float] = []
        self.peak_gflops: list[float] = []

    def sample(self) -> None:
        """Measure both once more."""
        num_bytes = 1 << 28
        self.read_gb_per_s.append(1e-9 * num_bytes / self._read.seconds(num_bytes))
        self.peak_gflops.append(measure_peak(self._workers))

    def limits(self, work: Work, prompt_tokens: int, new_tokens: int, concurrency: int) -> tuple[float, float]:
        """Return the tokens/s of prefill and decode that reading and multiplying alone would allow."""
        flops, read = 1e9 * median(self.peak_gflops), 1e9 * median(self.read_gb_per_s)
        context = prompt_tokens + new_tokens / 2
        step = max(work.decode_bytes(concurrency, context) / read, concurrency * work.decode_flops(context) / flops)
        return prompt_tokens / work.prefill_flops(prompt_tokens) * flops, concurrency / step

    def close(self) -> None:
        """Stop the threads."""
        self._workers.close()
