"""Machines as network namespaces, whose links are cut and healed. Only root may make them.

The program that makes them is in a network namespace too, so nothing else is affected. Each machine
has a link to the other machines, and one to a store that listens in the namespace of the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from pathlib import Path

from support.store_server import SeaweedFS
from waits import until

__all__ = ["Network", "Store", "enter", "in_machine", "ip", "own_network"]

STORE = "10.3.0.1"
CLONE_NEWNET = 0x40000000
LINKS = {"ranks": 1, "store": 2}
FIRST_RULE = 100
"""Priority of the first rule that drops packets: before that of local addresses."""


class Store(SeaweedFS):
    """A store that other network namespaces reach, too."""

    def _command(self) -> list[str]:
        return [
            part.replace("-ip.bind=127.0.0.1", "-ip.bind=0.0.0.0") for part in super()._command()
        ]

    def variables(self) -> dict[str, str]:
        """What its clients in the machines have in their environment."""
        variables = self.environment(f"http://{STORE}:{self.ports[0]}")
        return variables | {"NO_PROXY": f"127.0.0.1,{STORE}"}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=10)


def in_machine(pid: int, *words: str) -> None:
    command = ["nsenter", f"--net=/proc/{pid}/ns/net", "ip", *words]
    subprocess.run(command, check=True, timeout=10)


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name} is refused")


def own_network() -> None:
    """Moves this thread, and all that it starts, to a network namespace of its own."""
    _call("unshare", CLONE_NEWNET)


def enter(pid: int) -> None:
    """Moves this thread, and all that it starts, to the network of a machine."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        _call("setns", namespace.fileno(), CLONE_NEWNET)


class Network:
    """So many machines, each of which can reach the others and the store.

    Attributes:
        pids: A process in each machine's namespace.
    """

    def __init__(self, machines: int) -> None:
        self.pids: list[int] = []
        self._stack = contextlib.ExitStack()
        self._down: list[str] = []
        self._rules: list[str] = []
        try:
            ip("link", "set", "lo", "up")
            ip("addr", "add", f"{STORE}/32", "dev", "lo")
            ip("rule", "add", "pref", "1000", "lookup", "local")
            ip("rule", "del", "pref", "0")
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
            for number in range(machines):
                self._make_machine(number)
        except BaseException:
            self.close()
            raise

    def _make_machine(self, number: int) -> None:
        words = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "sleep", "infinity"]
        holder = subprocess.Popen(words)
        self._stack.callback(holder.wait)
        self._stack.callback(holder.kill)
        own = os.readlink("/proc/self/ns/net")
        until(lambda: os.readlink(f"/proc/{holder.pid}/ns/net") != own)
        in_machine(holder.pid, "link", "set", "lo", "up")
        for name, net in LINKS.items():
            outer = f"{name}{number}"
            ip("link", "add", outer, "type", "veth", "peer", "name", name, "netns", str(holder.pid))
            ip("addr", "add", f"10.{net}.{number}.1/24", "dev", outer)
            ip("link", "set", outer, "up")
            in_machine(holder.pid, "addr", "add", f"10.{net}.{number}.2/24", "dev", name)
            in_machine(holder.pid, "link", "set", name, "up")
        in_machine(holder.pid, "route", "add", "10.1.0.0/16", "via", f"10.1.{number}.1")
        in_machine(holder.pid, "route", "add", STORE, "via", f"10.2.{number}.1")
        self.pids.append(holder.pid)

    def address(self, machine: int) -> str:
        """The address of this namespace on the link between a machine and the others."""
        return f"10.1.{machine}.1"

    def unplug(self, machine: int, *links: str) -> None:
        """Takes links of a machine down: ``ranks``, ``store``."""
        for link in links:
            ip("link", "set", f"{link}{machine}", "down")
            self._down.append(f"{link}{machine}")

    def drop_from(self, machine: int, *links: str) -> None:
        """Drops what a machine sends on these links, without a trace."""
        for link in links:
            self._drop("iif", f"{link}{machine}")

    def drop_to(self, machine: int, *links: str) -> None:
        """Drops what a machine would receive on these links, without a trace."""
        for link in links:
            self._drop("to", f"10.{LINKS[link]}.{machine}.2")

    def drop_between(self, machine: int, other: int) -> None:
        """Drops what a machine sends to another one, without a trace."""
        self._drop("iif", f"ranks{machine}", "to", f"10.{LINKS['ranks']}.{other}.2")

    def _drop(self, *words: str) -> None:
        self._rules.append(str(FIRST_RULE + len(self._rules)))
        ip("rule", "add", "pref", self._rules[-1], *words, "blackhole")

    def heal(self) -> None:
        """Lets all machines reach each other and the store again."""
        while self._rules:
            ip("rule", "del", "pref", self._rules.pop())
        while self._down:
            ip("link", "set", self._down.pop(), "up")

    def close(self) -> None:
        """Removes the machines, with their links."""
        self._stack.close()
