"""What a gather and a scatter along a tree cost: on paper, and as a simulation of every rank.

The same few costs go into both: `Costs` has what was measured on one machine. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch_ckpt.coordination.tree import Tree


@dataclass(frozen=True)
class Costs:
    """Seconds of one rank, which does one thing at a time.

    Attributes:
        message_s: A message, for the rank that sends it and for the one that receives it.
        latency_s: Until a message between nodes arrives, besides.
        bytes_per_s: What passes between two ranks, either of them busy meanwhile.
        parse_items_per_s: What the coordinator reads of all ranks' plans.
        plan_items_per_s: What it then checks, balances and answers.
    """

    message_s: float = 150e-6
    latency_s: float = 50e-6
    bytes_per_s: float = 1.4e9
    parse_items_per_s: float = 6e6
    plan_items_per_s: float = 25.6e6 / 7

    def transfer_s(self, nbytes: int) -> float:
        """Passing so many bytes from one rank to another."""
        return self.message_s + nbytes / self.bytes_per_s

    def planning_s(self, items: int) -> float:
        """What the coordinator does with the items of all ranks, whichever way they came."""
        return items / self.parse_items_per_s + items / self.plan_items_per_s


@dataclass(frozen=True)
class World:
    """The ranks of a save, and what each gives to be gathered and is given by a scatter.

    Attributes:
        ranks: How many, as many on each node.
        per_node: How many of them are on one.
        fan_out: That of the tree; ``None`` where the coordinator meets every rank itself.
        nbytes: What each rank gives or gets.
    """

    ranks: int
    per_node: int = 8
    fan_out: int | None = 16
    nbytes: int = 128_000

    def tree(self) -> Tree:
        """Who passes to whom."""
        if self.fan_out is None:
            return Tree((-1,) + (0,) * (self.ranks - 1))
        nodes = [rank // self.per_node for rank in range(self.ranks)]
        return Tree.over(nodes, fan_out=self.fan_out)


@dataclass(frozen=True)
class Load:
    """What one rank does in a gather; in a scatter it does the same the other way round.

    Attributes:
        peers: With how many ranks it exchanges messages.
        nbytes: What it receives and sends.
        seconds: For how long it is busy.
    """

    peers: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Cost:
    """Of a gather and a scatter: what two ranks do, and the seconds until all is done.

    Attributes:
        coordinator: The rank at the top.
        inner: The busiest of those right below it.
        gather_s: Until the coordinator has everything.
        scatter_s: Until the last rank has its part.
    """

    coordinator: Load
    inner: Load
    gather_s: float
    scatter_s: float


def _levels(count: int, fan_out: int) -> Iterator[tuple[int, int]]:
    """From the top, along the way to the largest part: (children, members of the largest)."""
    while count > 1:
        children, below = min(fan_out, count - 1), count - 1
        count = -(-below // fan_out)
        yield children, below


def reckon(world: World, costs: Costs) -> Cost:
    """The closed form.

    N ranks of b bytes are on M nodes of R; F is the fan-out, o what a message takes, B bytes/s. A
    rank that leads n nodes takes from min(F, n - 1) others, each of which leads (n - 1) / F, and so
    is busy for t(n) = min(F, n - 1) o + (n - 1) R b / B. All of it takes t(M) + t((M - 1) / F) +
    ..., a latency for each of these, and the same within one node. A scatter takes that, too.
    """
    if world.fan_out is None:
        each = costs.transfer_s(world.nbytes)
        busy = (world.ranks - 1) * each
        coordinator = Load(world.ranks - 1, (world.ranks - 1) * world.nbytes, busy)
        total = busy + costs.latency_s
        return Cost(coordinator, Load(1, world.nbytes, each), total, total)
    nodes = world.ranks // world.per_node

    def rows(count: int, of: int) -> list[tuple[int, int, float]]:
        """By level of a tree of so many, each of so many ranks: children, bytes, seconds."""
        found = []
        for children, below in _levels(count, world.fan_out or 0):
            nbytes = below * of * world.nbytes
            each = costs.transfer_s(nbytes // children) - nbytes // children / costs.bytes_per_s
            found.append((children, nbytes, children * each + nbytes / costs.bytes_per_s))
        return found

    across, within = rows(nodes, world.per_node), rows(world.per_node, 1)
    total = sum(seconds for _, _, seconds in [*across, *within]) + len(across) * costs.latency_s

    def load(number: int, passed_on: int) -> Load:
        """A rank that leads nodes, of that level."""
        met = [*across[number : number + 1], *within[:1]]
        peers, nbytes, seconds = (sum(column) for column in zip(*met, strict=True))
        if passed_on:
            peers, nbytes = peers + 1, nbytes + passed_on
            seconds += costs.transfer_s(passed_on)
        return Load(int(peers), int(nbytes), seconds)

    led = -(-(nodes - 1) // world.fan_out)
    return Cost(load(0, 0), load(1, led * world.per_node * world.nbytes), total, total)


def simulate(world: World, costs: Costs) -> Cost:
    """Passes every message of every rank, one after another at either of its ends."""
    tree = world.tree()
    order = list(tree.subtree(0))
    sizes = [1] * tree.size
    for rank in reversed(order[1:]):
        sizes[tree.parents[rank]] += sizes[rank]

    def transfer_s(child: int) -> float:
        return costs.transfer_s(sizes[child] * world.nbytes)

    def latency_s(child: int) -> float:
        apart = child // world.per_node != tree.parents[child] // world.per_node
        return costs.latency_s * (apart or world.fan_out is None)

    ready = [0.0] * tree.size
    for rank in reversed(order):  # A gather: children before parents, first come, first served.
        for at, child in sorted((ready[c] + latency_s(c), c) for c in tree.children[rank]):
            ready[rank] = max(ready[rank], at) + transfer_s(child)
    given = [0.0] * tree.size
    for rank in order:  # A scatter: the largest part first.
        now = given[rank]
        for child in tree.children[rank]:
            now += transfer_s(child)
            given[child] = now + latency_s(child)

    def load(rank: int) -> Load:
        met = [*tree.children[rank], *([rank] if rank != 0 else [])]
        nbytes = sum(sizes[other] * world.nbytes for other in met)
        return Load(len(met), nbytes, sum(transfer_s(other) for other in met))

    inner = max(tree.children[0], key=lambda rank: load(rank).seconds)
    return Cost(load(0), load(inner), ready[0], max(given))
