"""Buddies: which machine stores whose replicas, and how their agents find each other."""

from __future__ import annotations

import socket
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group

from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent.memory import Save
from torch_ckpt.agent.messages import Kind, decoded_save
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.coordination.addresses import is_loopback, node_id, own_addresses, reachable
from torch_ckpt.coordination.connections import store_of
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError
from torch_ckpt.records.record import note

__all__ = ["MAX_LAG", "Replication", "buddies"]

MAX_LAG = 4
"""Number of saves for which the last replicated save is retained: slow replicas get more time.

After this many saves without a replica, the coordinator warns.
"""

ReplicaReport = tuple[str, list[Save], str] | None
"""The host of a machine, the saves that its buddy also stores, and why sends fail, or empty.

``None`` except from the first rank of the machine.
"""


@dataclass(frozen=True)
class _Machine:
    """The report of the first rank of a machine: its node, failure domain, and agent.

    ``machine`` is the identifier of the machine, which several nodes of a test may share.
    """

    node: int
    machine: int
    domain: str
    at: Sequence[tuple[str, int]]
    token: str


def buddies(domains: Sequence[str]) -> list[int]:
    """Returns the machine that stores the replicas of each machine, from all failure domains.

    Each machine stores the replicas of one machine in another failure domain. Raises ValueError if
    that is impossible, because more than half of the machines share a domain.

    Example::

        assert buddies(["rack 1", "rack 1", "rack 2", "rack 2"]) == [2, 3, 0, 1]
    """
    largest, count = Counter(domains).most_common(1)[0]
    if 2 * count > len(domains):
        raise ValueError(
            f"cannot replicate to peers' memory: {count} of {len(domains)} machines share the "
            f"failure domain {largest!r}, and at most half may. Set AgentOptions(failure_domain=) "
            "on each machine, or replicas=0"
        )
    order = sorted(range(len(domains)), key=lambda machine: (domains[machine], machine))
    found = [0] * len(domains)
    for position, machine in enumerate(order):
        # No domain is longer than this shift, in the order of domains.
        found[machine] = order[(position + count) % len(order)]
    return found


class Replication:
    """The decisions of the ranks about replicas. All ranks call the same methods, unless stated.

    ``keep`` is the save that all agents retain: the newest one whose replicas are complete on all
    buddies. Until one is complete, it is the save that the ranks have restored. ``superseded``, on
    the first rank, is the number of saves of this machine whose replica a newer save has replaced.
    ``missing``, on the coordinator, states why the last saves have no replicas, or is empty.
    """

    def __init__(self, client: AgentClient, group: Group, timeout_s: float) -> None:
        self.keep: Save | None = None
        self.superseded = 0
        self.missing = ""
        self._has_warned = False
        self._replicated = -1  # Sequence of the newest save of this session on all buddies.
        self._client, self._group, self._timeout_s = client, group, timeout_s
        self._is_active = self._is_reserved = False
        self._is_first = client.member.is_first_here

    def begin(self, process_group: dist.ProcessGroup | None, options: AgentOptions) -> None:
        """Makes the agents of all machines replicate to their buddies, if the options say so.

        The ranks exchange the addresses of the agents, each with a secret token. If there is only
        one machine, the coordinator warns that it has no buddy. Raises ValueError if the failure
        domains are unsuitable, and StorageError if an agent cannot listen.
        """
        client, group, member = self._client, self._group, self._client.member

        def own() -> tuple[int, _Machine | None]:
            if not options.replicas or not self._is_first or member.node_count == 1:
                return options.replicas, None
            store = store_of(process_group or _get_default_group())()
            hosts = own_addresses(store)
            outer = [host for host in hosts if not is_loopback(host)]  # A buddy is elsewhere.
            at, token = client.listen(outer or hosts)
            domain = options.failure_domain or socket.gethostname()
            return options.replicas, _Machine(member.node, node_id(), domain, at, token)

        def agree(
            answers: list[tuple[int, _Machine | None]],
        ) -> tuple[list[_Machine], list[int]] | None:
            if len({replicas for replicas, _ in answers}) > 1:
                raise ValueError("ranks have different AgentOptions(replicas=)")
            machines = [machine for _, machine in answers if machine is not None]
            machines.sort(key=lambda machine: machine.node)
            if not machines:
                return None
            return machines, buddies([machine.domain for machine in machines])

        if options.replicas and member.node_count == 1 and group.is_coordinator:
            warnings.warn(
                "saves are not replicated: AgentOptions(replicas=1) requires several machines, "
                "and all ranks are on this one",
                stacklevel=4,
            )
        found = group.decide("connecting the agents", own, agree, timeout_s=self._timeout_s)
        self._is_active = found is not None
        if found is not None and self._is_first:
            machines, order = found
            buddy = machines[order[member.node]]
            at = reachable(buddy.at, buddy.machine)
            client.request(
                Kind.BUDDY,
                buddy=buddy.node,
                at=list(at),
                token=buddy.token,
                source=order.index(member.node),
            )

    def reserve(self, slot_nbytes: Callable[[], int]) -> None:
        """Checks, once, that each machine has memory for replicas.

        ``slot_nbytes`` returns the length of a slot of this rank. If a machine has too little
        memory, no agent replicates, and the coordinator warns with the figures.
        """
        if not self._is_active or self._is_reserved:
            return
        self._is_reserved = True
        group, node = self._group, self._client.member.node
        by_node = group.decide(
            "measuring slots", lambda: (node, slot_nbytes()), _sums, timeout_s=self._timeout_s
        )

        def missing() -> str:
            if not self._is_first:
                return ""
            try:
                self._client.request(Kind.RESERVE_REPLICAS, slots=sorted(by_node.items()))
            except CheckpointError as error:
                return f"{socket.gethostname()}: {error}"
            return ""

        reason: str = group.decide(
            "reserving memory for replicas",
            missing,
            lambda reasons: next(filter(None, reasons), ""),
            timeout_s=self._timeout_s,
        )
        if reason:
            self._is_active = False
            if self._is_first:
                self._client.request(Kind.BUDDY)  # No agent replicates any more.
            if group.is_coordinator:
                self.missing = f"saves have no replicas: {reason}"
                warnings.warn(f"saving continues without replicas: {reason}", stacklevel=6)

    def report(self) -> ReplicaReport:
        """Returns this rank's part of the decision on ``keep``. Any rank may call it."""
        if not self._is_active or not self._is_first:
            return None
        answer = self._client.request(Kind.REPLICATED)
        self.superseded = answer["superseded"]
        saves = list(filter(None, map(decoded_save, answer["saves"] or ())))
        return socket.gethostname(), saves, answer.get("failure", "")

    def agreed(self, save: Save, reports: Sequence[ReplicaReport]) -> Save | None:
        """Returns the save to retain during a save, from all reports. Called on the coordinator."""
        if not self._is_active:
            return None
        machines = [report for report in reports if report is not None]
        common = set.intersection(*(set(saves) for _, saves, _ in machines)) if machines else set()
        self._replicated = max(
            self._replicated, *(n for found, n in common if found == save[0]), -1
        )
        count = save[1] - 1 - self._replicated
        self.missing = "" if count < MAX_LAG else _missing(count, machines)
        keep = max([*common, *([] if self.keep is None else [self.keep])], default=None)
        if keep is None:
            return None
        lag = save[1] - keep[1] if keep[0] == save[0] else save[1] + 1
        return None if lag > MAX_LAG else keep

    def warn(self) -> None:
        """Warns that the last saves have no replicas; repeats it only after replicas were complete.

        The text is also added to the record of the save. Does nothing on the other ranks.
        """
        if self.missing:
            note(unreplicated=self.missing)
        if self.missing and self._is_active and not self._has_warned:
            warnings.warn(
                f"{self.missing}. If a machine is lost now, an older step is restored, from memory "
                "or from disk",
                stacklevel=6,
            )
        self._has_warned = bool(self.missing)


def _missing(count: int, machines: Sequence[tuple[str, list[Save], str]]) -> str:
    """Returns a message why the last saves have no replicas."""
    failures = [f"{host}: {failure}" for host, _, failure in machines if failure]
    reason = failures[0] if failures else "a replica takes longer than the time between two saves"
    return f"the last {count} saves have no replicas: {reason}"


def _sums(answers: Sequence[tuple[int, int]]) -> dict[int, int]:
    total: Counter[int] = Counter()
    for node, nbytes in answers:
        total[node] += nbytes
    return dict(total)
