"""Saves that go on in the background: in a thread, or in a process of their own."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.elastic.utils.distributed import get_free_port

from torch_ckpt.coordination import orchestrate
from torch_ckpt.coordination.connect import own_addresses
from torch_ckpt.coordination.group import Call, group_of, portable
from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS

__all__ = ["Order", "save_in_process", "save_in_thread"]

_STARTING = "starting processes"


@dataclass(frozen=True)
class Order:
    """What is saved, where, and how."""

    checkpoint_id: str | os.PathLike[str] | None
    writer: StorageWriter | None
    planner: SavePlanner | None
    use_collectives: bool

    def carry_out(self, state: Any, call: Call) -> Metadata:
        """Saves this state; fails on all ranks if it fails here."""
        with call:
            if isinstance(state, Future):
                state = state.result()
            writer: Any = _storage_setup(self.writer, self.checkpoint_id, reader=False)
            return orchestrate.save(
                orchestrate.state_dicts_of(state),
                writer,
                self.planner,
                call,
                use_collectives=self.use_collectives,
            )


def save_in_thread(order: Order, state: Any, call: Call) -> Future[Metadata]:
    """Saves in a thread; the interpreter waits for it when it exits.

    Args:
        order: What to do.
        state: The staged state dict, or a future of it.
        call: The ranks.
    """
    return _submitted(order.carry_out, state, call)


def save_in_process(order: Order, state: Any, call: Call) -> Future[Metadata]:
    """Saves in a process of this rank's own, which the first save starts.

    Args:
        order: What to do.
        state: The staged state dict, or a future of it.
        call: The ranks: the processes save in a group of their own, of as many.

    Raises:
        RankTimeoutError: A rank was late, stuck or gone.
        CheckpointError: The process of a rank did not start.
    """
    process: _SaveProcess | None = PROCESS.save_process
    if call.any_rank(process is None or not process.is_alive, _STARTING) or process is None:
        address = call.all_reduce(_STARTING, _own_address, lambda found: found[0])
        if process is not None:
            process.end()
        process = PROCESS.save_process = _SaveProcess(address, call)

    def carry_out() -> Metadata:
        with call:
            return process.save(order, state, call)

    return _submitted(carry_out)


def _submitted(function: Callable[..., Metadata], *arguments: Any) -> Future[Metadata]:
    executor = ThreadPoolExecutor(1, thread_name_prefix="torch_ckpt-save")
    future = executor.submit(function, *arguments)
    executor.shutdown(wait=False)
    return future


def _own_address() -> tuple[str, int]:
    store = _get_default_store() if dist.is_initialized() else None
    port: int = get_free_port()  # type: ignore[no-untyped-call]
    return own_addresses(store)[0], port


class _SaveProcess:
    """A process that saves what it is sent. It ends with this one.

    Args:
        address: Where its group meets.
        call: The ranks.
    """

    def __init__(self, address: tuple[str, int], call: Call) -> None:
        context = mp.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = theirs, address, call.group.rank, call.group.size
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(call.timeout_s):
            self.end()
            raise CheckpointError(f"the process that saves has not started in {call.timeout_s:g} s")
        self._reply()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._connection.close()

    def save(self, order: Order, state: Any, call: Call) -> Metadata:
        if isinstance(state, Future):
            state = state.result()
        self._connection.send((order, state, call.number, call.timeout_s))
        metadata: Metadata = self._reply()
        return metadata

    def _reply(self) -> Any:
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            raise CheckpointError(f"the process that saves has ended, with code {code}") from None
        if not succeeded:
            raise value
        return value


def _serve(connection: Connection, address: tuple[str, int], rank: int, size: int) -> None:
    """What the process does."""
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{size}")
    try:
        store = TCPStore(*address, size, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    except Exception as error:
        _send(connection, False, error)
        return
    _send(connection, True, None)
    while True:
        try:
            order, state, number, timeout_s = connection.recv()
        except EOFError:
            return
        call = Call(group_of(None), number, timeout_s)
        try:
            metadata = order.carry_out(state, call)
        except BaseException as error:
            _send(connection, False, error)
        else:
            _send(connection, True, metadata)
        del order, state, call


def _send(connection: Connection, succeeded: bool, value: Any) -> None:
    if not succeeded:
        value = portable(value)
    try:
        pickled = pickle.dumps((succeeded, value))
    except Exception as error:
        pickled = pickle.dumps((False, CheckpointError(f"the result does not pickle: {error}")))
    connection.send_bytes(pickled)
