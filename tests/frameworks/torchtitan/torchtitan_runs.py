"""A training of torchtitan's own parts on gloo ranks, put together as its Trainer does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import IterableDataset

STEPS = 6


class Fused(nn.Module):
    """Stores one parameter as two copies of its parts, as torchtitan's fused layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 2, 6) / 4)
        self.register_state_dict_post_hook(self._split)
        self.register_load_state_dict_pre_hook(self._join)

    @staticmethod
    def _split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
        weight = state.pop(f"{prefix}weight")
        for number, name in enumerate(("gate", "up")):
            state[f"{prefix}{name}"] = weight[:, number].contiguous()

    @staticmethod
    def _join(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        parts = [state.pop(f"{prefix}{name}") for name in ("gate", "up")]
        state[f"{prefix}weight"] = torch.stack(parts, dim=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.weight.unbind(1)
        return nn.functional.silu(x @ gate.T) * (x @ up.T)


class Numbers(IterableDataset[torch.Tensor], Stateful):
    """Rows of numbers, with a position."""

    def __init__(self, rank: int) -> None:
        self.rank, self.position = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.position += 1
            seed = torch.Generator().manual_seed(self.rank + 100 * self.position)
            yield torch.randn(6, generator=seed)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Adapter:
    """What torchtitan's state dict adapters are to its checkpoint managers."""

    hf_assets_path: str | None = None

    def __init__(self, fqn_to_index_mapping: dict[str, int] | None = None) -> None:
        self.fqn_to_index_mapping = fqn_to_index_mapping
        self.readers: list[Any] = []

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state.items()}

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("model."): value for name, value in state.items()}

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> Any:
        reader = Quantized(path) if from_quantized else HuggingFaceStorageReader(path)
        self.readers.append(reader)
        return reader


class Quantized(HuggingFaceStorageReader):
    """Counts its reads, as a stand-in for a reader that dequantizes."""

    reads = 0

    def read_data(self, *arguments: Any) -> Any:
        self.reads += 1
        return super().read_data(*arguments)


def manager_class(name: str) -> Any:
    if name == "stock":
        from torchtitan.components.checkpointer import CheckpointManager

        return CheckpointManager
    from torch_ckpt.frameworks.torchtitan.checkpoints import FastCheckpointManager

    return FastCheckpointManager


class Training:
    """A model, its optimizers, schedules and data, and the checkpoint manager."""

    def __init__(
        self,
        path: Path,
        *,
        seed: int = 0,
        manager: str = "ours",
        adapter: Any = None,
        **options: Any,
    ) -> None:
        from torchtitan.components.dataloader import ParallelAwareDataloader
        from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw

        torch.manual_seed(seed)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.model = nn.Sequential(nn.Linear(6, 6), Fused(), nn.Linear(8, 4))
        fully_shard(self.model, mesh=init_device_mesh("cpu", (size,)))
        self.optimizers = default_adamw(lr=0.05).build(model_parts=[self.model])
        self.schedules = LRSchedulersContainer.Config(warmup_steps=3).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.data = ParallelAwareDataloader(Numbers(rank), rank, size, batch_size=3)
        self.step = self.tokens = 0
        config = manager_class(manager).Config(
            **{"enable": True, "interval": 2, "initial_load_model_only": False, **options}
        )
        self.checkpointer = config.build(
            dataloader=self.data,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedules,
            states={"train_state": self},
            sd_adapter=adapter,
            base_folder=str(path),
        )
        self.load_step: int = config.load_step

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.tokens}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.tokens = state_dict["step"], state_dict["ntokens_seen"]

    def train(self, until: int, last: int = STEPS) -> dict[str, Any]:
        """Trains as torchtitan's Trainer does; returns the state after it, as whole tensors."""
        self.is_loaded = self.checkpointer.load(step=self.load_step)
        rows = iter(self.data)
        while self.step < until:
            self.step += 1
            self.optimizers.zero_grad()
            batch = next(rows)
            self.tokens += batch.numel()
            self.model(batch).square().sum().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.step()
            self.schedules.step()
            self.checkpointer.save(self.step, last_step=self.step == last)
        self.checkpointer.close()
        return self.whole()

    def whole(self) -> dict[str, Any]:
        """Everything that a checkpoint has, but the data, as it is on one rank."""
        states = {
            **self.model.state_dict(),
            **self.optimizers.state_dict(),
            **self.schedules.state_dict(),
            **self.state_dict(),
        }
        return {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value
            for name, value in states.items()
        }

    def load(self) -> bool:
        """Loads, and ends the manager."""
        found = self.checkpointer.load(step=self.load_step)
        self.checkpointer.close()
        return bool(found)


def steps_in(path: Path) -> list[str]:
    """The folders of a checkpoint folder."""
    return sorted(each.name for each in (path / "checkpoint").glob("step-*"))
