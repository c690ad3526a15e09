"""Programs of other libraries, unchanged: they call DCP through their own code.

Run by torchrun on two CPU ranks: `programs.py NAME DIRECTORY MODE`, where MODE is save or load.
Rank 0 prints the loss after the last step, which a load must repeat.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard


def network(mode: str) -> nn.Module:
    torch.manual_seed(0 if mode == "save" else 5)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def train(model: nn.Module, optimizer: Any, steps: int) -> float:
    loss = torch.zeros(())
    for _ in range(steps):
        loss = model(torch.ones(3, 6)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def accelerate_fsdp(path: Path, mode: str, version: int) -> float:
    """The functions of accelerate that `save_state` and `load_state` call for FSDP."""
    from accelerate import FullyShardedDataParallelPlugin, PartialState
    from accelerate.utils import fsdp_utils

    dist.init_process_group("gloo")
    PartialState(cpu=True)
    model: Any = network(mode)
    if version == 2:
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type=StateDictType.SHARDED_STATE_DICT
    )
    # An Accelerator refuses FSDP on a CPU. The functions need only these attributes of one.
    accelerator: Any = SimpleNamespace(
        process_index=dist.get_rank(),
        num_processes=dist.get_world_size(),
        is_fsdp2=version == 2,
        wait_for_everyone=dist.barrier,
    )
    train(model, optimizer, 2 if mode == "save" else 1)
    if mode == "save":
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, path)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
    else:
        fsdp_utils.load_fsdp_model(plugin, accelerator, model, path)
        fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
    return train(model, optimizer, 2)


def shard_in(model: Any, mesh: Any) -> Any:
    fully_shard(model, mesh=mesh["data_parallel"])
    return model


def lightning_fabric(path: Path, mode: str) -> float:
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    strategy = ModelParallelStrategy(shard_in, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup_module(network(mode))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    train(model, optimizer, 2 if mode == "save" else 1)
    state = {"model": model, "optimizer": optimizer, "step": 2 if mode == "save" else 0}
    (fabric.save if mode == "save" else fabric.load)(path / "fabric.ckpt", state)
    assert state["step"] == 2
    return train(model, optimizer, 2)


def lightning_trainer(path: Path, mode: str) -> float:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Module(lightning.LightningModule):
        loss = 0.0

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = shard_in(network(mode), self.device_mesh)

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.net(batch).square().sum()
            self.loss = float(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        max_steps=4,
        callbacks=[ModelCheckpoint(path, every_n_train_steps=2, save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    data = torch.utils.data.DataLoader(torch.ones(48, 6), batch_size=3)
    trainer.fit(module, data, ckpt_path=None if mode == "save" else path / "epoch=0-step=2.ckpt")
    return module.loss


class Optimizer:
    """What torchtitan's container of optimizers is to its checkpoint manager."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state)


def torchtitan(path: Path, mode: str, async_mode: str) -> float:
    """The checkpoint manager of torchtitan."""
    from torchtitan.components.checkpointer.dcp import CheckpointManager

    dist.init_process_group("gloo")
    model = network(mode)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    manager: Any = CheckpointManager(
        CheckpointManager.Config(enable=True, interval=2, async_mode=async_mode),
        dataloader=None,
        model_parts=[model],
        optimizers=Optimizer(model, optimizer),
        lr_schedulers=schedule,
        states={},
        sd_adapter=None,
        base_folder=str(path),
    )
    train(model, optimizer, 2 if mode == "save" else 1)
    if mode == "save":
        manager.save(2)
        manager.maybe_wait_for_staging()
        manager.maybe_wait_for_saving()
    else:
        assert manager.load()
    manager.close()
    return train(model, optimizer, 2)


def megatron(path: Path, mode: str, asynchronous: bool, queue: Any = None) -> float:
    """Megatron-Core's own strategies, as its training calls them."""
    from megatron.core import dist_checkpointing as mcore
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
    from megatron_states import on_cpu

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = network(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, 2 if mode == "save" else 1)
    state: dict[str, Any] = {
        name: mcore.ShardedTensor.from_rank_offsets(
            name, parameter.data, replica_id=(0, 0, dist.get_rank())
        )
        for name, parameter in model.named_parameters()
    }
    folder = path / "iter_0000002"
    folder.mkdir(exist_ok=True)
    dist.barrier()
    with on_cpu():
        if mode == "save":
            strategy = TorchDistSaveShardedStrategy("torch_dist", 1)
            wrapped = FullyParallelSaveStrategyWrapper(strategy)
            state["step"] = 2
            request = mcore.save(state, str(folder), wrapped, async_sharded_save=asynchronous)
            if request is not None:
                queue = queue or AsyncCallsQueue()
                queue.schedule_async_request(request)
                queue.close()
        else:
            loaded = mcore.load(state, str(folder))
            assert loaded.pop("step") == 2
            model.load_state_dict(loaded)
    return train(model, optimizer, 2)


def megatron_training(path: Path, mode: str, late: bool) -> float:
    """`--async-save` of the training of Megatron-LM 0.19 and later, with its default queue."""
    import typing

    import typing_extensions

    typing.override = typing_extensions.override  # type: ignore[attr-defined]  # Of Python 3.12.
    from megatron.training import async_utils, global_vars

    if late:
        import torch_ckpt

        torch_ckpt.install()
    arguments = {"async_strategy": "nvrx", "async_save": True, "async_ckpt_use_cpu_shm": False}
    priorities = {"async_ckpt_cpu_priority": 10, "async_ckpt_io_priority": None}
    global_vars.set_args(SimpleNamespace(**arguments, **priorities))
    dist.init_process_group("gloo")
    queue = SimpleNamespace(
        schedule_async_request=async_utils.schedule_async_save,
        close=lambda: async_utils.maybe_finalize_async_save(blocking=True, terminate=True),
    )
    if mode == "save":
        async_utils.init_persistent_async_worker(dist.get_rank(), "fork")
    return megatron(path, mode, True, queue)


PROGRAMS = {
    "megatron_training": lambda path, mode: megatron_training(path, mode, False),
    "megatron_training_late": lambda path, mode: megatron_training(path, mode, True),
    "megatron": lambda path, mode: megatron(path, mode, False),
    "megatron_async": lambda path, mode: megatron(path, mode, True),
    "torchtitan": lambda path, mode: torchtitan(path, mode, "disabled"),
    "torchtitan_async": lambda path, mode: torchtitan(path, mode, "async"),
    "accelerate_fsdp1": lambda path, mode: accelerate_fsdp(path, mode, 1),
    "accelerate_fsdp2": lambda path, mode: accelerate_fsdp(path, mode, 2),
    "lightning_fabric": lightning_fabric,
    "lightning_trainer": lightning_trainer,
}

if __name__ == "__main__":
    name, directory, mode = sys.argv[1:]
    result = PROGRAMS[name](Path(directory), mode)
    if dist.get_rank() == 0:
        print(f"\nloss {result!r}")
    dist.barrier()
    dist.destroy_process_group()
