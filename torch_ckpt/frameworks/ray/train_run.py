"""RayTrainRun: a run whose steps are the checkpoints of a Ray Train run, without a copy."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray.train
import torch.distributed as dist
from ray.train import Checkpoint, CheckpointConsistencyMode, CheckpointUploadMode

from torch_ckpt.coordination.exclusive import exclusive
from torch_ckpt.errors import StorageError, UnsupportedError
from torch_ckpt.ladder.step_files import committed_steps, metrics_of
from torch_ckpt.runs.run import Run
from torch_ckpt.runs.spacing import Spacing

__all__ = ["RayTrainRun"]

T = TypeVar("T")

_SCHEMES = {"local": "", "s3": "s3://", "gcs": "gs://"}
"""Prefixes of URLs by the names of PyArrow's file systems."""

_METADATA = ".metadata"

_LOG = logging.getLogger("torch_ckpt")


class RayTrainRun(Run):
    """The :class:`Run` of a ``train_loop_per_worker``, in the directory of the Ray Train run.

    Step 100 is ``<storage_path>/<name>/step-100``. Once it is committed there, ``save`` reports it
    to Ray as a checkpoint with ``CheckpointUploadMode.NO_UPLOAD``, so Ray copies nothing. A step
    that is saved in the background, or promoted from ``local``, is reported by a later ``save`` or
    by ``close``. Steps are always reported in order. A step that was committed before a crash, but
    not reported, is reported after the restart.

    Only Ray removes steps, as ``CheckpointConfig(num_to_keep=...)`` requires. The options of
    :class:`Run` for retention are errors, because Ray does not start a run whose reported
    checkpoints were removed.

    If Ray announces the preemption of a node, ``should_save`` returns ``True`` until a step is
    saved. That ``save`` waits until the step is in the directory of the run, and reports it. If the
    node will not live long enough, a later call reports the step.

    All workers must make the same calls, also of ``close``. ``restore`` loads the newest whole
    step, reported or not, on any number of workers.

    Args:
        **options: Options of :class:`Run`, except ``keep_last``, ``keep_every``, ``keep_for``,
            ``keep_best`` and ``process_group``.

    Raises:
        RuntimeError: This process is not a worker of Ray Train.
        UnsupportedError: An option is not supported, PyArrow's file system has no URL that this
            package knows, there are no workers (``num_workers=0``), or the ranks of
            ``torch.distributed`` are not the workers.

    Example::

        def train_loop_per_worker(config):
            with RayTrainRun(asynchronous=True) as run:
                start = run.restore(state) or 0
                for step in range(start + 1, config["steps"] + 1):
                    train_step()
                    if run.should_save(step) or step == config["steps"]:
                        run.save(step, state, metrics={"loss": loss})
    """

    def __init__(self, **options: Any) -> None:
        names = ("keep_last", "keep_every", "keep_for", "keep_best", "process_group")
        if refused := [name for name in names if options.get(name) is not None]:
            raise UnsupportedError(
                f"cannot use {', '.join(refused)} with Ray Train: all workers save, and Ray "
                "removes steps. Pass RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=...))"
            )
        context = ray.train.get_context()
        try:
            self._storage: Any = context.get_storage()
        except NotImplementedError as error:
            raise UnsupportedError("ScalingConfig(num_workers=0) has no storage: pass 1") from error
        workers, ranks = context.get_world_size(), 1
        if dist.is_initialized():
            ranks = dist.get_world_size()
        if workers != ranks:
            raise UnsupportedError(
                f"torch.distributed has {ranks} ranks, and Ray Train {workers} workers: start the "
                "workers by ray.train.torch.TorchTrainer"
            )
        scheme = _SCHEMES.get(self._storage.storage_filesystem.type_name)
        if scheme is None:
            raise UnsupportedError(
                f"cannot save to a file system of type {self._storage.storage_filesystem.type_name}"
                ": pass a storage_path that is a path, or begins with s3:// or gs://"
            )
        super().__init__(f"{scheme}{self._storage.experiment_fs_path}", **options)
        self._is_preempted = self._is_urgent = self._has_failed = False
        self._deadline = math.inf  # When a node will be preempted, by the monotonic clock.
        self._last: int | None = None  # The step that was saved last, perhaps in the background.
        self._spacing = Spacing()
        # No path is reported twice: Ray would remove it together with its first report.
        self._reported: set[int]
        self._unreported: set[int]
        self._reported, self._unreported = self._decided("asking Ray for checkpoints", self._find)

    def should_save(self, step: int) -> bool:
        """Returns whether to save now; see :meth:`Run.should_save`.

        About once per second, with at most 16 steps in between, all workers ask Ray whether a node
        is being preempted. All of them must call the method after every step.
        """
        if not self._is_preempted and self._spacing.is_due(step):
            with self._exclusive.use("check for a preemption", self.timeout_s):
                info = ray.train.get_preemption_info()
                steps, is_preempted, left_s = self._decided(
                    "checking for a preemption",
                    lambda: (self._spacing.steps(step), info is not None, _left_s(info)),
                )
                self._is_preempted = self._is_urgent = is_preempted  # The same on all workers.
                self._spacing.checked(step, steps)
                self._deadline = time.monotonic() + left_s
        return super().should_save(step) or self._is_urgent

    def save(
        self,
        step: int,
        state: dict[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        persist: bool = True,
    ) -> bool:
        """Saves a step, and reports all steps to Ray that are committed and not reported yet.

        The arguments, the result and the errors are those of :meth:`Run.save`. Ray gets the metrics
        of a step with its checkpoint, as they are stored with it.
        """
        with self._group.method("save and report a step", self.timeout_s):
            saved = super().save(step, state, metrics=metrics, persist=persist)
            if saved and persist:
                self._last = step
                if step not in self._reported:
                    self._unreported.add(step)
                if self._is_urgent:
                    self._is_urgent = False
                    self._promote_in_time(step)
            self._report()
        return saved

    def restore(
        self, state: dict[str, Any], *, step: int | None = None, strict: bool | None = None
    ) -> int | None:
        """Loads the newest whole step, or a given step, in place; see :meth:`Run.restore`."""
        found = super().restore(state, step=step, strict=strict)
        newest = -1 if found is None else found  # Newer ones are damaged, or will be saved again.
        self._unreported = {each for each in self._unreported if each <= newest}
        if found is not None and found not in self._reported:
            self._unreported.add(found)  # Perhaps it is only in the memory of the agent.
        return found

    def discard_after(self, step: int) -> list[int]:
        """Raises UnsupportedError: Ray would refuse to start a run that lacks checkpoints."""
        raise UnsupportedError(
            f"cannot discard the steps after {step}, because Ray Train does not start a run whose "
            "reported checkpoints are gone: begin another run with RunConfig(name=...)"
        )

    def close(self) -> None:
        """Waits until all steps are in the directory of the run, reports them, and ends the run.

        All workers call the method, unless the block of the run has raised an error.

        Raises:
            CheckpointError: The background save or a promotion failed; see :meth:`Run.wait`.
        """
        try:
            if not (self._closed or self._has_failed or self._exclusive.is_forked):
                self.wait(promoted=True)
                self._report()
        finally:
            super().close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._has_failed = error is not None  # The other workers may not report.
        super().__exit__(kind, error, trace)

    def _decided(self, what: str, decide: Callable[[], T]) -> T:
        """Returns on all workers what a function returns on the first."""
        return self._group.decide(what, lambda: None, lambda _: decide(), timeout_s=self.timeout_s)

    @exclusive("wait for promotion")
    def _promote_in_time(self, step: int) -> None:
        """Waits until a step is in the directory of the run, or a node is about to be lost."""
        left_s = max(min(self._deadline - time.monotonic(), self.timeout_s), 0.1)
        is_in_run = self._saves.wait_for_promotion(left_s, must_end=False)
        if not is_in_run and self._group.is_coordinator:
            _LOG.warning(
                "step %d is not in %s yet, and a node is about to be preempted: it will be "
                "reported to Ray Train once it is there",
                *(step, self.directory),
            )

    @exclusive("report steps to Ray Train")
    def _report(self) -> None:
        """Reports the committed steps, on all workers."""
        finished, failed = self._decided("finding committed steps", self._finished)
        self._unreported.difference_update(finished, failed)
        for step, metrics in finished.items():
            checkpoint = Checkpoint(
                f"{self._storage.experiment_fs_path}/step-{step}",
                filesystem=self._storage.storage_filesystem,
            )
            self._reported.add(step)
            ray.train.report(
                metrics,
                checkpoint=checkpoint,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )

    # ---- On the coordinator ----

    def _find(self) -> tuple[set[int], set[int]]:
        """Returns the steps that Ray knows, and the committed steps after them."""
        reported = ray.train.get_all_reported_checkpoints(
            CheckpointConsistencyMode.COMMITTED, timeout_s=self.timeout_s
        )
        found = (re.search(r"/step-(\d+)$", each.checkpoint.path) for each in reported)
        known = {int(match[1]) for match in found if match}
        newest = max(known, default=-1)
        return known, {
            step
            for disk in self._disks
            for step in committed_steps(disk.directory)
            if step > newest
        }

    def _finished(self) -> tuple[dict[int, dict[str, float]], list[int]]:
        """Returns the metrics of unreported steps that are committed, and the steps that are not.

        Ray takes the last reported step for the newest, so a step waits for all older steps. A step
        that is saved again waits for its new save, even if its older save is committed.
        """
        finished: dict[int, dict[str, float]] = {}
        failed: list[int] = []
        *local, run = (disk.path for disk in self._disks)
        with contextlib.suppress(StorageError):  # A later call finds them.
            for step in sorted(self._unreported):
                is_last = step == self._last
                if (is_last and self._saves.is_busy) or (
                    self._promotion.is_awaited(step)
                    and any((path(step) / _METADATA).exists() for path in local)
                ):
                    break
                if (run(step) / _METADATA).exists():
                    finished[step] = metrics_of(run(step))
                elif is_last:
                    break  # The next save knows the error.
                else:
                    failed.append(step)
        return finished, failed


def _left_s(info: Any) -> float:
    """Returns the seconds until the first node of Ray's preemption info is lost."""
    if info is None or info.deadline_ms is None:
        return math.inf
    return float(info.deadline_ms) / 1000 - time.time()
