"""What `pagedkv serve` can be told, checked before anything is built."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from pagedkv.address import unix_path
from pagedkv.config import ACTIVATIONS, BLOCK_SIZES, PREEMPTION_MODES, EngineConfig, KvShape, require
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument

DEFAULT_MEMORY = "1GiB"
BACKENDS = ("auto", "cpu", "cuda")
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([bkmgt]?)(?:i?b)?\s*$", re.IGNORECASE)


def parse_memory(text: str, available_bytes: int, field: str = "memory") -> int:
    """Return bytes for "2GiB", "512m", or a fraction of the available bytes such as "0.5" or "50%"."""
    fraction = re.match(r"^\s*(0?\.[0-9]+|[0-9.]+\s*%)\s*$", text)
    if fraction:
        number = fraction.group(1)
        share = float(number.rstrip("% ")) / 100 if "%" in number else float(number)
        require(0 < share <= 1, field, "a fraction must be in (0, 1]", text, 1)
        return int(share * available_bytes)
    match = _SIZE.match(text)
    if match is None:
        raise InvalidArgument(f'is not a size like "2GiB" or a fraction like "0.5": {text!r}', field=field)
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()])


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One start of the service. `model` None serves the bare cache in `shape`.

    Without `swap_blocks` or `swap_memory` there is no host pool. `preemption` None means "swap" where there is one.
    """

    model: str | None
    shape: KvShape | None
    host: str = "127.0.0.1"
    port: int = 50051
    metrics_port: int | None = 9400
    backend: str = "auto"
    blocks: int | None = None
    memory: str = DEFAULT_MEMORY
    swap_blocks: int | None = None
    swap_memory: str | None = None
    preemption: str | None = None
    block_size: int = 16
    dtype: DType = DType.FLOAT32
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_batch_tokens: int = 512
    threads: int | None = None
    activations: str = "float32"
    insecure: bool = False
    drain_seconds: float = 30.0

    @property
    def metrics_host(self) -> str:
        """Where the metrics server listens: at the same host, or beside a unix socket on loopback."""
        return "127.0.0.1" if self.host.startswith("unix:") else self.host

    def __post_init__(self) -> None:
        require(self.model is not None or self.shape is not None, "model", "is needed, or --no-model", self.model)
        require(self.model is None or self.shape is None, "model", "and --no-model exclude each other", self.model)
        self._check_ports()
        require(self.backend in BACKENDS, "backend", "must be auto, cpu or cuda", self.backend)
        require(self.blocks is None or self.blocks >= 1, "blocks", "must be at least 1", self.blocks, 1)
        hosts = self.swap_blocks
        require(hosts is None or hosts >= 0, "swap_blocks", "must not be negative", hosts, 0)
        known = self.preemption in (None, *PREEMPTION_MODES)
        require(known, "preemption", f"must be one of {PREEMPTION_MODES}", self.preemption)
        has_host_pool = bool(self.swap_blocks or self.swap_memory)
        fits = self.preemption != "swap" or has_host_pool
        require(fits, "preemption", "needs --swap-memory or --swap-blocks", self.preemption)
        require(self.threads is None or self.threads >= 1, "threads", "must be at least 1", self.threads, 1)
        known = self.activations in ACTIVATIONS
        require(known, "activations", f"must be one of {ACTIVATIONS}", self.activations)
        seconds, is_finite = self.drain_seconds, math.isfinite(self.drain_seconds)
        require(is_finite and seconds >= 0, "drain_seconds", "must be finite and not negative", seconds, 0)
        require(self.block_size in BLOCK_SIZES, "block_size", f"must be one of {BLOCK_SIZES}", self.block_size)
        parse_memory(self.memory, 0)
        if self.swap_memory is not None:
            parse_memory(self.swap_memory, 0, "swap_memory")
        self.engine_config("recompute")

    def _check_ports(self) -> None:
        for field, port in (("port", self.port), ("metrics_port", self.metrics_port or 0)):
            require(0 <= port < 65536, field, "must be in [0, 65535]", port, 65535)
        is_same = self.port == self.metrics_port and self.port > 0 and unix_path(self.host) is None
        require(not is_same, "metrics_port", "must differ from the gRPC port", self.metrics_port)

    def engine_config(self, default_preemption: str) -> EngineConfig:
        """Return the limits of the engine. Raises InvalidArgument."""
        return EngineConfig(
            preemption=self.preemption or default_preemption,
            max_num_seqs=self.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            max_model_len=self.max_model_len,
        )


def load_config_file(context: typer.Context, path: Path | None) -> Path | None:
    """Make the values of a TOML file the defaults below environment variables and flags (typer callback)."""
    if path is None:
        return None
    try:
        values: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    known = {parameter.name for parameter in context.command.params}
    values = {name.replace("-", "_"): value for name, value in values.items()}
    unknown = sorted(set(values) - known)
    if unknown:
        raise typer.BadParameter(f"{path}: unknown options {', '.join(unknown)}")
    context.default_map = {**(context.default_map or {}), **values}
    return path
