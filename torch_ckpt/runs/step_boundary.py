"""Whether what is in memory is the state of a whole step, and may be saved when training raises."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.distributed.checkpoint.api import CheckpointException
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torch_ckpt.errors import CheckpointError

__all__ = ["StepBoundary"]


class StepBoundary:
    """The end of the last step, and whether an optimizer has begun another since.

    Example::

        boundary = StepBoundary()
        with boundary.watching_optimizers():
            train_step()
            boundary.passed(1)
    """

    def __init__(self) -> None:
        self.step: int | None = None
        """That which has ended last."""
        self.stored: int | None = None
        """The one that this process has saved, begun to save or loaded last."""
        self._begun = False

    def passed(self, step: int) -> None:
        """Called when a step has ended."""
        self.step, self._begun = step, False

    def at_stored(self, step: int) -> None:
        """Called when the state in memory is that of a checkpoint."""
        self.passed(step)
        self.stored = step

    @contextlib.contextmanager
    def watching_optimizers(self) -> Iterator[None]:
        """Notes when any optimizer of this process begins a step."""

        def begins(*_: object) -> None:
            self._begun = True

        hook = register_optimizer_step_pre_hook(begins)
        try:
            yield
        finally:
            hook.remove()

    def reason_not_to_save(self, error: BaseException) -> str | None:
        """Why nothing should be saved after an error; ``None`` if the step should be."""
        if isinstance(error, CheckpointException | CheckpointError):
            return "nothing was saved after it: it came from a save or load"
        if self.step is None:
            return "nothing was saved after it: no step had ended"
        if self._begun:
            return (
                f"nothing was saved after it: an optimizer had begun another step after step "
                f"{self.step}, so the parameters may be of neither"
            )
        if self.step == self.stored:
            return f"step {self.step}, the last one, had been saved before"
        return None
