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
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from check import copy_tree

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 180
REPEATS = re.compile(r"^python tests/crossed\.py (.*?)  # repeats it", re.MULTILINE)


@dataclass(frozen=True)
class Mutation:
    """A fault: other text in place of some in a file."""

    file: str
    text: str
    other: str

    @property
    def is_native(self) -> bool:
        """Whether the modules have to be built again."""
        return self.file.startswith("csrc/")

    def put_into(self, source: str) -> str:
        """Returns the text of the file with the fault."""
        assert source.count(self.text) == 1, f"{self.file} does not have once: {self.text}"
        return source.replace(self.text, self.other)


MUTATIONS = {
    "a promotion keeps what was promoted before": [
        Mutation(
            "torch_ckpt/ladder/promotion_steps.py",
            ".state = _State.WAITS if self._is_chosen else _State.UNCHOSEN",
            ".state = self._of(step).state",
        )
    ],
    "a window begins at any byte": [
        Mutation(
            "csrc/engine/save/save_job.cc",
            "align_down(nbytes, std::max(file_->alignment(), kSmallAlignment))",
            "align_down(nbytes, file_->alignment())",
        ),
        Mutation("csrc/engine/save/save_job.cc", "cursor_ % kSmallAlignment != 0", "false"),
    ],
    "a window is cut within an element": [
        Mutation(
            "csrc/engine/save/save_job.cc",
            "constexpr int64_t kPackChunk = int64_t{128} << 10;",
            "constexpr int64_t kPackChunk = (int64_t{128} << 10) - 4;",
        )
    ],
    "a box is its offsets alone": [
        Mutation(
            "csrc/plan/check_boxes.cc",
            "{ return slots_->words(slot); };",
            "{ return slots_->words(slot).first(slots_->words(slot).size() / 2); };",
        )
    ],
    "a plan is stale": [
        Mutation(
            "torch_ckpt/planning/save_planner.py",
            'digest_of(encoded, paths or b"", options.encode())',
            'digest_of(paths or b"", options.encode())',
        )
    ],
    "each box is of a replica of its own": [
        Mutation("csrc/plan/global_plan.cc", "if (from_one) return", "if (false) return")
    ],
    "a stride is wrong": [
        Mutation(
            "csrc/device/transpose.cc",
            "dst + row * copy.dst_row_stride + column * copy.dst_column_stride);",
            "dst + row * copy.dst_row_stride + column * int64_t{sizeof(Unit)});",
        )
    ],
    "a snapshot is used again too soon": [
        Mutation("torch_ckpt/staging/stager.py", "if staged.is_over:", "if True:")
    ],
    "training goes on before it is copied": [
        Mutation("torch_ckpt/staging/stager.py", "            copying.result()", "            pass")
    ],
    "a tensor is plain whatever attributes it has": [
        Mutation(
            "csrc/bindings/state_dict.cc",
            "if (!is_tensor(object) || has_attributes(object)) return std::nullopt;",
            "if (!is_tensor(object)) return std::nullopt;",
        )
    ],
    "a copy lacks the attributes of a tensor": [
        Mutation(
            "torch_ckpt/staging/copied_state.py",
            "            copy_attributes(x, y)",
            "            pass",
        )
    ],
    "an empty box hides another": [
        Mutation(
            "torch_ckpt/planning/local_shards.py",
            "found = [box for box in self.boxes if box[1].numel()]",
            "found = self.boxes",
        )
    ],
    "a save decides by samples alone": [
        Mutation("torch_ckpt/storage/reuse.py", "if box[5:] == found:", "if box[5:] or found:")
    ],
    "a run of a joint read is at a wrong offset": [
        Mutation(
            "csrc/engine/read_stream.cc",
            "slice(bytes, range.begin - offset, range.nbytes());\n",
            "slice(bytes, i > task.first ? range.begin - offset - 1 : range.begin - offset,\n"
            "                               range.nbytes());\n",
        )
    ],
    "two numbers in a byte are counted as one": [
        Mutation(
            "torch_ckpt/formats/safetensors/layout.py",
            "sizes[-1] *= PACKED[facts.dtype]",
            "sizes[-1] *= 1",
        )
    ],
    "a common element of two tensors in an object is stored twice": [
        Mutation(
            "torch_ckpt/staging/pickling.py", "runs_of(used, keeps_sharing=True)", "runs_of(used)"
        )
    ],
    "a tensor in an object is put over another part of its memory": [
        Mutation(
            "torch_ckpt/staging/pickling.py",
            "(moved, copy.storage_offset(), sizes",
            "(moved, 0, sizes",
        )
    ],
    "an object within a state dict is not restored": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            "if not restore_pickled(node.live, loaded):",
            "if node.fqn == '':",
        )
    ],
    "an object within a tuple is not restored": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            "        values[key] = _restore(inner, values[key])",
            "        if not isinstance(live, tuple):\n"
            "            values[key] = _restore(inner, values[key])",
        )
    ],
    "a rank has the state of the first one": [
        Mutation(
            "torch_ckpt/planning/rank_state.py",
            "own = _key(self.rank, self.world_size)",
            "own = _key(0, self.world_size)",
        ),
        Mutation(
            "torch_ckpt/planning/rank_state.py",
            "own = entries.get(_key(rank, world_size))",
            "own = entries.get(_key(0, world_size), entries.get(_key(rank, world_size)))",
        ),
    ],
    "an object below the top is pickled": [
        Mutation("torch_ckpt/storage/rank_work.py", "refuse_statefuls(planner.state_dict)", "pass")
    ],
    "an object that takes no state is not named": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            '        with naming("load", node.fqn):',
            "        if True:",
        )
    ],
    "a value that cannot be staged is not named": [
        Mutation(
            "torch_ckpt/staging/stager.py",
            '            naming_first("stage", lambda: flat_values(state_dict), self._try),',
            "            contextlib.nullcontext(),",
        )
    ],
    "a state dict that cannot be made is not named": [
        Mutation(
            "torch_ckpt/coordination/statefuls.py",
            "        with naming(action, fqn):",
            "        if True:",
        )
    ],
    "tensors in the same memory are loaded in any order of files": [
        Mutation(
            "torch_ckpt/storage/load_source.py",
            "self.tensors.sort(key=lambda tensor: files[tensor[1][0]])",
            "pass",
        )
    ],
    "a tensor that torch reads comes after all others": [
        Mutation(
            "torch_ckpt/storage/loading.py",
            "self._load_streams(remaining)  # A later",
            "pass  # A later",
        ),
        Mutation(
            "torch_ckpt/storage/loading.py",
            "remaining = self._load_batch(batch, late, exchange)",
            "remaining += self._load_batch(batch, late, exchange)",
        ),
    ],
    "two tensors in the same memory are loaded at once": [
        Mutation(
            "torch_ckpt/storage/loading.py",
            "if later.overlaps(target, fqn) or destinations.overlaps(target, fqn):",
            "if later.overlaps(target, fqn):",
        )
    ],
    "a range of an object begins too early": [
        Mutation(
            "torch_ckpt/filesystems/obstore_client.py",
            "obstore.get_range(store, key, start=offset, length=nbytes)",
            "obstore.get_range(store, key, start=max(offset - 1, 0), length=nbytes)",
        )
    ],
}

OF_TESTS = {
    "a step of another branch is of the lineage": (
        Mutation(
            "torch_ckpt/commits/terms.py",
            "return step <= self.lineage.get(term, -1)",
            "return True",
        ),
        "python/test_lineages.py::"
        "test_jobs_that_share_a_local_directory_replace_and_remove_nothing_of_a_newer_one",
    ),
    "a report does not tell a machine from all ranks": (
        Mutation(
            "torch_ckpt/records/diagnosis.py",
            "    if len(ranks) == len(call.hosts):\n",
            "    if False:\n",
        ),
        "python/test_diagnosis.py",
    ),
    "a state of an optimizer is tied to a weight": (
        Mutation(
            "torch_ckpt/conversion/ties.py",
            "if _OPTIMIZER.search(values.names[each]):",
            "if False:",
        ),
        "python/test_convert_ties.py::test_ties_by_hand_that_cannot_be_are_refused_by_name",
    ),
}


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


def is_found_by_tests(folder: Path, name: str) -> bool:
    """Whether the tests of a fault fail with it, and pass without it."""
    mutation, tests = OF_TESTS[name]
    path = folder / mutation.file
    original = path.read_text()
    path.write_text(mutation.put_into(original))
    fails_with_it = not tests_pass(folder, tests)
    path.write_text(original)
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
            mutations = MUTATIONS[name]
            originals = {m.file: (folder / m.file).read_text() for m in mutations}
            for mutation in mutations:
                path = folder / mutation.file
                path.write_text(mutation.put_into(path.read_text()))
            is_native = any(mutation.is_native for mutation in mutations)
            if is_native:
                build(folder)
            found = search(folder, options.seed)
            for file, text in originals.items():
                (folder / file).write_text(text)
            if is_native:
                build(folder)
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
