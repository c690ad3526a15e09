"""Checks the arrows between directories, and a few other rules that no compiler checks.

``tests/check.py`` runs it. It prints one line for each breach, and exits 1 if there is any.
``tests/tidy.py --write`` writes the table of kinds in docs/compatibility.md from the list that its
tests run.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "docs/site"))

from source_files import first_sentence, source_files
from support.kinds import table

from torch_ckpt.known_frameworks import FRAMEWORKS

ROOT = Path(__file__).resolve().parents[1]

# Which directories of csrc/ a directory may include, itself aside.
LEAVES = {"base", "geometry", "format", "io", "device", "codec"}
DIRECTORIES = {
    "base": set(),
    "geometry": {"base"},
    "format": {"base"},
    "io": {"base"},
    "device": {"base"},
    "codec": {"base"},
    "plan": {"base", "geometry"},
    "engine": {*LEAVES, "plan"},
    "engine/save": {*LEAVES, "plan", "engine"},
    "engine/exchange": {*LEAVES, "plan", "engine"},
    "engine/load": {*LEAVES, "plan", "engine", "engine/exchange"},
    "engine/publish": {*LEAVES, "engine"},
    "bindings": {
        *(*LEAVES, "plan", "engine"),
        *("engine/save", "engine/exchange", "engine/load", "engine/publish"),
    },
}

# Packages of torch_ckpt from the ground up: each imports only from rows above its own.
PACKAGES = [
    {"errors", "known_frameworks", "process_state", "stored_json"},
    {"_core"},
    {"options"},
    {"filesystems"},
    {"records"},
    {"coordination", "formats"},
    {"commits"},
    {"planning"},
    {"staging"},
    {"storage"},
    {"api"},
    {"agent", "conversion"},
    {"ladder"},
    {"runs"},
    {"publishing"},
    {"integrations"},
    {"cli", "frameworks"},
    {"__init__", "__main__"},
]

# Only torch_ckpt/filesystems and the agent's shared memory name files to the operating system.
ITS_FILES = re.compile(
    r"\bos\.(listdir|scandir|stat|rename|replace|remove|unlink|mkdir|makedirs|path\.exists)\("
    r"|\bshutil\b|(?<![.\w])open\(|local_file_system|\bPath\((?!\)|\"/(proc|sys)/)"
)
WITHOUT_FILES = (
    "api",
    "formats",
    "planning",
    "staging",
    "storage",
    "ladder",
    "runs",
    "publishing",
    "coordination",
    "records",
    "conversion",
    "cli",
    "frameworks/deepspeed",
    "frameworks/accelerate",
    "frameworks/megatron",
    "frameworks/rank_files",
    "frameworks/torch_checkpointing",
)

# Functions of torch that make a tensor on the program's default device, unless they get `device`.
FACTORIES = re.compile(
    r"arange|as_tensor|asarray|empty(_permuted|_quantized|_strided)?|eye|full|linspace|logspace|ones"
    r"|r?fftfreq|rand(n|int|perm)?|range|scalar_tensor|nested_tensor|sparse_\w+_tensor|tensor"
    r"|tri[lu]_indices|zeros|\w+_window"
)

TABLE = "known_frameworks.py"
"""The only file of the core that names modules of frameworks."""
SHARED = "rank_files"
"""The directory of frameworks that several of them share."""
MAX_CORE_LINES = 35_500

VAGUE_WORDS = ("manager", "handler", "helper", "util", "common")
MAX_LINES = 600
MAX_CLASS_LINES, MAX_ATTRIBUTES = 350, 25


def cpp_files() -> list[Path]:
    """Every C++ source and header of csrc/."""
    return sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cc", ".cu"})


def include_breaches() -> Iterator[str]:
    """Includes against the arrows, and names that belong to one directory only."""
    for path in cpp_files():
        directory = path.relative_to(ROOT / "csrc").parent.as_posix()
        name = path.relative_to(ROOT)
        if directory not in DIRECTORIES:
            yield f"{name}: csrc/{directory} stands in no row of tests/tidy.py"
            continue
        text = path.read_text()
        for target in re.findall(r'^#include "([^"]+)/[^"/]+"', text, re.M):
            if target != directory and target not in DIRECTORIES[directory]:
                yield f"{name}: {directory} must not include {target}"
        for header in re.findall(r"^#include <([^>]+)>", text, re.M):
            if re.match(r"(torch|ATen|c10|pybind11|Python)", header) and directory != "bindings":
                yield f"{name}: only bindings sees Python or torch, not {directory} (<{header}>)"
            if re.match(r"(liburing|fcntl|dirent|sys/stat)", header) and directory != "io":
                yield f"{name}: only io calls the OS for files, not {directory} (<{header}>)"
            if header.startswith("cuda") and directory != "device":
                yield f"{name}: only device names CUDA, not {directory} (<{header}>)"


def imported_modules(path: Path) -> Iterator[str]:
    """Modules of torch_ckpt that importing this one runs, by their dotted names in it."""
    for node in ast.parse(path.read_text()).body:  # Not what functions or type checkers import.
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch_ckpt"):
            for alias in node.names:
                yield f"{node.module}.{alias.name}".removeprefix("torch_ckpt.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("torch_ckpt."):
                    yield alias.name.removeprefix("torch_ckpt.")


def import_breaches() -> Iterator[str]:
    """Imports against the order of packages, and circles of files."""
    level_of = {package: level for level, row in enumerate(PACKAGES) for package in row}
    arrows: dict[str, set[str]] = {}
    for path in sorted((ROOT / "torch_ckpt").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "torch_ckpt").with_suffix("").parts)
        package, name = module.split(".")[0], path.relative_to(ROOT)
        if package not in level_of:
            yield f"{name}: {package} stands in no row of tests/tidy.py"
            continue
        for target in imported_modules(path):
            arrows.setdefault(module, set()).update({target, target.rpartition(".")[0]})
            other = target.split(".")[0]
            if other != package and level_of.get(other, len(PACKAGES)) >= level_of[package]:
                yield f"{name}: {package} must not import {other}"
    for module in arrows:
        reached, ahead = set(), [module]
        while ahead:
            found = arrows.get(ahead.pop(), set()) - reached
            reached |= found
            ahead += found
        if module in reached:
            yield f"torch_ckpt/{module.replace('.', '/')}.py: imports itself through others"


def named_frameworks(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the name of each framework that a file imports anywhere, or names in a string.

    A string of several words is a docstring or a message.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [] if " " in node.value.strip() else [node.value]
        for name in names:
            if found := re.match(r"(?:torch_ckpt)?\.?frameworks\.(\w*)", name):
                yield node.lineno, found[1]


def framework_breaches() -> Iterator[str]:
    """Frameworks that the core, or another framework, meets by another way than the table."""
    package = ROOT / "torch_ckpt"
    for path in sorted(package.rglob("*.py")):
        room, *inner = path.relative_to(package).parts
        allowed = {inner[0], SHARED} if room == "frameworks" else set()
        for line, name in named_frameworks(path) if room != TABLE else ():
            if name not in allowed:
                where = f"{path.relative_to(ROOT)}:{line}"
                yield f"{where}: only {TABLE} names the framework {name}"
    found = {path.name for path in (package / "frameworks").iterdir() if path.is_dir()}
    rows = {row.name for row in FRAMEWORKS}
    for name in sorted((found - {"__pycache__", SHARED}) ^ rows):
        yield f"torch_ckpt/frameworks/{name}: a row of {TABLE} and a directory belong together"
    tests = {path.name for path in (ROOT / "tests" / "frameworks").iterdir() if path.is_dir()}
    for name in sorted(tests - found):
        yield f"tests/frameworks/{name}: there is no torch_ckpt/frameworks/{name}"
    for row in FRAMEWORKS:
        folder = package / "frameworks" / row.name
        for module, function in re.findall(r"'(\w+):(\w+)'", repr(row)):
            path = folder / f"{module}.py"
            if not path.exists() or not re.search(rf"^def {function}\(", path.read_text(), re.M):
                yield f"torch_ckpt/{TABLE}: {row.name} has no {module}:{function}"
        for _, module in row.former:
            if not (folder / f"{module}.py").exists():
                yield f"torch_ckpt/{TABLE}: {row.name} has no module {module}"


def lines_of(path: Path) -> tuple[int, int]:
    """How many lines a Python file has: of code, and all."""
    text = path.read_text()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent and token.type != tokenize.ENDMARKER:
            code |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            code -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(code), len(text.splitlines())


def core_breaches() -> Iterator[str]:
    """A core that is too large, and a table of its size that is not true."""
    found = {"the core": [0, 0], "publishing": [0, 0], "frameworks": [0, 0]}
    for path in (ROOT / "torch_ckpt").rglob("*.py"):
        package = path.relative_to(ROOT / "torch_ckpt").parts[0]
        sizes = found[package if package in found else "the core"]
        sizes[:] = map(sum, zip(sizes, lines_of(path), strict=True))
    if found["the core"][0] > MAX_CORE_LINES:
        yield f"torch_ckpt: the core has more than {MAX_CORE_LINES:,} lines of code"
    page = (ROOT / "ARCHITECTURE.md").read_text()
    for name, sizes in found.items():
        row = re.search(rf"^\| {name} \| ([\d,]+) \| ([\d,]+) \|$", page, re.M)
        stated = [] if row is None else [int(number.replace(",", "")) for number in row.groups()]
        if not stated or any(abs(a - b) > b / 50 for a, b in zip(stated, sizes, strict=True)):
            yield (
                f"ARCHITECTURE.md: {name} has {sizes[0]:,} lines of code of {sizes[1]:,}; "
                f"its table states {' of '.join(f'{number:,}' for number in stated) or 'nothing'}"
            )


def file_breaches() -> Iterator[str]:
    """Files that are reached by another door than ``torch_ckpt/filesystems``."""
    for path in sorted((ROOT / "torch_ckpt").rglob("*.py")):
        name = path.relative_to(ROOT)
        inner = path.relative_to(ROOT / "torch_ckpt").with_suffix("").as_posix()
        if not any(f"{inner}/".startswith(f"{package}/") for package in WITHOUT_FILES):
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ITS_FILES.search(line):
                yield f"{name}:{number}: files are reached through filesystems.Location alone"


def select_breaches() -> Iterator[str]:
    """Waits that fail in a program with more than 1,024 open descriptors."""
    for path in sorted((ROOT / "torch_ckpt").rglob("*.py")):
        if "select.select(" in path.read_text():
            yield f"{path.relative_to(ROOT)}: select.select fails with many descriptors; use poll"


def device_breaches() -> Iterator[str]:
    """Tensors that are made on the program's default device, which may be "meta" or a GPU."""
    for path in sorted((ROOT / "torch_ckpt").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_torchs = ast.unparse(node.func.value) in ("torch", "torch.fft", "torch.nested")
            names_device = any(keyword.arg == "device" for keyword in node.keywords)
            if is_torchs and FACTORIES.fullmatch(node.func.attr) and not names_device:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield f"{where}: torch.{node.func.attr} without device= uses the program's default"


def test_breaches() -> Iterator[str]:
    """Test files that are libraries of others."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for module in re.findall(r"^ *(?:from|import) (test_\w+)", path.read_text(), re.M):
            if module != path.stem:
                where = path.relative_to(ROOT)
                yield f"{where}: imports {module}; what two test files use is in no test_*.py"


def size_and_name_breaches() -> Iterator[str]:
    """Files that may hold two things, and names that say nothing."""
    for path in cpp_files() + sorted((ROOT / "torch_ckpt").rglob("*.py")):
        name = path.relative_to(ROOT)
        lines = len(path.read_text().splitlines())
        if lines > MAX_LINES:
            yield f"{name}: {lines} lines; do two things live there?"
        if any(word in path.stem for word in VAGUE_WORDS):
            yield f"{name}: a vague name"


def class_breaches() -> Iterator[str]:
    """Classes of these rooms that hold too much, apart from their docstring."""
    for room in ("agent", "commits", "coordination", "ladder", "runs", "storage"):
        for path in sorted((ROOT / "torch_ckpt" / room).glob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if not isinstance(node, ast.ClassDef):
                    continue
                lines = (node.end_lineno or 0) + 1 - node.lineno
                if ast.get_docstring(node):
                    lines -= (node.body[0].end_lineno or 0) + 1 - node.body[0].lineno
                attributes = {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute)
                    and isinstance(part.ctx, ast.Store)
                    and ast.unparse(part.value) == "self"
                }
                if lines > MAX_CLASS_LINES or len(attributes) > MAX_ATTRIBUTES:
                    where = f"{path.relative_to(ROOT)}: {node.name}"
                    yield f"{where} has {lines} lines and {len(attributes)} attributes"


def compatibility_page() -> str:
    """The text of docs/compatibility.md, with the table of kinds as its tests have it."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    return re.sub(r"^\| kind \|.*\n(\|.*\n)*", lambda _: table() + "\n", page, flags=re.M)


def page_breaches() -> Iterator[str]:
    """A table of kinds that is not as the tests are, or a file without a description."""
    if (ROOT / "docs" / "compatibility.md").read_text() != compatibility_page():
        yield "docs/compatibility.md: out of date; run tests/tidy.py --write"
    for path in source_files():
        if not first_sentence(path):
            yield f"{path.relative_to(ROOT)}: does not begin with what it is"


def main() -> int:
    """Prints every breach; returns how the process should exit."""
    if "--write" in sys.argv[1:]:
        (ROOT / "docs" / "compatibility.md").write_text(compatibility_page())
    breaches = [
        *include_breaches(),
        *import_breaches(),
        *framework_breaches(),
        *core_breaches(),
        *file_breaches(),
        *select_breaches(),
        *device_breaches(),
        *test_breaches(),
        *page_breaches(),
        *size_and_name_breaches(),
        *class_breaches(),
    ]
    for breach in breaches:
        print(breach)
    print(f"tidy: {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
