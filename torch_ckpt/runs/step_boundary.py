"""StepBoundary: whether the state in memory is that of a whole step, which can be saved."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ckpt.errors import CheckpointError

__all__ = ["StepBoundary"]


class StepBoundary:
    """The last completed step, and whether an optimizer has begun another step since.

    Example::

        boundary = StepBoundary()
        with boundary.watching_optimizers():
            train_step()
            boundary.step_ended(1)
    """

    def __init__(self) -> None:
        self.step: int | None = None
        """The last completed step."""
        self.stored: int | None = None
        """The step that this process last saved, began to save, or loaded."""
        self.is_on_disk = False
        """Whether this process has committed ``stored`` to disk."""
        self._begun = False

    def step_ended(self, step: int) -> None:
        self.went_back(step)
        self.step, self._begun = step, False

    def save_began(self, step: int) -> None:
        """Records that the state of a step is being saved."""
        self.stored, self.is_on_disk = step, False

    def committed(self, step: int) -> None:
        """Records that a step is on disk. It may be older than ``stored``."""
        self.is_on_disk = self.is_on_disk or self.stored == step

    def restored(self, step: int) -> None:
        """Records that the state in memory is that of a checkpoint."""
        self.step_ended(step)
        if self.stored != step:
            self.save_began(step)

    def went_back(self, step: int) -> None:
        """Records that newer steps no longer count: later steps with these numbers differ."""
        if self.stored is not None and self.stored > step:
            self.stored, self.is_on_disk = None, False

    @contextlib.contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Records when any optimizer of this process begins a step."""

        def begin(*_: object) -> None:
            self._begun = True

        hook = register_optimizer_step_pre_hook(begin)
        try:
            yield
        finally:
            hook.remove()

    def reason_not_to_save(self, error: BaseException) -> str | None:
        """Returns why nothing should be saved after an error; ``None`` to save the step."""
        if isinstance(error, CheckpointException | CheckpointError):
            return "nothing was saved after this error: the error is from a save or load"
        if self.step is None:
            return "nothing was saved after this error: no step had ended"
        if self._begun:
            return (
                "nothing was saved after this error: an optimizer had begun another step after "
                f"step {self.step}, so the parameters may be partly updated"
            )
        if self.step == self.stored:
            return f"step {self.step}, the last completed step, was saved before"
        return None
