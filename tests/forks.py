"""Processes forked from a server that has imported torch: one starts in a few milliseconds.

The server has no threads and no process group. Processes end with it, and it ends with this one.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import connection, forkserver, get_context, reduction
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist

from torch_ckpt.coordination import background

TIMEOUT_S = 60
# What DTensor, Megatron, DeepSpeed and the tests import when they are first used takes seconds.
PRELOADED = [
    "unsearched",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch_ckpt.cli.main",
    "torch_ckpt.runs.run",
    "pytest",
    "kills",
    "frozen",
]
PR_SET_PDEATHSIG = 1
ROOT = Path(__file__).resolve().parents[1]
TEST_FOLDERS = [
    ROOT / "tests/dist",
    ROOT / "tests/python",
    *sorted(path for path in (ROOT / "tests/frameworks").iterdir() if path.is_dir()),
]
"""Where Python finds the modules of tests."""


def fork_context() -> Any:
    """Where processes come from that have imported torch."""
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def rank_environment() -> dict[str, str]:
    """What the server must have in its environment, besides what this process has."""
    folders = [*map(str, (*TEST_FOLDERS, ROOT / "tests", ROOT)), os.environ.get("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",  # Where DCP's background processes meet.
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # Kills cut connections.
    }


def run_python(
    *arguments: object, folder: Path, timeout_s: float = TIMEOUT_S, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Does what ``python`` does with these arguments, in a process that has imported torch.

    Args:
        *arguments: A script, or ``-c`` and code; then its own arguments.
        folder: The working directory.
        timeout_s: For the process, which is killed then with all of its session.
        **environment: What it has in its environment, besides what this process has.

    Returns:
        The exit status, and the output, where both streams are one.
    """
    words = [str(argument) for argument in arguments]
    with tempfile.TemporaryFile("w+") as output:
        with mock.patch.dict(os.environ, rank_environment()):  # The server's, if it starts now.
            environment = {**os.environ, **environment}
            process = fork_context().Process(
                target=_be_python,
                args=(words, str(folder), environment, reduction.DupFd(output.fileno())),
            )
            process.start()
        process.join(timeout_s)
        is_late = process.exitcode is None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # And what it has started.
        process.join()
        output.seek(0)
        printed = output.read()
    assert not is_late, f"{words} does not end:\n{printed}"
    assert process.exitcode is not None
    return subprocess.CompletedProcess(words, process.exitcode, printed)


def _be_python(words: list[str], folder: str, environment: dict[str, str], output: Any) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.update(environment)
    os.dup2(output.detach(), 1)
    os.dup2(1, 2)
    status = 0
    try:
        _run_main(words)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        raised = sys.exc_info()
        sys.last_type, sys.last_value, sys.last_traceback = raised  # As an interpreter does.
        sys.excepthook(*raised)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run_main(words: list[str]) -> None:
    is_code = words[0] == "-c"
    sys.argv[:] = ["-c", *words[2:]] if is_code else words
    sys.path.insert(0, "" if is_code else str(Path(words[0]).resolve().parent))
    main = ModuleType("__main__")
    if not is_code:
        main.__file__ = words[0]
    sys.modules["__main__"] = main  # It stays, as in an interpreter.
    code = words[1] if is_code else Path(words[0]).read_text()
    exec(compile(code, words[0], "exec"), vars(main))


@contextlib.contextmanager
def forked_saves() -> Iterator[None]:
    """Within a block, a rank has its process that saves forked by its own server, not spawned.

    Importing torch would take seconds of CPU time.
    """
    own = forkserver._forkserver  # type: ignore[attr-defined]
    assert own._forkserver_address, "only processes of the server know where it listens"
    context = fork_context()
    with (
        mock.patch.object(own, "ensure_running"),
        mock.patch.object(background.mp, "get_context", return_value=context),
    ):
        yield


class Forks:
    """Starts processes, and has a store where those that are ranks may meet."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._context = fork_context()
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """A number that was never given out."""
        return next(self._numbers)

    def start(self, function: Callable[..., None], *args: Any) -> tuple[Any, connection.Connection]:
        """Starts a process that calls ``function(pipe, *args)``.

        Returns:
            The process, which is for the caller to kill and join, and the other end of ``pipe``.
        """
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(function, theirs, *args))
        with mock.patch.dict(os.environ, rank_environment()):  # The server's, if it starts now.
            process.start()
        theirs.close()
        return process, ours

    def call(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> Any:
        """Returns what ``function(*args)`` returns in a process of its own.

        Raises:
            AssertionError: It raised, ended or was not done in time.
        """
        process, pipe = self.start(_answer, function, args)
        try:
            assert pipe.poll(timeout_s), f"{function.__name__} hangs"
            ok, answer = pipe.recv()
        except EOFError:
            raise AssertionError(f"{function.__name__} ended without a word") from None
        finally:
            process.kill()
            process.join()
            pipe.close()
        assert ok, answer
        return answer


def _serve(function: Callable[..., None], pipe: connection.Connection, *args: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    function(pipe, *args)


def _answer(
    pipe: connection.Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    try:
        pipe.send((True, function(*args)))
    except BaseException:  # CheckpointException is no Exception.
        pipe.send((False, traceback.format_exc()))
