"""Runs on several machines, each with a local directory of its own, and a common directory."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_machines import restore, run_on, state_of, steps_in
from ranks import Worlds
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from torch_ckpt import CheckpointError, Run
from torch_ckpt.commits import late_names
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import CorruptionError, NotFoundError, StorageError
from torch_ckpt.ladder import promotion_wait
from torch_ckpt.storage.copying import CheckpointCopy

pytestmark = pytest.mark.timeout(240)


def save_steps(
    folder: Path, machines: Sequence[int], steps: Sequence[int], options: dict[str, Any]
) -> None:
    with run_on(folder, machines, **options) as run:
        for step in steps:
            run.save(step, state_of(step))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_machines_save_their_own_files_and_the_run_gets_all(
    worlds: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    machines = [0, 0, 1, 1]
    options = {"asynchronous": asynchronous, "keep_last": 2}
    worlds.run(4, save_steps, tmp_path, machines, [1, 2, 3], options)
    assert steps_in(tmp_path / "machine-0") == steps_in(tmp_path / "machine-1") == [3]
    assert steps_in(tmp_path / "run")[0] == 3
    here, there = (
        {name for name in os.listdir(tmp_path / f"machine-{m}" / "step-3") if "distcp" in name}
        for m in (0, 1)
    )
    assert here
    assert there
    assert here.isdisjoint(there)
    assert here | there < set(os.listdir(tmp_path / "run" / "step-3"))
    for lost in ((), ("machine-1",), ("machine-0",)):
        for name in lost:
            shutil.rmtree(tmp_path / name)
        assert worlds.run(4, restore, tmp_path, machines) == [3] * 4


def test_machines_restore_from_their_own_disks_and_pass_on_the_rest(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(4, save_steps, tmp_path, [0, 0, 1, 1], [1, 2], {"keep_last": 2})
    cases = {
        "the same machines": (4, [0, 0, 1, 1]),
        "other ranks on each": (4, [1, 0, 1, 0]),
        "a machine more": (4, [2, 0, 1, 2]),
        "fewer ranks": (2, [1, 0]),
        "more ranks": (6, [0, 1, 0, 1, 0, 1]),
    }
    for name, (ranks, machines) in cases.items():
        for path in tmp_path.glob("run/step-*/__*.distcp"):  # Only the local disks can serve.
            path.unlink()
        assert worlds.run(ranks, restore, tmp_path, machines) == [2] * ranks, name
    # The new machine has become a copy of the metadata, and no more.
    assert not list(tmp_path.glob("machine-2/step-2/__*.distcp"))
    # Then the local disks are left, of which one is not whole.
    shutil.rmtree(tmp_path / "machine-0")
    for path in tmp_path.glob("run/step-*/__*.distcp"):
        path.unlink()
    with pytest.raises(Exception, match="no committed step is whole"):
        worlds.run(4, restore, tmp_path, [0, 0, 1, 1])


def test_a_new_step_is_whole_only_when_all_machines_have_it(worlds: Worlds, tmp_path: Path) -> None:
    machines = [0, 1]
    worlds.run(2, save_steps, tmp_path, machines, [1, 2], {"keep_last": 2, "keep_local": 2})
    (tmp_path / "machine-1" / "step-2" / ".metadata").unlink()
    shutil.rmtree(tmp_path / "run" / "step-2")
    assert worlds.run(2, restore, tmp_path, machines) == [1, 1]
    (file,) = (tmp_path / "machine-1" / "step-1").glob("__*.distcp")
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1  # Then the directory of the run serves.
    file.write_bytes(contents)
    assert worlds.run(2, restore, tmp_path, machines) == [1, 1]


def _choices_after_a_loss(folder: Path, machines: Sequence[int]) -> list[int | None]:
    with run_on(folder, machines, keep_local=2, monitor="loss", mode="max") as run:
        for step in (1, 2):
            run.save(step, state_of(step), metrics={"loss": step})
        run.wait(promoted=True)
        if dist.get_rank() == 1:
            shutil.rmtree(folder / "run" / "step-2")
            next((folder / "machine-1" / "step-2").glob("__1_*.distcp")).unlink()
        dist.barrier()
        return [run.latest_step(), run.best_step(), run.step_at("9998-01-01")]


def test_no_choice_of_a_step_takes_one_that_lacks_files_of_another_machine(
    worlds: Worlds, tmp_path: Path
) -> None:
    assert worlds.run(2, _choices_after_a_loss, tmp_path, [0, 1]) == [[1, 1, 1]] * 2


@pytest.mark.parametrize("machine", [0, 1])
def test_files_that_one_machine_cannot_read_for_a_moment_count_as_missing(
    worlds: Worlds, tmp_path: Path, machine: int
) -> None:
    machines, options = [0, 1], {"keep_last": 4, "keep_local": 4}
    worlds.run(2, save_steps, tmp_path, machines, [1, 2], options)
    shutil.rmtree(tmp_path / "run" / "step-2")
    metadata = tmp_path / f"machine-{machine}" / "step-2" / ".metadata"
    contents = metadata.read_bytes()
    metadata.unlink()
    metadata.symlink_to("x" * 300)  # ENAMETOOLONG, which root gets, too.
    assert worlds.run(2, restore, tmp_path, machines) == [1, 1]
    worlds.run(2, save_steps, tmp_path, machines, [3], options)
    assert steps_in(tmp_path / "run") == [3, 1]
    metadata.unlink()
    metadata.write_bytes(contents)
    worlds.run(2, save_steps, tmp_path, machines, [4], options)
    assert steps_in(tmp_path / "run") == [4, 3, 2, 1]


def _renamed(source: Path, target: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        source.rename(target)
    dist.barrier()


def _discards(folder: Path, machines: Sequence[int]) -> list[int]:
    with run_on(folder, machines, keep_local=3) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step))
        run.wait(promoted=True)
        _renamed(folder / "run", folder / "moved")
        with pytest.raises(CheckpointError, match="it is gone"):
            run.discard_after(1)
        _renamed(folder / "moved", folder / "run")
        removed = run.discard_after(1)
        assert run.latest_step() == 1
        run.save(2, state_of(2))
        run.wait(promoted=True)
        return removed


def test_steps_are_discarded_on_all_machines(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, _discards, tmp_path, [0, 1]) == [[3, 2]] * 2
    for directory in ("run", "machine-0", "machine-1"):
        assert steps_in(tmp_path / directory) == [2, 1]


def _promotes_while_one_disk_fails(folder: Path, machines: Sequence[int]) -> int:
    run = run_on(folder, machines, on_failure="warn", max_failures=9, keep_last=3, keep_local=3)
    with run:
        run.save(1, state_of(1))
        run.wait(promoted=True)
        dist.barrier()
        if dist.get_rank() == 1:  # A file at the place of the step's directory on the run.
            (folder / "run" / "step-2").write_text("")
        dist.barrier()
        run.save(2, state_of(2))
        run.save(3, state_of(3))
        dist.barrier()
        if dist.get_rank() == 1:
            (folder / "run" / "step-2").unlink(missing_ok=True)
        dist.barrier()
        run.save(4, state_of(4))
        run.wait(promoted=True)
        return run.failures


def test_a_failed_promotion_of_one_machine_does_not_stop_the_others(
    worlds: Worlds, tmp_path: Path
) -> None:
    failures = worlds.run(2, _promotes_while_one_disk_fails, tmp_path, [0, 1])
    assert failures[0] >= 1
    assert steps_in(tmp_path / "run")[0] == 4
    assert worlds.run(2, restore, tmp_path, [0, 1]) == [4, 4]


def _closes_after_damage(folder: Path, machines: Sequence[int]) -> str:
    rate = 8 << 20  # A step takes about two seconds.
    local = folder / f"machine-{machines[dist.get_rank()]}"
    run = Run(folder / "run", local=local, timeout_s=15, promote_bytes_per_s=rate)
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    run.save(1, {"w": distribute_tensor(torch.ones(2, 4 << 20), mesh, [Shard(0)])})
    if dist.get_rank() == 1:
        (file,) = (local / "step-1").glob("__*.distcp")
        with file.open("r+b") as data:
            data.seek(-3000, os.SEEK_END)
            data.write(b"damage")
    with pytest.raises(CheckpointError) as raised:
        run.close()
    return str(raised.value)


def test_a_run_ends_if_the_files_of_a_machine_cannot_be_promoted(
    worlds: Worlds, tmp_path: Path
) -> None:
    for message in worlds.run(2, _closes_after_damage, tmp_path, [0, 1]):
        assert "step 1 was not promoted" in message
        assert "checksum" in message
    assert steps_in(tmp_path / "run") == []


def _saves_again(folder: Path, machines: Sequence[int]) -> None:
    with run_on(folder, machines, promote_bytes_per_s=1 << 20) as run:
        run.save(7, state_of(7))
        run.save(8, state_of(8))  # Step 7 is being promoted: this one is chosen later.
        run.wait(promoted=True)
        assert steps_in(folder / "run") == [8, 7]


def test_a_step_that_a_kill_left_on_one_machine_is_promoted_when_it_is_saved_again(
    worlds: Worlds, tmp_path: Path
) -> None:
    machines = [0, 1]
    worlds.run(2, save_steps, tmp_path, machines, [8], {})
    (tmp_path / "machine-1" / "step-8" / ".metadata").unlink()
    shutil.rmtree(tmp_path / "run" / "step-8")
    worlds.run(2, _saves_again, tmp_path, machines)


def _saves_faster_than_it_promotes(folder: Path, machines: Sequence[int]) -> int:
    with run_on(folder, machines, promote_bytes_per_s=1 << 20, keep_last=1) as run:
        for step in (1, 2):
            run.save(step, state_of(step))
    return run.unpromoted


def test_a_step_that_is_removed_soon_after_its_commit_is_not_waited_for(
    worlds: Worlds, tmp_path: Path
) -> None:
    unpromoted = worlds.run(2, _saves_faster_than_it_promotes, tmp_path, [0, 1])
    print(unpromoted)
    assert unpromoted[0] == 0
    for directory in ("run", "machine-0", "machine-1"):
        assert steps_in(tmp_path / directory) == [2]


def _fails_alone(folder: Path, machines: Sequence[int]) -> float:
    begin = time.monotonic()
    with contextlib.suppress(KeyError), run_on(folder, machines, keep_last=2) as run:
        run.save(1, state_of(1))
        run.wait(promoted=True)
        with pytest.raises(NotFoundError), run.lease(2):
            pass
        with run.lease(1) as path:  # A local directory has the files of one machine.
            assert Path(path) == folder / "run" / "step-1"
        if not dist.get_rank():
            dist.barrier()  # Until the other rank has left its run.
        begin = time.monotonic()
        raise KeyError("training has failed")
    lasted = time.monotonic() - begin
    if dist.get_rank():
        dist.barrier()
    return lasted


def test_a_machine_whose_training_fails_does_not_wait_for_the_others(
    worlds: Worlds, tmp_path: Path
) -> None:
    assert max(worlds.run(2, _fails_alone, tmp_path, [0, 1])) < 20


def _closes_while_one_machine_stands_still(folder: Path, machines: Sequence[int]) -> str:
    copy_files, goes_on = CheckpointCopy.copy_files, threading.Event()

    def gated(copy: CheckpointCopy) -> None:
        if dist.get_rank() == 1:
            goes_on.wait(15)
        copy_files(copy)

    promotion_wait.END_S, end_s = 0.1, promotion_wait.END_S
    CheckpointCopy.copy_files = gated  # type: ignore[method-assign]
    try:
        local = folder / f"machine-{machines[dist.get_rank()]}"
        run = Run(folder / "run", local=local, timeout_s=4)
        run.save(1, state_of(1))
        with pytest.raises(CheckpointError) as raised:
            run.close()
        return str(raised.value)
    finally:
        goes_on.set()
        CheckpointCopy.copy_files = copy_files  # type: ignore[method-assign]
        promotion_wait.END_S = end_s


def test_the_end_of_a_run_names_the_machine_whose_storage_stands_still(
    worlds: Worlds, tmp_path: Path
) -> None:
    for message in worlds.run(2, _closes_while_one_machine_stands_still, tmp_path, [0, 1]):
        assert "nothing was copied for 4 s" in message
        assert re.search(r"machine \S+, \S+/machine-1: the promotion of step 1 to", message)


def _saves_while_one_disk_fails_once(
    folder: Path, machines: Sequence[int], options: dict[str, Any]
) -> tuple[float, int]:
    run = run_on(folder, machines, on_failure="warn", **options)
    run.save(1, state_of(1))
    run.wait(promoted=True)
    commit, failures = CheckpointTransaction.commit, [StorageError("No space left", errno.ENOSPC)]

    def fails_once(transaction: CheckpointTransaction, *files: Any) -> None:
        if "machine-1" in str(transaction.target) and failures:
            raise failures.pop()
        commit(transaction, *files)

    if dist.get_rank() == 1:
        CheckpointTransaction.commit = fails_once  # type: ignore[method-assign]
    try:
        for step in (2, 3, 4):
            run.save(step, state_of(step))
            with contextlib.suppress(CheckpointError):
                run.wait()
    finally:
        CheckpointTransaction.commit = commit  # type: ignore[method-assign]
    begin = time.monotonic()
    run.close()
    return time.monotonic() - begin, run.failures


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_disk_that_is_full_once_on_one_machine_stops_no_later_promotion(
    worlds: Worlds, tmp_path: Path, asynchronous: bool
) -> None:
    options = {"asynchronous": asynchronous}
    ends = worlds.run(2, _saves_while_one_disk_fails_once, tmp_path, [0, 1], options)
    assert max(seconds for seconds, _ in ends) < 15
    assert ends[0][1] == (0 if asynchronous else 1)  # What `wait` raises does not count.
    assert steps_in(tmp_path / "run") == [4, 3, 1]
    assert worlds.run(2, restore, tmp_path, [0, 1]) == [4, 4]


def _loses_what_waits(folder: Path, machines: Sequence[int], machine: int, how: str) -> list[str]:
    late_names.APPEARS_S = 0.2
    options: dict[str, Any] = {"on_failure": "warn", "max_failures": 9, "keep_local": 9}
    run = run_on(folder, machines, **options)
    local = folder / f"machine-{machines[dist.get_rank()]}" / "step-2"
    copy_files, goes_on, records = CheckpointCopy.copy_files, threading.Event(), list[str]()

    def gated(copy: CheckpointCopy) -> None:
        goes_on.wait(60)
        copy_files(copy)

    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_ckpt").addHandler(handler)
    CheckpointCopy.copy_files = gated  # type: ignore[method-assign]
    try:
        run.save(1, state_of(1))  # Each machine opens this copy.
        run.save(2, state_of(2))
        dist.barrier()
        if machines[dist.get_rank()] == machine:
            if how == "a step":
                shutil.rmtree(local)
            elif how == "a data file":
                next(local.glob("__*.distcp")).unlink()
            else:
                (file,) = local.glob("__*.distcp")
                contents = bytearray(file.read_bytes())
                contents[len(contents) // 2] ^= 1
                file.write_bytes(contents)
        dist.barrier()
        goes_on.set()
        run.wait(promoted=True)
    except CheckpointError as error:
        records.append(str(error))
    finally:
        CheckpointCopy.copy_files = copy_files  # type: ignore[method-assign]
    try:
        for step in (3, 4):
            run.save(step, state_of(step))
        run.wait(promoted=True)
        run.close()
    finally:
        logging.getLogger("torch_ckpt").removeHandler(handler)
    return records


def refuse(*_: Any, **__: Any) -> None:
    raise StorageError("it does not answer", errno.EIO)


def promote_a_step_of_another_job(folder: Path, machines: Sequence[int]) -> list[int]:
    options: dict[str, Any] = {"keep_last": 20, "keep_local": 1, "on_failure": "warn"}
    waiting, commit = run_on(folder, machines, **options), CheckpointCopy.commit
    CheckpointCopy.commit = refuse  # type: ignore[method-assign]
    try:
        run_on(folder, machines, **options).save(1, state_of(1))
        dist.barrier()
        assert waiting.restore(state_of(0)) == 1
        waiting.save(2, state_of(2))
        time.sleep(1)
        dist.barrier()
    finally:
        CheckpointCopy.commit = commit  # type: ignore[method-assign]
    for _ in range(2):
        with contextlib.suppress(StorageError):  # The first one is of before.
            waiting.wait(promoted=True)
    return steps_in(folder / "run")


def test_a_step_that_another_job_has_left_meanwhile_is_promoted(
    worlds: Worlds, tmp_path: Path
) -> None:
    assert worlds.agree(2, promote_a_step_of_another_job, tmp_path, [0, 1]) == [2, 1]


@pytest.mark.thin(1)
@pytest.mark.parametrize("how", ["a step", "a data file", "a byte"])
@pytest.mark.parametrize("machine", [0, 1])
def test_a_step_that_one_machine_loses_before_its_promotion_stops_no_later_one(
    worlds: Worlds, tmp_path: Path, machine: int, how: str
) -> None:
    logged = "\n".join(worlds.run(2, _loses_what_waits, tmp_path, [0, 1], machine, how)[0])
    assert steps_in(tmp_path / "run") == [4, 3, 1]
    assert "not promoted to" in logged
    assert (f"machine-{machine}" if how != "a data file" else f"__{machine}_0_") in logged
    assert "step 2" in logged or "steps [2]" in logged


def _loses_what_was_promoted(folder: Path, machines: Sequence[int]) -> list[str]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_ckpt").addHandler(handler)
    with run_on(folder, machines, keep_local=9) as run:
        run.restore(state_of(0))
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "machine-0" / "step-2")
        dist.barrier()
        run.save(3, state_of(3))
        run.wait(promoted=True)
    return logged


def test_a_promoted_step_that_a_machine_loses_in_the_next_job_is_not_said_to_be_unpromoted(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, save_steps, tmp_path, [0, 1], [1, 2], {})
    logged = "\n".join(worlds.run(2, _loses_what_was_promoted, tmp_path, [0, 1])[0])
    assert steps_in(tmp_path / "run") == [3, 2, 1]
    assert "not promoted" not in logged


def _leaves_unpromoted(folder: Path, machines: Sequence[int], steps: Sequence[int]) -> None:
    with contextlib.suppress(KeyError), run_on(folder, machines, keep_local=9) as run:
        for step in steps:
            if step > 1 and run._promotion is not None:
                run._promotion.cancel()
            run.save(step, state_of(step))
            if step == 1:
                run.wait(promoted=True)
        raise KeyError("all are killed")


@pytest.mark.parametrize("machines", [[1], [0, 1]], ids=["one", "two"])
def test_what_three_machines_leave_does_not_fail_the_saves_of_fewer(
    worlds: Worlds, tmp_path: Path, machines: list[int]
) -> None:
    worlds.run(3, _leaves_unpromoted, tmp_path, [0, 1, 2], [1, 2])
    assert steps_in(tmp_path / "run") == [1]
    count = len(machines)
    assert worlds.run(count, restore, tmp_path, machines) == [1] * count
    worlds.run(count, save_steps, tmp_path, machines, [3, 4, 5, 6], {})
    assert steps_in(tmp_path / "run") == [6, 5, 4, 3, 1]
    assert worlds.run(count, restore, tmp_path, machines) == [6] * count


@pytest.mark.parametrize("machines", [[0, 1], [3, 1]], ids=["two", "a new one"])
def test_training_does_not_begin_anew_if_a_lost_machine_had_files_of_all_steps(
    worlds: Worlds, tmp_path: Path, machines: list[int]
) -> None:
    worlds.run(3, _leaves_unpromoted, tmp_path, [0, 1, 2], [2, 3])
    with pytest.raises(AssertionError, match=r"2 are damaged or lack files, the newest is step 3"):
        worlds.run(2, restore, tmp_path, machines)
    assert worlds.run(3, restore, tmp_path, [1, 2, 0]) == [3] * 3


def _discards_after_damage(folder: Path, machines: Sequence[int]) -> list[int]:
    with run_on(folder, machines, keep_local=9) as run:
        for step in (1, 2):
            run.save(step, state_of(step))
        run.wait(promoted=True)
        dist.barrier()
        if dist.get_rank() == 1:
            for step in (folder / "machine-1" / "step-1", folder / "run" / "step-1"):
                next(step.glob("__1_*.distcp")).unlink()
        dist.barrier()
        with pytest.raises(CorruptionError, match="no step up to 1 is whole"):
            run.discard_after(1)
        return [*steps_in(folder / "run"), *steps_in(folder / f"machine-{dist.get_rank()}")]


def test_the_last_whole_step_of_all_machines_is_not_discarded(
    worlds: Worlds, tmp_path: Path
) -> None:
    assert worlds.run(2, _discards_after_damage, tmp_path, [0, 1]) == [[2, 1, 2, 1]] * 2


def _lose_a_directory_to_another_run(folder: Path, machines: Sequence[int]) -> None:
    second = dist.new_group([1])
    run = run_on(folder, machines)
    if dist.get_rank() == 1:
        Run(folder / "other", local=folder / "machine-1", process_group=second).close()
    for use in (lambda: run.save(1, state_of(1)), lambda: run.restore(state_of(0))):
        with pytest.raises(CheckpointError, match=r"cannot use .*machine-1: it belongs to run"):
            use()
    run.close()


def _lease_of_another_run(folder: Path) -> None:
    alone = dist.new_group([0])
    run = run_on(folder, [0, 0])
    if dist.get_rank() == 0:
        with Run(folder / "other", local=folder / "machine-0", process_group=alone) as other:
            other.save(1, {"w": torch.ones(3)})
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"cannot use .*machine-0: it belongs to run"):
        run.lease(1).__enter__()


def test_no_rank_leases_a_step_of_another_run_that_has_taken_over_the_local_directory(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, _lease_of_another_run, tmp_path)


def test_a_directory_that_another_run_takes_over_on_one_machine_fails_calls_on_all(
    worlds: Worlds, tmp_path: Path
) -> None:
    worlds.run(2, _lose_a_directory_to_another_run, tmp_path, [0, 1])
    assert not steps_in(tmp_path / "machine-1")
    assert not steps_in(tmp_path / "run")
