"""The Jinja environment of chat templates: that of the transformers library, with origins followed."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from pagedkv.template.origin import WRITTEN, Text, concat, origins_of, shown, written


class GenerationTag(Extension):
    """`{% generation %}` marks what the model itself said, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the body as a scope of its own."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _OriginGenerator(CodeGenerator):
    """Compiles literals into written texts, and joins through `concat`; nothing is computed at compile time."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(f"environment.written({node.value!r})")
        else:
            super().visit_Const(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        if _escapes(frame):
            super().visit_Concat(node, frame)
            return
        self.write("environment.concat(map(environment.shown, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, (nodes.TemplateData, nodes.Const)):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def _output_const_repr(self, group: Any) -> str:
        return f"environment.written({''.join(group)!r})"

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        if _escapes(frame):
            super()._output_child_pre(node, frame, finalize)
        else:
            self.write("environment.shown(")


def _escapes(frame: Frame) -> bool:
    return bool(frame.eval_ctx.autoescape or frame.eval_ctx.volatile)


class _OriginFormatter(SandboxedFormatter):
    """Puts a stand-in where each field goes, so that the fields' origins can be put back."""

    def __init__(self, environment: Any) -> None:
        super().__init__(environment)
        self._mark = secrets.token_hex(8)
        self._fields: list[str] = []

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return the field's stand-in."""
        self._fields.append(shown(value) if not format_spec else super().format_field(value, format_spec))
        return f"{self._mark}{len(self._fields) - 1};"

    def restore(self, text: str, is_written: bool) -> Text:
        """Return the text with its fields; what stands between is written if the format string was."""
        parts: list[str] = re.split(f"{self._mark}(\\d+);", text)
        parts[::2] = [written(part) if is_written else part for part in parts[::2]]
        parts[1::2] = [self._fields[int(number)] for number in parts[1::2]]
        return concat(parts)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Compiles chat templates."""

    code_generator_class = _OriginGenerator
    concat = staticmethod(concat)
    written = staticmethod(written)
    shown = staticmethod(shown)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[GenerationTag, loopcontrols],
            cache_size=0,
        )
        self.filters.update(tojson=_to_json, join=_join)
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Follow the origins through `str.format`."""
        wrapped = super().wrap_str_format(value)
        text = getattr(value, "__self__", None)
        if wrapped is None or not isinstance(text, Text) or value.__name__ != "format":
            return wrapped

        def format_text(*args: Any, **kwargs: Any) -> Text:
            formatter = _OriginFormatter(self)
            is_written = set(origins_of(text)) <= {WRITTEN}
            return formatter.restore(formatter.vformat(str.__str__(text), args, kwargs), is_written)

        return format_text


def special_texts(named: Mapping[str, str | Sequence[str]]) -> dict[str, Any]:
    """Return the named special tokens as the template may write them."""
    return {
        name: written(value) if isinstance(value, str) else list(map(written, value)) for name, value in named.items()
    }


@pass_eval_context
def _join(context: Any, values: Any, separator: str = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, with origins."""
    if attribute is not None:
        values = map(make_attrgetter(context.environment, attribute), values)
    return Text(shown(separator)).join(map(shown, values))


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(str.__str__(shown(message)))


def _strftime_now(format_: str) -> Text:
    return written(datetime.now().strftime(format_))
