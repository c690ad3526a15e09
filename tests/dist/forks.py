"""Processes forked from a server that has imported torch: one starts in a few milliseconds.

The server has no threads and no process group. Processes end with it, and it ends with this one.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist

TIMEOUT_S = 60
PR_SET_PDEATHSIG = 1
TESTS = Path(__file__).resolve().parent


def fork_context() -> Any:
    """Where processes come from that have imported torch."""
    context = get_context("forkserver")
    # What DTensor imports when it is first used takes seconds.
    context.set_forkserver_preload(
        ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "kills"]
    )
    return context


def rank_environment() -> dict[str, str]:
    """What the server must have in its environment, besides what this process has."""
    folders = [str(TESTS), str(TESTS.parents[1]), os.environ.get("PYTHONPATH")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",  # Where DCP's background processes meet.
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "FATAL",  # Of connections that kills have cut.
    }


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
