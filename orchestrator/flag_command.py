"""Give a command every flag of ``Flags`` without repeating one of them."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, get_type_hints

from mlx_dp.orchestrator.flags import Flags
from mlx_dp.proto.errors import ConfigError


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Make ``command(flags, **own)`` a function whose signature lists each flag for typer."""
    groups = get_type_hints(Flags)
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.annotation is not Flags
    ]

    @wraps(command)
    def with_flags(**values: Any) -> None:
        built = {
            name: group(**{field.name: at_home(values.pop(field.name)) for field in fields(group)})
            for name, group in groups.items()
        }
        command(Flags(**built), **values)

    parameters = [*own, *(each for group in groups.values() for each in _parameters(group))]
    # Signature and annotations must agree, since typer reads both.
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {each.name: each.annotation for each in parameters}
    del with_flags.__wrapped__
    return with_flags


def repeated(arguments: Sequence[str], flag: str) -> list[str]:
    """``--flag a b`` as ``--flag a --flag b``: vLLM's users type the first, typer reads the second.

    Our commands take no arguments without a flag, which this would swallow.
    """
    spread: list[str] = []
    values: int | None = None
    """Values of the flag so far; None behind another one."""
    for argument in arguments:
        if argument == flag or argument.startswith("-"):
            named = argument.startswith(f"{flag}=")
            values = 0 if argument == flag else 1 if named else None
        elif values is not None:
            spread += [flag] if values else []
            values += 1
        spread.append(argument)
    return spread


def at_home(value: Any) -> Any:
    """A path with its ``~`` expanded, which a shell leaves alone in quotes; else as it is.

    Raises ConfigError for the home directory of an unknown user.
    """
    if not isinstance(value, Path):
        return value
    try:
        return value.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{value} names no home directory of this machine: give the whole path"
        ) from None


def _parameters(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
