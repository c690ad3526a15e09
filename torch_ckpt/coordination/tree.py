"""The tree along which the ranks of a group pass what they gather, scatter and broadcast.

A rank meets its parent and its children alone, so no rank has more than a few peers, however large
the group is. The ranks of one node hang below that node's leader, and the leaders below each
other: what a node has to say leaves it once. Knows nothing of torch; ``tree_exchange`` uses it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

__all__ = ["FAN_OUT", "Tree"]

FAN_OUT = 16
"""Where the cost model of benchmarks/README.md is flat: bytes ask for more, messages for less."""


@dataclass(frozen=True)
class Tree:
    """Who passes to whom in a group of ranks. Ranks are numbered as in the group.

    Args:
        root: The rank at the top: the coordinator.
        parents: For each rank the one above it; -1 for the root.

    Example::

        tree = Tree.over(["a", "a", "b", "b"], fan_out=2)
        assert str(tree) == "0(2(3) 1)"
    """

    root: int
    parents: tuple[int, ...]

    @classmethod
    def over(cls, nodes: Sequence[Hashable], *, root: int = 0, fan_out: int) -> Tree:
        """The tree of a group.

        A rank has at most ``fan_out`` children on its own node, and a node's leader (the root, or
        else its lowest rank) as many more that lead other nodes. What is below a rank is shared out
        evenly among its children, in runs of ranks: neighbours by number are so by wire, most
        often.

        Args:
            nodes: For each rank what tells its node from others.
            root: The rank at the top.
            fan_out: At least 2.

        Raises:
            ValueError: ``fan_out`` is less than 2, or ``root`` is no rank.
        """
        if fan_out < 2:
            raise ValueError(f"{fan_out=} is less than 2")
        if not 0 <= root < len(nodes):
            raise ValueError(f"{root=} is no rank of {len(nodes)}")
        on_node: dict[Hashable, list[int]] = {nodes[root]: [root]}
        for rank, node in enumerate(nodes):
            if rank != root:
                on_node.setdefault(node, []).append(rank)
        parents = [-1] * len(nodes)
        leaders = [ranks[0] for ranks in on_node.values()]
        waiting = [leaders, *on_node.values()]
        while waiting:
            top, *below = waiting.pop()
            begin, pieces = 0, min(fan_out, len(below))
            for piece in range(pieces):
                end = begin - (begin - len(below)) // (pieces - piece)
                parents[below[begin]] = top
                waiting.append(below[begin:end])
                begin = end
        return cls(root, tuple(parents))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.parents)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each rank those below it. Those with most ranks below them come first."""
        found: list[list[int]] = [[] for _ in self.parents]
        for rank, parent in enumerate(self.parents):
            if parent >= 0:
                found[parent].append(rank)
        sizes = [1] * self.size
        below = sorted(range(self.size), key=self.depths.__getitem__, reverse=True)
        for rank in below:
            if self.parents[rank] >= 0:
                sizes[self.parents[rank]] += sizes[rank]
        return tuple(tuple(sorted(row, key=lambda rank: -sizes[rank])) for row in found)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each rank how far it is from the root."""
        depths = [-1] * self.size
        depths[self.root] = 0
        for rank in range(self.size):
            way = []
            while depths[rank] < 0:
                way.append(rank)
                rank = self.parents[rank]
            for step, passed in enumerate(reversed(way), 1):
                depths[passed] = depths[rank] + step
        return tuple(depths)

    @cached_property
    def height(self) -> int:
        """How far the farthest rank is from the root."""
        return max(self.depths)

    def subtree(self, rank: int) -> Iterator[int]:
        """A rank and all below it: each before those below it, child after child."""
        waiting = [rank]
        while waiting:
            rank = waiting.pop()
            yield rank
            waiting.extend(reversed(self.children[rank]))

    def __str__(self) -> str:
        def drawn(rank: int) -> str:
            below = " ".join(drawn(child) for child in self.children[rank])
            return f"{rank}({below})" if below else f"{rank}"

        return drawn(self.root)
