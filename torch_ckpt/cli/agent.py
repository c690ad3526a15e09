"""``torch-ckpt agent``: runs the agent of a run, which writes snapshots in memory to disk."""

from __future__ import annotations

import argparse
from typing import Any

from torch_ckpt.agent.main import run_agent
from torch_ckpt.agent.memory import run_of
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.cli.arguments import seconds

__all__ = ["add_to"]


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "agent",
        help="run the agent of a run, which writes snapshots in memory to disk",
        description="Runs the agent of a training run on this machine until the run ends. Trainers "
        "start the agent themselves. If the run has an agent already, the command exits at once.",
    )
    parser.add_argument("run", help="name of the run: the directory of its steps")
    parser.add_argument(
        "--options",
        type=AgentOptions.decode,
        default=AgentOptions(),
        metavar="JSON",
        help="fields of AgentOptions, as a JSON object; those of the trainers replace them",
    )
    parser.add_argument(
        "--first-within",
        type=seconds,
        metavar="SECONDS",
        help="time to wait for the first trainer (default: as linger_s)",
    )
    parser.set_defaults(command=_agent)


def _agent(options: argparse.Namespace) -> int:
    return run_agent(run_of(options.run), options.options, first_within_s=options.first_within)
