"""``attach``: the saves and loads of a DeepSpeed engine go through this package."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from torch_ckpt.coordination.background import BackgroundFuture, BackgroundThread
from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S, Call, group_of
from torch_ckpt.coordination.portable import first_error, why
from torch_ckpt.coordination.waiting import no_thread
from torch_ckpt.errors import CheckpointError, UnsupportedError
from torch_ckpt.frameworks.deepspeed.engine_checkpoint import DeepSpeedCheckpoint
from torch_ckpt.options import IoOptions
from torch_ckpt.staging.live_state import FileStager, live_state
from torch_ckpt.staging.staged import Staged

__all__ = ["FastCheckpointEngine", "attach"]

_LOG = logging.getLogger("torch_ckpt")


class FastCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """A checkpoint engine for DeepSpeed. :func:`attach` installs it in an engine.

    Args:
        asynchronous: As in :func:`attach`.
        io: As in :func:`attach`.
        timeout_s: As in :func:`attach`.
    """

    def __init__(
        self,
        *,
        asynchronous: bool = False,
        io: IoOptions | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__()
        self.name = "torch_ckpt"
        self.asynchronous = asynchronous
        self.io = io or IoOptions()
        self.timeout_s = timeout_s
        self._group = group_of(None).series()
        self._checkpoint: DeepSpeedCheckpoint | None = None
        self._has_begun = False  # Whether the present save has begun a checkpoint.
        self._load: Call | None = None  # The present load, until a rank has failed.
        self._pending: BackgroundFuture[None] | None = None
        self._stagers: dict[str, FileStager] = {}  # By the name of the file in the folder.

    def wait(self) -> None:
        """Waits for the background save.

        Raises:
            Exception: The save failed on a rank. All ranks raise its error, once.
        """
        pending = self._pending
        if pending is None:
            return
        try:
            pending.result()
        finally:
            if pending.done():
                self._pending = None

    def check_arguments(self, save_dir: Any) -> None:
        """Refuses an unusable ``save_dir``, on all ranks even if only one passed it.

        Args:
            save_dir: The directory.

        Raises:
            UnsupportedError: It is a URL.
            ValueError: It is empty.
        """
        own = functools.partial(_refuse, save_dir)
        self._group.decide("checking arguments", own, lambda _: None, timeout_s=self.timeout_s)

    # ---- The interface of DeepSpeed ----

    def create(self, info: CheckpointCommitInfo) -> None:
        """Begins a checkpoint on all ranks, after the previous one has ended.

        Args:
            info: The checkpoint.

        Raises:
            CheckpointError: The background save before this one failed.
        """
        self.abandon(CheckpointError("a checkpoint was begun, and never committed"))
        self.wait()
        self._has_begun = True
        self._checkpoint = DeepSpeedCheckpoint(
            self._group,
            *(info.save_dir, info.tag, info.save_latest),
            io=self.io,
            timeout_s=self.timeout_s,
            niceness=self.io.background_nice if self.asynchronous else 0,
        )

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: :meth:`create` and :meth:`save` make the directories.

        DeepSpeed calls it on one rank only, and an error there would leave the others waiting.

        Args:
            path: The directory.
            exist_ok: Whether it may exist.
        """

    def save(self, state_dict: Any, path: str) -> None:
        """Writes a file, or copies its tensors if saves are asynchronous.

        An error is raised by :meth:`agree`, on all ranks.

        Args:
            state_dict: Content of the file.
            path: The file.

        Raises:
            CheckpointError: :meth:`create` was not called.
        """
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise CheckpointError(f"cannot save {path}: no checkpoint was begun")

        def prepare() -> tuple[Any, Staged | None]:
            live = None if self.asynchronous else live_state(state_dict)
            if live is not None:
                return live, None
            stager = FileStager()  # Cached only for files whose names recur.
            if checkpoint.has(path):
                stager = self._stagers.setdefault(os.path.basename(path), stager)
            return stager.begin(state_dict, name=f"the snapshot of {path}")

        checkpoint.write(path, prepare)

    def commit(self, info: CheckpointCommitInfo | None = None) -> bool:
        """Commits the checkpoint that was begun; in the background if saves are asynchronous.

        All ranks call it.

        Args:
            info: Not used.

        Returns:
            ``True``.

        Raises:
            CheckpointError: A rank failed; or no checkpoint was begun.
        """
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            raise CheckpointError("cannot commit: no checkpoint was begun")
        if not self.asynchronous:
            checkpoint.finish()
        else:
            self._pending = _finish_in_background(checkpoint)
        return True

    def agree(self, error: Exception | None = None) -> None:
        """Raises the error of the first rank that has failed in the present save, on all ranks.

        Args:
            error: The error of this rank, in code of DeepSpeed.
        """
        if self._checkpoint is None:
            return
        try:
            self._checkpoint.agree(error)
        except BaseException:
            self._checkpoint = None
            raise

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """If the block, a save of DeepSpeed, raises, all other ranks raise the error, too."""
        self._has_begun = False
        try:
            yield
        except BaseException as error:
            if self._checkpoint is not None and isinstance(error, Exception):
                with contextlib.suppress(Exception):
                    self.agree(error)
            elif not self._has_begun:  # The other ranks are in `create`, or will call it.
                self._group.call(self.timeout_s).fail(error)
            self.abandon(error)
            raise

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Raises the error of the first rank that fails in the block, a load, on all ranks.

        When a rank fails, some ranks may be in :meth:`agree_on_load`, and others at the end of the
        block.
        """
        self._load = self._group.call(self.timeout_s)
        try:
            yield
            self.agree_on_load("its end")
        except BaseException as error:
            if self._load is not None and isinstance(error, Exception):
                with contextlib.suppress(Exception):
                    self.agree_on_load("an error", error)
            elif self._load is not None:
                self._load.fail(error)
            raise
        finally:
            self._load = None

    def agree_on_load(self, place: str, error: Exception | None = None) -> None:
        """Raises the error of the first rank that has failed in the present load, on all ranks.

        Does nothing between loads.

        Args:
            place: The next step of the load. It must be the same on all ranks.
            error: The error of this rank.

        Raises:
            CheckpointError: DeepSpeed has loaded a checkpoint on some ranks only.
        """
        call = self._load
        if call is None:
            return

        def own() -> str:
            if error is not None:
                raise error
            return place

        try:
            with call, first_error("in a load of DeepSpeed"):
                call.all_reduce("loading", own, _check_same)
        except BaseException:
            self._load = None
            raise

    def abandon(self, error: BaseException) -> None:
        """Ends a checkpoint that was begun and not committed, on all ranks.

        Args:
            error: The reason.
        """
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            checkpoint.abandon(error)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Loads a file, after the end of the background save.

        Args:
            path: The file.
            map_location: As in ``torch.load``.

        Returns:
            The content of the file.

        Raises:
            CheckpointError: The background save failed.
        """
        self.wait()
        try:
            return torch.load(path, map_location=map_location, weights_only=False)
        except Exception as error:
            error.add_note(f"raised by torch.load of {path}")
            raise

    def is_decoupled(self) -> bool:
        """Returns ``True``, so that DeepSpeed neither commits nor writes ``latest`` itself.

        DeepSpeed itself would truncate the file before writing it. It also calls :meth:`cleanup`
        only then, when an engine is destroyed.

        DeepSpeed calls this in each save, just before its last barrier. So failed ranks are
        detected here: they never enter the barrier, in which the others would wait for them.
        """
        self.agree()
        return True

    def get_commit_info(self) -> None:
        """Returns ``None``, so that DeepSpeed commits nothing at the next step."""
        return

    def preserves_storage_sharing(self) -> bool:
        """Returns ``False``: views are stored without the rest of their storage.

        So DeepSpeed need not clone them.
        """
        return False

    def cleanup(self) -> None:
        """Waits for the background save, and releases the staging memory.

        An error is also logged, because DeepSpeed drops it when Python destroys the engine.

        Raises:
            Exception: The background save failed.
        """
        try:
            self.wait()
        except Exception as error:
            _LOG.error("a background save of DeepSpeed failed: %s", why(error))
            raise
        finally:
            stagers, self._stagers = self._stagers, {}
            for stager in stagers.values():
                stager.close()


def attach(
    engine: Any,
    *,
    asynchronous: bool = False,
    io: IoOptions | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> FastCheckpointEngine:
    """Lets a DeepSpeed engine save and load its checkpoints through this package.

    All ranks must call it, after ``deepspeed.initialize``. The arguments of
    ``engine.save_checkpoint``, ``load_checkpoint`` and ``save_16bit_model`` do not change, nor do
    the names and the format of files, so all tools of DeepSpeed can read them. All ZeRO stages,
    experts, tensor parallelism and pipeline stages are supported.

    A save returns once the files of all ranks are durable and the checkpoint is committed: from
    then on, ``latest`` names it. Until then, the folder has a hidden name. An older folder with the
    same tag is replaced as a whole. If one rank fails, all ranks raise its error.

    Args:
        engine: The engine.
        asynchronous: Whether training continues as soon as the tensors are copied into host memory.
            A thread writes and commits them. The next save or load, ``wait`` and
            ``engine.destroy()`` wait for this save, and raise its error.
        io: Memory budgets and I/O modes.
        timeout_s: Deadline of each exchange between ranks, in seconds.

    Returns:
        The checkpoint engine, which is ``engine.checkpoint_engine`` from now on.

    Raises:
        UnsupportedError: DeepSpeed is configured with another checkpoint engine, or with
            ``use_node_local_storage``.

    Example::

        engine, *_ = deepspeed.initialize(model=model, config=config)
        checkpoints = attach(engine, asynchronous=True)
        engine.save_checkpoint("run")  # Returns after the copy.
        checkpoints.wait()
    """
    if not isinstance(engine.checkpoint_engine, TorchCheckpointEngine):
        name = type(engine.checkpoint_engine).__name__
        raise UnsupportedError(
            f"cannot attach to an engine that saves with {name}: remove checkpoint.writer and "
            "datastates_ckpt from its configuration, and attach once"
        )
    if engine.use_node_local_storage():
        raise UnsupportedError(
            "cannot attach to an engine with use_node_local_storage: all ranks commit one folder"
        )
    ours = FastCheckpointEngine(asynchronous=asynchronous, io=io, timeout_s=timeout_s)
    engine.checkpoint_engine = ours
    # Weak: otherwise only the garbage collector would destroy the engine.
    save, save_model, load = (
        weakref.WeakMethod(method)
        for method in (engine.save_checkpoint, engine.save_16bit_model, engine.load_checkpoint)
    )

    def save_checkpoint(save_dir: Any, *arguments: Any, **options: Any) -> Any:
        ours.check_arguments(save_dir)
        with ours.saving():
            result = _method(save)(save_dir, *arguments, **options)
            ours.commit()
        return result

    def save_16bit_model(save_dir: Any, *arguments: Any, **options: Any) -> Any:
        ours.check_arguments(save_dir)
        with ours.saving():
            return _method(save_model)(save_dir, *arguments, **options)

    def load_checkpoint(*arguments: Any, **options: Any) -> Any:
        ours.wait()  # Before DeepSpeed reads `latest`.
        with ours.loading():
            return _method(load)(*arguments, **options)

    # transformers inspects the names of the arguments.
    for method, replacement in (
        (save, save_checkpoint),
        (save_model, save_16bit_model),
        (load, load_checkpoint),
    ):
        replacement.__signature__ = inspect.signature(_method(method))  # type: ignore[attr-defined]
        setattr(engine, replacement.__name__, replacement)
    optimizer: Any = getattr(engine, "optimizer", None)
    for owner, name in (
        (engine, "load_module_state_dict"),
        (optimizer, "_redistribute_unpadded_partition"),  # In ZeRO-1 and 2.
        (optimizer, "update_lp_params"),
        (optimizer, "checkpoint_event_epilogue"),  # In ZeRO-3, also in saves.
    ):
        if hasattr(owner, name):
            setattr(owner, name, _before_collectives(ours, name, getattr(owner, name)))
    return ours


def _before_collectives(
    ours: FastCheckpointEngine, name: str, method: Callable[..., Any]
) -> Callable[..., Any]:
    """Returns a method of DeepSpeed with collectives, entered only if no rank has failed."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any, **options: Any) -> Any:
        ours.agree()
        ours.agree_on_load(name)
        return _method(reference)(*arguments, **options)

    return call


def _check_same(places: list[str]) -> None:
    for rank, place in enumerate(places):
        if place != places[0]:
            raise CheckpointError(
                f"load_checkpoint of DeepSpeed is at {places[0]} on rank 0, and at {place} on rank "
                f"{rank}: perhaps only some ranks have found a checkpoint"
            )


def _refuse(save_dir: Any) -> None:
    if not save_dir:
        raise ValueError(f"save_dir must be a non-empty string, got {save_dir!r}")
    if "://" in str(save_dir):
        raise UnsupportedError(
            f"cannot save to {save_dir}: DeepSpeed would take this URL for a relative path; pass "
            "the path of a directory"
        )


def _method(reference: weakref.WeakMethod[Callable[..., Any]]) -> Callable[..., Any]:
    method = reference()
    if method is None:
        raise CheckpointError("the engine of DeepSpeed is gone")
    return method


def _finish_in_background(checkpoint: DeepSpeedCheckpoint) -> BackgroundFuture[None]:
    name, call = str(checkpoint.folder), checkpoint.call
    future: BackgroundFuture[None] = BackgroundFuture(
        f"the checkpoint {name} of DeepSpeed was not saved",
        lambda: f"the background save of {name}: {call.progress()}",
        is_named=call.group.is_coordinator,
    )

    def finish() -> None:
        try:
            checkpoint.finish()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)

    try:
        BackgroundThread(target=finish, name="torch_ckpt-save").start()
    except RuntimeError as error:
        failure = no_thread(str(error))
        checkpoint.abandon(failure)
        future.set_exception(failure)
    return future
