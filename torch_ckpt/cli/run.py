"""``torch-ckpt run``: runs a script whose calls of DCP use this package."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import Any

from torch_ckpt.cli.terminal import SOUND

__all__ = ["add_to"]

_SCRIPT_FAILED = 1  # As Python's own exit status after an exception.


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    parser = commands.add_parser(
        "run",
        help="run a Python script whose calls of DCP use this package",
        usage="torch-ckpt run [OPTIONS] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Calls torch_ckpt.install(), and then runs a script or module as __main__, "
        "like python. Under a launcher: torchrun --nproc-per-node 8 -m torch_ckpt run train.py. "
        "Processes that the script spawns call torch_ckpt.install() themselves.",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="deadline of each exchange between ranks (default: 1800)",
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="unpickle objects of any class, which can run arbitrary code",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not verify loaded bytes")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    parser.add_argument("script", help="the script, or the module after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace) -> int:
    from torch_ckpt.integrations.installation import install  # Imports torch.

    timeout = {} if options.timeout is None else {"timeout_s": options.timeout}
    install(verify=not options.no_verify, trust_pickle=options.trust_pickle, **timeout)
    sys.argv[:] = [options.script, *options.arguments]
    try:
        if options.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(options.script)))
            runpy.run_path(options.script, run_name="__main__")
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # DCP's CheckpointException derives from BaseException.
        sys.excepthook(*sys.exc_info())
        return _SCRIPT_FAILED
    return SOUND
