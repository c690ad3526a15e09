"""The public names of the package: how they are imported, and how their objects print."""

from __future__ import annotations

from pathlib import Path

import torch_ckpt
from torch_ckpt import FastReader, FastWriter, Run, SafetensorsWriter
from torch_ckpt.agent.options import AgentOptions
from torch_ckpt.filesystems.location import register


def test_a_run_a_writer_and_a_reader_print_their_directory(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    assert repr(run) == f"Run('{tmp_path}/run')"
    run.close()
    assert repr(run) == f"Run('{tmp_path}/run') (closed)"
    with Run(tmp_path / "run", local=tmp_path / "local", asynchronous=True) as both:
        assert repr(both) == f"Run('{tmp_path}/run', local='{tmp_path}/local')"
    for kind in (FastWriter, FastReader, SafetensorsWriter):
        assert repr(kind(tmp_path / "one")) == f"{kind.__name__}('{tmp_path}/one')"
        assert repr(kind("memory://one/two")) == f"{kind.__name__}('memory://one/two')"


def test_the_options_of_an_agent_and_register_are_imported_from_the_package() -> None:
    assert torch_ckpt.AgentOptions is AgentOptions
    assert torch_ckpt.register is register
    assert {"AgentOptions", "register"} <= set(torch_ckpt.__all__) & set(dir(torch_ckpt))
