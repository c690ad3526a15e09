"""A conversion stores once what a source states to be one tensor, and names it; nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import differences, random_tensor
from deepspeed_checkpoints import write as write_deepspeed
from safetensors import safe_open
from support.safetensors_files import names_in
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torch_ckpt
from torch_ckpt import FastReader, SafetensorsWriter
from torch_ckpt.cli.main import main
from torch_ckpt.conversion import pieces, ties
from torch_ckpt.conversion.convert import convert
from torch_ckpt.errors import UnsupportedError
from torch_ckpt.filesystems.location import Location

SAVES: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "ours": lambda state, path: torch_ckpt.save(state, checkpoint_id=path),
    "stock": lambda state, path: dcp.save(state, storage_writer=FileSystemWriter(path)),
    "torch": torch.save,
    "safetensors": lambda state, path: torch_ckpt.save(
        state, storage_writer=SafetensorsWriter(path)
    ),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes these small tensors consist of several pieces."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 200)
    monkeypatch.setattr(ties, "_PIECE_NBYTES", 200)


def model_of(name: str) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    if name == "T5":
        return hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=40, d_model=16, d_kv=4, d_ff=24, num_heads=2, num_layers=1
            )
        )  # fmt: skip
    if name == "GPT-2":
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=40, n_positions=8, n_embd=16, n_layer=2, n_head=2)
        )
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
            num_attention_heads=2, tie_word_embeddings=True,
        )
    )  # fmt: skip


MODELS = ["T5", "GPT-2", "Llama"]


def save_config(model: Any, path: Path) -> None:
    """Writes the ``config.json`` that ``save_pretrained`` writes."""
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)


def storages(state: dict[str, torch.Tensor]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for name, tensor in state.items():
        found.setdefault(tensor.untyped_storage().data_ptr(), []).append(name)
    return found


def run(*arguments: object) -> int:
    return main(list(map(str, arguments)))


@pytest.mark.framework("transformers")
@pytest.mark.thin(1)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("source", SAVES)
def test_tied_weights_are_stored_once_in_safetensors(
    source: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of(name)
    model.save_pretrained(tmp_path / "theirs")
    SAVES[source](model.state_dict(), tmp_path / "source")
    if source in ("ours", "stock"):  # DCP records no ties, and the model has a list of its own.
        save_config(model, tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "ours", "--to", "safetensors") == 0
    omitted = model.state_dict().keys() - names_in(tmp_path / "ours")
    assert names_in(tmp_path / "ours") == names_in(tmp_path / "theirs")
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[2] for line in lines if line.startswith("stored once")} == omitted
    assert omitted

    (tmp_path / "ours" / "config.json").write_bytes(
        (tmp_path / "theirs" / "config.json").read_bytes()
    )
    loaded, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values()), info
    assert not differences(dict(model.state_dict()), dict(loaded.state_dict()))
    # Every name is found, also by tensors that are not tied, and by stock's planner.
    for load in (torch_ckpt.load, dcp.load):
        state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        load(state, storage_reader=FastReader(tmp_path / "ours"))
        assert not differences(dict(model.state_dict()), state)
    assert run("diff", tmp_path / "source", tmp_path / "ours") == 0
    assert run("verify", tmp_path / "ours") == 2  # It has no checksums.


@pytest.mark.framework("transformers")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("source", [source for source in SAVES if source != "torch"])
def test_tied_weights_share_a_storage_in_a_file_of_torch(
    source: str, name: str, tmp_path: Path
) -> None:
    model = model_of(name)
    SAVES[source](model.state_dict(), tmp_path / "source")
    save_config(model, tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "x.pt", "--to", "torch") == 0
    for options in ({}, {"mmap": True}):
        state = torch.load(tmp_path / "x.pt", **options)
        assert not differences(dict(model.state_dict()), state)
        assert sorted(map(sorted, storages(state).values())) == sorted(
            map(sorted, storages(model.state_dict()).values())
        )
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    ours, theirs = ((tmp_path / name).stat().st_size for name in ("x.pt", "theirs.pt"))
    assert abs(ours - theirs) < 4096
    assert run("diff", tmp_path / "source", tmp_path / "x.pt") == 0


def test_views_of_one_storage_are_tied_only_if_they_are_equal(tmp_path: Path) -> None:
    base = torch.randn(40, 16)
    state = {"model": {
        "w": base, "again": base, "top": base[:20], "bottom": base[20:], "transposed": base.t(),
        "square": base.view(16, 40), "alone": base.clone(),
        "empty": torch.empty(0, 4), "empty too": torch.empty(0, 4),
    }}  # fmt: skip
    torch.save(state, tmp_path / "source.pt")
    convert(Location(tmp_path / "source.pt"), Location(tmp_path / "x.pt"), "torch", prefix="model.")
    loaded = torch.load(tmp_path / "x.pt")
    assert not differences(state["model"], loaded)
    groups = [names for at, names in storages(loaded).items() if at and len(names) > 1]
    assert groups == [["w", "again"]]


# ---- Tensors that are equal, and not tied ----


def apart() -> dict[str, torch.Tensor]:
    """Tensors of a fresh model and optimizer that are equal by nature."""
    mask = torch.tril(torch.ones(24, 24))
    state: dict[str, torch.Tensor] = {}
    for layer in range(3):
        state |= {
            f"{layer}.norm.weight": torch.ones(128),
            f"{layer}.norm.bias": torch.zeros(128),
            f"{layer}.attention.bias": mask.bool(),
            f"{layer}.attention.mask": mask.clone(),
            f"{layer}.identity": torch.eye(16),
            f"{layer}.position_ids": torch.arange(128),
            f"{layer}.inv_freq": 1.0 / torch.arange(1, 33),
            f"{layer}.exp_avg": torch.zeros(16, 16),
            f"{layer}.scalar": torch.tensor(1.5),
            f"{layer}.empty": torch.empty(0, 512),
            f"{layer}.int8": torch.arange(512).to(torch.int8),
        }
    return state


@pytest.mark.thin(0.5)
@pytest.mark.parametrize("source", ["ours", "stock"])
def test_tensors_that_are_equal_by_nature_are_each_stored(source: str, tmp_path: Path) -> None:
    SAVES[source](apart(), tmp_path / "source")
    for to, name in (("safetensors", "hf"), ("torch", "x.pt")):
        assert convert(Location(tmp_path / "source"), Location(tmp_path / name), to) == {}
    assert names_in(tmp_path / "hf") == apart().keys()
    assert not differences(apart(), torch.load(tmp_path / "x.pt"))


@pytest.mark.parametrize("source", ["torch", "safetensors"])
def test_copies_are_not_tied_in_a_format_that_records_ties(source: str, tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    state = {"model": weight, "ema": weight.clone(), "tied": weight}
    SAVES[source](state, tmp_path / "source")
    found = convert(Location(tmp_path / "source"), Location(tmp_path / "hf"), "safetensors")
    assert found == {"tied": "model"}
    assert names_in(tmp_path / "hf") == {"model", "ema"}


@pytest.mark.parametrize("source", ["ours", "stock"])
def test_training_goes_on_with_a_converted_optimizer_as_with_its_own(
    source: str, tmp_path: Path
) -> None:
    def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for number in range(steps):
            optimizer.zero_grad()
            net(torch.full((2, 40), 0.1 * number + 0.1)).square().sum().backward()
            optimizer.step()

    torch.manual_seed(0)
    net = nn.Linear(40, 40)
    adam = torch.optim.Adam(net.parameters(), amsgrad=True)
    train(net, adam, 1)  # Now each exp_avg_sq equals max_exp_avg_sq.
    ema = {name: value.clone() for name, value in net.state_dict().items()}
    SAVES[source](
        {"net": net.state_dict(), "ema": ema, "adam": adam.state_dict()}, tmp_path / "source"
    )
    assert convert(Location(tmp_path / "source"), Location(tmp_path / "x.pt"), "torch") == {}
    stored = torch.load(tmp_path / "x.pt", weights_only=False)

    other = nn.Linear(40, 40)
    other.load_state_dict(stored["net"])
    states = {int(number): state for number, state in stored["adam"]["state"].items()}
    other_adam = torch.optim.Adam(other.parameters(), amsgrad=True)
    other_adam.load_state_dict({**stored["adam"], "state": states})
    train(net, adam, 20)
    train(other, other_adam, 20)
    assert not differences(net.state_dict(), other.state_dict())
    assert not differences(ema, stored["ema"])
    assert (
        convert(
            Location(tmp_path / "source"), Location(tmp_path / "hf"), "safetensors", prefix="ema."
        )
        == {}
    )


@pytest.mark.parametrize("to", ["torch", "safetensors"])
@pytest.mark.parametrize("head", ["opt.", "", "opt.state."])
def test_a_step_that_all_states_share_is_counted_by_each(
    to: str, head: str, tmp_path: Path
) -> None:
    """Optimizers that share it, as FSDP1 has them, would count it once for each parameter."""
    step, weight = torch.tensor(3.0), torch.randn(4)
    states = {name: {"step": step, "exp_avg": torch.randn(4)} for name in ("a", "b")}
    groups = [{"lr": step}, {"lr": step}]
    state = {"opt": {"state": states, "param_groups": groups}, "a": weight, "b": weight}
    torch.save(state, tmp_path / "source.pt")
    arguments = Location(tmp_path / "source.pt"), Location(tmp_path / "target"), to
    if head:
        assert convert(*arguments, prefix=head) == {}
    elif to == "safetensors":
        assert convert(*arguments) == {"b": "a"}
    else:  # The source is a file of torch.save already.
        with pytest.raises(UnsupportedError):
            convert(*arguments)


@pytest.mark.thin(0.1)
@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.complex128],
)
@pytest.mark.parametrize("sizes", [[], [300], [10, 30], [3, 4, 5, 6], [1, 300], [300, 1], [0]])
def test_ties_by_hand_are_compared_whole(
    dtype: torch.dtype, sizes: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = random_tensor(sizes, dtype)
    state = {"a": weight, "x": weight.clone(), "b": weight.clone(), "other": weight.clone()}
    if weight.numel():
        state["other"].view(-1)[-1:].view(torch.uint8)[-1] ^= 1
    state |= {"half": torch.zeros(sizes).half(), "longer": torch.zeros([*sizes, 2]).to(dtype)}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    ways = [("torch", "x.pt"), ("safetensors", "hf")]
    for to, name in ways if dtype != torch.complex128 else ways[:1]:
        arguments = ("convert", tmp_path / "source", tmp_path / name, "--to", to)
        assert run(*arguments, "--ties", "x", "b", "--ties", "a", "x") == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["stored once: x is b", "stored once: a is b"]
        loaded = {name: torch.zeros_like(value) for name, value in state.items()}
        torch_ckpt.load(loaded, checkpoint_id=tmp_path / name)
        assert not differences(state, loaded)
    if weight.numel():
        for name, other in [("other", "a"), ("half", "a"), ("longer", "a")]:
            assert run(*arguments, "--ties", name, other, "--overwrite") == 3
            assert "they are not equal" in capsys.readouterr().err


def test_ties_by_hand_that_cannot_be_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weight = torch.randn(4)
    adam = {"state": {"w": {"step": weight, "exp_avg": weight}}, "param_groups": [{"lr": 0.1}]}
    state = {"w": weight, "n": 3, "optim": adam}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    arguments = ("convert", tmp_path / "source", tmp_path / "x.pt", "--to", "torch")
    for name, match in {
        "n": "cannot tie 'n' to 'w': .* has no tensor 'n'",
        "v": "cannot tie 'v' to 'w': .* has no tensor 'v'",
        "optim.state.w.step": "cannot tie 'optim.state.w.step' to 'w'.*: optimizers update",
    }.items():
        assert run(*arguments, "--ties", name, "w") == 3
        assert re.search(match, capsys.readouterr().err)
    assert run(*arguments[:3], "--to", "dcp", "--ties", "n", "w") == 3
    assert "cannot tie 'n': dcp stores every name" in capsys.readouterr().err
    assert not (tmp_path / "x.pt").exists()


@pytest.mark.framework("transformers")
def test_the_elements_count_and_not_the_config(tmp_path: Path) -> None:
    model = model_of("T5")
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["lm_head.weight"][3, 3] += 1
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    save_config(model, tmp_path / "source")
    found = convert(Location(tmp_path / "source"), Location(tmp_path / "hf"), "safetensors")
    names = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    assert found == dict.fromkeys(names, "shared.weight")


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"architectures": ["pipeline"]}, "transformers has no model 'pipeline'"),
        ({"architectures": ["LlamaForCausalLM"]}, "model_type"),
        (
            {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 10**9},
            "it has num_hidden_layers=1000000000, but the checkpoint has only 2 names",
        ),
        (
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "model_type": "llava",
                "text_config": {"model_type": "llama", "num_hidden_layers": 10**9},
            },
            "it has num_hidden_layers=1000000000, but the checkpoint has only 2 names",
        ),
    ],
)
@pytest.mark.framework("transformers")
def test_a_config_of_a_stranger_ties_nothing(
    config: dict[str, Any], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.randn(40, 16)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    torch_ckpt.save(dict.fromkeys(names, weight), checkpoint_id=tmp_path / "source")
    text = json.dumps({"tie_word_embeddings": True, **config})
    (tmp_path / "source" / "config.json").write_text(text)
    arguments = Location(tmp_path / "source"), Location(tmp_path / "hf"), "safetensors"
    assert convert(*arguments) == {}
    assert why in caplog.text
    assert names_in(tmp_path / "hf") == set(names)


@pytest.mark.framework("transformers")
def test_ties_can_be_kept_apart(tmp_path: Path) -> None:
    model = model_of("GPT-2")
    state = model.state_dict()
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    save_config(model, tmp_path / "source")
    arguments = ("convert", tmp_path / "source", tmp_path / "hf", "--to", "safetensors")
    assert run(*arguments, "--no-ties") == 0
    assert names_in(tmp_path / "hf") == state.keys()
    arguments = ("convert", tmp_path / "source", tmp_path / "x.pt", "--to", "torch", "--no-ties")
    assert run(*arguments) == 0
    assert len(storages(torch.load(tmp_path / "x.pt"))) == len(state)


@pytest.mark.framework("transformers")
@pytest.mark.parametrize("to", ["dcp", "universal"])
def test_other_formats_have_every_name(to: str, tmp_path: Path) -> None:
    if to == "dcp":
        state = model_of("T5").state_dict()
        torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    else:
        write_deepspeed(tmp_path / "source", 3)
    assert convert(Location(tmp_path / "source"), Location(tmp_path / "target"), to) == {}
    names = FastReader(tmp_path / "target").read_metadata().state_dict_metadata
    stored = FastReader(tmp_path / "source").read_metadata().state_dict_metadata
    assert names.keys() >= stored.keys()
    if to == "dcp":
        blank = {name: torch.zeros_like(value) for name, value in state.items()}
        dcp.load(blank, storage_reader=FileSystemReader(tmp_path / "target"))
        assert not differences(dict(state), blank)


# ---- Ties in the headers of safetensors ----


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embed.weight


def test_a_file_of_save_model_is_loaded_by_all_its_names(tmp_path: Path) -> None:
    model = Tied()
    safetensors.torch.save_model(model, str(tmp_path / "m.safetensors"))
    state = {name: torch.zeros(40, 16) for name in ("embed.weight", "head.weight")}
    dcp.load(state, storage_reader=FastReader(tmp_path / "m.safetensors"))
    assert not differences(dict(model.state_dict()), state)
    found = convert(Location(tmp_path / "m.safetensors"), Location(tmp_path / "x.pt"), "torch")
    assert len(found) == 1
    (names,) = storages(torch.load(tmp_path / "x.pt")).values()
    assert sorted(names) == ["embed.weight", "head.weight"]


def test_what_we_write_is_loaded_by_load_model(tmp_path: Path) -> None:
    model = Tied()
    torch_ckpt.save(model.state_dict(), storage_writer=SafetensorsWriter(tmp_path))
    other = Tied()
    safetensors.torch.load_model(other, str(tmp_path / "model.safetensors"))
    assert torch.equal(other.head.weight, model.head.weight)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_ties_lie_in_the_file_of_their_tensor(tmp_path: Path) -> None:
    tensors = {f"{number}": torch.randn(40, 16) for number in range(4)}
    state = {**tensors, **{f"tied {name}": value for name, value in tensors.items()}}
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(tmp_path, max_shard_nbytes=10_000))
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors.keys()
    blank = {name: torch.zeros(40, 16) for name in state}
    dcp.load(blank, storage_reader=FastReader(tmp_path))
    assert not differences(state, blank)


def test_a_stored_tensor_wins_over_a_tie(tmp_path: Path) -> None:
    a, b = torch.randn(4), torch.randn(4)
    safetensors.torch.save_file({"a": a}, tmp_path / "1.safetensors", metadata={"b": "a"})
    safetensors.torch.save_file({"b": b}, tmp_path / "2.safetensors", metadata={"a": "b", "c": "d"})
    state = {"a": torch.zeros(4), "b": torch.zeros(4)}
    dcp.load(state, storage_reader=FastReader(tmp_path))
    assert not differences({"a": a, "b": b}, state)
    assert FastReader(tmp_path).read_metadata().state_dict_metadata.keys() == {"a", "b"}


def test_names_of_the_header_itself_are_not_ties(tmp_path: Path) -> None:
    weight = torch.randn(40, 16)
    state = {"a": weight, "format": weight, "b": weight}
    torch_ckpt.save(state, storage_writer=SafetensorsWriter(tmp_path / "hf"))
    torch_ckpt.save(state, checkpoint_id=tmp_path / "dcp")
    arguments = Location(tmp_path / "dcp"), Location(tmp_path / "converted"), "safetensors"
    convert(*arguments, ties={"b": "a", "format": "a"})
    for name in ("hf", "converted"):
        assert names_in(tmp_path / name) == {"a", "format"}
        blank = {name: torch.zeros(40, 16) for name in state}
        dcp.load(blank, storage_reader=FastReader(tmp_path / name))
        assert not differences(state, blank)
