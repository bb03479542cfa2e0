"""Finds the MLP and expert blocks of any model by inspecting its modules."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mlx.nn.layers.base import Module

from mlx_dp.worker.shards.projections import Projections, find_projections

Places = tuple[tuple[Any, Any], ...]
"""The containers and keys that refer to one module."""

_SEQUENCE_ARGUMENTS: Final = frozenset({"cache", "mask", "state"})
"""A module with one of these arguments mixes tokens, so its rows are not independent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundBlock:
    """A module that works row by row, and the parts of it that can be divided.

    ``places`` are all containers and keys that refer to it; a shared block has several. ``parts``
    are the blocks within it, in case only those can be divided.
    """

    name: str
    module: Module
    places: Places
    projections: tuple[Projections, ...]
    parts: tuple["FoundBlock", ...]

    def replace_with(self, module: Any) -> None:
        """Put another module in the block's place."""
        for container, key in self.places:
            container[key] = module

    def nested(self) -> Iterator["FoundBlock"]:
        """Yield the block and all blocks within it, the outermost first."""
        yield self
        for part in self.parts:
            yield from part.nested()


@dataclass(slots=True)
class _Subtree:
    blocks: list[FoundBlock]
    by_rows: bool


def find_blocks(model: Module) -> tuple[FoundBlock, ...]:
    """Return the outermost blocks of a model.

    Raises UnsupportedModelError for an MLP that has a layer which cannot be sliced.
    """
    places: dict[int, list[tuple[Any, Any]]] = {}
    _note_places(model, places)
    return tuple(_search("", model, places).blocks)


def find_places(model: Module) -> list[tuple[Module, Places]]:
    """Return every module of a model, with its places."""
    places: dict[int, list[tuple[Any, Any]]] = {}
    _note_places(model, places)
    return [(known[0][0][known[0][1]], tuple(known)) for known in places.values()]


def _note_places(node: Any, places: dict[int, list[tuple[Any, Any]]]) -> None:
    for key, child in _children(node):
        if isinstance(child, Module):
            known = places.setdefault(id(child), [])
            known.append((node, key))
            if len(known) > 1:
                continue
        _note_places(child, places)


def _search(name: str, node: Any, places: dict[int, list[tuple[Any, Any]]]) -> _Subtree:
    below = [
        _search(f"{name}.{key}".removeprefix("."), child, places) for key, child in _children(node)
    ]
    # A block that stands at several places is one.
    blocks = list({id(b.module): b for subtree in below for b in subtree.blocks}.values())
    by_rows = all(subtree.by_rows for subtree in below)
    if not isinstance(node, Module):
        return _Subtree(blocks, by_rows)
    by_rows = by_rows and not _SEQUENCE_ARGUMENTS & _argument_names(node)
    own = find_projections(name, node) if by_rows else None
    if not by_rows or not (own or blocks) or not name:
        return _Subtree(blocks, by_rows)
    inner = [projections for block in blocks for projections in block.projections]
    block = FoundBlock(
        name=name,
        module=node,
        places=tuple(places[id(node)]),
        projections=tuple([own, *inner] if own else inner),
        parts=tuple(blocks),
    )
    return _Subtree([block], by_rows)


def _children(node: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, dict):
        yield from ((key, child) for key, child in node.items() if _holds_modules(child))
    elif isinstance(node, list):
        yield from ((index, child) for index, child in enumerate(node) if _holds_modules(child))


def _holds_modules(child: Any) -> bool:
    return isinstance(child, Module | dict | list)


def _argument_names(module: Module) -> set[str]:
    return set(inspect.signature(module).parameters) if callable(module) else set()
