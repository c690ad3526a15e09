"""What scripts call beside DCP's own functions."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.distributed.checkpoint import _storage_utils
from torch.distributed.checkpoint._async_process_executor import (
    _ProcessBasedAsyncCheckpointExecutor,
)
from torch.distributed.checkpoint._async_thread_executor import _ThreadBasedAsyncCheckpointExecutor

from torch_ckpt.reader import FastReader
from torch_ckpt.writer import FastWriter

__all__ = ["installed"]


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Has DCP choose :class:`FastWriter` and :class:`FastReader` where it is given only a path.

    Within the context, ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` with a ``checkpoint_id``
    and no storage argument use torch_ckpt; calls that name a storage are left alone. It holds for
    the whole process, and may be nested.

    Example::

        with torch_ckpt.installed():
            dcp.save(state, checkpoint_id="run/step-100")
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(_storage_utils, "FileSystemWriter", FastWriter))
        stack.enter_context(mock.patch.object(_storage_utils, "FileSystemReader", FastReader))
        for executor in (_ThreadBasedAsyncCheckpointExecutor, _ProcessBasedAsyncCheckpointExecutor):
            # A background save looks for a writer when it begins, in a thread or process that knows
            # nothing of this context: choose here.
            stack.enter_context(
                mock.patch.object(executor, "execute_save", _choosing_writer(executor.execute_save))
            )
        yield


def _choosing_writer(execute_save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(execute_save)
    def execute(*args: Any, **kwargs: Any) -> Any:
        path = kwargs.get("checkpoint_id")
        if (
            kwargs.get("storage_writer") is None
            and path is not None
            and FastWriter.validate_checkpoint_id(path)
        ):
            kwargs["storage_writer"] = FastWriter(path)
        return execute_save(*args, **kwargs)

    return execute
