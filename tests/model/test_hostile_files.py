"""Whatever a model's files hold, they load or are refused by our own error that names file, field and value (RL-11)."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.gguf_bytes import ARRAY, BOOL, FLOAT32, FLOAT64, FORMATS, INT8, INT32, STRING, UINT32, GgufBytes, Typed
from helpers.model_runner import load_on_numpy
from helpers.numpy_dense import NumpyBackend
from helpers.open_files import open_handles
from helpers.tiny_models import make_tiny_model, sentencepiece_vocabulary, write_json
from pagedkv.compute.layout import KvLayout
from pagedkv.errors import DeviceError, InvalidModelFile, UnsupportedModel
from pagedkv.model import LoadedModel, load, load_model, read_model_config
from pagedkv.model.rope import ROPE_KINDS, RopeConfig
from pagedkv.model.shown import shown

KEYS = ("general.alignment", "split.count", "llama.rope.scaling.type", "llama.rope.scaling.factor", "llama.vocab_size")


def load_or_refuse(path: Path) -> LoadedModel | UnsupportedModel:
    """Load and use a model, or return the refusal after looking at it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            model = load_on_numpy(path)
        except UnsupportedModel as error:
            assert_names_its_file(error, path)
            assert not open_handles(path)
            return error
    tokenizer = model.tokenizer
    tokenizer.decode(tokenizer.encode("Hello <|im_end|> world", parse_special=True))
    return model


def assert_names_its_file(error: UnsupportedModel, path: Path) -> None:
    text = str(error)
    assert str(path) in text
    assert "cannot be understood" not in text  # the last net: every fault here has a check of its own
    assert len(text) < len(str(path)) + 700
    text.encode("utf-8")


@pytest.fixture(scope="module")
def hf_model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("hf"), format="hf")


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def gguf_model(request, tmp_path_factory) -> bytes:
    vocabulary = sentencepiece_vocabulary() if request.param == "sentencepiece" else None
    return make_tiny_model(tmp_path_factory.mktemp("gguf"), vocabulary=vocabulary).read_bytes()


@pytest.fixture
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("scratch")


def with_file(model: Path, directory: Path, name: str, content: bytes | str | object) -> Path:
    """Return a directory with the same files, linked, but for one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != name:
            (directory / file.name).symlink_to(file)
    if isinstance(content, bytes):
        (directory / name).write_bytes(content)
    else:
        write_json(directory / name, content)
    return directory


def with_keys(content: bytes, path: Path, **changes: Typed | None) -> Path:
    """Write a GGUF file with other metadata; `__` stands for a dot."""
    file = GgufBytes.parse(content)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            file.metadata.pop(key, None)
        else:
            file.metadata[key] = value
    path.write_bytes(file.pack())
    return path


# --- numbers


@pytest.mark.parametrize("value", [10**400, 1e308, -1.0, 0, math.nan, math.inf, -math.inf, True, "1", [1.0], {"a": 1}])
@pytest.mark.parametrize(
    "name",
    [
        "rms_norm_eps",
        "rope_theta",
        "partial_rotary_factor",
        "rope_scaling.factor",
        "rope_scaling.rope_theta",
        "rope_scaling.beta_fast",
        "rope_scaling.attention_factor",
        "hidden_size",
        "vocab_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "rope_scaling.original_max_position_embeddings",
    ],
)
def test_rl11_number_that_no_formula_can_take_is_refused_with_field_and_value(hf_model, scratch, name, value):
    config = json.loads((hf_model / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 2.0}
    *block, field = name.split(".")
    (config[block[0]] if block else config)[field] = value
    path = with_file(hf_model, scratch / "x", "config.json", config)
    with pytest.raises(InvalidModelFile, match=rf"config\.json: {name} must be .*, got ") as caught:
        load_on_numpy(path)
    assert_names_its_file(caught.value, path)


def test_rl11_factor_that_stretches_beyond_every_position_is_refused(hf_model, scratch):
    config = json.loads((hf_model / "config.json").read_text())
    config |= {"max_position_embeddings": 2**31 - 1, "rope_scaling": {"type": "linear", "factor": 1e6}}
    with pytest.raises(InvalidModelFile, match=r"config\.json: context length 2147483647000000"):
        load_on_numpy(with_file(hf_model, scratch / "x", "config.json", config))


EXTREMES = st.sampled_from([1e-6, 1.0, 1e6])


@given(
    kind=st.sampled_from(ROPE_KINDS),
    base=st.sampled_from([math.nextafter(1, 2), 10.0, 1e30]),
    rotary_dim=st.sampled_from([4, 64, 256]),
    lengths=st.tuples(st.sampled_from([1, 2**31 - 1]), st.sampled_from([1, 2**31 - 1])),
    factors=st.tuples(EXTREMES, EXTREMES, EXTREMES),
    truncate=st.booleans(),
)
def test_rl11_frequencies_within_all_limits_are_finite(kind, base, rotary_dim, lengths, factors, truncate):
    factor, fast, slow = factors
    options = {"low_freq_factor": slow / 2, "high_freq_factor": slow, "beta_fast": fast, "beta_slow": slow}
    rope = RopeConfig(base, rotary_dim, False, kind, factor, *lengths, truncate=truncate, **options)
    rope.check()
    assert np.isfinite(rope.inv_freq()).all()
    assert (rope.inv_freq() > 0).all()
    assert 0 < rope.scale < 1e7


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e-30, 1e30])
def test_rl11_gguf_number_that_no_formula_can_take_is_refused(gguf_model, scratch, value):
    for key in (
        "attention.layer_norm_rms_epsilon",
        "rope.freq_base",
        "rope.scaling.factor",
        "rope.scaling.attn_factor",
    ):
        path = with_keys(gguf_model, scratch / "x.gguf", **{f"llama.{key}": Typed(FLOAT64, value * 10)})
        with pytest.raises(InvalidModelFile, match=rf"x\.gguf: llama\.{key} must be a number"):
            load_on_numpy(path)


# --- tokens


@pytest.mark.parametrize(
    ("key", "value", "needle"),
    [
        ("token_type", lambda n: Typed(ARRAY, [True] * n, BOOL), r"token_type\[0\] must be of type int, got True"),
        ("token_type", lambda n: Typed(ARRAY, [1] * (n - 1) + [99], INT32), r"token_type\[\d+\] .*, got 99"),
        ("token_type", lambda n: Typed(ARRAY, [-1] * n, INT8), r"token_type\[0\] .*, got -1"),
        ("token_type", lambda n: Typed(ARRAY, [1.0] * n, FLOAT32), r"token_type\[0\] .*, got 1\.0"),
        ("token_type", lambda n: Typed(UINT32, 1), r"token_type must be a list of int, got 1"),
        ("tokens", lambda n: Typed(ARRAY, list(range(n)), INT32), r"tokens\[0\] must be of type str, got 0"),
        ("tokens", lambda n: None, "tokens must be a list of str, got None"),
        ("pre", lambda n: Typed(ARRAY, ["gpt-2"], STRING), "pre-tokenizer|sentencepiece"),
        ("model", lambda n: Typed(ARRAY, ["gpt2"], STRING), "tokenizer model"),
        ("bos_token_id", lambda n: Typed(INT32, -1), "bos_token_id must be"),
        ("eos_token_id", lambda n: Typed(BOOL, True), "eos_token_id must be"),
        ("add_bos_token", lambda n: Typed(UINT32, 1), "add_bos_token must be true or false"),
        ("add_space_prefix", lambda n: Typed(UINT32, 1), "add_space_prefix must be true or false|byte-level"),
    ],
)
def test_rl11_token_metadata_of_a_wrong_type_or_value_is_refused(gguf_model, scratch, key, value, needle):
    num_tokens = len(GgufBytes.parse(gguf_model).metadata["tokenizer.ggml.tokens"].value)
    path = with_keys(gguf_model, scratch / "x.gguf", **{f"tokenizer.ggml.{key}": value(num_tokens)})
    answer = load_or_refuse(path)
    if key in ("pre", "add_space_prefix") and isinstance(answer, LoadedModel):
        return  # only one of the two vocabularies has it
    assert re.search(needle, str(answer))


@pytest.mark.parametrize("score", [math.nan, math.inf, -math.inf])
def test_rl11_score_that_is_not_finite_is_refused_with_its_place(tmp_path, score):
    content = make_tiny_model(tmp_path, vocabulary=sentencepiece_vocabulary()).read_bytes()
    scores = GgufBytes.parse(content).metadata["tokenizer.ggml.scores"].value
    scores[17] = score
    path = with_keys(content, tmp_path / "x.gguf", tokenizer__ggml__scores=Typed(ARRAY, scores, FLOAT32))
    with pytest.raises(InvalidModelFile, match=r"scores\[17\] must be a finite number, got (nan|-?inf)"):
        load_on_numpy(path)


def test_rl11_piece_with_too_many_ways_to_cut_it_is_refused_with_its_place(tmp_path):
    content = make_tiny_model(tmp_path, vocabulary=sentencepiece_vocabulary()).read_bytes()
    tokens = GgufBytes.parse(content).metadata["tokenizer.ggml.tokens"].value
    tokens[-1] = "a" * 1_000_000
    path = with_keys(content, tmp_path / "x.gguf", tokenizer__ggml__tokens=Typed(ARRAY, tokens, STRING))
    with pytest.raises(InvalidModelFile, match=r"tokens\[\d+\] must have at most 128 characters, has 1000000"):
        load_on_numpy(path)


def test_rl11_panic_of_the_tokenizers_library_is_a_refusal(hf_model, scratch):
    definition = json.loads((hf_model / "tokenizer.json").read_text())
    definition["model"]["continuing_subword_prefix"] = "x" * 5000
    path = with_file(hf_model, scratch / "x", "tokenizer.json", definition)
    with pytest.raises(InvalidModelFile, match=r"tokenizer\.json: not a tokenizer: ") as caught:
        load_on_numpy(path)
    assert_names_its_file(caught.value, path)


@pytest.mark.parametrize("value", ["yes", 1, [True]])
def test_rl11_add_bos_token_of_a_wrong_type_is_refused(hf_model, scratch, value):
    path = with_file(hf_model, scratch / "x", "tokenizer_config.json", {"add_bos_token": value})
    with pytest.raises(InvalidModelFile, match="add_bos_token must be true or false"):
        load_on_numpy(path)


def test_rl11_begin_token_outside_the_vocabulary_is_refused(gguf_model, scratch):
    changes = {
        "tokenizer__ggml__bos_token_id": Typed(UINT32, 2**31 - 1),
        "tokenizer__ggml__add_bos_token": Typed(BOOL, 1),
    }
    with pytest.raises(InvalidModelFile, match=r"x\.gguf: begin token 2147483647"):
        load_on_numpy(with_keys(gguf_model, scratch / "x.gguf", **changes))


@pytest.mark.parametrize("text", ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for i in x %}" * 60])
def test_rl11_template_that_cannot_be_compiled_does_no_harm(gguf_model, hf_model, scratch, text):
    load_or_refuse(with_keys(gguf_model, scratch / "x.gguf", tokenizer__chat_template=Typed(STRING, text)))
    load_or_refuse(with_file(hf_model, scratch / "hf", "tokenizer_config.json", {"chat_template": text}))


@pytest.mark.parametrize("value", [Typed(UINT32, 7), Typed(ARRAY, ["x"], STRING)])
def test_rl11_template_of_a_wrong_type_is_refused(gguf_model, hf_model, scratch, value):
    for path in (
        with_keys(gguf_model, scratch / "x.gguf", tokenizer__chat_template=value),
        with_file(hf_model, scratch / "hf", "tokenizer_config.json", {"chat_template": {"a": 1}}),
    ):
        with pytest.raises(InvalidModelFile, match="chat_template must be a string"):
            load_on_numpy(path)


@pytest.mark.parametrize("key", ["general.name", "tokenizer.ggml.model"])
def test_rl11_string_that_is_not_utf8_or_does_not_end_is_refused_with_its_key(gguf_model, scratch, key):
    path = with_keys(gguf_model, scratch / "x.gguf", **{key: Typed(STRING, b"a\xffb")})
    with pytest.raises(InvalidModelFile, match=rf"x\.gguf: a string is not UTF-8: b'a\\xffb', in key '{key}'"):
        load_on_numpy(path)
    content = with_keys(gguf_model, scratch / "x.gguf", **{key: Typed(STRING, "marked")}).read_bytes()
    place = content.index(b"marked") - 8
    (scratch / "x.gguf").write_bytes(content[:place] + b"\xff" * 7 + b"\x00" + content[place + 8 :])
    with pytest.raises(InvalidModelFile, match=rf"x\.gguf: a string of 72057594037927935 bytes .*'{key}'"):
        load_on_numpy(scratch / "x.gguf")


def test_rl11_value_in_an_error_is_short_whatever_it_holds():
    for value in ("x" * 10**6, b"x" * 10**6, ["x" * 10**6] * 1000, {"a" * 10**5: 1}, 10**4000, [[[[[[1]]]]]] * 99):
        assert len(shown(value)) <= 80


# --- tensors


@pytest.mark.parametrize("shape", [(31,), (33,), (1,), (32, 1), (2, 16)])
def test_rl11_rope_freqs_of_a_wrong_shape_are_refused(tmp_path, shape):
    path = make_tiny_model(tmp_path, weights={"rope_freqs.weight": np.ones(shape, np.float32)})
    for read in (read_model_config, load_on_numpy):
        with pytest.raises(UnsupportedModel, match=r"tiny-llama\.gguf.*rope_freqs\.weight"):
            read(path)
        assert not open_handles(path)


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0, 1e-38])
def test_rl11_rope_freqs_that_are_no_divisors_are_refused_and_the_file_closed(tmp_path, value):
    divisors = np.ones(32, np.float32)
    divisors[5] = value
    path = make_tiny_model(tmp_path, weights={"rope_freqs.weight": divisors})
    with pytest.raises(InvalidModelFile, match=r"rope_freqs\.weight.*got"):
        read_model_config(path)
    assert not open_handles(path)


ENTRIES = [
    {"dtype": ["F32"]},
    {"dtype": {"F32": 1}},
    {"dtype": None},
    {"dtype": "F32" * 10_000},
    {"shape": [-1, 4]},
    {"shape": [10**400]},
    {"shape": [2**63] * 9},
    {"shape": [10**4000] * 1000},
    {"shape": [True, 4]},
    {"shape": [4.0]},
    {"shape": "4"},
    {"shape": None},
    {"shape": {"4": 4}},
    {"data_offsets": [0]},
    {"data_offsets": [0, 16, 32]},
    {"data_offsets": [16, 0]},
    {"data_offsets": [0, 10**400]},
    {"data_offsets": [0.0, 16.0]},
    {"data_offsets": [False, 16]},
    {"data_offsets": "00"},
    {"data_offsets": None},
]


@pytest.mark.parametrize(
    "change", ENTRIES, ids=lambda change: f"{next(iter(change))}-{str(next(iter(change.values())))[:12]}"
)
def test_rl11_tensor_entry_of_any_wrong_type_is_refused_with_its_name(hf_model, scratch, change):
    stored = (hf_model / "model.safetensors").read_bytes()
    size = int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8 : 8 + size])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + stored[8 + size :]
    answer = load_or_refuse(with_file(hf_model, scratch / "x", "model.safetensors", content))
    assert isinstance(answer, UnsupportedModel)
    (field,) = change
    needle = "d?type" if field == "dtype" else field
    assert re.search(rf"'model\.norm\.weight'.* {needle} ", str(answer))


# --- JSON


@pytest.mark.parametrize(
    ("content", "needle"),
    [
        (b'{"hidden_size": 64, "hidden_size": 65}', "'hidden_size' occurs twice"),
        (b'{"a": {"b": 1, "c": 2, "b": 3}}', "'b' occurs twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b'{"a": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}", "not valid JSON"),
        (b'{"a": 1' + b"0" * 10_000 + b"}", "not valid JSON"),
        (b'{"a": "\xff\xfe"}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"[1]", "JSON object"),
        (b"null", "JSON object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_rl11_json_that_is_no_sound_object_is_refused_by_name(hf_model, scratch, name, content, needle):
    path = with_file(hf_model, scratch / "x", name, content)
    with pytest.raises(InvalidModelFile, match=rf"{name}: .*{needle}") as caught:
        load_on_numpy(path)
    assert_names_its_file(caught.value, path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_rl11_what_is_no_regular_file_is_refused_and_never_waited_for(hf_model, scratch, name):
    path = with_file(hf_model, scratch / "x", name, b"")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(InvalidModelFile, match=name):
        load_on_numpy(path)


def test_rl11_pipe_in_the_place_of_a_gguf_file_is_refused(scratch):
    os.mkfifo(scratch / "x.gguf")
    with pytest.raises(InvalidModelFile, match=r"x\.gguf: is not a regular file"):
        read_model_config(scratch / "x.gguf")


def test_rl11_file_that_may_not_be_read_or_is_not_there_is_refused_by_name(scratch):
    with pytest.raises(InvalidModelFile, match=r"none\.gguf: cannot be read: No such file"):
        read_model_config(scratch / "none.gguf")


# --- the last net


@pytest.mark.parametrize("error", [KeyError("k"), RecursionError(), UnicodeError(), OSError(5, "Input/output error")])
@pytest.mark.parametrize("step", ["read_hf_config", "read_hf_tokenizer", "WeightPlan"])
def test_rl11_what_no_check_foresaw_is_refused_with_the_file_and_nothing_stays_open(hf_model, monkeypatch, step, error):
    def fail(*args):
        raise error

    shape = read_model_config(hf_model).kv_shape()
    monkeypatch.setattr(load, step, fail)
    with pytest.raises(InvalidModelFile, match=r"cannot be (understood|read)") as caught:
        load_model(hf_model, NumpyBackend(KvLayout(shape, 1, 16)))
    assert str(hf_model) in str(caught.value)
    assert not open_handles(hf_model)


def test_rl11_too_little_memory_for_the_weights_is_an_error_of_the_device(hf_model, monkeypatch):
    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(NumpyBackend, "load_weight", fail)
    with pytest.raises(DeviceError, match="not enough memory for its weights"):
        load_on_numpy(hf_model)


# --- everything at random


NUMBERS = [0, 1, -1, 2, 63, 255, 2**31 - 1, -0.5, 1e-40, 1e30, math.nan, math.inf, True]
TEXTS = ["", "llama", "gpt2", "yarn", "none", "\u0120", "a" * 300, "<|im_end|>", "a b", "\x00"]


def _fitting(number, kind):
    """Return the number as the type holds it."""
    if FORMATS[kind] in "fd":
        return float(number)
    if kind == BOOL:
        return bool(number)
    whole = int(number) if math.isfinite(number) else 3
    bits = np.dtype(FORMATS[kind]).itemsize * 8
    low = -(1 << (bits - 1)) if FORMATS[kind].islower() else 0
    return low + (whole - low) % (1 << bits)


def _typed_values() -> list[Typed | None]:
    """Return scalars and short arrays of every type."""
    scalars = {kind: [_fitting(number, kind) for number in NUMBERS] for kind in FORMATS} | {STRING: TEXTS}
    found: list[Typed | None] = [None, Typed(ARRAY, [], UINT32), Typed(ARRAY, [], STRING)]
    for kind, values in scalars.items():
        found += [Typed(kind, value) for value in values]
        found += [Typed(ARRAY, [value], kind) for value in values]
        found += [Typed(ARRAY, list(pair), kind) for pair in itertools.pairwise(values)]
    return found


VALUES = _typed_values()


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rl11_gguf_with_any_metadata_loads_or_is_refused_by_name(gguf_model, scratch, data):
    file = GgufBytes.parse(gguf_model)
    keys = sorted({*file.metadata, *KEYS})
    num_changes = data.draw(st.integers(1, 3))
    changes = {data.draw(st.sampled_from(keys)): data.draw(st.sampled_from(VALUES)) for _ in range(num_changes)}
    load_or_refuse(with_keys(gguf_model, scratch / "x.gguf", **changes))


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rl11_gguf_with_any_item_of_its_lists_changed_loads_or_is_refused_by_name(gguf_model, scratch, data):
    file = GgufBytes.parse(gguf_model)
    lists = [key for key, typed in file.metadata.items() if typed.kind == ARRAY]
    key = data.draw(st.sampled_from(lists))
    typed = file.metadata[key]
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(typed.value) - 1))
        typed.value[index] = data.draw(
            st.sampled_from([_fitting(n, typed.item) for n in NUMBERS] if typed.item in FORMATS else TEXTS)
        )
    load_or_refuse(with_keys(gguf_model, scratch / "x.gguf", **{key: typed}))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rl11_gguf_with_any_bytes_changed_or_cut_loads_or_is_refused_by_name(gguf_model, scratch, data):
    content = bytearray(gguf_model)
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 200) | st.integers(0, 16_000))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path = scratch / "x.gguf"
    path.write_bytes(content)
    load_or_refuse(path)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(NUMBERS)
    | st.sampled_from(TEXTS)
    | st.just(10**400)
    | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3),
    max_leaves=5,
)
HF_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def _places(value: object, at: tuple = ()) -> list[tuple]:
    """Return the path of every value inside a JSON value, not of a vocabulary's single entries."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, inner) in enumerate(items):
        if number < 20:
            found += _places(inner, (*at, key))
    return found


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rl11_json_with_any_value_changed_loads_or_is_refused_by_name(hf_model, scratch, data):
    name = data.draw(st.sampled_from(HF_FILES))
    content = json.loads((hf_model / name).read_text()) if (hf_model / name).is_file() else {"eos_token_id": 1}
    *outer, last = data.draw(st.sampled_from(_places(content)))
    block = content
    for key in outer:
        block = block[key]
    block[last] = data.draw(JSON_VALUES)
    load_or_refuse(with_file(hf_model, scratch / "x", name, content))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_rl11_directory_with_any_bytes_changed_or_cut_loads_or_is_refused_by_name(hf_model, scratch, data):
    name = data.draw(st.sampled_from([file.name for file in sorted(hf_model.iterdir())]))
    content = bytearray((hf_model / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, min(3000, len(content) - 1)))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    load_or_refuse(with_file(hf_model, scratch / "x", name, bytes(content)))
