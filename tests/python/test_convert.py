"""`torch-ckpt convert` writes the values of any format in any other, in bounded memory."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoints import DTYPES, bits, memory_growth_kib
from deepspeed_checkpoints import write as write_deepspeed
from support.flips import flip_value
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

import torch_ckpt
from torch_ckpt import errors
from torch_ckpt._core.tensors import has_own_storage
from torch_ckpt.cli import convert as convert_command
from torch_ckpt.cli.main import main
from torch_ckpt.conversion import pieces
from torch_ckpt.conversion.convert import TARGETS, convert
from torch_ckpt.filesystems.location import Location
from torch_ckpt.formats.torch_archive import PendingTensor, lay_out


def elements(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.arange(35).reshape(5, 7)
    return numbers.to(torch.float32).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


STATE: dict[str, Any] = {
    "model": {
        "wide": torch.arange(9 * 11 * 13.0).reshape(9, 11, 13),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        **{str(dtype).removeprefix("torch."): elements(dtype) for dtype in DTYPES},
    },
    "list": [torch.ones(2), {"deep": torch.zeros(2), "text": "a"}],
    "options": {"lr": 0.1, "betas": (0.9, 0.99)},
    "step": 7,
}
SAVES: dict[str, Callable[[Path], Any]] = {
    "ours": lambda path: torch_ckpt.save(STATE, checkpoint_id=path),
    "stock": lambda path: dcp.save(STATE, storage_writer=FileSystemWriter(path)),
    "torch": lambda path: torch.save(STATE, path),
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes these small tensors consist of several pieces."""
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 200)


def run(*arguments: object) -> int:
    return main(list(map(str, arguments)))


@pytest.mark.parametrize(
    ("source", "to"),
    [
        *(("ours", "dcp"), ("ours", "torch"), ("stock", "dcp"), ("stock", "torch")),
        *(("torch", "dcp"), ("ours", "torch_checkpointing"), ("torch", "torch_checkpointing")),
    ],
)
def test_every_value_is_the_same_in_the_other_format(tmp_path: Path, source: str, to: str) -> None:
    SAVES[source](tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", to) == 0
    assert run("diff", tmp_path / "source", tmp_path / "target") == 0
    assert run("verify", tmp_path / "target") == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_a_tensor_without_elements_may_be_the_first(tmp_path: Path, to: str) -> None:
    state = {"a": torch.empty(0, 4), "b": torch.ones(3)}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", to) == 0
    assert run("diff", tmp_path / "source", tmp_path / "target") == 0


def test_torch_loads_the_file(tmp_path: Path) -> None:
    SAVES["ours"](tmp_path / "source")
    convert(Location(tmp_path / "source"), Location(tmp_path / "x.pt"), "torch")
    for options in ({}, {"mmap": True}):
        state = torch.load(tmp_path / "x.pt", **options)
        assert state["options"] == STATE["options"]
        assert state["step"] == 7
        assert state["list"][1]["text"] == "a"
        for name, tensor in STATE["model"].items():
            assert state["model"][name].dtype == tensor.dtype
            assert bits(state["model"][name]) == bits(tensor), name
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None


def test_the_name_of_a_file_may_be_as_long_as_the_file_system_permits(tmp_path: Path) -> None:
    SAVES["ours"](tmp_path / "source")
    convert(Location(tmp_path / "source"), Location(tmp_path / ("y" * 255)), "torch")
    assert torch.load(tmp_path / ("y" * 255))["step"] == 7


@pytest.mark.parametrize("nbytes", [12, 3 << 14])  # Written at once, or in pieces.
def test_torch_loads_a_dtype_that_the_engine_does_not_have(tmp_path: Path, nbytes: int) -> None:
    data = torch.randint(256, (nbytes,), dtype=torch.uint8).reshape(3, -1)
    packed = data.view(torch.float4_e2m1fn_x2)
    torch_ckpt.save({"p": packed}, checkpoint_id=tmp_path / "source")
    convert(Location(tmp_path / "source"), Location(tmp_path / "x.pt"), "torch")
    loaded = torch.load(tmp_path / "x.pt")["p"]
    assert loaded.dtype == packed.dtype
    assert torch.equal(loaded.view(torch.uint8), data)


def test_stock_dcp_loads_the_directory(tmp_path: Path) -> None:
    SAVES["torch"](tmp_path / "source")
    convert(Location(tmp_path / "source"), Location(tmp_path / "target"), "dcp")
    state = {"model": {"wide": torch.empty(9, 11, 13)}, "step": 0}
    dcp.load(state, storage_reader=FileSystemReader(tmp_path / "target"))
    assert state["step"] == 7
    assert torch.equal(state["model"]["wide"], STATE["model"]["wide"])


def test_a_model_becomes_safetensors_without_its_prefix(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    state = {"model": {"w": STATE["model"]["wide"], "b": torch.ones(3).bfloat16()}, "step": 7}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    arguments = ("convert", tmp_path / "source", tmp_path / "hf", "--to", "safetensors")
    assert run(*arguments) == 3  # "step" is no tensor.
    assert run(*arguments, "--prefix", "model.") == 0
    loaded = load_file(tmp_path / "hf" / "model.safetensors")
    assert loaded.keys() == {"w", "b"}
    assert loaded["w"].equal(state["model"]["w"])


def test_a_prefix_that_no_name_has_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SAVES["ours"](tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "x", "--to", "dcp", "--prefix", "x.") == 3
    assert "has no name that begins with 'x.'" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_an_empty_key_is_converted(tmp_path: Path) -> None:
    torch_ckpt.save({"": torch.ones(3), "b": torch.zeros(3)}, checkpoint_id=tmp_path / "source")
    convert(Location(tmp_path / "source"), Location(tmp_path / "target"), "dcp")
    loaded = {"": torch.zeros(3), "b": torch.ones(3)}
    torch_ckpt.load(loaded, checkpoint_id=tmp_path / "target")
    assert (loaded[""].sum(), loaded["b"].sum()) == (3, 0)
    with pytest.raises(errors.UnsupportedError, match="'b' is itself a name"):
        convert(Location(tmp_path / "source"), Location(tmp_path / "other"), "dcp", prefix="b")


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch", "universal", "torch_checkpointing"])
def test_a_target_is_replaced_only_on_demand(
    tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_deepspeed(tmp_path / "source", 3)
    prefix = () if to == "universal" else ("--prefix", "model.up.")
    arguments = ("convert", tmp_path / "source", tmp_path / "target", "--to", to, *prefix)
    assert run(*arguments) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "target").rglob("*.pt")}
    assert run(*arguments) == 3
    assert "exists" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "target").rglob("*.pt")} == before
    with warnings.catch_warnings(record=True, action="always") as warned:
        assert run(*arguments, "--overwrite") == 0
    assert not [each for each in warned if "overwriting" in str(each.message)]
    assert run("verify", tmp_path / "target") in (0, 2)  # Safetensors have no checksums.
    assert {path.name for path in tmp_path.iterdir()} <= {"source", "target", "latest_universal"}


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch", "universal", "torch_checkpointing"])
@pytest.mark.parametrize("is_full", [True, False])
def test_a_target_that_is_a_link_stays_one(tmp_path: Path, to: str, is_full: bool) -> None:
    write_deepspeed(tmp_path / "source", 3)
    prefix = () if to == "universal" else ("--prefix", "model.up.")
    real, link = tmp_path / "disk" / "real", tmp_path / "links" / "link"
    real.parent.mkdir()
    link.parent.mkdir()
    link.symlink_to("../disk/real")
    if is_full:
        assert run("convert", tmp_path / "source", real, "--to", to, *prefix) == 0
        (real.parent / "latest_universal").unlink(missing_ok=True)
    arguments = ("convert", tmp_path / "source", link, "--to", to, *prefix, "--overwrite")
    assert run(*arguments) == 0
    assert link.is_symlink()
    assert run("verify", real) in (0, 2)
    assert [path.name for path in real.parent.iterdir()] == ["real"]
    assert {path.name for path in link.parent.iterdir()} <= {"link", "latest_universal"}


@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch", "universal", "torch_checkpointing"])
def test_a_damaged_source_leaves_no_target(
    tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last tensor is damaged, so others have been written."""
    groups = [{"lr": 0.1, "params": ["a", "b"]}]
    model = {"a": torch.arange(100.0), "b": torch.arange(200.0)}
    state: dict[str, Any] = {"model": model, "optim": {"state": {}, "param_groups": groups}}
    if to == "safetensors":
        state = {"model": model}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    (data,) = (tmp_path / "source").glob("*.distcp")
    flip_value(data, model["b"], 700)
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", to) == 1
    assert data.name in capsys.readouterr().err
    assert not any((tmp_path / "target").glob("*"))
    assert not (tmp_path / "target").is_file()
    assert [path.name for path in tmp_path.glob(".*")] == []


@pytest.mark.parametrize("to", ["dcp", "torch"])
@pytest.mark.parametrize("source", ["ours", "stock"])
def test_a_source_that_lacks_a_data_file_is_damaged(
    tmp_path: Path, source: str, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    SAVES[source](tmp_path / "source")
    (data,) = (tmp_path / "source").glob("*.distcp")
    data.unlink()
    for prefix in ((), ("--prefix", "model.")):
        words = ("convert", tmp_path / "source", tmp_path / "target", "--to", to, *prefix)
        assert run(*words) == 1
        assert f"cannot open {data}" in capsys.readouterr().err
        assert not (tmp_path / "target").exists()
    assert run("diff", tmp_path / "source", tmp_path / "source") == 3
    assert run("verify", tmp_path / "source") == 1
    assert run("convert", tmp_path / "absent", tmp_path / "target", "--to", to) == 3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_universal_folder_has_every_value_of_its_source(tmp_path: Path, stage: int) -> None:
    write_deepspeed(tmp_path / "source", stage)
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", "universal") == 0
    assert (tmp_path / "latest_universal").read_text() == "target"
    assert run("diff", tmp_path / "source", tmp_path, "--prefix", "model.") == 0
    assert run("diff", tmp_path / "source", tmp_path, "--prefix", "optim.") == 0


def test_a_universal_folder_needs_the_names_of_get_state_dict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SAVES["ours"](tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", "universal") == 3
    assert "optim.param_groups.0.params" in capsys.readouterr().err


@pytest.mark.parametrize("fqn", ["../x", "a/b", "..", 7, "optimizer_state.pt", "\0"])
def test_a_name_that_is_no_folder_is_refused(
    tmp_path: Path, fqn: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {
        "model": {str(fqn): torch.ones(2)},
        "optim": {"state": {}, "param_groups": [{"params": [fqn]}]},
    }
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", "universal") == 3
    assert f"{fqn!r} cannot be the name of a folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def universal_source(
    path: Path, *, weight: torch.Tensor | None = None, state: dict[str, Any] | None = None
) -> None:
    weight = torch.ones(3) if weight is None else weight
    optim = {"state": {"w": state or {}}, "param_groups": [{"params": ["w"]}]}
    torch_ckpt.save({"model": {"w": weight}, "optim": optim}, checkpoint_id=path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weight": torch.ones(3, dtype=torch.complex64)}, "complex64, not fp32"),
        ({"weight": torch.ones(3).double()}, "float64, not fp32"),
        ({"state": {"nested": {"a": torch.ones(3)}}}, "nested.a' is not a state"),
        ({"state": {"name": "x"}}, "name' is a str"),
        ({"state": {"half": torch.ones(2)}}, "'half' of 'w' has sizes"),
        ({"state": {"fp32": torch.ones(3)}}, "is not a state"),
        (
            {"state": {"/tmp/x": torch.ones(3)}},
            "state '/tmp/x' of 'w' cannot be the name of a file",
        ),
        ({"state": {"a/b": torch.ones(3)}}, "state 'a/b' of 'w' cannot be the name of a file"),
        ({"state": {"": torch.ones(3)}}, "state '' of 'w' cannot be the name of a file"),
    ],
)
def test_what_a_universal_folder_cannot_have_is_refused(
    tmp_path: Path,
    values: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    universal_source(tmp_path / "source", **values)
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", "universal") == 3
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_step_that_is_a_number_is_in_the_folder(tmp_path: Path) -> None:
    universal_source(tmp_path / "source", state={"step": 7, "exp_avg": torch.ones(3)})
    convert(Location(tmp_path / "source"), Location(tmp_path / "target"), "universal")
    assert torch.load(tmp_path / "target" / "zero" / "w" / "step.pt") == 7
    common = torch.load(tmp_path / "target" / "zero" / "optimizer_state.pt")
    assert common["optimizer_state_dict"]["state"][0] == {"step": 7}


def test_only_a_universal_folder_is_replaced_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    universal_source(tmp_path / "home" / "source")
    (tmp_path / "home" / "text").write_text("mine")
    arguments = ("convert", tmp_path / "home" / "source", tmp_path / "home", "--to", "universal")
    assert run(*arguments, "--overwrite") == 3
    assert "not a universal folder" in capsys.readouterr().err
    assert (tmp_path / "home" / "text").read_text() == "mine"
    inside = tmp_path / "target" / "source"
    universal_source(tmp_path / "source")
    assert run("convert", tmp_path / "source", tmp_path / "target", "--to", "universal") == 0
    universal_source(inside)
    assert run("convert", inside, inside.parent, "--to", "universal", "--overwrite") == 3
    assert "the source is in it" in capsys.readouterr().err
    assert inside.exists()


@pytest.mark.parametrize(("first", "second"), [("dcp", "safetensors"), ("safetensors", "dcp")])
def test_a_checkpoint_of_another_format_is_not_left_beside_the_target(
    tmp_path: Path, first: str, second: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "source")
    arguments = ("convert", tmp_path / "source", tmp_path / "target", "--overwrite", "--to")
    assert run(*arguments, first) == 0
    assert run(*arguments, second) == 3
    assert "checkpoint of another format" in capsys.readouterr().err


def test_what_would_lose_the_keys_of_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state": {0: torch.ones(3)}, "list": [torch.ones(1)]}, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch") == 3
    assert "integer keys" in capsys.readouterr().err
    arguments = ("convert", tmp_path / "a.pt", tmp_path / "b.pt", "--to", "torch", "--prefix")
    assert run(*arguments, "list.0") == 3
    assert "is itself a name" in capsys.readouterr().err
    assert run(*arguments, "list.") == 0
    assert torch.load(tmp_path / "b.pt")["0"].tolist() == [1]
    arguments = ("convert", tmp_path / "a.pt", tmp_path, "--to", "torch", "--overwrite")
    assert run(*arguments, "--prefix", "list.") == 3
    assert "it is a directory" in capsys.readouterr().err


def test_half_precision_weights_become_fp32_in_a_universal_folder(tmp_path: Path) -> None:
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    optim = {"state": {"w": {"momentum": weight + 1}}, "param_groups": [{"params": ["w"]}]}
    torch_ckpt.save({"model": {"w": weight}, "optim": optim}, checkpoint_id=tmp_path / "source")
    convert(Location(tmp_path / "source"), Location(tmp_path / "target"), "universal")
    stored = torch.load(tmp_path / "target" / "zero" / "w" / "fp32.pt")["param"]
    assert stored.dtype == torch.float32
    assert stored.equal(weight.float())
    stored = torch.load(tmp_path / "target" / "zero" / "w" / "momentum.pt")["param"]
    assert stored.equal(weight + 1)


def test_objects_of_unknown_classes_are_refused(tmp_path: Path) -> None:
    torch_ckpt.save({"w": torch.ones(2), "half": Fraction(1, 2)}, checkpoint_id=tmp_path / "source")
    with pytest.raises(errors.UnsupportedError, match="Fraction"):
        convert(Location(tmp_path / "source"), Location(tmp_path / "target"), "torch")
    convert(
        *(Location(tmp_path / "source"), Location(tmp_path / "target"), "torch"), trust_pickle=True
    )
    assert torch.load(tmp_path / "target", weights_only=False)["half"] == Fraction(1, 2)


def test_an_archive_of_more_than_4_gib_is_laid_out_for_zip64(tmp_path: Path) -> None:
    """Without its elements: the file is sparse."""
    layout = lay_out(
        {
            "a": PendingTensor("a", torch.uint8, (5 << 30,)),
            "b": PendingTensor("b", torch.int32, (3,)),
        }
    )
    with (tmp_path / "x.pt").open("wb") as file:
        for offset, data in layout.known_parts():
            file.seek(offset)
            file.write(data)
    with zipfile.ZipFile(tmp_path / "x.pt") as archive:
        found = {info.filename: info.file_size for info in archive.infolist()}
    assert found["archive/data/0"] == 5 << 30
    assert found["archive/data/1"] == 12
    loaded = torch.load(tmp_path / "x.pt", mmap=True)
    assert loaded["a"].shape == (5 << 30,)
    assert loaded["b"].tolist() == [0, 0, 0]
    assert all(record.offset % 64 == 0 for record in layout.records)


def test_a_tensor_in_an_object_keeps_its_elements(tmp_path: Path) -> None:
    """Tensors within objects are pickled with them, and may share a storage."""
    shared = torch.arange(6.0)
    layout = lay_out({"a": shared[:2], "b": shared[3:], "h": torch.ones(2).half()})
    (tmp_path / "x.pt").write_bytes(layout.encode())
    loaded = torch.load(tmp_path / "x.pt")
    assert loaded["a"].tolist() == [0, 1]
    assert loaded["b"].tolist() == [3, 4, 5]
    assert loaded["b"].untyped_storage().data_ptr() == loaded["a"].untyped_storage().data_ptr()
    assert loaded["h"].dtype == torch.float16


@pytest.mark.slow
@pytest.mark.parametrize("to", ["dcp", "safetensors", "torch"])
def test_memory_is_bounded(tmp_path: Path, to: str) -> None:
    state = {"large": torch.zeros(1 << 30, dtype=torch.uint8)}
    state |= {f"layer{n}": torch.zeros(1 << 18) for n in range(256)}
    torch_ckpt.save(state, checkpoint_id=tmp_path / "source")
    arguments = ["convert", tmp_path / "source", tmp_path / "target", "--to", to]
    assert 0 < memory_growth_kib("torch_ckpt.conversion.convert", *arguments) < 256 << 10


def test_the_command_offers_every_format() -> None:
    """It does not import them, since that imports torch."""
    assert set(convert_command._FORMATS) == set(TARGETS)


def test_a_tensor_is_temporary_although_its_storage_had_a_python_object() -> None:
    """Otherwise the writer does not count its memory."""
    loaded = torch.ones(3)
    assert loaded.untyped_storage().nbytes() == 12
    assert has_own_storage(loaded)
    view = loaded[:2]
    assert not has_own_storage(view)
    del view
    storage = loaded.untyped_storage()
    assert not has_own_storage(loaded)
    del storage
    assert has_own_storage(loaded)


def test_a_conversion_that_fails_leaves_no_directory(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "step": 5}, tmp_path / "a.pt")
    assert run("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "safetensors") == 3
    assert not (tmp_path / "b").exists()
    (tmp_path / "b").mkdir()
    assert run("convert", tmp_path / "a.pt", tmp_path / "b", "--to", "safetensors") == 3
    assert (tmp_path / "b").exists()
