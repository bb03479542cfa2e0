"""The part of a match in the prefix tree that a request can use."""

from dataclasses import dataclass

from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.prefix.prefix_nodes import PrefixNode


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest beginning of a request's tokens whose KV the tree has.

    ``node`` holds the last matching token, possibly inside its key; None when nothing matches.
    """

    kv_tokens: int
    node: PrefixNode | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reuse:
    """The first ``num_tokens`` of the path to ``node``; ``stateful``: with that node's snapshot."""

    num_tokens: int
    node: PrefixNode
    stateful: bool


def reusable(match: PrefixMatch, limit: int, facts: PrefixFacts) -> Reuse | None:
    """Choose the longest prefix of at most ``limit`` tokens that a request can continue from."""
    longest = min(match.kv_tokens, limit)
    if match.node is None or longest <= 0:
        return None
    if not facts.stateful:
        return Reuse(num_tokens=longest, node=match.node, stateful=False)
    exact = _deepest_snapshot(match.node, longest)
    cut = _deepest_cut(match.node, longest)
    if cut is None or (exact is not None and exact.num_tokens >= cut.num_tokens):
        return exact
    return cut


def _deepest_snapshot(last: PrefixNode, longest: int) -> Reuse | None:
    for node in last.up():
        if node.snapshot is not None and node.end <= longest:
            return Reuse(num_tokens=node.end, node=node, stateful=True)
    return None


def _deepest_cut(last: PrefixNode, longest: int) -> Reuse | None:
    """Find a state that can be cut back to this path: its node lies on the path or below it."""
    for node in last.up():
        if node.trimmable:
            found = _trimmable_below(node)
            return Reuse(num_tokens=min(node.end, longest), node=found, stateful=True)
    return None


def _trimmable_below(node: PrefixNode) -> PrefixNode:
    """Follow the counts down to the first snapshot. Nodes above a trimmable one are trimmable."""
    while node.snapshot is None:
        node = next(child for child in node.children.values() if child.trimmable)
    return node
