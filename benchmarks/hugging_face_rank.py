"""One rank of bench_hugging_face.py: makes a model of transformers, and loads it sharded."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from load_rank import Answer, Rank, serve

PLAIN, TINY = "plain", "tiny"  # Folders.
OURS, TRANSFORMERS = "torch-ckpt", "transformers"


class HuggingFaceRank(Rank):
    """What one process keeps between calls: its parameters, as they were loaded first."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        logging.disable(logging.WARNING)
        warnings.simplefilter("ignore")
        rank, count = str(options["rank"]), str(options["count"])
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=count, HF_HUB_OFFLINE="1")
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._reference: list[torch.Tensor] = []
        self._model: Any = None

    def write(self, width: int, layers: int) -> int:
        """Writes a model as the hub has it, and a tiny one; returns the bytes of the former."""
        self._write_model(TINY, 1, 64)
        return self._write_model(PLAIN, layers, width)

    def _write_model(self, folder: str, layers: int, width: int) -> int:
        from transformers import AutoModelForCausalLM, Qwen3Config

        config = Qwen3Config(
            vocab_size=16 * width,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=width // 16,
            tie_word_embeddings=False,
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(self.directory / folder, max_shard_size="500MB")
        return sum(parameter.nbytes for parameter in model.parameters())

    def warm(self, contender: str, tp: int) -> None:
        """Loads a tiny model."""
        import torch_ckpt

        with torch_ckpt.installed() if contender == OURS else contextlib.nullcontext():
            self._pretrained(self.directory / TINY, tp)

    def read_model(self, contender: str, folder: str, tp: int, first: bool) -> Answer:
        """Loads onto FSDP2 over tensor parallelism; requires the bits of the first load."""
        import torch_ckpt

        self._model = None

        def run() -> None:
            self._model = self._pretrained(self.directory / folder, tp)

        with torch_ckpt.installed() if contender == OURS else contextlib.nullcontext():
            answer = self._measure(run)
        found = [parameter.detach().to_local() for parameter in self._model.parameters()]
        if first:
            self._reference = [tensor.clone() for tensor in found]
        elif not all(map(torch.equal, found, self._reference)):
            raise ValueError("other bits than the first load had")
        return answer

    @staticmethod
    def _pretrained(path: Path, tp: int) -> Any:
        from transformers import AutoModelForCausalLM
        from transformers.distributed import DistributedConfig

        config = DistributedConfig(tp_size=tp, fsdp_size=dist.get_world_size() // tp)
        return AutoModelForCausalLM.from_pretrained(
            path, distributed_config=config, dtype=torch.bfloat16
        )


if __name__ == "__main__":
    serve(HuggingFaceRank)
