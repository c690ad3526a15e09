"""Slot reports: the slots of each save on each machine, and which saves are whole."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.identity import NO_ID, RunId, id_in_directory, id_in_memory
from torch_ckpt.agent.memory import Save, complete_slots, folder_of, run_of, whole_saves
from torch_ckpt.agent.replica_files import whole_replicas
from torch_ckpt.commits.terms import newest_term, term_in
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location

__all__ = [
    "MachineSlots",
    "SlotReport",
    "SlotSource",
    "former_run",
    "machine_slots",
    "orphans_among",
    "sources_of_whole_saves",
    "unread_steps",
    "warn_of_former",
]

_LOG = logging.getLogger("torch_ckpt")


@dataclass(frozen=True)
class MachineSlots:
    """All slots that one machine has filled in one save: its own, or replicas on its buddy.

    ``node`` is the number, at that time, of the machine that filled them, one of ``node_count``.
    ``names`` are the files, in order of rank. ``term`` is the term of the run in which the step was
    saved.
    """

    save: Save
    step: int
    term: int
    node: int
    node_count: int
    is_replica: bool
    names: Sequence[str]


SlotReport = tuple[int, Sequence[MachineSlots]]
"""The present number of a machine, and its slots. Only its first rank reports them."""

SlotSource = tuple[int, MachineSlots]
"""The present number of a machine, and slots in its memory."""


def machine_slots(folder: Path, run: bytes) -> list[MachineSlots]:
    """Returns the slots of a run in the memory of this machine."""
    own = [(False, slots) for slots in whole_saves(complete_slots(folder, run)).values()]
    replicas = [(True, slots) for slots in whole_replicas(folder, run).values()]
    found = []
    for is_replica, slots in own + replicas:
        first, names = slots[0][0], [path.name for _, path in slots]
        facts = first.save, first.step, _term_in(slots[0][1]), first.node, first.node_count
        found.append(MachineSlots(*facts, is_replica=is_replica, names=names))
    return found


def _term_in(slot: Path) -> int:
    """Returns the term of the run in which a slot was filled; 0 if it has none."""
    with contextlib.suppress(CheckpointError):
        snapshot = _native.Slot.open(os.fsencode(slot), False).read()
        return term_in(Destination.of(snapshot).small_files)
    return 0


def orphans_among(slots: Iterable[MachineSlots]) -> list[Save]:
    """Returns the saves that agents can never complete, because a machine has lost its slots.

    Agents do not persist replicas.
    """
    nodes: dict[Save, set[int]] = {}
    counts: dict[Save, int] = {}
    for each in slots:
        nodes.setdefault(each.save, set()).update([] if each.is_replica else [each.node])
        counts[each.save] = each.node_count
    return [save for save, found in nodes.items() if len(found) < counts[save]]


def sources_of_whole_saves(reports: Iterable[SlotReport]) -> dict[Save, list[SlotSource]]:
    """Returns the saves with the slots of all machines, and their sources, in order of nodes.

    Prefers the slots of the machine that filled them to replicas.
    """
    found: dict[Save, dict[int, SlotSource]] = {}
    for machine, report in reports:
        for slots in report:
            by_node = found.setdefault(slots.save, {})
            former = by_node.get(slots.node)
            if former is None or (former[1].is_replica and not slots.is_replica):
                by_node[slots.node] = machine, slots
    whole = {}
    for save, by_node in found.items():
        variants = {(slots.step, slots.node_count) for _, slots in by_node.values()}
        node_counts = {node_count for _, node_count in variants}
        if len(variants) == 1 and node_counts == {len(by_node)}:
            whole[save] = [by_node[node] for node in sorted(by_node)]
    return whole


def unread_steps(directory: Location, newest: int | None) -> list[int]:
    """Returns the steps of a run in the memory of this machine that are newer than ``newest``.

    For jobs and commands that do not restore from memory. Steps that the run has left do not count.
    Of a save of several machines, this machine may have only a part. Raises CheckpointError if the
    memory or the directory cannot be read.
    """
    run = run_of(directory)
    folder, newest = folder_of(run), -1 if newest is None else newest
    try:
        slots = [each for each in machine_slots(folder, run) if each.step > newest]
    except OSError as error:
        raise StorageError(f"cannot read {folder}: {error.strerror}", error.errno) from error
    in_memory = id_in_memory(folder)
    if not slots or in_memory is None:
        return []
    own = id_in_directory(directory)
    if in_memory.id != own and (own is not None or in_memory.is_written):  # A former run wrote it.
        return []
    lineage = newest_term(directory)
    return sorted({each.step for each in slots if lineage.has(each.step, each.term)}, reverse=True)


def former_run(folder: Path, own: RunId | None) -> RunId | None:
    """Returns the other run to which the memory belongs, until the first save frees it."""
    found = id_in_memory(folder)
    return found if own is not None and found is not None and found.id != own.id else None


def warn_of_former(folder: Path, run: bytes, own: RunId | None, name: str) -> None:
    """Logs that the memory of this machine belongs to another run than ``own``, and is ignored."""
    former = former_run(folder, own)
    steps = sorted({header.step for header, _ in complete_slots(folder, run)})
    if former is None or own is None or not steps:
        return
    _LOG.warning(
        "%s: steps %s in shared memory are not restored, and the first save frees them: they are "
        "of run %s, %s",
        name,
        ", ".join(map(str, steps)),
        former.id,
        f"and the directory now belongs to another run, {own.id}"
        if own.is_written
        else f"whose directory {NO_ID}. If it is not mounted, end this job before it saves",
    )
