"""Saves by an agent that some ranks do not complete: they fail once all ranks have agreed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from torch_ckpt import CheckpointError
from torch_ckpt.agent import SnapshotAgent
from torch_ckpt.agent.client import AgentClient
from torch_ckpt.agent.trainer import StagedSave

__all__ = ["before_slot", "stage_on"]


def stage_on(
    ranks: Collection[int],
    agent: SnapshotAgent,
    state: dict[str, Any],
    path: str | Path,
    *,
    silently: bool = True,
    **options: Any,
) -> StagedSave | None:
    """Stages; only these ranks fill a slot, and the others return ``None``.

    Args:
        ranks: Those that do.
        agent: Of this rank.
        state: What it holds.
        path: Where the save goes to.
        silently: Whether the agents of other ranks hear nothing of that.
        **options: Of ``SnapshotAgent.stage``.
    """
    if dist.get_rank() in ranks:
        staged = agent.stage(state, path, **options)
        assert staged is not None
        return staged

    def fail() -> None:
        raise CheckpointError("this rank fills no slot")

    with contextlib.ExitStack() as stack:
        stack.enter_context(before_slot(fail))
        if silently:
            stack.enter_context(mock.patch.object(AgentClient, "abort"))
        stack.enter_context(pytest.raises(CheckpointError, match="fills no slot"))
        agent.stage(state, path, **options)
    return None


@contextlib.contextmanager
def before_slot(then: Callable[[], None]) -> Iterator[None]:
    """Within the block, this is called when ranks have agreed, before this one asks for a slot."""
    acquire = AgentClient.acquire

    def then_acquire(client: AgentClient, *arguments: Any) -> Any:
        then()
        return acquire(client, *arguments)

    with mock.patch.object(AgentClient, "acquire", then_acquire):
        yield
