from dataclasses import replace

import pytest

from mlx_dp.kvcache.prefix.prefix_facts import PrefixFacts
from mlx_dp.kvcache.prefix.prefix_match import reusable
from mlx_dp.kvcache.prefix.prefix_nodes import PrefixNode
from mlx_dp.kvcache.prefix.prefix_tree import PrefixTree
from mlx_dp.proto.capacity.model_shape import CacheWindow
from tests.support.models.model_shapes import DENSE, HYBRID

STATELESS = PrefixFacts(shape=DENSE)
STATEFUL = PrefixFacts(shape=HYBRID, stateful=True)
TRIMMED = PrefixFacts(shape=HYBRID, stateful=True, trims_to=100)


def put(tree: PrefixTree, ids: tuple[int, ...], *snapshots: int, namespace: str = "") -> PrefixNode:
    """Insert as a request that ends at once; snapshot slots are numbered by their position."""
    leaf = tree.insert(ids, namespace, snapshots, writer=1).leaf
    for node in leaf.up():
        node.writer = None
        if node.end in snapshots:
            tree.attach_snapshot(node, node.end)
    tree.unlock(leaf)
    tree.check()
    return leaf


def keys(tree: PrefixTree) -> list[tuple[int, ...]]:
    return sorted(node.key for node in tree.nodes.values())


def usable(tree: PrefixTree, ids: tuple[int, ...], facts: PrefixFacts) -> tuple[int, int | None]:
    found = reusable(tree.match(ids, ""), len(ids) - 1, facts)
    return (0, None) if found is None else (found.num_tokens, found.node.snapshot)


def test_prompts_that_part_share_the_node_before() -> None:
    tree = PrefixTree(STATELESS)
    put(tree, (1, 2, 3, 4))
    put(tree, (1, 2, 5))
    assert keys(tree) == [(1, 2), (3, 4), (5,)]
    assert (tree.num_tokens, tree.nbytes) == (5, 5000)


def test_a_prompt_that_ends_inside_a_node_splits_nothing() -> None:
    tree = PrefixTree(STATELESS)
    leaf = put(tree, (1, 2, 3, 4))
    assert put(tree, (1, 2)) is leaf
    assert tree.match((1, 2, 9), "").kv_tokens == 2
    assert keys(tree) == [(1, 2, 3, 4)]


def test_a_match_that_ends_inside_a_node_does_not_go_on_below_it() -> None:
    tree = PrefixTree(STATELESS)
    put(tree, (1, 2))
    put(tree, (1, 2, 3))
    assert tree.match((1, 3), "").kv_tokens == 1


def test_a_node_ends_at_each_cut() -> None:
    tree = PrefixTree(STATELESS)
    put(tree, (1, 2, 3, 4))
    insertion = tree.insert((1, 2, 3, 4, 5, 6), "", (1, 3, 5, 6), writer=1)
    assert [node.key for node in insertion.leaf.path()] == [(1,), (2, 3), (4,), (5,), (6,)]


def test_splits_name_tail_length_and_head_in_the_order_in_which_they_happen() -> None:
    tree = PrefixTree(STATELESS)
    whole = put(tree, (1, 2, 3, 4, 5))
    splits = tree.insert((1, 2, 3, 4, 5), "", (1, 3), writer=1).splits
    heads = [node.node_id for node in whole.path()][:2]
    assert splits == ((whole.node_id, 1, heads[0]), (whole.node_id, 2, heads[1]))
    assert whole.key == (4, 5)


def test_a_node_that_is_not_stored_yet_is_split_only_in_the_tree() -> None:
    tree = PrefixTree(STATELESS)
    first = tree.insert((1, 2, 3), "", (), writer=1)
    second = tree.insert((1, 5), "", (), writer=2)
    assert (first.splits, second.splits) == ((), ())
    assert [(node.key, node.writer) for node in first.leaf.path()] == [((1,), 1), ((2, 3), 1)]
    assert [(node.key, node.writer) for node in second.leaf.path()] == [((1,), 1), ((5,), 2)]
    tree.check()


def test_numbers_are_never_given_twice() -> None:
    tree = PrefixTree(STATELESS)
    seen: set[int] = set()
    for _ in range(10):
        leaf = put(tree, (1, 2))
        assert leaf.node_id not in seen
        seen.add(leaf.node_id)
        assert tree.evict_leaf() is leaf


def test_both_halves_of_a_held_node_are_held() -> None:
    tree = PrefixTree(STATELESS)
    held = put(tree, (1, 2, 3, 4))
    tree.lock(held)
    put(tree, (1, 2, 5))
    assert [node.locks for node in held.path()] == [1, 1]
    assert tree.evict_leaf() is not held
    assert tree.evict_leaf() is None
    tree.unlock(held)
    assert [node.locks for node in held.path()] == [0, 0]
    assert tree.evict_leaf() is held
    tree.check()


def test_a_path_is_held_up_to_the_root_and_its_siblings_are_not() -> None:
    tree = PrefixTree(STATELESS)
    put(tree, (1, 2, 3))
    held = put(tree, (1, 2, 4))
    tree.lock(held)
    leaf = tree.evict_leaf()
    assert leaf is not None and leaf.key == (3,)
    assert tree.evict_leaf() is None
    assert keys(tree) == [(1, 2), (4,)]


def test_a_node_without_a_holder_cannot_be_released() -> None:
    tree = PrefixTree(STATELESS)
    leaf = put(tree, (1, 2))
    with pytest.raises(AssertionError, match="is not locked"):
        tree.unlock(leaf)


def test_the_least_recently_used_leaf_goes_first_and_parents_after_their_children() -> None:
    tree = PrefixTree(STATELESS)
    put(tree, (1, 2, 3))
    put(tree, (1, 2, 4))
    put(tree, (5, 6))
    used = tree.match((1, 2, 3), "").node
    assert used is not None
    tree.lock(used)
    tree.unlock(used)
    order = []
    while (leaf := tree.evict_leaf()) is not None:
        order.append(leaf.key)
        tree.check()
    assert order == [(4,), (5, 6), (3,), (1, 2)]
    assert (tree.num_tokens, tree.nbytes) == (0, 0)


def test_a_prefix_still_to_be_saved_is_not_evicted_though_not_held() -> None:
    tree = PrefixTree(STATELESS)
    leaf = tree.insert((1, 2), "", (), writer=7).leaf
    tree.unlock(leaf)
    with pytest.raises(AssertionError, match="request 7 still owes"):
        tree.evict_leaf()


def test_namespaces_share_nothing_and_go_with_their_last_node() -> None:
    tree = PrefixTree(STATELESS)
    put(tree, (1, 2, 3), namespace="one")
    put(tree, (1, 2, 3, 4), namespace="other")
    assert tree.match((1, 2, 3, 4), "one").kv_tokens == 3
    assert tree.match((1, 2, 3, 4), "third").kv_tokens == 0
    assert set(tree.namespaces) == {"one", "other"}
    tree.evict_leaf()
    assert set(tree.namespaces) == {"other"}
    tree.evict_leaf()
    assert not tree.namespaces


def test_without_states_all_but_the_last_token_of_a_prompt_can_be_used() -> None:
    tree = PrefixTree(STATELESS)
    put(tree, (1, 2, 3, 4))
    assert usable(tree, (1, 2, 3, 4), STATELESS) == (3, None)
    assert usable(tree, (1, 2, 3, 9), STATELESS) == (3, None)
    assert usable(tree, (1,), STATELESS) == (0, None)
    assert usable(tree, (9, 1), STATELESS) == (0, None)


def test_with_states_a_match_ends_at_the_deepest_snapshot_before_the_last_token() -> None:
    tree = PrefixTree(STATEFUL)
    put(tree, tuple(range(10)), 3, 6, 10)
    assert usable(tree, tuple(range(20)), STATEFUL) == (10, 10)
    assert usable(tree, tuple(range(10)), STATEFUL) == (6, 6)
    assert usable(tree, (*range(8), 99, 99), STATEFUL) == (6, 6)
    assert usable(tree, (0, 1, 2, 3), STATEFUL) == (3, 3)
    assert usable(tree, (0, 1, 2), STATEFUL) == (0, None)


def test_a_state_that_can_be_cut_back_serves_every_depth_that_is_shared() -> None:
    tree = PrefixTree(TRIMMED)
    put(tree, tuple(range(10)), 10)
    assert usable(tree, (*range(7), 99, 99), TRIMMED) == (7, 10)
    assert usable(tree, tuple(range(10)), TRIMMED) == (9, 10)
    fixed = PrefixTree(STATEFUL)
    put(fixed, tuple(range(10)), 10)
    assert usable(fixed, (*range(7), 99, 99), STATEFUL) == (0, None)
    assert usable(fixed, tuple(range(10)), STATEFUL) == (0, None)


def test_a_state_off_the_path_serves_where_its_path_and_the_prompt_part() -> None:
    tree = PrefixTree(TRIMMED)
    put(tree, (1, 2, 3, 4, 5), 5)
    put(tree, (1, 2, 3, 6, 7))
    assert usable(tree, (1, 2, 3, 6, 7, 8), TRIMMED) == (3, 5)


def test_a_state_on_the_path_that_goes_deeper_is_preferred_to_cutting_one_back() -> None:
    tree = PrefixTree(TRIMMED)
    put(tree, tuple(range(300)), 50, 200)
    put(tree, (*range(80), 999), 81)
    assert usable(tree, (*range(250), 999), TRIMMED) == (200, 200)
    assert usable(tree, (*range(150), 999), TRIMMED)[0] == 80
    assert usable(tree, (*range(60), 999), TRIMMED) == (60, 81)


def test_a_state_beyond_the_window_is_not_cut_back() -> None:
    tree = PrefixTree(TRIMMED)
    put(tree, tuple(range(101)), 101)
    assert usable(tree, (*range(90), 999), TRIMMED) == (0, None)
    put(tree, tuple(range(100)), 100)
    assert usable(tree, (*range(90), 999), TRIMMED) == (90, 100)


def test_an_evicted_state_is_not_led_to() -> None:
    tree = PrefixTree(TRIMMED)
    put(tree, (1, 2, 3), 3)
    last = put(tree, (1, 2, 4, 5), 4)
    assert usable(tree, (1, 2, 9), TRIMMED) == (2, 3)
    assert tree.evict_snapshot() == 3
    tree.check()
    assert usable(tree, (1, 2, 9), TRIMMED) == (2, 4)
    tree.evict_leaf()
    assert tree.evict_leaf() is last
    tree.check()
    assert usable(tree, (1, 2, 9), TRIMMED) == (0, None)


def test_a_node_can_lose_its_snapshot_alone_the_least_recently_used_first() -> None:
    tree = PrefixTree(STATEFUL)
    put(tree, tuple(range(10)), 2, 5, 10)
    first = tree.match((0, 1), "").node
    assert first is not None and first.snapshot == 2
    tree.use_snapshot(first)
    evicted = [tree.evict_snapshot() for _ in range(4)]
    assert evicted == [10, 5, 2, None]
    assert tree.num_tokens == 10
    assert tree.nbytes == 10_000
    tree.check()


def test_the_snapshot_of_a_held_node_stays() -> None:
    tree = PrefixTree(STATEFUL)
    leaf = put(tree, (1, 2, 3), 3)
    tree.lock(leaf)
    assert tree.evict_snapshot() is None
    tree.unlock(leaf)
    assert tree.evict_snapshot() == 3


def test_a_node_has_one_snapshot() -> None:
    tree = PrefixTree(STATEFUL)
    leaf = put(tree, (1, 2, 3), 3)
    with pytest.raises(AssertionError, match="has a snapshot"):
        tree.attach_snapshot(leaf, 7)


def test_states_of_sliding_windows_stop_growing_at_their_width() -> None:
    shape = replace(HYBRID, windows=(CacheWindow(tokens=4, bytes_per_token=10),))
    tree = PrefixTree(PrefixFacts(shape=shape, stateful=True))
    put(tree, (1, 2, 3, 4, 5, 6), 2, 6)
    assert tree.nbytes == 6 * 1000 + 2 * 1_000_000 + 2 * 10 + 4 * 10
