"""Renders chat templates as transformers does: sandboxed, with the helpers that they expect."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from mlx_dp.orchestrator.text.template_sandbox import (
    BoundedSandbox,
    TemplateTimeoutError,
    time_limit,
)
from mlx_dp.orchestrator.text.template_sizes import MAX_WIDTH, TemplateLimitError, check_text

LIMIT_S: Final = 2.0
"""What a template may take. Those in use take milliseconds for the longest chats."""


class ChatTemplateError(Exception):
    """The template refuses these messages, or breaks on them. The model's part, not ours."""


class ChatTemplateTimeoutError(ChatTemplateError):
    """The template takes longer than it was given. It may do with more."""


class _Generation(Extension):
    """``{% generation %}`` marks what the assistant said, for training: here it is transparent."""

    tags = {"generation"}  # noqa: RUF012 - a name and a type of jinja2

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, int) and indent > MAX_WIDTH:
        raise TemplateLimitError(f"it indents by more than {MAX_WIDTH}")
    # Unlike jinja2's own filter: no HTML escapes, and characters stay as they are.
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    if indent is None and separators is None:
        return encoder.encode(value)
    pieces: list[str] = []
    size = 0
    for piece in encoder.iterencode(value):
        size += len(piece)
        check_text(size)
        pieces.append(piece)
    return "".join(pieces)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """One model's template. ``special_tokens`` are the names it may use, such as bos_token."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = BoundedSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.set_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        self._template = environment.bounded_template(source)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, object] | None = None,
        limit_s: float = LIMIT_S,
    ) -> str:
        """Return the prompt's text, within ``limit_s``. Raises ChatTemplateError."""
        variables: dict[str, Any] = {
            **self._special_tokens,
            **(arguments or {}),
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            with time_limit(limit_s):
                return self._render(variables)
        except TemplateTimeoutError as error:
            raise ChatTemplateTimeoutError(f"it takes longer than {limit_s:g} s") from error
        # A template is a program that came with the model: on odd messages it may do anything.
        except Exception as error:
            raise ChatTemplateError(str(error)) from error

    def _render(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        for piece in self._template.generate(variables):
            size += len(piece)
            check_text(size)
            pieces.append(piece)
        return "".join(pieces)
