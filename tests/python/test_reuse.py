"""What has not changed since an older checkpoint is not written again."""

from __future__ import annotations

import errno
import os
import random
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import xxh3
from command import run_command
from support.states import same
from support.store_server import StoreServer
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from waits import until

import torch_ckpt
from torch_ckpt import FastReader, FastSavePlanner, FastWriter, IoOptions, Run
from torch_ckpt.agent.memory import run_of
from torch_ckpt.commits.checkpoint import CheckpointTransaction
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.committed import open_committed
from torch_ckpt.planning.value_digests import value_digests
from torch_ckpt.storage import rank_reuse
from torch_ckpt.storage.copying import CheckpointCopy
from torch_ckpt.storage.reuse import MAX_FILES
from torch_ckpt.storage.verify import examine

MIB = 1 << 20
DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.int64]

State = dict[str, Any]


def _frozen_and_tuned() -> State:
    """A model of which most is frozen."""
    torch.manual_seed(0)
    frozen: State = {f"base.{n}": torch.rand(MIB // 4) for n in range(4)}
    return frozen | {"lora.a": torch.rand(1000), "lora.b": torch.rand(30, 30).T, "step": 0}


def _tune(state: State) -> None:
    state["lora.a"] += 1
    state["lora.b"] += 1
    state["step"] += 1


def _copy(state: State) -> State:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _blank(state: State) -> State:
    return {
        k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for k, v in state.items()
    }


def _save(
    state: State, path: Path | str, base: Path | str, planner: Any = None, **options: Any
) -> None:
    dcp.save(state, storage_writer=FastWriter(path, base=base, **options), planner=planner)


def _check(state: State, path: Path | str) -> None:
    """Loads by ours and by stock, and verifies all bytes and digests."""
    readers: list[Any] = [FastReader(path)]
    if "://" not in str(path):
        readers.append(dcp.FileSystemReader(path))
    for reader in readers:
        found = _blank(state)
        dcp.load(found, storage_reader=reader)
        assert same(found, state, any_order=True)
    assert not examine(Location(path)).damage


def _written(path: Path) -> int:
    """Bytes of data files that no other checkpoint has."""
    return sum(f.stat().st_size for f in path.glob("*.distcp") if f.stat().st_nlink == 1)


def _files(path: Path | str) -> dict[str, tuple[int, int]]:
    """Length, and the id of the save that has written it, of each file in the index."""
    index = open_committed(Location(path), "")[1]
    assert index is not None
    return {name: (nbytes, index.origin(n)) for n, (name, nbytes) in enumerate(index.files)}


WAYS: dict[str, dict[str, Any]] = {
    "stock planner": {},
    "fast planner": {"planner": True},
    "three files": {"thread_count": 3},
    "one file for each item": {"single_file_per_rank": False},
    "buffered": {"planner": True, "io": IoOptions(direct=False, buffer_nbytes=512 << 10)},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_save_writes_what_has_changed_and_links_the_rest(tmp_path: Path, way: str) -> None:
    state, options = _frozen_and_tuned(), dict(WAYS[way])
    is_fast = options.pop("planner", False)
    for step in range(4):
        planner = FastSavePlanner() if is_fast else None
        path = tmp_path / f"step-{step}"
        _save(state, path, tmp_path / f"step-{step - 1}", planner, **options)
        _check(state, path)
        if step:
            assert 0 < _written(path) < 30_000
            assert sum(nbytes for nbytes, origin in _files(path).values() if origin) >= 4 * MIB
        _tune(state)


def test_each_checkpoint_is_complete_by_itself(tmp_path: Path) -> None:
    state = _frozen_and_tuned()
    for step in range(3):
        _save(state, tmp_path / f"step-{step}", tmp_path / f"step-{step - 1}")
        _tune(state)
    expected = _copy(state)
    expected["lora.a"] -= 1
    expected["lora.b"] -= 1
    expected["step"] -= 1
    shutil.copytree(tmp_path / "step-2", tmp_path / "copy")
    for step in (0, 1):
        shutil.rmtree(tmp_path / f"step-{step}")
    _check(expected, tmp_path / "step-2")
    _check(expected, tmp_path / "copy")
    dcp_to_torch_save(tmp_path / "step-2", tmp_path / "one.pt")
    assert same(torch.load(tmp_path / "one.pt"), expected, any_order=True)


def _bit(position: int) -> Callable[[State], None]:
    def flip(state: State) -> None:
        state["base.1"].view(torch.uint8)[position] ^= 4

    return flip


def _moves(state: State) -> None:
    state["base.0"], state["base.1"] = state["base.1"], state["base.0"]


def _becomes(dtype: torch.dtype) -> Callable[[State], None]:
    def change(state: State) -> None:
        state["base.2"] = state["base.2"].view(dtype)

    return change


def _has_another_shape(state: State) -> None:
    state["base.2"] = state["base.2"].view(2, -1)


def _is_renamed(state: State) -> None:
    state["base.9"] = state.pop("base.2")


def _is_offloaded(state: State) -> None:
    """Freed, and then another tensor at the same address."""
    storage = state["base.2"].untyped_storage()
    nbytes = storage.nbytes()
    storage.resize_(0)
    storage.resize_(nbytes)
    state["base.2"].fill_(3)


CHANGES: dict[str, Callable[[State], None]] = {
    "the first bit": _bit(0),
    "the last bit": _bit(MIB - 1),
    "a bit between samples": _bit(MIB // 2 + 40_000),
    "two tensors are exchanged": _moves,
    "another dtype of the same bits": _becomes(torch.int32),
    "another shape": _has_another_shape,
    "another name": _is_renamed,
    "offloaded": _is_offloaded,
    "strided, of the same values": lambda s: s.update(
        {
            "base.3": s["base.3"].view(2, -1).T.contiguous().T.view(-1)
            if False
            else s["base.3"].clone()
        }
    ),
    "gone": lambda s: s.pop("base.3"),
    "an object instead": lambda s: s.update({"base.3": "object"}),
}
MODES: dict[str, dict[str, Any]] = {
    "direct": {},
    "thread": {"asynchronous": True},
    "agent": {"asynchronous": True, "agent": True},
}


@pytest.mark.thin(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_stored(tmp_path: Path, memory: Path, change: str, mode: str) -> None:
    state = _frozen_and_tuned()
    saved = []
    with Run(tmp_path, **MODES[mode]) as run:
        for step in range(3):
            run.save(step, state)
            run.wait()
            saved.append(_copy(state))
            if step == 0:
                CHANGES[change](state)
    for step, expected in enumerate(saved):
        _check(expected, tmp_path / f"step-{step}")


@pytest.mark.parametrize("mode", MODES)
def test_a_run_links_what_the_last_step_has_also_after_a_restart(
    tmp_path: Path, memory: Path, mode: str
) -> None:
    state, step = _frozen_and_tuned(), 0
    for _ in range(2):
        with Run(tmp_path, keep_last=2, **MODES[mode]) as run:
            for _ in range(3):
                step += 1
                run.save(step, state)
                run.wait()
                path = tmp_path / f"step-{step}"
                _check(state, path)
                if step > 1:
                    assert _written(path) < 30_000
                _tune(state)
        until(lambda: not list(memory.glob(f"*/{run_of(tmp_path).hex()}")))  # No agent is left.


@pytest.mark.parametrize("mode", MODES)
def test_what_an_older_step_has_is_not_promoted_again(
    tmp_path: Path, memory: Path, mode: str
) -> None:
    state = _frozen_and_tuned()
    with Run(tmp_path / "run", local=tmp_path / "local", **MODES[mode]) as run:
        for step in range(3):
            run.save(step, state)
            run.wait(promoted=True)
            _check(state, tmp_path / "run" / f"step-{step}")
            _tune(state)
        assert (tmp_path / "local" / "step-2").exists()
    for step in (1, 2):
        assert _written(tmp_path / "run" / f"step-{step}") < 30_000


def test_a_file_that_the_run_has_lost_is_promoted_again(tmp_path: Path) -> None:
    state = _frozen_and_tuned()
    with Run(tmp_path / "run", local=tmp_path / "local") as run:
        run.save(0, state)
        run.wait(promoted=True)
        for file in (tmp_path / "run" / "step-0").glob("*.distcp"):
            os.truncate(file, 100)
        _tune(state)
        run.save(1, state)
        run.wait(promoted=True)
    _check(state, tmp_path / "run" / "step-1")


@pytest.mark.filterwarnings("ignore:step 2 is passed over")
def test_a_promotion_takes_no_file_of_a_step_that_a_restore_has_found_damaged(
    tmp_path: Path,
) -> None:
    state = _frozen_and_tuned()
    with Run(tmp_path / "run", local=tmp_path / "local", keep_local=9) as run:
        for step in range(3):
            run.save(step, state)
            run.wait(promoted=True)
            _tune(state)
    largest = max((tmp_path / "run/step-2").glob("*.distcp"), key=lambda f: f.stat().st_size)
    contents = bytearray(largest.read_bytes())
    contents[len(contents) // 2] ^= 1
    largest.unlink()  # The other steps have their links, as on a store their copies.
    largest.write_bytes(contents)
    shutil.rmtree(tmp_path / "local/step-2")
    with Run(tmp_path / "run", local=tmp_path / "local", keep_local=9) as run:
        assert run.restore(state) == 1
        _tune(state)
        run.save(3, state)
    _check(state, tmp_path / "run/step-3")
    assert _written(tmp_path / "run/step-3") < 30_000


@pytest.mark.parametrize("how", ["another length", "other checksums"])
def test_a_promotion_takes_only_files_whose_length_and_checksums_are_those_of_the_step(
    tmp_path: Path, how: str
) -> None:
    """Of a flipped byte, which no checksum in an index shows, it learns nothing."""
    state = _frozen_and_tuned()
    local, run = tmp_path / "local", tmp_path / "run"
    for step in range(2):
        _save(state, local / f"{step}", local / f"{step - 1}")
        _tune(state)
    first = CheckpointCopy(Location(local / "0"), Location(run / "0"))
    first.copy_files()
    first.commit()
    copy = CheckpointCopy(Location(local / "1"), Location(run / "1"), base=Location(run / "0"))
    if how == "another length":
        for file in (run / "0").glob("*.distcp"):
            os.truncate(file, file.stat().st_size - 1)
    else:
        found = {(origin, n, sums[::-1]): name for (origin, n, sums), name in copy._in_base.items()}
        copy._in_base = found
    copy.copy_files()
    copy.commit()
    assert copy.read_nbytes == copy.nbytes
    assert not examine(Location(run / "1")).damage


def test_a_run_with_reuse_off_writes_everything(tmp_path: Path) -> None:
    state = _frozen_and_tuned()
    with Run(tmp_path, reuse="off") as run:
        for step in range(2):
            run.save(step, state)
            assert _written(tmp_path / f"step-{step}") > 4 * MIB
            assert not any(origin for _, origin in _files(tmp_path / f"step-{step}").values())


def test_ls_and_inspect_tell_what_older_saves_have_written(tmp_path: Path) -> None:
    state = _frozen_and_tuned()
    with Run(tmp_path) as run:
        for step in range(1, 4):
            run.save(step, state)
            _tune(state)
    listed = run_command("ls", tmp_path)[1].splitlines()
    assert listed[0].split() == ["step", "size", "new", "age", "state"]
    assert [line.count("iB ") for line in listed[1:]] == [2, 2, 1]
    printed = run_command("inspect", tmp_path / "step-3")[1]
    first = open_committed(Location(tmp_path / "step-1"), "")[1]
    assert first is not None
    assert f"written by save {first.save_id}, step 1" in printed


def test_tensors_that_change_together_share_a_file(tmp_path: Path) -> None:
    """Otherwise what is dead would grow with each save."""
    torch.manual_seed(0)
    state: State = {f"t{n}": torch.rand(MIB // 4) for n in range(4)}
    for step in range(5):
        _save(state, tmp_path / f"{step}", tmp_path / f"{step - 1}")
        for n in range(3):
            state[f"t{n}"] += 1  # Three of four change.
    files = [nbytes for nbytes, _ in _files(tmp_path / "4").values()]
    assert sorted(round(nbytes / MIB) for nbytes in files) == [1, 3]
    assert _written(tmp_path / "4") < 3.1 * MIB


# ---- Bases that are of no use --------------------------------------------------------------------


def _warned(work: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        work()
    return [
        str(each.message)
        for each in caught
        if "base" in str(each.message) or "written again" in str(each.message)
    ]


def _is_missing(base: Path) -> None:
    shutil.rmtree(base)


def _lacks_a_file(base: Path) -> None:
    for file in base.glob("*.distcp"):
        file.unlink()


def _is_cut(base: Path) -> None:
    for file in base.glob("*.distcp"):
        os.truncate(file, file.stat().st_size - 1)


def _has_a_damaged_index(base: Path) -> None:
    (index,) = base.glob(".index.*")
    data = bytearray(index.read_bytes())
    data[len(data) // 2] ^= 1
    index.write_bytes(data)


def _has_no_index(base: Path) -> None:
    (index,) = base.glob(".index.*")
    index.unlink()


def _is_of_stock(base: Path) -> None:
    shutil.rmtree(base)
    dcp.save(_frozen_and_tuned(), storage_writer=dcp.FileSystemWriter(base))


def _has_no_digests(base: Path) -> None:
    shutil.rmtree(base)
    dcp.save(_frozen_and_tuned(), storage_writer=FastWriter(base))


@pytest.mark.parametrize(
    "spoil",
    [
        *(_is_missing, _lacks_a_file, _is_cut, _has_a_damaged_index, _has_no_index),
        *(_is_of_stock, _has_no_digests),
    ],
)
def test_a_base_of_no_use_makes_a_save_write_everything(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    state = _frozen_and_tuned()
    _save(state, tmp_path / "base", tmp_path / "none")
    spoil(tmp_path / "base")
    said = _warned(lambda: _save(state, tmp_path / "new", tmp_path / "base"))
    _check(state, tmp_path / "new")
    assert _written(tmp_path / "new") > 4 * MIB
    assert bool(said) == (spoil in (_has_a_damaged_index, _has_no_index))
    _save(state, tmp_path / "next", tmp_path / "new")  # It has digests.
    assert _written(tmp_path / "next") < 30_000


@pytest.mark.parametrize("damaged", [[1, 2], [2]], ids=["all", "newest"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_that_a_restore_found_damaged_is_no_base(
    tmp_path: Path, memory: Path, mode: str, damaged: list[int]
) -> None:
    """Otherwise all later steps would have its damage."""
    state = _frozen_and_tuned()
    with Run(tmp_path, **MODES[mode]) as run:
        for step in (1, 2):
            run.save(step, state)
    for step in damaged:
        for file in tmp_path.glob(f"step-{step}/*.distcp"):
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.unlink()  # Another step may have a link.
            file.write_bytes(data)
    with Run(tmp_path, **MODES[mode]) as run:
        loaded = _blank(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # It is passed over.
            if damaged == [2]:
                assert run.restore(loaded) == 1
            else:
                with pytest.raises(CheckpointException):
                    run.restore(loaded)
        run.save(3, state)
        run.wait()
    _check(state, tmp_path / "step-3")
    assert (_written(tmp_path / "step-3") < 30_000) == (damaged == [2])


def _discards(run: Run) -> None:
    assert run.discard_after(2) == []


def _restores_sound_tensors(run: Run) -> None:
    assert run.restore({"step": -1}, step=2, strict=False) == 2


@pytest.mark.parametrize("then", [lambda run: None, _discards, _restores_sound_tensors])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", [None, 2], ids=["newest", "given"])
def test_a_local_step_that_a_restore_found_damaged_is_no_base_if_the_run_has_it_sound(
    tmp_path: Path, memory: Path, mode: str, step: int | None, then: Callable[[Run], None]
) -> None:
    local, state = tmp_path / "local", _frozen_and_tuned()
    with Run(tmp_path / "run", local=local, **MODES[mode]) as run:
        for number in (1, 2):
            run.save(number, state)
            _tune(state)
    largest = max((local / "step-2").glob("*.distcp"), key=lambda file: file.stat().st_size)
    contents = bytearray(largest.read_bytes())
    contents[len(contents) // 2] ^= 1
    largest.write_bytes(contents)
    with Run(tmp_path / "run", local=local, **MODES[mode]) as run:
        loaded = _blank(state)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # It is passed over there.
            assert run.restore(loaded, step=step) == 2
            then(run)
        _tune(loaded)
        run.save(3, loaded)
        run.wait()
        _check(loaded, local / "step-3")


def test_steps_do_not_gather_small_files(tmp_path: Path) -> None:
    state: State = {f"t{n:02}": torch.rand(3000) for n in range(40)}
    for step in range(45):
        _save(state, tmp_path / f"{step}", tmp_path / f"{step - 1}")
        for n in range(step, 40):  # One after another stops changing.
            state[f"t{n:02}"] += 1
    assert len(_files(tmp_path / "44")) <= MAX_FILES + 2
    _check(state, tmp_path / "44")


def test_a_base_on_another_disk_makes_a_save_write_everything_and_say_so(
    tmp_path: Path, memory: Path
) -> None:
    state = _frozen_and_tuned()
    _save(state, memory / "base", memory / "none")
    (said,) = _warned(lambda: _save(state, tmp_path / "new", memory / "base"))
    assert "Invalid cross-device link" in said
    _check(state, tmp_path / "new")


def test_a_save_over_its_base_writes_everything(tmp_path: Path) -> None:
    state = _frozen_and_tuned()
    for _ in range(3):
        _save(state, tmp_path / "one", tmp_path / "one")
        _check(state, tmp_path / "one")
        _tune(state)
    _save(state, tmp_path / "two", tmp_path / "one")
    assert _written(tmp_path / "two") < 30_000


def test_a_file_of_the_same_name_is_not_replaced(tmp_path: Path) -> None:
    """The second save of a step has the files of the first one beside its own."""
    state = _frozen_and_tuned()
    _save(state, tmp_path / "0", tmp_path / "none")
    for _ in range(3):
        _tune(state)
        _save(state, tmp_path / "1", tmp_path / "0")
        _check(state, tmp_path / "1")


MODES_OF_SAVE: dict[str, Callable[[State, FastWriter], Any]] = {
    "direct": lambda state, writer: torch_ckpt.save(state, storage_writer=writer),
    "thread": lambda state, writer: torch_ckpt.async_save(state, storage_writer=writer).result(),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("mode", MODES_OF_SAVE)
def test_a_save_that_fails_leaves_the_files_of_its_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    state = _frozen_and_tuned()
    _save(state, tmp_path / "0", tmp_path / "none")
    before = _copy(state)
    _tune(state)

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full", errno.ENOSPC)

    writer = FastWriter(tmp_path / "1", base=tmp_path / "0")
    with monkeypatch.context() as patched:
        patched.setattr("torch_ckpt.storage.rank_files.write_data_file", fail)
        with pytest.raises(BaseException, match="the disk is full"):
            MODES_OF_SAVE[mode](state, writer)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    _check(before, tmp_path / "0")
    assert _written(tmp_path / "0") > 4 * MIB
    _save(state, tmp_path / "1", tmp_path / "0")
    _check(state, tmp_path / "1")


def test_verify_finds_a_digest_of_other_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With such a digest, a later save may take a wrong value."""
    state = _frozen_and_tuned()
    _save(state, tmp_path / "0", tmp_path / "none")
    with monkeypatch.context() as patched:
        # Samples do not show a bit between them. So a save must not decide by them.
        equal = open_committed(Location(tmp_path / "0"), "")[1]
        assert equal is not None
        found = rank_reuse.full_digests
        CHANGES["a bit between samples"](state)

        def stale(sources: Any, positions: Any, **options: Any) -> Any:
            CHANGES["a bit between samples"](state)
            try:
                return found(sources, positions, **options)
            finally:
                CHANGES["a bit between samples"](state)

        patched.setattr(rank_reuse, "full_digests", stale)
        _save(state, tmp_path / "1", tmp_path / "0")
    with pytest.raises(AssertionError):
        _check(state, tmp_path / "1")  # The check notices stale values.
    index = tmp_path / "2"
    shutil.copytree(tmp_path / "0", index)
    _exchange_digests(index)
    damage = examine(Location(index)).damage
    assert len(damage) == 2
    assert all("does not have" in each or "do not have the digest" in each for each in damage)


def _exchange_digests(path: Path) -> None:
    """Exchanges the digests of two boxes in an index, whose checksums are right again."""
    (file,) = path.glob(".index.*")
    data = bytearray(file.read_bytes())
    at = struct.unpack_from("<q", data, 264)[0]
    first, second = data[at : at + 24], data[at + 24 : at + 48]
    data[at : at + 48] = second + first
    begin, nbytes = struct.unpack_from("<qq", data, 240)
    table = begin + nbytes
    for block in range(nbytes // 8):
        data[begin + 8 * block : begin + 8 * block + 8] = xxh3(
            bytes(data[table + 65536 * block : table + 65536 * (block + 1)])
        )
    top, top_nbytes = struct.unpack_from("<qq", data, 224)
    assert top_nbytes == 8
    data[top : top + 8] = xxh3(bytes(data[begin:table]))
    data[256:264] = xxh3(bytes(data[top : top + 8]))
    data[312:320] = xxh3(bytes(data[:312]))
    file.write_bytes(data)


def test_a_step_that_is_saved_again_and_fails_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = _frozen_and_tuned()
    for step in (0, 1):
        _save(state, tmp_path / f"{step}", tmp_path / "0")

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("the disk is full", errno.ENOSPC)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointTransaction, "check", fail)
        with pytest.raises(BaseException, match="the disk is full"):
            _save(state, tmp_path / "1", tmp_path / "0")
    _check(state, tmp_path / "1")


# ---- Stores --------------------------------------------------------------------------------------


def test_a_store_copies_what_has_not_changed(
    store_server: StoreServer,
    url_on: Callable[[StoreServer], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = url_on(store_server)
    state = _frozen_and_tuned()
    for step in range(3):
        _save(state, f"{url}/step-{step}", f"{url}/step-{step - 1}")
        _check(state, f"{url}/step-{step}")
        if step:
            new = [n for n, origin in _files(f"{url}/step-{step}").values() if not origin]
            assert 0 < sum(new) < 30_000
        saved = _copy(state)
        _tune(state)

    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("the store is down", errno.EIO)

    with monkeypatch.context() as patched:
        patched.setattr(CheckpointTransaction, "check", fail)
        with pytest.raises(BaseException, match="the store is down"):
            _save(state, f"{url}/step-2", f"{url}/step-1")
    Location(f"{url}/step-0").file_system.remove_all(Location(f"{url}/step-0").path)
    _check(saved, f"{url}/step-2")


def _check_without_copies(url: str) -> None:
    state = _frozen_and_tuned()
    _save(state, f"{url}/step-0", f"{url}/none")
    before = _copy(state)
    _tune(state)
    (said,) = _warned(lambda: _save(state, f"{url}/step-1", f"{url}/step-0"))
    assert said.endswith("the store cannot copy")
    _check(before, f"{url}/step-0")
    _check(state, f"{url}/step-1")
    assert not any(origin for _, origin in _files(f"{url}/step-1").values())


def test_a_store_without_copies_leaves_the_base_its_files(tmp_path: Path) -> None:
    """Where a client copies by renaming, the base would lose them."""
    _check_without_copies(f"memory://{tmp_path.name}")


@pytest.mark.framework("hdfs_native")
@pytest.mark.slow
def test_hdfs_leaves_the_base_its_files(hdfs_url: str) -> None:
    _check_without_copies(hdfs_url)


# ---- Histories -----------------------------------------------------------------------------------


class _History:
    """Saves of a state that changes, each with the values that it must have, and removals."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng, self.folder = random.Random(seed), folder
        self.state: State = {}
        self.saved: dict[int, State] = {}  # What remains.
        self.digested: dict[int, set[str]] = {}  # Names that have a digest of all elements.
        self.next = 0
        for _ in range(self.rng.randint(1, 12)):
            self.add()

    def tensor(self) -> torch.Tensor:
        numel = self.rng.choice([0, 1, 100, 5000, 40_000])
        data = torch.tensor([], dtype=torch.uint8)
        data = torch.frombuffer(
            bytearray(self.rng.randbytes(8 * numel) or b"\0"), dtype=torch.uint8
        )
        data = data[: 8 * numel].view(self.rng.choice(DTYPES))
        return data.view(2, -1).T if data.numel() % 2 == 0 and self.rng.random() < 0.3 else data

    def add(self) -> None:
        self.state[f"t{self.rng.randrange(30)}"] = self.tensor()

    def change(self) -> None:
        for name in list(self.state):
            kind = self.rng.choice(["same"] * 6 + ["bit", "bit", "new", "gone", "moved"])
            value = self.state[name]
            if kind == "bit" and value.numel():
                flat = value.untyped_storage()
                memory = torch.tensor([], dtype=torch.uint8).set_(flat)
                memory[self.rng.randrange(len(memory))] ^= 1 << self.rng.randrange(8)
            elif kind == "new":
                self.state[name] = self.tensor()
            elif kind == "moved":
                self.state[name] = value.clone()
            elif kind == "gone" and len(self.state) > 1:
                del self.state[name]
        if self.rng.random() < 0.3:
            self.add()

    def save(self) -> None:
        step, base = self.next, self.rng.choice([*self.saved, self.next])
        if self.rng.random() < 0.7 and self.saved:
            base = max(self.saved)
        self.next += 1
        options: dict[str, Any] = {"thread_count": self.rng.choice([1, 1, 1, 3])}
        planner = self.rng.choice([None, FastSavePlanner()])
        expected = self.unchanged_files(base)
        path = self.folder / f"{step}"
        if self.rng.random() < 0.1:  # Killed before the commit.
            writer = FastWriter(path, base=self.folder / f"{base}", **options)
            writer.finish = _killed  # type: ignore[method-assign]
            with pytest.raises(BaseException, match="killed"):
                dcp.save(self.state, storage_writer=writer, planner=planner)
            return
        _save(self.state, path, self.folder / f"{base}", planner, **options)
        self.digested[step] = self.names_with_digests(base)
        self.saved[step] = _copy(self.state)
        taken = {path / name for name, (_, origin) in _files(path).items() if origin}
        assert {file.stat().st_ino for file in taken} == expected
        self.check_space(step)

    def names_with_digests(self, base: int) -> set[str]:
        """Which tensors get a digest: not those that are known to differ from the base."""
        known = self.saved.get(base, {})

        def changes(name: str) -> bool:
            before, now = known.get(name), self.state[name]
            if before is None or before.dtype != now.dtype or before.shape != now.shape:
                return False
            if value_digests([before], "sample") != value_digests([now], "sample"):
                return True
            return name in self.digested[base] and not same({"t": before}, {"t": now})

        return {name for name in self.state if not changes(name)}

    def unchanged_files(self, base: int) -> set[int]:
        """The files of a base that a save must take, as inodes, by comparing all values."""
        if base not in self.saved:
            return set()
        index = open_committed(Location(self.folder / f"{base}"), "")[1]
        assert index is not None
        live: dict[str, int] = {}
        for fqn, properties, boxes in index:
            before, now = self.saved[base].get(fqn), self.state.get(fqn)
            is_same = (
                properties is not None
                and fqn in self.digested[base]
                and isinstance(now, torch.Tensor)
                and same({"t": before}, {"t": now})
            )
            for box in boxes if is_same else ():
                name = index.file_name(box[2])
                live[name] = live.get(name, 0) + box[4]
        nbytes = dict(index.files)
        names = [name for name in nbytes if 2 * live.get(name, 0) > nbytes[name]]
        names = sorted(names, key=lambda name: -live[name])[:MAX_FILES]
        return {(self.folder / f"{base}" / name).stat().st_ino for name in names}

    def check_space(self, step: int) -> None:
        """A checkpoint has at most as many dead bytes as live ones."""
        index = open_committed(Location(self.folder / f"{step}"), "")[1]
        assert index is not None
        live = sum(box[4] for _, _, boxes in index for box in boxes)
        padding = 64 * index.box_count
        assert sum(nbytes for _, nbytes in index.files) <= 2 * (live + padding)

    def remove(self) -> None:
        if len(self.saved) > 1:
            step = self.rng.choice(list(self.saved))
            shutil.rmtree(self.folder / f"{step}")
            del self.saved[step]

    def check(self) -> None:
        for step, expected in self.saved.items():
            _check(expected, self.folder / f"{step}")


def _killed(*_: Any) -> None:
    raise RuntimeError("killed")


def test_every_step_that_remains_of_a_random_history_has_its_values(
    tmp_path: Path, seed: int, full: bool
) -> None:
    for number in range(1000 if full else 15):
        folder = tmp_path / f"{number}"
        folder.mkdir()
        history = _History(folder, seed + number)
        print(f"history {seed + number}")
        for _ in range(history.rng.randint(2, 6)):
            history.save()
            history.change()
            if history.rng.random() < 0.3:
                history.remove()
        history.check()
        shutil.rmtree(folder)
