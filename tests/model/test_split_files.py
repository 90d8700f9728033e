"""A model split over several GGUF files loads from any part; a part that is wrong is named (NC-20)."""

from __future__ import annotations

import shutil

import gguf
import numpy as np
import pytest

from helpers.model_runner import forward, load_on_numpy
from helpers.open_files import open_handles
from helpers.tiny_models import _add_value, make_tiny_model
from pagedkv.errors import InvalidModelFile
from pagedkv.model import read_model_config
from pagedkv.model.gguf_file import GgufFile

PROMPT = [5, 9, 40]
COUNT = 3


def split(path, directory, *, extra=(), first_tensors=None):
    """Write a GGUF file's content as COUNT parts; `extra` gives keys of the later parts."""
    directory.mkdir(parents=True)
    file = GgufFile(path)
    names = list(file.tensors)
    cut = len(names) // COUNT if first_tensors is None else first_tensors
    shares = [names[:cut], *np.array_split(names[cut:], COUNT - 1)]
    for number, share in enumerate(shares):
        metadata = dict(file.metadata) if number == 0 else dict(extra)
        architecture = metadata.pop("general.architecture", "llama")
        keys = {"split.tensors.count": len(names)} | metadata
        write_part(directory / name_of(number), architecture, keys, number, {n: file.weight(n) for n in share})
    return [directory / name_of(number) for number in range(COUNT)]


def write_part(path, architecture, keys, number, weights):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", COUNT)
    for key, value in keys.items():
        _add_value(writer, key, value)
    for name, weight in weights.items():
        writer.add_tensor(str(name), weight.data.view(np.float32).reshape(weight.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def name_of(number):
    return f"tiny-{number + 1:05d}-of-{COUNT:05d}.gguf"


@pytest.fixture
def whole(tmp_path):
    return make_tiny_model(tmp_path / "whole", tied=False)


@pytest.fixture
def parts(whole, tmp_path):
    return split(whole, tmp_path / "parts")


@pytest.mark.parametrize("given", range(COUNT))
def test_nc20_split_model_loads_from_any_part(whole, parts, given):
    assert read_model_config(parts[given]) == read_model_config(whole)
    expected = forward(load_on_numpy(whole), PROMPT)
    np.testing.assert_array_equal(forward(load_on_numpy(parts[given]), PROMPT), expected)


def test_nc20_first_part_without_tensors_is_no_fault(whole, tmp_path):
    parts = split(whole, tmp_path / "parts", first_tensors=0)
    expected = forward(load_on_numpy(whole), PROMPT)
    np.testing.assert_array_equal(forward(load_on_numpy(parts[1]), PROMPT), expected)


def test_nc20_parts_that_the_gguf_package_writes_load(whole, tmp_path):
    file = GgufFile(whole)
    writer = gguf.GGUFWriter(tmp_path / "made.gguf", "llama", split_max_tensors=9)
    for key, value in file.metadata.items():
        if key != "general.architecture":
            _add_value(writer, key, value)
    for name in file.tensors:
        weight = file.weight(name)
        writer.add_tensor(name, weight.data.view(np.float32).reshape(weight.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (second,) = tmp_path.glob("made-00002-of-*.gguf")
    np.testing.assert_array_equal(forward(load_on_numpy(second), PROMPT), forward(load_on_numpy(whole), PROMPT))


def assert_refused(path, *needles):
    for read in (read_model_config, load_on_numpy):
        with pytest.raises(InvalidModelFile) as caught:
            read(path)
        for needle in needles:
            assert needle in str(caught.value)
    assert not open_handles(path.parent)


@pytest.mark.parametrize("missing", range(COUNT))
def test_nc20_missing_part_is_named(parts, missing):
    parts[missing].unlink()
    assert_refused(parts[(missing + 1) % COUNT], "missing", name_of(missing))


@pytest.mark.parametrize("cut", range(COUNT))
def test_nc20_truncated_part_is_named(parts, cut):
    parts[cut].write_bytes(parts[cut].read_bytes()[:-100])
    assert_refused(parts[0], name_of(cut), "tensor")


@pytest.mark.parametrize("given", range(COUNT))
def test_nc20_part_of_a_model_of_other_shapes_is_named(whole, parts, tmp_path, given):
    other = make_tiny_model(tmp_path / "other", tied=False, weights={"model.norm.weight": np.ones(63, np.float32)})
    holder = next(n for n, part in enumerate(parts) if "output_norm.weight" in GgufFile(part).tensors)
    shutil.copy(split(other, tmp_path / "foreign")[holder], parts[holder])
    with pytest.raises(InvalidModelFile, match=rf"{name_of(holder)}.*output_norm\.weight.*\(63,\)"):
        load_on_numpy(parts[given])
    assert not open_handles(tmp_path / "parts")


def test_nc20_part_of_a_model_with_other_tensors_is_named(parts, tmp_path):
    other = make_tiny_model(tmp_path / "other", arch="qwen3")
    shutil.copy(split(other, tmp_path / "foreign")[1], parts[1])
    assert_refused(parts[0], name_of(1))


def test_nc20_first_part_of_another_model_is_named_beside_the_part_that_does_not_fit(parts, tmp_path):
    norm = {"model.norm.weight": np.ones(63, np.float32)}
    other = make_tiny_model(tmp_path / "other", tied=False, overrides={"llama.feed_forward_length": 95}, weights=norm)
    shutil.copy(split(other, tmp_path / "foreign")[0], parts[0])
    with pytest.raises(InvalidModelFile, match=rf"configuration in {name_of(0)} needs"):
        load_on_numpy(parts[2])


def test_nc20_tensor_that_two_parts_hold_is_named_with_both(whole, parts):
    third = GgufFile(parts[2])
    weights = {name: third.weight(name) for name in third.tensors}
    write_part(parts[1], "llama", {"split.tensors.count": 21}, 1, weights)
    with pytest.raises(InvalidModelFile, match=rf"{name_of(2)}: tensor .* is in {name_of(1)} too"):
        read_model_config(parts[0])


def test_nc20_part_with_too_few_tensors_is_named_with_all_counts(whole, parts):
    rest = split(whole, parts[0].parent.with_name("more"), first_tensors=10)
    shutil.copy(rest[2], parts[2])
    assert_refused(parts[0], "split.tensors.count is 21", *map(name_of, range(COUNT)))


def test_nc20_part_that_contradicts_the_first_part_s_metadata_is_named(whole, tmp_path):
    parts = split(whole, tmp_path / "parts", extra={"llama.embedding_length": 65})
    assert_refused(parts[0], name_of(1), "llama.embedding_length", "65", "64")


def test_nc20_part_under_another_part_s_name_is_named(parts):
    shutil.copy(parts[2], parts[1])
    assert_refused(parts[0], name_of(1), "split.no", "must be 1", "got 2")


def test_nc20_part_with_a_name_of_its_own_is_refused_with_the_right_name(parts):
    renamed = parts[0].rename(parts[0].with_name("model.gguf"))
    assert_refused(renamed, "model.gguf", "NAME-00001-of-00003.gguf")


@pytest.mark.parametrize("count", [0, 2, True, "3", 1001, [3]])
def test_nc20_wrong_count_of_parts_is_refused_by_name(whole, tmp_path, count):
    path = make_tiny_model(tmp_path / "x", overrides={"split.count": count})
    assert_refused(path.rename(path.with_name(name_of(0))), name_of(0))
