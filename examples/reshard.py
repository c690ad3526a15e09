"""A training job that moves from 2 ranks to 3. No step converts the checkpoint in between.

Each rank of FSDP2 has a shard of every parameter. The load gives each rank its new shards::

    torchrun --standalone --nproc_per_node 2 examples/reshard.py --steps 50
    torchrun --standalone --nproc_per_node 3 examples/reshard.py --steps 100
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_ckpt import Run


def main() -> None:
    """Trains a small network up to ``--steps``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="runs/reshard", help="directory of the run")
    parser.add_argument("--steps", type=int, default=50, help="step after which to stop")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    with Run(args.dir, every=25, keep_last=2) as run:
        # A plain state dict: `restore` fills its tensors, `set_state_dict` hands them to the model.
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        start = run.restore(state) or 0
        set_state_dict(
            *(model, optimizer),
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for step in range(start + 1, args.steps + 1):
            inputs = torch.randn(36, 8, generator=torch.Generator().manual_seed(step))
            inputs = inputs.chunk(ranks)[rank]
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.should_save(step) or step == args.steps:
                state = get_state_dict(model, optimizer)
                run.save(step, {"model": state[0], "optimizer": state[1]})
        shard = model[0].weight.to_local()
        print(f"rank {rank} of {ranks}: steps {start + 1} to {args.steps}, shard {[*shard.shape]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
