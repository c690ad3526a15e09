"""The shape of the tree, for many sizes, fan-outs and ways in which ranks lie on nodes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence

import pytest

from torch_ckpt.coordination.tree import FAN_OUT, Tree

FAN_OUTS = [2, 3, 5, 16, 64]
SEED = 20_407


def maps_of_nodes(size: int) -> Iterator[list[int]]:
    """By rank the node: even, one in all, one each, in turn, and at random."""
    rng = random.Random(SEED + size)
    yield [rank // 8 for rank in range(size)]
    yield [0] * size
    yield list(range(size))
    yield [rank % 3 for rank in range(size)]
    for count in (2, size // 4 + 1):
        yield [rng.randrange(count) for _ in range(size)]


def trees() -> Iterator[tuple[Tree, list[int], int]]:
    """With the nodes and the fan-out of each."""
    for size in [*range(1, 20), 63, 64, 65, 250]:
        for nodes in maps_of_nodes(size):
            for fan_out in FAN_OUTS:
                yield Tree.over(nodes, fan_out=fan_out), nodes, fan_out


def leaders_of(nodes: Sequence[Hashable]) -> set[int]:
    """The lowest rank of every node."""
    return {nodes.index(node) for node in nodes}


def levels(count: int, fan_out: int) -> int:
    """How many levels below the first a tree of so many needs."""
    found, room = 0, 1
    while room < count:
        found += 1
        room += fan_out**found
    return found


def test_every_rank_is_reached_once_and_after_its_parent() -> None:
    for tree, nodes, _ in trees():
        order = list(tree.subtree(0))
        assert sorted(order) == list(range(len(nodes)))
        place = {rank: number for number, rank in enumerate(order)}
        for rank in order:
            for child in tree.children[rank]:
                assert tree.parents[child] == rank
                assert place[child] > place[rank]
                assert tree.depths[child] == tree.depths[rank] + 1


def test_subtree_has_the_ranks_of_its_children_in_their_order() -> None:
    for tree, _, _ in trees():
        for rank in range(tree.size):
            below = [found for child in tree.children[rank] for found in tree.subtree(child)]
            assert list(tree.subtree(rank)) == [rank, *below]


def test_rank_has_no_more_children_than_the_fan_out_on_its_node_and_as_many_elsewhere() -> None:
    for tree, nodes, fan_out in trees():
        for rank, children in enumerate(tree.children):
            near = sum(nodes[child] == nodes[rank] for child in children)
            assert near <= fan_out
            assert len(children) - near <= fan_out


def test_node_meets_other_nodes_through_its_leader_alone() -> None:
    for tree, nodes, _ in trees():
        leaders = leaders_of(nodes)
        for rank, parent in enumerate(tree.parents):
            if parent >= 0 and nodes[rank] != nodes[parent]:
                assert {rank, parent} <= leaders
        entries = Counter(
            nodes[rank]
            for rank, parent in enumerate(tree.parents)
            if parent < 0 or nodes[parent] != nodes[rank]
        )
        assert set(entries.values()) == {1}


def test_ranks_below_a_leader_are_shared_out_evenly_among_those_of_other_nodes() -> None:
    for tree, nodes, fan_out in trees():
        if nodes != list(range(len(nodes))):  # One rank on each node.
            continue
        for children in tree.children:
            sizes = [len(list(tree.subtree(child))) for child in children]
            assert max(sizes, default=0) - min(sizes, default=0) <= 1
            assert len(children) == fan_out or max(sizes, default=1) == 1


def test_tree_is_no_higher_than_one_of_nodes_above_one_of_the_largest_node() -> None:
    for tree, nodes, fan_out in trees():
        largest = max(Counter(nodes).values())
        assert tree.height <= levels(len(set(nodes)), fan_out) + levels(largest, fan_out)


def test_height_of_16384_ranks_on_nodes_of_8_is_4_with_the_default_fan_out() -> None:
    tree = Tree.over([rank // 8 for rank in range(16_384)], fan_out=FAN_OUT)
    assert tree.height == 4
    assert max(map(len, tree.children)) <= FAN_OUT + 7


def test_few_ranks_of_one_node_all_hang_below_the_root() -> None:
    for size in range(1, 18):
        tree = Tree.over(["node"] * size, fan_out=16)
        assert list(tree.children[0]) == list(range(1, size))


def test_tree_does_not_depend_on_how_nodes_are_called() -> None:
    nodes = [random.Random(SEED).randrange(5) for _ in range(40)]
    renamed = [f"node {9 - node}" for node in nodes]
    assert Tree.over(nodes, fan_out=2) == Tree.over(renamed, fan_out=2)


def test_tree_prints_and_compares() -> None:
    tree = Tree.over("aabbbb", fan_out=2)
    assert str(tree) == "0(2(3(4) 5) 1)"
    assert repr(tree) == "Tree(parents=(-1, 0, 0, 2, 3, 2))"
    assert tree == Tree((-1, 0, 0, 2, 3, 2))
    assert hash(tree) == hash(Tree((-1, 0, 0, 2, 3, 2)))
    assert tree != Tree.over("aabbbb", fan_out=3)


@pytest.mark.parametrize("fan_out", [1, 0, -3])
def test_fan_out_below_2_is_refused(fan_out: int) -> None:
    with pytest.raises(ValueError, match="less than 2"):
        Tree.over([0, 0], fan_out=fan_out)
