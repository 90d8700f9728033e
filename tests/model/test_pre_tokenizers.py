"""The pre-tokenisers that GGUF files name cut texts as their models' own tokenizer.json does (NC-18)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from helpers.model_runner import load_on_numpy
from helpers.tiny_models import make_tiny_model, write_json
from pagedkv.errors import UnsupportedModel
from pagedkv.model.pre_tokenizers import QUICK_PATTERNS, WORD_RULES

CUTS = [
    ("default", "a+b=12345", ["a", "+", "b", "=", "123", "45"]),
    ("gpt-2", "Hello world123  it's", ["Hello", " world", "123", " ", " it", "'s"]),
    ("smollm", "Hello world123", ["Hello", " world", "1", "2", "3"]),
    ("llama-bpe", "Hello world12345\n\n it's", ["Hello", " world", "123", "45", "\n\n", " it", "'s"]),
    ("llama-bpe", "DON'T .x", ["DON", "'T", " .", "x"]),
    ("qwen2", "Hello world12 I'LL", ["Hello", " world", "1", "2", " I", "'LL"]),
    ("tekken", "HelloWorld12 it's/\n", ["Hello", "World", "1", "2", " it", "'s", "/\n"]),
    ("gpt-4o", "HelloWorld1234 it's", ["Hello", "World", "123", "4", " it's"]),
    ("deepseek-llm", "Hi 12\nit's!", ["Hi", " ", "1", "2", "\n", "it", "'", "s", "!"]),
    ("deepseek-coder", "x_1 = 22", ["x", "_", "1", " = ", "2", "2"]),
    ("deepseek-v3", "Hi 1234 .a", ["Hi", " ", "123", "4", " .", "a"]),
    ("falcon", "Hi` 1234", ["Hi", "`", " ", "123", "4"]),
    ("glm4", "Hi 1234", ["Hi", " ", "123", "4"]),
    ("qwen35", "e\u0301 1", ["\u00e9", " ", "1"]),
    ("bloom", "a, b.", ["a", ",", " b", "."]),
    ("viking", "ab12", ["ab", "1", "2"]),
]


def words_of(tokenizer, text: str) -> list[str]:
    normalizer = tokenizer._encoder.normalizer
    text = text if normalizer is None else normalizer.normalize_str(text)
    return [word for word, _ in tokenizer._encoder.pre_tokenizer.pre_tokenize_str(text)]


def spelled(text: str) -> str:
    """A word in byte-level characters, by the table's definition."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return "".join(chr(byte) if byte in printable else chr(0x100 + others.index(byte)) for byte in text.encode())


@pytest.mark.parametrize(("pre", "text", "words"), CUTS)
def test_nc18_named_pre_tokenizer_cuts_where_its_model_does(tmp_path, pre, text, words):
    tokenizer = load_on_numpy(make_tiny_model(tmp_path, overrides={"tokenizer.ggml.pre": pre})).tokenizer
    assert words_of(tokenizer, text) == [spelled(word) for word in words]
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == "".join(words)


def test_nc18_every_known_name_builds_and_loses_no_character():
    text = "HelloWorld it's 12345 don'T\n\n  x/ \u00fcber \u65e5\u672c ab.c (d)\u3002"
    for name, rule in WORD_RULES.items():
        words = [word for word, _ in rule.splitter().pre_tokenize_str(text)]
        assert "".join(words) == spelled(text), name


def test_nc18_unknown_pre_tokenizer_is_refused_with_the_list_of_the_known(tmp_path):
    path = make_tiny_model(tmp_path, overrides={"tokenizer.ggml.pre": "no-such"})
    with pytest.raises(UnsupportedModel, match=r"pre-tokenizer 'no-such'") as caught:
        load_on_numpy(path)
    assert all(name in str(caught.value) for name in WORD_RULES)


@pytest.mark.parametrize("rule", dict.fromkeys(WORD_RULES.values()))
def test_rl02_long_runs_of_one_kind_are_cut_in_one_pass(rule):
    """A pattern that tries a run anew from every place of it would take hours."""
    for character in (" ", "a", "'"):
        words = rule.splitter().pre_tokenize_str(character * 50_000 + "x")
        assert sum(len(word) for word, _ in words) == 50_001


@given(st.text(" \t\na1", max_size=12))
def test_rl02_quick_patterns_match_where_the_models_own_do(text):
    for own, quick in QUICK_PATTERNS.items():
        first, second = (pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in (own, quick))
        assert first.pre_tokenize_str(text) == second.pre_tokenize_str(text)


def test_rl02_directory_with_a_slow_pattern_is_read_with_the_quick_one(tmp_path):
    path = make_tiny_model(tmp_path, format="hf")
    definition = json.loads((path / "tokenizer.json").read_text("utf-8"))
    slow = {"type": "Split", "pattern": {"Regex": r"\s+$"}, "behavior": "Isolated", "invert": False}
    splitter = {"type": "Sequence", "pretokenizers": [slow, definition["pre_tokenizer"]]}
    write_json(path / "tokenizer.json", definition | {"pre_tokenizer": splitter})
    tokenizer = load_on_numpy(path).tokenizer
    text = " " * 200_000 + "x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
