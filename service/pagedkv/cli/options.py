"""What `pagedkv serve` can be told, checked before anything is built."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from pagedkv.config import ACTIVATIONS, PREEMPTION_MODES, KvShape, require
from pagedkv.dtypes import DType
from pagedkv.errors import InvalidArgument

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
    memory: str = "1GiB"
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
        require((self.model is None) != (self.shape is None), "model", "is needed, or --no-model", self.model)
        require(0 <= self.port < 65536, "port", "must be in [0, 65535]", self.port, 65535)
        require(self.backend in ("auto", "cpu", "cuda"), "backend", "must be auto, cpu or cuda", self.backend)
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
        require(self.drain_seconds >= 0, "drain_seconds", "must not be negative", self.drain_seconds, 0)


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
