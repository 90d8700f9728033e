"""Open a model: its configuration alone, or all of it.

Model files are untrusted. What reading them takes is bounded by their size: 16 bytes of memory for each byte of a GGUF
header, 32 for each byte of JSON, 256 for each byte of a vocabulary and its merges, and some 64 MiB; time goes with it.
Tensors' data stays mapped, or takes what `load_model` says.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pagedkv.compute.backend import Backend
from pagedkv.errors import DeviceError
from pagedkv.model.config import ModelConfig, naming, only_refusals
from pagedkv.model.decoder import Decoder
from pagedkv.model.gguf_config import read_gguf_config
from pagedkv.model.gguf_file import GgufSource
from pagedkv.model.gguf_parts import open_gguf
from pagedkv.model.hf_config import read_hf_config
from pagedkv.model.safetensors_file import SafetensorsDirectory
from pagedkv.model.tokenizer import Tokenizer
from pagedkv.model.tokenizer_gguf import read_gguf_tokenizer
from pagedkv.model.tokenizer_hf import read_hf_tokenizer
from pagedkv.model.weights import GGUF_NAMES, HF_NAMES, Conversion, WeightPlan


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run on the backend it was loaded for."""

    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer


_log = logging.getLogger(__name__)


def read_model_config(path: Path) -> ModelConfig:
    """Read the configuration of a GGUF file or a Hugging Face directory; no weight is touched.

    Raises UnsupportedModel naming what is not implemented, InvalidModelFile naming the file and what is wrong.
    """
    with naming(path), only_refusals(path):
        if path.is_dir():
            return read_hf_config(path)
        file = open_gguf(path)
        try:
            return read_gguf_config(file)
        finally:
            _close_quietly(file)


def load_model(path: Path, backend: Backend, say: Callable[[str], None] = _log.info) -> LoadedModel:
    """Load a model; the backend's pool must have the shape of `read_model_config(path).kv_shape(...)`.

    Weights stay memory-mapped as far as the backend lets them; `say` hears what is converted instead, and the memory
    that it takes. Blocks until loaded: not for the event loop. Raises as `read_model_config`, and DeviceError where
    memory does not suffice; then nothing stays open.
    """
    with _open(path) as (config, tokenizer, plan):
        for conversion in plan.conversions(backend):
            say(_describe(conversion))
        try:
            with naming(path):
                weights = backend.submit(lambda: plan.load(backend)).result()
        except MemoryError as error:
            raise DeviceError(f"{path}: there is not enough memory for its weights") from error
    if not config.eos_token_ids:
        warnings.warn(f"{path}: no end token is known; texts end by length or stop strings only", stacklevel=2)
    return LoadedModel(config, Decoder(config, weights, backend), tokenizer)


@contextmanager
def _open(path: Path) -> Iterator[tuple[ModelConfig, Tokenizer, WeightPlan]]:
    """Give everything that loading needs; if it fails, unmap the files."""
    source: GgufSource | SafetensorsDirectory
    with naming(path), only_refusals(path):
        if path.is_dir():
            config = read_hf_config(path)
            source = SafetensorsDirectory(path)
        else:
            source = open_gguf(path)
    try:
        with naming(path), only_refusals(path):
            if isinstance(source, SafetensorsDirectory):
                plan = WeightPlan(path, config, source, HF_NAMES)  # first: it bounds the vocabulary by the file's size
                tokenizer = read_hf_tokenizer(path, config)
            else:
                config = read_gguf_config(source)
                plan = WeightPlan(source.path, config, source, GGUF_NAMES)
                tokenizer = read_gguf_tokenizer(source, config)
            config = replace(config, bos_token_id=tokenizer.bos_token_id, add_bos=tokenizer.add_bos)
        yield config, tokenizer, plan
    except BaseException:
        _close_quietly(source)
        raise


def _close_quietly(source: GgufSource | SafetensorsDirectory) -> None:
    with suppress(BufferError):  # a backend still holds a weight; the map goes with it
        source.close()


def _describe(conversion: Conversion) -> str:
    return (
        f"{conversion.num_tensors} {conversion.kind} tensors ({conversion.stored_bytes / 1e6:,.1f} MB) become "
        f"{conversion.into} at load, {conversion.loaded_bytes / 1e6:,.1f} MB of memory: no kernel reads "
        f"{conversion.kind} here"
    )
