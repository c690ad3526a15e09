"""Crosses random states with every way to save and load: ``python tests/crossed.py --seed 7``.

Without ``--seconds`` it runs the one case of the seed, and says what it is.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS / "dist"), str(TESTS)]


LIMIT_S = 150.0
GRACE_S = 20.0


@contextlib.contextmanager
def ended_after(seconds: float, command: str) -> Iterator[None]:
    """Ends the process if the block takes longer, and prints the command of the case before."""

    def end() -> None:
        print(f"{command}  # repeats it; it does not end within {seconds:g} s", flush=True)
        faulthandler.dump_traceback()
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        timer.cancel()


def main() -> int:
    """Runs what was asked for; returns the exit status."""
    from ranks import Worlds
    from support import crossed
    from support.places import PLACES, Places

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--ranks", action="store_true", help="several ranks save")
    parser.add_argument("--place", choices=PLACES, help="of all cases")
    parser.add_argument("--seconds", type=float, help="go on with the next seeds for so long")
    parser.add_argument("--all", action="store_true", help="go on after a case that fails")
    parser.add_argument("--as-it-is", action="store_true", help="shrink no case that fails")
    parser.add_argument("--verbose", action="store_true", help="print each case")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # And unmounts.
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torch_ckpt-crossed-"))
        places = stack.enter_context(Places(Path(folder)))
        worlds = None
        if options.ranks:
            worlds = Worlds()
            stack.callback(worlds.close)
        for name, why in places.missing.items():
            print(f"not on {name}: {why}")
        begin, seed, failed = time.monotonic(), options.seed, 0
        while True:
            case = crossed.Case.of(seed, with_ranks=options.ranks, place=options.place)
            if options.seconds is None and options.verbose:
                print(case)
            started = time.monotonic()
            try:
                with ended_after(LIMIT_S, case.command):
                    crossed.check(case, places, worlds, shrinks=not options.as_it_is)
            except AssertionError as error:
                failed += 1
                print(f"after {time.monotonic() - begin:.0f} s:\n{error}\n", flush=True)
                if not options.all:
                    break
            if options.verbose:
                took = time.monotonic() - started
                print(f"{seed}: {took * 1000:.0f} ms, {' | '.join(case.way.values())}", flush=True)
            seed += 1
            if options.seconds is None or time.monotonic() - begin > options.seconds:
                break
        print(f"{seed - options.seed} cases in {time.monotonic() - begin:.1f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
