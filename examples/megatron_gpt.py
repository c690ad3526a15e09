"""A tiny GPT of Megatron-Core on CPUs: trained, saved, and resumed with other parallel sizes.

    torchrun --nproc_per_node 2 examples/megatron_gpt.py --dir runs/megatron --tp 2 --steps 4
    torchrun --nproc_per_node 2 examples/megatron_gpt.py --dir runs/megatron --pp 2 --steps 8
    python examples/megatron_gpt.py --dir runs/megatron --steps 12

Every run continues from the newest checkpoint in the directory. Needs megatron-core. Megatron does
not store the step counters of torch's AdamW, so a resumed run differs from an uninterrupted one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.overrides import TorchFunctionMode

from torch_ckpt.frameworks.megatron.strategies import FastLoadStrategy, FastSaveStrategy

VOCABULARY, LENGTH, BATCH, MICROBATCHES = 64, 16, 4, 2


class OnCpu(TorchFunctionMode):
    """Megatron creates tensors on CUDA devices. Within this mode they are created on the CPU."""

    def __enter__(self) -> OnCpu:
        """Replaces the functions of CUDA that Megatron calls."""
        torch.cuda.synchronize = lambda *_: None
        torch.cuda.current_device = lambda: torch.device("cpu")
        CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()  # There is no dropout.
        return super().__enter__()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch with another device."""
        if func is torch.Tensor.cuda:
            return args[0]
        if str((kwargs or {}).get("device")).startswith("cuda"):
            kwargs = {**kwargs, "device": "cpu"}
        return func(*args, **(kwargs or {}))


def build(tp: int, pp: int) -> tuple[Any, Any]:
    """Returns the model of this rank, and its optimizer."""
    torch.manual_seed(1)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    return model, get_megatron_optimizer(OptimizerConfig(lr=1e-2, clip_grad=0.0), [model])


def batches(step: int) -> Iterator[Any]:
    """The same tokens for a step on any number of ranks."""
    generator = torch.Generator().manual_seed(step)
    for _ in range(MICROBATCHES):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
        yield (start + torch.arange(LENGTH + 1)) % VOCABULARY


def forward(data: Iterator[Any], model: Any) -> Any:
    """One microbatch, as Megatron's schedules call it."""
    tokens = next(data)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])

    def loss_of(losses: torch.Tensor) -> Any:
        loss = losses.float().mean()
        return loss, {"loss": loss.detach()}

    return output, loss_of


def train(model: Any, optimizer: Any, step: int) -> float | None:
    """Trains one step; returns the loss on the last stage."""
    model.zero_grad_buffer()
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=batches(step),
        model=[model],
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    optimizer.step()
    return sum(float(each["loss"]) for each in losses) / MICROBATCHES if losses else None


def sharded_state(model: Any, optimizer: Any, *, is_loading: bool) -> dict[str, Any]:
    """The state dict of a checkpoint: Megatron's sharded tensors."""
    state = {"model": model.module.sharded_state_dict()}
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=is_loading)
    return state


def run(args: argparse.Namespace) -> None:
    """Trains from the newest checkpoint on, and saves at the end."""
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    model, optimizer = build(args.tp, args.pp)
    done = [int(path.name) for path in args.dir.glob("[0-9]*") if (path / "metadata.json").exists()]
    step = max(done, default=0)
    if step:
        group = parallel_state.get_data_parallel_group()
        state = dist_checkpointing.load(
            sharded_state(model, optimizer, is_loading=True),
            str(args.dir / f"{step}"),
            FastLoadStrategy(exchange_group=group),
        )
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    while step < args.steps:
        step += 1
        loss = train(model, optimizer, step)
        if loss is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
            print(f"step {step}: loss {loss:.6f}", flush=True)
    folder = args.dir / f"{step}"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(
        sharded_state(model, optimizer, is_loading=False), str(folder), FastSaveStrategy()
    )


def main() -> None:
    """Trains from the newest checkpoint on, and saves at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", type=Path, required=True, help="directory of the checkpoints")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--steps", type=int, default=4, help="train up to this step")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:  # A single process, without torchrun.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with OnCpu():
        run(args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
