"""Background saves, in a thread or in a separate process."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
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
from torch_ckpt.coordination.group import Call, group_of
from torch_ckpt.coordination.portable import portable
from torch_ckpt.errors import CheckpointError
from torch_ckpt.process_state import PROCESS

__all__ = ["Order", "save_in_process", "save_in_thread"]

_STARTING = "starting processes"


@dataclass(frozen=True)
class Order:
    """The arguments of one save.

    Attributes:
        checkpoint_id: Directory of the checkpoint; ``None`` if the writer determines it.
        writer: The storage writer; DCP chooses one if ``None``.
        planner: The save planner.
        use_collectives: Whether the ranks plan and commit one checkpoint together.
    """

    checkpoint_id: str | os.PathLike[str] | None
    writer: StorageWriter | None
    planner: SavePlanner | None
    use_collectives: bool

    def carry_out(self, state: Any, call: Call) -> Metadata:
        """Saves a state dict, or the result of a future. An error fails the save on all ranks."""
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


def save_in_thread(
    order: Order, state: Any, call: Call, *, initializer: Callable[[], object] | None = None
) -> Future[Metadata]:
    """Saves in a thread. The interpreter waits for the thread on exit.

    Args:
        order: The arguments of the save.
        state: The staged state dict, or a future of it.
        call: The call of the group that saves.
        initializer: The thread calls it first.

    Returns:
        A future of the metadata.
    """
    return _submitted(initializer, order.carry_out, state, call)


def save_in_process(
    order: Order, state: Any, call: Call, *, initializer: Callable[[], object] | None = None
) -> Future[Metadata]:
    """Saves in a separate process of this rank, which the first save starts.

    The processes of all ranks form a process group of their own, of the same size.

    Args:
        order: The arguments of the save.
        state: The staged state dict, or a future of it.
        call: The call of the group that saves.
        initializer: Called first by the thread that waits for the process.

    Returns:
        A future of the metadata.

    Raises:
        RankTimeoutError: A rank was late, stuck or gone.
        CheckpointError: The process of a rank did not start.
    """
    process: _SaveProcess | None = PROCESS.save_process
    if call.any_rank(process is None or not process.is_alive, _STARTING) or process is None:
        address = call.all_reduce(_STARTING, _own_address, lambda addresses: addresses[0])
        if process is not None:
            process.end()
        process = PROCESS.save_process = _SaveProcess(address, call)

    def carry_out(state: Any) -> Metadata:
        with call:
            try:
                return process.save(order, state, call)
            except BaseException as error:
                # References in its traceback would keep the staging memory in use.
                traceback.clear_frames(error.__traceback__)
                del state
                raise

    return _submitted(initializer, carry_out, state)


def _submitted(
    initializer: Callable[[], object] | None, function: Callable[..., Metadata], *arguments: Any
) -> Future[Metadata]:
    executor = ThreadPoolExecutor(1, "torch_ckpt-save", initializer)
    future = executor.submit(function, *arguments)
    executor.shutdown(wait=False)
    return future


def _own_address() -> tuple[str, int]:
    store = _get_default_store() if dist.is_initialized() else None
    port: int = get_free_port()  # type: ignore[no-untyped-call]
    return own_addresses(store)[0], port


class _SaveProcess:
    """A process that writes saves of this rank. It ends when this process ends.

    Args:
        address: Host and port of the store of the new process group.
        call: The call of the group that saves.
    """

    def __init__(self, address: tuple[str, int], call: Call) -> None:
        context = mp.get_context("spawn")
        self._connection, remote_end = context.Pipe()
        arguments = remote_end, address, call.group.rank, call.group.size
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        remote_end.close()
        if not self._connection.poll(call.timeout_s):
            self.end()
            raise CheckpointError(f"the save process did not start within {call.timeout_s:g} s")
        self._reply()

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._connection.close()

    def save(self, order: Order, state: Any, call: Call) -> Metadata:
        try:
            if isinstance(state, Future):
                state = state.result()
            message = ForkingPickler.dumps((order, state, call.number, call.timeout_s))
        except BaseException as error:
            # The process must fail the call in its own group: the others wait for it there.
            failed = None, portable(error), call.number, call.timeout_s
            self._connection.send(failed)
            self._reply()
            raise
        self._connection.send_bytes(message)
        metadata: Metadata = self._reply()
        return metadata

    def _reply(self) -> Any:
        try:
            succeeded, value = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(1)
            code = self._process.exitcode
            raise CheckpointError(f"the save process ended with exit code {code}") from None
        if not succeeded:
            raise value
        return value


def _serve(connection: Connection, address: tuple[str, int], rank: int, size: int) -> None:
    """Runs saves in the process until the connection closes."""
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
            metadata = call.fail(state) if order is None else order.carry_out(state, call)
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
        pickled = pickle.dumps((False, CheckpointError(f"cannot pickle the result: {error}")))
    connection.send_bytes(pickled)
