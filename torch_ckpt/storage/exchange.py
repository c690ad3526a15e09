"""The exchange between the ranks of a load: what several want is read by one, and passed on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    _get_default_group,
    _get_process_group_store,
)

from torch_ckpt._core import _native, _tensor_view
from torch_ckpt.coordination.connect import this_machine
from torch_ckpt.errors import CancelledError

__all__ = [
    "Assigned",
    "ExchangeMode",
    "Wanted",
    "can_exchange",
    "joined",
    "pays",
    "share_reads",
    "these_processes",
]

ExchangeMode = Literal["auto", "off"]
"""Whether ranks exchange what they read: where that pays, or never."""

_LEAST_SAVED_NBYTES = 16 << 20
"""Ranks do not connect to each other to save less than this."""

_LEAST_SAVED_PART = 16
"""Nor to save less than one of so many parts of what they want."""

_MOST_RANKS = 256
"""More ranks do not connect to each other: each would need so many sockets."""

_CONNECT_TIMEOUT_S = 300.0
"""Ranks connect within this, or fail: they have all just met."""


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a rank wants to read; travels in ``LoadPlan.storage_data``."""

    save_id: str | None
    """Of the save whose metadata it has read."""
    encoded: bytes | None = None
    """Its byte ranges; ``None`` if it takes no part in an exchange."""
    machine: str = ""
    """Rings go round machine by machine."""
    processes: str = ""
    """Ranks of the same may know each other by their process ids."""
    pid: int = 0
    rank: int = 0
    """As people know it: in the whole job."""
    budget_nbytes: int = 0
    """Memory for what it has in flight."""
    verify: bool = True
    """Whether it checks what it reads."""


@dataclasses.dataclass(frozen=True)
class Assigned:
    """The part of an exchange that a rank takes; comes back in ``LoadPlan.storage_data``."""

    encoded: bytes
    token: str
    """Names the exchange."""
    rank: int
    """Place of this rank among those that take part."""
    ranks: tuple[int, ...]
    """Those, by their ranks in the whole job."""
    pids: dict[int, int]
    """Process ids of others, by their places, whose memory this rank may be able to read."""

    @property
    def size(self) -> int:
        """How many take part."""
        return len(self.ranks)


@functools.cache
def these_processes() -> str:
    """A name that processes have in common if they know each other by their ids."""
    try:
        return f"{this_machine()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def can_exchange() -> bool:
    """Whether there are other ranks that this one may exchange with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def share_reads(plans: Sequence[Wanted]) -> list[Assigned | None]:
    """Shares out what several ranks want; called by the coordinator.

    Args:
        plans: What each rank wants, in the order of the ranks.

    Returns:
        The part of each rank, ``None`` for one that has none.
    """
    parts: list[Assigned | None] = [None] * len(plans)
    taking_part = [rank for rank, plan in enumerate(plans) if plan.encoded is not None]
    if any(plans[rank].verify for rank in taking_part):
        # What nobody has checked is not for those who want it checked.
        taking_part = [rank for rank in taking_part if plans[rank].verify]
    exchange = _exchange_of(plans, taking_part)
    sharing = [rank for place, rank in enumerate(taking_part) if exchange.is_in_ring(place)]
    if not pays(exchange.saved_nbytes, exchange.wanted_nbytes, len(sharing)):
        return parts
    if len(sharing) < len(taking_part):  # The others need not be connected.
        exchange = _exchange_of(plans, sharing)
    token = secrets.token_hex(8)
    by_processes = defaultdict(list)
    for place, rank in enumerate(sharing):
        if plans[rank].processes:
            by_processes[plans[rank].processes].append(place)
    names = tuple(plans[rank].rank for rank in sharing)
    for place, rank in enumerate(sharing):
        pids = {
            other: plans[sharing[other]].pid
            for other in by_processes[plans[rank].processes]
            if other != place
        }
        parts[rank] = Assigned(exchange.of_rank(place), token, place, names, pids)
    return parts


def pays(saved_nbytes: int, wanted_nbytes: int, ranks: int) -> bool:
    """Whether so many ranks connect to each other to read so much less than all of them want."""
    least = max(_LEAST_SAVED_NBYTES, wanted_nbytes // _LEAST_SAVED_PART)
    return saved_nbytes >= least and ranks <= _MOST_RANKS


def _exchange_of(plans: Sequence[Wanted], ranks: Sequence[int]) -> _native.Exchange:
    return _native.Exchange(
        [plans[rank].encoded or b"" for rank in ranks],
        [plans[rank].machine for rank in ranks],
        min((plans[rank].budget_nbytes for rank in ranks), default=0),
    )


@contextlib.contextmanager
def joined(
    assigned: Assigned, *, fs: _native.FileSystem, budget_nbytes: int, timeout_s: float
) -> Iterator[_native.ExchangeStream]:
    """Takes part in an exchange; comes to its end with the others, or breaks it off by raising.

    When a rank breaks off, its connections end, and the others find that out.

    Args:
        assigned: What this rank does.
        fs: Where the files are.
        budget_nbytes: Bytes of memory for what is in flight.
        timeout_s: Seconds that one transfer may take.

    Raises:
        CancelledError: Another rank could not be reached, or has broken off.
    """
    timeout_ms = round(timeout_s * 1000)
    with contextlib.ExitStack() as stack:
        # Nothing else may hold the connections: the traceback of an error would keep them open.
        wire = [_tensor_view.make_peers(_connect(assigned, timeout_s), assigned.ranks, timeout_ms)]
        stack.callback(wire.clear)
        stream = _native.ExchangeStream(
            fs, assigned.encoded, wire.pop(), assigned.pids, budget_nbytes, timeout_ms
        )
        stack.callback(stream.close)
        yield stream
        stream.finish()
    _forget(assigned)


def _connect(assigned: Assigned, timeout_s: float) -> ProcessGroupGloo:
    """Connects to the others, beside the process groups of training."""
    timeout = _connect_timeout(timeout_s)
    try:
        store = PrefixStore("wire", _store(assigned))
        store.set(f"come/{assigned.rank}", "")
        store.wait([f"come/{rank}" for rank in range(assigned.size)], timeout)
    except Exception as error:
        raise CancelledError(f"cannot meet the other ranks: {_reason(error)}") from error
    try:
        # All are here. Gloo waits five times as long as it is told for another to connect.
        return ProcessGroupGloo(store, assigned.rank, assigned.size, timeout / 5)
    except Exception as error:
        raise CancelledError(
            f"cannot connect to the other ranks: {_reason(error)}; GLOO_SOCKET_IFNAME names the "
            'network to use, FastReader(exchange="off") does without'
        ) from error


def _reason(error: Exception) -> str:
    """What torch and gloo say, without their advice and where in their sources they say so."""
    text = re.sub(r"\[[^] ]*:\d+\] ", "", str(error))
    for rest in ("\n", ". This is typically", ", keys:"):
        text = text.partition(rest)[0]
    return text


def _connect_timeout(timeout_s: float) -> timedelta:
    return timedelta(seconds=min(timeout_s, _CONNECT_TIMEOUT_S))


def _store(assigned: Assigned) -> PrefixStore:
    """Where the ranks of an exchange find each other."""
    # A connection of its own: whoever waits in a store keeps all others that share it waiting.
    default: Any = _get_process_group_store(_get_default_group())
    return PrefixStore(f"torch_ckpt/exchange/{assigned.token}", default.clone())


def _forget(assigned: Assigned) -> None:
    """Has the last rank that comes to the end of an exchange delete what all have stored for it."""
    with contextlib.suppress(RuntimeError):  # Of the store. A few bytes are left there.
        store = _store(assigned)
        if store.add("done", 1) == assigned.size:
            for key in store.list_keys():
                store.delete_key(key)
