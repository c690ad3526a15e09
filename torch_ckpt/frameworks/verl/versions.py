"""A checkpoint engine of verl: actors publish versions of the weights, and rollouts update to them.

verl imports this module in actors and rollouts if ``checkpoint_engine.custom_backend_module`` names
it, and ``checkpoint_engine.backend`` is then ``torch_ckpt``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import torch
import torch.distributed as dist
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name, get_torch_device

from torch_ckpt.coordination.group import DEFAULT_TIMEOUT_S
from torch_ckpt.coordination.waiting import LongWait
from torch_ckpt.errors import CheckpointError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.publishing.publisher import Publisher
from torch_ckpt.publishing.subscriber import Subscriber
from torch_ckpt.publishing.version_files import read_version

__all__ = ["VersionsCheckpointEngine"]

_POLL_S = 0.1


@CheckpointEngineRegistry.register("torch_ckpt")
class VersionsCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Sends weights from verl's actors to its rollouts as published versions.

    Each actor writes its share of the tensors. A rollout reads what has changed, has the weights
    once more in host memory, and yields whole tensors, so that it works with each of verl's
    rollouts. It need not have a connection to the actors, only the directory.

    Args:
        url: Directory of the versions, which all actors and rollouts reach.
        is_master: No effect.
        bucket_size: No effect.
        dtype: Dtype in which weights are published, such as ``"bfloat16"``; their own by default.
        whole_every: Every how many versions one is whole.
        keep_whole: How many whole versions remain.
        timeout_s: How long a rollout waits for a version, and actors for each other, in seconds.

    Example::

        actor_rollout_ref.rollout.checkpoint_engine.backend=torch_ckpt
        +actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=\
            torch_ckpt.frameworks.verl.versions
        +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.torch_ckpt.url=s3://bucket/policy
    """

    wire_format = "named_tensors"

    def __init__(
        self,
        url: str,
        *,
        is_master: bool = False,
        bucket_size: int = 0,
        dtype: str | None = None,
        whole_every: int = 50,
        keep_whole: int = 2,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.url, self.timeout_s = url, timeout_s
        self._options = {"whole_every": whole_every, "keep_whole": keep_whole}
        self._dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)
        self._publisher: Publisher | None = None
        self._subscriber = Subscriber(url, timeout_s=timeout_s)
        self._served: dict[str, torch.Tensor] = {}

    def prepare(self) -> dict[str, Any]:
        """Returns nothing: the directory is all that actors and rollouts share."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns the arguments of :meth:`init_process_group` for actors and rollouts."""
        worlds = actor_wg_world_size, rollout_world_size
        actors, rollouts = ({"rank": list(range(world))} for world in worlds)
        return actors, rollouts

    def init_process_group(self, rank: int) -> None:
        """Does nothing: the actors have a group, and rollouts need none."""

    def finalize(self) -> None:
        """Does nothing: the memory serves the next step."""

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Publishes weights as the version ``global_steps``. All actors call it.

        Raises:
            CheckpointError: The publish failed.
            ValueError: ``global_steps`` is ``None``.
        """
        number = self._number(global_steps)
        rank, world = dist.get_rank(), dist.get_world_size()
        own: dict[str, torch.Tensor] = {}
        for count, (name, tensor) in enumerate(weights):
            # Each actor gets each tensor as a whole for a moment, and publishes some of them.
            if count % world == rank:
                own[name] = tensor.detach().to("cpu", self._cast(tensor), copy=True)
        if self._publisher is None:
            options: dict[str, Any] = self._options | {"timeout_s": self.timeout_s}
            self._publisher = Publisher(self.url, **options)
        publisher = self._publisher

        def publish() -> None:
            publisher.publish(number, own)
            publisher.wait()

        await asyncio.to_thread(publish)
        return {}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Waits for the version ``global_steps``, and yields its tensors on the device.

        Raises:
            CheckpointError: The version was not there in time, or cannot be read.
            ValueError: ``global_steps`` is ``None``.
        """
        number = self._number(global_steps)
        waiting = LongWait(lambda: f"version {number} of {self.url}")
        for pause_s in waiting.rounds(self.timeout_s, _POLL_S):
            newest = await asyncio.to_thread(self._subscriber.latest)
            if newest is not None and newest >= number:
                break
            await asyncio.sleep(pause_s)
        else:
            raise CheckpointError(
                f"version {number} of {self.url} was not there within {self.timeout_s:g} s"
            )
        await asyncio.to_thread(self._update, number)
        device = get_device_name() if get_torch_device().is_available() else "cpu"
        for name, tensor in self._served.items():
            yield name, tensor.to(device)

    def _update(self, number: int) -> None:
        tensors = read_version(Location(self.url), number).tensors
        self._served = {
            name: self._tensor(name, getattr(torch, dtype), sizes)
            for name, (dtype, sizes) in tensors.items()
        }
        self._subscriber.update(self._served, number)

    def _tensor(self, name: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> torch.Tensor:
        """Returns the tensor of the version before, or a new one."""
        own = self._served.get(name)
        if own is not None and own.dtype == dtype and tuple(own.shape) == sizes:
            return own
        return torch.empty(sizes, dtype=dtype, device="cpu")

    def _cast(self, tensor: torch.Tensor) -> torch.dtype:
        is_cast = self._dtype is not None and tensor.is_floating_point()
        return self._dtype if is_cast and self._dtype is not None else tensor.dtype

    def _number(self, global_steps: int | None) -> int:
        if global_steps is None:
            raise ValueError("verl has not passed global_steps, which is the number of the version")
        return global_steps
