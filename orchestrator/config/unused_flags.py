"""Flags without effect in combination with the others, in one table: each is an error.

Flags that are without effect only for the model at hand are warnings of the plan instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from mlx_dp.orchestrator.config.flags import FakeFlags, Flags
from mlx_dp.proto.errors import ConfigError
from mlx_dp.proto.messages.commands import EngineKind


@dataclass(frozen=True, slots=True, kw_only=True)
class UnusedFlag:
    """A flag, its place in ``Flags``, and the condition under which it does nothing."""

    flag: str
    group: str
    field: str
    unused: Callable[[Flags], bool]
    reason: str
    """The words after "does nothing"."""
    remedy: str


def refuse_unused_flags(flags: Flags) -> None:
    """Raise ConfigError for the first flag that was given but does nothing."""
    for row in TABLE:
        given = getattr(getattr(flags, row.group), row.field)
        if given != _default(flags, row) and row.unused(flags):
            shown = f" {given}" if isinstance(given, str | int | float | Path) else ""
            # A switch has no value.
            shown = "" if isinstance(given, bool) else shown
            raise ConfigError(f"{row.flag}{shown} does nothing {row.reason}: {row.remedy}")


def _default(flags: Flags, row: UnusedFlag) -> object:
    group = type(getattr(flags, row.group))
    return next(each.default for each in fields(group) if each.name == row.field)


def _with_model(flags: Flags) -> bool:
    return flags.model.engine is not EngineKind.FAKE


def _without_model(flags: Flags) -> bool:
    return flags.model.engine is EngineKind.FAKE


def _alone(flags: Flags) -> bool:
    return not flags.owners.enable_dp_attention


def _open(flags: Flags) -> bool:
    return flags.http.api_key is None


def _all_here(flags: Flags) -> bool:
    return flags.remote.hostfile is None and flags.remote.remote_workers == 0


def _rows() -> Iterator[UnusedFlag]:
    for field in fields(FakeFlags):
        yield UnusedFlag(
            flag=f"--{field.name.replace('_', '-')}",
            group="fake",
            field=field.name,
            unused=_with_model,
            reason="without --engine fake",
            remedy="add --engine fake, or omit it",
        )
    for flag, group, name, unused, reason, remedy in _OTHERS:
        yield UnusedFlag(
            flag=flag, group=group, field=name, unused=unused, reason=reason, remedy=remedy
        )


_OUT: Final = "omit it"
_NO_MODEL: Final = "with --engine fake, which has no model"
_NO_GROUP: Final = "for independent replicas"
_GROUP: Final = "use --enable-dp-attention too, or omit it"
_ALL_HERE: Final = "without workers on other machines"
_REMOTE: Final = "add --remote-workers or --hostfile, or omit it"

_OTHERS: Final = (
    ("--model", "model", "model", _without_model, _NO_MODEL, "omit one of the two"),
    ("--revision", "model", "revision", _without_model, _NO_MODEL, _OUT),
    ("--chat-template", "model", "chat_template", _without_model, _NO_MODEL, _OUT),
    ("--trust-remote-code", "model", "trust_remote_code", _without_model, _NO_MODEL, _OUT),
    ("--mem-fraction-static", "owners", "mem_fraction_static", _without_model, _NO_MODEL, _OUT),
    ("--distributed-backend", "owners", "distributed_backend", _alone, _NO_GROUP, _GROUP),
    ("--enable-dp-lm-head", "owners", "enable_dp_lm_head", _alone, _NO_GROUP, _GROUP),
    ("--distributed-backend", "owners", "distributed_backend", _without_model, _NO_MODEL, _OUT),
    ("--enable-dp-lm-head", "owners", "enable_dp_lm_head", _without_model, _NO_MODEL, _OUT),
    (
        "--open-metadata",
        "http",
        "open_metadata",
        _open,
        "when no route requires a key",
        "add --api-key or MLX_DP_API_KEY, or omit it",
    ),
    ("--dist-init-addr", "remote", "dist_init_addr", _all_here, _ALL_HERE, _REMOTE),
    ("--keys", "remote", "keys", _all_here, _ALL_HERE, _REMOTE),
    (
        "--no-launch",
        "remote",
        "launch",
        lambda flags: flags.remote.hostfile is None,
        "without --hostfile",
        _OUT,
    ),
)

TABLE: Final = tuple(_rows())
