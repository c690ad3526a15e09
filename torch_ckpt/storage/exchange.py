"""The exchange between the ranks of a load: one rank reads shared ranges and passes them on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import secrets
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    _get_default_group,
    _get_process_group_store,
)

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.coordination.addresses import this_machine
from torch_ckpt.coordination.current_call import current_call
from torch_ckpt.coordination.handshake import NONCE_NBYTES, PROOF_NBYTES, Handshake
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CancelledError, CheckpointError, NotFoundError, listed_ranks
from torch_ckpt.records.record import note

__all__ = [
    "Assigned",
    "ExchangeMode",
    "Wanted",
    "can_exchange",
    "joined",
    "pack_names",
    "pays",
    "share_reads",
    "these_processes",
    "unpack_names",
]

ExchangeMode = Literal["auto", "off"]
"""Whether ranks exchange the bytes that they read: if that saves enough reads, or never."""

_MIN_SAVED_NBYTES = 16 << 20
"""Minimum bytes of reads that an exchange must save."""

_MIN_SAVED_FRACTION = 16
"""An exchange must save at least 1/16 of the bytes that all ranks would read from storage."""

_POLL_S = 0.2
"""Interval at which a rank that waits for others checks whether the load has failed."""

_NOTICED_S = 10.0
"""Time within which the end of another rank is detected."""

_EXPLAINED_S = 1.0
"""Time within which the error arrives of a rank whose failure has closed its connections."""

_THREADS = 4
"""Number of threads that connecting needs: one waits, and gloo has three."""

_NONCE_TAG, _PROOF_TAG = 2**31 - 2, 2**31 - 1
"""Tags of the handshake. Transfers of bytes have smaller ones (``csrc/bindings/peers.cc``)."""

_MAX_RANKS = 256
"""Maximum number of ranks in an exchange: each needs a socket for every other rank."""

_CONNECT_TIMEOUT_S = 300.0
"""Maximum time for connecting. All ranks arrive at about the same time, after the planning."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The reads that a rank wants. Sent to the coordinator in ``LoadPlan.storage_data``."""

    save_id: str | None
    """Save id of the metadata that the rank has read."""
    path: str
    """Where the rank read it."""
    encoded: bytes | None = None
    """Encoded byte ranges; ``None`` if the rank does not join an exchange."""
    machine: str = ""
    """Name of the rank's machine. A ring visits the ranks of one machine after another."""
    processes: str = ""
    """Name of the rank's PID namespace. Ranks with the same name can use each other's ``pid``."""
    pid: int = 0
    rank: int = 0
    """Rank in the whole job."""
    budget_nbytes: int = 0
    """Memory for pieces in flight, in bytes."""
    verify: bool = True
    """Whether the rank verifies the bytes that it reads."""
    files: bytes | None = None
    """Names of the data files that the rank can read, by :func:`pack_names`; ``None`` for all.

    Ranks of one machine send the same bytes.
    """


@dataclasses.dataclass(frozen=True)
class Assigned:
    """A rank's role in an exchange. Returned to the rank in ``LoadPlan.storage_data``."""

    encoded: bytes
    token: str
    """Unique name of the exchange."""
    secret: bytes
    """A secret known only to ranks of the exchange. Unlike the token, it is not in the store."""
    rank: int
    """Position of this rank in ``ranks``."""
    ranks: tuple[int, ...]
    """Ranks in the exchange, as numbered in the whole job."""
    pids: dict[int, int]
    """Position -> process id, for other ranks whose memory this rank may be able to read."""

    @property
    def size(self) -> int:
        """Number of ranks in the exchange."""
        return len(self.ranks)


@functools.cache
def these_processes() -> str:
    """Returns the name of this PID namespace, or an empty string if it is unknown."""
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def can_exchange() -> bool:
    """Returns whether other ranks exist with which to exchange bytes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def pack_names(names: Iterable[str]) -> bytes:
    """Encodes file names. Each takes few bytes, because names within a save are similar."""
    return zlib.compress("\0".join(sorted(names)).encode())


def unpack_names(packed: bytes) -> list[str]:
    """Returns the names that :func:`pack_names` has encoded."""
    text = zlib.decompress(packed).decode()
    return text.split("\0") if text else []


def share_reads(plans: Sequence[Wanted]) -> list[Assigned | None]:
    """Assigns reads that several ranks want. Called on the coordinator with all ranks' reads.

    Bytes that a rank wants but cannot read are always assigned; other bytes only if this saves
    enough reads. The assignment is ``None`` for a rank that is not in the exchange.

    Raises:
        NotFoundError: No rank of the exchange can read a file that one of them wants.
        CheckpointError: A rank cannot read a file that it wants, and too many ranks must exchange,
            or only some of them verify.
    """
    assignments: list[Assigned | None] = [None] * len(plans)
    willing = [rank for rank, plan in enumerate(plans) if plan.encoded is not None]
    verifying = [rank for rank in willing if plans[rank].verify]
    if verifying and len(verifying) < len(willing):
        # A rank that verifies its bytes must not receive unverified bytes.
        if _make_exchange(plans, willing).is_necessary:
            others = [plans[rank].rank for rank in willing if not plans[rank].verify]
            raise CheckpointError(
                f"{listed_ranks(others)} to load without verification, and others with it: ranks "
                "that read files for each other must have the same setting"
            )
        willing = verifying
    exchange = _make_exchange(plans, willing)
    if exchange.missing:
        raise NotFoundError(_describe_missing(plans, willing, exchange.missing))
    sharing = [rank for position, rank in enumerate(willing) if exchange.is_in_ring(position)]
    only_necessary = not pays(exchange.saved_nbytes, exchange.wanted_nbytes, len(sharing))
    if only_necessary:
        if not exchange.is_necessary:
            return assignments
        exchange = _make_exchange(plans, willing, only_necessary)
        sharing = [rank for position, rank in enumerate(willing) if exchange.is_in_ring(position)]
        if len(sharing) > _MAX_RANKS:
            raise CheckpointError(
                f"{len(sharing)} ranks would have to exchange the bytes of files that not all of "
                f"them can read, and at most {_MAX_RANKS} can; copy the files to storage that all "
                "ranks share"
            )
    if len(sharing) < len(willing):  # The other ranks need no connections.
        exchange = _make_exchange(plans, sharing, only_necessary)
    token, secret = secrets.token_hex(8), secrets.token_bytes(16)
    by_processes = defaultdict(list)
    for position, rank in enumerate(sharing):
        if plans[rank].processes:
            by_processes[plans[rank].processes].append(position)
    global_ranks = tuple(plans[rank].rank for rank in sharing)
    for position, rank in enumerate(sharing):
        pids = {
            other: plans[sharing[other]].pid
            for other in by_processes[plans[rank].processes]
            if other != position
        }
        encoded = exchange.of_rank(position)
        assignments[rank] = Assigned(encoded, token, secret, position, global_ranks, pids)
    return assignments


def pays(saved_nbytes: int, wanted_nbytes: int, ranks: int) -> bool:
    """Returns whether an exchange saves enough of the wanted reads to be worth its connections."""
    min_saved_nbytes = max(_MIN_SAVED_NBYTES, wanted_nbytes // _MIN_SAVED_FRACTION)
    return saved_nbytes >= min_saved_nbytes and ranks <= _MAX_RANKS


def _make_exchange(
    plans: Sequence[Wanted], ranks: Sequence[int], only_necessary: bool = False
) -> _native.Exchange:
    packed = [plans[rank].files for rank in ranks]
    distinct = [files for files in dict.fromkeys(packed) if files is not None]
    numbers = {files: number for number, files in enumerate(distinct)}
    return _native.Exchange(
        [plans[rank].encoded or b"" for rank in ranks],
        [plans[rank].machine for rank in ranks],
        min((plans[rank].budget_nbytes for rank in ranks), default=0),
        [set(unpack_names(files)) for files in distinct],
        [-1 if files is None else numbers[files] for files in packed],
        only_necessary,
    )


def _describe_missing(
    plans: Sequence[Wanted], ranks: Sequence[int], missing: Sequence[tuple[str, Sequence[int]]]
) -> str:
    """Describes the files that no rank can read, and the ranks that want them."""
    name, positions = missing[0]
    wanting = listed_ranks([plans[ranks[position]].rank for position in positions])
    more = f"; the same is true of {len(missing) - 1} other files" if len(missing) > 1 else ""
    return f"no rank of the load can read {name}, of which {wanting} to load tensors{more}"


@contextlib.contextmanager
def joined(
    assigned: Assigned, *, fs: _native.FileSystem, budget_nbytes: int, timeout_s: float
) -> Iterator[_native.ExchangeStream]:
    """Joins an exchange for the block, and waits for the other ranks at the end of the block.

    If the block raises an error, this rank aborts the exchange by closing its connections, and the
    other ranks raise CancelledError. The budget limits pieces in flight, and the deadline applies
    to each transfer.
    """
    timeout_ms = round(timeout_s * 1000)
    with contextlib.ExitStack() as stack:
        # The stream must have the only reference to the connections. A local variable would survive
        # in the traceback of an error, so that the connections would remain open.
        begin = time.monotonic()
        wire = [_tensor_view.make_peers(_connect(assigned, timeout_s), assigned.ranks, timeout_ms)]
        note(waited_for_ranks=time.monotonic() - begin)
        stack.callback(wire.clear)
        stream = _native.ExchangeStream(
            fs, assigned.encoded, wire.pop(), assigned.pids, budget_nbytes, timeout_ms
        )
        stack.callback(stream.close)
        try:
            yield stream
            stream.finish()
        finally:
            note(requests=stream.requests, waited=stream.waited_s)
            note(waited_for_ranks=stream.waited_for_ranks_s)
    _delete_keys(assigned)


def _connect(assigned: Assigned, timeout_s: float) -> ProcessGroupGloo:
    """Connects to the other ranks, independently of the process groups of training.

    Stores and gloo do not observe the deadline of this call, nor that the load has failed. So a
    thread waits for them, and is abandoned after the deadline.

    Raises CancelledError if another rank did not arrive in time, CheckpointError if this rank
    cannot connect, and CheckpointException or RankTimeoutError if another rank failed or was late.
    """
    call = current_call()
    limit_s = min(timeout_s, _CONNECT_TIMEOUT_S)
    _check_threads()
    connection = _Connection(assigned, timedelta(seconds=limit_s))
    try:
        waiting = LongWait(lambda: f"an exchange of reads: {connection.awaited}")
        for pause_s in waiting.rounds(limit_s, _POLL_S, ends_on_signal=True):
            if wait([connection.made], pause_s).done:
                break
            if call is not None:
                call.raise_if_failed()
        else:
            raise CancelledError(
                f"cannot connect to the other ranks within {limit_s:g} s: {connection.awaited}"
            )
        if call is not None and (failure := connection.made.exception()) is not None:
            why = LongWait(lambda: f"the reason of an error of the connections: {failure}")
            for pause_s in why.rounds(connection.explained_s, _POLL_S):
                call.raise_if_failed()  # The end of another rank explains the failure of this one.
                time.sleep(pause_s)
            call.raise_if_failed()
        return connection.made.result()
    finally:
        connection.is_abandoned = True


class _Connection:
    """An attempt to connect to the other ranks, in a thread.

    ``made`` is the future of the process group of the exchange. ``awaited`` describes what the
    thread waits for. Once ``is_abandoned`` is set, the thread ends at its next step.
    ``explained_s`` is the time after a failure within which the end of another rank may explain it.
    """

    def __init__(self, assigned: Assigned, timeout: timedelta) -> None:
        self.made: Future[ProcessGroupGloo] = Future()
        self.awaited = "the store of the process group does not answer"
        self.is_abandoned = False
        self.explained_s = 0.0
        threading.Thread(
            target=self._run, args=(assigned, timeout), name="torch_ckpt-exchange", daemon=True
        ).start()

    def _run(self, assigned: Assigned, timeout: timedelta) -> None:
        try:
            self.made.set_result(self._connected(assigned, timeout))
        except BaseException as error:
            self.made.set_exception(error)

    def _connected(self, assigned: Assigned, timeout: timedelta) -> ProcessGroupGloo:
        try:
            store = PrefixStore("wire", _store(assigned))
            store.set(f"ready/{assigned.rank}", "")
            self._wait_for_ready(store, assigned)
        except CancelledError:
            raise
        except Exception as error:
            self.explained_s = _NOTICED_S
            raise CheckpointError(f"cannot reach the other ranks: {_reason(error)}") from error
        self.awaited = "the other ranks do not connect"
        # Gloo waits for the addresses of other ranks for its timeout, and for their connections up
        # to five times as long.
        gloo_timeout, began = timeout / 5, time.monotonic()
        try:
            group = ProcessGroupGloo(store, assigned.rank, assigned.size, gloo_timeout)
        except Exception as error:
            # Before the timeout, the failure is one of this rank, unless another has just ended.
            has_waited = time.monotonic() - began >= gloo_timeout.total_seconds()
            self.explained_s = 0.0 if has_waited else _EXPLAINED_S
            kind = CancelledError if has_waited else CheckpointError
            raise kind(
                f"cannot connect to the other ranks: {_reason(error)}; set GLOO_SOCKET_IFNAME to "
                'the network to use, or pass FastReader(exchange="off") to load without connections'
            ) from error
        self.awaited = "the other ranks do not prove that they belong to this load"
        reason = _unproven(group, assigned, timeout - timedelta(seconds=time.monotonic() - began))
        if reason:
            self.explained_s = _EXPLAINED_S  # Another rank may have ended.
            del group  # Else the traceback of the error would keep its connections open.
            raise CheckpointError(
                f"cannot connect to the other ranks: {reason}; set GLOO_SOCKET_IFNAME to a network "
                'of these ranks, or pass FastReader(exchange="off") to load without connections'
            )
        return group

    def _wait_for_ready(self, store: PrefixStore, assigned: Assigned) -> None:
        """Waits until all ranks are ready, or until the attempt is abandoned."""
        keys = [f"ready/{position}" for position in range(assigned.size)]
        pause_s = 0.001
        while not store.check(keys):
            if self.is_abandoned:
                raise CancelledError("the load has failed")
            if pause_s == _POLL_S:
                late = [
                    r for r, key in zip(assigned.ranks, keys, strict=True) if not store.check([key])
                ]
                self.awaited = f"{listed_ranks(late)} not ready" if late else ""
            time.sleep(pause_s)
            pause_s = min(1.2 * pause_s, _POLL_S)


def _unproven(group: ProcessGroupGloo, assigned: Assigned, timeout: timedelta) -> str:
    """Returns the rank that did not prove that it belongs to the exchange, as text, or "".

    Gloo requires no secret: another program may have dialled a rank, or may listen at its address.
    So each pair of ranks completes a handshake before it exchanges bytes of tensors.
    """
    ends_at = time.monotonic() + timeout.total_seconds()
    ends = {
        other: Handshake(assigned.secret, f"rank {assigned.rank}", f"rank {other}", assigned.token)
        for other in range(assigned.size)
        if other != assigned.rank
    }
    own = {other: end.nonce for other, end in ends.items()}
    try:
        nonces = _swapped(group, own, NONCE_NBYTES, _NONCE_TAG, ends_at)
        own = {other: end.proof(nonces[other]) for other, end in ends.items()}
        proofs = _swapped(group, own, PROOF_NBYTES, _PROOF_TAG, ends_at)
    except RuntimeError as error:
        return _reason(error)
    bad = [r for r, end in ends.items() if not end.is_proven(nonces[r], proofs[r])]
    names = listed_ranks([assigned.ranks[other] for other in bad])
    return f"another program has the connections of {names}" if bad else ""


def _swapped(
    group: Any, own: dict[int, bytes], nbytes: int, tag: int, ends_at: float
) -> dict[int, bytes]:
    """Sends bytes to each other rank; returns the bytes received from it. Raises RuntimeError."""
    byte, cpu = torch.uint8, torch.device("cpu")
    sent = {other: torch.tensor([*data], dtype=byte, device=cpu) for other, data in own.items()}
    received = {other: torch.empty(nbytes, dtype=byte, device=cpu) for other in own}
    works = [group.recv([data], other, tag) for other, data in received.items()]
    works += [group.send([data], other, tag) for other, data in sent.items()]
    for work in works:
        work.wait(timedelta(seconds=max(ends_at - time.monotonic(), 0.001)))
    return {other: bytes(data.tolist()) for other, data in received.items()}


def _check_threads() -> None:
    """Checks that threads can be started. Gloo ends the process or hangs if it cannot start one."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait, daemon=True) for _ in range(_THREADS)]
    started = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise CheckpointError(
            f"cannot start the threads of an exchange of reads: {error}; raise the limit of "
            'threads, or pass FastReader(exchange="off") to load without an exchange'
        ) from error
    finally:
        done.set()
        for thread in started:
            thread.join()


def _reason(error: Exception) -> str:
    """Returns the message of torch or gloo without advice and source locations."""
    text = re.sub(r"\[[^] ]*:\d+\] ", "", str(error))
    for suffix_start in ("\n", ". This is typically", ", keys:"):
        text = text.partition(suffix_start)[0]
    return text


def _store(assigned: Assigned) -> PrefixStore:
    """Returns the store through which the ranks of an exchange connect."""
    # The clone has its own connection: a wait in a store blocks all users of the same connection.
    default: Any = _get_process_group_store(_get_default_group())
    return PrefixStore(f"torch_ckpt/exchange/{assigned.token}", default.clone())


def _delete_keys(assigned: Assigned) -> None:
    """Deletes the keys of the exchange from the store, on the last rank that finishes."""

    def delete() -> None:
        with contextlib.suppress(RuntimeError):  # If the store fails, a few bytes remain in it.
            store = _store(assigned)
            if store.add("done", 1) == assigned.size:
                for key in store.list_keys():
                    store.delete_key(key)

    with contextlib.suppress(RuntimeError):  # The system has no more threads.
        thread = threading.Thread(target=delete, name="torch_ckpt-exchange", daemon=True)
        thread.start()
        thread.join(_NOTICED_S)  # The load has succeeded, whether or not the store answers.
