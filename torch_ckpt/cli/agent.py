"""``torch-ckpt agent``: runs the agent of a run, which writes snapshots in memory to disk."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

from torch_ckpt.agent.memory import run_of
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.agent.process import run_agent
from torch_ckpt.cli.arguments import seconds
from torch_ckpt.options import IoOptions
from torch_ckpt.planning.replica_check import CheckReplicas

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    defaults = AgentOptions()
    parser = commands.add_parser(
        "agent",
        help="run the agent of a run, which writes snapshots in memory to disk",
        description="Runs the agent of a training run on this machine until the run ends. Trainers "
        "start the agent themselves. If the run has an agent already, the command exits at once.",
    )
    parser.add_argument("run", type=Path, help="name of the run: the directory of its steps")
    parser.add_argument(
        "--linger",
        type=seconds,
        default=defaults.linger_s,
        metavar="SECONDS",
        help="time to retain the snapshots after all trainers have died (default: %(default)g)",
    )
    parser.add_argument(
        "--first-within",
        type=seconds,
        metavar="SECONDS",
        help="time to wait for the first trainer (default: as --linger)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=defaults.threads,
        help="number of files to write at a time (default: %(default)d)",
    )
    parser.add_argument(
        "--peers-timeout",
        type=seconds,
        default=defaults.peers_timeout_s,
        metavar="SECONDS",
        help="time that a save waits for the agents of other machines (default: %(default)g)",
    )
    parser.add_argument(
        "--io",
        type=_io,
        default=defaults.io,
        metavar="JSON",
        help="fields of IoOptions, as a JSON object",
    )
    parser.add_argument(
        "--check-replicas",
        choices=get_args(CheckReplicas),
        default=defaults.check_replicas,
        help="how to find out whether replicas are equal (default: %(default)s)",
    )
    parser.add_argument(
        "--no-persist-on-failure",
        action="store_true",
        help="do not write the newest snapshot to disk when trainers die",
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
            check_replicas=options.check_replicas,
        ),
        first_within_s=options.first_within,
    )


def _io(text: str) -> IoOptions:
    """Returns the parsed options; argparse reports a ``ValueError`` as a usage error."""
    try:
        return IoOptions(**json.loads(text))
    except TypeError as error:
        raise ValueError(text) from error
