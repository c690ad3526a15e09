"""Trains a small GPT on the sources of the Python standard library, and survives being killed.

A byte-level language model under FSDP2 with AdamW and a learning-rate schedule. Everything the loss
curve depends on goes into the checkpoint: parameters, optimizer, schedule, position in the data and
the random state of every rank. A run that was killed goes on with ``--resume``: on as many ranks
with the same losses bit for bit, on another number of ranks with the same losses up to rounding.

On CPUs (gloo), on GPUs (NCCL, one rank per GPU), or as a single process without torchrun::

    torchrun --standalone --nproc_per_node 2 examples/train_fsdp.py --resume
    python examples/train_fsdp.py --steps 200 --resume

On CPUs set ``OMP_NUM_THREADS`` to cores / ranks. The run's directory must be visible to all ranks::

    runs/gpt/losses.jsonl     one line per step
    runs/gpt/step-00000050/   one checkpoint; committed once it holds `.metadata`
"""

import argparse
import json
import math
import os
import shutil
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from torch_ckpt import FastReader, FastWriter

VOCABULARY = 256  # A token is a byte.
MAX_TEXT_NBYTES = 8 << 20
WARMUP_STEPS = 10


# ---- Model ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a two-layer MLP."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.drop = nn.Dropout(dropout)
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps ``[batch, context, width]`` to the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)  # Each [batch, heads, context, width / heads].
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Gpt(nn.Module):
    """A decoder-only transformer with learned positions."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``[batch, context]`` to logits ``[batch, context, VOCABULARY]``."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---- Data ----------------------------------------------------------------------------------------


def read_text() -> Tensor:
    """Reads Python sources of the standard library, in a fixed order, as one uint8 tensor."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    folders = [stdlib, *(stdlib / name for name in ("asyncio", "email", "http", "json", "logging"))]
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    text = b"\n".join(file.read_bytes() for file in files)[:MAX_TEXT_NBYTES]
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class WindowLoader:
    """Deals random windows of the text; remembers its position.

    The global batch at a position is a function of seed and position alone, and is cut evenly among
    the ranks. So the model sees the same data in the same order on any number of ranks.
    """

    def __init__(self, text: Tensor, *, batch: int, context: int, seed: int) -> None:
        self.text = text
        self.batch = batch
        self.context = context
        self.seed = seed
        self.position = 0  # In global batches.

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's inputs and targets, each ``[batch / world_size, context]``."""
        generator = torch.Generator().manual_seed((self.seed << 32) + self.position)
        starts = torch.randint(len(self.text) - self.context, (self.batch,), generator=generator)
        starts = starts.chunk(dist.get_world_size())[dist.get_rank()]
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        self.position += 1
        return windows[:, :-1], windows[:, 1:]

    def state_dict(self) -> dict[str, int]:
        """Returns what the next batches depend on."""
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to the position of another loader's ``state_dict``."""
        self.seed = state["seed"]
        self.position = state["position"]


# ---- Training ------------------------------------------------------------------------------------


def lr_scale(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine from 1 down to 0.1 at ``steps``."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    return warmup * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / steps)))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Returns copies of the states of the generators that dropout draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


@dataclass
class Training:
    """All that changes from step to step, and how it becomes a state dict and comes back."""

    model: nn.Module
    optimizer: AdamW
    schedule: LambdaLR
    loader: WindowLoader
    device: torch.device
    step: int = 0  # Steps done.

    def train_step(self) -> float:
        """Does one step and returns its loss, the mean over the global batch."""
        inputs, targets = (x.to(self.device) for x in self.loader.next_batch())
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.step += 1
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as `dcp.save` takes it and as `dcp.load` fills it in.

        The model and the optimizer come as DTensors under global names, so that any number of ranks
        can load them. Random states belong to one rank each and are named after it.
        """
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "loader": self.loader.state_dict(),
            "step": self.step,
            "rng": {f"rank{dist.get_rank()}": random_state(self.device)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over a state that `dcp.load` filled in; without a random state, seeds a new one."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        self.loader.load_state_dict(state["loader"])
        self.step = state["step"]
        # Last, so that nothing above draws from the restored generators.
        rank = dist.get_rank()
        if rng := state["rng"].get(f"rank{rank}"):
            torch.set_rng_state(rng["cpu"])
            if self.device.type == "cuda":
                torch.cuda.set_rng_state(rng["cuda"], self.device)
        else:
            torch.manual_seed(self.loader.seed + 1000 * self.step + rank + 1)


def build(args: argparse.Namespace, device: torch.device) -> Training:
    """Builds the model, sharded over all ranks, and what trains it, at step 0."""
    torch.manual_seed(args.seed)  # All ranks, on any number of ranks, start from one model.
    model = Gpt(args.layers, args.width, args.heads, args.context, args.dropout).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    torch.manual_seed(args.seed + dist.get_rank() + 1)  # But each rank drops out on its own.
    optimizer = AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = LambdaLR(optimizer, lambda step: lr_scale(step, args.steps))
    loader = WindowLoader(read_text(), batch=args.batch, context=args.context, seed=args.seed)
    return Training(model, optimizer, schedule, loader, device)


# ---- Checkpoints ---------------------------------------------------------------------------------


def checkpoint_path(run: Path, step: int) -> Path:
    """Returns the directory of the checkpoint of a step."""
    return run / f"step-{step:08d}"


def committed_steps(run: Path) -> list[int]:
    """Returns the steps of the run's complete checkpoints, oldest first."""
    return sorted(int(file.parent.name[5:]) for file in run.glob("step-????????/.metadata"))


def throughput(path: Path, seconds: float) -> str:
    """Returns the size of a checkpoint, the time it took and their ratio, in words."""
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return f"{nbytes / 2**30:.3f} GiB in {seconds:.3f} s, {nbytes / 1e9 / seconds:.2f} GB/s"


def save(training: Training, run: Path) -> str:
    """Saves the training as a checkpoint of its step and returns what that took, in words."""
    path = checkpoint_path(run, training.step)
    start = time.perf_counter()
    dcp.save(training.state_dict(), storage_writer=FastWriter(path))
    return f"saved {path.name}: {throughput(path, time.perf_counter() - start)}"


def load(training: Training, run: Path, step: int) -> str:
    """Loads the checkpoint of a step into the training and returns what that took, in words."""
    path = checkpoint_path(run, step)
    start = time.perf_counter()
    reader = FastReader(path)
    state = training.state_dict()
    # What is asked for must be there, and a rank that did not save left no random state.
    saved = reader.read_metadata().state_dict_metadata
    if f"rng.rank{dist.get_rank()}.{training.device.type}" not in saved:
        state["rng"].clear()
    dcp.load(state, storage_reader=reader)
    training.load_state_dict(state)
    return f"loaded {path.name}: {throughput(path, time.perf_counter() - start)}"


def delete_old_checkpoints(run: Path, keep: int) -> None:
    """Deletes all checkpoints, complete or not, older than the newest ``keep`` complete ones."""
    oldest = checkpoint_path(run, committed_steps(run)[-keep:][0])
    for path in sorted(run.glob("step-????????")):
        if path.name < oldest.name:
            # First what makes it a checkpoint: a kill halfway must not leave half of one.
            (path / ".metadata").unlink(missing_ok=True)
            shutil.rmtree(path)


def find_start(run: Path, resume: bool) -> int:
    """Returns the step to go on from, 0 for a fresh start; rank 0 looks, all ranks agree.

    Raises:
        SystemExit: The run has checkpoints and the user did not ask to resume it.
    """
    found = [max(committed_steps(run), default=0) if dist.get_rank() == 0 else 0]
    dist.broadcast_object_list(found, src=0)
    if found[0] and not resume:
        raise SystemExit(f"{run} holds checkpoints: pass --resume, or another --dir")
    return found[0]


# ---- Output --------------------------------------------------------------------------------------


class Report:
    """What rank 0 shows and logs: a bar on a terminal, else plain lines; and ``losses.jsonl``.

    Lines of steps after ``start``, from before a kill, are dropped: the file is one loss curve.
    """

    def __init__(self, run: Path, *, start: int, steps: int, every: int, tokens: int) -> None:
        self.start = start
        self.steps = steps
        self.every = every
        self.tokens = tokens  # Per step.
        self.began = time.perf_counter()
        self.bar = sys.stdout.isatty()
        run.mkdir(parents=True, exist_ok=True)
        self.log = (run / "losses.jsonl").open("a+b")
        self.log.seek(0)
        self.log.truncate(sum(len(self.log.readline()) for _ in range(start)))

    def step(self, step: int, loss: float, lr: float) -> None:
        """Logs one step, with the loss in full precision, and shows where the run is."""
        self.log.write(json.dumps({"step": step, "loss": loss, "lr": lr}).encode() + b"\n")
        self.log.flush()
        speed = (step - self.start) * self.tokens / (time.perf_counter() - self.began)
        text = f"step {step}/{self.steps}  loss {loss:.4f}  lr {lr:.2e}  {speed:,.0f} tokens/s"
        if self.bar:
            done = 30 * step // self.steps
            print(f"\r\033[K[{'#' * done}{'.' * (30 - done)}] {text}", end="", flush=True)
        elif step % self.every == 0 or step == self.steps:
            print(text, flush=True)

    def say(self, text: str) -> None:
        """Prints a line of its own, in the place of the bar, which the next step draws anew."""
        print(f"\r\033[K{text}" if self.bar else text, flush=True)


# ---- The program ---------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    """Returns the checked command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dir", type=Path, default=Path("runs/gpt"), help="directory of the run")
    add("--resume", action="store_true", help="go on from the newest checkpoint, if there is one")
    add("--steps", type=int, default=150, help="steps of the whole run")
    add("--save-every", type=int, default=50, help="steps between checkpoints")
    add("--keep", type=int, default=2, help="checkpoints to keep")
    add("--log-every", type=int, default=10, help="steps between lines where there is no terminal")
    add("--batch", type=int, default=12, help="sequences per step, over all ranks")
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch % world_size:
        parser.error(f"--batch {args.batch} cannot be cut evenly among {world_size} ranks")
    if args.keep < 1:
        parser.error("--keep must be at least 1")
    return args


def start_ranks() -> torch.device:
    """Joins the ranks that torchrun started, or becomes the only one; returns this rank's device.

    On GPUs, gloo carries the small Python objects that ranks exchange to plan a save or a load.
    """
    torch.use_deterministic_algorithms(True)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Deterministic cuBLAS.
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains up to ``args.steps``, from the newest checkpoint if there is one to resume."""
    start = find_start(args.dir, args.resume)
    training = build(args, device)
    loaded = load(training, args.dir, start) if start else None

    report = None
    if dist.get_rank() == 0:
        tokens = args.batch * args.context
        report = Report(
            args.dir, start=start, steps=args.steps, every=args.log_every, tokens=tokens
        )
        size = sum(parameter.numel() for parameter in training.model.parameters())
        report.say(
            f"{size / 1e6:.1f} M parameters on {dist.get_world_size()} ranks ({device.type})"
        )
        report.say(f"{loaded}\nresumed from step {start}" if loaded else "started from step 0")

    while training.step < args.steps:
        lr = float(training.schedule.get_last_lr()[0])
        loss = training.train_step()
        if report:
            report.step(training.step, loss, lr)
        if training.step % args.save_every == 0 or training.step == args.steps:
            saved = save(training, args.dir)
            if report:
                report.say(saved)
                delete_old_checkpoints(args.dir, args.keep)


def main() -> None:
    """Runs the program on this rank."""
    args = parse_arguments()
    device = start_ranks()
    try:
        train(args, device)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
