"""Background saves, in a thread or in a separate process, and the thread of background loads."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import pickle
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeVar

import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import TCPStore
from torch.distributed.checkpoint._storage_utils import _storage_setup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter
from torch.distributed.distributed_c10d import _get_default_store

from torch_ckpt._core.tensors import flat_values
from torch_ckpt.coordination import orchestrate
from torch_ckpt.coordination.addresses import is_loopback, own_addresses
from torch_ckpt.coordination.group import Call, group_of
from torch_ckpt.coordination.portable import portable, why
from torch_ckpt.coordination.waiting import GRACE_S, LongWait, OwnFuture, no_thread
from torch_ckpt.errors import CheckpointError, naming_first, text_of, typed_text_of
from torch_ckpt.filesystems.location import refuse_unregistered, registered_schemes
from torch_ckpt.process_state import PROCESS

__all__ = [
    "BackgroundFuture",
    "BackgroundThread",
    "Order",
    "in_thread",
    "save_in_process",
    "save_in_thread",
]

T = TypeVar("T")

_LOG = logging.getLogger("torch_ckpt")
_STARTING = "starting processes"
_POLL_S = 0.2  # Interval at which a wait checks whether the call has failed.
_ALIVE_S = 0.5  # Interval of the heartbeats of a process that saves.


class BackgroundFuture(OwnFuture[T]):
    """A future of a background save or load. A failure that nobody reads is reported.

    The failure is printed to stderr and logged when the future is dropped, and at the latest when
    the process exits. The report begins with ``failure``, such as ``"step 4 was not saved"``.
    Long waits are logged as by :class:`OwnFuture`. ``timeout_s`` limits each wait of the work for
    other ranks.
    """

    _is_read = True  # Until constructed: an interrupt may drop it before.

    def __init__(
        self,
        failure: str,
        awaited: Callable[[], str] = lambda: "a background save",
        *,
        is_named: bool = True,
        timeout_s: float = math.inf,
    ) -> None:
        super().__init__(awaited, is_named=is_named)
        self.failure, self.timeout_s = failure, timeout_s
        self.set_running_or_notify_cancel()  # So cancel() has no effect.
        PROCESS.background_futures.add(self)
        self._is_read = False

    def result(self, timeout: float | None = None) -> T:
        """Returns the result, or raises the error, which then counts as read."""
        try:
            return super().result(timeout)
        finally:
            self._is_read = self._is_read or self.done()
            del self  # The error of the future has a traceback that refers to this frame.

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the error, which then counts as read."""
        try:
            return super().exception(timeout)
        finally:
            self._is_read = self._is_read or self.done()

    def after_fork(self) -> None:
        """Fails the child's copy. The parent reports the failure."""
        super().after_fork()
        self._is_read = True

    def report(self) -> None:
        """Reports the failure, unless it was read or reported before."""
        if self._is_read or not self.done():
            return
        error = self.exception()
        if error is None:
            return
        text = f"{self.failure}: {why(error)}"
        print(f"torch_ckpt: {text}", file=sys.stderr)
        if _LOG.hasHandlers():  # Otherwise, logging prints to stderr, too.
            _LOG.error(text)

    __del__ = report


def _report_all() -> None:
    """Reports all failures that were not read. Called after the threads have ended."""
    for future in list(PROCESS.background_futures):
        future.report()


atexit.register(_report_all)


@dataclass(frozen=True)
class Order:
    """The arguments of one save.

    If ``checkpoint_id`` is ``None``, the writer determines the directory. If the writer is
    ``None``, DCP chooses it. With ``use_collectives``, the ranks plan and commit one checkpoint
    together.
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
                *(state, writer, self.planner, call), use_collectives=self.use_collectives
            )


def save_in_thread(
    order: Order, state: Any, call: Call, *, initializer: Callable[[], object] | None = None
) -> BackgroundFuture[Metadata]:
    """Saves in a thread, which calls ``initializer`` first. The interpreter waits for it on exit.

    The state is the staged state dict, or a future of it.
    """
    work = order.carry_out, state, call
    return in_thread(_what(order), call, *work, initializer=initializer)


def save_in_process(
    order: Order, state: Any, call: Call, *, initializer: Callable[[], object] | None = None
) -> BackgroundFuture[Metadata]:
    """Saves in a separate process of this rank, which the first save of a process group starts.

    The save processes of all ranks form a second process group, of the same size. Saves run one
    after the other, in the order of the calls, which is the same on all ranks. The state is the
    staged state dict, or a future of it. The thread that waits for the process calls
    ``initializer`` first. Raises RankTimeoutError if a rank was late, stuck or gone, and
    CheckpointError if a process did not start.
    """
    connections = call.group.connections
    process: _SaveProcess | None = PROCESS.save_processes.get(connections)
    if call.any_rank(process is None or not process.is_alive, _STARTING) or process is None:
        if process is not None:
            process.end()
        with contextlib.ExitStack() as stack:
            listener: socket.socket | None = None
            if call.group.is_coordinator:
                listener = stack.enter_context(_listening())
            own_address = None if listener is None else listener.getsockname()[:2]
            address: Any = call.all_reduce(_STARTING, lambda: own_address, lambda found: found[0])
            process = _SaveProcess(address, listener, call)
        PROCESS.save_processes[connections] = process
    earlier = process.last

    def carry_out(state: Any) -> Metadata:
        with call:
            try:
                _wait_for(earlier, call)
                return process.save(order, state, call)
            except BaseException as error:
                # References in its traceback would keep the staging memory in use.
                traceback.clear_frames(error.__traceback__)
                del state
                raise

    process.last = in_thread(_what(order), call, carry_out, state, initializer=initializer)
    return process.last


def _what(order: Order) -> str:
    path = order.checkpoint_id or getattr(order.writer, "checkpoint_id", None)
    return f"the asynchronous save to {path}"


def in_thread(
    what: str,
    call: Call,
    function: Callable[..., T],
    *arguments: Any,
    initializer: Callable[[], object] | None = None,
    name: str = "torch_ckpt-save",
) -> BackgroundFuture[T]:
    """Starts a thread that calls ``initializer``, then ``function``, and returns its result.

    ``what`` it does is for messages, and ``name`` is that of the thread. Raises CheckpointError if
    the system has no more threads.
    """
    future: BackgroundFuture[T] = BackgroundFuture(
        f"{what} failed",
        lambda: f"{what}: {call.progress()}",
        is_named=call.group.is_coordinator,
        timeout_s=call.timeout_s,
    )
    work = future, initializer, function, arguments
    reason = ""
    try:
        BackgroundThread(target=_run, args=work, name=name).start()
    except RuntimeError as error:
        reason = str(error)  # The error itself would keep the arguments alive.
    if reason:
        raise no_thread(reason)
    return future


class BackgroundThread(threading.Thread):
    """The thread of a background save or load. ``is_working`` is true until that has ended.

    The thread itself may end later: a signal handler that interrupted a wait for the future may
    still own the future's lock.
    """

    is_working = True


def _run(
    future: Future[T],
    initializer: Callable[[], object] | None,
    function: Callable[..., T],
    arguments: tuple[Any, ...],
) -> None:
    try:
        if initializer is not None:
            initializer()
        result = function(*arguments)
    except BaseException as error:
        # The error refers to this frame, whose arguments would keep the staging memory in use.
        del initializer, function, arguments
        _end_work()
        future.set_exception(error)
        del future
    else:
        _end_work()
        future.set_result(result)


def _end_work() -> None:
    thread = threading.current_thread()
    assert isinstance(thread, BackgroundThread)
    thread.is_working = False


def _wait_for(earlier: Future[Metadata] | None, call: Call) -> None:
    """Waits until the process has ended its earlier save.

    Raises CheckpointError if it has not ended within the timeout of this save.
    """
    if earlier is None:
        return
    waiting = LongWait(lambda: "the end of an earlier save in the save process")
    for pause_s in waiting.rounds(call.timeout_s, _POLL_S, ends_on_signal=True):
        if wait([earlier], pause_s).done:
            return
        call.raise_if_failed()
    raise CheckpointError(
        f"the save process did not end an earlier save within {call.timeout_s:g} s"
    )


def _listening() -> socket.socket:
    """Returns a socket for the store of the processes. Other machines can reach it if possible.

    The socket is bound, because another program could use a port that is only chosen. Raises
    CheckpointError if the system cannot listen at any of its addresses.
    """
    hosts = own_addresses(_get_default_store() if dist.is_initialized() else None)
    failures = []
    for host in sorted(hosts, key=is_loopback):
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return PROCESS.own(socket.create_server((host, 0), family=family))
        except OSError as error:
            failures.append(f"{host}: {error}")
    raise CheckpointError(
        f"cannot listen for the save processes of the ranks: {'; '.join(failures)}"
    )


class _SaveProcess:
    """A process that writes saves of this rank. It ends when this process ends.

    ``address`` is the address of the new process group's store; only the coordinator has the
    store's listener. ``last`` is the future of the most recent save. Raises CheckpointError if the
    process did not start within the timeout of the call, and RankTimeoutError if another rank was
    late, stuck or gone.
    """

    def __init__(
        self, address: tuple[str, int], listener: socket.socket | None, call: Call
    ) -> None:
        self.last: BackgroundFuture[Metadata] | None = None
        self._rank = call.group.names[call.group.rank]
        context = mp.get_context("spawn")
        self._connection, remote_end = map(PROCESS.own, context.Pipe())
        arguments = remote_end, address, listener, call.group.rank, call.group.names
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        remote_end.close()
        try:
            self._reply(call)
        except BaseException:
            self.end()
            raise

    @property
    def is_alive(self) -> bool:
        return not self._connection.closed and self._process.is_alive()

    def end(self) -> None:
        self._process.kill()
        self._connection.close()

    def save(self, order: Order, state: Any, call: Call) -> Metadata:
        try:
            if isinstance(state, Future):
                state = state.result()
            with naming_first("save", lambda: flat_values(state), ForkingPickler.dumps):
                message = ForkingPickler.dumps((order, state))
        except BaseException as error:
            # The process must fail the call in its group, where the other processes wait for it.
            with contextlib.suppress(CheckpointError):  # The first error counts.
                self._send(ForkingPickler.dumps((None, portable(error))), call)
                self._reply(call)
            raise
        self._send(message, call)
        metadata: Metadata = self._reply(call)
        return metadata

    def _send(self, message: Any, call: Call) -> None:
        """Sends a message. A process that is frozen does not read it."""
        with PROCESS.own(socket.socket(fileno=os.dup(self._connection.fileno()))) as end:
            end.setblocking(True)  # The program may have set another default.
            seconds = struct.pack("ll", math.ceil(call.timeout_s), 0)
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                end.setsockopt(socket.SOL_SOCKET, option, seconds)
        try:
            self._connection.send((call.number, call.timeout_s, registered_schemes()))
            self._connection.send_bytes(message)
        except BlockingIOError:
            raise self._frozen(call) from None
        except OSError:
            raise self._ended() from None

    def _reply(self, call: Call) -> Any:
        """Waits for the reply to the last message. The process must send heartbeats meanwhile.

        After the call has failed on another rank, waits only a short time longer. Then ends the
        process, because its late reply would be taken for the reply to the next save.
        """
        heartbeat, ends = time.monotonic(), math.inf
        waiting = LongWait(lambda: f"the save process {self._process.pid} of rank {self._rank}")
        for pause_s in waiting.rounds(poll_s=_POLL_S):
            try:
                if self._connection.poll(pause_s):
                    succeeded, value = self._connection.recv()
                    if succeeded is not None:
                        break
                    heartbeat = time.monotonic()
            except BlockingIOError:
                raise self._frozen(call) from None
            except (EOFError, OSError):
                raise self._ended() from None
            now = time.monotonic()
            if now - heartbeat > call.timeout_s:
                raise self._frozen(call)
            try:
                call.raise_if_failed()
            except BaseException:
                ends = min(ends, now + GRACE_S)
                if now >= ends:
                    self.end()
                    raise
        if not succeeded:
            raise value
        return value

    def _frozen(self, call: Call) -> CheckpointError:
        self.end()
        return CheckpointError(
            f"the save process of rank {self._rank} sent no heartbeat for {call.timeout_s:g} s"
        )

    def _ended(self) -> CheckpointError:
        self._process.join(1)
        code = self._process.exitcode
        return CheckpointError(f"the save process of rank {self._rank} ended with exit code {code}")


def _serve(
    connection: Connection,
    address: tuple[str, int],
    listener: socket.socket | None,
    rank: int,
    names: list[int],
) -> None:
    """Runs saves in the process until its connection to the training process closes.

    ``address`` is the address of the process group's store; only the coordinator has the store's
    listener. ``rank`` is the rank in the group, and ``names`` are the global ranks of the training
    processes.
    """
    size = len(names)
    os.environ.update(RANK=f"{rank}", WORLD_SIZE=f"{size}")
    descriptor = None if listener is None else listener.detach()
    try:
        store = TCPStore(*address, size, is_master=rank == 0, master_listen_fd=descriptor)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        group = group_of(None, names=names)
        replies = _Replies(connection)
    except Exception as error:
        connection.send_bytes(_encoded(False, error))
        return
    replies.send(True, None)
    while True:
        try:
            number, timeout_s, schemes = connection.recv()
            refuse_unregistered(schemes)
            order, state = connection.recv()
        except EOFError:
            return
        except Exception as error:  # Torch cannot rebuild all tensors, for example.
            failure = CheckpointError(
                f"the save process cannot unpickle the state: {typed_text_of(error)}"
            )
            Call(group, number, timeout_s).fail(failure)
            replies.send(False, failure)
            continue
        replies.begin()
        call = Call(group, number, timeout_s)
        try:
            metadata = call.fail(state) if order is None else order.carry_out(state, call)
        except BaseException as error:
            replies.send(False, error)
        else:
            replies.send(True, metadata)
        del order, state, call


class _Replies:
    """Sends the replies of the process, and heartbeats while it saves."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._is_saving = threading.Event()
        threading.Thread(target=self._live, name="torch_ckpt-alive", daemon=True).start()

    def begin(self) -> None:
        """Begins to send heartbeats."""
        self._is_saving.set()

    def send(self, succeeded: bool, value: Any) -> None:
        """Sends the reply to a message."""
        message = _encoded(succeeded, value)
        with self._lock:
            self._is_saving.clear()
            self._connection.send_bytes(message)

    def _live(self) -> None:
        alive = pickle.dumps((None, None))
        with contextlib.suppress(OSError):  # The training process has ended.
            while self._is_saving.wait():
                with self._lock:
                    if self._is_saving.is_set():
                        self._connection.send_bytes(alive)
                time.sleep(_ALIVE_S)


def _encoded(succeeded: bool, value: Any) -> bytes:
    if not succeeded:
        value = portable(value)
    try:
        return pickle.dumps((succeeded, value))
    except Exception as error:
        return pickle.dumps((False, CheckpointError(f"cannot pickle the result: {text_of(error)}")))
