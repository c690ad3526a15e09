"""Machines whose links are cut and healed at any moment lose nothing that had returned."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.store_server import SeaweedFS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        bool(os.geteuid())
        or not all(map(shutil.which, ("unshare", "nsenter", "setpriv", "ip")))
        or not SeaweedFS.is_installed(),
        reason="only root can cut a link, with unshare, nsenter, setpriv, ip and a store",
    ),
]


def campaign(lives: int, seed: int, *options: str) -> int:
    """Runs a campaign; returns its exit status."""
    script = Path(__file__).with_name("cut_machines.py")
    command = [sys.executable, script, "--lives", str(lives), "--seed", str(seed), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, timeout=2300, env=environment, stdout=subprocess.PIPE, text=True)
    print(done.stdout)
    return done.returncode


def test_a_few_cuts_lose_no_save_that_had_returned(seed: int) -> None:
    assert campaign(4, seed, "--longest", "2") == 0


def test_100_lives_on_machines_that_are_cut_off_lose_no_save_that_had_returned(seed: int) -> None:
    assert campaign(100, seed) == 0


def test_the_campaign_notices_saves_that_return_before_they_are_committed(seed: int) -> None:
    assert campaign(18, seed, "--longest", "1", "--early") == 1
