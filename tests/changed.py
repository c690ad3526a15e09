"""Which tests a change can affect: ``python tests/check.py --changed [REF]`` runs them.

A test file is affected if its imports reach a changed module, or if it names a changed file of
another kind; the tests of the documents are, if any page has changed. A change of C++ can affect
whatever imports the native modules. Files with the name of the
module or of its package come first, then those that import it themselves, and last those of
frameworks, which may not be installed. What does not fit into the time is left out and named.
``tests/conftest.py`` records how long each file took here.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / "build/durations.json"
BUDGET_S = 120.0  # Of all processes that run tests.
UNKNOWN_S = {"dist": 20.0, "python": 5.0}  # Of a file that has never run here, by its folder.


def git(*arguments: str) -> str:
    """The output of a command of git; empty if it fails."""
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def changed_files(ref: str) -> list[str]:
    """What differs from a commit, by default the last one that the branch shares with main."""
    base = ref or git("merge-base", "HEAD", "main") or git("merge-base", "HEAD", "origin/main")
    names = git("diff", "--name-only", base or "HEAD").splitlines()
    names += git("ls-files", "--others", "--exclude-standard").splitlines()
    return sorted(set(names))


def module_of(path: Path) -> str:
    """The name by which others import a file."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "tests":  # Its folders are on the path, but for tests/support.
        parts = parts[1:] if parts[1] == "support" else parts[-1:]
    return ".".join(parts).removesuffix(".__init__")


class Imports:
    """Which module imports which."""

    def __init__(self) -> None:
        paths = [*ROOT.glob("torch_ckpt/**/*.py"), *ROOT.glob("tests/**/*.py")]
        self.paths = {module_of(path): path for path in paths if "golden" not in path.parts}
        self._trees = {name: ast.parse(path.read_text()) for name, path in self.paths.items()}
        self._homes: dict[str, dict[str, str]] = {}
        for name, path in self.paths.items():
            if path.name == "__init__.py":  # It passes on the names of its modules.
                self._homes[name] = {
                    alias.asname or alias.name: node.module
                    for node in ast.walk(self._trees[name])
                    if isinstance(node, ast.ImportFrom) and node.module
                    for alias in node.names
                }
        self.importers: dict[str, set[str]] = defaultdict(set)
        for name in self.paths:
            if name not in self._homes:  # Else everything would reach everything.
                for used in self._used_by(name):
                    self.importers[used].add(name)

    def _used_by(self, name: str) -> Iterator[str]:
        for node in ast.walk(self._trees[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    yield self._home(node.module, alias.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield self._home(node.value.id, node.attr)  # As in torch_ckpt.save.

    def _home(self, module: str, name: str) -> str:
        inner = f"{module}.{name}"
        return inner if inner in self.paths else self._homes.get(module, {}).get(name, module)

    def distances(self, modules: set[str]) -> dict[str, int]:
        """How many imports lie between each module that reaches these, and them."""
        found = dict.fromkeys(modules, 0)
        last = set(modules)
        while last:
            last = {user for name in last for user in self.importers[name]} - found.keys()
            found |= dict.fromkeys(last, max(found.values()) + 1)
        return found


def affected(files: list[str]) -> list[Path]:
    """The test files that a change of these files can affect, the nearest first."""
    imports = Imports()
    by_path = {path.relative_to(ROOT).as_posix(): name for name, path in imports.paths.items()}
    modules = {by_path[file] for file in files if file in by_path}
    if any(file.startswith("csrc/") for file in files):
        modules.add("torch_ckpt._core")
    distances = imports.distances(modules)
    others = {Path(file).name for file in files if not file.endswith(".py")}
    names = {Path(file).stem for file in files}
    packages = {Path(file).parent.name for file in files if file.startswith("torch_ckpt/")}
    has_page = any(file.endswith(".md") for file in files)
    has_framework = any("frameworks" in Path(file).parts for file in files)
    found = []
    for name, path in imports.paths.items():
        if path.name.startswith("test_"):
            text = path.read_text()
            distance = 1 if any(other in text for other in others) else distances.get(name)
            if has_page and path.name == "test_documents.py":
                distance = 0
            if distance is not None:
                is_later = "frameworks" in path.parts and not has_framework
                is_other = not any(own in path.stem for own in names)
                is_far = is_other and not any(own in path.stem for own in packages)
                key = (is_later, is_far, is_other, distance, seconds_of(path))
                found.append((key, path))
    return [path for _, path in sorted(found)]


def within_budget(paths: list[Path]) -> tuple[list[Path], list[Path]]:
    """Which of these files to run in the time, always the first one, and which are left out."""
    chosen: list[Path] = []
    left_out, seconds = [], 0.0
    for path in paths:
        its_own = seconds_of(path)
        if chosen and seconds + its_own > BUDGET_S:
            left_out.append(path)
        else:
            chosen.append(path)
            seconds += its_own
    return chosen, left_out


def seconds_of(path: Path) -> float:
    """How long a test file took here; a guess if it has never run."""
    name = path.relative_to(ROOT)
    return known_durations().get(name.as_posix(), UNKNOWN_S.get(name.parts[1], 10.0))


@functools.cache
def known_durations() -> dict[str, float]:
    """The seconds of each test file that has run here."""
    return json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}


def remember(durations: dict[str, float]) -> None:
    """Adds what has run to the durations."""
    DURATIONS.parent.mkdir(exist_ok=True)
    whole = DURATIONS.with_suffix(f".{os.getpid()}")  # Another run may read or write at this time.
    whole.write_text(json.dumps(known_durations() | durations, indent=1, sort_keys=True))
    whole.replace(DURATIONS)
