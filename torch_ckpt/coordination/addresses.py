"""The addresses and the name of this machine, and probes of the addresses of other machines."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import ipaddress
import os
import socket
import struct
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_ckpt.process_state import PROCESS

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "is_loopback",
    "node_id",
    "own_addresses",
    "reachable",
    "refuses",
    "store_address",
    "this_machine",
]

_SIOCGIFADDR = 0x8915  # Asks the kernel for the IPv4 address of an interface.
_PROBE_TIMEOUT_S = 0.5  # Timeout of one probe. Only a refusal counts as an answer.


@functools.cache
def this_machine() -> str:
    """Returns a name of this machine, the same for all processes that share its memory."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def node_id() -> int:
    """Returns an identifier of this node. Containers on one machine have the same identifier.

    Each rank sends its identifier, because ``LOCAL_WORLD_SIZE`` is not enough: nodes may have
    different numbers of ranks, and the ranks of a group may be scattered over nodes.
    """
    name = this_machine().encode()
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little", signed=True)


def store_address(store: Any) -> tuple[str, int] | None:
    """Returns the host and port of a store; ``None`` if they are unknown."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    return (host, port) if host and port else None


def own_addresses(store: Store | None) -> list[str]:
    """Returns the addresses of this machine at which its ranks listen.

    These are the addresses of the interfaces in ``GLOO_SOCKET_IFNAME``, if it is set. Otherwise
    they are the source address of the route to the store, the addresses of the machine's name, and
    127.0.0.1. The first is not enough: on the store's machine it is often 127.0.0.1.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    hosts = [host for name in names for host in _addresses_of(name)]
    if hosts:
        return list(dict.fromkeys(hosts))
    address = store_address(store)
    if address is not None:
        with contextlib.suppress(OSError), _datagram_socket() as s:
            s.connect(address)  # Sends nothing, but makes the kernel choose a route.
            hosts.append(s.getsockname()[0])
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        hosts += [str(entry[4][0]) for entry in found]
    return list(dict.fromkeys([*hosts, "127.0.0.1"]))


def _datagram_socket() -> socket.socket:
    return PROCESS.own(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))


def _addresses_of(interface: str) -> list[str]:
    """Returns the addresses of a network interface; none if it does not exist."""
    hosts = []
    with contextlib.suppress(OSError), _datagram_socket() as s:
        request = struct.pack("256s", interface.encode()[:15])
        hosts.append(socket.inet_ntoa(fcntl.ioctl(s, _SIOCGIFADDR, request)[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            address = ipaddress.IPv6Address(bytes.fromhex(digits))
            if name == interface and not address.is_link_local:  # Its scope has a local name.
                hosts.append(str(address))
    return hosts


def is_loopback(host: str) -> bool:
    """Returns whether an address is a loopback address: every machine reaches itself there."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback


def reachable(addresses: Sequence[tuple[str, int]], node: int) -> list[tuple[str, int]]:
    """Returns the addresses of a process at which this machine may dial it.

    ``node`` is the identifier of the node of that process. Loopback addresses of other nodes are
    excluded: there, this machine would dial a local program.
    """
    is_here = node == node_id()
    return [(host, port) for host, port in addresses if is_here or not is_loopback(host)]


def refuses(addresses: Sequence[tuple[str, int]]) -> bool:
    """Returns whether the machine of a rank refuses connections at all its addresses.

    The addresses are the result of :func:`reachable`. Only an explicit refusal at every address
    counts: a missing answer does not.
    """
    answers = set()
    for host, port in addresses:
        try:
            PROCESS.own(socket.create_connection((host, port), _PROBE_TIMEOUT_S)).close()
            return False
        except OSError as error:
            answers.add(error.errno)
    return answers == {errno.ECONNREFUSED}
