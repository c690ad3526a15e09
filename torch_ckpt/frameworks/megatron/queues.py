"""Background saves in Megatron's queues of asynchronous requests, which poll processes."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, cast

from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from torch.distributed.checkpoint.metadata import Metadata

from torch_ckpt.coordination.background import BackgroundFuture

__all__ = ["QueuedSave", "async_modules", "poll_threads", "with_megatron_queue"]


class QueuedSave:
    """A save in a thread, for Megatron's queue of asynchronous saves."""

    def __init__(self, future: BackgroundFuture[Metadata]) -> None:
        self.future = future

    def request(self, kind: Callable[..., Any]) -> Any:
        """Returns the request of a queue, of the queue's own class."""
        return kind(async_fn=None, async_fn_args=(self,), finalize_fns=[self.finalize])

    def finalize(self) -> None:
        """Waits for the commit. A failure of any rank is raised on every rank."""
        self.future.result()


def async_modules(async_strategy: str) -> dict[str, Any]:
    """Returns the classes of a queue, as Megatron's ``get_async_strategy`` does."""
    find = getattr(torch_dist, "get_async_strategy", None)
    if find is not None:
        return cast(dict[str, Any], with_megatron_queue(find)(async_strategy)[1])
    homes = {
        "mcore": "megatron.core.dist_checkpointing.strategies.async_utils",
        "nvrx": "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    }
    if async_strategy not in homes:
        raise ValueError(f"{async_strategy=} is not one of {', '.join(homes)}")
    return vars(importlib.import_module(homes[async_strategy]))


def with_megatron_queue(find: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a ``get_async_strategy`` that needs no nvidia-resiliency-ext.

    Where that package is missing, the queue can only be Megatron's, whatever name was asked for.
    """

    @functools.wraps(find)
    def get_async_strategy(async_strategy: str = "nvrx", module: str | None = None) -> Any:
        try:
            return find(async_strategy, module)
        except ImportError:
            return find("mcore", module)

    return get_async_strategy


def poll_threads(queue: Any) -> None:
    """Makes a class of queues poll our saves, which run in a thread.

    Megatron's queues poll a process. They would finalize a request without one at the next poll,
    which would stop training until the save is complete. A request of ours has no function, and its
    save as an argument. Megatron moves the functions that finalize it to other requests.
    """
    schedule = queue.schedule_async_request
    if hasattr(schedule, "polls_threads"):
        return

    @functools.wraps(schedule)
    def schedule_async_request(self: Any, async_request: Any) -> int:
        saving = next(iter(async_request.async_fn_args), None)
        if async_request.async_fn is not None or not isinstance(saving, QueuedSave):
            return cast(int, schedule(self, async_request))
        module = importlib.import_module(queue.__module__)
        caller = _caller_class(module.AsyncCaller)(saving.future)
        self._get_async_caller = lambda: caller
        try:
            return cast(int, schedule(self, async_request))
        finally:
            del self._get_async_caller

    schedule_async_request.polls_threads = True  # type: ignore[attr-defined]
    queue.schedule_async_request = schedule_async_request


@functools.cache
def _caller_class(base: Any) -> Any:
    """Returns a class of callers that poll a thread, for the queues of one package."""

    class ThreadCaller(base):  # type: ignore[misc]
        def __init__(self, future: BackgroundFuture[Metadata]) -> None:
            super().__init__()
            self.future = future

        def schedule_async_call(self, async_req: Any) -> None:
            """Does nothing: the save has begun."""

        def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
            """Returns whether the saves of all ranks have ended."""
            if blocking:
                self.future.has_ended()
            is_alive = not self.future.done()
            return not is_alive if no_dist else bool(self.sync_all_async_calls(int(is_alive)))

        def close(self, abort: bool = False) -> None:
            """Waits for the save, unless the caller aborts: a thread cannot be killed."""
            if not abort:
                self.future.has_ended()

        def __del__(self) -> None: ...

    return ThreadCaller
