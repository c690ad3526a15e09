"""Names of processes, by which a process on the same machine can check whether they live."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import socket
from pathlib import Path

from torch_ckpt.coordination.addresses import this_machine

__all__ = ["is_dead", "started_at", "this_process"]

_PROCESS = re.compile("([0-9a-f]{8})-([0-9]{1,9})-([0-9]+)")


def this_process() -> str:
    """Returns the name of this process: machine, process id, and when the process started."""
    return f"{_machine()}-{os.getpid()}-{started_at(os.getpid()) or 0}"


def is_dead(process: str) -> bool | None:
    """Returns whether a process is dead, given the result of :func:`this_process` in it.

    Returns ``None`` if that is unknown: the process ran on another machine or in another container,
    the machine was restarted, or the text has another form.
    """
    match = _PROCESS.fullmatch(process)
    if match is None or match[1] != _machine():
        return None
    now, started = started_at(int(match[2])), match[3]
    return None if now is None else now == "0" or now != started


def started_at(pid: int) -> str | None:
    """Returns when a process started, in clock ticks since the boot.

    Returns "0" if the process does not exist, and ``None`` if that is unknown: ``/proc`` is not
    mounted, or shows another pid namespace.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            raise FileNotFoundError("another namespace")
        text = Path("/proc/", str(pid), "stat").read_text()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return "0"
        except OSError:
            return None
        return None
    state, *fields = text.rpartition(")")[2].split()  # The program's name may have any text.
    return "0" if state in ("Z", "X") else fields[18]


@functools.cache
def _machine() -> str:
    """Returns a name of this machine and pid namespace."""
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
        # Copies of a virtual machine have the same boot id, but usually different names.
        name = f"{this_machine()} {namespace} {socket.gethostname()}"
        return hashlib.sha256(name.encode()).hexdigest()[:8]
    return secrets.token_hex(4)  # No other process has this name.
