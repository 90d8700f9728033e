"""Memory that reading a model's files takes is a stated multiple of their size (RL-11)."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import tiny_models
from helpers.gguf_bytes import ARRAY, FLOAT64, INT8, INT16, INT32, STRING, pack_string
from helpers.model_runner import load_on_numpy
from helpers.tiny_models import Vocabulary, byte_level_vocabulary, make_tiny_model, sentencepiece_vocabulary
from pagedkv.errors import InvalidModelFile
from pagedkv.model import read_model_config

SPARE = 64 << 20
SCRIPT = """
import resource, sys
from pathlib import Path
from pagedkv.errors import UnsupportedModel
from pagedkv.model.load import _open
from pagedkv.model.gguf_file import GgufFile
from pagedkv.model.safetensors_file import SafetensorsFile, parse_json

def whole(path):
    with _open(path):
        pass

readers = {"gguf": GgufFile, "safetensors": SafetensorsFile, "json": lambda p: parse_json(p, p.read_bytes())}
read = {**readers, "whole": whole}[sys.argv[1]]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    read(Path(sys.argv[2]))
except UnsupportedModel:
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def memory_for(read: str, path: Path) -> int:
    """Return the bytes that reading a file takes, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, read, str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def write_array(path: Path, item: int, count: int, data: bytes, repeat: int) -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pack_string("a") + struct.pack("<IIQ", ARRAY, item, count)
    path.write_bytes(head + data * repeat)
    return path


def test_rl11_array_of_eight_million_empty_strings_is_refused_before_it_is_read(tmp_path):
    path = write_array(tmp_path / "x.gguf", STRING, 8_000_000, b"", 0)
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 8 * 8_000_000)  # zeros that take no place
    with pytest.raises(InvalidModelFile, match=r"x\.gguf: key 'a': 8000000 strings in arrays, at most 4194304"):
        read_model_config(path)
    assert memory_for("gguf", path) < SPARE


@pytest.mark.parametrize(
    ("item", "data"),
    [
        (INT8, b"\x90"),
        (INT16, b"\x90\x90"),
        (INT32, b"\x90" * 4),
        (FLOAT64, b"\x90" * 8),
        (STRING, pack_string("\U0001f600")),
    ],
    ids=["int8", "int16", "int32", "float64", "string"],
)
def test_rl11_gguf_header_takes_at_most_16_times_its_size(tmp_path, item, data):
    count = (12 << 20) // len(data)
    path = write_array(tmp_path / "x.gguf", item, count, data, count)
    assert memory_for("gguf", path) <= 16 * path.stat().st_size + SPARE


@pytest.mark.parametrize(
    "part", [b"[],", b'{"a":0},', b'"ab",', b"1.5,"], ids=["lists", "objects", "strings", "numbers"]
)
def test_rl11_json_takes_at_most_32_times_its_size(tmp_path, part):
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": [' + part * ((6 << 20) // len(part)) + b"0]}")
    assert memory_for("json", path) <= 32 * path.stat().st_size + SPARE


@pytest.fixture
def narrow(monkeypatch):
    """Models with next to no weights, so that the vocabulary makes their size."""
    for name in ("HIDDEN", "INTERMEDIATE", "NUM_LAYERS", "NUM_HEADS", "NUM_KV_HEADS"):
        monkeypatch.setattr(tiny_models, name, 1)


def longer(vocabulary: Vocabulary, tokens: list[str], kind: int, scored: bool) -> Vocabulary:
    everything = [*vocabulary.tokens, *tokens]
    types = vocabulary.types + [kind] * len(tokens)
    return Vocabulary(vocabulary.model, everything, types, vocabulary.merges, [0.0] * len(everything) if scored else [])


VOCABULARIES = {
    "runs": lambda: [chr(0x4E00 + c) * n for c in range(40) for n in range(1, 129)],
    "control": lambda: [f"<{n:x}>" for n in range(60_000)],
}


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", VOCABULARIES)
def test_rl11_vocabulary_takes_at_most_256_times_its_size(tmp_path, name):
    tokens, scored = VOCABULARIES[name](), name == "runs"
    base = sentencepiece_vocabulary() if scored else byte_level_vocabulary()
    path = make_tiny_model(tmp_path, vocabulary=longer(base, tokens, 1 if scored else 3, scored))
    assert memory_for("whole", path) <= 256 * path.stat().st_size + SPARE


def test_rl11_counts_beyond_any_model_are_refused_by_name(tmp_path):
    header = b"{" + b",".join(b'"%x":[]' % number for number in range(1 << 16 | 1)) + b"}"
    directory = make_tiny_model(tmp_path / "hf", format="hf")
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(InvalidModelFile, match=r"model\.safetensors: 65537 tensors, at most 65536"):
        load_on_numpy(directory)
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1 << 17, 0) + bytes(1 << 18))
    with pytest.raises(InvalidModelFile, match=r"131072 tensors and 0 keys; at most 65536"):
        read_model_config(path)
