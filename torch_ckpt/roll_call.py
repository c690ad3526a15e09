"""Roll calls of ranks: all of them go on, or none does and all learn who was missing.

A roll call is held in the store of a process group, beside its collectives: each rank writes a key
of its own and counts itself, and the last to come writes the outcome for which the others look. One
that has waited for the whole deadline looks up who is missing and writes that instead. One atomic
write decides between the two, and between them and the coordinator's claim to commit.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_process_group_store

from torch_ckpt.errors import RankTimeoutError

__all__ = ["COMMITTING", "RollCalls", "claim_commit", "claimable"]

COMMITTING = "committing"
"""The phase in which the other ranks wait for the coordinator to commit."""

# What stands under the key of a roll call's outcome, besides the error of one that was given up.
_ALL_HERE = "all here"
_CLAIMED = "claimed by the coordinator"

# How long a rank pauses before it looks for the outcome again.
_LONGEST_PAUSE_S = 1.0
_SHORTEST_PAUSE_S = 0.001
_LEAST_PATIENCE_S = 2.0  # For what is left to say when the deadline has passed.
_LOOKS_PER_S = 50_000  # Of all ranks together, at most: what one store can well answer.

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


class _PromptStore:
    """A store whose every call ends in time: one that is frozen or cut off would block for ever."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._orders: queue.SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]]] = (
            queue.SimpleQueue()
        )
        self._silent = False
        threading.Thread(target=self._serve, name="torch_ckpt-store", daemon=True).start()

    def call(self, name: str, *args: Any, timeout_s: float) -> Any:
        """Calls a method of the store; raises ``RuntimeError`` if it does not answer."""
        answer: Future[Any] = Future()
        if not self._silent:
            self._orders.put((answer, name, args))
            try:
                return answer.result(timeout_s)
            except TimeoutError:
                self._silent = True  # The thread is in that call for as long as it takes.
        raise RuntimeError("it does not answer")

    def _serve(self) -> None:
        while True:
            answer, name, args = self._orders.get()
            try:
                answer.set_result(getattr(self._store, name)(*args))
            except BaseException as error:
                answer.set_exception(error)


class _Ledger:
    """What this process remembers of a group from one call of DCP to the next."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        store: Any = _get_process_group_store(group)
        # A connection of its own, so as not to queue up behind another thread's long wait.
        self.store = _PromptStore(PrefixStore("torch_ckpt", store.clone()))
        self.calls = itertools.count()
        self.written: list[str] = []
        """Keys of this rank that others may still read: until all have answered another call."""
        self.host: int | None = None
        """The rank that serves the store, if it is one of the group."""
        self.introduced = False  # Whether all have met once, and ``host`` is known.
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

    Raises:
        RankTimeoutError: The store of the group is gone.

    Example::

        calls = RollCalls(group, 600)
        calls.wait_for_all("writing")
        dist.all_gather_object(sizes, size, group=group)
    """

    def __init__(self, group: dist.ProcessGroup, timeout_s: float, name: str | None = None) -> None:
        self.group = group
        self._ranks = dist.get_process_group_ranks(group)
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self._phase = "beginning"
        self._held = 0
        try:
            with _first_use:
                ledger = _ledgers.get(group)
                if ledger is None:
                    ledger = _ledgers[group] = _Ledger(group)
        except RuntimeError as error:
            raise _lost_store(self._phase, None, error) from error
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
        self._deadline = time.monotonic() + self._timeout_s
        try:
            outcome = self._answer()
        except RuntimeError as error:
            raise _lost_store(phase, self._ledger.host, error) from error
        if outcome != _ALL_HERE:
            raise _error_of(outcome)

    def claim_commit(self) -> None:
        """Takes the right to commit away from those that wait for it, unless they have given up."""
        self._deadline = time.monotonic() + self._timeout_s
        try:
            outcome = self._settle(_CLAIMED)
        except RuntimeError as error:
            raise _lost_store("preparing to commit", self._ledger.host, error) from error
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
        with contextlib.suppress(RuntimeError):
            self._settle(_text_of(error))
        return error

    def _ask(self, name: str, *args: Any) -> Any:
        """A call of the store, which has until the deadline to answer, or a moment after it."""
        patience_s = max(self._deadline - time.monotonic(), _LEAST_PATIENCE_S)
        return self._ledger.store.call(name, *args, timeout_s=patience_s)

    @property
    def _key(self) -> str:
        return f"{self.name}/{self._held}"

    def _answer(self) -> str:
        """Answers this roll call; returns its outcome."""
        begin = time.monotonic()
        key, ledger, ask = self._key, self._ledger, self._ask
        if ledger.is_host and not ledger.introduced:
            ask("set", "host", str(self._rank))
        if ask("add", f"{key}/answers", 1) == len(self._ranks):
            ledger.written.append(f"{key}/answers")
            outcome = self._settle(_ALL_HERE)
        else:
            ledger.written.append(f"{key}/{self._rank}")
            ask("set", f"{key}/{self._rank}", "")
            outcome = self._wait(begin)
        self._held += 1
        if outcome == _ALL_HERE:
            # All are here, and so nobody looks at earlier roll calls any more.
            earlier = [name for name in ledger.written if not name.startswith(f"{key}/")]
            for name in earlier:
                ask("delete_key", name)
                ledger.written.remove(name)
            if not ledger.introduced and ask("check", ["host"]):
                ledger.host = int(ask("get", "host"))
            ledger.introduced = True
        return outcome

    def _wait(self, begin: float) -> str:
        """Looks for the outcome until there is one, which there is at the deadline at the latest.

        It looks instead of letting the store wait, which would keep signals from being handled.
        """
        key = f"{self._key}/outcome"
        shortest = max(_SHORTEST_PAUSE_S, len(self._ranks) / _LOOKS_PER_S)
        try:
            while True:
                if self._ask("check", [key]):
                    outcome: str = self._ask("get", key).decode()
                    if outcome != _CLAIMED:
                        return outcome
                waited = time.monotonic() - begin
                if waited >= self._timeout_s:
                    return self._give_up(waited)
                pause = min(max(waited / 50, shortest), _LONGEST_PAUSE_S)
                time.sleep(min(pause, self._timeout_s - waited))
        except RuntimeError:
            raise
        except BaseException as error:  # An interrupt.
            self.call_off(error)
            raise

    def _give_up(self, waited: float) -> str:
        """Ends the call for all ranks unless all have come after all; returns the outcome."""
        late = [r for r in self._ranks if not self._ask("check", [f"{self._key}/{r}"])]
        names = f"rank {late[0]} is" if len(late) == 1 else f"ranks {_listed(late)} are"
        message = (
            f"{names} slow, stuck or gone: not done {self._phase} {waited:.1f} s after rank "
            f"{self._rank}, which waits for {self._timeout_s:g} s at most"
        )
        error = RankTimeoutError(message, late, self._phase, waited)
        after_claim = f"{message}. It had begun to publish the checkpoint, which may yet appear"
        claimed = RankTimeoutError(after_claim, late, self._phase, waited, may_be_committed=True)
        return self._settle(_text_of(error), after_claim=_text_of(claimed))

    def _settle(self, outcome: str, after_claim: str | None = None) -> str:
        """Makes this the outcome of the roll call unless there is one; returns the one there is.

        A claim gives way to ``after_claim``, or else to ``outcome`` as well.
        """
        key = f"{self._key}/outcome"
        standing: str = self._ask("compare_set", key, "", outcome).decode()
        if standing == _CLAIMED != outcome:
            outcome = after_claim or outcome
            standing = self._ask("compare_set", key, _CLAIMED, outcome).decode()
        if standing == outcome:
            self._ledger.written.append(key)
        return standing


def _lost_store(phase: str, host: int | None, cause: Exception) -> RankTimeoutError:
    server = "the process that serves it" if host is None else f"rank {host}, which serves it,"
    return RankTimeoutError(
        f"rank {dist.get_rank()} has lost the store of its process group while {phase}: {server} "
        f"is gone or out of reach ({cause})",
        [] if host is None else [host],
        phase,
        may_be_committed=phase == COMMITTING,
    )


def _text_of(error: RankTimeoutError) -> str:
    return json.dumps(error.__reduce__()[1])


def _error_of(text: str) -> RankTimeoutError:
    return RankTimeoutError(*json.loads(text))


def _listed(ranks: list[int], most: int = 8) -> str:
    shown = ", ".join(str(rank) for rank in ranks[:most])
    return shown if len(ranks) <= most else f"{shown} and {len(ranks) - most} more"
