"""The sandbox for templates. jinja2's sandbox limits access; this one also limits resources.

A template is a program that comes with a model. Without limits it could loop for hours, or build a
string of a terabyte. Results are the same as in transformers' environment.
"""

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final, cast

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner, Namespace

from mlx_dp.orchestrator.text.template import filters, operations
from mlx_dp.orchestrator.text.template.budget import (
    SMALL,
    Budget,
    TemplateLimitError,
    budget,
    limited_to,
)
from mlx_dp.orchestrator.text.template.compiler import BoundedCodeGenerator, Bounds

MAX_SOURCE_CHARS: Final = 2**20
"""The longest template. Real ones have some ten thousand characters."""

_COMPILE_S: Final = 10.0
_CALL_COST: Final = 64
_PIECES_AT_ONCE: Final = 256
_NAMES_OF_DICT: Final = frozenset(dir(dict))
# Attributes that the sandbox is known to allow unchanged.
_SAFE: Final[Mapping[type, frozenset[str]]] = {
    LoopContext: frozenset(
        ("depth", "depth0", "first", "index", "index0", "last", "length", "revindex", "revindex0")
    ),
    str: frozenset(
        name
        for name in dir(str)
        if not name.startswith("_") and name not in ("format", "format_map")
    ),
}
_NO_VALUE: Final = "value was undefined because a callable raised a StopIteration exception"


class TemplateDict:
    """``dict`` in templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class TemplateNamespace(Namespace):
    """``namespace`` in templates. No name begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As in jinja2, so that "self" can be a name.
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            TemplateNamespace._check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        TemplateNamespace._check_name(name)
        Namespace.__setitem__(self, name, value)

    def __repr__(self) -> str:
        attributes = object.__getattribute__(self, "_Namespace__attrs")
        budget().spend(_CALL_COST)
        budget().make(budget().measure(dict(attributes)))
        return f"<Namespace {attributes!r}>"

    @staticmethod
    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(
                "Chat templates cannot store underscore-prefixed attributes on a namespace, but "
                f"got {name!r}. Please rename the attribute."
            )


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """Counts iterations and calls, and checks sizes before values are made."""

    code_generator_class = BoundedCodeGenerator

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name, function in tuple(self.filters.items()):
            self.filters[name] = filters.bounded_filter(name, function)
        tests = cast(dict[str, Any], self.tests)
        for name, test in tuple(tests.items()):
            tests[name] = filters.bounded_test(name, test)
        self.filters["tojson"] = filters.to_json
        self.globals["dict"] = TemplateDict()
        self.globals["namespace"] = TemplateNamespace
        self._own_functions: set[Any] = {self.globals["range"]}

    def set_function(self, name: str, function: Callable[..., Any]) -> None:
        """Add a global function, which must limit its own results."""
        self.globals[name] = function
        self._own_functions.add(function)

    def bounded_template(self, source: str) -> jinja2.Template:
        """Compile a template. Raises TemplateLimitError if it is too long, and jinja2's errors."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateLimitError(
                f"it has {len(source)} characters, and at most {MAX_SOURCE_CHARS} are read"
            )
        # Constants are computed during compilation.
        with limited_to(Budget((), {}, limit_s=_COMPILE_S)):
            tree = Bounds().visit(self.parse(source))
            tree.set_environment(self)
            template = self.from_string(tree)
        # A ChainMap, which each rendering would copy item by item.
        template.globals = dict(template.globals)
        return template

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a template, block or macro. Called by jinja2's compiled code."""
        if type(pieces) is not list:
            pieces = list(_bounded_pieces(iter(pieces)))
        limits, size = budget(), sum(map(len, pieces))
        if size > SMALL:
            limits.make(size)
        text = "".join(pieces)
        limits.origins.joined(text, pieces)
        return text

    @staticmethod
    def spend(cost: int) -> None:
        budget().spend(cost)

    counted = staticmethod(filters.counted)
    weighed = staticmethod(filters.weighed)
    add = staticmethod(operations.add)
    operate = staticmethod(operations.operate)

    @staticmethod
    def container(value: Any) -> Any:
        """Note a new list, tuple or dict; return it."""
        budget().measure(value)
        return value

    @staticmethod
    def sliced(value: Any) -> Any:
        """Spend the size of a value, before a slice copies a part of it; return it."""
        if isinstance(value, str | list | tuple) and len(value) > SMALL:
            budget().spend(len(value))
        return value

    @staticmethod
    def as_text(value: Any) -> str:
        """Return the text of a value that is about to be written."""
        if type(value) is str:
            return value
        return str(filters.weighed(value))

    @staticmethod
    def concatenate(join: Callable[[Iterable[Any]], str], operands: tuple[Any, ...]) -> str:
        limits, size, all_text = budget(), 0, True
        for operand in operands:
            if type(operand) is str:
                size += len(operand)
            else:
                size += limits.measure(operand)
                all_text = False
        if size > SMALL:
            limits.make(size)
        text = join(operands)
        if all_text:
            limits.origins.joined(text, operands)
        return text

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        # The same result as the base class, by a shorter way.
        if kind is dict:
            if attribute not in _NAMES_OF_DICT:
                try:
                    return obj[attribute]
                except KeyError:
                    return self.undefined(obj=obj, name=attribute)
        elif attribute in _SAFE.get(kind, ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if type(argument) is tuple:
            budget().spend(budget().measure(argument))
        try:
            return obj[argument]
        except (TypeError, LookupError):
            return super().getitem(obj, argument)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        kind = type(function)
        if kind is types.BuiltinMethodType or _is_of_markup(function):
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            try:
                return operations.call_method(function, args, kwargs)
            except StopIteration:
                return self.undefined(_NO_VALUE)
        if kind is Macro and not function.catch_varargs and not function.catch_kwargs:
            return context.call(function, *args, **kwargs)
        if not self.is_safe_callable(function):
            raise SecurityError(f"{function!r} is not safely callable")
        budget().spend(_CALL_COST)
        if function in self._own_functions or _check_known(function, args, kwargs):
            return context.call(function, *args, **kwargs)
        operations.check_unknown(args, _without_scope(kwargs))
        made = context.call(function, *args, **kwargs)
        budget().measure(made)
        return made


def _bounded_pieces(pieces: Iterator[str]) -> Iterator[str]:
    size = 0
    while some := list(islice(pieces, _PIECES_AT_ONCE)):
        size += sum(map(len, some))
        if size > SMALL and size > budget().max_size:
            budget().make(size)
        yield from some


def _is_of_markup(function: Any) -> bool:
    return type(function) is types.MethodType and isinstance(function.__self__, str)


def _check_known(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Limit a call of a known function; return False for an unknown one."""
    match function:
        case Macro():
            if function.catch_varargs or function.catch_kwargs:
                _measure_all(args, kwargs)
        case LoopContext() | BlockReference():
            pass
        case types.FunctionType() if isinstance(text := _text_of_format(function), str):
            operations.check_format(text, args, _without_scope(kwargs))
        case types.MethodType(__self__=Extension()):
            pass
        case types.MethodType(__self__=LoopContext() | Cycler() | Joiner()):
            _measure_all(args, kwargs)
        case TemplateDict() | Joiner():
            _measure_all(args, kwargs)
        case type():
            # Namespaces, cyclers and joiners.
            _measure_all(args, kwargs)
        case _:
            return False
    return True


def _text_of_format(function: Any) -> object:
    """The string whose ``format`` the sandbox has wrapped, if it is one."""
    return getattr(getattr(function, "__wrapped__", None), "__self__", None)


def _measure_all(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    limits = budget()
    limits.make(sum(map(limits.measure, args)) + sum(map(limits.measure, kwargs.values())))


def _without_scope(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Drop the arguments that jinja2 adds to a call in a loop or block."""
    return {name: kwargs[name] for name in kwargs if name not in ("_loop_vars", "_block_vars")}
