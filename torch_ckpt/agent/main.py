"""Runs an agent as a process: acquires the lock, opens the log, handles signals, cleans up."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import shutil
import signal
from collections.abc import Iterator

from torch_ckpt.agent.identity import inode_of
from torch_ckpt.agent.memory import LOCK_NAME, agent_lock, open_folder, remove_abandoned
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.process import Agent

__all__ = ["run_agent"]

_log = logging.getLogger("torch_ckpt.agent")


@contextlib.contextmanager
def _logged_errors() -> Iterator[None]:
    """Logs the error that ends this process."""
    try:
        yield
    except Exception:
        _log.exception("the agent has failed")
        raise


def run_agent(run: bytes, options: AgentOptions, *, first_within_s: float | None = None) -> int:
    """Runs the agent of a run in this process, unless the run has an agent on this machine.

    The options apply until a rank registers. ``first_within_s`` is ``options.linger_s`` if
    ``None``. Returns the exit status of the process.
    """
    signals: list[int] = []
    # Installed before the folder exists: a default handler would leave the folder behind.
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends SIGINT to all its processes.
    folder = open_folder(run)
    with agent_lock(folder) as is_ours, _logged_errors():
        if not is_ours:
            return 0
        log = (folder / "agent.log").open("a")
        logging.basicConfig(stream=log, level=logging.INFO, format="%(asctime)s %(message)s")
        faulthandler.enable(log)  # A fatal signal leaves the stacks of all threads there.
        with contextlib.suppress(OSError):  # Some sandboxes refuse it.
            os.nice(options.io.background_nice)
        inode = inode_of(os.fspath(folder))
        for removed in remove_abandoned(folder):
            _log.info("removed %s, the memory of an abandoned run", removed)
        agent = Agent(run, folder, options, first_within_s=first_within_s, signals=signals)
        # If the folder was removed, a new one may belong to the next agent.
        if agent.serve() and inode_of(os.fspath(folder)) == inode:
            # The lock is removed last, so that no other agent begins in a partly deleted folder.
            for path in folder.iterdir():
                if path.name != LOCK_NAME:
                    path.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)
    if signals:  # End by the signal, so that the exit status reports it.
        signal.signal(signals[0], signal.SIG_DFL)
        os.kill(os.getpid(), signals[0])
    return 0
