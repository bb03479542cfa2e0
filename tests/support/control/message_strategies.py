"""Hypothesis strategies built from the annotations of the messages themselves.

A field that is added to a message is thereby tested without a line here.
"""

import dataclasses
import math
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from msgspec import Meta

from mlx_dp.proto.capacity.parallel import ParallelState
from mlx_dp.proto.messages.events import TokenChunk
from mlx_dp.proto.messages.group import GroupPlace

LONGEST = 8
"""The largest length of tuples and texts: their bounds have tests of their own."""


def of_class(kind: type) -> st.SearchStrategy[Any]:
    """Any valid value of a frozen dataclass, all fields drawn."""
    hints = get_type_hints(kind, include_extras=True)
    fields = {field.name: of_type(hints[field.name]) for field in dataclasses.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda drawn: kind(**_fit(kind, drawn)))


def _fit(kind: type, drawn: dict[str, Any]) -> dict[str, Any]:
    """Make fields that depend on each other agree."""
    if kind is ParallelState:
        for name in ("dp", "tp", "attn_dp", "attn_tp"):
            drawn[f"{name}_rank"] %= drawn[f"{name}_size"]
    elif kind is TokenChunk and drawn["logprobs"]:
        pairs = min(len(drawn["ids"]), len(drawn["logprobs"]))
        drawn |= {name: drawn[name][:pairs] for name in ("ids", "logprobs")}
    elif kind is GroupPlace:
        size = min(len(drawn["addresses"]), len(drawn["peers"]))
        drawn |= {name: drawn[name][:size] for name in ("addresses", "peers")}
        drawn |= {"size": size, "rank": drawn["rank"] % size}
    return drawn


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that the annotation allows."""
    meta = Meta()
    if get_origin(hint) is Annotated:
        hint, meta = _flatten(hint)
    if get_origin(hint) in (UnionType, Union):
        return st.one_of([of_type(member) for member in get_args(hint)])
    if get_origin(hint) is tuple:
        return _tuples(get_args(hint), meta)
    if hint is NoneType:
        return st.none()
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(*_int_bounds(meta))
    if hint is float:
        return st.floats(
            min_value=meta.ge if meta.gt is None else meta.gt,
            max_value=meta.le if meta.lt is None else meta.lt,
            exclude_min=meta.gt is not None,
            exclude_max=meta.lt is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    if hint is str:
        least = meta.min_length or 0
        longest = min(LONGEST, meta.max_length or LONGEST)
        return st.text(min_size=least, max_size=max(least, longest))
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    if dataclasses.is_dataclass(hint):
        return of_class(hint)
    raise TypeError(f"no strategy for {hint!r}: add one")


def _flatten(hint: Any) -> tuple[Any, Meta]:
    """Join the bounds of nested annotations; typing has already unnested the types."""
    inner, *metas = get_args(hint)
    known = ("gt", "ge", "lt", "le", "min_length", "max_length")
    bounds: dict[str, Any] = {}
    for meta in metas:
        bounds |= {name: value for name in known if (value := getattr(meta, name)) is not None}
    return inner, Meta(**bounds)


def _int_bounds(meta: Meta) -> tuple[int | None, int | None]:
    low = meta.ge if meta.gt is None else math.floor(meta.gt) + 1
    high = meta.le if meta.lt is None else math.ceil(meta.lt) - 1
    return (None if low is None else int(low)), (None if high is None else int(high))


def _tuples(members: tuple[Any, ...], meta: Meta) -> st.SearchStrategy[Any]:
    if len(members) == 2 and members[1] is Ellipsis:
        return st.lists(
            of_type(members[0]),
            min_size=meta.min_length or 0,
            max_size=min(LONGEST, meta.max_length or LONGEST),
        ).map(tuple)
    return st.tuples(*[of_type(member) for member in members])


def unbounded_fields(kind: type, path: str = "") -> list[str]:
    """Names of the fields, nested ones too, whose length no bound limits."""
    hints = get_type_hints(kind, include_extras=True)
    path = path or kind.__name__
    return [
        found
        for field in dataclasses.fields(kind)
        for found in _unbounded(hints[field.name], f"{path}.{field.name}")
    ]


def _unbounded(hint: Any, path: str) -> list[str]:
    meta = Meta()
    if get_origin(hint) is Annotated:
        hint, meta = _flatten(hint)
    members = [member for member in get_args(hint) if member is not Ellipsis]
    if dataclasses.is_dataclass(hint):
        return unbounded_fields(hint, path)
    variable = hint is str or (get_origin(hint) is tuple and Ellipsis in get_args(hint))
    found = [path] if variable and meta.max_length is None else []
    return found + [name for member in members for name in _unbounded(member, path)]
