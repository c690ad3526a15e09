"""Agents of three machines with local directories, of which one alone does not reach the store."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.store_server import SeaweedFS

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        bool(os.geteuid())
        or not all(map(shutil.which, ("unshare", "nsenter", "ip")))
        or not SeaweedFS.is_installed(),
        reason="only root can cut a link, with unshare, nsenter, ip and a store",
    ),
]

MINUTE_S = 60.0
PACE_S = 10.0  # For a save that does not wait, on a busy machine.


def train(folder: Path, seconds: float, on_failure: str) -> tuple[list[list[Any]], list[int]]:
    """Returns each rank's calls, as (name, seconds, result, error), and the steps on the store."""
    script = Path(__file__).with_name("cut_store.py")
    command = ["unshare", "--net", sys.executable, script, folder, str(seconds), on_failure]
    path = os.pathsep.join(sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, check=True, timeout=380, env=environment, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    print(*zip(*found["ranks"], strict=True), found["steps"], sep="\n")
    return found["ranks"], found["steps"]


def saves_in(calls: list[Any], *, healed: bool) -> list[Any]:
    return [c for c in calls if "save" in c[0] and ("healed" in c[0]) == healed]


@pytest.mark.slow
def test_a_machine_that_loses_the_store_for_a_moment_delays_saves_and_fails_none(
    tmp_path: Path,
) -> None:
    ranks, steps = train(tmp_path, 4.0, "raise")
    for calls in ranks:
        assert [call for call in calls if call[3]] == []
        assert all(seconds < MINUTE_S / 2 for _, seconds, *_ in calls)
    assert steps[0] == len(saves_in(ranks[0], healed=False)) + 3


@pytest.mark.slow
@pytest.mark.parametrize("on_failure", ["raise", "warn"])
def test_a_machine_that_loses_the_store_for_75_s_fails_the_saves_of_all_within_a_minute(
    tmp_path: Path, on_failure: str
) -> None:
    ranks, steps = train(tmp_path, 75.0, on_failure)
    failed = set()
    for calls in ranks:
        while_cut, after = saves_in(calls, healed=False), saves_in(calls, healed=True)
        assert all(seconds < MINUTE_S for _, seconds, *_ in calls)
        errors = [error for *_, error in while_cut if error]
        assert bool(errors) == (on_failure == "raise")
        for error in errors:
            assert error.startswith("StorageError: step ")
            assert "machine 2 (" in error
            assert "s3://" in error
        failed.add(next(result for name, _, result, _ in calls if name == "failures"))
        assert [each[3] for each in after[1:]] == ["", ""]
        assert all(seconds < PACE_S for _, seconds, *_ in after[1:])
    (count,) = failed
    assert count > 0 or on_failure == "raise"
    last = int(saves_in(ranks[0], healed=True)[-1][0].split()[-1])
    assert steps[:2] == [last, last - 1]
