"""The agent of a run, which is a process of its own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from torch_ckpt.agent.memory import folder_of, run_of

__all__ = ["agent_pid", "kill_agent"]


def agent_pid(run: Path) -> int:
    """The process id of the run's agent, which may have ended."""
    return int((folder_of(run_of(run)) / "agent.lock").read_text())


def kill_agent(run: Path) -> None:
    os.kill(agent_pid(run), signal.SIGKILL)
