"""Start-up of the ranks of a run: determines their machines, and connects them to agents."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Sequence
from itertools import chain

from torch_ckpt.agent.client import AgentClient, Member
from torch_ckpt.agent.identity import RunId, begun_id, id_in_directory, id_in_memory
from torch_ckpt.agent.memory import Save, complete_slots, folder_of, open_folder, run_of
from torch_ckpt.agent.slot_reports import MachineSlots, machine_slots, orphans_among
from torch_ckpt.coordination.addresses import this_machine
from torch_ckpt.coordination.group import Group
from torch_ckpt.errors import CheckpointError, StorageError
from torch_ckpt.filesystems.location import Location

__all__ = ["connect_all", "find_member"]

_Facts = tuple[bytes, bytes, str, RunId | None]
"""What a rank reports when it starts: run, session, machine, and the id of the run in memory."""


def find_member(
    run: str | os.PathLike[str],
    group: Group,
    timeout_s: float,
    directory: Location | None,
    *,
    only_reads: bool = False,
) -> Member:
    """Returns the identity of this rank; all ranks call this function.

    A run with a directory also has an id. Raises StorageError if this rank cannot use its shared
    memory. A caller that ``only_reads`` gets a member without memory instead, and without an id if
    the directory has none.
    """
    name, rank = run_of(run), group.rank

    def own() -> tuple[_Facts, Sequence[MachineSlots]]:
        try:
            folder = open_folder(name)
        except StorageError:
            if not only_reads:
                raise
            return (name, bytes(16), f"{this_machine()} without memory", None), ()
        # Containers on one machine may have separate tmpfs. The parent folder identifies the tmpfs,
        # because an ending agent removes the folder of the run.
        memory = folder.parent.stat()
        machine = f"{this_machine()} {memory.st_dev} {memory.st_ino}"
        facts = name, _new_session(name), machine, id_in_memory(folder)
        return facts, machine_slots(folder, name)

    def agree(
        answers: list[tuple[_Facts, Sequence[MachineSlots]]],
    ) -> tuple[list[_Facts], RunId | None, list[Save]]:
        facts = [fact for fact, _ in answers]
        if directory is None:
            run_id = None
        elif only_reads:
            found = id_in_directory(directory)
            run_id = None if found is None else RunId(found, True)
        else:
            run_id = begun_id([fact[3] for fact in facts], directory)
        return facts, run_id, orphans_among(chain.from_iterable(slots for _, slots in answers))

    facts, run_id, orphans = group.decide("starting the agent", own, agree, timeout_s=timeout_s)
    names, sessions, machines, _ = zip(*facts, strict=True)
    if len(set(names)) != 1:
        raise CheckpointError(
            f"cannot start the agent: ranks name different runs, {os.fspath(run)!r} on this rank"
        )
    nodes = list(dict.fromkeys(machines))
    here = [other for other in range(group.size) if machines[other] == machines[rank]]
    node = nodes.index(machines[rank])
    return Member(name, max(sessions), rank, group.size, node, len(nodes), here, run_id, orphans)


def connect_all(group: Group, connect: Callable[[], AgentClient], timeout_s: float) -> AgentClient:
    """Returns the client that ``connect`` makes on this rank; all ranks call this function.

    If a rank cannot connect, all ranks raise its error, and connected ranks detach.
    """
    clients: list[AgentClient] = []
    try:
        group.decide(
            "starting the agent",
            lambda: clients.append(connect()),
            lambda _: None,
            timeout_s=timeout_s,
        )
    except BaseException as error:
        for client in clients:
            if isinstance(error, Exception):
                client.detach(drop=False)
            client.close()
        raise
    return clients[0]


def _new_session(run: bytes) -> bytes:
    """Returns a session that is later than all sessions in memory, even if clocks differ.

    Raises StorageError if no session is later.
    """
    folder = folder_of(run)
    sessions = [header.session for header, _ in complete_slots(folder, run)]
    since = int.from_bytes(max(sessions, default=b"")[:8], "big") + 1
    if since >= 1 << 64:
        raise StorageError(
            f"cannot save with the agent: {folder} has a save later than any other can be; remove "
            "this folder"
        )
    return max(time.time_ns(), since).to_bytes(8, "big") + secrets.token_bytes(8)
