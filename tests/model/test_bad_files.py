"""Damaged and hostile files are refused by name and leave nothing open (LD-09, LD-10, LD-11, LD-13, LD-16)."""

from __future__ import annotations

import json
import struct
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.model_runner import forward, load_on_numpy
from helpers.open_files import open_handles
from helpers.tiny_models import make_tiny_model, write_json
from pagedkv.errors import InvalidModelFile, UnsupportedModel
from pagedkv.model import read_model_config
from pagedkv.model.gguf_file import GgufFile
from pagedkv.model.safetensors_file import SafetensorsFile

UINT32, INT32, UINT64, FLOAT32, STRING = 4, 5, 10, 6, 8
PROMPT = [5, 9, 40]


def packed_string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def gguf_bytes(tensors, *, alignment=None, payload=b"\0" * 4096, version=3) -> bytes:
    """Write a GGUF file by hand: tensors are (name, dims, type, offset), alignment is (value type, packed value)."""
    keys = [] if alignment is None else [("general.alignment", *alignment)]
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys))
    for name, value_type, packed in keys:
        head += packed_string(name) + struct.pack("<I", value_type) + packed
    for name, dims, kind, offset in tensors:
        head += packed_string(name) + struct.pack("<I", len(dims)) + struct.pack(f"<{len(dims)}Q", *dims)
        head += struct.pack("<IQ", kind, offset)
    return head + b"\0" * (-len(head) % 32) + payload


def assert_refused(path, data: bytes, *needles: str) -> None:
    path.write_bytes(data)
    with pytest.raises(InvalidModelFile) as caught:
        GgufFile(path)
    for needle in (path.name, *needles):
        assert needle in str(caught.value)
    assert not open_handles(path)


def test_hand_written_gguf_without_a_fault_is_read(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(gguf_bytes([("a", (8, 2), 0, 0), ("b", (32,), 0, 64)], payload=bytes(range(192))))
    file = GgufFile(path)
    assert file.tensors["a"].shape == (2, 8)
    assert bytes(file.weight("b").data[:3]) == bytes([64, 65, 66])


@pytest.mark.parametrize(
    "alignment",
    [
        (UINT32, struct.pack("<I", 0)),
        (UINT32, struct.pack("<I", 3)),
        (UINT32, struct.pack("<I", 2**31)),
        (UINT64, struct.pack("<Q", 32)),
        (INT32, struct.pack("<i", 32)),
        (FLOAT32, struct.pack("<f", 32.0)),
        (STRING, packed_string("32")),
    ],
    ids=["zero", "three", "2**31", "uint64", "int32", "float32", "string"],
)
def test_ld_11_alignment_of_wrong_type_or_value_is_refused(tmp_path, alignment):
    assert_refused(tmp_path / "x.gguf", gguf_bytes([], alignment=alignment), "general.alignment")


@pytest.mark.parametrize("dims", [(0,), (8, 0), (0, 8), (0, 0, 0, 0)])
def test_ld_11_zero_dimension_is_refused_naming_the_tensor(tmp_path, dims):
    assert_refused(tmp_path / "x.gguf", gguf_bytes([("blk.0.q", dims, 0, 0)]), "blk.0.q", "zero dimension")


@pytest.mark.parametrize(
    ("tensors", "name"),
    [
        ([("t", (4,), 0, 4096)], "t"),
        ([("t", (4,), 0, 2**64 - 32)], "t"),
        ([("t", (2**62, 4), 0, 0)], "t"),
        ([("t", (2**63, 2**63, 2**63, 2**63), 0, 0)], "t"),
        ([("t", (4,), 0, 7)], "t"),
        ([("a", (16,), 0, 0), ("t", (16,), 0, 0)], "t"),
        ([("a", (64,), 0, 0), ("t", (16,), 0, 32)], "t"),
        ([("t", (4,), 0, 0), ("t", (4,), 0, 32)], "t"),
        ([("t", (33,), 8, 0)], "t"),
        ([("t", (4,), 4711, 0)], "t"),
        ([("t", (1, 1, 1, 1, 1), 0, 0)], "t"),
    ],
    ids=[
        "at-end",
        "wraps",
        "huge",
        "product-wraps",
        "unaligned",
        "same-place",
        "overlap",
        "twice",
        "odd-row",
        "type",
        "5d",
    ],
)
def test_ld_13_tensor_outside_its_place_is_refused_naming_it(tmp_path, tensors, name):
    assert_refused(tmp_path / "x.gguf", gguf_bytes(tensors), repr(name))


def test_gguf_tensor_type_that_nothing_turns_into_numbers_is_refused_by_name(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([("t", (256,), 15, 0)]))
    with pytest.raises(UnsupportedModel, match="Q8_K") as caught:
        GgufFile(path)
    assert "Q4_K" in str(caught.value)
    assert not open_handles(path)


@pytest.mark.parametrize(
    ("data", "needle"),
    [
        (b"", "empty"),
        (b"GG", "not a GGUF"),
        (b"PK\x03\x04" + bytes(64), "not a GGUF"),
        (gguf_bytes([], version=1), "version 1"),
        (gguf_bytes([], version=0x03000000), "big-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "do not fit"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63), "does not fit"),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + packed_string("k") + struct.pack("<IIQ", 9, 4, 2**62),
            "does not fit",
        ),
        (
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + packed_string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(8),
            "item type",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + packed_string("k") + struct.pack("<I", 99), "value type 99"),
    ],
    ids=["empty", "short", "foreign", "v1", "big-endian", "counts", "string", "array", "nested", "value-type"],
)
def test_foreign_or_damaged_gguf_header_is_refused(tmp_path, data, needle):
    assert_refused(tmp_path / "x.gguf", data, needle)


@pytest.fixture(scope="module")
def tiny_gguf_bytes(tmp_path_factory) -> bytes:
    return make_tiny_model(tmp_path_factory.mktemp("tiny")).read_bytes()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_ld_13_gguf_truncated_anywhere_is_refused_and_closed(tmp_path_factory, tiny_gguf_bytes, data):
    size = data.draw(st.integers(0, len(tiny_gguf_bytes) - 1))
    assert_refused(tmp_path_factory.mktemp("cut") / "x.gguf", tiny_gguf_bytes[:size])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_gguf_with_random_header_bytes_loads_or_is_refused(tmp_path_factory, tiny_gguf_bytes, data):
    """Whatever a header says, the answer is a configuration or our own error."""
    damaged = bytearray(tiny_gguf_bytes)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, 1_500) | st.integers(0, 12_000))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "x.gguf"
    path.write_bytes(damaged)
    with suppress(UnsupportedModel):
        read_model_config(path)
    assert not open_handles(path)


@pytest.mark.parametrize("format", ["gguf", "hf"])
def test_failed_load_leaves_nothing_open(tmp_path, format):
    """The last check, on the last tensor, fails after everything else was opened."""
    path = make_tiny_model(tmp_path, format=format, weights={"model.norm.weight": np.ones(63, np.float32)})
    with pytest.raises(InvalidModelFile, match=r"norm\.weight.*\(63,\).*\(64,\)"):
        load_on_numpy(path)
    assert not open_handles(tmp_path)


def test_tensor_that_the_architecture_lacks_is_refused_by_name(tmp_path):
    path = make_tiny_model(
        tmp_path, format="hf", weights={"model.layers.0.mlp.router.weight": np.ones((2, 2), np.float32)}
    )
    with pytest.raises(UnsupportedModel, match="router"):
        load_on_numpy(path)
    assert not open_handles(tmp_path)


def make_sharded(tmp_path):
    return make_tiny_model(tmp_path, format="hf", num_shards=3)


def test_shards_named_by_an_index_load_as_one_model(tmp_path):
    split, whole = make_sharded(tmp_path / "a"), make_tiny_model(tmp_path / "b", format="hf")
    np.testing.assert_array_equal(forward(load_on_numpy(split), PROMPT), forward(load_on_numpy(whole), PROMPT))


def test_ld_09_missing_shard_is_refused_with_file_names(tmp_path):
    path = make_sharded(tmp_path)
    (path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InvalidModelFile, match="missing weight files: model-00002-of-00003"):
        load_on_numpy(path)
    assert not open_handles(path)


def test_ld_09_directory_without_weights_is_refused(tmp_path):
    path = make_tiny_model(tmp_path, format="hf")
    (path / "model.safetensors").unlink()
    with pytest.raises(InvalidModelFile, match=r"missing weight files: model\.safetensors"):
        load_on_numpy(path)
    with pytest.raises(InvalidModelFile, match=r"config\.json"):
        load_on_numpy(tmp_path.parent)


@pytest.mark.parametrize(
    ("change", "needle"),
    [
        ({"model.norm.weight": "other.safetensors"}, "other.safetensors"),
        ({"model.norm.weight": "../model.safetensors"}, "plain file name"),
        ({"model.norm.weight": 7}, "plain file name"),
        ({"model.extra.weight": "model-00001-of-00003.safetensors"}, "model.extra.weight"),
    ],
    ids=["wrong-name", "path", "number", "absent-tensor"],
)
def test_ld_09_index_with_wrong_names_is_refused(tmp_path, change, needle):
    path = make_sharded(tmp_path)
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= change
    write_json(index, content)
    with pytest.raises(InvalidModelFile, match=needle):
        load_on_numpy(path)
    assert not open_handles(path)


@pytest.mark.parametrize("cut", [1, 4096, 100_000])
def test_ld_10_truncated_shard_is_refused_with_file_and_tensor(tmp_path, cut):
    path = make_sharded(tmp_path) / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InvalidModelFile, match=r"model-00003-of-00003.*tensor 'model\.") as caught:
        load_on_numpy(path.parent)
    assert caught.value.details["tensor"].startswith("model.")
    assert not open_handles(path.parent)


def safetensors_bytes(header, payload=bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


def entry(begin, end, shape=(4,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("data", "needle"),
    [
        (b"\1\2\3", "no safetensors file"),
        (struct.pack("<Q", 2**63) + bytes(64), "header of"),
        (struct.pack("<Q", 65) + bytes(64), "header of"),
        (safetensors_bytes(b"[1]"), "JSON object"),
        (safetensors_bytes(b"{nope"), "not valid JSON"),
        (safetensors_bytes(b"[" * 100_000), "not valid JSON"),
        (safetensors_bytes({"t": entry(0, 16), "u": entry(8, 24)}), "'t' and 'u' overlap"),
        (safetensors_bytes({"t": entry(56, 72)}), "'t' needs bytes"),
        (safetensors_bytes({"t": entry(16, 0)}), "'t'.*malformed"),
        (safetensors_bytes({"t": entry(-16, 0)}), "'t'.*malformed"),
        (safetensors_bytes({"t": entry(0, 8)}), "'t'.*8 bytes"),
        (safetensors_bytes({"t": entry(0, 0, (0, 4))}), "'t'.*zero dimension"),
        (safetensors_bytes({"t": [1]}), "'t'.*malformed"),
        (safetensors_bytes({"t": entry(0, 16, dtype="I64")}), "'t' has type I64"),
    ],
)
def test_ld_10_malformed_safetensors_header_is_refused(tmp_path, data, needle):
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    with pytest.raises(UnsupportedModel, match=needle) as caught:
        SafetensorsFile(path)
    assert "x.safetensors" in str(caught.value)
    assert not open_handles(path)


def test_ld_16_stray_weight_file_is_ignored_with_a_warning(tmp_path):
    path = make_sharded(tmp_path / "a")
    expected = forward(load_on_numpy(path), PROMPT)
    other = make_tiny_model(tmp_path / "b", format="hf", seed=1)
    (other / "model.safetensors").rename(path / "consolidated.safetensors")
    with pytest.warns(UserWarning, match=r"consolidated\.safetensors"):
        model = load_on_numpy(path)
    np.testing.assert_array_equal(forward(model, PROMPT), expected)
