"""Puts past faults back, one after another, and says how soon tests find each.

The crossed tests find ``MUTATIONS``; ``OF_TESTS`` names those of a commit that find other faults.
``python tests/mutations.py [NAME ...]`` works in a copy of the tree, where it builds the native
modules again for each fault in C++. It exits 1 if a fault is not found in time: if no case fails,
or one that fails without the fault as well.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from check import copy_tree
from support.past_faults import MUTATIONS, OF_TESTS, Mutation

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180
REPEATS = re.compile(r"^python tests/crossed\.py (.*?)  # repeats it", re.MULTILINE)


def run(*command: object, folder: Path) -> None:
    """Runs a command; ends the script with its output if it fails."""
    environment = {**os.environ, "TORCH_CKPT_CUDA": "0"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nfailed: {command}")


def build(folder: Path) -> None:
    """Builds the native modules of a copy."""
    run(sys.executable, "setup.py", "build_ext", "--inplace", folder=folder)


@dataclass(frozen=True)
class Found:
    """How soon the crossed tests found something, and the arguments that repeat the case."""

    seconds: float
    arguments: list[str]


def crossed(folder: Path, output: IO[str], *arguments: str) -> subprocess.Popen[bytes]:
    """Starts the crossed tests of a copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "tests/crossed.py", "--as-it-is", *arguments]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)


def search(folder: Path, seed: int) -> Found | None:
    """Runs the crossed tests of one process and of ranks at once, until either finds something.

    Ends the script if they end otherwise, such as by a timeout.
    """
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        running = {}
        for more in ([], ["--ranks"]):
            output = stack.enter_context(tempfile.TemporaryFile("w+"))
            options = ["--seed", str(seed), "--seconds", str(LIMIT_S), *more]
            process = crossed(folder, output, *options)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            running[process] = output
        while any(process.poll() is None for process in running):
            if any(process.poll() for process in running):
                break
            time.sleep(0.1)
        seconds = time.monotonic() - begin
        for process, output in running.items():
            if process.poll():
                output.seek(0)
                text = output.read()
                if case := REPEATS.search(text):
                    return Found(seconds, case[1].split())
                sys.exit(f"{text}\nno case failed, but the tests ended with {process.returncode}")
    return None


def fails(folder: Path, found: Found) -> bool:
    """Whether a case fails."""
    with tempfile.TemporaryFile("w+") as output:
        return crossed(folder, output, *found.arguments).wait() != 0


def tests_pass(folder: Path, tests: str) -> bool:
    """Whether some tests of a commit pass in a copy."""
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, f"tests/{tests}"], cwd=folder, env=environment)
    return done.returncode == 0


@contextlib.contextmanager
def faults_in(folder: Path, mutations: Sequence[Mutation]) -> Iterator[None]:
    """Puts faults into a copy within a block. Builds the modules before and after, if need be."""
    originals = {m.file: (folder / m.file).read_text() for m in mutations}
    is_native = any(mutation.is_native for mutation in mutations)
    for mutation in mutations:
        path = folder / mutation.file
        path.write_text(mutation.put_into(path.read_text()))
    if is_native:
        build(folder)
    yield
    for file, text in originals.items():
        (folder / file).write_text(text)
    if is_native:
        build(folder)


def is_found_by_tests(folder: Path, name: str) -> bool:
    """Whether the tests of a fault fail with it, and pass without it."""
    mutation, tests = OF_TESTS[name]
    with faults_in(folder, [mutation]):
        fails_with_it = not tests_pass(folder, tests)
    return fails_with_it and tests_pass(folder, tests)


def main() -> int:
    """Tries the mutations that were asked for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of mutations; all by default")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--folder", type=Path, help="of the copy; it stays, with what was built")
    options = parser.parse_args()
    missed = 0
    with tempfile.TemporaryDirectory(prefix="torch_ckpt-mutated-") as temporary:
        folder = options.folder or Path(temporary)
        copy_tree(folder)
        build(folder)
        for name in options.names or [*MUTATIONS, *OF_TESTS]:
            if name in OF_TESTS:
                is_found = is_found_by_tests(folder, name)
                print(f"{name}: {'found' if is_found else 'NOT FOUND'} by its tests")
                missed += not is_found
                continue
            with faults_in(folder, MUTATIONS[name]):
                found = search(folder, options.seed)
            if found is None:
                print(f"{name}: NOT FOUND")
            elif fails(folder, found):
                print(f"{name}: NOT FOUND, for {found.arguments} fails without it as well")
                found = None
            else:
                print(f"{name}: found in {found.seconds:.0f} s")
            missed += found is None
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
