"""The short examples, and the whole journey of a model: trained, killed, moved and exported."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from example_runs import ROOT, kill, output_of, running
from forks import run_python

from torch_ckpt import FastReader, Subscriber, load

pytestmark = pytest.mark.timeout(300)


def test_a_single_process_continues_from_its_checkpoint(tmp_path: Path) -> None:
    def train(*options: str) -> str:
        script = ROOT / "examples/single_process.py"
        done = run_python(script, *options, folder=tmp_path)
        assert done.returncode == 0, done.stdout
        return done.stdout

    whole = train("--dir", "whole")
    train("--stop-after", "50")  # Not a multiple of `every`: the last step is saved.
    assert train() == whole.replace("started from step 0", "started from step 50")


@pytest.mark.slow
def test_a_training_moves_from_two_ranks_to_three(tmp_path: Path) -> None:
    output_of("reshard.py", "--steps 45", ranks=2, folder=tmp_path)
    output = output_of("reshard.py", "--steps 100", ranks=3, folder=tmp_path)
    # The ranks write to one pipe, so a line of one rank may end after that of another has begun.
    lines = re.findall(r"rank \d of \d: steps \d+ to \d+, shard \[\d+, \d+\]", output)
    assert sorted(lines) == [
        f"rank {rank} of 3: steps 46 to 100, shard {shard}"
        for rank, shard in enumerate(["[22, 8]", "[22, 8]", "[20, 8]"])
    ]


@pytest.mark.framework("deepspeed", "matplotlib")
@pytest.mark.slow
@pytest.mark.parametrize("hub", ["fsdp2", "zero3"])
def test_losses_are_those_of_training_without_a_switch(tmp_path: Path, hub: str) -> None:
    arguments = f"--steps 8 --hub {hub} --dir . --plot curves.svg"
    output = output_of("loss_curves.py", arguments, ranks=2, folder=tmp_path)
    assert "all losses are those of uninterrupted training" in output
    assert (tmp_path / "curves.svg").exists()


@pytest.mark.framework("transformers")
@pytest.mark.slow
def test_a_model_is_trained_killed_moved_and_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    every = "--save-every 10"
    with running("start_to_finish.py", every, ranks=3, folder=tmp_path) as process:
        assert process.stdout is not None
        committed = tmp_path / "runs/llama/step-10/.metadata"
        for line in process.stdout:
            if line.startswith("step ") and committed.exists():
                break
        kill(process)

    output = output_of("start_to_finish.py", f"{every} --steps 70", ranks=2, folder=tmp_path)
    starts = {int(step) for step in re.findall(r"rank \d of 2: starts from step (\d+)", output)}
    assert len(starts) == 1
    assert starts.pop() % 10 == 0

    output = output_of("start_to_finish.py", "--export exported", ranks=2, folder=tmp_path)
    assert "exported step 70 to exported" in output
    assert {file.name for file in (tmp_path / "exported").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "exported", output_loading_info=True
    )
    assert not any(info.values()), info
    weights = {"model": {name: torch.zeros_like(t) for name, t in model.state_dict().items()}}
    load({"training": weights}, storage_reader=FastReader(tmp_path / "runs/llama/step-70"))
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights["model"][name]), name


@pytest.mark.framework("transformers")
@pytest.mark.slow
def test_a_model_generates_with_each_version_that_two_ranks_publish(tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    sys.path.append(str(ROOT / "examples"))
    from publish import CONFIG, PROMPT

    output = output_of("publish.py", "--steps 12", ranks=1, folder=tmp_path)
    lines = re.findall(r"version (\d+) \(([\d,]+) bytes of deltas\): (.*)", output)
    versions = [int(version) for version, _, _ in lines]
    assert versions == sorted(versions)
    assert versions[-1] == 12
    model = LlamaForCausalLM(CONFIG).to(torch.bfloat16).eval()
    assert Subscriber(tmp_path / "runs/policy").update(model) == 12
    prompt = torch.tensor([list(PROMPT)])
    options = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert lines[-1][2] == repr(bytes(tokens[0].tolist()).decode(errors="replace"))
