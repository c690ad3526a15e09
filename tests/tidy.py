"""Holds the arrows between rooms, and a few other rules that no compiler checks.

Run by ``tests/check.py``; prints one line for each breach and exits 1 if there is any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Which rooms of csrc/ a room may include, itself aside.
ROOMS = {
    "base": set(),
    "geometry": {"base"},
    "format": {"base"},
    "io": {"base"},
    "device": {"base"},
    "plan": {"base", "geometry"},
    "engine": {"base", "geometry", "format", "io", "device", "plan"},
    "bindings": {"base", "geometry", "format", "io", "device", "plan", "engine"},
}

# Modules of torch_ckpt from the ground up: each imports only from rows above its own.
LAYERS = [
    {"errors", "options", "_native", "_tensor_view"},
    {"formats.safetensors_layout"},
    {
        "exchange",
        "mappings",
        "tensors",
        "roll_call",
        "pickles",
        "rank_state",
        "seal",
        "sharing",
        "staged",
        "tree",
    },
    {
        *("copied_state", "index", "metadata", "tree_exchange", "planned", "listing", "leftovers"),
        *("agent.memory", "agent.messages", "agent.options", "buffers", "file_jobs"),
    },
    {"agent.persist", "agent.slots", "agent.meeting", "agent.patience", "agent.rank_process"},
    {"agent.joint_save", "agent.declined", "agent.shares"},
    {"agent.saves"},
    {"agent.process"},
    {"agent.client"},
    {"plan_cache", "model_directory", "staging", "formats.opened"},
    {"deadline", "formats.dcp", "formats.safetensors", "formats.snapshot", "formats.torch_save"},
    {"formats.recognise"},
    {"save_planner", "load_planner"},
    {"data_file", "loading", "own_part", "sealed_metadata"},
    {"split_work", "model_files", "staging_writer", "agent.held"},
    {"agent.trainer"},
    {"writer", "reader"},
    {"agent.writer", "agent.reader"},
    {"api", "commands.opened"},
    {"commands.agent", "commands.inspect", "commands.verify"},
    {"agreement"},
    {"agent.tier"},
    {"background_save", "save_interval", "step_boundary", "step_directories", "step_tiers"},
    {"savers"},
    {"runs"},
    {"adapters.lightning", "adapters.trainer"},
    {"cli"},
    {"__init__"},
]
WITHOUT_TORCH = {
    *("errors", "options", "seal", "tree", "cli", "__init__", "formats.safetensors_layout"),
    *("commands.agent", "commands.opened", "commands.inspect", "commands.verify"),
    *("agent.memory", "agent.messages", "agent.persist", "agent.slots", "agent.saves"),
    *("agent.process", "agent.client", "leftovers", "file_jobs"),
    *("agent.meeting", "agent.joint_save", "agent.declined", "agent.patience"),
    *("agent.options", "agent.rank_process", "agent.shares"),
}

VAGUE_WORDS = ("manager", "handler", "helper", "util", "common")
MAX_LINES = 450


def cpp_files() -> list[Path]:
    """Every C++ source and header of csrc/."""
    return sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".h", ".cc", ".cu"})


def include_breaches() -> Iterator[str]:
    """Includes against the arrows, and names that belong to one room only."""
    for path in cpp_files():
        room = path.relative_to(ROOT / "csrc").parts[0]
        name = path.relative_to(ROOT)
        if room not in ROOMS:
            yield f"{name}: csrc/{room} is no room"
            continue
        text = path.read_text()
        for target in re.findall(r'^#include "([^"/]+)/', text, re.M):
            if target != room and target not in ROOMS[room]:
                yield f"{name}: {room} must not include {target}"
        for header in re.findall(r"^#include <([^>]+)>", text, re.M):
            if re.match(r"(torch|ATen|c10|pybind11|Python)", header) and room != "bindings":
                yield f"{name}: only bindings sees Python or torch, not {room} (<{header}>)"
            if re.match(r"(liburing|fcntl|dirent|sys/stat)", header) and room != "io":
                yield f"{name}: only io calls the OS for files, not {room} (<{header}>)"
            if header.startswith("cuda") and room != "device":
                yield f"{name}: only device names CUDA, not {room} (<{header}>)"


def import_breaches() -> Iterator[str]:
    """Imports against the layers of the Python package."""
    layer_of = {module: number for number, layer in enumerate(LAYERS) for module in layer}
    for path in sorted((ROOT / "torch_ckpt").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "torch_ckpt").with_suffix("").parts)
        if module.endswith(".__init__"):  # Of a folder: holds nothing but what it is.
            continue
        name = path.relative_to(ROOT)
        if module not in layer_of:
            yield f"{name}: stands in no layer of tests/tidy.py"
            continue
        tree = ast.parse(path.read_text())
        for node in tree.body:  # Only what importing the module runs.
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
                if node.module in {"torch_ckpt", "torch_ckpt.commands", "torch_ckpt.formats"}:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for imported in names:
                target = imported.removeprefix("torch_ckpt.")
                if imported != target and layer_of.get(target, len(LAYERS)) >= layer_of[module]:
                    yield f"{name}: must not import {target}"
                if imported.split(".")[0] == "torch" and module in WITHOUT_TORCH:
                    yield f"{name}: must import without torch"


def source_list_breaches() -> Iterator[str]:
    """csrc/sources.txt against the sources there are."""
    listed = (ROOT / "csrc/sources.txt").read_text().split()
    found = [
        p.relative_to(ROOT / "csrc").as_posix()
        for p in cpp_files()
        if p.suffix in {".cc", ".cu"} and p.parent.name != "bindings"
    ]
    if listed != sorted(listed):
        yield "csrc/sources.txt: not sorted"
    for name in sorted(set(listed) ^ set(found)):
        yield f"csrc/sources.txt: {name} is {'missing' if name in found else 'not a source'}"


def size_and_name_breaches() -> Iterator[str]:
    """Files that may hold two things, and names that say nothing."""
    for path in cpp_files() + sorted((ROOT / "torch_ckpt").rglob("*.py")):
        name = path.relative_to(ROOT)
        lines = len(path.read_text().splitlines())
        if lines > MAX_LINES:
            yield f"{name}: {lines} lines; do two things live there?"
        if any(word in path.stem for word in VAGUE_WORDS):
            yield f"{name}: a vague name"


def main() -> int:
    """Prints every breach; returns how the process should exit."""
    breaches = [
        *include_breaches(),
        *import_breaches(),
        *source_list_breaches(),
        *size_and_name_breaches(),
    ]
    for breach in breaches:
        print(breach)
    print(f"tidy: {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
