"""``torch-ckpt agent``: is the process that keeps the snapshots of a run in memory."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from torch_ckpt.agent.memory import run_of
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.process import run_agent
from torch_ckpt.options import IoOptions

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds the command to a parser's."""
    defaults = AgentOptions()
    parser = commands.add_parser(
        "agent",
        help="keep the snapshots of a run in memory, and bring them to disk",
        description="Is the agent of a run on this machine, until the run ends. Trainers start it "
        "by themselves; where there is one already, the command ends at once.",
    )
    parser.add_argument("run", type=Path, help="what names the run: the directory of its steps")
    parser.add_argument(
        "--linger",
        type=float,
        default=defaults.linger_s,
        metavar="SECONDS",
        help="how long memory is kept for trainers that have died (default: %(default)g)",
    )
    parser.add_argument(
        "--first-within",
        type=float,
        metavar="SECONDS",
        help="for how long the first trainer may come (default: as long as memory is kept)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=defaults.threads,
        help="files that are written at a time (default: %(default)d)",
    )
    parser.add_argument(
        "--peers-timeout",
        type=float,
        default=defaults.peers_timeout_s,
        metavar="SECONDS",
        help="how long a save waits for the agents of other machines (default: %(default)g)",
    )
    parser.add_argument(
        "--io",
        type=_io,
        default=defaults.io,
        metavar="JSON",
        help="fields of IoOptions, as an object of JSON",
    )
    parser.add_argument(
        "--no-persist-on-failure",
        action="store_true",
        help="leave in memory what is newest there when trainers die",
    )
    parser.set_defaults(command=_agent)


def _agent(options: argparse.Namespace) -> int:
    return run_agent(
        run_of(options.run),
        AgentOptions(
            persist_on_failure=not options.no_persist_on_failure,
            linger_s=options.linger,
            threads=options.threads,
            peers_timeout_s=options.peers_timeout,
            io=options.io,
        ),
        first_within_s=options.first_within,
    )


def _io(text: str) -> IoOptions:
    """Raises what argparse makes a usage error of."""
    try:
        return IoOptions(**json.loads(text))
    except TypeError as error:
        raise ValueError(text) from error
