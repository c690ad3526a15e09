"""Trains a small GPT on the sources of the Python standard library, and survives being killed.

A byte-level language model under FSDP2 with AdamW and a learning-rate schedule. `Run` saves it in
the background and restores the newest complete checkpoint at the start. A killed training continues
with the same losses: bit for bit on as many ranks, up to rounding on another number of ranks.

It runs on CPUs (gloo), on GPUs (NCCL, one rank per GPU), or as a single process::

    torchrun --standalone --nproc_per_node 2 examples/train_fsdp.py --dir runs/gpt
    python examples/train_fsdp.py --dir runs/gpt --steps 200

On CPUs, set ``OMP_NUM_THREADS`` to cores / ranks. All ranks need access to the directory.
"""

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR

from torch_ckpt import RankState, Run


class Gpt(nn.Module):
    """A decoder-only transformer over bytes, with learned positions."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                *(width, heads, 4 * width, dropout), F.gelu, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps tokens ``[batch, context]`` to logits ``[batch, context, 256]``."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(self.norm(x))


class WindowLoader:
    """Random windows of a text. Any number of ranks reads the same global batch at a position."""

    def __init__(self, *, batch: int, context: int) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = b"\n".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.batch, self.context = batch, context
        self.position = 0  # In global batches.

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """Returns this rank's inputs and targets, each ``[batch / world_size, context]``."""
        generator = torch.Generator().manual_seed(self.position)
        starts = torch.randint(len(self.text) - self.context, (self.batch,), generator=generator)
        starts = starts.chunk(dist.get_world_size())[dist.get_rank()]
        windows = self.text[starts[:, None] + torch.arange(self.context + 1)].long()
        self.position += 1
        return windows[:, :-1], windows[:, 1:]


class Training:
    """Model, optimizer, schedule and loader; a ``Stateful``, which DCP saves and loads."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(0)  # All ranks initialize the same model.
        model = Gpt(args.layers, args.width, args.heads, args.context, args.dropout).to(device)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        torch.manual_seed(dist.get_rank() + 1)  # Dropout differs between ranks.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.95))
        self.schedule = CosineAnnealingLR(self.optimizer, args.steps, eta_min=args.lr / 10)
        self.loader = WindowLoader(batch=args.batch, context=args.context)
        self.device = device

    def train_step(self) -> float:
        """Performs one step and returns its loss, the mean over the global batch."""
        inputs, targets = (x.to(self.device) for x in self.loader.next_batch())
        loss = F.cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def state_dict(self) -> dict[str, Any]:
        """Returns all values that the next steps depend on, except the random states."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "schedule": self.schedule.state_dict(),
            "position": self.loader.position,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the values of a ``state_dict``."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.schedule.load_state_dict(state["schedule"])
        self.loader.position = state["position"]


def parse_arguments() -> argparse.Namespace:
    """Returns the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dir", type=Path, default=Path("runs/gpt"), help="directory of the run")
    add("--steps", type=int, default=150, help="steps of the whole run")
    add("--save-every", type=int, help="steps between checkpoints; default: 3.5 %% of the time")
    add("--batch", type=int, default=12, help="sequences per step, over all ranks")
    add("--context", type=int, default=128, help="bytes per sequence")
    add("--layers", type=int, default=4)
    add("--width", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--dropout", type=float, default=0.0)
    add("--lr", type=float, default=1e-3, help="peak learning rate")
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if args.batch % world_size:
        parser.error(f"--batch {args.batch} is not a multiple of {world_size} ranks")
    return args


def start_ranks() -> torch.device:
    """Starts the process group that torchrun describes, or one of a single rank."""
    torch.use_deterministic_algorithms(True)
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # Deterministic cuBLAS.
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), None
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def main() -> None:
    """Trains up to ``--steps``, from the newest checkpoint if there is one."""
    args = parse_arguments()
    training = Training(args, start_ranks())
    state = {
        "training": training,
        # Each rank has a random state of its own. Another number of ranks starts with new ones.
        "rng": RankState(torch.get_rng_state, torch.set_rng_state, on_resize="drop"),
    }
    if torch.cuda.is_available():
        get_state, set_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        state["cuda_rng"] = RankState(get_state, set_state, on_resize="drop")
    with Run(args.dir, every=args.save_every, keep_last=2, asynchronous=True) as run:
        start = run.restore(state) or 0
        if dist.get_rank() == 0:
            print(f"{dist.get_world_size()} ranks, started from step {start}", flush=True)
        for step in range(start + 1, args.steps + 1):
            loss = training.train_step()
            if run.should_save(step) or step == args.steps:
                run.save(step, state)
            if dist.get_rank() == 0:
                print(f"step {step}/{args.steps}  loss {loss!r}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
