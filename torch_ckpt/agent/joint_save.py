"""Brings a save to disk whose ranks are on several machines: what each agent does, and says.

The agent of the first machine has the say. Each of the others publishes what its ranks hold, and
waits for the word of the first: that it has begun, with everybody's share of the writing; that it
has failed, and why; or no word and a committed checkpoint. An agent that was started anew publishes
anew, and the first begins again, under another id. So an id is committed only if every machine has
written under it, and only the first machine commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch_ckpt._core import _native
from torch_ckpt.agent.meeting import Failure, Meeting, Word, failure_of, raise_failure
from torch_ckpt.agent.memory import SlotHeader
from torch_ckpt.agent.patience import Patience
from torch_ckpt.agent.persist import Report, directory_of, publish, seal, write_parts
from torch_ckpt.errors import CheckpointError
from torch_ckpt.formats.seal import committed_id
from torch_ckpt.options import IoOptions
from torch_ckpt.storage.gc import remove_files

__all__ = ["JointSave"]

_LAST_WORD_S = 5.0
"""By how much the others wait longer for the first machine, which knows better what is wrong."""


@dataclass
class _ToldError(Exception):
    """Ends a save for a reason that names its machine already.

    Attributes:
        failure: The reason.
        is_to_be_told: Whether the other machines are to know it from this one.
    """

    failure: Failure | None
    is_to_be_told: bool


@dataclass
class _Lists:
    """What all ranks hold.

    Attributes:
        items: Of each rank.
        paths: Of each rank.
        ranks_of: The ranks of each machine but the first.
    """

    items: dict[int, bytes]
    paths: dict[int, bytes | None]
    ranks_of: dict[int, list[int]]


class JointSave:
    """One save, on this machine. Owned by one thread, without the agent's lock.

    Args:
        memories: The slots of this machine, by rank.
        io: Tuning.
        threads: Files that are written at a time.
        timeout_s: Seconds to wait for other machines.
        is_hurried: Whether to wait for a moment only.

    Raises:
        CheckpointError: A slot holds no snapshot, or one that has no directory to come to.
    """

    def __init__(
        self,
        memories: Sequence[_native.Slot],
        *,
        io: IoOptions,
        threads: int,
        timeout_s: float,
        is_hurried: Callable[[], bool],
    ) -> None:
        self._memories = memories
        self._snapshots = [memory.read() for memory in memories]
        self._headers = [SlotHeader.of(memory) for memory in memories]
        self._first = self._snapshots[0]
        if not self._first.directory:
            raise CheckpointError("the save has no directory to come to")
        self._directory = directory_of(self._first)
        self._io = io
        self._threads = threads
        header = self._headers[0]
        self._meeting = Meeting(
            *(header.run, header.session, header.sequence, header.node, header.node_count),
            self._directory,
        )
        self._leads = self._meeting.node == 0
        wait_s = timeout_s if self._leads else timeout_s + min(_LAST_WORD_S, timeout_s / 4)
        self._patience = Patience(wait_s, is_hurried)
        self._said = Word("here", self._meeting.visit)
        self._attempt = ""  # The one that goes on.
        self._written: list[str] = []  # Under that, by this machine.
        self._visits: dict[int, str] = {}  # Of the other machines, as far as the first knows.

    def come(self) -> None:
        """Publishes what the ranks of this machine hold.

        Raises:
            StorageError: It cannot be written.
        """
        self._directory.create_directories()
        self._patience.restart()
        self._publish_lists()
        self._meeting.say(self._said)

    def is_ready(self) -> bool:
        """Whether :meth:`run` has something to do, or nothing to wait for any more."""
        self._stay()
        if self._patience.is_over:
            return True
        if self._leads:
            try:
                is_ready = len(self._look()) == len(self._visits)
            except _ToldError:
                return True
        else:
            word = self._meeting.word_of(0)
            is_ready = word is not None and self._concerns_this(word)
        # An agent that was here before may have done it all.
        return is_ready or self._meeting.committed() is not None

    def was_kept(self, seconds: float) -> None:
        """Waits for longer: the thread was about another save."""
        self._patience.extend(seconds)

    def leave(self) -> None:
        """Takes part no more."""
        self._meeting.remove("word", "lists", "report", "part")

    def run(self) -> bool:
        """Brings the save to disk, with all other machines.

        Returns:
            Whether that is done. Otherwise the first machine has come anew, and may be about
            another save before this one.

        Raises:
            CheckpointError: It failed, on this machine or another: that has said why. Or another
                has not come in time.
        """
        failure: Failure | None
        is_to_be_told = True
        try:
            if self._leads:
                self._lead()
                self._meeting.clear()
            elif not self._follow():
                return False
            else:
                self.leave()
        except _ToldError as told:
            failure, is_to_be_told = told.failure, told.is_to_be_told
        except Exception as error:
            failure = failure_of(self._meeting.node, error)
        else:
            return True
        if is_to_be_told:
            word = Word("failed", self._meeting.visit, self._attempt, self._visits, failure)
            self._meeting.say(word)
            self._meeting.remove("lists", "report", "part")
        raise_failure(failure)

    # ---- The first machine ----

    def _lead(self) -> None:
        while self._meeting.committed() is None:
            lists = self._lists() if self._are_there() else None
            if lists is not None and self._save(lists):
                return
            if self._patience.is_over:
                raise self._timed_out(self._meeting.others)
            self._patience.pause()
        if self._first.sync:
            self._directory.sync()

    def _look(self) -> dict[int, Word | None]:
        """What all other machines say, and which of them are here."""
        words = {node: self._meeting.word_of(node) for node in self._meeting.others}
        self._raise_failed(words)
        self._visits = {n: w.visit for n, w in words.items() if w is not None and _is_there(w)}
        return words

    def _are_there(self) -> bool:
        """Whether all other machines are here.

        Raises:
            CheckpointError: One of them has failed, or does not come.
        """
        words = self._look()
        absent = [node for node in words if node not in self._visits]
        if absent and self._patience.is_over:
            raise self._timed_out(absent)
        self._stay()
        return not absent

    def _raise_failed(self, words: dict[int, Word | None]) -> None:
        """Raises what another machine says that concerns this save as it goes on."""
        for node, word in words.items():
            if word is not None and (
                word.state == "never"
                or (word.state == "failed" and word.visit == self._visits.get(node))
            ):
                raise _ToldError(word.failure, is_to_be_told=True)

    def _lists(self) -> _Lists | None:
        """What all ranks hold; ``None`` where a machine has just come anew."""
        both = list(zip(self._snapshots, self._headers, strict=True))
        lists = _Lists(
            {header.rank: snapshot.items for snapshot, header in both},
            {header.rank: snapshot.paths for snapshot, header in both},
            {},
        )
        for node, visit in self._visits.items():
            got = self._meeting.get(node, "lists")
            if got is None or got[0]["visit"] != visit:
                return None
            facts, blobs = got
            if facts["save"] != self._save_facts():
                raise CheckpointError(
                    f"cannot save {self._directory}: machine {node} has another save there, "
                    f"{facts['save']} and not {self._save_facts()}"
                )
            lists.ranks_of[node] = facts["ranks"]
            lists.items.update(zip(facts["ranks"], blobs[::2], strict=True))
            for rank, has_paths, paths in zip(
                facts["ranks"], facts["has_paths"], blobs[1::2], strict=True
            ):
                lists.paths[rank] = paths if has_paths else None
        if sorted(lists.items) != list(range(self._headers[0].world_size)):
            raise CheckpointError(
                f"cannot save {self._directory}: the machines have ranks {sorted(lists.items)} of "
                f"{self._headers[0].world_size}"
            )
        return lists

    def _save(self, lists: _Lists) -> bool:
        """Writes and commits; returns whether that is done, or has to be tried again."""
        items = [lists.items[rank] for rank in sorted(lists.items)]
        paths = [lists.paths[rank] for rank in sorted(lists.items)]
        plan = _native.GlobalPlan(items, self._headers[0].ranks_here, split=True, dedup=True)
        found = self._directory.names()
        former = committed_id(self._directory)
        self._attempt = self._meeting.new_attempt()
        for node, ranks in lists.ranks_of.items():
            assignments = [plan.assignment(rank) for rank in ranks]
            self._meeting.put(node, "part", {"attempt": self._attempt}, assignments)
        self._say(Word("begun", self._meeting.visit, self._attempt, self._visits))
        try:
            reports = self._write([plan.assignment(header.rank) for header in self._headers])
            theirs = self._reports()
            if theirs is None:
                self._drop()
                return False
            reports += theirs
            sealed = seal(plan, reports, self._attempt, self._first, paths)
        except BaseException:
            self._drop()
            raise
        attempt, self._attempt = self._attempt, ""  # If this fails, it may be there all the same.
        written = {name: nbytes for _, (name, nbytes, _), _ in reports}
        publish(sealed, written, attempt, self._first, found, former)
        return True

    def _reports(self) -> list[Report] | None:
        """What all others have written; ``None`` where one of them has come anew."""
        self._patience.restart()
        while True:
            words = {node: self._meeting.word_of(node) for node in self._visits}
            self._raise_failed(words)
            there = {node: word for node, word in words.items() if word is not None}
            if any(_is_there(w) and w.visit != self._visits[n] for n, w in there.items()):
                return None
            late = [
                node
                for node in words
                if node not in there
                or (there[node].state, there[node].attempt) != ("written", self._attempt)
            ]
            if not late:
                return [report for node in words for report in self._report_of(node)]
            if self._patience.is_over:
                raise self._timed_out(late)
            self._stay()
            self._patience.pause()

    def _report_of(self, node: int) -> list[Report]:
        got = self._meeting.get(node, "report")
        if got is None or got[0]["attempt"] != self._attempt:
            raise CheckpointError(f"the report of machine {node} on {self._directory} is gone")
        files, blobs = got[0]["files"], got[1]
        return [
            (rank, (name, nbytes, sums), extents)
            for (rank, name, nbytes), sums, extents in zip(
                files, blobs[::2], blobs[1::2], strict=True
            )
        ]

    # ---- The others ----

    def _follow(self) -> bool:
        """Does what the first machine says, to the end; returns whether that has come."""
        followed = ""
        while True:
            word = self._meeting.word_of(0)
            # The first machine removes its word when it has committed; another agent has another.
            if (word is None or word.attempt != self._attempt) and self._meeting.committed():
                return True
            if word is not None and self._concerns_this(word):
                self._obey(word)
                followed = word.visit
            elif word is not None and followed not in ("", word.visit):
                return False
            if self._patience.is_over:
                if self._meeting.committed():
                    return True
                # What is written stays: it may be committed all the same. Nor is that to be
                # hindered by an agent that has to go.
                absent = [
                    n for n in self._meeting.others if not _is_there(self._meeting.word_of(n))
                ]
                raise _ToldError(
                    failure_of(self._meeting.node, self._timed_out(absent or [0])),
                    is_to_be_told=not (self._attempt and self._patience.in_hurry),
                )
            self._stay()
            self._patience.pause()

    def _obey(self, word: Word) -> None:
        """Does what the first machine says."""
        if word.state in ("failed", "never"):
            if word.attempt == self._attempt:  # Or else it may be committed after all.
                self._drop()
            self.leave()
            raise _ToldError(word.failure, is_to_be_told=False)
        part = self._meeting.get(self._meeting.node, "part")
        if word.attempt == self._attempt or part is None or part[0]["attempt"] != word.attempt:
            return
        self._drop()
        self._attempt = word.attempt
        try:
            reports = self._write(part[1])
            files = [(rank, name, nbytes) for rank, (name, nbytes, _), _ in reports]
            blobs = [blob for _, (_, _, sums), extents in reports for blob in (sums, extents)]
            facts = {"attempt": self._attempt, "files": files}
            self._meeting.put(self._meeting.node, "report", facts, blobs)
        except BaseException:
            self._drop()
            raise
        self._say(Word("written", self._meeting.visit, self._attempt))
        self._patience.restart()

    def _concerns_this(self, word: Word) -> bool:
        return word.state == "never" or word.visits.get(self._meeting.node) == self._meeting.visit

    # ---- All of them ----

    def _save_facts(self) -> list[object]:
        """What all machines must agree on."""
        header = self._headers[0]
        return [header.step, header.world_size, self._first.version, self._first.sync]

    def _publish_lists(self) -> None:
        facts = {
            "visit": self._meeting.visit,
            "save": self._save_facts(),
            "ranks": [header.rank for header in self._headers],
            "has_paths": [snapshot.paths is not None for snapshot in self._snapshots],
        }
        blobs = [blob for one in self._snapshots for blob in (one.items, one.paths or b"")]
        self._meeting.put(self._meeting.node, "lists", facts, blobs)

    def _write(self, assignments: Sequence[bytes]) -> list[Report]:
        """Writes the part of each rank of this machine, under the attempt that goes on."""
        parts = list(zip(self._snapshots, assignments, strict=True))
        reports = write_parts(
            *(parts, self._directory, self._attempt, self._written),
            io=self._io,
            threads=self._threads,
        )
        if [SlotHeader.of(memory) for memory in self._memories] != self._headers:
            raise CheckpointError(
                f"cannot commit {self._directory}: a slot was filled anew meanwhile"
            )
        return reports

    def _drop(self) -> None:
        """Removes what this machine has written."""
        remove_files(self._directory, self._written)
        self._written = []

    def _say(self, word: Word) -> None:
        self._said = word
        self._meeting.say(word)

    def _stay(self) -> None:
        """Publishes again what somebody has removed, who has taken it for left over."""
        meeting = self._meeting
        is_there = meeting.has("lists") and meeting.word_of(meeting.node) is not None
        if not is_there and meeting.committed() is None:
            self._publish_lists()
            meeting.say(self._said)

    def _timed_out(self, nodes: Sequence[int]) -> CheckpointError:
        machines = f"machine{'s' if len(nodes) > 1 else ''} {' and '.join(map(str, nodes))}"
        return CheckpointError(
            f"cannot save {self._directory}: nothing is heard of {machines} of "
            f"{self._meeting.node_count} for {self._patience}"
        )


def _is_there(word: Word | None) -> bool:
    return word is not None and word.state in ("here", "begun", "written")
