"""The exchange between the ranks of a load: what several want is read by one, and passed on."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroupGloo,
    _get_default_group,
    _get_process_group_store,
)

from torch_ckpt import _native, _tensor_view
from torch_ckpt.errors import CancelledError

__all__ = [
    "CONNECTIONS",
    "Assigned",
    "ExchangeMode",
    "Wanted",
    "can_exchange",
    "joined",
    "share_reads",
    "wanted",
]

ExchangeMode = Literal["auto", "ring", "off"]
"""Whether ranks exchange what they read: where it saves something, always, or never."""

_LEAST_SAVED_NBYTES = 16 << 20
"""With ``"auto"``, ranks do not connect to each other to save less than this."""


@dataclasses.dataclass(frozen=True)
class _Membership:
    """The place of this process among ranks that are connected."""

    token: str
    rank: int
    size: int


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What a rank wants to read, and who it is; travels in ``LoadPlan.storage_data``."""

    save_id: str | None
    """Of the save whose metadata it has read."""
    encoded: bytes | None = None
    """Its byte ranges; ``None`` if it takes no part in an exchange."""
    mode: ExchangeMode = "off"
    node: str = ""
    memberships: tuple[_Membership, ...] = ()
    """Connections that it has from former loads."""


@dataclasses.dataclass(frozen=True)
class Assigned:
    """The part of an exchange that a rank takes; comes back in ``LoadPlan.storage_data``."""

    encoded: bytes
    membership: _Membership


class Connections:
    """Connections of this process to other ranks, kept from load to load.

    They are made beside the process groups of training, so that neither ever waits for the other,
    and only between ranks that exchange something. A load takes all there are, and puts back what
    it has left whole: of others, nobody knows what is still on its way. Used by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[_Membership, ProcessGroupGloo] = {}

    def take(self) -> dict[_Membership, ProcessGroupGloo]:
        """Takes what is there."""
        with self._lock:
            kept, self._kept = self._kept, {}
        return kept

    def put_back(self, membership: _Membership, backend: ProcessGroupGloo) -> None:
        """Keeps connections for the next load, in place of all that were kept."""
        with self._lock:
            self._kept = {membership: backend}

    def forget(self) -> None:
        """Closes what is kept."""
        self.take()


CONNECTIONS = Connections()
# Threads of a backend must not outlive the interpreter.
atexit.register(CONNECTIONS.forget)


def can_exchange() -> bool:
    """Whether there are other ranks that this one may exchange with."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def wanted(
    encoded: bytes | None, *, save_id: str | None, mode: ExchangeMode, taken: Sequence[_Membership]
) -> Wanted:
    """What this rank says of itself."""
    if encoded is None:
        return Wanted(save_id)
    return Wanted(save_id, encoded, mode, socket.gethostname(), tuple(taken))


def share_reads(plans: Sequence[Wanted], *, budget_nbytes: int) -> list[Assigned | None]:
    """Shares out what several ranks want; called by the coordinator.

    Args:
        plans: What each rank wants, in the order of the ranks.
        budget_nbytes: Bytes of memory for what a rank has in flight.

    Returns:
        The part of each rank, ``None`` for one that has none.
    """
    nothing: list[Assigned | None] = [None] * len(plans)
    taking_part = [rank for rank, plan in enumerate(plans) if plan.encoded is not None]
    exchange = _exchange_of(plans, taking_part, budget_nbytes)
    sharing = [rank for place, rank in enumerate(taking_part) if exchange.is_in_ring(place)]
    if not sharing:
        return nothing
    if len(sharing) < len(taking_part):  # The others need not be connected.
        taking_part = sharing
        exchange = _exchange_of(plans, taking_part, budget_nbytes)
    modes = {plans[rank].mode for rank in taking_part}
    if exchange.saved_nbytes < (1 if "ring" in modes else _LEAST_SAVED_NBYTES):
        return nothing
    size = len(taking_part)
    # Connections of a former load serve again if all ranks still have them, in the same places.
    common = set.intersection(
        *(
            {m.token for m in plans[rank].memberships if (m.rank, m.size) == (place, size)}
            for place, rank in enumerate(taking_part)
        )
    )
    token = min(common) if common else secrets.token_hex(8)
    for place, rank in enumerate(taking_part):
        encoded = exchange.of_rank(place)
        nothing[rank] = Assigned(encoded, _Membership(token, place, size))
    return nothing


def _exchange_of(
    plans: Sequence[Wanted], ranks: Sequence[int], budget_nbytes: int
) -> _native.Exchange:
    encoded = [plans[rank].encoded or b"" for rank in ranks]
    return _native.Exchange(encoded, [plans[rank].node for rank in ranks], budget_nbytes)


@contextlib.contextmanager
def joined(
    assigned: Assigned,
    taken: dict[_Membership, ProcessGroupGloo],
    *,
    fs: _native.FileSystem,
    budget_nbytes: int,
    timeout_s: float,
) -> Iterator[_native.ExchangeStream]:
    """Takes part in an exchange; leaves it at the end, or breaks it off with an exception.

    When a rank breaks off, its connections end, and with them what the others wait for.

    Args:
        assigned: What this rank does.
        taken: Connections from former loads, of which it may use one.
        fs: Where the files are.
        budget_nbytes: Bytes of memory for what is in flight.
        timeout_s: Seconds that one transfer may take.

    Raises:
        CancelledError: Another rank could not be reached.
    """
    membership = assigned.membership
    backend = taken.pop(membership, None)
    taken.clear()
    if backend is None:
        backend = _connect(membership, timeout_s)
    try:
        peers = _tensor_view.make_peers(backend, round(timeout_s * 1000))
        stream = _native.ExchangeStream(fs, assigned.encoded, peers, budget_nbytes)
        del peers
        try:
            yield stream
        finally:
            stream.close()
    except BaseException:
        del backend  # The last that holds the connections: the traceback keeps this frame.
        raise
    CONNECTIONS.put_back(membership, backend)


def _connect(membership: _Membership, timeout_s: float) -> ProcessGroupGloo:
    store = PrefixStore(
        f"torch_ckpt/exchange/{membership.token}", _get_process_group_store(_get_default_group())
    )
    timeout = timedelta(seconds=timeout_s)
    try:
        return ProcessGroupGloo(store, membership.rank, membership.size, timeout)
    except Exception as error:
        raise CancelledError(f"cannot connect to the other ranks: {error}") from error
