"""Programs of Ray Train that save through RayTrainRun: ``ray_programs.py <program> <path> ...``."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from support.recipes import recipe
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from waits import until

from torch_ckpt.frameworks.ray.train_run import RayTrainRun


class Training:
    """A net that FSDP2 shards, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        self.model = torch.nn.Sequential(*layers)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)

    def step(self, number: int) -> float:
        generator = torch.Generator().manual_seed(number * 100 + dist.get_rank())
        loss = self.model(torch.randn(4, 8, generator=generator)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            *(self.model, self.optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def digest(self) -> str:
        """A checksum of the parameters and of the optimizer, whatever the number of ranks."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            for value in (parameter, *self.optimizer.state[parameter].values()):
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                digest.update(whole.detach().numpy().tobytes())
        return digest.hexdigest()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def train(config: dict[str, Any]) -> None:
    """Trains to a step; rank 0 writes a line of JSON at each event."""
    rank, workers = dist.get_rank(), dist.get_world_size()

    def log(event: str, step: int | None) -> None:
        digest = training.digest() if step is not None else None
        if rank == 0:
            known = ray.train.get_checkpoint()  # The last that was reported.
            reported = None if known is None else known.path
            line: dict[str, Any] = {
                "event": event,
                "step": step,
                "workers": workers,
                "digest": digest,
            }
            line["reported"], line["time"] = reported, time.time()
            with Path(config["log"]).open("a") as file:
                file.write(json.dumps(line) + "\n")

    training = Training()
    state = {"training": training}
    with RayTrainRun(**config["options"]) as run:
        start = run.restore(state)
        log("restored", start)
        for step in range((start or 0) + 1, config["steps"] + 1):
            loss = training.step(step)
            if run.should_save(step):
                log("saving", step)
                run.save(step, state, metrics={"loss": loss})
                log("saved", step)
            if start is None and rank == 1 and step == config.get("killed_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(config.get("sleep_s", 0))
        if config.get("discards"):
            log(error_of(lambda: run.discard_after(1)), None)
    log("ended", config["steps"])


def fit(
    path: Path,
    name: str,
    workers: Any,
    *,
    storage: str | None = None,
    keep: int | None = None,
    failures: int = 0,
    loop: Callable[[dict[str, Any]], None] = train,
    **config: Any,
) -> None:
    """Trains a Ray Train run, and prints which checkpoints Ray lists."""
    result = TorchTrainer(
        loop,
        train_loop_config={"log": str(path / f"{name}.log"), **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name=name,
            storage_path=storage or str(path),
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
            failure_config=FailureConfig(max_failures=failures),
        ),
    ).fit()
    print(listed(result), flush=True)


def listed(result: ray.train.Result) -> str:
    """The checkpoints that Ray lists."""
    assert result.checkpoint is not None
    paths = [[each.path, metrics] for each, metrics in result.best_checkpoints]
    return json.dumps({"newest": result.checkpoint.path, "listed": paths})


def restarts(path: Path) -> None:
    """A run that is not interrupted, and one that is killed, and then goes on with one worker."""
    ray.init("local", num_cpus=2, include_dashboard=False)
    fit(path, "whole", 2, steps=12, discards=True, options={"every": 2})
    background = {"every": 2, "asynchronous": True}
    fit(path, "killed", 2, keep=2, failures=1, steps=12, killed_at=7, options=background)
    fit(path, "killed", 1, keep=2, steps=15, options=background)


def train_on_data(config: dict[str, Any]) -> None:
    """Trains over two epochs of samples, or to a step; each rank writes which it has used."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    epoch = recipe("Epoch")(config["count"], 2, rank, workers)
    loader = DataLoader(range(config["count"]), batch_sampler=epoch)
    if config["prepares"]:
        loader = ray.train.torch.prepare_data_loader(loader, add_dist_sampler=False)
    logs = Path(config["log"]).parent / f"samples-{ray.train.get_context().get_experiment_name()}"
    logs.mkdir(exist_ok=True)
    state = {"w": torch.zeros(1), "data": epoch}
    with RayTrainRun(every=2) as run:
        start = step = run.restore(state) or 0
        if rank == 0:  # What was trained since is lost.
            for log in logs.iterdir():
                kept = [s for s in log.read_text().splitlines() if json.loads(s)[0] <= start]
                log.write_text("".join(f"{line}\n" for line in kept))
        dist.barrier()
        while epoch.number < 2:
            for batch in loader:
                if step == config["stop"]:
                    return
                if start == 0 and rank == 1 and step == config["killed_at"]:
                    os.kill(os.getpid(), signal.SIGKILL)
                epoch.use()
                step += 1
                with (logs / str(rank)).open("a") as file:
                    file.write(f"{json.dumps([step, epoch.number, batch.tolist()])}\n")
                if run.should_save(step):
                    run.save(step, state)
            epoch.end()


def data(path: Path, stop: str, prepares: str) -> None:
    """A run that is killed within an epoch, stops at a step, and goes on with one worker."""
    ray.init("local", num_cpus=2, include_dashboard=False)
    facts = {"loop": train_on_data, "count": 24, "prepares": prepares == "prepared"}
    fit(path, "data", 2, failures=1, stop=int(stop), killed_at=3, **facts)
    fit(path, "data", 1, stop=-1, **facts)


def preempted(path: Path, left_s: str, nbytes_per_s: str) -> None:
    """A run with two nodes, of which one is preempted, with a limit for promotions."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    node = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    log = path / "preempted.log"

    def preempt() -> None:
        until(log.exists, 120)
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + float(left_s)) * 1000)
        (path / "deadline").write_text(str(deadline_ms / 1000))
        client = ray._raylet.GcsClient(address=cluster.address)
        client.drain_node(node.node_id, reason, "spot", deadline_ms)
        until(lambda: '"saved"' in log.read_text(), 30)
        cluster.remove_node(node, allow_graceful=False)

    thread = threading.Thread(target=preempt, daemon=True)
    thread.start()
    options = {
        "every": 1000,
        "local": str(path / "local"),
        "promote_bytes_per_s": int(nbytes_per_s),
    }
    try:
        fit(path, "preempted", (1, 2), failures=1, steps=200, sleep_s=0.1, options=options)
    finally:
        thread.join(150)
        ray.shutdown()
        cluster.shutdown()


def store(path: Path, storage: str) -> None:
    """A run in a store, to which promotions take longer than the time between two saves."""
    ray.init("local", num_cpus=1, include_dashboard=False)
    options = {"every": 2, "local": str(path / "local"), "promote_bytes_per_s": 20_000}
    fit(path, "store", 1, storage=storage, keep=2, steps=12, sleep_s=0.4, options=options)


def again(path: Path) -> None:
    """A run that saves one step twice, and another without success."""
    ray.init("local", num_cpus=1, include_dashboard=False)

    def loop() -> None:
        state = {"w": torch.zeros(1_000_000)}
        with RayTrainRun(asynchronous=True, on_failure="warn") as run:
            for step in (2, 2, 4, 6, 2):
                state["w"] += 1
                # As on a full disk.
                nbytes = 1_000_000 if step == 4 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
                run.save(step, state, metrics={"w": state["w"][0]})
                until(lambda: not run._saves.is_busy)

    result = DataParallelTrainer(
        loop, run_config=RunConfig(name="again", storage_path=str(path))
    ).fit()
    print(listed(result), flush=True)


def resaved(path: Path) -> None:
    """A run that goes back twice, and saves a step again: once without success."""
    ray.init("local", num_cpus=1, include_dashboard=False)

    def loop(config: dict[str, Any]) -> None:
        state = {"w": torch.zeros(1_000_000)}
        value = 0.0
        with RayTrainRun(asynchronous=True, on_failure="warn", **config) as run:
            for step, back_to in ((2, None), (4, 2), (4, None), (6, None), (8, 6), (8, None)):
                value += 1
                state["w"].fill_(value)
                # As on a full disk.
                nbytes = 1_000_000 if value == 3 else resource.RLIM_INFINITY
                resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
                run.save(step, state, metrics={"w": value})
                until(lambda: not run._saves.is_busy)
                if back_to is not None:
                    run.restore(state, step=back_to)

    for name, config in (("alone", {}), ("local", {"local": str(path / "disk")})):
        run_config = RunConfig(name=name, storage_path=str(path))
        trainer = DataParallelTrainer(loop, train_loop_config=config, run_config=run_config)
        print(listed(trainer.fit()), flush=True)


def refused(path: Path) -> None:
    """Prints the errors of bad calls."""
    ray.init("local", num_cpus=2, include_dashboard=False)

    def log_errors() -> None:
        with (path / "errors").open("a") as file:
            for options in ({}, {"keep_last": 1, "keep_every": 2}):
                file.write(f"{error_of(lambda given=options: RayTrainRun(**given))}\n")

    log_errors()
    run_config = RunConfig(name="refused", storage_path=str(path))
    for workers in (0, 2):
        scaling = ScalingConfig(num_workers=workers)
        DataParallelTrainer(log_errors, scaling_config=scaling, run_config=run_config).fit()


if __name__ == "__main__":
    program, path, *others = sys.argv[1:]
    globals()[program](Path(path), *others)
    ray.shutdown()
