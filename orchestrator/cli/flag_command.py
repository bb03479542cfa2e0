"""Turns the fields of ``Flags`` into the options of a typer command."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, get_type_hints

from mlx_dp.orchestrator.config.flags import Flags
from mlx_dp.proto.errors import ConfigError


def takes_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``command(flags, **own)`` so that its signature lists every flag for typer."""
    groups = get_type_hints(Flags)
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.annotation is not Flags
    ]

    @wraps(command)
    def with_flags(**values: Any) -> None:
        built = {
            name: group(
                **{field.name: expand_home(values.pop(field.name)) for field in fields(group)}
            )
            for name, group in groups.items()
        }
        command(Flags(**built), **values)

    parameters = [*own, *(each for group in groups.values() for each in _parameters(group))]
    # typer reads both, so they must agree.
    with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_flags.__annotations__ = {each.name: each.annotation for each in parameters}
    del with_flags.__wrapped__
    return with_flags


def spread_values(arguments: Sequence[str], flag: str) -> list[str]:
    """Rewrite ``--flag a b`` (as in vLLM) to ``--flag a --flag b``, which typer reads.

    It would swallow positional arguments, but our commands have none.
    """
    spread: list[str] = []
    values: int | None = None
    """Values of the flag so far; None after another flag."""
    for argument in arguments:
        if argument == flag or argument.startswith("-"):
            named = argument.startswith(f"{flag}=")
            values = 0 if argument == flag else 1 if named else None
        elif values is not None:
            spread += [flag] if values else []
            values += 1
        spread.append(argument)
    return spread


def expand_home(value: Any) -> Any:
    """Expand ``~`` in a path, which shells leave alone in quotes; return other values unchanged.

    Raises ConfigError for the home directory of an unknown user.
    """
    if not isinstance(value, Path):
        return value
    try:
        return value.expanduser()
    except RuntimeError:
        raise ConfigError(
            f"{value} names no home directory on this machine: give the full path"
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
