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
    process, pipe = forks.start(_be_stopped, function, args)
    listener = None
    calls: list[str] = []
    deadline = time.monotonic() + TIMEOUT_S
    try:
        assert pipe.poll(TIMEOUT_S)
        listener = Listener(reduction.recv_handle(pipe))
        while pipe not in (ready := connection.wait([pipe, listener], TIMEOUT_S)):
            assert ready, f"hangs after {calls}"
            assert time.monotonic() < deadline, f"hangs after {calls}"
            stop = listener.receive()
            if stop is None:
                continue
            call = _text(stop, folder)
            if call is not None:
                calls.append(call)
                if not before(len(calls) - 1, call):
                    return Stopped(calls, None, None, True)
            listener.let_through(stop)
        returned, error = pipe.recv()
        return Stopped(calls, returned, error, False)
    finally:
        process.kill()
        process.join()
        pipe.close()
        if listener is not None:
            listener.close()


def _text(stop: Stop, folder: Path) -> str | None:
    if not f"{stop.path}/".startswith(f"{folder}/"):
        return None
    return f"{stop.call} {os.path.relpath(stop.path, folder)}"


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
