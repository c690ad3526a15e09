"""Stops in the middle of an epoch, resumes on another number of ranks, and misses no sample.

Ranks train a small byte-level model on paragraphs of the Python standard library. Each rank packs
as many whole paragraphs into a batch as fit. So each rank has its own position in the data and its
own random state for dropout. A checkpoint has both for each rank. On as many ranks, each rank loads
its own. On another number of ranks, `deal_again` distributes the remaining samples.

Two runs on CPUs. The first stops between two checkpoints, as if it were killed::

    torchrun --standalone --nproc_per_node 2 examples/resume_dataloader.py --stop-after 27
    torchrun --standalone --nproc_per_node 3 examples/resume_dataloader.py

The last line reports how often each sample was used, except after the last checkpoint.
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

from torch_ckpt import RankState, Run

CONTEXT = 8  # Bytes from which the model predicts the next one.


# ---- Data ----------------------------------------------------------------------------------------


def read_samples(count: int) -> list[bytes]:
    """Reads ``count`` paragraphs of the standard library's sources, each of 1 to 4000 bytes."""
    samples: list[bytes] = []
    for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        paragraphs = file.read_bytes().split(b"\n\n")
        samples += [text for text in paragraphs if 0 < len(text) <= 4000]
        if len(samples) >= count:
            break
    return samples[:count]


class Loader:
    """Deals this rank's share of an epoch, in shuffled order, in batches of so many bytes.

    A share is a few ranges of places in that order, so its state is small however long the epoch.
    """

    def __init__(self, samples: list[bytes], *, seed: int, batch_nbytes: int) -> None:
        self.samples = samples
        self.batch_nbytes = batch_nbytes
        generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(len(samples), generator=generator).tolist()
        self.left = [range(dist.get_rank(), len(samples), dist.get_world_size())]

    def next_batch(self) -> list[int]:
        """Returns the numbers of the samples that fit, at least one; none at the epoch's end."""
        batch: list[int] = []
        nbytes = 0
        while self.left:
            if not self.left[0]:
                self.left.pop(0)
                continue
            number = self.order[self.left[0][0]]
            nbytes += len(self.samples[number])
            if batch and nbytes > self.batch_nbytes:
                break
            batch.append(number)
            self.left[0] = self.left[0][1:]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Returns what is left to this rank."""
        return {"left": [(part.start, part.stop, part.step) for part in self.left]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what is left from a ``state_dict``."""
        self.left = [range(*part) for part in state["left"]]


def deal_again(states: list[dict[str, Any]], rank: int, world_size: int) -> dict[str, Any]:
    """Puts in a row what was left to all ranks, and gives each of the new ones its turn.

    Every ``world_size``-th place of a row of ranges is a range of each of them again.
    """
    dealt = []
    turn = rank
    for part in [range(*part) for state in states for part in state["left"]]:
        mine = part[turn::world_size]
        dealt.append((mine.start, mine.stop, mine.step))
        turn = (turn - len(part)) % world_size
    return {"left": dealt}


class Consumed:
    """The samples that this rank has used. The example counts them at the end."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    def state_dict(self) -> list[int]:
        """Returns their numbers."""
        return list(self.numbers)

    def load_state_dict(self, state: list[int]) -> None:
        """Takes the numbers of a ``state_dict``."""
        self.numbers = state

    def by_rank(self) -> list[list[int]]:
        """Returns those of all ranks."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self.numbers)
        return gathered


def give_to_first(states: list[list[int]], rank: int, world_size: int) -> list[int]:
    """Assigns the counts of all former ranks to rank 0."""
    return [number for state in states for number in state] if rank == 0 else []


# ---- Training ------------------------------------------------------------------------------------


class Training:
    """The model, which all ranks have alike, and its optimizer; a ``Stateful`` of DCP."""

    def __init__(self) -> None:
        self.model = nn.Sequential(
            nn.Embedding(256, 16),
            nn.Flatten(-2),
            nn.Linear(CONTEXT * 16, 128),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(128, 256),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.step = 0

    def train_step(self, texts: list[bytes]) -> float | None:
        """Does one step and returns the mean loss of all ranks' bytes; ``None`` if there is none.

        A rank without remaining text calls it as well, for the collective.
        """
        padded = b"".join(bytes(CONTEXT) + text for text in texts) + bytes(CONTEXT + 1)
        windows = torch.frombuffer(bytearray(padded), dtype=torch.uint8).unfold(0, CONTEXT + 1, 1)
        windows = windows[windows[:, -1] != 0].long()  # Those that end with a byte of a text.
        loss = F.cross_entropy(self.model(windows[:, :-1]), windows[:, -1], reduction="sum")
        self.optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.view(-1) for parameter in self.model.parameters()]
        own = torch.tensor([loss.item(), len(windows)])
        total = torch.cat([own, *gradients])
        dist.all_reduce(total)
        sums, count = total[2:], total[1].item()
        if count == 0:
            return None
        for gradient, mean in zip(gradients, sums.split([len(g) for g in gradients]), strict=True):
            gradient.copy_(mean / count)
        self.optimizer.step()
        self.step += 1
        return total[0].item() / count

    def state_dict(self) -> dict[str, Any]:
        """Returns what is the same on all ranks."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what was loaded."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]


def say(text: str) -> None:
    """Prints a line, once."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def summed(parts: list[int]) -> str:
    """Returns the parts of a sum, in words: ``3 + 4 = 7``."""
    return f"{' + '.join(map(str, parts))} = {sum(parts)}"


def train(args: argparse.Namespace) -> None:
    """Trains to the end of the epoch, from the newest checkpoint if there is one."""
    samples = read_samples(args.samples)
    torch.manual_seed(args.seed)  # All ranks start from one model.
    training = Training()
    # But each drops out on its own, and not as it did before on another number of ranks.
    torch.manual_seed(args.seed + 1000 * dist.get_world_size() + dist.get_rank())
    loader = Loader(samples, seed=args.seed, batch_nbytes=args.batch_nbytes)
    consumed = Consumed()
    state = {
        "training": training,
        "data": RankState(loader, on_resize=deal_again),
        "rng": RankState(torch.get_rng_state, torch.set_rng_state, on_resize="drop"),
        "consumed": RankState(consumed, on_resize=give_to_first),
    }
    say(f"{dist.get_world_size()} ranks, {len(samples)} samples")
    with Run(args.dir, every=args.save_every) as run:
        if (start := run.restore(state)) is not None:
            before = sum(len(numbers) for numbers in consumed.by_rank())
            left: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(left, sum(len(part) for part in loader.left))
            say(f"resumed from step {start}: {before} consumed, {summed(left)} left")

        while True:
            batch = loader.next_batch()
            loss = training.train_step([samples[number] for number in batch])
            if loss is None:
                break
            consumed.numbers += batch
            if run.should_save(training.step):
                run.save(training.step, state)
                counts = [len(numbers) for numbers in consumed.by_rank()]
                say(f"saved step {training.step}: loss {loss:.3f}, {summed(counts)} consumed")
            if training.step == args.stop_after:
                say(f"stopped after step {training.step}")
                return

    everyones = torch.tensor([number for numbers in consumed.by_rank() for number in numbers])
    times: Tensor = torch.bincount(everyones, minlength=len(samples))
    if not torch.equal(times, torch.ones_like(times)):
        raise SystemExit(f"{(times == 0).sum()} samples missed, {(times > 1).sum()} repeated")
    say(f"epoch ended at step {training.step}: each of {len(samples)} samples consumed once")


# ---- The program ---------------------------------------------------------------------------------


def main() -> None:
    """Runs the program on this rank."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--dir", type=Path, default=Path("runs/dataloader"), help="directory of the run")
    add("--samples", type=int, default=1500, help="samples of the epoch")
    add("--batch-nbytes", type=int, default=4096, help="bytes per rank and step")
    add("--save-every", type=int, default=10, help="steps between checkpoints")
    add("--stop-after", type=int, help="step after which to stop without a checkpoint")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        train(args)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
