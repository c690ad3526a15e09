"""``torch-ckpt convert``: writes a checkpoint of any format as one of another format."""

from __future__ import annotations

import argparse
import warnings
from typing import Any

from torch_ckpt.cli.arguments import (
    add_json,
    add_rules,
    add_trust_pickle,
    checkpoint_at,
    path_of,
    positive,
    rules_of,
)
from torch_ckpt.cli.terminal import SOUND, print_json, printable
from torch_ckpt.known_frameworks import FRAMEWORKS

__all__ = ["add_to"]

_FORMATS = {
    "dcp": "a directory that stock DCP loads",
    "safetensors": "a Hugging Face directory",
    "torch": "one file for torch.load",
    **{row.target.name: row.target.help for row in FRAMEWORKS if row.target is not None},
}
"""Values of ``--to``, and their help."""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint of any format in another format",
        description="Writes a checkpoint of any format in another one. Tensors pass through memory "
        "in pieces of 8 MiB. What has a checksum is verified. The target appears when it is "
        "complete. A conversion is not needed to load a checkpoint. Exit status: 0 if the target "
        "is complete; 1 if the source is damaged; 3 for other errors.",
    )
    parser.add_argument("source", type=path_of, help="checkpoint, or a run for its newest step")
    parser.add_argument("target", type=path_of, help="checkpoint to write")
    parser.add_argument(
        "--to",
        required=True,
        choices=_FORMATS,
        help="; ".join(f"{name}: {what}" for name, what in _FORMATS.items()),
    )
    parser.add_argument(
        "--prefix",
        default="",
        help="convert only names that begin with this, without it, such as 'model.'",
    )
    ties = parser.add_mutually_exclusive_group()
    ties.add_argument(
        "--ties",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "OTHER"),
        help="store NAME and OTHER, such as tied embeddings, as one tensor OTHER in files of "
        "safetensors or torch.save. Other ties are found if the source records them, or by the "
        "config.json of a model in the source",
    )
    ties.add_argument(
        "--no-ties",
        action="store_true",
        help="store a tied tensor under each of its names",
    )
    parser.add_argument(
        "--quantize",
        choices=["fp8-block-128"],
        help="store matrices in 8 bits, with a scale for each block, as files of safetensors. "
        "Norms, embeddings, heads and routers stay as they are",
    )
    parser.add_argument(
        "--ranks",
        type=positive,
        help="number of ranks that load a directory of torch_checkpointing, each of which needs "
        "files of items without tensors (default: 1, or that of the states of ranks in the source)",
    )
    add_rules(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target")
    add_trust_pickle(parser)
    add_json(parser)
    parser.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> int:
    from torch_ckpt.conversion.convert import convert  # Imports torch.

    source = checkpoint_at(options.source)
    with warnings.catch_warnings():
        # The user has asked for it, and it is untrue if the source turns out to be damaged.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        ties = convert(
            source,
            options.target,
            options.to,
            prefix=options.prefix,
            rules=rules_of(options),
            overwrite=options.overwrite,
            trust_pickle=options.trust_pickle,
            ties=None if options.no_ties else dict(options.ties),
            quantize=options.quantize,
            ranks=options.ranks,
        )
    if options.json:
        facts = {"source": str(source), "target": str(options.target), "format": options.to}
        print_json({**facts, "ties": ties})
        return SOUND
    for name, first in ties.items():
        print(f"stored once: {printable(name)} is {printable(first)}")
    print(f"wrote {options.target}")
    return SOUND
