"""Trains in a single process, and continues from its newest checkpoint when it runs again.

Stop it early, then run it again::

python examples/single_process.py --stop-after 60
python examples/single_process.py
"""

import argparse

import torch
from torch import nn

from torch_ckpt import Run


def main() -> None:
    """Trains a small network up to step 100."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dir", default="runs/single", help="directory of the run")
    parser.add_argument("--stop-after", type=int, default=100, help="step after which to stop")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}

    with Run(args.dir, every=20, keep_last=2) as run:
        start = run.restore(state) or 0
        print(f"started from step {start}")
        for step in range(start + 1, args.stop_after + 1):
            inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
            loss = (model(inputs).squeeze(1) - inputs.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if run.should_save(step) or step == args.stop_after:
                run.save(step, state)
        print(f"step {args.stop_after}: loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
