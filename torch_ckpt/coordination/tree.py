"""The tree along which the ranks of a group gather, scatter and broadcast.

A rank exchanges messages only with its parent and its children. So the number of connections per
rank is bounded, whatever the size of the group. All ranks of a node are below the leader of that
node, so only leaders exchange messages between nodes. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["FAN_OUT", "Tree"]

FAN_OUT = 16
"""Children per rank. The cost model of docs/benchmarks.md is flat around this value."""


@dataclass(frozen=True)
class Tree:
    """The parents and children of the ranks of a group. Ranks are numbered as in the group.

    Args:
        root: The rank at the top of the tree, which is the coordinator.
        parents: The parent of each rank; -1 for the root.

    Example::

        tree = Tree.over(["a", "a", "b", "b"], fan_out=2)
        assert str(tree) == "0(2(3) 1)"
    """

    root: int
    parents: tuple[int, ...]

    @classmethod
    def over(cls, nodes: Sequence[Hashable], *, root: int = 0, fan_out: int) -> Tree:
        """Builds the tree of a group.

        The leader of a node is the root, or the lowest rank of the node. A rank has at most
        ``fan_out`` children on its own node. A leader has at most ``fan_out`` more children, which
        are leaders of other nodes. The ranks below a rank are split evenly among its children, in
        runs of consecutive ranks, because consecutive ranks are usually close in the network.

        Args:
            nodes: An identifier of each rank's node.
            root: The rank at the top of the tree.
            fan_out: Most children of a rank on its own node; at least 2.

        Raises:
            ValueError: ``fan_out`` is less than 2, or ``root`` is not a rank of the group.
        """
        if fan_out < 2:
            raise ValueError(f"{fan_out=} is less than 2")
        if not 0 <= root < len(nodes):
            raise ValueError(f"{root=} is not a rank of a group of {len(nodes)}")
        on_node: dict[Hashable, list[int]] = {nodes[root]: [root]}
        for rank, node in enumerate(nodes):
            if rank != root:
                on_node.setdefault(node, []).append(rank)
        parents = [-1] * len(nodes)
        leaders = [ranks[0] for ranks in on_node.values()]
        pending = [leaders, *on_node.values()]
        while pending:
            top, *below = pending.pop()
            begin, count = 0, min(fan_out, len(below))
            for child in range(count):
                end = begin - (begin - len(below)) // (count - child)
                parents[below[begin]] = top
                pending.append(below[begin:end])
                begin = end
        return cls(root, tuple(parents))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each rank, in descending order of the size of their subtrees."""
        children: list[list[int]] = [[] for _ in self.parents]
        for rank, parent in enumerate(self.parents):
            if parent >= 0:
                children[parent].append(rank)
        sizes = [1] * self.size
        deepest_first = sorted(range(self.size), key=self.depths.__getitem__, reverse=True)
        for rank in deepest_first:
            if self.parents[rank] >= 0:
                sizes[self.parents[rank]] += sizes[rank]
        return tuple(tuple(sorted(row, key=lambda rank: -sizes[rank])) for row in children)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The distance of each rank from the root, in edges."""
        depths = [-1] * self.size
        depths[self.root] = 0
        for rank in range(self.size):
            path = []
            while depths[rank] < 0:
                path.append(rank)
                rank = self.parents[rank]
            for step, descendant in enumerate(reversed(path), 1):
                depths[descendant] = depths[rank] + step
        return tuple(depths)

    @cached_property
    def height(self) -> int:
        """The largest distance of a rank from the root, in edges."""
        return max(self.depths)

    def subtree(self, rank: int) -> Iterator[int]:
        """Yields a rank and all ranks below it, in depth-first order."""
        pending = [rank]
        while pending:
            rank = pending.pop()
            yield rank
            pending.extend(reversed(self.children[rank]))

    def __str__(self) -> str:
        def drawn(rank: int) -> str:
            below = " ".join(drawn(child) for child in self.children[rank])
            return f"{rank}({below})" if below else f"{rank}"

        return drawn(self.root)
