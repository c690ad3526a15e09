"""Roll calls of ranks: all of them go on, or none does and all learn who was missing.

A roll call is held in the store of a process group, beside its collectives: each rank writes a key
of its own and counts itself, and the last to come writes the outcome for which the others look. The
first to have waited for the whole deadline looks up who is missing and writes that instead. One
atomic write decides between the two, and between them and the coordinator's claim to commit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from torch_ckpt.errors import RankTimeoutError

__all__ = ["COMMITTING", "LOOKS_PER_S", "RollCalls", "claim_commit", "claimable"]

COMMITTING = "committing"
"""The phase in which the other ranks wait for the coordinator to commit."""

LOOKS_PER_S = 50_000
"""Of all ranks together, at most: what one store can well answer."""

# What stands under the key of a roll call's outcome, besides the error of one that was given up.
_ALL_HERE = "all here"
_CLAIMED = "claimed by the coordinator"

# How long a rank pauses before it looks for the outcome again.
_LONGEST_PAUSE_S = 1.0
_SHORTEST_PAUSE_S = 0.001
_LEAST_PATIENCE_S = 2.0  # For what is left to say when the deadline has passed.

_committing: ContextVar[RollCalls | None] = ContextVar("torch_ckpt_committing", default=None)


@contextlib.contextmanager
def claimable(calls: RollCalls | None) -> Iterator[None]:
    """Has :func:`claim_commit` claim the commit of this save.

    Args:
        calls: Those of the save; ``None`` if nobody can give it up.

    Example::

        with claimable(calls):
            storage_writer.finish(metadata, results)
    """
    token = _committing.set(calls)
    try:
        yield
    finally:
        _committing.reset(token)


def claim_commit() -> None:
    """Called by a writer at the last moment before it publishes a checkpoint.

    Raises:
        RankTimeoutError: The other ranks have given this save up, and must not see it succeed.

    Example::

        claim_commit()
        os.rename(temporary, final)
    """
    calls = _committing.get()
    if calls is not None:
        calls.claim_commit()


_Order = tuple[Future[Any], str, tuple[Any, ...]]


class _PromptStore:
    """A store whose every call ends in time: one that is frozen or cut off would block for ever.

    A thread makes the calls, one after another. It ends with this object.

    Args:
        connect: Gives the store. A part of the first call, since it may block as any other.
    """

    def __init__(self, connect: Callable[[], Store]) -> None:
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        threading.Thread(
            target=_carry_out, args=(self._orders, connect), name="torch_ckpt-store", daemon=True
        ).start()
        weakref.finalize(self, self._orders.put, None)

    def call(self, name: str, *args: Any, timeout_s: float) -> Any:
        """Calls a method of the store; raises ``RuntimeError`` if it does not answer."""
        answer = self.order(name, *args)
        try:
            return answer.result(timeout_s)
        except TimeoutError:
            answer.cancel()  # What has not begun when the caller gives up must not happen later.
            raise RuntimeError("it does not answer") from None

    def order(self, name: str, *args: Any) -> Future[Any]:
        """Has a method of the store called when those ordered before are done."""
        answer: Future[Any] = Future()
        self._orders.put((answer, name, args))
        return answer


def _carry_out(orders: queue.SimpleQueue[_Order | None], connect: Callable[[], Store]) -> None:
    """The thread of a :class:`_PromptStore`, which it does not know: it would never end then."""
    store: Store | None = None
    for answer, name, args in iter(orders.get, None):
        try:
            if store is None:
                store = connect()
            if answer.set_running_or_notify_cancel():
                answer.set_result(getattr(store, name)(*args))
        except BaseException as error:
            with contextlib.suppress(InvalidStateError):  # Cancelled as the store was connected.
                answer.set_exception(error.with_traceback(None))  # It would keep the store.


class _Ledger:
    """What this process remembers of a group from one call of DCP to the next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        served: Any = _get_process_group_store(group)
        # A connection of its own, so as not to queue up behind another thread's long wait.
        self.store = _PromptStore(lambda: PrefixStore("torch_ckpt", served.clone()))
        self.calls = itertools.count()
        self.written: list[str] = []
        """Keys of this rank that others may still read: until all have answered another call."""
        self.host: int | None = None
        """The rank that serves the store, if it is one of the group."""
        self.introduced = False  # Whether all have met once, and ``host`` is known.
        store = served
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        self.is_host = "TCPServer(" in repr(store)


_ledgers: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ledger] = weakref.WeakKeyDictionary()
_first_use = threading.Lock()


class RollCalls:
    """The roll calls of one save or load. All ranks hold the same ones in the same order.

    Keys are of this call alone: all ranks of a group make the same calls one after another, so a
    rank that comes late meets what was decided of the call that it is late for, never another.

    Args:
        group: The ranks.
        timeout_s: Seconds that this rank waits at one for the last to come.
        name: What tells this call from all others of the group, the same on all ranks; ``None`` has
            them counted.

    Example::

        calls = RollCalls(group, 600)
        calls.wait_for_all("writing")
        dist.all_gather_object(sizes, size, group=group)
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, name: str | None = None) -> None:
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self.timeout_s = timeout_s
        self._phase = "beginning"
        self._held = 0
        with _first_use:
            ledger = _ledgers.get(group)
            if ledger is None:
                ledger = _ledgers[group] = _Ledger(group)
        self._ledger = ledger
        self._deadline = time.monotonic() + timeout_s
        self.name = f"{next(ledger.calls)}" if name is None else name

    def wait_for_all(self, phase: str) -> None:
        """Returns when all ranks have come here.

        Args:
            phase: What a rank has finished when it comes here, for messages.

        Raises:
            RankTimeoutError: One has not within the deadline, or somebody has given the call up.
        """
        self._phase = phase
        self._deadline = time.monotonic() + self.timeout_s
        try:
            outcome = self._answer()
        except RuntimeError as error:
            raise self._lost_store(phase, error) from error
        if outcome != _ALL_HERE:
            raise _error_of(outcome)
        passed = self.key
        self._held += 1
        self._tidy(passed)

    def any_says(self, answer: bool, phase: str) -> bool:
        """As :meth:`wait_for_all`; returns whether any rank has come with ``True``."""
        key = f"{self.key}/said"
        if answer:
            self._ask("set", key, "")
            self._ledger.written.append(key)
        self.wait_for_all(phase)
        said: bool = self._ask("check", [key])
        return said

    def all_say(self, answer: bytes, phase: str) -> bool:
        """As :meth:`wait_for_all`; returns whether all ranks have come with the same answer."""
        key = f"{self.key}/first"
        first = self._ask("compare_set", key, "", answer.hex())
        self._ledger.written.append(key)
        return not self.any_says(first != answer.hex().encode(), phase)

    def claim_commit(self) -> None:
        """Takes the right to commit away from those that wait for it, unless they have given up."""
        self._deadline = time.monotonic() + self.timeout_s
        try:
            outcome = self._settle(_CLAIMED)
        except RuntimeError as error:
            raise self._lost_store("preparing to commit", error) from error
        if outcome != _CLAIMED:
            raise _error_of(outcome)

    def call_off(self, cause: BaseException) -> RankTimeoutError:
        """Has the other ranks raise at the roll call that they come to next; returns the error."""
        error = RankTimeoutError(
            f"rank {self._rank} has left while {self._phase}: {type(cause).__qualname__}: {cause}",
            [self._rank],
            self._phase,
            may_be_committed=self._phase == COMMITTING,
        )
        self._deadline = time.monotonic()  # It is leaving: a silent store must not keep it.
        try:
            self._settle(_text_of(error))
        except RuntimeError:
            self._leave_word(error)
        return error

    def look(self) -> None:
        """Looks, between two roll calls, whether the call goes on.

        Raises:
            RankTimeoutError: Somebody has given it up.
        """
        key = f"{self.key}/outcome"
        self._deadline = time.monotonic() + self.timeout_s
        try:
            outcome = self._ask("get", key).decode() if self._ask("check", [key]) else _CLAIMED
        except RuntimeError as error:
            raise self._lost_store(self._phase, error) from error
        if outcome != _CLAIMED:
            raise _error_of(outcome)

    def give_up_on(self, ranks: list[int], message: str, waited: float = 0.0) -> RankTimeoutError:
        """Has the other ranks raise at the roll call that they come to next, as they :meth:`look`.

        Args:
            ranks: Those that are at fault.
            message: What of them is wrong.
            waited: For how long they were waited for, in seconds.

        Returns:
            What all raise: another error if somebody has given the call up before.
        """
        committing = self._phase == COMMITTING
        errors = [
            RankTimeoutError(message, ranks, self._phase, waited, may_be_committed)
            for may_be_committed in (committing, True)
        ]
        self._deadline = time.monotonic()
        try:
            return _error_of(self._settle(*map(_text_of, errors)))
        except RuntimeError:
            self._leave_word(errors[0])
            return errors[0]

    def _ask(self, name: str, *args: Any) -> Any:
        """A call of the store, which has until the deadline to answer, or a moment after it."""
        patience_s = max(self._deadline - time.monotonic(), _LEAST_PATIENCE_S)
        return self._ledger.store.call(name, *args, timeout_s=patience_s)

    @property
    def key(self) -> str:
        """Names the roll call that this rank comes to next: no other of the group, on any rank."""
        return f"{self.name}/{self._held}"

    def _answer(self) -> str:
        """Answers this roll call; returns its outcome."""
        begin = time.monotonic()
        key, ledger, ask = self.key, self._ledger, self._ask
        if ledger.is_host and not ledger.introduced:
            ask("set", "host", str(self._rank))
        if ask("add", f"{key}/answers", 1) == len(self.ranks):
            ledger.written.append(f"{key}/answers")
            outcome = self._settle(_ALL_HERE)
        else:
            ledger.written.append(f"{key}/{self._rank}")
            ask("set", f"{key}/{self._rank}", "")
            outcome = self._wait(begin)
        return outcome

    def _tidy(self, passed: str) -> None:
        """Deletes what was written before the roll call that all have passed: nobody looks there.

        Raises nothing, since the others are on their way to where they meet: what it cannot do now
        is left for the next time.
        """
        ledger = self._ledger
        self._deadline = time.monotonic()  # The others wait.
        with contextlib.suppress(Exception):
            earlier = [name for name in ledger.written if not name.startswith(f"{passed}/")]
            for name in earlier:
                self._ask("delete_key", name)
                ledger.written.remove(name)
            if not ledger.introduced and self._ask("check", ["host"]):
                ledger.host = int(self._ask("get", "host"))
            ledger.introduced = True

    def _wait(self, begin: float) -> str:
        """Looks for the outcome until there is one, which there is soon after the deadline.

        It looks instead of letting the store wait, which would keep signals from being handled.
        """
        key = f"{self.key}/outcome"
        shortest = max(_SHORTEST_PAUSE_S, len(self.ranks) / LOOKS_PER_S)
        patience_s, turn = self.timeout_s, 0
        try:
            while True:
                if self._ask("check", [key]):
                    outcome: str = self._ask("get", key).decode()
                    if outcome != _CLAIMED:
                        return outcome
                waited = time.monotonic() - begin
                if waited >= patience_s and not turn:
                    turn = self._turn_to_give_up()
                    patience_s = waited + _LEAST_PATIENCE_S * (turn - 1).bit_length()
                if waited >= patience_s:
                    return self._give_up(waited)
                pause = min(max(waited / 50, shortest), _LONGEST_PAUSE_S)
                time.sleep(min(pause, patience_s - waited))
        except RuntimeError:
            raise
        except BaseException as error:  # An interrupt.
            self.call_off(error)
            raise

    def _turn_to_give_up(self) -> int:
        """1 for the rank that is to look up who is missing, more for those to do so if it fails.

        If each of N ranks looked for itself, the store would be asked N times N things at once.
        """
        key = f"{self.key}/looking"
        turn: int = self._ask("add", key, 1)
        if turn == 1:
            self._ledger.written.append(key)
        return turn

    def _give_up(self, waited: float) -> str:
        """Ends the call for all ranks unless all have come after all; returns the outcome."""
        late = self._missing(self.ranks)
        names = f"rank {late[0]} is" if len(late) == 1 else f"ranks {_listed(late)} are"
        message = (
            f"{names} slow, stuck or gone: not done {self._phase} {waited:.1f} s after rank "
            f"{self._rank}, which waits for {self.timeout_s:g} s at most"
        )
        error = RankTimeoutError(message, late, self._phase, waited)
        after_claim = f"{message}. It had begun to publish the checkpoint, which may yet appear"
        claimed = RankTimeoutError(after_claim, late, self._phase, waited, may_be_committed=True)
        return self._settle(_text_of(error), after_claim=_text_of(claimed))

    def _missing(self, ranks: list[int]) -> list[int]:
        """Those that have not come. By halves: of thousands, most often few are missing."""
        if not ranks or self._ask("check", [f"{self.key}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return ranks
        half = len(ranks) // 2
        return self._missing(ranks[:half]) + self._missing(ranks[half:])

    def _settle(self, outcome: str, after_claim: str | None = None) -> str:
        """Makes this the outcome of the roll call unless there is one; returns the one there is.

        A claim gives way to ``after_claim``, or else to ``outcome`` as well.
        """
        key = f"{self.key}/outcome"
        standing: str = self._ask("compare_set", key, "", outcome).decode()
        if standing == _CLAIMED != outcome:
            outcome = after_claim or outcome
            standing = self._ask("compare_set", key, _CLAIMED, outcome).decode()
        if standing == outcome:
            self._ledger.written.append(key)
        return standing

    def _lost_store(self, phase: str, cause: Exception) -> RankTimeoutError:
        """The error of a rank that gets no answer, which the others find if the store goes on."""
        host = self._ledger.host
        server = "the process that serves it" if host is None else f"rank {host}, which serves it,"
        error = RankTimeoutError(
            f"rank {self._rank} has lost the store of its process group while {phase}: {server} "
            f"is gone or out of reach ({cause})",
            [] if host is None else [host],
            phase,
            may_be_committed=phase == COMMITTING,
        )
        self._leave_word(error)
        return error

    def _leave_word(self, error: RankTimeoutError) -> None:
        """Makes this the outcome unless there is one, as soon as the store answers again."""
        key, text = f"{self.key}/outcome", _text_of(error)
        for expected in ("", _CLAIMED):
            self._ledger.store.order("compare_set", key, expected, text)
        self._ledger.written.append(key)


def _text_of(error: RankTimeoutError) -> str:
    return json.dumps(error.__reduce__()[1])


def _error_of(text: str) -> RankTimeoutError:
    return RankTimeoutError(*json.loads(text))


def _listed(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
