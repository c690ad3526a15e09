"""Saves and loads take no more memory than stock's, however tensors lie in their storages."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from peak_memory import BASE_MIB, STATES

pytestmark = pytest.mark.timeout(120)

ALLOWED_MIB = 24
"""More than the buffers of a save or load, and less than a copy of half a storage."""

ANY = [*STATES]
PLAIN = [name for name in STATES if name != "tagged"]
LOADED = [name for name in PLAIN if name != "overlapping"]  # Targets do not overlap.

# Stock's way, ours, and the kinds of states.
CASES = [("stock", "save", ANY)]
SLOW_CASES = [
    ("stock load", "load", LOADED),
    ("stock async", "async", ANY),
    ("stock async", "agent", PLAIN),
    ("stock", "dcp.save", ANY),
    ("stock", "safetensors", ["sparse"]),
    ("stock async", "dcp async", ANY),
    ("stock async", "process", ["sliced", "sparse"]),
    ("stock async", "run", ANY),
    ("stock async", "stage", ANY),
    ("stock load", "dcp load", LOADED),
]


@pytest.mark.parametrize(
    ("stock", "ours", "kinds"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)],
)
def test_memory_is_at_most_that_of_stock(
    run_python: Callable[..., str],
    tmp_path: Path,
    memory: Path,
    stock: str,
    ours: str,
    kinds: list[str],
) -> None:
    def growth_mib(way: str) -> dict[str, int]:
        path = tmp_path / way.replace(" ", "-")
        path.mkdir()
        script = "import peak_memory, sys; peak_memory.main(*sys.argv[1:])"
        printed = run_python(script, way, path, *kinds, TORCH_CKPT_MEMORY=str(memory))
        found = re.findall(r"^(\w+) (-?\d+)$", printed, re.M)  # Among warnings of processes.
        return {kind: int(mib) for kind, mib in found if kind in kinds}

    assert BASE_MIB > 2 * ALLOWED_MIB
    expected, found = growth_mib(stock), growth_mib(ours)
    print(expected, found)
    assert [*expected] == [*found] == kinds
    assert [kind for kind in kinds if found[kind] > expected[kind] + ALLOWED_MIB] == []


def test_the_agent_writes_objects_from_the_memory_of_slots(
    run_python: Callable[..., str], tmp_path: Path, memory: Path
) -> None:
    script = """if True:
        import sys
        from peak_memory import agent_growth_mib, base
        for name, state in ("tensor", {"w": base()}), ("object", {"w": (base(), 0)}):
            print(agent_growth_mib(f"{sys.argv[1]}/{name}", state))
        """
    printed = run_python(script, tmp_path, TORCH_CKPT_MEMORY=str(memory))
    of_tensor, of_object = map(int, printed.splitlines()[-2:])
    assert of_object <= of_tensor + ALLOWED_MIB
