"""Renders chat templates like transformers' ``apply_chat_template``, within limits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, get_args

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.utils import pass_eval_context

from mlx_dp.orchestrator.text.template.budget import (
    Budget,
    TemplateTimeoutError,
    budget,
    limited_to,
)
from mlx_dp.orchestrator.text.template.origins import Origins, Span, constants, is_distinct
from mlx_dp.orchestrator.text.template.sandbox import MAX_SOURCE_CHARS, BoundedSandbox
from mlx_dp.orchestrator.text.text_model import Role
from mlx_dp.proto.errors import ConfigError

LIMIT_S: Final = 2.0
"""CPU time of a template. Real ones take milliseconds for the longest chats."""

_REASONING_FIRST: Final = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, older ones the second."""
_REASONING: Final = frozenset(_REASONING_FIRST)
_CHARS_OF_A_DATE_FIELD: Final = 256

ROLES: Final = frozenset[str](get_args(Role))
"""Values of ``role`` that the API accepts. Templates write some of them into a token."""


class ChatTemplateError(Exception):
    """The model's template refuses these messages, or fails on them."""


class ChatTemplateTimeoutError(ChatTemplateError):
    """The template exceeded its time limit. A larger one may suffice."""


class _Generation(Extension):
    """``{% generation %}`` marks assistant text for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - a name and a type of jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A separate block as in transformers, so that variables set inside stay inside.
        call = self.call_method("_written")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    @pass_eval_context
    def _written(self, context: nodes.EvalContext, caller: Macro) -> str:
        return caller()


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@dataclass(frozen=True, slots=True)
class Rendering:
    """A prompt, and the origins of its parts."""

    text: str
    _origins: Origins

    def is_templates_own(self, spans: Iterable[Span]) -> bool:
        """Whether each of these ordered spans certainly contains no text from a client."""
        return self._origins.wrote(self.text, spans)


class ChatTemplate:
    """One model's template. ``special_tokens``: variables such as bos_token."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises ChatTemplateError for a broken template, with the line and the fault."""

        def strftime_now(form: str) -> str:
            budget().make(_CHARS_OF_A_DATE_FIELD * len(form))
            return now().strftime(form)

        environment = BoundedSandbox(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.set_function("raise_exception", _raise_exception)
        environment.set_function("strftime_now", strftime_now)
        try:
            self._template = environment.bounded_template(source)
            self._names_developer = _names(environment.parse(source), "developer")
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"line {error.lineno}: {error.message}") from error
        # Python's compiler has its own limits, such as on nesting.
        except Exception as error:
            raise ChatTemplateError(str(error) or type(error).__name__) from error
        self._special_tokens = {name: _copy(token) for name, token in special_tokens.items()}
        self._roles = {role: _copy(role) for role in ROLES}
        distinct = filter(is_distinct, self._special_tokens.values())
        own = [*constants(self._template), *distinct, *self._roles.values()]
        self._own = frozenset(map(id, own))

    def render(self, messages: Sequence[Mapping[str, object]], **how: Any) -> str:
        """Return the text of ``rendering``."""
        return self.rendering(messages, **how).text

    def rendering(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, object] | None = None,
        limit_s: float = LIMIT_S,
    ) -> Rendering:
        """Return the prompt. Raises ChatTemplateError.

        ``limit_s`` is CPU time of this thread, per started thousand messages and per started
        mebibyte. With CPU time, a busy machine serves the same requests as an idle one.
        """
        seen = list(map(self._as_seen, messages))
        variables: dict[str, Any] = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **(arguments or {}),
        }
        try:
            limits = Budget(seen, variables, limit_s=limit_s, own=self._own)
            variables["messages"] = seen
            variables["add_generation_prompt"] = add_generation_prompt
            with limited_to(limits):
                return Rendering(self._template.render(variables), limits.origins)
        except TemplateTimeoutError as error:
            raise ChatTemplateTimeoutError(
                f"it takes more than {limit_s:g} s of CPU time for each 1000 messages and each MiB"
            ) from error
        # A template is a program that came with the model, and may raise anything.
        except Exception as error:
            raise ChatTemplateError(str(error)) from error

    def _as_seen(self, message: Mapping[str, object]) -> Mapping[str, object]:
        """Prepare a message for the template, as transformers does."""
        plain = type(message) is dict and None not in message.values()
        seen = message if plain else {k: v for k, v in message.items() if v is not None}
        role = seen.get("role")
        if role == "developer" and not self._names_developer:
            role = "system"
        if isinstance(role, str) and role in self._roles:
            seen = {**seen, "role": self._roles[role]}
        if _REASONING.isdisjoint(seen):
            return seen
        reasoning = next(seen[name] for name in _REASONING_FIRST if name in seen)
        return {"thinking": reasoning, **seen, "reasoning_content": reasoning}


def _copy(text: str) -> str:
    """Return a new string object with the same text."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "surrogatepass")


def read_template(path: Path) -> str:
    """Read the file of ``--chat-template``, and check that it compiles. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SOURCE_CHARS + 1)
        if len(data) > MAX_SOURCE_CHARS:
            raise ConfigError(
                f"--chat-template {path} is too large: a template has at most "
                f"{MAX_SOURCE_CHARS} bytes"
            )
        source = data.decode("utf-8-sig")
        ChatTemplate(source, {})
    except OSError as error:
        raise ConfigError(
            f"--chat-template {path} cannot be read ({error.strerror}): name a jinja file"
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template {path} is not UTF-8 text: name a jinja file") from error
    except ChatTemplateError as error:
        raise ConfigError(
            f"--chat-template {path} is not a valid jinja template: {error}"
        ) from error
    return source


def _names(tree: nodes.Template, role: str) -> bool:
    """Whether the template has this role as a constant."""
    return any(constant.value == role for constant in tree.find_all(nodes.Const))
