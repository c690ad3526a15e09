"""What a run relies on after a power cut, a preemption, a failed removal, or on a poor store."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.run_steps import save_steps, state_of
from support.store_proxy import Fault, StoreProxy

from torch_ckpt import Run
from torch_ckpt._core import _native
from torch_ckpt.agent.identity import write_id
from torch_ckpt.commits import leases
from torch_ckpt.commits.leases import LEASE_S, lease
from torch_ckpt.commits.probe import check_commit
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.fsspec_client import FsspecClient
from torch_ckpt.filesystems.location import Location, register
from torch_ckpt.formats.committed import committed_id
from torch_ckpt.ladder.step_files import leased_steps

pytestmark = pytest.mark.timeout(60)


def test_the_id_of_a_run_is_durable_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, Location]] = []

    def recorded(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(location: Location, *arguments: Any) -> Any:
            calls.append((name, location))
            return method(location, *arguments)

        return call

    check_commit(Location(tmp_path), Location(tmp_path), sync=True)  # Once in a process.
    for name in ("rename", "sync"):
        monkeypatch.setattr(Location, name, recorded(name, getattr(Location, name)))
    write_id(Location(tmp_path / "run"), "0123456789abcdef")
    assert [name for name, _ in calls] == ["rename", "sync"]
    assert calls[1][1] == Location(tmp_path / "run")


def test_ranks_wait_for_promotion_no_longer_than_the_process_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide, limits = Group.decide, []

    def recorded(group: Group, *arguments: Any, timeout_s: float, **options: Any) -> Any:
        limits.append(timeout_s)
        return decide(group, *arguments, timeout_s=timeout_s, **options)

    with Run(tmp_path / "run", local=tmp_path / "local", timeout_s=600) as run:
        run.save(1, state_of(1))
        monkeypatch.setattr(Group, "decide", recorded)
        run._saves.wait_for_promotion(5.0, must_end=False)
        monkeypatch.undo()
    assert limits
    assert max(limits) <= 5.0 + 2.0


def test_a_failed_removal_leaves_what_is_known_of_the_steps_that_remain(tmp_path: Path) -> None:
    """A step of another save, which was passed over, would replace that of the run."""
    run_path, local = tmp_path / "run", tmp_path / "local"
    with Run(run_path, local=local) as run:
        for step in (1, 2):
            run.save(step, state_of(step))
    shutil.rmtree(run_path / "step-2")
    save_steps(run_path, 2, record=False).close()  # From another local directory.
    before = committed_id(Location(run_path / "step-2"))
    assert before != committed_id(Location(local / "step-2"))
    with Run(run_path, local=local) as run:
        assert run._promotion is not None
        with pytest.raises(NotFoundError), run._promotion.discarding_after(1):
            raise NotFoundError("a step cannot be removed")
    assert committed_id(Location(run_path / "step-2")) == before


class _Undated(MemoryFileSystem):  # type: ignore[misc]
    protocol = "undated"

    def modified(self, path: str) -> Any:
        raise NotImplementedError


def test_a_lease_expires_on_a_store_that_dates_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("undated", _Undated, clobber=True)
    register("undated", _native.StoreFileSystem(FsspecClient("undated")))
    url = f"undated://tests/{tmp_path.name}"
    with Run(url, record=False) as run:
        run.save(1, state_of(1))
    with lease(Location(url), 1):
        assert leased_steps(Location(url)) == {1}
        later_s = time.time() + LEASE_S + 1
        monkeypatch.setattr(time, "time", lambda: later_s)
        assert leased_steps(Location(url)) == {1}  # Its process lives.
        monkeypatch.setattr(leases, "is_dead", lambda _: None)  # As on another machine.
        assert leased_steps(Location(url)) == set()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_store_that_is_busy_at_the_first_request_is_waited_for(
    status: int, store_proxy: StoreProxy, store_url: str
) -> None:
    """As when thousands of ranks start at once."""
    store_proxy.faults += [Fault("status", status=status, times=6)]
    file = Location(f"{store_url}/file")
    file.write(b"1", sync=True)
    assert file.read() == b"1"
