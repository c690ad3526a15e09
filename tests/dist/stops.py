"""Runs a function in a process that stops before each of its calls that change a folder."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, reduction
from pathlib import Path
from typing import Any, NamedTuple

from forks import Forks
from syscalls import Listener, Stop, stop_before_changes

TIMEOUT_S = 60


class Stopped(NamedTuple):
    """How a function went that was stopped at each of its calls.

    Attributes:
        calls: The calls, as ``"fsync name"``, in order; names are relative to the folder.
        returned: What the function returned; ``None`` if it raised or was killed.
        error: The traceback of what it raised.
        was_killed: Whether it was killed.
    """

    calls: list[str]
    returned: Any
    error: str | None
    was_killed: bool


def run_stopped(
    forks: Forks,
    folder: Path,
    before: Callable[[int, str], bool],
    function: Callable[..., Any],
    *args: Any,
) -> Stopped:
    """Runs ``function(*args)``.

    Args:
        forks: Where the process comes from.
        folder: Only calls in it and below count.
        before: Called before each call, with its number and its text. The process is killed before
            the call if it returns false.
        function: The function, of a module.
        *args: Its arguments.
    """
    calls: list[str] = []

    def at_stop(listener: Listener, stop: Stop) -> bool:
        if is_in(stop, folder):
            calls.append(f"{stop.call} {os.path.relpath(stop.path, folder)}")
            if not before(len(calls) - 1, calls[-1]):
                return False
        listener.let_through(stop)
        return True

    ended = serve_stops(forks, at_stop, calls, function, *args)
    return Stopped(calls, None, None, True) if ended is None else Stopped(calls, *ended, False)


def serve_stops(
    forks: Forks,
    at_stop: Callable[[Listener, Stop], bool],
    calls: list[str],
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = TIMEOUT_S,
) -> tuple[Any, str | None] | None:
    """Runs ``function(*args)`` in a process that stops before each call that changes files.

    Args:
        forks: Where the process comes from.
        at_stop: Called at each stop, which it ends. The process is killed if it returns false.
        calls: What ``at_stop`` has seen, for messages.
        function: The function, of a module.
        *args: Its arguments.
        timeout_s: Longest time that the process may take.

    Returns:
        What the function returned, and the traceback of what it raised; ``None`` if it was killed.
    """
    process, pipe = forks.start(_be_stopped, function, args)
    listener = None
    deadline = time.monotonic() + timeout_s
    try:
        assert pipe.poll(timeout_s)
        listener = Listener(reduction.recv_handle(pipe))
        while pipe not in (ready := connection.wait([pipe, listener], timeout_s)):
            assert ready, f"hangs after {calls}"
            assert time.monotonic() < deadline, f"hangs after {calls}"
            stop = listener.receive()
            if stop is not None and not at_stop(listener, stop):
                return None
        ended: tuple[Any, str | None] = pipe.recv()
        return ended
    finally:
        process.kill()
        process.join()
        pipe.close()
        if listener is not None:
            listener.close()


def is_in(stop: Stop, folder: Path) -> bool:
    """Whether a call changes a folder, or something below it."""
    return f"{stop.path}/".startswith(f"{folder}/")


def _be_stopped(
    pipe: connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["TORCH_CKPT_IO"] = "threads"  # io_uring makes calls that nobody sees.
    listener = stop_before_changes()
    reduction.send_handle(pipe, listener, None)
    os.close(listener)
    try:
        pipe.send((function(*args), None))
    except BaseException:  # CheckpointException is no Exception.
        pipe.send((None, traceback.format_exc()))
