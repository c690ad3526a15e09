"""Stops a process before each system call that changes files: another lets it through, or not.

A seccomp filter with a listener: no tracer, no other program and no privilege is needed, and a
process that is killed while it is stopped has not made the call. Linux 5.5 or later, x86-64.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import select
import struct
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe, reduction
from pathlib import Path
from typing import Any

_SECCOMP, _OPENAT, _IO_URING_ENTER = 317, 257, 426
_BY_DESCRIPTOR = {18: "pwrite64", 74: "fsync", 77: "ftruncate", 285: "fallocate"}
_BY_PATH = {82: "rename", 83: "mkdir", 84: "rmdir", 87: "unlink", 265: "link", 316: "exchange"}
_LIST = 217
_LOOKUPS = {_OPENAT: "open", 4: "stat", 6: "lstat", 21: "access", 262: "stat", 332: "statx"}
_LOOKUPS[_LIST] = "list"
_CREATIONS = {82: "rename", 83: "mkdir", 265: "link"}
_CALLS = {**_BY_DESCRIPTOR, **_BY_PATH, _OPENAT: "create", _IO_URING_ENTER: "io_uring_enter"}
_RENAME, _LINKAT, _RENAMEAT2 = 82, 265, 316
_PATH_AT = {
    _OPENAT: 1,
    262: 1,
    332: 1,
    _RENAME: 1,
    _LINKAT: 3,
    _RENAMEAT2: 3,
}  # The first argument otherwise.
_OLD_AT = {_RENAME: 0, _LINKAT: 1, _RENAMEAT2: 1}
_SOCKET, _SOCKETPAIR, _AF_UNIX = 41, 53, 1

_AUDIT_ARCH_X86_64 = 0xC000003E
_PR_SET_NO_NEW_PRIVS = 38
_SET_MODE_FILTER, _ALL_THREADS, _NEW_LISTENER = 1, 1, 8
_ALLOW, _NOTIFY, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_LOAD, _JUMP_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_AT, _OPEN_FLAGS_AT = 0, 4, 16, 32  # In `struct seccomp_data`.
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1
_NOTICE = struct.Struct("QIIiIQ6Q")
_REPLY = struct.Struct("QqiI")


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("if_true", ctypes.c_ubyte),
        ("if_false", ctypes.c_ubyte),
        ("k", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


@dataclass(frozen=True)
class Stop:
    """A thread that is about to make a system call.

    Attributes:
        call: What it is; ``create`` for opening with ``O_CREAT``.
        path: Of the file; where it is renamed or linked, the new one. Empty for
            ``io_uring_enter``.
        ticket: Tells it from other stops.
        old: The old name, where it is renamed or linked.
        nbytes: The bytes that it writes.
    """

    call: str
    path: str
    ticket: int
    old: str = ""
    nbytes: int = 0


class Listener:
    """What hears of the stops of one process. Poll it like a file."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)

    def fileno(self) -> int:
        """Returns the descriptor to poll."""
        return self._fd

    def receive(self) -> Stop | None:
        """Returns one stop, or ``None`` where there is none: the process may have been killed."""
        if not any(event & select.POLLIN for _, event in self._poll.poll(0)):
            return None
        notice = bytearray(_NOTICE.size)
        try:
            fcntl.ioctl(self._fd, _RECEIVE, notice)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR):
                return None
            raise
        ticket, pid, _, number, _, _, *args = _NOTICE.unpack(notice)
        path = old = ""
        with contextlib.suppress(OSError):  # Killed meanwhile.
            if number in _BY_DESCRIPTOR or number == _LIST:
                path = os.readlink(f"/proc/{pid}/fd/{args[0]}")
            elif number in (_CALLS | _LOOKUPS) and number != _IO_URING_ENTER:
                path = _text_at(pid, args[_PATH_AT.get(number, 0)])
                if number in _OLD_AT:
                    old = _text_at(pid, args[_OLD_AT[number]])
        creates = number == _OPENAT and args[2] & os.O_CREAT
        calls = _CALLS if creates or number not in _LOOKUPS else _LOOKUPS
        nbytes = args[2] if _BY_DESCRIPTOR.get(number) == "pwrite64" else 0
        return Stop(calls[number], path, ticket, old, nbytes)

    def let_through(self, stop: Stop) -> None:
        """Has the thread make its call."""
        self._reply(stop, 0, _CONTINUE)

    def fail(self, stop: Stop, number: int) -> None:
        """Has the call fail with this ``errno`` without being made."""
        self._reply(stop, -number, 0)

    def end_listing(self, stop: Stop) -> None:
        """Has a directory look empty, or listed to its end."""
        self._reply(stop, 0, 0)

    def _reply(self, stop: Stop, error: int, flags: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # Killed meanwhile.
            fcntl.ioctl(self._fd, _SEND, bytearray(_REPLY.pack(stop.ticket, 0, error, flags)))

    def close(self) -> None:
        """Stops listening: a call that would be stopped from now on fails."""
        os.close(self._fd)


def can_stop() -> bool:
    """Whether this machine can stop its processes so."""
    return platform.machine() == "x86_64" and Path("/proc/sys/kernel/seccomp").is_dir()


def stop_before_lookups() -> int:
    """Like :func:`stop_before_changes`, also before calls that look up a name."""
    steps = [(_LOAD, 0, 0, _ARCH_AT), (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH_X86_64), _return(_ALLOW)]
    steps.append((_LOAD, 0, 0, _NUMBER_AT))
    for number in (*_LOOKUPS, *_CREATIONS):
        steps += [(_JUMP_EQUAL, 0, 1, number), _return(_NOTIFY)]
    return _install([*steps, _return(_ALLOW)], _NEW_LISTENER)


def stop_before_changes() -> int:
    """Has this thread, and all that it starts, stop from now on before such calls.

    Returns:
        The descriptor to make a :class:`Listener` of, in another process.
    """
    steps = [(_LOAD, 0, 0, _ARCH_AT), (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH_X86_64), _return(_ALLOW)]
    steps.append((_LOAD, 0, 0, _NUMBER_AT))
    for number in _CALLS:
        if number != _OPENAT:
            steps += [(_JUMP_EQUAL, 0, 1, number), _return(_NOTIFY)]
    steps += [(_JUMP_EQUAL, 0, 3, _OPENAT), (_LOAD, 0, 0, _OPEN_FLAGS_AT)]
    steps += [(_JUMP_SET, 0, 1, os.O_CREAT), _return(_NOTIFY), _return(_ALLOW)]
    return _install(steps, _NEW_LISTENER)


def refuse(error: int, *numbers: int, unix_sockets: bool = False) -> None:
    """Has system calls fail from now on in this process, and in all that it starts.

    Args:
        error: The ``errno`` with which they fail.
        numbers: Numbers of the calls.
        unix_sockets: Whether to refuse sockets of the kind ``AF_UNIX`` too.
    """
    steps = [(_LOAD, 0, 0, _NUMBER_AT)]
    for number in numbers:
        steps += [(_JUMP_EQUAL, 0, 1, number), _return(_ERRNO | error)]
    if unix_sockets:
        steps += [(_JUMP_EQUAL, 1, 0, _SOCKET), (_JUMP_EQUAL, 0, 3, _SOCKETPAIR)]
        steps += [(_LOAD, 0, 0, _FIRST_AT), (_JUMP_EQUAL, 0, 1, _AF_UNIX)]
        steps += [_return(_ERRNO | error)]
    _install([*steps, _return(_ALLOW)], _ALL_THREADS)


def refuse_direct(error: int) -> None:
    """Has files not be opened for direct I/O from now on, in this process and its threads."""
    steps = [(_LOAD, 0, 0, _NUMBER_AT), (_JUMP_EQUAL, 0, 3, _OPENAT), (_LOAD, 0, 0, _OPEN_FLAGS_AT)]
    steps += [(_JUMP_SET, 0, 1, os.O_DIRECT), _return(_ERRNO | error), _return(_ALLOW)]
    _install(steps, _ALL_THREADS)


def have_answered(stop_before: Callable[[], int], answer: Callable[[Listener, Stop], None]) -> None:
    """Has a child of this process answer the stops of this one, until it ends.

    The calls of this thread, and of what it starts, stop from now on. The child calls ``answer``.
    """
    ours, theirs = Pipe()
    if os.fork() == 0:
        ours.close()
        with contextlib.suppress(BaseException):
            _answer_all(theirs, answer)
        os._exit(0)
    theirs.close()
    listener = stop_before()
    reduction.send_handle(ours, listener, None)
    os.close(listener)
    ours.close()


def _answer_all(pipe: Any, answer: Callable[[Listener, Stop], None]) -> None:
    listener = Listener(reduction.recv_handle(pipe))
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        events = dict(poll.poll())[listener.fileno()]
        if not events & select.POLLIN:  # The last thread of the other process has ended.
            return
        stop = listener.receive()
        if stop is not None:
            answer(listener, stop)


def _install(steps: list[tuple[int, int, int, int]], flags: int) -> int:
    filter_ = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), filter_)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")
    fd: int = libc.syscall(_SECCOMP, _SET_MODE_FILTER, flags, ctypes.byref(program))
    if fd < 0:
        raise OSError(ctypes.get_errno(), "a seccomp filter is refused")
    return fd


def _return(what: int) -> tuple[int, int, int, int]:
    return _RETURN, 0, 0, what


def _text_at(pid: int, address: int) -> str:
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        return os.fsdecode(memory.read(4096).split(b"\0", 1)[0])
