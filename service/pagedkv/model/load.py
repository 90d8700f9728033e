"""Open a model: its configuration alone, or all of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pagedkv.compute.backend import Backend
from pagedkv.model.config import ModelConfig
from pagedkv.model.decoder import Decoder
from pagedkv.model.gguf_config import read_gguf_config
from pagedkv.model.gguf_file import GgufFile
from pagedkv.model.hf_config import read_hf_config
from pagedkv.model.safetensors_file import SafetensorsDirectory
from pagedkv.model.tokenizer import Tokenizer
from pagedkv.model.tokenizer_gguf import read_gguf_tokenizer
from pagedkv.model.tokenizer_hf import read_hf_tokenizer
from pagedkv.model.weights import GGUF_NAMES, HF_NAMES, WeightPlan


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run on the backend it was loaded for."""

    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer


def read_model_config(path: Path) -> ModelConfig:
    """Read the configuration of a GGUF file or a Hugging Face directory; no weight is touched.

    Raises UnsupportedModel naming what is not implemented, InvalidModelFile naming the file and what is wrong.
    """
    if path.is_dir():
        return read_hf_config(path)
    file = GgufFile(path)
    try:
        return read_gguf_config(file)
    finally:
        file.close()


def load_model(path: Path, backend: Backend) -> LoadedModel:
    """Load a model; the backend's pool must have the shape of `read_model_config(path).kv_shape(...)`.

    Weights stay memory-mapped as far as the backend lets them. Blocks until loaded: not for the event loop.
    Raises as `read_model_config`; then nothing stays open.
    """
    with _open(path) as (config, tokenizer, plan):
        weights = backend.submit(lambda: plan.load(backend)).result()
    config = replace(
        config,
        bos_token_id=tokenizer.bos_token_id,
        add_bos=tokenizer.add_bos,
        eos_token_ids=tokenizer.eos_token_ids,
    )
    if not config.eos_token_ids:
        warnings.warn(f"{path}: no end token is known; texts end by length or stop strings only", stacklevel=2)
    return LoadedModel(config, Decoder(config, weights, backend), tokenizer)


@contextmanager
def _open(path: Path) -> Iterator[tuple[ModelConfig, Tokenizer, WeightPlan]]:
    """Give everything that loading needs; if it fails, unmap the files."""
    source: GgufFile | SafetensorsDirectory
    if path.is_dir():
        config = read_hf_config(path)
        source = SafetensorsDirectory(path)
    else:
        source = GgufFile(path)
    try:
        if isinstance(source, GgufFile):
            config = read_gguf_config(source)
            parts = config, read_gguf_tokenizer(source, config), WeightPlan(path, config, source, GGUF_NAMES)
        else:
            parts = config, read_hf_tokenizer(path, config), WeightPlan(path, config, source, HF_NAMES)
        yield parts
    except BaseException:
        _close_quietly(source)
        raise


def _close_quietly(source: GgufFile | SafetensorsDirectory) -> None:
    with suppress(BufferError):  # a backend still holds a weight; the map goes with it
        source.close()
