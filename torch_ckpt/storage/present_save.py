"""PresentSave: what a writer knows of the save that is in progress, or was the last one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch_ckpt.commits.transaction import Transaction
from torch_ckpt.planning.item_views import GlobalPlanEntry
from torch_ckpt.storage.progress import Phases

__all__ = ["PresentSave"]


@dataclass
class PresentSave:
    """What a writer knows of its present save, on one rank.

    Attributes:
        commits: Whether this rank commits it.
        ranks: Number of ranks that save together; 0 except on the coordinator.
        phases: Times of the phases, which are logged at the end.
        transaction: Makes the files of the save appear. ``None`` until it is needed.
        plan: On the coordinator, if all ranks have planned in columns.
        call: Returns the call that saves, if it lives; ``None`` within DCP's own functions.
    """

    commits: bool = False
    ranks: int = 0
    phases: Phases = field(default_factory=lambda: Phases("planning"))
    transaction: Transaction | None = None
    plan: GlobalPlanEntry | None = None
    call: Callable[[], object] | None = None
