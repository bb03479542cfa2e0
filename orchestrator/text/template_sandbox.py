"""Where templates run. jinja2's sandbox bounds what they reach, and this one what they take.

A template is a program that came with a model. Without bounds it may loop for hours, or ask for
a string of a terabyte.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from types import GeneratorType
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from mlx_dp.orchestrator.text.template_sizes import (
    check_call,
    check_filter,
    check_operation,
    check_text,
    size_of,
)

_ends_at: Final[ContextVar[float]] = ContextVar("template_ends_at")
_LISTING_FILTERS: Final = frozenset({"join", "sum"})
_OF_JINJA: Final = (jinja2.Environment, nodes.EvalContext, Context)


class TemplateTimeoutError(Exception):
    """The template takes longer than it was given."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    """Give what renders inside so many seconds."""
    token = _ends_at.set(time.monotonic() + limit_s)
    try:
        yield
    finally:
        _ends_at.reset(token)


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Looks at the clock in each turn of a loop and at each call, and at sizes before they are."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_sized, **options)
        for name, function in tuple(self.filters.items()):
            self.set_filter(name, function)
        # It makes text without end from nothing.
        del self.globals["lipsum"]

    def set_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Offer a filter, which looks at what it gets."""
        self.filters[name] = _bounded(name, function)

    def bounded_template(self, source: str) -> jinja2.Template:
        """Compile, with a look at the clock in each loop."""
        tree = _Bounds().visit(self.parse(source))
        tree.set_environment(self)
        return self.from_string(tree)

    def tick(self) -> None:
        if time.monotonic() >= _ends_at.get():
            raise TemplateTimeoutError

    def concat(self, *parts: object) -> str:
        check_text(sum(map(size_of, parts)))
        return "".join(map(str, parts))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        args = _listed(args)
        check_call(function, args, kwargs)
        made = super().call(context, function, *args, **kwargs)
        if isinstance(made, str):
            check_text(len(made))
        return made


class _Bounds(NodeTransformer):
    """Puts calls into the sandbox where the compiler would make none."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        tick = nodes.ExprStmt(_sandbox_call("tick", []))
        node.body.insert(0, tick.set_lineno(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        call = _sandbox_call("concat", node.nodes)
        call.set_lineno(node.lineno)
        return call


def _sandbox_call(name: str, arguments: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


def _sized(value: object) -> object:
    """Look at what is about to be written out."""
    if not isinstance(value, str):
        size_of(value)
    return value


def _listed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What comes one by one has no size to look at before."""
    return tuple(list(arg) if isinstance(arg, GeneratorType) else arg for arg in args)


def _bounded(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    # With it come the marks by which jinja2 knows what else to pass.
    @wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name in _LISTING_FILTERS:
            args = _listed(args)
        check_filter(name, [arg for arg in args if not isinstance(arg, _OF_JINJA)], kwargs)
        return original(*args, **kwargs)

    return bounded
