"""`installed` and `install`: programs that construct stock's writers, readers and planners."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import blank, data_files, differences, loads
from forks import run_python
from support.commit_files import index_file
from torch.distributed.checkpoint import (
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemReader,
    FileSystemWriter,
    _storage_utils,
    format_utils,
    state_dict_loader,
    state_dict_saver,
)
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from waits import until

import torch_ckpt
from torch_ckpt import FastLoadPlanner, FastReader, FastSavePlanner, FastWriter, IoOptions
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.integrations.after_import import after_import
from torch_ckpt.integrations.replacing import replacing
from torch_ckpt.process_state import PROCESS
from torch_ckpt.staging import stager

ASYNC_TIMEOUT_S = 60


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": {f"layer.{i}": torch.randn(33, 20) for i in range(4)}, "step": 7}


def noting(seen: list[Any], method: Callable[..., Any]) -> Callable[..., Any]:
    def note(self: Any, *rest: Any) -> Any:
        seen.append(self)
        return method(self, *rest)

    return note


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The writers, readers and planners of this package that wrote or read, in order."""
    seen: list[Any] = []
    for kind, method in (
        (FastWriter, "write_data"),
        (FastWriter, "stage"),
        (FastReader, "read_data"),
        (FastSavePlanner, "create_local_plan"),
        (FastLoadPlanner, "create_local_plan"),
    ):
        monkeypatch.setattr(kind, method, noting(seen, getattr(kind, method)))
    return seen


def kinds(used: list[Any]) -> list[str]:
    return [type(one).__name__ for one in used]


def test_stock_objects_are_replaced_when_they_are_used(
    state: dict[str, Any], used: list[Any], tmp_path: Path
) -> None:
    loaded = blank(state)
    with torch_ckpt.installed():
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=DefaultSavePlanner())
        reader = FileSystemReader(tmp_path)
        dcp.load(loaded, storage_reader=reader, planner=DefaultLoadPlanner())
    assert differences(state, loaded) == []
    assert kinds(used) == ["FastSavePlanner", "FastWriter", "FastLoadPlanner", "FastReader"]

    dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=DefaultSavePlanner())
    assert len(used) == 4


def test_the_programs_own_objects_have_what_stock_leaves_in_them(
    state: dict[str, Any], tmp_path: Path
) -> None:
    state["nested"] = {"list": [torch.ones(2), 3]}
    found = []
    for name in ("stock", "ours"):
        with contextlib.nullcontext() if name == "stock" else torch_ckpt.installed():
            path = tmp_path / name
            writer, save_planner = FileSystemWriter(path), DefaultSavePlanner()
            given_id = writer.save_id
            metadata = dcp.save(state, storage_writer=writer, planner=save_planner)
            if name == "stock" and metadata.storage_meta is None:  # As torch 2.11 returns it.
                metadata = FileSystemReader(path).read_metadata()
            assert given_id == writer.save_id == metadata.storage_meta.save_id
            assert save_planner.metadata.state_dict_metadata.keys() == {
                item.index.fqn for item in save_planner.plan.items
            }
            assert len(save_planner.global_plan) == 1
            reader, load_planner, loaded = (
                FileSystemReader(path),
                DefaultLoadPlanner(),
                blank(state),
            )
            loaded["nested"] = {"list": [torch.zeros(2), 0]}
            dcp.load(loaded, storage_reader=reader, planner=load_planner)
            assert reader.storage_data.keys() == metadata.storage_data.keys()
            assert load_planner.original_state_dict["step"] == 7
            found.append(
                [
                    save_planner.mappings,
                    save_planner.state_dict.keys(),
                    save_planner.is_coordinator,
                    load_planner.mappings,
                    load_planner.state_dict.keys(),
                    load_planner.is_coordinator,
                    load_planner.metadata.state_dict_metadata.keys(),
                ]
            )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "kind",
    [
        AsyncCheckpointerType.THREAD,
        pytest.param(AsyncCheckpointerType.PROCESS, marks=pytest.mark.slow),
    ],
)
def test_they_have_it_after_an_asynchronous_save(
    kind: AsyncCheckpointerType, state: dict[str, Any], tmp_path: Path
) -> None:
    writer, planner = FileSystemWriter(tmp_path), DefaultSavePlanner()
    given_id = writer.save_id
    with torch_ckpt.installed():
        future = dcp.async_save(
            state, storage_writer=writer, planner=planner, async_checkpointer_type=kind
        )
        meta = future.result(ASYNC_TIMEOUT_S).storage_meta
        assert given_id == writer.save_id == meta.save_id
        assert FastReader(tmp_path).read_metadata().storage_meta.save_id == given_id
        if kind == AsyncCheckpointerType.THREAD:
            until(lambda: getattr(planner, "metadata", None) is not None)
            assert len(planner.plan.items) == len(planner.metadata.state_dict_metadata)


def test_a_writer_that_saves_again_has_the_same_id_and_other_files(
    state: dict[str, Any], tmp_path: Path
) -> None:
    writer = FileSystemWriter(tmp_path)
    given_id, names = writer.save_id, []
    for _ in range(2):
        with torch_ckpt.installed():
            dcp.save(state, storage_writer=writer, no_dist=True)
        names.append({file.name for file in tmp_path.iterdir()} - {".metadata"})
        found = FastReader(tmp_path).read_metadata().storage_meta.save_id
        assert found == writer.save_id == given_id
    assert names[0].isdisjoint(names[1])
    with torch_ckpt.installed():
        dcp.save(state, storage_writer=writer, checkpoint_id=tmp_path / "other", no_dist=True)
    found = FastReader(tmp_path / "other").read_metadata().storage_meta.save_id
    assert found == writer.save_id != given_id  # DCP has reset the writer.


def test_an_asynchronous_save_stages_and_writes_with_one_replacement(
    state: dict[str, Any], used: list[Any], tmp_path: Path
) -> None:
    writer = FileSystemWriter(tmp_path / "1")
    with torch_ckpt.installed():
        for path in (None, tmp_path / "2"):
            future = dcp.async_save(state, checkpoint_id=path, storage_writer=writer, no_dist=True)
            future.result(ASYNC_TIMEOUT_S)
    writers = [one for one in used if isinstance(one, FastWriter)]
    assert len(writers) == 4
    assert len(set(map(id, writers))) == 1
    for name in ("1", "2"):
        assert index_file(tmp_path / name).exists()
        assert loads(tmp_path / name, state) == []


def test_overlapping_asynchronous_saves_with_one_writer_have_directories_of_their_own(
    state: dict[str, Any], tmp_path: Path
) -> None:
    state["large"] = torch.ones(8 << 20)
    writer = FileSystemWriter(tmp_path / "first")
    paths = [tmp_path / str(number) for number in range(3)]
    with torch_ckpt.installed():
        futures = [dcp.async_save(state, checkpoint_id=p, storage_writer=writer) for p in paths]
        for future in futures:
            future.result(ASYNC_TIMEOUT_S)
        dcp.save(state, checkpoint_id=tmp_path / "first", storage_writer=writer)
        dcp.save(state, storage_writer=writer)
    paths.append(tmp_path / "first")
    assert sorted(path.parent for path in tmp_path.rglob(".index.*")) == sorted(paths)
    for path in paths:
        assert loads(path, state) == []


def test_an_asynchronous_save_to_a_path_uses_the_staging_memory_of_the_process(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, calls = PROCESS.stager.begin, []
    monkeypatch.setattr(PROCESS.stager, "begin", lambda s: calls.append(s) or begin(s))
    with torch_ckpt.installed():
        dcp.async_save(state, checkpoint_id=tmp_path).result(ASYNC_TIMEOUT_S)
    assert len(calls) == 1
    assert loads(tmp_path, state) == []


class RetainedPlanner(DefaultSavePlanner):
    """After a save, it still refers to the staged tensors."""


@pytest.mark.thin("AsyncCheckpointerType.THREAD")
@pytest.mark.parametrize("executor", list(AsyncCheckpointerType), ids=str)
def test_a_planner_that_refers_to_staged_tensors_delays_no_later_save(
    state: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: AsyncCheckpointerType,
) -> None:
    monkeypatch.setattr(stager, "time_limit_s", lambda: 5.0)
    planner = RetainedPlanner()
    with torch_ckpt.installed():
        for step in range(2):
            dcp.async_save(
                state,
                checkpoint_id=tmp_path / f"{step}",
                planner=planner,
                async_checkpointer_type=executor,
            ).result(ASYNC_TIMEOUT_S)
            assert loads(tmp_path / f"{step}", state) == []


def test_a_replacement_has_the_arguments_of_what_it_replaces(
    state: dict[str, Any], used: list[Any], tmp_path: Path
) -> None:
    io = IoOptions(direct=False)
    extensions = [ZStandard()] if ZStandard.is_available() else []
    stock = FileSystemWriter(
        *(tmp_path, False, False, 3, 12345), overwrite=False, _extensions=extensions
    )
    save_planner = DefaultSavePlanner(False, False, dedup_save_to_lowest_rank=True)
    load_planner = DefaultLoadPlanner(False, False, allow_partial_load=True)
    loaded = {**blank(state), "absent": 3}
    with torch_ckpt.installed(io=io, verify=False, trust_pickle=True):
        dcp.save(state, storage_writer=stock, planner=save_planner)
        with pytest.raises(CheckpointException, match="Checkpoint already exists"):
            dcp.save(state, storage_writer=stock, planner=save_planner)
        dcp.load(loaded, storage_reader=FileSystemReader(tmp_path), planner=load_planner)

    saving = next(one for one in used if isinstance(one, FastSavePlanner))
    assert not saving.flatten_state_dict
    assert not saving.flatten_sharded_tensors
    assert saving.dedup_save_to_lowest_rank
    writer = next(one for one in used if isinstance(one, FastWriter))
    assert (writer.single_file_per_rank, writer.sync_files, writer.overwrite) == (False,) * 3
    assert (writer.thread_count, writer.per_thread_copy_ahead) == (3, 12345)
    assert [*writer.transforms.extensions] == extensions
    assert writer.io is io
    loading = next(one for one in used if isinstance(one, FastLoadPlanner))
    assert loading.allow_partial_load
    assert not loading.flatten_state_dict
    reader = next(one for one in used if isinstance(one, FastReader))
    assert (reader.io is io, reader.verify, reader.trust_pickle) == (True, False, True)
    assert len(data_files(tmp_path)) == 2  # One for each item, since the state is not flattened.
    assert differences(state, {name: loaded[name] for name in state}) == []


class OwnWriter(FileSystemWriter):
    """A program's own writer."""


class OwnReader(FileSystemReader):
    """A program's own reader."""


def test_what_cannot_be_replaced_is_used_and_logged_once(
    state: dict[str, Any],
    used: list[Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PROCESS, "unreplaced", set())
    for name in ("1", "2"):
        with torch_ckpt.installed():
            dcp.save(state, storage_writer=OwnWriter(tmp_path / name))
            dcp.load(blank(state), storage_reader=OwnReader(tmp_path / name))
    with torch_ckpt.installed():
        safetensors = SerializationFormat.SAFETENSORS
        writer = FileSystemWriter(tmp_path / "3", serialization_format=safetensors)
        dcp.save({"w": torch.ones(3)}, storage_writer=writer)
    assert not any(isinstance(one, FastWriter | FastReader) for one in used)
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert [message.split(" is used")[0].rpartition(".")[2] for message in warned] == [
        "OwnWriter",
        "OwnReader",
        "FileSystemWriter",
    ]


@pytest.mark.parametrize(
    ("kind", "ours"),
    [
        (FileSystemWriter, FastWriter),
        (FileSystemReader, FastReader),
        (DefaultSavePlanner, FastSavePlanner),
    ],
)
def test_a_class_with_an_argument_of_a_later_torch_is_left_to_stock(
    state: dict[str, Any],
    used: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: Any,
    ours: type,
) -> None:
    monkeypatch.setattr(PROCESS, "unreplaced", set())
    construct = kind.__init__

    def newer(self: Any, *arguments: Any, compression: str = "", **options: Any) -> None:
        construct(self, *arguments, **options)

    known = list(inspect.signature(kind).parameters.values())
    later = inspect.Parameter("compression", inspect.Parameter.KEYWORD_ONLY)
    newer.__signature__ = inspect.Signature(
        [  # type: ignore[attr-defined]
            inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY),
            *known,
            later,
        ]
    )
    monkeypatch.setattr(kind, "__init__", newer)
    planner = DefaultSavePlanner()
    with torch_ckpt.installed():
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=planner)
        dcp.load(blank(state), storage_reader=FileSystemReader(tmp_path))
    assert used
    assert not any(isinstance(one, ours) for one in used)


def test_each_replacement_is_logged_at_debug_level(
    state: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "torch_ckpt")
    with torch_ckpt.installed():
        dcp.save(state, storage_writer=FileSystemWriter(tmp_path), planner=DefaultSavePlanner())
    messages = [r.getMessage() for r in caplog.records]
    assert "FileSystemWriter is replaced by FastWriter" in messages
    assert "DefaultSavePlanner is replaced by FastSavePlanner" in messages


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
def test_the_deprecated_functions_are_replaced_too(
    state: dict[str, Any], used: list[Any], tmp_path: Path
) -> None:
    """Lightning loads the optimizers of FSDP through one of them."""
    loaded = blank(state)
    with torch_ckpt.installed():
        dcp.save_state_dict(state, FileSystemWriter(tmp_path), no_dist=True)
        dcp.load_state_dict(loaded, FileSystemReader(tmp_path), no_dist=True)
    assert differences(state, loaded) == []
    assert kinds(used) == ["FastSavePlanner", "FastWriter", "FastLoadPlanner", "FastReader"]


SCRIPT = """
import sys
import threading
import time
import types
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save

class Own:
    pass

if __name__ == "__main__":
    path, *rest = sys.argv[1:]
    save({"w": torch.arange(5)}, storage_writer=FileSystemWriter(path))
    state = {"w": torch.zeros(5, dtype=torch.int64)}
    load(state, storage_reader=FileSystemReader(path))
    print(state["w"].tolist(), rest, __file__, Own.__module__)
    if rest == ["fail"]:
        raise KeyError("of the script")
    if rest == ["exit"]:
        sys.exit(7)
"""


def run(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; from torch_ckpt.cli.main import main; sys.exit(main())"
    return run_python("-c", code, "run", *arguments, folder=cwd)


def test_the_run_command_runs_an_unchanged_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run("script.py", tmp_path / "1", "-x", "--flag", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    last = done.stdout.splitlines()[-1]
    assert last == f"[0, 1, 2, 3, 4] ['-x', '--flag'] {tmp_path}/script.py __main__"
    assert index_file(tmp_path / "1").exists()

    done = run("-m", "script", tmp_path / "2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert index_file(tmp_path / "2").exists()


IN_BACKGROUND = """
import sys, threading, time, torch, torch.distributed.checkpoint as dcp

class Own: ...

class SlowPlanner(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        time.sleep(0.5)  # The script has ended.
        return super().resolve_data(write_item)

dcp.async_save({"own": Own()}, checkpoint_id=sys.argv[1], planner=SlowPlanner())
"""


@pytest.mark.parametrize("module", [[], ["-m"]])
def test_a_background_save_outlives_the_script(module: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_BACKGROUND)
    name = "script" if module else "script.py"
    done = run(*module, name, tmp_path / "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    assert (tmp_path / "1" / ".metadata").exists()


def test_the_run_command_ends_as_the_script_ends(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    failed = run("script.py", tmp_path / "1", "fail", cwd=tmp_path)
    assert failed.returncode == 1
    assert "KeyError: 'of the script'" in failed.stdout
    assert run("script.py", tmp_path / "1", "exit", cwd=tmp_path).returncode == 7
    absent = run("absent.py", cwd=tmp_path)
    assert absent.returncode == 3
    assert "torch-ckpt: " in absent.stdout
    assert "Traceback" not in absent.stdout


def test_the_run_command_passes_all_words_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv)")
    done = run("--no-verify", "script.py", "--", "-x", "--", "--timeout", cwd=tmp_path)
    assert done.stdout == "['script.py', '--', '-x', '--', '--timeout']\n"


INSTALL = """
import gc, sys, torch, torch_ckpt, torch.distributed.checkpoint as dcp
{install}
gc.collect()
with torch_ckpt.installed(): ...
dcp.save({{"w": torch.ones(3)}}, checkpoint_id=sys.argv[1])
"""


@pytest.mark.parametrize(
    "install",
    [
        "torch_ckpt.install()",
        "torch_ckpt.install(); torch_ckpt.install(verify=False)",
        "with torch_ckpt.installed(): torch_ckpt.install()",
    ],
)
def test_install_lasts_wherever_it_is_called(install: str, tmp_path: Path) -> None:
    code = INSTALL.format(install=install)
    done = run_python("-c", code, tmp_path / "step", folder=tmp_path)
    assert done.returncode == 0, done.stdout
    assert index_file(tmp_path / "step").exists()


def test_after_the_block_dcp_has_its_own_functions_again() -> None:
    def functions() -> list[Any]:
        owners = (state_dict_saver, state_dict_loader, format_utils, _storage_utils)
        bodies = [
            inspect.getclosurevars(function).nonlocals["func"]
            for function in (dcp.save, dcp.async_save, dcp.load)
        ]
        return [*(vars(owner).copy() for owner in owners), FileSystemWriter.stage, *bodies]

    before = functions()
    with torch_ckpt.installed(), torch_ckpt.installed():
        assert functions() != before
    assert functions() == before


def test_overlapping_blocks_leave_nothing_replaced() -> None:
    before = state_dict_saver._save_state_dict
    first, second = torch_ckpt.installed(), torch_ckpt.installed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert state_dict_saver._save_state_dict is not before
    second.__exit__(None, None, None)
    assert state_dict_saver._save_state_dict is before


def test_blocks_of_threads_that_overlap_end_without_an_error_and_leave_nothing_replaced() -> None:
    first, common = object(), object()  # Some replacements are the same in all blocks.
    owner, wrong = types.ModuleType("owner"), list[object]()
    owner.attribute = first  # type: ignore[attr-defined]

    def work() -> None:
        try:
            for turn in range(100):
                with replacing(owner, "attribute", object() if turn % 2 else common):
                    time.sleep(1e-4)  # Another thread begins or ends a block.
                    if owner.attribute is first:
                        wrong.append("a block has begun, and nothing is replaced")
        except BaseException as error:
            wrong.append(error)

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert wrong == []
    assert owner.attribute is first
    assert not any(at[0] is owner for at in PROCESS.replaced)


def test_one_replacement_in_nested_blocks_applies_until_the_outer_one_ends() -> None:
    owner, replacement = types.ModuleType("owner"), object()
    owner.attribute = 1  # type: ignore[attr-defined]
    with replacing(owner, "attribute", replacement):
        with replacing(owner, "attribute", replacement):
            pass
        assert owner.attribute is replacement
    assert owner.attribute == 1


def test_a_module_that_was_only_searched_is_noticed_when_it_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "searched_module.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    function = Mock()
    with after_import("searched_module", function):
        assert importlib.util.find_spec("searched_module") is not None
        function.assert_not_called()
        importlib.import_module("searched_module")
        function.assert_called_once()
    del sys.modules["searched_module"]


LIKE_PYTHON = """
import dataclasses, multiprocessing, sys

@dataclasses.dataclass
class Own:
    value: float

def make(value):
    return Own(value)

if __name__ == "__main__":
    assert dataclasses.fields(Own)[0].type is float
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print([type(each) is Own for each in pool.map(make, [1, 2])])
"""


def test_the_run_command_is_like_python(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LIKE_PYTHON)
    done = run("script.py", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "[True, True]"


def test_conversions_from_and_to_torch_save_are_replaced(
    state: dict[str, Any], used: list[Any], tmp_path: Path
) -> None:
    torch.save(state, tmp_path / "a.pt")
    with torch_ckpt.installed():
        format_utils.torch_save_to_dcp(tmp_path / "a.pt", tmp_path / "step")
        format_utils.dcp_to_torch_save(tmp_path / "step", tmp_path / "b.pt")
    assert differences(state, torch.load(tmp_path / "b.pt")) == []
    assert kinds(used) == ["FastSavePlanner", "FastWriter", "FastReader"]


@pytest.mark.parametrize("url", ["file://{}", "file:{}", "file://localhost{}"])
def test_a_file_url_is_a_local_path_for_every_function(
    url: str, state: dict[str, Any], tmp_path: Path
) -> None:
    for name, save in (("a", torch_ckpt.save), ("b", dcp.save)):
        with torch_ckpt.installed():
            save(state, checkpoint_id=url.format(tmp_path / name))
        assert index_file(tmp_path / name).exists()
        loaded = blank(state)
        dcp.load(loaded, storage_reader=FastReader(url.format(tmp_path / name)))
        assert differences(state, loaded) == []


def test_the_working_directory_can_be_the_checkpoint(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch_ckpt.installed():
        dcp.save(state, checkpoint_id=".")
        loaded = blank(state)
        dcp.load(loaded, checkpoint_id=".")
    assert differences(state, loaded) == []
    assert index_file(tmp_path).exists()


@pytest.mark.parametrize("function", ["save", "async_save", "load"])
@pytest.mark.parametrize("module", [dcp, torch_ckpt])
def test_a_store_without_support_is_an_error_and_never_left_to_stock(
    module: Any, function: str, state: dict[str, Any]
) -> None:
    with torch_ckpt.installed(), pytest.raises(UnsupportedError, match="nowhere://bucket"):
        getattr(module, function)(state, checkpoint_id="nowhere://bucket/step")


def test_a_url_within_a_path_is_an_error_and_no_local_directory(
    state: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch_ckpt.installed():
        for save in (dcp.save, dcp.async_save):
            with pytest.raises(UnsupportedError, match="pass the URL as a str"):
                save(state, storage_writer=FileSystemWriter("nowhere://bucket/step"))
            with pytest.raises(UnsupportedError, match="pass the URL as a str"):
                save(state, checkpoint_id=Path("nowhere://bucket/step"))
        with pytest.raises(UnsupportedError, match="pass the URL as a str"):
            dcp.load(state, storage_reader=FileSystemReader("nowhere://bucket/step"))
        with pytest.raises(UnsupportedError, match="another host"):
            dcp.save(state, checkpoint_id="file://host/step")
    assert list(tmp_path.iterdir()) == []
    dcp.save(state, storage_writer=FastWriter(tmp_path / "nowhere://bucket/step"))
    assert loads(tmp_path / "nowhere:" / "bucket" / "step", state) == []
