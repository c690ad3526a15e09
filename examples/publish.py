"""Two trainer ranks publish a model at each step; one process generates with it meanwhile.

The trainers train a small Llama under FSDP2, and publish its weights in bfloat16. The generator
has transformers' own model, and updates it in place between two batches of prompts::

    python examples/publish.py

``--role train`` and ``--role generate`` start one side alone, such as on two machines that share
``--url``: a new directory, or a store such as ``s3://bucket/policy``.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import torch_ckpt
from torch_ckpt.errors import NotFoundError

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
CONTEXT = 64  # Tokens per sequence. A token is a byte.
PROMPT = b"def "


def read_batch(step: int, batch: int) -> Tensor:
    """Returns this rank's share of the global batch of a step, ``[batch / ranks, CONTEXT]``."""
    text = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_bytes()
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT, (batch,), generator=generator)
    own = starts.chunk(dist.get_world_size())[dist.get_rank()]
    return torch.tensor([list(text[start : start + CONTEXT]) for start in own.tolist()])


def train(args: argparse.Namespace) -> None:
    """Trains, and publishes the weights at each step."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # All ranks initialize the same model.
    model = LlamaForCausalLM(CONFIG)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    with torch_ckpt.Publisher(args.url, dtype=torch.bfloat16, whole_every=10) as publisher:
        for step in range(1, args.steps + 1):
            tokens = read_batch(step, args.batch)
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            begin = time.perf_counter()
            publisher.publish(step, model)  # Returns when training may go on.
            stop_ms = 1000 * (time.perf_counter() - begin)
            if dist.get_rank() == 0:
                text = f"step {step}: loss {loss.item():.3f}, training stopped for {stop_ms:.0f} ms"
                print(text, flush=True)
    dist.destroy_process_group()


def generate(args: argparse.Namespace) -> None:
    """Generates with the newest weights until the last version."""
    torch.manual_seed(1)  # Other weights: all that count are published.
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()
    prompt = torch.tensor([list(PROMPT)])
    subscriber = torch_ckpt.Subscriber(args.url)
    while subscriber.version != args.steps:
        try:
            version = subscriber.update(model)  # In place: all tensors change, or none.
        except NotFoundError:  # The trainers have not published yet.
            time.sleep(0.1)
            continue
        tokens = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=24,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        text = bytes(tokens[0].tolist()).decode(errors="replace")
        delta = f"{subscriber.read_nbytes:,} bytes of deltas"
        print(f"version {version} ({delta}): {text!r}", flush=True)


def run_both(args: argparse.Namespace) -> None:
    """Starts the trainers and the generator on this machine."""
    options = [f"--url={args.url}", f"--steps={args.steps}", f"--lr={args.lr}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = str(Path(__file__).resolve())
    sides = [
        subprocess.Popen([sys.executable, *launcher, script, "--role=train", *options]),
        subprocess.Popen([sys.executable, script, "--role=generate", *options]),
    ]
    try:
        while any(side.poll() is None for side in sides):
            if any(side.returncode for side in sides):
                raise SystemExit("one side has failed")
            time.sleep(0.1)
    finally:
        for side in sides:
            side.kill() if side is sides[1] else side.terminate()
            side.wait()
    if any(side.returncode for side in sides):
        raise SystemExit("one side has failed")


def main() -> None:
    """Trains, generates, or both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="runs/policy", help="directory of the versions")
    parser.add_argument("--steps", type=int, default=60, help="step after which to stop")
    parser.add_argument("--batch", type=int, default=12, help="sequences per step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--role", choices=["both", "train", "generate"], default="both")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    {"both": run_both, "train": train, "generate": generate}[args.role](args)


if __name__ == "__main__":
    main()
