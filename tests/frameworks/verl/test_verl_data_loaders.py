"""What the page on the state of ranks says of verl's data loaders, whose state verl saves itself.

The real loaders, saves and loads of verl, without models. If a test fails, a later verl may need
less.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Worlds

VERL = Path(__file__).resolve().parents[3] / "build/verl"
START_TIMEOUT_S = 300  # Ranks import verl, Ray and transformers.
pytestmark = [
    pytest.mark.framework("torchdata", "transformers"),
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not VERL.exists(), reason="tests/check.py frameworks installs verl"),
]

COUNT, BATCH, EPOCHS = 24, 4, 2
STEPS = COUNT // BATCH  # In an epoch.


class Workers:
    """Workers without a model."""

    def save_checkpoint(self, *_: Any, **__: Any) -> None:
        pass

    load_checkpoint = save_checkpoint


def import_verl() -> None:
    if str(VERL) not in sys.path:
        sys.path.append(str(VERL))


# ---- The trainer of reinforcement learning: one process has the loader ----


def rl_trainer(path: Path) -> Any:
    import_verl()
    from omegaconf import OmegaConf
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.utils import create_rl_sampler

    data = {"train_batch_size": BATCH, "val_batch_size": BATCH, "dataloader_num_workers": 0}
    data |= {"shuffle": True, "seed": 3, "validation_shuffle": False}
    trainer = {"default_local_dir": str(path), "default_hdfs_dir": None, "resume_mode": "auto"}
    trainer |= {"total_epochs": EPOCHS, "total_training_steps": None}
    trainer |= {"del_local_ckpt_after_load": False}
    actor: dict[str, Any] = {"actor": {"checkpoint": {}, "optim": {}}}
    made = RayPPOTrainer.__new__(RayPPOTrainer)
    made.config = OmegaConf.create(
        {"data": data, "trainer": trainer, "actor_rollout_ref": actor, "critic": {"optim": {}}}
    )
    made.actor_rollout_wg, made.use_critic, made.global_steps = Workers(), False, 0
    samples = list(range(COUNT))
    sampler = create_rl_sampler(made.config.data, samples)
    made._create_dataloader(samples, samples, list, sampler)
    return made


def train_rl(path: Path, last: int) -> list[tuple[int, int]]:
    """Trains to a step as ``RayPPOTrainer.fit``; returns the epoch and number of each sample."""
    trainer, used = rl_trainer(path), []
    trainer._load_checkpoint()
    first = trainer.global_steps // len(trainer.train_dataloader)
    for epoch in range(first, EPOCHS):
        for batch in trainer.train_dataloader:
            trainer.global_steps += 1
            used += [(epoch, sample) for sample in batch]
            if trainer.global_steps == last:
                trainer._save_checkpoint()
                return used
    return used


ALL = [(epoch, number) for epoch in range(EPOCHS) for number in range(COUNT)]


@pytest.mark.parametrize("stop", [1, 5, 6, 7, 11])
def test_reinforcement_learning_continues_in_an_epoch_and_between_two(
    tmp_path: Path, stop: int
) -> None:
    whole = train_rl(tmp_path / "whole", -1)
    found = train_rl(tmp_path / "cut", stop) + train_rl(tmp_path / "cut", -1)
    assert sorted(found) == ALL
    if stop != STEPS:
        assert found == whole
    else:  # The second epoch has the order of the first one.
        assert [number for _, number in found[COUNT:]] == [number for _, number in found[:COUNT]]


# ---- Fine-tuning: each rank has a loader ----


def train_sft(path: Path, last: int, without_state: bool = False) -> list[tuple[int, int]]:
    """Trains to a step as ``SFTTrainer.fit``; returns the epoch and number of each sample."""
    import_verl()
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler

    rank, size = dist.get_rank(), dist.get_world_size()
    sampler: Any = DistributedSampler(
        range(COUNT), shuffle=True, num_replicas=size, rank=rank, drop_last=True
    )
    loader = StatefulDataLoader(range(COUNT), BATCH // size, sampler=sampler, drop_last=True)
    engine = Workers()
    engine.get_data_parallel_rank = lambda: rank
    engine.is_mp_src_rank_with_outputs = lambda: True
    handler = CheckpointHandler(engine, loader, default_local_dir=str(path))
    if without_state and not rank:
        for file in path.glob("global_step_*/data_*.pt"):
            file.unlink()
    dist.barrier()
    step, used = handler.load_checkpoint(), []
    dist.barrier()  # As the first step of training: no rank saves before all have loaded.
    for epoch in range(step // STEPS, EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            step += 1
            used += [(epoch, int(sample)) for sample in batch]
            if step == last:
                handler.save_checkpoint(step)
                return used
    return used


def used_by_sft(
    worlds: Worlds, path: Path, stop: int, to: int, *, without_state: bool = False
) -> list[Any]:
    path.mkdir()
    parts = worlds.run(2, train_sft, path, stop, timeout_s=START_TIMEOUT_S)
    parts += worlds.run(to, train_sft, path, -1, without_state, timeout_s=START_TIMEOUT_S)
    return sorted(sample for part in parts for sample in part)


@pytest.mark.parametrize("stop", [1, 5, 7])
def test_fine_tuning_continues_within_an_epoch_on_as_many_ranks_only(
    worlds: Worlds, tmp_path: Path, stop: int
) -> None:
    assert used_by_sft(worlds, tmp_path / "same", stop, 2) == ALL
    assert used_by_sft(worlds, tmp_path / "fewer", stop, 1) != ALL


def test_fine_tuning_skips_an_epoch_between_two_unless_the_state_is_removed(
    worlds: Worlds, tmp_path: Path
) -> None:
    assert used_by_sft(worlds, tmp_path / "as it is", STEPS, 2) == ALL[:COUNT]
    for to in (2, 1):
        path = tmp_path / f"removed, {to}"
        assert used_by_sft(worlds, path, STEPS, to, without_state=True) == ALL
