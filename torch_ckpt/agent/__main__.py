"""Runs an agent: ``python -m torch_ckpt.agent <run>``. Trainers start it by themselves."""

from __future__ import annotations

import argparse
import sys

from torch_ckpt.agent.process import AgentOptions, run_agent


def main() -> int:
    """Reads the command line and is the agent."""
    defaults = AgentOptions()
    parser = argparse.ArgumentParser(prog="python -m torch_ckpt.agent")
    parser.add_argument("run", type=bytes.fromhex, help="the run, as 32 hexadecimal digits")
    parser.add_argument("--linger", type=float, default=defaults.linger_s, metavar="SECONDS")
    parser.add_argument("--threads", type=int, default=defaults.threads)
    parser.add_argument("--nice", type=int, default=defaults.nice)
    parser.add_argument("--no-persist-on-failure", action="store_true")
    arguments = parser.parse_args()
    options = AgentOptions(
        persist_on_failure=not arguments.no_persist_on_failure,
        linger_s=arguments.linger,
        threads=arguments.threads,
        nice=arguments.nice,
    )
    return run_agent(arguments.run, options)


if __name__ == "__main__":
    sys.exit(main())
