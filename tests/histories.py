"""Runs random histories of jobs of a run: ``python tests/histories.py --seed 7``.

Without ``--count`` it runs the one history of the seed, and prints its operations if it fails.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent), str(TESTS / "dist"), str(TESTS)]


def main() -> int:
    """Runs what was asked for; returns the exit status."""
    from support.histories import run_history

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--count", type=int, default=1, help="of seeds, one after another")
    parser.add_argument("--all", action="store_true", help="go on after a history that fails")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    begin, failed = time.monotonic(), 0
    for seed in range(options.seed, options.seed + options.count):
        faulthandler.dump_traceback_later(150, exit=True)
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="torch_ckpt-histories-") as folder:
            problem = run_history(seed, Path(folder))
        if problem is not None:
            failed += 1
            print(f"{problem}\n", flush=True)
            if not options.all:
                break
    print(f"{seed - options.seed + 1} in {time.monotonic() - begin:.1f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
