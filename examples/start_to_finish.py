"""A Llama model under FSDP2: trained, killed, resumed on fewer ranks, exported to Hugging Face.

docs/start-to-finish.md explains each step. With one process per GPU, or on CPUs::

    torchrun --standalone --nproc_per_node 3 examples/start_to_finish.py
    torchrun --standalone --nproc_per_node 2 examples/start_to_finish.py
    python examples/start_to_finish.py --export runs/llama-hf
"""

import argparse
import os
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import torch_ckpt
from torch_ckpt import RankState, SafetensorsWriter

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CONTEXT = 64  # Tokens per sequence. A token is a byte.


class Training:
    """Model and optimizer as a ``Stateful``: DCP calls these methods when it saves and loads."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns sharded states with the FQNs of the unsharded model."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets both states."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def make_model(device: torch.device) -> nn.Module:
    """Returns the model, with each parameter sharded over all ranks."""
    torch.manual_seed(0)  # All ranks initialize the same model.
    model = LlamaForCausalLM(CONFIG).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def read_batch(step: int, batch: int) -> Tensor:
    """Returns this rank's share of the global batch of a step, ``[batch / ranks, CONTEXT]``."""
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
    own = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return torch.tensor([list(text[start : start + CONTEXT]) for start in own.tolist()])


def train(args: argparse.Namespace, device: torch.device) -> None:
    """Trains up to ``args.steps``, from the newest checkpoint of the run."""
    model = make_model(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {
        "training": Training(model, optimizer),
        "rng": RankState(torch.get_rng_state, torch.set_rng_state, on_resize="drop"),
    }
    if device.type == "cuda":
        get_state, set_state = torch.cuda.get_rng_state, torch.cuda.set_rng_state
        state["cuda_rng"] = RankState(get_state, set_state, on_resize="drop")
    with torch_ckpt.Run(args.dir, every=args.save_every, keep_last=2, asynchronous=True) as run:
        start = run.restore(state) or 0  # Calls load_state_dict. Training can continue at once.
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}: starts from step {start}")
        for step in range(start + 1, args.steps + 1):
            tokens = read_batch(step, args.batch).to(device)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.should_save(step) or step == args.steps:
                run.save(step, state)  # Returns when the tensors are copied to host memory.
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)


def export(args: argparse.Namespace, device: torch.device) -> None:
    """Writes the newest checkpoint's model, without the optimizer, for ``from_pretrained``."""
    weights = get_model_state_dict(make_model(device))
    with torch_ckpt.Run(args.dir) as run:
        step = run.restore({"training": {"model": weights}})  # Reads only these tensors.
    if step is None:
        raise SystemExit(f"{args.dir} has no checkpoint")
    torch_ckpt.save(weights, storage_writer=SafetensorsWriter(args.export))
    if dist.get_rank() == 0:
        CONFIG.architectures = [LlamaForCausalLM.__name__]
        CONFIG.save_pretrained(args.export)
        print(f"exported step {step} to {args.export}")


def main() -> None:
    """Trains, or exports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="runs/llama", help="directory of the run")
    parser.add_argument("--steps", type=int, default=60, help="step after which to stop")
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, over all ranks")
    parser.add_argument("--save-every", type=int, help="steps between checkpoints")
    parser.add_argument("--export", help="directory to export the newest checkpoint to")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if not args.export and args.batch % ranks:
        parser.error(f"--batch {args.batch} is not a multiple of {ranks} ranks")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (export if args.export else train)(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
