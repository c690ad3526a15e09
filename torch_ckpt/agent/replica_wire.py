"""The connection between the agents of two machines: blocks with checksums, after a message.

The sender connects, and both ends prove that they know the secret of the receiver
(``coordination/handshake.py``). For each save the sender then sends a message, waits for the
answer, and sends the blocks of all slots. A block has a head of 12 bytes, little-endian: its length
and its XXH3-64. After all blocks, a length of 0 and the number 1 end the save. If the sender
abandons a save, it closes the connection.
"""

from __future__ import annotations

import errno
import socket
import struct
import time
from collections.abc import Callable, Sequence

from torch_ckpt.agent.messages import has_arrived
from torch_ckpt.coordination.handshake import Dialling, keep_alive
from torch_ckpt.process_state import PROCESS

__all__ = [
    "ALL_SENT",
    "HEAD",
    "IO_TIMEOUT_S",
    "POLL_S",
    "OvertakenError",
    "dial",
    "receive_into",
    "send_block",
    "wait_readable",
]

HEAD = struct.Struct("<IQ")
ALL_SENT = HEAD.pack(0, 1)

IO_TIMEOUT_S = 30.0
"""Time without any progress after which a connection counts as lost."""

POLL_S = 0.2
"""Interval at which a wait on a connection checks whether it is still wanted."""

DIAL_S = 5.0
"""Time for one address of another agent."""

_CHUNK_NBYTES = 256 << 10


class OvertakenError(Exception):
    """The slots that are being sent are needed for a newer save."""


def dial(addresses: Sequence[tuple[str, int]], token: str, node: int) -> socket.socket:
    """Connects to an agent at the first of its addresses where it confirms the handshake.

    Raises OSError if none does, at most ``DIAL_S`` later for each address.
    """
    failures = []
    for host, port in addresses:
        ends_at = time.monotonic() + DIAL_S
        try:
            connection = keep_alive(PROCESS.own(socket.create_connection((host, port), DIAL_S)))
        except OSError as error:
            failures.append(f"{host}: {error}")
            continue
        try:
            dialling = Dialling(connection, token, node)
            while not dialling.advance():
                if not has_arrived(connection, max(ends_at - time.monotonic(), 0.0)):
                    raise TimeoutError("it does not answer")
            connection.settimeout(IO_TIMEOUT_S)
            return connection
        except OSError as error:
            failures.append(f"{host}: {error.strerror or error}")
        connection.close()
    raise OSError(
        errno.EHOSTUNREACH,
        "; ".join(failures)
        or "it has no address that this machine can reach; set GLOO_SOCKET_IFNAME to a network",
    )


def send_block(
    connection: socket.socket, views: Sequence[bytes | memoryview], is_overtaken: Callable[[], bool]
) -> None:
    """Sends bytes, in short steps.

    Raises OvertakenError if ``is_overtaken`` returns true, and OSError if nothing could be sent
    for ``IO_TIMEOUT_S``.
    """
    for each in views:
        view = memoryview(each)
        deadline = time.monotonic() + IO_TIMEOUT_S
        while len(view):
            if is_overtaken():
                raise OvertakenError
            connection.settimeout(POLL_S)
            try:
                view = view[connection.send(view[:_CHUNK_NBYTES]) :]
                deadline = time.monotonic() + IO_TIMEOUT_S
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise
    connection.settimeout(IO_TIMEOUT_S)


def receive_into(connection: socket.socket, view: memoryview) -> None:
    """Fills a view with received bytes. Raises OSError if the connection ends."""
    while len(view):
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the sender closed the connection")
        view = view[count:]


def wait_readable(connection: socket.socket, is_wanted: Callable[[], bool]) -> bool:
    """Waits until bytes have arrived; returns whether the connection is still wanted."""
    while is_wanted():
        if has_arrived(connection, POLL_S):
            return True
    return False
