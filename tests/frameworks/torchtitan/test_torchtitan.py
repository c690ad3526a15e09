"""Trainings of torchtitan save and resume through a run, by its configuration alone."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Worlds, on_ranks
from safetensors.torch import load_file
from states import assert_same
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torchtitan_runs import STEPS, Adapter, Training, steps_in

from torch_ckpt.errors import CheckpointError, CorruptionError
from torch_ckpt.storage.writer import FastWriter

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.framework("torchtitan", "spmd_types"),
]


@pytest.mark.parametrize("mode", ["disabled", "async", "async_with_pinned_mem"])
def test_a_training_resumes_bit_for_bit(worlds: Worlds, tmp_path: Path, mode: str) -> None:
    worlds.run(2, resume, tmp_path, mode)


def resume(path: Path, mode: str) -> None:
    whole = Training(path / "whole", async_mode=mode).train(STEPS, last=STEPS + 1)
    first = Training(path / "cut", async_mode=mode)
    first.train(5)  # Steps 2 and 4 are saved.
    again = Training(path / "cut", async_mode=mode, seed=7)
    assert_same(again.train(STEPS, last=STEPS + 1), whole)
    assert again.is_loaded
    assert not first.is_loaded
    assert steps_in(path / "cut") == steps_in(path / "whole") == ["step-2", "step-4", "step-6"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_training_resumes_on_another_number_of_ranks(
    worlds: Worlds, tmp_path: Path, ranks: int
) -> None:
    expected = worlds.run(2, train_and_return, tmp_path)[0]
    found = worlds.run(ranks, load_and_return, tmp_path)
    for each in found:
        assert_same(each, expected)


def train_and_return(path: Path) -> dict[str, Any]:
    return Training(path).train(4)


def load_and_return(path: Path) -> dict[str, Any]:
    training = Training(path, seed=7, exclude_from_loading=["dataloader"])
    assert training.load()
    assert training.data.dataset.position == 0
    return training.whole()


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("names", [("stock", "ours"), ("ours", "stock")], ids="-".join)
def test_torchtitans_own_manager_and_ours_resume_from_each_other(
    worlds: Worlds, tmp_path: Path, names: tuple[str, str], mode: str
) -> None:
    worlds.run(2, exchange, tmp_path, *names, mode)


def exchange(path: Path, saver: str, loader: str, mode: str) -> None:
    options: dict[str, Any] = {"async_mode": mode, "keep_latest_k": 0}
    whole = Training(path / "whole", manager="stock", **options).train(STEPS, last=STEPS + 1)
    training = Training(path / "cut", manager=saver, **options)
    training.train(4)
    training.checkpointer.maybe_wait_for_saving()  # The stock manager does not, at its end.
    dist.barrier()
    again = Training(path / "cut", manager=loader, seed=7, **options)
    assert_same(again.train(STEPS, last=STEPS + 1), whole)
    assert again.is_loaded
    again.checkpointer.maybe_wait_for_saving()


@on_ranks(2)
def test_the_newest_steps_are_retained(path: Path) -> None:
    Training(path, interval=1, keep_latest_k=2).train(5)
    dist.barrier()
    assert steps_in(path) == ["step-4", "step-5"]
    Training(path / "all", interval=1, keep_latest_k=0).train(5)
    dist.barrier()
    assert len(steps_in(path / "all")) == 5
    Training(path / "every", interval=1, keep_latest_k=2, run={"keep_every": 2}).train(5)
    dist.barrier()
    assert steps_in(path / "every") == ["step-2", "step-4", "step-5"]


@on_ranks(2)
def test_the_options_of_saves_and_loads_are_honoured(path: Path) -> None:
    Training(path, interval=4, enable_first_step_checkpoint=True).train(5)
    dist.barrier()
    assert steps_in(path) == ["step-1", "step-4"]
    chosen = Training(path, load_step=1, seed=7)
    assert chosen.load()
    assert chosen.step == 1
    with pytest.raises(FileNotFoundError, match=r"--checkpoint\.load_step=3 not found"):
        Training(path, load_step=3).load()
    with pytest.raises(FileNotFoundError, match=r"--checkpoint\.load_step=3 not found"):
        Training(path / "new", load_step=3).load()
    only = Training(path, load_only=True, interval=1, seed=7)
    only.train(STEPS)
    assert only.is_loaded
    dist.barrier()
    assert steps_in(path) == ["step-1", "step-4"]
    excluding = Training(path, exclude_from_loading=["lr_scheduler", "train_state"], seed=7)
    assert excluding.load()
    assert (excluding.step, excluding.schedules.state_dict()["last_epoch"]) == (0, 0)
    disabled = Training(path, enable=False, seed=7)
    assert not disabled.load()
    assert not disabled.checkpointer.save(2)


@on_ranks(2)
def test_the_last_save_has_the_model_alone_and_begins_another_training(path: Path) -> None:
    training = Training(path, interval=4, last_save_model_only=True, export_dtype="bfloat16")
    whole = training.train(STEPS)
    last = path / "checkpoint" / f"step-{STEPS}"
    names = FileSystemReader(last).read_metadata().state_dict_metadata
    assert names.keys() == training.model.state_dict().keys()
    assert all(each.properties.dtype == torch.bfloat16 for each in names.values())

    new = Training(path / "new", seed=7, initial_load_path=str(last), initial_load_model_only=True)
    before = new.optimizers.state_dict()
    assert new.load()
    assert new.step == 0
    assert_same(new.optimizers.state_dict(), before)
    for name, tensor in new.model.state_dict().items():
        assert torch.equal(tensor.full_tensor(), whole[name].bfloat16().float())

    full = Training(path / "full", seed=7, initial_load_path=str(last.with_name("step-4")))
    assert full.load()
    assert full.step == 4

    with pytest.raises(CheckpointException) as caught:  # There is no optimizer to resume.
        Training(path, seed=7).load()
    assert "Missing key" in str(caught.value)
    assert "checkpoint.last_save_model_only" in caught.value.__notes__[0]


@on_ranks(2)
def test_an_initial_checkpoint_is_left_once_there_is_a_step(path: Path) -> None:
    Training(path / "first").train(4)
    initial = str(path / "first/checkpoint/step-4")
    Training(path, initial_load_path=initial, seed=7).train(STEPS, last=STEPS + 1)
    again = Training(path, initial_load_path=str(path / "gone"), seed=8)
    assert again.load()
    assert again.step == STEPS
    for metadata in (path / "checkpoint").glob("*/.metadata"):
        metadata.write_bytes(b"")
    dist.barrier()
    with pytest.raises(CorruptionError, match="no committed step is whole"):
        Training(path, initial_load_path=initial).load()  # Training does not start over.
    with pytest.raises(CheckpointException, match="gone"):
        Training(path / "other", initial_load_path=str(path / "gone")).load()


def test_a_seed_is_loaded_on_any_ranks_without_its_other_state(
    worlds: Worlds, tmp_path: Path
) -> None:
    for path, model_only in ((tmp_path / "model", True), (tmp_path / "all", False)):
        seed = worlds.run(1, save_seed, path, model_only)[0]
        for each in worlds.run(2, load_seed, path):
            assert_same(each, seed)


def save_seed(path: Path, model_only: bool) -> dict[str, Any]:
    training = Training(path, create_seed_checkpoint=True, last_save_model_only=model_only)
    training.tokens = 5
    assert training.checkpointer.save(0, last_step=True)
    training.checkpointer.close()
    return {name: training.whole()[name] for name in training.model.state_dict()}


def load_seed(path: Path) -> dict[str, Any]:
    training = Training(path, seed=7)
    assert training.load()
    assert training.tokens == 0
    return {name: training.whole()[name] for name in training.model.state_dict()}


@on_ranks(2)
def test_models_of_hugging_face_are_stored_and_loaded_as_by_torchtitan(path: Path) -> None:
    mapping = {f"model.{name}": 1 + (name > "1") for name in Training(path).model.state_dict()}
    for where, numbers in (("one", None), ("two", mapping)):
        found = {}
        options: dict[str, Any] = {
            "last_save_model_only": True,
            "last_save_in_hf": True,
            "export_dtype": "bfloat16",
            "async_mode": "async",
        }
        for name in ("ours", "stock"):
            each = path / where / name
            Training(each, manager=name, adapter=Adapter(numbers), **options).train(STEPS)
            dist.barrier()
            folder = each / "checkpoint" / f"step-{STEPS}"
            files = sorted(folder.glob("*.safetensors"))
            found[name] = {file.name: load_file(file) for file in files}
            assert (folder / "model.safetensors.index.json").exists()
        assert_same(found["ours"], found["stock"])
        assert len(found["ours"]) == (1 if numbers is None else 2)

        adapter = Adapter(numbers)
        begin: dict[str, Any] = {
            "initial_load_in_hf": True,
            "initial_load_model_only": True,
            "initial_load_path": str(path / where / "stock/checkpoint" / f"step-{STEPS}"),
        }
        new = Training(path / where / "new", adapter=adapter, seed=7, **begin)
        assert new.load()
        stored = {k: v for file in found["stock"].values() for k, v in file.items()}
        for name, tensor in new.model.state_dict().items():
            assert torch.equal(tensor.full_tensor(), stored[f"model.{name}"].float())

        quantized = Training(
            path / where / "quantized",
            adapter=adapter,
            seed=8,
            **begin,
            initial_load_in_hf_quantized=True,
        )
        assert quantized.load()
        assert_same(quantized.model.state_dict(), new.model.state_dict())
        assert [getattr(reader, "reads", 0) for reader in adapter.readers] == [0, 1]

    resumed = Training(path / "one/ours", seed=7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert resumed.load()
    if dist.get_rank() == 0:
        assert any("has a model of Hugging Face" in str(each.message) for each in caught)
    assert resumed.step == STEPS - 2


@on_ranks(2)
def test_a_save_in_the_background_is_waited_for(path: Path) -> None:
    training = Training(path, async_mode="async")
    manager = training.checkpointer
    goes_on = threading.Event()
    commit = FastWriter.finish

    def finish(*arguments: Any, **options: Any) -> Any:
        assert goes_on.wait(60)
        return commit(*arguments, **options)

    FastWriter.finish = finish  # type: ignore[method-assign]
    try:
        assert manager.save(2)
        assert steps_in(path) == []
        goes_on.set()
        manager.maybe_wait_for_saving()
    finally:
        FastWriter.finish = commit  # type: ignore[method-assign]
    dist.barrier()
    assert steps_in(path) == ["step-2"]

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    FastWriter.finish = fail  # type: ignore[method-assign]
    try:
        assert manager.save(4)
        with pytest.raises(CheckpointError, match="step 4 was not saved"):
            manager.maybe_wait_for_saving()
    finally:
        FastWriter.finish = commit  # type: ignore[method-assign]
    manager.maybe_wait_for_saving()
    assert manager.save(STEPS, last_step=True)
    assert (path / f"checkpoint/step-{STEPS}/.metadata").exists()
    manager.close()


@on_ranks(2)
def test_the_last_step_is_saved_while_another_save_is_in_progress(path: Path) -> None:
    manager = Training(path, async_mode="async", run={"on_busy": "skip"}).checkpointer
    goes_on = threading.Event()
    commit = FastWriter.finish

    def finish(*arguments: Any, **options: Any) -> Any:
        assert goes_on.wait(60)
        return commit(*arguments, **options)

    FastWriter.finish = finish  # type: ignore[method-assign]
    try:
        assert manager.save(2)
        assert not manager.save(4)
        threading.Timer(0.3, goes_on.set).start()
        assert manager.save(STEPS, last_step=True)
    finally:
        FastWriter.finish = commit  # type: ignore[method-assign]
    dist.barrier()
    assert steps_in(path) == ["step-2", f"step-{STEPS}"]
    manager.close()
