"""Which saves an agent brings to disk, one after another, and how that went."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt.agent.joint_save import JointSave
from torch_ckpt.agent.memory import Save, SlotHeader
from torch_ckpt.agent.persist import persist
from torch_ckpt.agent.slots import SlotFile, Slots, SlotScan
from torch_ckpt.errors import CheckpointError
from torch_ckpt.options import IoOptions

__all__ = ["Saves"]

_log = logging.getLogger("torch_ckpt.agent")

_KEPT = 16
"""Marks of saves that are on disk: nobody asks for those before."""

_MIN_POLL_S, _MAX_POLL_S = 0.05, 1.0
"""How often is looked whether other machines have come: ever less often, of a busy file server."""

_DONE = re.compile(r"done-([0-9a-f]{32})-(\d+)")


@dataclass
class _Waiting:
    """A save that other machines must come for."""

    slots: list[SlotFile]
    joint: JointSave | None = None
    is_offered: bool = False


class Saves:
    """Brings complete saves to disk in their order, in a thread, and tells how each went.

    What it must know after its own end stands in the slots and in two kinds of small files beside
    them. For whoever holds the lock of ``changed``, unless a method says otherwise.

    Args:
        folder: The run's.
        slots: What there is.
        changed: Notified whenever a save has ended.
        io: Tuning.
        threads: Files that are written at a time.
        peers_timeout_s: Seconds that a save waits for other machines.
        is_hurried: Whether it waits for a moment only; asked without the lock.
    """

    def __init__(
        self,
        folder: Path,
        slots: Slots,
        changed: threading.Condition,
        *,
        io: IoOptions,
        threads: int,
        peers_timeout_s: float,
        is_hurried: Callable[[Save], bool],
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._changed = changed
        self._io = io
        self._threads = threads
        self._peers_timeout_s = peers_timeout_s
        self._is_hurried = is_hurried
        self._asked: set[Save] = set()
        self._offered: set[Save] = set()
        self.is_running = False
        """Whether one is on its way."""
        matches = filter(None, map(_DONE.fullmatch, os.listdir(folder)))
        self._done = {(bytes.fromhex(match[1]), int(match[2])) for match in matches}

    def is_pending(self, save: Save, scan: SlotScan) -> bool:
        """Whether a save that was complete is to come to disk, and has not, nor has failed."""
        of_save = scan.complete.get(save)
        if of_save is None or save in self._done or self.error_of(save) is not None:
            return False
        # What is older than what is on disk is wanted there only if somebody says so.
        is_newer = save > max(self._done, default=(b"", -1))
        is_wanted = bool(of_save[0][0].persist) or save in self._offered
        return save in self._asked or (is_wanted and is_newer)

    def is_done(self, save: Save) -> bool:
        """Whether a save is on disk."""
        return save in self._done

    def error_of(self, save: Save) -> str | None:
        """Why a save could not be brought to disk; ``None`` if that is not so."""
        try:
            return self._failure(save).read_text()
        except OSError:
            return None

    def ask(self, save: Save) -> None:
        """Wants a save on disk, again if that has failed."""
        self._asked.add(save)
        self._failure(save).unlink(missing_ok=True)
        self.begin_next()

    def offer(self, save: Save) -> None:
        """Wants a save on disk unless a newer one comes there, which may need other machines."""
        self._offered.add(save)
        self._failure(save).unlink(missing_ok=True)
        self.begin_next()

    def begin_next(self) -> None:
        """Begins with the oldest save that is to come to disk, unless one is on its way."""
        if self.is_running:
            return
        scan = self._slots.scan()
        for save, of_save in scan.complete.items():
            if self.is_pending(save, scan):
                self.is_running = True
                is_joint = of_save[0][0].node_count > 1
                work = self._work_together if is_joint else self._work
                threading.Thread(
                    target=work, args=(save, _hold(of_save)), name="torch_ckpt-persist"
                ).start()
                return

    def _work(self, save: Save, slots: list[SlotFile]) -> None:
        """Brings one save to disk. In a thread of its own, without the lock."""
        error: BaseException | None = None
        try:
            self._bring_to_disk(slots)
        except BaseException as problem:
            error = problem
        with self._changed:
            self._ended(save, slots, error)
            self.is_running = False
            self.begin_next()

    def _work_together(self, save: Save, slots: list[SlotFile]) -> None:
        """Brings to disk what is to come there with other machines. Likewise.

        Which save that is nobody knows before: of all that are wanted here, those that all machines
        come for.
        """
        waiting = {save: _Waiting(slots)}
        pause_s = _MIN_POLL_S
        while waiting:
            known = _progress(waiting)
            ended = self._await_one(waiting)
            if ended is None:
                time.sleep(pause_s)
            with self._changed:
                if ended is not None:
                    self._ended(ended[0], waiting.pop(ended[0]).slots, ended[1])
                withdrawn = self._choose(waiting)
                self.is_running = bool(waiting)
                self.begin_next()
                self._changed.notify_all()
            for joint in withdrawn:
                joint.leave()
            is_new = ended is not None or known != _progress(waiting)
            pause_s = _MIN_POLL_S if is_new else min(1.5 * pause_s, _MAX_POLL_S)

    def _await_one(self, waiting: dict[Save, _Waiting]) -> tuple[Save, BaseException | None] | None:
        """Goes on with all; returns one that has come to its end, and how; ``None`` if none has."""
        for step in (self._come, self._go_on):  # First all, so that others can choose.
            has_offer = False
            for save, one in waiting.items():
                try:
                    # Of what is offered, the newest that all machines have will do.
                    if not (one.is_offered and has_offer) and step(save, one):
                        return save, None
                except BaseException as problem:
                    return save, problem
                is_written = one.joint is not None and one.joint.has_written
                has_offer = has_offer or (one.is_offered and is_written)
        return None

    def _come(self, save: Save, one: _Waiting) -> bool:
        if one.joint is None:
            one.joint = JointSave(
                [slot.memory for slot in one.slots if slot.memory is not None],
                io=self._io,
                threads=self._threads,
                timeout_s=self._peers_timeout_s,
                is_hurried=lambda: self._is_hurried(save),
            )
            one.joint.come()
        return False

    def _go_on(self, save: Save, one: _Waiting) -> bool:
        return one.joint is not None and one.joint.advance()

    def _choose(self, waiting: dict[Save, _Waiting]) -> list[JointSave]:
        """Adds what is wanted now, in its order, and takes out what is no more."""
        withdrawn = []
        scan = self._slots.scan()
        complete = scan.complete
        for save in [save for save in waiting if not self.is_pending(save, scan)]:
            one = waiting.pop(save)
            for slot in one.slots:
                slot.readers -= 1
            withdrawn += [] if one.joint is None else [one.joint]
        for save, of_save in complete.items():
            if save not in waiting and of_save[0][0].node_count > 1 and self.is_pending(save, scan):
                waiting[save] = _Waiting(_hold(of_save))
        # Of what is offered, the newest will do; all else comes to disk in order.
        offered = [s for s in waiting if s not in self._asked and not complete[s][0][0].persist]
        for save in [*sorted(set(waiting).difference(offered)), *sorted(offered, reverse=True)]:
            waiting[save] = waiting.pop(save)
            waiting[save].is_offered = save in offered
        return withdrawn

    def _ended(self, save: Save, slots: list[SlotFile], error: BaseException | None) -> None:
        """Notes how a save has gone."""
        if error is not None:
            _log.warning("save %d has failed: %s", save[1], error)
        for slot in slots:
            slot.readers -= 1
        self._asked.discard(save)
        self._offered.discard(save)
        with contextlib.suppress(OSError):
            if error is None:
                self._mark_done(save)
            else:
                self._failure(save).write_text(f"{type(error).__name__}: {error}")
        self._changed.notify_all()

    def _bring_to_disk(self, slots: list[SlotFile]) -> None:
        memories = [slot.memory for slot in slots if slot.memory is not None]
        snapshots = [memory.read() for memory in memories]
        headers = [SlotHeader.of(memory) for memory in memories]
        if not snapshots[0].directory:
            raise CheckpointError("the save has no directory to come to")
        persist(
            snapshots,
            io=self._io,
            threads=self._threads,
            is_current=lambda: [SlotHeader.of(memory) for memory in memories] == headers,
        )
        _log.info("step %d is on disk", headers[0].step)

    def _failure(self, save: Save) -> Path:
        return self._folder / f"failed-{save[0].hex()}-{save[1]}"

    def _mark_done(self, save: Save) -> None:
        self._done.add(save)
        self._mark(save).touch()
        for old in sorted(self._done)[:-_KEPT]:
            self._done.discard(old)
            self._mark(old).unlink(missing_ok=True)

    def _mark(self, save: Save) -> Path:
        return self._folder / f"done-{save[0].hex()}-{save[1]}"


def _progress(waiting: dict[Save, _Waiting]) -> list[tuple[Save, bool]]:
    """How far each of them is."""
    return [(s, one.joint is not None and one.joint.has_written) for s, one in waiting.items()]


def _hold(of_save: list[tuple[SlotHeader, SlotFile]]) -> list[SlotFile]:
    """The slots of a save, which nobody may fill until they are read."""
    slots = [slot for _, slot in of_save]
    for slot in slots:
        slot.readers += 1
    return slots
