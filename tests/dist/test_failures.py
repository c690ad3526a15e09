"""What goes wrong on one rank reaches every rank, and harms no checkpoint that was committed."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import RankError, Worlds, run_ranks
from states import Failure, assert_same, data_files, failures_of, full_value, shards_of
from support.commit_files import index_file
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.tensor import Replicate, Shard

from torch_ckpt import FastReader, FastWriter

pytestmark = pytest.mark.timeout(180)

DEADLINE_S = 30  # Within which a failure of one rank must have reached the others.
ODD_DEADLINE_S = 10
SHAPES = {"small": (7, 5), "large": (1031, 1033)}  # The large one fills several buffers.
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}


def state_of(version: str, placement: str) -> dict[str, Any]:
    return shards_of(SHAPES, version, PLACEMENTS[placement])


def save_version(path: Path, version: str, placement: str = "rows") -> None:
    dcp.save(state_of(version, placement), storage_writer=FastWriter(path))


def assert_holds(path: Path, version: str, placement: str = "rows") -> None:
    loaded = state_of("of no version", placement)
    dcp.load(loaded, storage_reader=FastReader(path))
    assert_same(loaded, state_of(version, placement))


class LosingPlanner(DefaultSavePlanner):
    """Cannot hand out one tensor."""

    def __init__(self, lost: str | None, error: Exception) -> None:
        super().__init__()
        self.lost = lost
        self.error = error

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.index.fqn == self.lost:
            raise self.error
        return super().resolve_data(write_item)


def save_by_rank(
    path: Path, planner: Any = None, overwrite: bool = True, threads: int = 1
) -> dict[int, Failure]:
    writer = FastWriter(path, overwrite=overwrite, thread_count=threads)
    return failures_of(dcp.save, state_of("new", "rows"), storage_writer=writer, planner=planner)


def save_losing(path: Path, failing: int, lost: str) -> dict[int, Failure]:
    lost_here = lost if dist.get_rank() == failing else None
    return save_by_rank(path, LosingPlanner(lost_here, LookupError(f"{lost} is lost")))


@pytest.mark.thin(1)
@pytest.mark.parametrize("lost", SHAPES)
@pytest.mark.parametrize("failing", [0, 1])
def test_planner_that_fails_on_one_rank_fails_every_rank_and_keeps_the_old_checkpoint(
    worlds: Worlds, tmp_path: Path, failing: int, lost: str
) -> None:
    worlds.run(2, save_version, tmp_path, "old")
    before = data_files(tmp_path)

    seen = worlds.run(2, save_losing, tmp_path, failing, lost, timeout_s=DEADLINE_S)

    assert seen == [{failing: Failure("LookupError", None, f"{lost} is lost")}] * 2
    assert not [n for n in data_files(tmp_path) - before if n.startswith(f"__{failing}_")]
    worlds.run(2, assert_holds, tmp_path, "old")
    worlds.run(2, save_version, tmp_path, "newer")  # Nothing is left in the way of the next.
    worlds.run(2, assert_holds, tmp_path, "newer")
    assert len(data_files(tmp_path)) == 2


class OddError(Exception):
    """Pickles, but cannot be unpickled: as many exceptions of many libraries."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


def save_oddly(path: Path) -> dict[int, Failure]:
    lost = "small" if dist.get_rank() == 1 else None
    return save_by_rank(path, LosingPlanner(lost, OddError("lost", "sea")))


def test_failure_that_does_not_unpickle_reaches_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    seen = worlds.agree(2, save_oddly, tmp_path, timeout_s=ODD_DEADLINE_S)
    assert seen.keys() == {1}
    assert "lost at sea" in seen[1].message


def save_onto_a_full_disk(path: Path, failing: int, threads: int) -> dict[int, Failure]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == failing:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        return save_by_rank(path, threads=threads)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.thin(1)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("failing", [0, 1])
def test_full_disk_of_one_rank_fails_every_rank_and_keeps_the_old_checkpoint(
    worlds: Worlds, tmp_path: Path, failing: int, threads: int
) -> None:
    worlds.run(2, save_version, tmp_path, "old")
    before = data_files(tmp_path)

    seen = worlds.agree(2, save_onto_a_full_disk, tmp_path, failing, threads, timeout_s=DEADLINE_S)
    assert seen.keys() == {failing}
    failure = seen[failing]
    assert (failure.kind, failure.errno) == ("StorageError", errno.EFBIG)
    assert str(tmp_path) in failure.message
    # The thread of the other file may well have finished it.
    partial = [n for n in data_files(tmp_path) - before if n.startswith(f"__{failing}_")]
    assert len(partial) < threads
    worlds.run(2, assert_holds, tmp_path, "old")


def load_failing(path: Path, placement: str) -> dict[int, Failure]:
    state = state_of("of no version", placement)
    return failures_of(dcp.load, state, storage_reader=FastReader(path))


@pytest.mark.parametrize(
    ("damage", "expected"),
    [("missing", ("NotFoundError", errno.ENOENT)), ("truncated", ("CorruptionError", None))],
)
@pytest.mark.parametrize(("placement", "needing"), [("rows", {1}), ("columns", {0, 1})])
def test_damaged_data_file_fails_every_rank_and_names_those_that_need_it(
    worlds: Worlds,
    tmp_path: Path,
    placement: str,
    needing: set[int],
    damage: str,
    expected: tuple[str, int | None],
) -> None:
    worlds.run(2, save_version, tmp_path, "old")
    (damaged,) = tmp_path.glob("__1_*.distcp")
    if damage == "missing":
        damaged.unlink()
    else:
        os.truncate(damaged, damaged.stat().st_size // 2)

    seen = worlds.agree(2, load_failing, tmp_path, placement, timeout_s=DEADLINE_S)

    assert seen.keys() == needing
    for failure in seen.values():
        assert failure[:2] == expected
        assert damaged.name in failure.message


def test_directory_without_a_checkpoint_fails_every_rank(worlds: Worlds, tmp_path: Path) -> None:
    seen = worlds.agree(2, load_failing, tmp_path / "empty", "rows", timeout_s=DEADLINE_S)
    assert seen.keys() == {0, 1}
    assert all("no checkpoint is committed" in failure.message for failure in seen.values())


def test_commit_that_fails_on_the_coordinator_fails_every_rank(
    worlds: Worlds, tmp_path: Path
) -> None:
    (tmp_path / ".metadata" / "in the way").mkdir(parents=True)
    seen = worlds.agree(2, save_by_rank, tmp_path, timeout_s=DEADLINE_S)
    assert {rank: failure.kind for rank, failure in seen.items()} == {0: "StorageError"}
    assert seen[0].errno in (errno.EISDIR, errno.ENOTEMPTY)
    assert not list(tmp_path.glob("*.tmp"))


def test_refused_overwrite_fails_every_rank_and_keeps_the_old_checkpoint(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_version, tmp_path, "old")
    before = data_files(tmp_path)
    seen = worlds.agree(2, save_by_rank, tmp_path, None, False, timeout_s=DEADLINE_S)
    assert {failure.kind for failure in seen.values()} == {"AlreadyExistsError"}
    assert data_files(tmp_path) == before
    worlds.run(2, assert_holds, tmp_path, "old")


@pytest.mark.thin(1)
@pytest.mark.parametrize("placement", ["rows", "replicas"])
@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4), (3, 1)])
def test_overwriting_from_another_world_size_leaves_no_file_of_the_first(
    worlds: Worlds, tmp_path: Path, first: int, second: int, placement: str
) -> None:
    worlds.run(first, save_version, tmp_path, "old", placement)
    before = data_files(tmp_path)

    worlds.run(second, save_version, tmp_path, "new", placement)

    after = data_files(tmp_path)
    assert not after & before
    assert {name.split("_")[2] for name in after} <= {str(rank) for rank in range(second)}
    worlds.run(3, assert_holds, tmp_path, "new")
    worlds.run(2, assert_holds, tmp_path, "new", "columns")


def own_state(rank: int, version: int) -> dict[str, Any]:
    """Under the same names on each rank, other values and shapes."""
    name = f"{rank} {version}"
    return {
        "tensor": full_value(name, (3 + rank, 5), torch.float32),
        "note": {"of": name, "tags": ["a", name]},
    }


def save_uncoordinated(path: Path, version: int) -> None:
    state = own_state(dist.get_rank(), version)
    dcp.save(state, storage_writer=FastWriter(path), use_collectives=False)


def load_uncoordinated(path: Path, version: int) -> None:
    state = own_state(dist.get_rank(), -1)
    dcp.load(state, storage_reader=FastReader(path))
    assert_same(state, own_state(dist.get_rank(), version))


def test_ranks_that_save_without_collectives_load_each_its_own(
    worlds: Worlds, tmp_path: Path
) -> None:
    for version in range(2):
        worlds.run(2, save_uncoordinated, tmp_path, version)
        worlds.run(2, load_uncoordinated, tmp_path, version)
        files = data_files(tmp_path)
        committed = {name for name in files if not name.endswith(".distcp")}
        assert committed == {
            name
            for rank in ("__0", "__1")
            for name in (f"{rank}.metadata", index_file(tmp_path, rank).name)
        }
        assert len(files - committed) == 2, "files of the version before are left"
    assert not (tmp_path / ".metadata").exists()


def test_saves_with_and_without_collectives_share_a_directory(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_uncoordinated, tmp_path, 0)
    worlds.run(2, save_version, tmp_path, "new")
    worlds.run(2, assert_holds, tmp_path, "new")  # The coordinated one is found first.
    worlds.run(2, save_uncoordinated, tmp_path, 1)
    worlds.run(2, assert_holds, tmp_path, "new")
    for path in (tmp_path / ".metadata", index_file(tmp_path)):
        path.unlink()
    worlds.run(2, load_uncoordinated, tmp_path, 1)


CACHED_SAVES = 3


def save_with_cached_plans(paths: list[Path], reuse_writer: bool, changed: int | None) -> None:
    """Saves to each path in turn; from save ``changed`` on, rank 1 has another tensor as well."""
    forget_plans()
    writer = FastWriter(paths[0])
    for version, path in enumerate(paths):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = cached_state(f"{version}", more=changed is not None and version >= changed)
        if not reuse_writer:
            writer = FastWriter(path)
        dcp.save(state, checkpoint_id=path, storage_writer=writer, planner=planner)
        assert_cached(path, version, changed)
    for path, version in {path: version for version, path in enumerate(paths)}.items():
        assert_cached(path, version, changed)  # Later saves have left it alone.
    forget_plans()


def cached_state(version: str, *, more: bool) -> dict[str, Any]:
    state = state_of(version, "rows")
    state["common"] = full_value(f"common {version}", (9,), torch.int16)
    state["version"] = version
    if more and dist.get_rank() == 1:
        state["more"] = full_value(f"more {version}", (4, 4), torch.float32)
    return state


def assert_cached(path: Path, version: int, changed: int | None) -> None:
    more = changed is not None and version >= changed
    loaded = cached_state("none", more=more)
    dcp.load(loaded, storage_reader=FastReader(path))
    expected = cached_state(f"{version}", more=more)
    for state in (loaded, expected):
        state |= {name: state[name].to_local() for name in SHAPES}
    assert_same(loaded, expected)


def forget_plans() -> None:
    """Clears what stock planners cache for the life of a process."""
    for name in (
        "_cached_save_plan",
        "_cached_final_save_plan",
        "_cached_all_plans",
        "_cached_global_plan",
        "_cached_metadata",
    ):
        getattr(SavePlanner, name).clear()


@pytest.mark.thin(1)
@pytest.mark.parametrize("reuse_writer", [False, True], ids=["new_writers", "one_writer"])
@pytest.mark.parametrize("changed", [None, 1, 2], ids=lambda at: f"changed_{at}")
@pytest.mark.parametrize("directories", [1, CACHED_SAVES])
def test_cached_plans_save_the_values_of_each_save(
    worlds: Worlds, tmp_path: Path, directories: int, changed: int | None, reuse_writer: bool
) -> None:
    paths = [tmp_path / f"{number % directories}" for number in range(CACHED_SAVES)]
    worlds.run(2, save_with_cached_plans, paths, reuse_writer, changed)
    for path in set(paths):
        assert len(data_files(path)) == 2


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise LookupError("rank 1 has lost something")
    dist.barrier()


def test_launcher_raises_the_traceback_of_a_rank_and_ends_those_that_wait_for_it() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*in fail_on_rank_1.*lost something"):
        run_ranks(2, fail_on_rank_1, grace_s=1)


def wait_for_rank_1() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def test_launcher_ends_ranks_that_run_out_of_time() -> None:
    with pytest.raises(RankError, match=r"ranks \[0\] were not done"):
        run_ranks(2, wait_for_rank_1, timeout_s=1)
