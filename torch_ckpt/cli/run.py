"""``torch-ckpt run``: runs a script whose calls of DCP use this package."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from torch_ckpt.cli.arguments import add_trust_pickle, seconds
from torch_ckpt.cli.terminal import INTERRUPTED, SOUND
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location

__all__ = ["add_to"]

_SCRIPT_FAILED = 1  # As Python's own exit status after an exception.


def add_to(commands: Any) -> None:
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
        type=seconds,
        metavar="SECONDS",
        help="deadline of each exchange between ranks (default: 1800)",
    )
    add_trust_pickle(parser)
    parser.add_argument("--no-verify", action="store_true", help="do not verify loaded bytes")
    parser.add_argument("-m", dest="is_module", action="store_true", help="run a module")
    # One argument: between two positionals, argparse drops a "--" of the script.
    parser.add_argument(
        "words",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="the script, or the module after -m, and its arguments",
    )
    parser.set_defaults(command=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    if not options.words:
        options.parser.error("a script is missing")
    from torch_ckpt.integrations.installation import install  # Imports torch.

    timeout = {} if options.timeout is None else {"timeout_s": options.timeout}
    install(verify=not options.no_verify, trust_pickle=options.trust_pickle, **timeout)
    sys.argv[:] = options.words
    module, source = (_module if options.is_module else _script)(options.words[0])
    # They remain: a background save pickles classes of __main__ after the script has ended. Python
    # has the second name in processes that multiprocessing spawns, and for their results.
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
    try:
        exec(compile(source, str(module.__file__), "exec", dont_inherit=True), vars(module))
    except SystemExit:
        raise
    except BaseException as error:  # DCP's CheckpointException derives from BaseException.
        sys.excepthook(type(error), error, error.__traceback__ and error.__traceback__.tb_next)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else _SCRIPT_FAILED
    return SOUND


def _script(name: str) -> tuple[ModuleType, bytes]:
    """Returns the main module of a script, and its source."""
    module = ModuleType("__main__")
    module.__file__ = os.path.abspath(name)
    source = Location(name).read()
    sys.path.insert(0, os.path.dirname(os.path.realpath(name)))
    return module, source


def _module(name: str) -> tuple[ModuleType, str]:
    """Returns a module as the main module, and its source."""
    sys.path.insert(0, os.getcwd())
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:  # A package.
        spec = importlib.util.find_spec(f"{name}.__main__")
    loader: Any = None if spec is None else spec.loader
    if spec is None or not hasattr(loader, "get_source"):
        raise NotFoundError(f"cannot run {name}: there is no Python module of this name")
    module = importlib.util.module_from_spec(spec)
    module.__name__ = "__main__"
    sys.argv[0] = str(spec.origin)
    return module, loader.get_source(spec.name)
