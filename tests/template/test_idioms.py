"""Templates written as models' authors write them render what plain Jinja renders, with their own tokens written.

The oracle is Jinja's sandbox with the options of the transformers library, on plain strings.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedkv.template.environment import ChatEnvironment, special_texts
from pagedkv.template.origin import WRITTEN, origins_of, said, written

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "additional_special_tokens": ["<x>"]}
IDIOMS = {
    "headers": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
        "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.index0 == 0 %}"
        "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    "roles in tokens": (
        "{% for message in messages %}{{'<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "default system": (
        "{%- if messages[0].role == 'system' %}\n"
        "    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}\n"
        "{%- else %}\n    {{- '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}\n{%- endif %}\n"
        "{%- for message in messages[1:] if message.role != 'system' %}\n"
        "    {{- '<|im_start|>' ~ message.role ~ '\n' ~ message.content ~ '<|im_end|>' ~ '\n' }}\n{%- endfor %}"
    ),
    "thinking": (
        "{% for m in messages %}{% set content = m.content %}{% if '</think>' in content %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if m.role == 'assistant' and loop.last %}<think>{{ m.content.split('</think>')[0].rstrip('\n')"
        ".split('<think>')[-1].lstrip('\n') }}</think>{% endif %}<|im_start|>{{ content }}<|im_end|>{% endfor %}"
    ),
    "alternation": (
        "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ ' ' + message['content'] + eos_token}}{% else %}"
        "{{ raise_exception('unknown role') }}{% endif %}{% endfor %}"
    ),
    "namespace and macro": (
        "{% macro turn(role, text) %}<turn>{{ role }}\n{{ text }}</turn>\n{% endmacro %}"
        "{% set ns = namespace(found=false, text='') %}{% for m in messages %}{% if m.content.startswith('q') %}"
        "{% set ns.found = true %}{% continue %}{% endif %}{% set ns.text = ns.text ~ turn(m.role, m.content|trim) %}"
        "{% endfor %}{{ ns.text }}{{ ns.found }}{{ messages|length }}"
    ),
    "filters": (
        "{{ messages|map(attribute='content')|join('<sep>') }}{{ (messages|selectattr('role', 'equalto', 'user')|list)"
        "|length }}{% for m in messages|reverse %}{{ m.content|upper|replace('Q', '<q>') }}{{ m|tojson }}"
        "{{ m.content[:2]|default('none', true) }}{{ '%s|%d' % (m.role, loop.index) }}"
        "{{ '{:>4}<e>{}'.format(m.role, m.content) }}{{ m.content|length }}{{ m.content|title }}{% endfor %}"
        "{{ additional_special_tokens|join }}{{ 'a' in messages[0].content }}{{ messages[0].content in 'abq' }}"
    ),
    "blocks": (
        "{% set head %}<h>{{ messages[0].content }}</h>{% endset %}{{ head.strip() }}{% filter upper %}<a>"
        "{{ messages[-1]['content'] }}{% endfilter %}{% call(x) wrap() %}{{ x }}{% endcall %}"
    ).replace("{% set head %}", "{% macro wrap() %}<w>{{ caller('<i>') }}</w>{% endmacro %}{% set head %}"),
    "tests": (
        "{% for m in messages %}{% if m.content is string and m.content is not mapping %}{{ m.get('name', '-') }}"
        "{{ m.content.splitlines()|join('<br>') }}{{ m.content == 'q' }}{{ m.content|list|unique|join }}"
        "{% endif %}{% if tools is defined and tools is none %}T{% endif %}{{ tool_calls is defined }}{% endfor %}"
    ),
}


def plain_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)

    def refuse(message):
        raise ValueError(message)

    environment.globals["raise_exception"] = refuse
    return environment


PLAIN = {name: plain_environment().from_string(source) for name, source in IDIOMS.items()}
FOLLOWED = {name: ChatEnvironment().from_string(source) for name, source in IDIOMS.items()}
CONTENTS = st.lists(
    st.text("abq \n", max_size=8) | st.sampled_from(["<think>a</think>b", "</think>"]), min_size=1, max_size=4
)


def outcome(template, **context):
    try:
        return str(template.render(add_generation_prompt=True, tools=None, **context))
    except Exception as error:
        return f"refused: {error}"


@settings(max_examples=40, deadline=None)
@given(contents=CONTENTS, start=st.sampled_from(["user", "system"]))
@pytest.mark.parametrize("name", IDIOMS)
def test_idiom_renders_what_plain_jinja_renders(name, contents, start):
    roles = [start, "user", "assistant", "user", "assistant"][start == "user" :]
    plain = [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]
    followed = [
        {"role": written(turn["role"]), "content": said(turn["content"], last=turn is plain[-1])} for turn in plain
    ]
    expected = outcome(PLAIN[name], messages=plain, **SPECIAL)
    assert outcome(FOLLOWED[name], messages=followed, **special_texts(SPECIAL)) == expected


@pytest.mark.parametrize("name", sorted(set(IDIOMS) - {"tests", "filters"}))
def test_idiom_writes_its_tokens_and_nothing_of_a_message(name):
    """Messages say capitals, which no idiom writes but by a filter that changes the case of what it is given."""
    contents = ["\u0416\u0416", "\u0416", "\u0416\u0416\u0416"]
    messages = [
        {"role": written(role), "content": said(text, last=False)}
        for role, text in zip(["user", "assistant", "user"], contents, strict=True)
    ]
    text = FOLLOWED[name].render(messages=messages, add_generation_prompt=True, **special_texts(SPECIAL))
    for character, origin in zip(str.__str__(text), origins_of(text), strict=True):
        assert (origin == WRITTEN) == (character != "\u0416"), (character, origin)
