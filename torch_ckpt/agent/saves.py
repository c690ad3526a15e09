"""Saves: the queue of saves that an agent persists, and their outcomes."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_ckpt._core import _native
from torch_ckpt.agent.answers import Answers
from torch_ckpt.agent.destination import Destination
from torch_ckpt.agent.identity import check_shared, claim_directory
from torch_ckpt.agent.joint_save import JointSave, manifests_of
from torch_ckpt.agent.manifests import PendingFailures
from torch_ckpt.agent.memory import Save, done_mark
from torch_ckpt.agent.messages import Failure, failure_of_save, raise_failure
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.persist import Writing, persist
from torch_ckpt.agent.slots import SlotFile, Slots, SlotScan
from torch_ckpt.errors import CheckpointError, NotFoundError, StorageError
from torch_ckpt.planning.replica_check import Difference
from torch_ckpt.stored_json import from_json

__all__ = ["Saves"]

_log = logging.getLogger("torch_ckpt.agent")

_MAX_MARKS = 16
"""Number of saves on disk with a mark; no trainer asks for older saves."""

_MIN_POLL_S, _MAX_POLL_S = 0.05, 1.0
"""Poll interval for files of other machines; grows, to spare a busy file server."""

_DONE = re.compile(r"done-([0-9a-f]{32})-(\d+)")


@dataclass
class _PendingSave:
    """A save of several machines that is not committed yet."""

    slots: list[SlotFile]
    joint: JointSave | None = None
    is_offered: bool = False


class Saves:
    """Persists complete saves in order, in a thread, and records the outcome of each.

    A restarted agent recovers the state from the slots and from two kinds of small files beside
    them: marks of saves on disk, and errors of failed saves.

    Requires: the caller holds the lock of ``changed``, which is notified when a save has ended,
    unless a method states otherwise. ``options`` returns the current options of the agent.
    ``is_shutting_down`` returns whether a save must shorten its waits; it is called without the
    lock. ``failures`` are failures that joint saves could not publish.
    """

    def __init__(
        self,
        folder: Path,
        slots: Slots,
        changed: threading.Condition,
        *,
        options: Callable[[], AgentOptions],
        is_shutting_down: Callable[[Save], bool],
        failures: PendingFailures,
    ) -> None:
        self._folder = folder
        self._slots = slots
        self._changed = changed
        self._options = options
        self._is_shutting_down = is_shutting_down
        self._unpublished = failures
        self._orphans: set[Save] = set()
        self._remote_failures: dict[Save, Failure] = {}
        self._requested: set[Save] = set()
        self._offered: set[Save] = set()
        self._failures: dict[
            Save, Failure
        ] = {}  # Also if the file of the failure cannot be written.
        self._answers: dict[str, Answers] = {}
        self.is_running = False
        """Whether a save is in progress."""
        matches = filter(None, map(_DONE.fullmatch, os.listdir(folder)))
        self._done = {(bytes.fromhex(match[1]), int(match[2])) for match in matches}

    def is_pending(self, save: Save, scan: SlotScan) -> bool:
        """Returns whether a complete save must still be persisted, and has not failed."""
        slots = scan.complete.get(save)
        if slots is None or save in self._done or self.failure_of(save) is not None:
            return False
        # A save older than the newest save on disk is persisted only on request.
        is_newer = save > max(self._done, default=(b"", -1))
        is_wanted = bool(slots[0][0].persist) or save in self._offered
        return save in self._requested or (is_wanted and is_newer)

    def is_done(self, save: Save) -> bool:
        """Returns whether a save is on disk."""
        return save in self._done

    def failure_of(self, save: Save) -> Failure | None:
        """Returns the failure of a save; ``None`` if the save has not failed."""
        try:
            return from_json(self._failure(save).read_text(), _failure)
        except (OSError, ValueError):
            return self._failures.get(save)

    def request(self, save: Save, *, is_offer: bool = False) -> None:
        """Requests that a save is persisted; retries a failed save.

        With ``is_offer``, the save is skipped if a newer save reaches the disk first.
        """
        (self._offered if is_offer else self._requested).add(save)
        self._failures.pop(save, None)
        self._failure(save).unlink(missing_ok=True)
        self.begin_next()

    def lose(self, saves: Iterable[Save]) -> None:
        """Ends saves whose slots another machine has lost, instead of waiting long for them."""
        self._orphans.update(saves)

    def fail(self, save: Save, failure: Failure) -> None:
        """Ends a save that has failed on another machine, unless it is committed."""
        if self.failure_of(save) is None and save not in self._done:
            self._remote_failures[save] = failure

    def begin_next(self) -> None:
        """Starts to persist the oldest pending save, unless a save is in progress."""
        if self.is_running:
            return
        scan = self._slots.scan()
        for save, slots in scan.complete.items():
            if self.is_pending(save, scan):
                is_joint = slots[0][0].node_count > 1
                work = self._run_joint if is_joint else self._run_local
                files = _acquire_slots(slots)
                self.is_running = True
                try:
                    threading.Thread(
                        target=work, args=(save, files), name="torch_ckpt-persist"
                    ).start()
                except RuntimeError as error:  # Too many threads.
                    self.is_running = False
                    self._set_ended(save, files, error, ())
                return

    def _run_local(self, save: Save, slots: list[SlotFile]) -> None:
        """Persists one save of this machine. Runs in its own thread, without the lock."""
        error: BaseException | None = None
        differences: Sequence[Difference] = ()
        try:
            destination = self._claim_directory(save, slots)
            differences = self._persist(slots, destination)
        except BaseException as problem:
            error = problem
        with self._changed:
            self._set_ended(save, slots, error, differences)
            self.is_running = False
            self.begin_next()

    def _run_joint(self, save: Save, slots: list[SlotFile]) -> None:
        """Persists saves of several machines. Runs in its own thread, without the lock.

        No agent knows which saves the other machines have. So each agent begins all saves that are
        pending on its machine, and the saves that all machines begin complete.
        """
        pending = {save: _PendingSave(slots)}
        pause_s = _MIN_POLL_S
        while pending:
            progress = _progress(pending)
            ended = self._advance_all(pending)
            if ended is None:
                time.sleep(pause_s)
            with self._changed:
                if ended is not None:
                    entry = pending.pop(ended[0])
                    differences = () if entry.joint is None else entry.joint.differences
                    self._set_ended(ended[0], entry.slots, ended[1], differences)
                withdrawn = self._update_pending(pending)
                self.is_running = bool(pending)
                self.begin_next()
                self._changed.notify_all()
            for joint in withdrawn:
                joint.withdraw()
            is_new = ended is not None or progress != _progress(pending)
            pause_s = _MIN_POLL_S if is_new else min(1.5 * pause_s, _MAX_POLL_S)

    def _advance_all(
        self, pending: dict[Save, _PendingSave]
    ) -> tuple[Save, BaseException | None] | None:
        """Advances all saves; returns the first that ended and its error, ``None`` if none did."""
        for step in (self._begin, self._advance):  # All begin first, so that others see them.
            has_offer = False
            for save, entry in pending.items():
                try:
                    # One offered save suffices: the newest that all machines have.
                    if not (entry.is_offered and has_offer) and step(save, entry):
                        if entry.joint is not None:
                            entry.joint.clear_former(pending)
                        return save, None
                except BaseException as problem:
                    return save, problem
                is_written = entry.joint is not None and entry.joint.has_written
                has_offer = has_offer or (entry.is_offered and is_written)
        return None

    def _begin(self, save: Save, entry: _PendingSave) -> bool:
        if entry.joint is None:
            options = self._options()
            publish = functools.partial(self._unpublished.add, within_s=options.peers_timeout_s)
            memories = [slot.memory for slot in entry.slots if slot.memory is not None]
            files = manifests_of(memories[0])
            try:
                destination = self._claim_directory(save, entry.slots)
            except (NotFoundError, StorageError) as error:
                failure = files.failure_of(error)
                publish(files, {"epoch": None, "failure": failure})
                raise_failure(failure)
            entry.joint = JointSave(
                memories,
                self._writing(destination),
                check_replicas=options.check_replicas,
                timeout_s=options.peers_timeout_s,
                is_shutting_down=lambda: self._is_shutting_down(save),
                is_orphan=lambda: save in self._orphans,
                remote_failure=lambda: self._remote_failures.get(save),
                publish_later=publish,
            )
            self._unpublished.discard(files.tag)
            entry.joint.begin()
        return False

    def _advance(self, save: Save, entry: _PendingSave) -> bool:
        return entry.joint is not None and entry.joint.advance()

    def _update_pending(self, pending: dict[Save, _PendingSave]) -> list[JointSave]:
        """Adds and orders pending saves; removes and returns the saves no longer pending."""
        withdrawn = []
        scan = self._slots.scan()
        complete = scan.complete
        for save in [save for save in pending if not self.is_pending(save, scan)]:
            entry = pending.pop(save)
            for slot in entry.slots:
                slot.readers -= 1
            withdrawn += [] if entry.joint is None else [entry.joint]
        for save, slots in complete.items():
            if save not in pending and slots[0][0].node_count > 1 and self.is_pending(save, scan):
                pending[save] = _PendingSave(_acquire_slots(slots))
        # Requested saves are persisted in order; of the offered saves, the newest is first.
        offered = [s for s in pending if s not in self._requested and not complete[s][0][0].persist]
        for save in [*sorted(set(pending).difference(offered)), *sorted(offered, reverse=True)]:
            pending[save] = pending.pop(save)
            pending[save].is_offered = save in offered
        return withdrawn

    def _set_ended(
        self,
        save: Save,
        slots: list[SlotFile],
        error: BaseException | None,
        differences: Sequence[Difference],
    ) -> None:
        """Records the outcome of a save, and the differences of its replicas."""
        if error is not None:
            _log.warning("cannot persist save %d: %s", save[1], error)
        for slot in slots:
            slot.readers -= 1
        self._requested.discard(save)
        self._offered.discard(save)
        self._remote_failures.pop(save, None)
        with contextlib.suppress(OSError):
            if error is None:
                self._mark_done(save, differences)
            else:
                self._failures[save] = failure_of_save(error)
                self._failure(save).write_text(json.dumps(self._failures[save]))
        self._changed.notify_all()

    def _claim_directory(self, save: Save, slots: list[SlotFile]) -> Destination:
        """Returns where the save goes. Raises if the directory no longer belongs to its run."""
        assert slots[0].memory is not None
        snapshot = slots[0].memory.read()
        if not snapshot.directory:
            raise CheckpointError("cannot persist the save: it has no directory")
        found = Destination.of(snapshot)
        if (shared := found.shared) is not None:
            # One for all saves: each call to a directory that never answers leaves a thread.
            answers = self._answers.setdefault(str(shared), Answers(shared))
            answers.get(functools.partial(check_shared, shared, self._folder))
        is_apart = shared is not None  # Each machine has its own local directory.
        claim_directory(found.directory, self._folder, found.small_files, may_be_empty=is_apart)
        return found

    def _persist(self, slots: list[SlotFile], destination: Destination) -> list[Difference]:
        memories = [slot.memory for slot in slots if slot.memory is not None]
        snapshots = [memory.read() for memory in memories]
        headers = [memory.header() for memory in memories]
        options = self._options()
        differences = persist(
            snapshots,
            self._writing(destination),
            check_replicas=options.check_replicas,
            is_current=lambda: [memory.header() for memory in memories] == headers,
        )
        _log.info("step %d is on disk", headers[0].step)
        return differences

    def _writing(self, destination: Destination) -> Writing:
        """Returns how to write a save."""
        options = self._options()
        base = None if destination.base == destination.directory else destination.base
        return Writing(options.io, options.reuse, base)

    def _failure(self, save: Save) -> Path:
        return self._folder / f"failed-{save[0].hex()}-{save[1]}"

    def _mark_done(self, save: Save, differences: Sequence[Difference]) -> None:
        self._done.add(save)
        done_mark(self._folder, save).write_text(json.dumps(differences))
        for old in sorted(self._done)[:-_MAX_MARKS]:
            self._done.discard(old)
            done_mark(self._folder, old).unlink(missing_ok=True)


def _failure(facts: list[object]) -> Failure:
    match facts:
        case [str(kind), str(text), int(number)]:
            return kind, text, number
    raise ValueError(f"{facts!r} is not a failure")


def _progress(pending: dict[Save, _PendingSave]) -> list[tuple[Save, tuple[bool, bool]]]:
    """Returns the progress of each save on this machine."""
    return [
        (save, (False, False) if entry.joint is None else entry.joint.progress)
        for save, entry in pending.items()
    ]


def _acquire_slots(slots: list[tuple[_native.SlotHeader, SlotFile]]) -> list[SlotFile]:
    """Returns the slots of a save, and prevents ranks from filling them until they are read."""
    files = [file for _, file in slots]
    for file in files:
        file.readers += 1
    return files
