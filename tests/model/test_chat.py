"""Chats become the tokens that the library gives for the whole rendering, and no message ever makes a control token.

The oracle is the `tokenizers` library itself on tokenizer.json as it is, as the transformers library uses it.
"""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from helpers.model_runner import load_on_numpy
from helpers.tiny_models import byte_level_vocabulary, make_tiny_model, write_json
from pagedkv.errors import InvalidArgument
from pagedkv.model import read_model_config
from pagedkv.model.end_tokens import end_texts_of
from pagedkv.model.tokenizer_hf import read_hf_tokenizer
from pagedkv.template import process

INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.replace('<image>', '') }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = [{"role": "user", "content": "hi"}]
METASPACES = {
    "first": lambda: (None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "always": lambda: (None, pre_tokenizers.Metaspace(prepend_scheme="always")),
    "prepend": lambda: (
        normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
        None,
    ),
}
FLAGS = {
    "plain": {},
    "normalized": {"normalized": True},
    "lstrip": {"lstrip": True},
    "rstrip": {"rstrip": True},
    "single_word": {"single_word": True},
}


# The library never finds a token in normalised text that a normaliser has put a space before.
PAIRS = [(scheme, flags) for scheme in METASPACES for flags in FLAGS if (scheme, flags) != ("prepend", "normalized")]


def make_library(scheme: str, flags: str, *, unigram: bool = False) -> Library:
    letters = [*"\u2581abcdehi<>/s[]INST!|_m", "<unk>", "\u2581h", "hi", "\u2581hi"]
    tokens = ["<s>", "</s>", *dict.fromkeys(letters)]
    ids = {token: index for index, token in enumerate(tokens)}
    if unigram:
        model = models.Unigram([(token, -float(len(tokens) - at)) for token, at in ids.items()], unk_id=ids["<unk>"])
    else:
        model = models.BPE(ids, [("\u2581", "h"), ("h", "i"), ("\u2581h", "i")], unk_token="<unk>", fuse_unk=True)
    library = Library(model)
    normalizer, splitter = METASPACES[scheme]()
    if normalizer is not None:
        library.normalizer = normalizer
    if splitter is not None:
        library.pre_tokenizer = splitter
    library.decoder = decoders.Metaspace()
    library.add_special_tokens(
        [AddedToken(text, special=True, **{"normalized": False} | FLAGS[flags]) for text in ("<s>", "</s>")]
    )
    return library


def make_directory(path, library: Library, template: str = INST, **options):
    make_tiny_model(path, format="hf", overrides={"vocab_size": library.get_vocab_size(), "bos_token_id": 0})
    library.save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json", {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>", **options}
    )
    return path


def read(path):
    return read_hf_tokenizer(path, read_model_config(path))


def turns(*contents):
    return [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 9, contents, strict=False)]


def rendered(*contents) -> str:
    parts = [f"[INST] {text} [/INST]" if at % 2 == 0 else f" {text}</s>" for at, text in enumerate(contents)]
    return "<s>" + "".join(parts)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def library_and_tokenizer(request, tmp_path_factory):
    library = make_library(*request.param)
    return library, read(make_directory(tmp_path_factory.mktemp("inst"), library))


@settings(max_examples=20, deadline=None)
@given(contents=st.lists(st.text("hi ab!", max_size=6), min_size=3, max_size=3))
def test_nc06_chat_is_encoded_as_the_library_encodes_the_whole_rendering(library_and_tokenizer, contents):
    library, tokenizer = library_and_tokenizer
    expected = library.encode(rendered(*contents), add_special_tokens=False).ids
    assert tokenizer.apply_chat_template(turns(*contents)) == expected
    assert tokenizer.encode(rendered(*contents), parse_special=True, add_special=False) == expected


def test_nc06_quoting_a_control_token_changes_the_tokens_inside_the_quote_only(library_and_tokenizer):
    _, tokenizer = library_and_tokenizer
    quoted = tokenizer.apply_chat_template(turns("hi </s> hi", "hi!", "a"))
    other = tokenizer.apply_chat_template(turns("hi <!s> hi", "hi!", "a"))
    differ = [at for at, pair in enumerate(zip(quoted, other, strict=True)) if pair[0] != pair[1]]
    assert len(differ) == 1
    assert quoted.count(1) == 1  # the template's own end of the assistant's turn


def test_nc06_token_that_a_normaliser_hides_in_the_library_is_found_where_the_template_writes_it(tmp_path):
    hidden, found = (
        read(make_directory(tmp_path / flags, make_library("prepend", flags))) for flags in ("normalized", "plain")
    )
    for contents in [("hi", "hi", "a"), ("</s>", "h</s>i", "<s>")]:
        ids = hidden.apply_chat_template(turns(*contents))
        assert ids == found.apply_chat_template(turns(*contents))
        assert (ids.count(0), ids.count(1)) == (1, 1)


def test_nc06_unigram_model_with_the_control_token_among_its_pieces_keeps_a_quote_plain(tmp_path):
    library = make_library("always", "plain", unigram=True)
    tokenizer = read(make_directory(tmp_path, library))
    ids = tokenizer.apply_chat_template(turns("</s><s>", "hi", "<s>"))
    assert (ids.count(0), ids.count(1)) == (1, 1)
    assert not {0, 1} & set(tokenizer.encode("a</s><s>", add_special=False))
    assert ids[:1] == [0]


@pytest.mark.parametrize("format", ["gguf", "hf"])
@pytest.mark.parametrize("content", ["a<|im_<image>end|>b", "<|im_end<image>|>", "<<image>|im_start|><|im_end|>"])
def test_nc08_template_never_assembles_a_control_token_from_a_message(tmp_path, format, content):
    tokenizer = load_on_numpy(make_chatml(tmp_path, format)).tokenizer
    ids = tokenizer.apply_chat_template([{"role": "user", "content": content}])
    assert [token_id for token_id in ids if token_id < 3] == [1, 2, 1]
    shown = f"<|im_start|>user\n{content.replace('<image>', '')}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(ids, skip_special=False) == shown


def make_chatml(path, format="gguf", template=CHATML):
    if format == "gguf":
        return make_tiny_model(path, overrides={"tokenizer.chat_template": template})
    made = make_tiny_model(path, format="hf")
    write_json(made / "tokenizer_config.json", {"chat_template": template, "eos_token": "<|im_end|>"})
    return made


def test_nc08_message_next_to_a_control_token_can_neither_make_nor_break_one(tmp_path):
    template = "{{ messages[0].content }}<|im_end|>{{ messages[1].content }}"
    tokenizer = load_on_numpy(make_chatml(tmp_path, template=template)).tokenizer
    for before, after in [("<|im_start", "|>"), ("<", ">"), ("<|im_end|", ""), ("<|", "|>")]:
        messages = [{"role": "user", "content": before}, {"role": "user", "content": after}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
        assert [token_id for token_id in ids if token_id < 3] == [2]
        assert tokenizer.decode(ids, skip_special=False) == f"{before}<|im_end|>{after}"


TRANSFORMS = [
    "m.content|upper|lower",
    "m.content|trim",
    "m.content.split('x')|join('')",
    "m.content[:4] ~ m.content[4:]",
    "m.content|tojson",
    "m.content|list|join",
    "('%s' % m.content)",
    "('{}'.format(m.content))",
    "(m.content|reverse)[::-1]",
    "m.content|replace('Q', '')",
    "m.content.replace('im_', 'im_')",
    "m.content|e",
]


@settings(max_examples=40, deadline=None)
@given(
    content=st.lists(st.sampled_from(["<|im_end|>", "<|im_", "end|>", "x", "Q", "<|endoftext|>", " "]), max_size=6).map(
        "".join
    )
)
def test_nc08_no_transformation_of_a_message_makes_a_control_token(transforming, content):
    ids = transforming.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=False)
    assert [token_id for token_id in ids if token_id < 3] == [1, *[2] * len(TRANSFORMS)]


@pytest.fixture(scope="module")
def transforming(tmp_path_factory):
    body = "".join("{{ " + change + " }}<|im_end|>" for change in TRANSFORMS)
    template = "{% for m in messages %}<|im_start|>" + body + "{% endfor %}"
    return load_on_numpy(make_chatml(tmp_path_factory.mktemp("transforming"), template=template)).tokenizer


# --- NC-02: templates that the model's loading does not depend on


def test_nc02_generation_blocks_render_their_body(tmp_path):
    template = CHATML.replace("{{ m.content", "{% generation %}{{ m.content")
    template = template.replace("<|im_end|>\n", "<|im_end|>{% endgeneration %}{{ '\\n' }}")
    marked = load_on_numpy(make_chatml(tmp_path / "a", "hf", template)).tokenizer
    plain = load_on_numpy(make_chatml(tmp_path / "b", "hf")).tokenizer
    assert marked.apply_chat_template(USER) == plain.apply_chat_template(USER)


@pytest.mark.parametrize("format", ["gguf", "hf"])
@pytest.mark.parametrize(
    "template", ["{% for %}", "{{ ", "{% no_such_tag %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}"]
)
def test_nc02_template_that_does_not_parse_fails_chats_with_its_error_and_nothing_else(tmp_path, format, template):
    tokenizer = load_on_numpy(make_chatml(tmp_path, format, template)).tokenizer
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    for _ in range(2):
        with pytest.raises(InvalidArgument, match=r"messages: the chat template refuses them: \w+"):
            tokenizer.apply_chat_template(USER)


# --- NC-05: named special tokens


def test_nc05_template_sees_the_special_tokens_of_every_file(tmp_path):
    names = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "additional_special_tokens|join")
    template = "|".join("{{ " + name + " }}" for name in names)
    path = make_directory(
        tmp_path, make_library("first", "plain"), template, bos_token=None, pad_token={"content": "!"}
    )
    write_json(
        path / "special_tokens_map.json", {"bos_token": {"content": "<s>"}, "unk_token": "<unk>", "pad_token": "?"}
    )
    options = {"chat_template": template, "pad_token": {"content": "!"}, "eos_token": "</s>"}
    more = {"additional_special_tokens": ["a", {"content": "b"}], "extra_special_tokens": {"image_token": "<i>"}}
    write_json(path / "tokenizer_config.json", options | more)
    tokenizer = read(path)
    ids = tokenizer.apply_chat_template(USER)
    assert ids[0] == 0
    assert tokenizer.decode(ids, skip_special=False) == "<s>|</s>|<unk>|!|<i>|ab"
    assert {0, 1} <= set(ids)


def test_nc05_begin_token_named_in_the_special_tokens_map_only_is_the_begin_token(tmp_path):
    path = make_directory(tmp_path, make_library("first", "plain"), "{{ bos_token }}hi")
    write_json(path / "tokenizer_config.json", {"chat_template": "{{ bos_token }}hi"})
    write_json(path / "special_tokens_map.json", {"bos_token": "<s>"})
    tokenizer = read(path)
    assert tokenizer.bos_token_id == 0
    assert tokenizer.apply_chat_template(USER)[0] == 0


def test_nc05_gguf_template_sees_every_named_token(tmp_path):
    names = {"bos": "endoftext", "eos": "im_end", "unknown": "im_start", "padding": "endoftext", "eot": "im_end"}
    ids = {
        f"tokenizer.ggml.{name}_token_id": ["endoftext", "im_start", "im_end"].index(text)
        for name, text in names.items()
    }
    template = "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ pad_token }}{{ eot_token }}{{ mask_token }}"
    path = make_tiny_model(tmp_path, overrides={**ids, "tokenizer.chat_template": template})
    assert load_on_numpy(path).tokenizer.apply_chat_template(USER) == [0, 2, 1, 0, 2]


# --- NC-09: ends


@pytest.mark.parametrize("kind", [1, 3, 4])
def test_nc09_well_known_end_text_ends_whatever_its_type_and_stays_a_control_token(tmp_path, kind):
    made = byte_level_vocabulary()
    made.types[2] = kind
    model = load_on_numpy(make_tiny_model(tmp_path, vocabulary=made, overrides={"tokenizer.ggml.eos_token_id": 0}))
    assert {0, 2} <= model.config.eos_token_ids
    tokenizer = model.tokenizer
    assert [i for i in tokenizer.apply_chat_template(USER) if i < 3] == [1, 2, 1]
    assert 2 not in tokenizer.encode("a<|im_end|>")
    assert tokenizer.token_bytes(2) == b""
    assert tokenizer.special_text(2) == "<|im_end|>"


def test_nc09_hf_directory_ends_where_generation_config_and_its_template_say(tmp_path):
    path = make_chatml(tmp_path, "hf")
    write_json(path / "tokenizer_config.json", {"chat_template": CHATML, "eos_token": "<|endoftext|>"})
    write_json(path / "generation_config.json", {"eos_token_id": [7, 9]})
    assert load_on_numpy(path).config.eos_token_ids >= {0, 2, 7, 9}


def test_nc09_end_of_a_part_is_no_end_where_the_vocabulary_has_harmonys_ends():
    assert end_texts_of(["<|end|>", "<|user|>"]) == {"<|end|>"}
    assert end_texts_of(["<|end|>", "<|return|>", "<|call|>"]) == {"<|return|>", "<|call|>"}


# --- NC-17: the last message continued


@pytest.mark.parametrize(
    ("template", "kept"), [(CHATML, "The answer  "), (CHATML.replace(" }}<|im_end", "|trim }}<|im_end"), "The answer")]
)
def test_nc17_last_message_of_the_assistant_is_continued(tmp_path, template, kept):
    tokenizer = load_on_numpy(make_chatml(tmp_path, template=template)).tokenizer
    messages = [*USER, {"role": "assistant", "content": "The answer  "}]
    ids = tokenizer.apply_chat_template(messages, continue_final_message=True)
    text = f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{kept}"
    assert ids == tokenizer.encode(text, parse_special=True)


def test_nc17_last_message_of_the_assistant_is_refused_without_the_option_which_the_refusal_names(tmp_path):
    tokenizer = load_on_numpy(make_chatml(tmp_path)).tokenizer
    with pytest.raises(InvalidArgument, match=r"messages: .*continue_final_message"):
        tokenizer.apply_chat_template([*USER, {"role": "assistant", "content": "The"}])
    with pytest.raises(InvalidArgument, match="must end with a message of the assistant"):
        tokenizer.apply_chat_template(USER, continue_final_message=True)
    with pytest.raises(InvalidArgument, match="leaves nothing of the last message"):
        tokenizer.apply_chat_template([*USER, {"role": "assistant", "content": ""}], continue_final_message=True)


# --- RL-12: bounds of rendering

RUNAWAYS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "long text": "{{ 'a' * 1000000000 }}",
    "power": "{{ 9 ** 999999999 }}",
    "power of powers": "{{ 9 ** (9 ** 9) }}",
    "doubling": "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}",
    "doubling list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "wide filter": "{{ 'a'|center(1000000000) }}",
    "wide method": "{{ 'a'.ljust(1000000000) }}",
    "wide format": "{{ '{:1000000000}'.format('a') }}",
    "wide percent": "{{ '%1000000000s' % 'a' }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000)|list|join('b' * 100000) }}",
    "batch": "{{ [1]|batch(1000000000, 'x')|list }}",
    "filler": "{{ lipsum(n=10000000) }}",
    "recursion": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 100 }}{% endfor %}",
    "json": "{{ [1]|tojson(indent=1000000000) }}",
}


@pytest.fixture
def short_bound(monkeypatch):
    monkeypatch.setattr(process, "CPU_SECONDS", 0.3)


@pytest.mark.usefixtures("short_bound")
@pytest.mark.parametrize("name", sorted(RUNAWAYS))
def test_rl12_template_out_of_bounds_fails_its_conversation_alone(tmp_path, name):
    tokenizer = load_on_numpy(
        make_chatml(tmp_path, template="{% if messages[0].content == 'run' %}" + RUNAWAYS[name] + "{% endif %}ok")
    ).tokenizer
    assert tokenizer.decode(tokenizer.apply_chat_template(USER)) == "ok"
    with pytest.raises(InvalidArgument, match="messages: the chat template refuses them") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "run"}])
    assert len(str(caught.value)) < 1_200
    assert tokenizer.decode(tokenizer.apply_chat_template(USER)) == "ok"


@pytest.mark.usefixtures("short_bound")
def test_rl12_other_threads_go_on_while_a_template_loops(tmp_path):
    tokenizer = load_on_numpy(make_chatml(tmp_path, template=RUNAWAYS["nested loops"])).tokenizer
    failed = threading.Event()

    def chat():
        with pytest.raises(InvalidArgument):
            tokenizer.apply_chat_template(USER)
        failed.set()

    thread = threading.Thread(target=chat)
    thread.start()
    turns_taken = 0
    while not failed.is_set():
        time.sleep(0.01)
        turns_taken += 1
    thread.join()
    assert turns_taken > 5


def test_rl12_template_reaches_no_attribute_of_the_interpreter(tmp_path):
    template = "{{ messages.__class__ }}{{ ''.__class__.__mro__ }}"
    tokenizer = load_on_numpy(make_chatml(tmp_path, template=template)).tokenizer
    with pytest.raises(InvalidArgument, match="unsafe"):
        tokenizer.apply_chat_template(USER)
