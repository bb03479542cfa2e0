import pytest

from mlx_dp.kvcache.prefix.prefix_nodes import PrefixNode, PrefixNodes


def chain(nodes: PrefixNodes, *keys: tuple[int, ...]) -> list[PrefixNode]:
    added: list[PrefixNode] = []
    for key in keys:
        parent = added[-1] if added else nodes.root("")
        added.append(nodes.add(parent, key, writer=1))
    return added


def test_number_snapshot_and_children_stay_with_the_tail_of_a_split() -> None:
    nodes = PrefixNodes()
    node, child = chain(nodes, (1, 2, 3, 4), (5,))
    node.snapshot = 7
    number = node.node_id
    head = nodes.split(node, 3)
    nodes.check()
    assert (head.key, head.snapshot, list(head.children.values())) == ((1, 2, 3), None, [node])
    assert (node.key, node.snapshot, list(node.children.values())) == ((4,), 7, [child])
    assert node.node_id == number != head.node_id


def test_both_halves_of_a_split_are_as_old_as_the_whole_and_have_its_holders() -> None:
    nodes = PrefixNodes()
    (node,) = chain(nodes, (1, 2, 3))
    node.last_use, node.locks = 9, 2
    head = nodes.split(node, 1)
    assert (head.last_use, head.locks, head.writer) == (9, 2, 1)


def test_a_path_leads_from_below_the_root_to_a_node() -> None:
    nodes = PrefixNodes()
    added = chain(nodes, (1,), (2, 3), (4,))
    assert list(added[-1].path()) == added
    assert [(node.start, node.end) for node in added] == [(0, 1), (1, 3), (3, 4)]
    assert list(nodes.root("").up()) == []


def test_siblings_differ_in_their_first_token() -> None:
    nodes = PrefixNodes()
    chain(nodes, (1, 2))
    with pytest.raises(AssertionError):
        nodes.add(nodes.root(""), (1, 3), writer=1)


def test_a_node_with_children_is_not_removed() -> None:
    nodes = PrefixNodes()
    node, _ = chain(nodes, (1,), (2,))
    with pytest.raises(AssertionError, match="has children"):
        nodes.remove(node)
