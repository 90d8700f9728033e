"""Texts that know their characters' origins give what str gives, and never call a message's character written."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagedkv.template.environment import ChatEnvironment
from pagedkv.template.origin import WRITTEN, Text, concat, origins_of, runs_of, said, written

PIECES = st.text("ab <|>\n\u00df\u0130", max_size=6)
OPERATIONS = {
    "strip": lambda text, x: text.strip(x or None),
    "lstrip": lambda text, x: text.lstrip(),
    "rstrip": lambda text, x: text.rstrip(x or None),
    "replace": lambda text, x: text.replace(x, "<x>"),
    "replace once": lambda text, x: text.replace(x, "", 1),
    "split": lambda text, x: text.split(x or None),
    "split once": lambda text, x: text.split(x or None, 1),
    "rsplit once": lambda text, x: text.rsplit(x or None, 1),
    "splitlines": lambda text, x: text.splitlines(),
    "splitlines whole": lambda text, x: text.splitlines(True),
    "partition": lambda text, x: list(text.partition(x or " ")),
    "rpartition": lambda text, x: list(text.rpartition(x or " ")),
    "upper": lambda text, x: text.upper(),
    "lower": lambda text, x: text.lower(),
    "title": lambda text, x: text.title(),
    "capitalize": lambda text, x: text.capitalize(),
    "slice": lambda text, x: text[1:-1],
    "reversed": lambda text, x: text[::-1],
    "characters": lambda text, x: list(text),
    "add": lambda text, x: text + x,
    "radd": lambda text, x: x + text,
    "times": lambda text, x: text * 3,
    "join": lambda text, x: text.join([x, "y", x]),
    "removeprefix": lambda text, x: text.removeprefix(x),
    "removesuffix": lambda text, x: text.removesuffix(x),
    "percent": lambda text, x: (text.replace("%", "") + "%s") % x,
    "center": lambda text, x: text.center(20),
    "in": lambda text, x: [text in x + "q", x in text, text == x, text < x, hash(text) == hash(str.__str__(text))],
}


def make_text(parts) -> Text:
    return concat(written(part) if is_written else said(part, last=False) for part, is_written in parts)


def written_characters(value) -> str:
    texts = value if isinstance(value, list) else [value]
    return "".join(
        character
        for text in texts
        if isinstance(text, Text)
        for character, origin in zip(str.__str__(text), origins_of(text), strict=True)
        if origin == WRITTEN
    )


@given(st.lists(st.tuples(PIECES, st.booleans()), max_size=4), PIECES, st.sampled_from(sorted(OPERATIONS)))
def test_operation_gives_what_str_gives_with_an_origin_for_each_character(parts, argument, name):
    text = make_text(parts)
    result = OPERATIONS[name](text, argument)
    assert result == OPERATIONS[name]("".join(part for part, _ in parts), argument)
    for piece in result if isinstance(result, list) else [result]:
        assert not isinstance(piece, Text) or len(origins_of(piece)) == len(piece)


@given(st.lists(st.tuples(PIECES, st.booleans()), max_size=4), st.sampled_from(sorted(OPERATIONS)))
def test_what_is_said_in_other_letters_is_never_written(parts, name):
    """Messages say a and b only, the template writes neither: no a and no b is ever written."""
    letters = [
        ("".join(c for c in part if (c in "ab") != is_written) or ("<" if is_written else "a"), is_written)
        for part, is_written in parts
    ]
    result = OPERATIONS[name](make_text(letters), "b")
    assert not set("abAB") & set(written_characters(result))


@given(st.lists(st.tuples(PIECES.filter(bool), st.booleans()), max_size=6))
def test_runs_alternate_from_a_said_one_and_cover_the_text(parts):
    text = make_text(parts)
    runs = runs_of(text)
    assert sum(runs) == len(text)
    assert all(runs[1:])
    at = 0
    for index, length in enumerate(runs):
        assert set(origins_of(text)[at : at + length]) <= {index % 2}
        at += length


def render(source: str, content: str) -> Text:
    template = ChatEnvironment().from_string(source)
    return template.render(content=said(content, last=True), token=written("<s>"), items=[said("x", last=False)])


def test_templates_ways_to_put_texts_together_keep_what_they_write_written():
    sources = [
        "<s>{{ content }}",
        "{{ '<s>' + content }}",
        "{{ token ~ content }}",
        "{{ '%s%s' % (token, content) }}",
        "{{ '%s%s'|format(token, content) }}",
        "{{ '{}{}'.format('<s>', content) }}",
        "{{ [token, content]|join }}",
        "{{ ''.join(['<s>', content]) }}",
        "{% set x %}<s>{{ content }}{% endset %}{{ x|trim }}",
        "{% macro f(x) %}<s>{{ x }}{% endmacro %}{{ f(content) }}",
        "{{ ('<s>' if true else '') + content|string }}",
        "{{ 'S<s>'[1:] ~ content }}",
        "{{ '<im>'|replace('im', 's') ~ content }}",
        "{% set ns = namespace(x='') %}{% for t in ['<s>', content] %}{% set ns.x = ns.x + t %}{% endfor %}{{ ns.x }}",
        "{{ {'a': '<s>'}['a'] }}{{ content|default('') }}",
        "{{ [{'a': {'b': '<s>'}}, {'a': {'b': content}}]|join('', attribute='a.b') }}",
        "{% generation %}<s>{{ content }}{% endgeneration %}",
    ]
    for source in sources:
        text = render(source, "</s>")
        assert (str(text), runs_of(text)) == ("<s></s>", [0, 3, 4]), source


def test_templates_ways_to_change_a_message_leave_it_said():
    changes = [
        "trim",
        "upper",
        "replace('q', '')",
        "tojson",
        "string",
        "indent(1)",
        "title",
        "center(9)",
        "escape",
        "list|join",
    ]
    for change in changes:
        assert written_characters(render("{{ content|" + change + " }}", "<s>")) == "", change
    assert written_characters(render("{{ content.split('q')|join('') }}{{ items[0] * 2 }}", "<sq>")) == ""
