"""Runs a function that stops at each of its calls that change files, or at each request to a store.

Both happen in this process: a file system's calls are stopped in a thread by a seccomp filter, and
requests by a client between the engine and the store. At each stop, the test reads what is there,
and chooses whether the call is made and what it returns.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stops import is_in
from syscalls import Listener, Stop, stop_before_changes

from torch_ckpt._core import _native
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import register

__all__ = ["DEATH", "MADE", "Answer", "FaultyStore", "Run", "lost", "refused", "stop_at_calls"]

_UNMADE = {"pwrite64", "fsync", "ftruncate", "fallocate", "io_uring_enter"}


@dataclass(frozen=True)
class Answer:
    """What becomes of a call: whether it is made, and with which ``errno`` it fails."""

    error: int = 0
    is_made: bool = True
    is_last: bool = False


MADE = Answer()
DEATH = Answer(errno.EIO, is_made=False, is_last=True)
"""The process dies before the call: neither this call nor a later one is made."""


def refused(number: int) -> Answer:
    """The call fails without being made."""
    return Answer(number, is_made=False)


def lost(number: int) -> Answer:
    """The call is made, and fails nevertheless, as if its reply had been lost."""
    return Answer(number)


@dataclass(frozen=True)
class Run:
    """How a function ended: the calls that it has attempted, and what it has raised."""

    calls: list[str]
    error: BaseException | None


AtCall = Callable[[int, str], Answer]


class _Chooser:
    """Numbers the calls, and remembers a death."""

    def __init__(self, at_call: AtCall) -> None:
        self.calls: list[str] = []
        self._at_call, self._is_dead = at_call, False

    def answer(self, text: str) -> Answer:
        if self._is_dead:
            return DEATH
        self.calls.append(text)
        answer = self._at_call(len(self.calls) - 1, text)
        self._is_dead = answer.is_last
        return answer


def stop_at_calls(folder: Path, at_call: AtCall, function: Callable[[], object]) -> Run:
    """Runs ``function()`` in a thread, and calls ``at_call`` before each change in a folder.

    Nothing is synced: no test that runs here survives a power cut.
    """
    chooser, errors, listeners = _Chooser(at_call), [], []
    end, ended = os.pipe()

    def work() -> None:
        # A signal would interrupt a call, which then stops a second time.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            listeners.append(stop_before_changes())
            os.write(ended, b"b")
            function()
        except BaseException as error:
            errors.append(error)
        os.write(ended, b"e")

    thread = threading.Thread(target=work)
    thread.start()
    assert os.read(end, 1) == b"b", errors
    listener = Listener(listeners[0])
    poll = select.poll()
    for fd in (listener.fileno(), end):
        poll.register(fd, select.POLLIN)
    try:
        while end not in (ready := dict(poll.poll(60_000))):
            assert ready, f"hangs after {chooser.calls}"
            stop = listener.receive()
            if stop is not None:
                _serve(listener, stop, folder, chooser)
    finally:
        listener.close()  # Calls fail from now on, so that the thread ends.
        thread.join()
        os.close(end)
        os.close(ended)
    return Run(chooser.calls, errors[0] if errors else None)


def _serve(listener: Listener, stop: Stop, folder: Path, chooser: _Chooser) -> None:
    if not is_in(stop, folder):
        if stop.call == "fsync":
            listener.end_listing(stop)
        else:
            listener.let_through(stop)
        return
    answer = MADE
    try:
        answer = chooser.answer(f"{stop.call} {os.path.relpath(stop.path, folder)}")
    except BaseException:
        listener.fail(stop, errno.EIO)
        raise
    if answer.error == 0:
        if stop.call == "fsync":
            listener.end_listing(stop)  # Succeeds.
        else:
            listener.let_through(stop)
        return
    if answer.is_made and stop.call not in _UNMADE:
        with contextlib.suppress(OSError):  # The call itself has failed.
            _make(stop)
    elif stop.call == "pwrite64":  # Half of the bytes have arrived.
        fd = os.open(stop.path, os.O_WRONLY)
        os.pwrite(fd, b"\0" * (stop.nbytes // 2), 0)
        os.close(fd)
    listener.fail(stop, answer.error)


def _make(stop: Stop) -> None:
    one_path: dict[str, Callable[[str], None]] = {
        "mkdir": os.mkdir,
        "rmdir": os.rmdir,
        "unlink": os.unlink,
        "create": lambda path: os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)),
    }
    if stop.call in one_path:
        one_path[stop.call](stop.path)
    elif stop.call == "exchange":
        _native.local_file_system().exchange(Path(stop.old), Path(stop.path))
    else:
        {"rename": os.rename, "link": os.link}[stop.call](stop.old, stop.path)


class FaultyStore(FsspecClient):
    """The store in the memory of fsspec, under a scheme of its own, whose requests fail."""

    def __init__(self) -> None:
        super().__init__("memory")
        self._chooser: _Chooser | None = None
        for name in ("find", "get", "put", "put_stream", "list", "copy", "remove", "remove_all"):
            setattr(self, name, self._stopping(name, getattr(self, name)))
        register("faulty", _native.StoreFileSystem(self))

    def stop_at_calls(self, at_call: AtCall, function: Callable[[], object]) -> Run:
        """Runs ``function()``, and calls ``at_call`` before each request."""
        self._chooser = chooser = _Chooser(at_call)
        try:
            function()
        except BaseException as error:
            return Run(chooser.calls, error)
        finally:
            self._chooser = None
        return Run(chooser.calls, None)

    def _stopping(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def request(path: str, *args: Any) -> Any:
            chooser, self._chooser = self._chooser, None  # The test's own requests do not stop.
            if chooser is None:
                return real(path, *args)
            try:
                answer = chooser.answer(f"{name} {path.rpartition('/')[2]}")
                result = real(path, *args) if answer.is_made else None
            finally:
                self._chooser = chooser
            if answer.error:
                raise StorageError(f"cannot {name} {path}: refused by the test", answer.error)
            return result

        return request
