"""Finds the place of a rank: its run, its session, and the machines of all ranks."""

from __future__ import annotations

import os
import secrets
import time

from torch_ckpt.agent.client import Place
from torch_ckpt.agent.identity import RunId, begun_id, id_in_memory
from torch_ckpt.agent.memory import complete_slots, folder_of, open_folder, run_of
from torch_ckpt.coordination.addresses import this_machine
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location

__all__ = ["find_place"]

_Facts = tuple[bytes, bytes, str, RunId | None]
"""What a rank reports at its start: run, session, machine, and the id of the run in its memory."""


def find_place(
    run: str | os.PathLike[str], group: Group, timeout_s: float, directory: Location | None
) -> Place:
    """Returns the identity of this rank; all ranks call this function.

    If the run has a directory, it has an id.
    """
    name, rank = run_of(run), group.rank

    def own() -> _Facts:
        # Containers on one machine may have separate tmpfs. The parent folder identifies the tmpfs,
        # because an ending agent removes the folder of the run.
        folder = open_folder(name)
        memory = folder.parent.stat()
        machine = f"{this_machine()} {memory.st_dev} {memory.st_ino}"
        return name, _new_session(name), machine, id_in_memory(folder)

    def agree(facts: list[_Facts]) -> tuple[list[_Facts], RunId | None]:
        in_memory = [fact[3] for fact in facts]
        return facts, None if directory is None else begun_id(in_memory, directory)

    facts, run_id = group.decide("starting the agent", own, agree, timeout_s=timeout_s)
    names, sessions, machines, _ = zip(*facts, strict=True)
    if len(set(names)) != 1:
        raise CheckpointError(
            f"cannot start the agent: ranks name different runs, {os.fspath(run)!r} on this rank"
        )
    nodes = list(dict.fromkeys(machines))
    here = [other for other in range(group.size) if machines[other] == machines[rank]]
    node = nodes.index(machines[rank])
    return Place(name, max(sessions), rank, group.size, node, len(nodes), here, run_id)


def _new_session(run: bytes) -> bytes:
    """Returns a session later than all sessions in memory, whatever the clocks are."""
    sessions = [header.session for header, _ in complete_slots(folder_of(run), run)]
    since = int.from_bytes(max(sessions, default=b"")[:8], "big") + 1
    return max(time.time_ns(), since).to_bytes(8, "big") + secrets.token_bytes(8)
