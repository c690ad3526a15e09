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
"""Children per rank. The cost model of docs/decisions/cost-model.md is flat around this value."""


@dataclass(frozen=True)
class Tree:
    """The parents and children of the ranks of a group. Ranks are numbered as in the group.

    The parent of a rank is a lower rank; -1 for rank 0, the root.

    Example::

        tree = Tree.over(["a", "a", "b", "b"], fan_out=2)
        assert str(tree) == "0(2(3) 1)"
    """

    parents: tuple[int, ...]

    @classmethod
    def over(cls, nodes: Sequence[Hashable], *, fan_out: int) -> Tree:
        """Builds the tree of a group from an identifier of each rank's node.

        The leader of a node is its lowest rank. A rank has at most ``fan_out`` children on its own
        node, at least 2. A leader has at most ``fan_out`` more children, which are leaders of other
        nodes. The ranks below a rank are split evenly among its children, in runs of consecutive
        ranks, because consecutive ranks are usually close in the network.
        """
        if fan_out < 2:
            raise ValueError(f"{fan_out=} is less than 2")
        on_node: dict[Hashable, list[int]] = {}
        for rank, node in enumerate(nodes):
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
        return cls(tuple(parents))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """The children of each rank, in descending order of the size of their subtrees."""
        children: list[list[int]] = [[] for _ in self.parents]
        sizes = [1] * self.size
        for rank in range(self.size - 1, 0, -1):
            children[self.parents[rank]].append(rank)
            sizes[self.parents[rank]] += sizes[rank]
        return tuple(tuple(sorted(row, key=lambda rank: (-sizes[rank], rank))) for row in children)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The distance of each rank from the root, in edges."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
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

        return drawn(0)
