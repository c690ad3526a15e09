"""MachineShare: which of the replicas on its machine a rank copies."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from torch_ckpt._core import _native
from torch_ckpt.agent.memory import (
    NOT_SHARED,
    Save,
    complete_slots,
    sharing_of,
    whole_saves,
)
from torch_ckpt.agent.slot_contents import Selection, SlotContents
from torch_ckpt.errors import StorageError
from torch_ckpt.planning.plan_cache import digest_of
from torch_ckpt.planning.replica_check import (
    CheckReplicas,
    Difference,
    EqualReplicas,
    agree,
    combined,
    numbers_of,
    warn_of,
)
from torch_ckpt.planning.value_digests import value_digests

__all__ = ["Answer", "Decision", "MachineShare", "decided"]

Decision = Literal["all", "assign", "shares"]
"""The ranks copy all of their items, assign shares first, or copy their shares."""


class Answer(NamedTuple):
    """What a rank sends to the others before a save.

    ``can_share``: whether it can copy a share. ``is_assigned``: whether it knows its share.
    ``values`` has one digest for each set of its replicas. ``differences`` lists replicas on its
    machine whose values differed when the shares were last assigned; they are sent once.
    """

    can_share: bool
    is_assigned: bool
    node: int
    values: bytes
    differences: Sequence[Difference] = ()


def decided(answers: Sequence[Answer]) -> Decision:
    """Returns the decision of all ranks from their answers. Warns of replicas that differ."""
    if not all(answer.can_share for answer in answers):
        return "all"
    are_assigned = {answer.is_assigned for answer in answers}
    if are_assigned == {False}:
        return "assign"
    by_machine: dict[int, list[bytes]] = {}
    for answer in answers:
        by_machine.setdefault(answer.node, []).append(answer.values)
    warn_of(_of_all_machines(answers))
    is_valid = are_assigned == {True} and all(map(agree, by_machine.values()))
    return "shares" if is_valid else "all"


def _of_all_machines(answers: Sequence[Answer]) -> list[Difference]:
    """Merges the differences of all machines. All ranks of a machine send the same list."""
    machines = {answer.node: answer.differences for answer in answers}
    found: dict[str, Difference] = {}
    for fqn, pairs, count in itertools.chain.from_iterable(machines.values()):
        _, before, count_before = found.get(fqn, (fqn, [], 0))
        found[fqn] = fqn, [*before, *pairs], count_before + count
    return list(found.values())


class MachineShare:
    """A rank's share of the replicas on its machine, across saves.

    A share is valid as long as every rank has the same tensors, and replicas that were equal are
    still equal. Otherwise every rank copies all of its items. The ranks compare the values before
    each save, in the tensors of training.

    ``tensors`` (16 bytes) identifies the tensors of the rank in its last save, and ``sharing`` (16
    bytes) how the ranks of the machine divide their replicas; ``NOT_SHARED`` if each copies all of
    its items.
    """

    def __init__(
        self, folder: Path, run: bytes, rank: int, node: int, check_replicas: CheckReplicas
    ) -> None:
        self._folder = folder
        self._run = run
        self._rank = rank
        self._node = node
        self._check_replicas = check_replicas
        self._equal: Sequence[EqualReplicas] = ()  # Items of the table of this rank's tensors.
        self._differences: list[Difference] = []  # Found by the last assignment, until sent.
        self.tensors = b""
        self.sharing = NOT_SHARED
        self._assigned = b""  # Encoded assignment, if the replicas are shared.
        self._listed = b""  # Digest of the last item list, objects included.
        self._selection: Selection | None = None  # For that list; computed on first use.
        self._copied_all: Save = b"", -1  # Last save in which all items were copied.

    def answer(self, contents: SlotContents, save: Save) -> Answer:
        """Returns whether this rank can copy its share in a save, for :func:`decided`."""
        can_share = self._can_share(contents, save)
        is_assigned = self.sharing != NOT_SHARED
        values = b""
        if can_share and is_assigned and self._check_replicas != "off":
            digests = value_digests(
                contents.tensors(), self._check_replicas, numbers_of(self._equal)
            )
            values = combined(digests, self._equal)
        differences, self._differences = self._differences, []
        return Answer(can_share, is_assigned, self._node, values, differences)

    def _can_share(self, contents: SlotContents, save: Save) -> bool:
        if self._listed != contents.digest:
            self._listed, self._selection = contents.digest, None
            tensors = digest_of(contents.items.tensors().encode())
            if tensors != self.tensors:
                self.tensors = tensors
                self.reset()
        is_next = self._copied_all == (save[0], save[1] - 1)
        return self.sharing != NOT_SHARED or is_next

    def reset(self) -> None:
        """Discards the share, so that the rank copies all of its items."""
        self.sharing, self._selection, self._copied_all = NOT_SHARED, None, (b"", -1)

    def set_copied_all(self, save: Save) -> None:
        """Records a save in which this rank copied all of its items."""
        self._copied_all = save

    def select(self, contents: SlotContents) -> SlotContents:
        """Returns the contents that this rank copies when all ranks copy shares."""
        if self._selection is None:
            assignment, items = contents.items.share(self._assigned)
            work = _native.Work(contents.items, assignment)
            described = ((at, work.describe(at)[-1]) for at in range(len(work)))
            rows = {at: cut for at, cut in described if cut is not None}
            self._selection = Selection(work.items, rows, items)
        return contents.select(self._selection)

    def assign(self) -> None:
        """Assigns shares, based on the slots of the save in which all ranks copied everything.

        Raises StorageError if the slots of the previous save no longer exist.
        """
        slots = whole_saves(complete_slots(self._folder, self._run)).get(self._copied_all, [])
        if not slots:
            raise StorageError(
                "cannot assign shares on this machine: the slots of the previous save are gone "
                f"from {self._folder}",
                errno.ENOENT,
            )
        headers = [header for header, _ in slots]
        snapshots = [_native.Slot.open(os.fsencode(path), False).read() for _, path in slots]
        tables = [_native.ItemTable.decode(s.items) for s in snapshots]
        # Another machine may cut a tensor at other rows, so that boxes would overlap.
        split = headers[0].node_count == 1
        plan = _native.GlobalPlan(
            [table.tensors().encode() for table in tables],
            len(tables),
            split=split,
            whole=False,
            digests=self._values_of(snapshots, tables),
        )
        ranks = [header.rank for header in headers]
        own = ranks.index(self._rank)
        self._assigned = plan.assignment(own)
        self._equal = plan.equal_replicas(own)
        self._differences = [
            (fqn, [(ranks[lowest], ranks[other]) for lowest, other in pairs], count)
            for fqn, pairs, count in plan.differences
        ]
        self.sharing = sharing_of(headers)

    def _values_of(
        self, snapshots: Sequence[_native.StoredSnapshot], tables: Sequence[_native.ItemTable]
    ) -> list[bytes]:
        """Returns the digests of the tensors in each slot; none if replicas are not compared.

        Samples suffice here: the ranks compare their tensors again before they copy shares.
        """
        if self._check_replicas == "off":
            return []
        return [
            snapshot.batch(table.tensor_numbers).digests(False, 1)
            for snapshot, table in zip(snapshots, tables, strict=True)
        ]
