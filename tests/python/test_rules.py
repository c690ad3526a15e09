"""Rules say how the shards of model-parallel ranks make whole parameters."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from deepspeed_checkpoints import write, write_shards

from torch_ckpt import FastReader, errors
from torch_ckpt.cli.main import main
from torch_ckpt.formats.rules import Cast, Rename, Rule, Rules
from torch_ckpt.formats.unions import Fused, Shard

TEXT = r"""
# A comment.
embed\.weight   shard(0) padded(50257)
.*qkv\.weight   fused([8, 4, 4], 0)
.*norm\.weight  replicated
old\.(.*)       shard(1) cast("bfloat16") rename("new.\1")
x|y             boxes([4, 4], [[0, [0, 0], [2, 4], [0, 0]], [1, [0, 0], [2, 4], [2, 0], 0.5]])
z               average transpose(0, 1)
one             unique
"""


def tensor(*sizes: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(sizes).numel()).reshape(sizes)


def loaded(path: Path, rules: str | None = None) -> dict[str, torch.Tensor]:
    metadata = FastReader(path, rules=rules).read_metadata().state_dict_metadata
    state = {
        fqn: torch.full(stored.size, -1).to(stored.properties.dtype)
        for fqn, stored in metadata.items()
        if hasattr(stored, "chunks")
    }
    dcp.load(state, storage_reader=FastReader(path, rules=rules), no_dist=True)
    return state


def united(tmp_path: Path, shards: list[torch.Tensor], operators: str) -> torch.Tensor:
    """What becomes of the shards of one parameter; its state must become twice that."""
    write_shards(tmp_path / "saved", [{"w": shard} for shard in shards])
    state = loaded(tmp_path / "saved", f"w {operators}")
    if "cast" not in operators:
        assert state["optim.state.w.exp_avg"].equal(state["model.w"] * 2)
    return state["model.w"]


def test_rules_print_as_the_text_that_they_are_parsed_from() -> None:
    rules = Rules.parse(TEXT)
    assert len(rules.rules) == 7
    assert Rules.parse(str(rules)) == rules
    assert rules.rules[3] == Rule(r"old\.(.*)", Shard(1), (Cast("bfloat16"), Rename(r"new.\1")))
    assert str(Rule("a", Fused((8, 4, 4), 0))) == "a fused([8, 4, 4], 0)"


def test_the_first_rule_that_matches_the_whole_fqn_applies() -> None:
    rules = Rules.parse("a shard(0)\na.* shard(1)\n")
    assert [str(rule.union) for rule in rules.matches(["a", "ab"]).values()] == [
        "shard(0)",
        "shard(1)",
    ]
    with pytest.raises(errors.MismatchError, match="no rule matches 'b'"):
        rules.matches(["a", "b"])
    with pytest.raises(errors.MismatchError, match=r"no FQN is left for the patterns 'a.\*'"):
        rules.matches(["a"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("w", "first operator"),
        ("w rename('x')", "first operator"),
        ("w shard(0) shard(1)", r"shard\(1\) is not the first"),
        ("w frobnicate(1)", "frobnicate"),
        ("w shard(0", "never closed"),
        ("w shard()", "shard missing .* 'dim'"),
        ("w shard(0) padded(0)", "no elements"),
        ("w shard(0) transpose(0, 1) padded(2)", "not in the order padded, transpose"),
        ("w shard(0) cast('bfloat16') cast('float32')", "each once"),
        ("w shard(0) rename('')", "empty"),
        ("w boxes([4], [0])", "0 is not a box"),
        ("w boxes([4], [[0, [0], [4], [0], 0]])", "not a box"),
        ("w shard(__import__('os').system('true'))", "malformed"),
        ("w( shard(0)", "regular expression"),
        ("w shard(0) cast('no')", "not a dtype"),
        ("w shard(-1)", "dim of shard is -1"),
        ("w shard([0])", r"dim of shard is \[0\]"),
        ("w fused(3, 0)", "sizes of fused is 3"),
        ("w fused([3, 'x'], 0)", "sizes of fused"),
        ("w fused([4], 0, [2, 2])", "widths of fused"),
    ],
)
def test_a_line_that_is_no_rule_is_an_error_with_its_number(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"line 2 .*{message}"):
        Rules.parse(f"# The first line.\n{line}")


def test_shards_along_each_dimension_are_views_of_the_files(tmp_path: Path) -> None:
    whole = tensor(7, 6, 5)
    for dim in range(3):
        folder = tmp_path / str(dim)
        parts = list(whole.tensor_split(3, dim))
        assert united(folder, parts, f"shard({dim})").equal(whole)


@pytest.mark.parametrize("seed", range(20))
def test_fused_parameters_are_united_one_by_one(tmp_path: Path, seed: int) -> None:
    """Against torch.cat, for random sizes and dimensions."""
    rng = random.Random(seed)
    ranks, dim = rng.randint(1, 4), rng.randint(0, 2)
    widths = [[rng.randint(0, 3) for _ in range(ranks)] for _ in range(rng.randint(1, 3))]
    widths[0] = [width + 1 for width in widths[0]]
    sizes = [rng.randint(1, 4) for _ in range(3)]
    sizes[dim] = sum(map(sum, widths))
    whole = tensor(*sizes)
    parts = whole.split([sum(of_part) for of_part in widths], dim)
    cut = [part.split(of_part, dim) for part, of_part in zip(parts, widths, strict=True)]
    shards = [torch.cat([pieces[rank] for pieces in cut], dim) for rank in range(ranks)]
    operators = f"fused({[sum(of_part) for of_part in widths]}, {dim}, {widths})"
    assert united(tmp_path, shards, operators).equal(whole), seed


def test_padding_is_cut_off(tmp_path: Path) -> None:
    whole = tensor(8, 3)
    assert united(tmp_path / "a", list(whole.chunk(4)), "shard(0) padded(5)").equal(whole[:5])
    assert united(tmp_path / "b", [whole, whole], "replicated padded(7)").equal(whole[:7])
    with pytest.raises(errors.MismatchError, match="fewer rows"):
        united(tmp_path / "c", list(whole.chunk(2)), "shard(0) padded(9)")


def test_averages_casts_and_transposes_are_computed_when_loaded(tmp_path: Path) -> None:
    a, b = tensor(4, 3), tensor(4, 3) * 3
    assert united(tmp_path / "a", [a, b], "average").equal(a * 2)
    assert united(tmp_path / "b", [a, a], "replicated transpose(0, 1)").equal(a.T)
    cast = united(tmp_path / "c", list(a.chunk(2)), "shard(0) cast('bfloat16')")
    assert cast.equal(a.bfloat16())


def test_scaled_boxes_are_divided(tmp_path: Path) -> None:
    """As DeepSpeed scales: the first moment of Adam has the inverse scale of the weight."""
    whole = tensor(4)
    folder = tmp_path / "saved"
    write_shards(folder, [{"w": whole[:2] / 2}, {"w": whole[2:]}])
    text = "w boxes([4], [[0, [0], [2], [0], 0.5], [1, [0], [2], [2]]])"
    state = loaded(folder, text)
    assert state["model.w"].equal(whole)
    assert state["optim.state.w.exp_avg"].tolist() == [0.5, 1, 6, 8]  # Saved: 1, 2, 6, 8.


def test_a_parameter_may_be_a_scalar(tmp_path: Path) -> None:
    """Its state has the shape of the step."""
    assert united(tmp_path, [torch.tensor(2.5)] * 2, "replicated").equal(torch.tensor(2.5))


def test_replicas_that_differ_are_an_error(tmp_path: Path) -> None:
    a = tensor(4, 3)
    b = a.clone()
    b[3, 2] += 1
    with pytest.raises(dcp.CheckpointException, match="rank 1 has other values than rank 0"):
        united(tmp_path, [a, b], "replicated")


@pytest.mark.parametrize(
    ("sizes", "operators", "message"),
    [
        ([(2, 3), (2, 4)], "shard(0)", r"\(2, 4\) on rank 1"),
        ([(2, 3), (2, 4)], "replicated", r"\(2, 4\) on rank 1"),
        ([(2, 3), (2, 3)], "shard(2)", "no dimension 2"),
        ([(2, 3), (2, 3)], "unique", "ranks 0, 1 have it"),
        ([(2, 3), (2, 3)], "fused([3, 1], 0)", "equal parts"),
        ([(2, 3), (2, 3)], "boxes([4, 3], [[0, [0, 0], [2, 3], [0, 0]]])", "6 of them"),
        (
            [(2, 3), (2, 3)],
            "boxes([3, 3], [[0, [0, 0], [2, 3], [0, 0]], [1, [0, 0], [2, 3], [1, 0]]])",
            "both rank 0 and rank 1",
        ),
        ([(2, 3), (2, 3)], "boxes([4, 3], [[2, [0, 0], [2, 3], [0, 0]]])", "of rank 2"),
    ],
)
def test_shards_that_do_not_make_a_parameter_are_an_error_that_names_it(
    tmp_path: Path, sizes: list[tuple[int, ...]], operators: str, message: str
) -> None:
    with pytest.raises(errors.CheckpointError, match=f"'w'.*{message}"):
        united(tmp_path, [tensor(*of_rank) for of_rank in sizes], operators)


def test_a_parameter_is_renamed_everywhere(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"old.w": tensor(2, 3), "old.b": tensor(2)}])
    rules = "old.(.*) unique rename('new.\\1')"
    state = loaded(tmp_path, rules)
    assert state.keys() >= {"model.new.w", "optim.state.new.w.exp_avg"}
    groups: dict[str, Any] = {"optim": {"param_groups": [{"lr": 0, "params": []}]}}
    dcp.load(groups, storage_reader=FastReader(tmp_path, rules=rules), no_dist=True)
    assert groups["optim"]["param_groups"] == [{"lr": 0.1, "params": ["new.w", "new.b"]}]


def test_a_name_that_two_parameters_would_have_is_an_error(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"a": tensor(2), "b": tensor(3)}])
    with pytest.raises(errors.MismatchError, match="two parameters the name 'c'"):
        loaded(tmp_path, "a|b unique rename('c')")
    with pytest.raises(errors.MismatchError, match=r"cannot rename 'a' .* group reference"):
        loaded(tmp_path, "a|b unique rename('\\1')")


def test_a_command_reads_rules_from_a_file(tmp_path: Path) -> None:
    whole = tensor(4, 3)
    write_shards(tmp_path / "saved", [{"w": part} for part in whole.chunk(2, 1)])
    (tmp_path / "rules.txt").write_text("w shard(1)\n")
    arguments = [str(tmp_path / "saved"), str(tmp_path / "x.pt"), "--to", "torch"]
    assert main(["convert", *arguments]) == 3  # Without a universal_checkpoint_info.
    rules = ["--rules", str(tmp_path / "rules.txt")]
    assert main(["convert", *arguments, *rules]) == 0
    assert torch.load(tmp_path / "x.pt")["model"]["w"].equal(whole)
    assert main(["diff", *arguments[:2], *rules]) == 0
    assert main(["diff", *arguments[:2]]) == 3
    assert main(["verify", arguments[0], "--quiet", *rules]) == 0
    assert main(["verify", arguments[1], "--quiet", *rules]) == 3  # It has no shards.


def test_without_rules_the_error_lists_what_they_must_match(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"w": tensor(2, 3), "b": tensor(3)}, {"w": tensor(1, 3)}])
    match = r"pass FastReader\(rules=.*: w of \[\(2, 3\), \(1, 3\)\]; b of \[\(3,\)\]$"
    with pytest.raises(errors.UnsupportedError, match=match):
        FastReader(tmp_path).read_metadata()


INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r"norm"],
    "parameter_to_average_patterns": [r"mean"],
    "parameter_with_row_parallelism_patterns": [r"down"],
    "vocabulary_parameter_patterns": [r"embed"],
    "original_vocab_size": 7,
    "parameter_with_2_sub_params_cat_dim_0": [r"swiglu"],
    "parameter_with_sub_params": [
        {"patterns": [r"qkv"], "shape": (3, -1), "partition_dim": 0},
        {"patterns": [r"gqa"], "shape": ((4, 2, 2), -1), "partition_dim": 0},
    ],
}


def test_every_pattern_of_deepspeed_becomes_a_rule(tmp_path: Path) -> None:
    whole = {
        "norm": tensor(3),
        "mean": tensor(3),
        "up": tensor(4, 3),
        "down": tensor(3, 4),
        "embed": tensor(8, 3),
        "swiglu": tensor(8, 3),
        "qkv": tensor(12, 3),
        "gqa": tensor(8, 3),
    }

    def parts(fqn: str, rank: int) -> torch.Tensor:
        value = whole[fqn]
        if fqn == "mean":
            return value + (1 if rank else -1)
        if fqn == "norm":
            return value
        if fqn == "down":
            return value.chunk(2, 1)[rank].contiguous()
        widths = {"swiglu": [4, 4], "qkv": [4, 4, 4], "gqa": [4, 2, 2]}.get(fqn, [len(value)])
        return torch.cat([part.chunk(2)[rank] for part in value.split(widths)])

    shards = [{fqn: parts(fqn, rank) for fqn in whole} for rank in range(2)]
    write_shards(tmp_path, shards, info=INFO, buffers={"steps": torch.tensor(4)})
    state = loaded(tmp_path)
    assert state["model.steps"] == 4
    whole["embed"] = whole["embed"][:7]
    for fqn, value in whole.items():
        assert state[f"model.{fqn}"].equal(value), fqn


@pytest.mark.parametrize(
    "info",
    [
        {"tp_replicated_parameter_patterns": 5},
        {"tp_replicated_parameter_patterns": "w"},
        {"tp_replicated_parameter_patterns": ["("]},
        {"vocabulary_parameter_patterns": ["w"]},
        {"parameter_with_sub_params": [5]},
        {"parameter_with_sub_params": [{"patterns": ["w"], "partition_dim": 9, "shape": [1]}]},
        {"affine_map": 5},
        {"affine_map": {"params": {"w": {}}}},
    ],
)
def test_an_invalid_description_is_an_error_that_names_the_file(
    tmp_path: Path, info: dict[str, Any]
) -> None:
    write_shards(tmp_path, [{"w": tensor(2)}] * 2, info=info)
    with pytest.raises(errors.CorruptionError, match=r"mp_rank_00.*universal_checkpoint_info is"):
        FastReader(tmp_path).read_metadata()


def test_every_rank_has_a_part_of_a_sharded_parameter(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"w": tensor(2), "only": tensor(3)}, {"w": tensor(2)}])
    with pytest.raises(errors.MismatchError, match=r"'only' is shard.0., but only rank 0 of 2"):
        loaded(tmp_path, ".* shard(0)")
    assert loaded(tmp_path, "w shard(0)\nonly unique")["model.only"].equal(tensor(3))


def test_objects_of_the_model_need_no_rule(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"w": tensor(2)}] * 2)
    for file in tmp_path.glob("mp_rank_*"):
        state = torch.load(file, weights_only=False)
        state["module"]["extra"] = {"a": 1}
        torch.save(state, file)
    state = {"model": {"extra": {"a": 0}}}
    rules = "w shard(0)"
    dcp.load(state, storage_reader=FastReader(tmp_path, rules=rules), no_dist=True)
    assert state == {"model": {"extra": {"a": 1}}}


def test_inspect_lists_the_rule_of_each_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_shards(tmp_path, [{"w": tensor(2), "b": tensor(3)}] * 2)
    (tmp_path / "rules.txt").write_text("# ours\nb replicated\n.* shard(0)\n")
    arguments = ["inspect", str(tmp_path), "--rules", str(tmp_path / "rules.txt")]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rules"]
    assert found == [{"fqn": "w", "rule": ".* shard(0)"}, {"fqn": "b", "rule": "b replicated"}]
    # What is printed is rules again.
    assert str(Rules.parse("\n".join(one["rule"] for one in found))) == ".* shard(0)\nb replicated"
    assert main(arguments) == 0
    out = capsys.readouterr().out.splitlines()
    [line] = [number for number, line in enumerate(out) if "rules that unite" in line]
    assert out[line + 1].split() == ["w", ".*", "shard(0)"]
    assert out[line + 2].split() == ["b", "b", "replicated"]


def test_a_computed_tensor_is_computed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although a conversion loads it in many pieces."""
    from torch_ckpt.conversion import pieces

    monkeypatch.setattr(pieces, "PIECE_NBYTES", 100)
    whole, calls, unite = tensor(100, 4), [], Rule.unite
    monkeypatch.setattr(Rule, "unite", lambda *args: calls.append(1) or unite(*args))
    write_shards(tmp_path / "saved", [{"w": part} for part in whole.chunk(2)])
    (tmp_path / "rules").write_text("w shard(0) cast('bfloat16')")
    arguments = [str(tmp_path / "saved"), str(tmp_path / "x.pt"), "--to", "torch"]
    assert main(["convert", *arguments, "--rules", str(tmp_path / "rules")]) == 0
    assert torch.load(tmp_path / "x.pt")["model"]["w"].equal(whole.bfloat16())
    assert len(calls) == 1


def test_a_rule_unites_tensors_without_a_checkpoint() -> None:
    q, k = tensor(4, 3), tensor(2, 3) + 100
    parts = {rank: torch.cat([q.chunk(2)[rank], k.chunk(2)[rank]]) for rank in (0, 1)}
    sizes = {rank: tuple(part.shape) for rank, part in parts.items()}
    [rule] = Rules.parse('w fused([4, 2], 0) padded(5) transpose(0, 1) cast("float16")').rules
    whole = rule.unite("w", sizes, parts.__getitem__)
    assert whole.equal(torch.cat([q, k])[:5].t().half())
    assert rule.unite("w", sizes, parts.__getitem__, "exp_avg").dtype == torch.float32
    [rule] = Rules.parse("w average").rules
    assert rule.unite("w", sizes, parts.__getitem__).equal((parts[0] + parts[1]) / 2)
    [rule] = Rules.parse("w replicated").rules
    with pytest.raises(errors.CorruptionError, match="'w': it is replicated, but rank 1 has other"):
        rule.unite("w", sizes, parts.__getitem__)


def test_rules_that_tensors_contradict_are_errors() -> None:
    sizes = {0: (2, 2), 1: (2, 2)}

    def unite(text: str, *parts: torch.Tensor) -> torch.Tensor:
        [rule] = Rules.parse(f"w {text}").rules
        return rule.unite("w", sizes, parts.__getitem__)

    ones = torch.ones(2, 2)
    with pytest.raises(errors.MismatchError, match=r"float32 of \(1, 2\) on rank 1, and not"):
        unite("shard(0)", ones, ones[:1])
    with pytest.raises(errors.MismatchError, match=r"int64 .* on rank 1, and not torch\.float32"):
        unite("replicated", ones, ones.long())
    with pytest.raises(errors.MismatchError, match="int64, of which there is no average"):
        unite("average", ones.long(), ones.long())
    with pytest.raises(errors.MismatchError, match="no dimensions for transpose"):
        unite("shard(0) transpose(0, 3)", ones, ones)
    for text in ("fused([4, 4], 0, [[2, 2], [4]])", 'unique cast("qint8")', "shard(" + "-" * 5000):
        with pytest.raises(ValueError, match="line 1 of the rules"):
            Rules.parse(f"w {text}")


def test_an_affine_map_decides_before_the_patterns(tmp_path: Path) -> None:
    whole = tensor(4, 3)
    ranks = {
        rank: {
            "shard_shape": [2, 3],
            "pieces": [
                {"shape": [1, 3], "source": [3 * (rank + 2 * n), [3, 1]], "dest": [3 * n, [3, 1]]}
                for n in range(2)
            ],
        }
        for rank in range(2)
    }
    params = {"^w$": {"logical_shape": [4, 3], "ranks": ranks}}
    info = {"affine_map": {"version": 1, "params": params}, **INFO}
    write_shards(tmp_path, [{"w": whole[0::2]}, {"w": whole[1::2]}], info=info)
    assert loaded(tmp_path)["model.w"].equal(whole)


def test_a_parameter_whose_pieces_are_no_boxes_is_refused_and_the_others_load(
    tmp_path: Path,
) -> None:
    piece = {"shape": [3, 2], "source": [0, [1, 3]], "dest": [0, [2, 1]]}
    params = {
        "w": {"logical_shape": [2, 3], "ranks": {0: {"shard_shape": [3, 2], "pieces": [piece]}}}
    }
    info = {"affine_map": {"params": params}}
    write_shards(
        tmp_path, [{"w": tensor(3, 2), "v": part} for part in tensor(4).chunk(2)], info=info
    )
    for fqn in ("model.w", "optim.state.w.exp_avg", "optim.state.w.step"):
        with pytest.raises(dcp.CheckpointException, match=r"UnsupportedError.*'w'.*not a box"):
            dcp.load({fqn: None}, storage_reader=FastReader(tmp_path), no_dist=True)
    state = {"model.v": torch.zeros(4)}
    dcp.load(state, storage_reader=FastReader(tmp_path), no_dist=True)
    assert state["model.v"].equal(tensor(4))


def test_shards_that_do_not_make_a_parameter_are_refused_and_the_others_load(
    tmp_path: Path,
) -> None:
    shards = [{"w": tensor(3, 2), "v": tensor(2)}, {"w": tensor(3, 5), "v": tensor(2)}]
    write_shards(tmp_path, shards, info=INFO)
    for fqn in ("model.w", "optim.state.w.exp_avg"):
        with pytest.raises(dcp.CheckpointException, match=r"MismatchError.*'w'.*cannot be united"):
            dcp.load({fqn: None}, storage_reader=FastReader(tmp_path), no_dist=True)
    state = {"model.v": torch.zeros(4), "optim.state.v.step": torch.zeros(())}
    dcp.load(state, storage_reader=FastReader(tmp_path), no_dist=True)
    assert state["model.v"].equal(tensor(2).repeat(2))
    assert state["optim.state.v.step"] == 9


def test_pipeline_stages_have_other_parameters(tmp_path: Path) -> None:
    """A tied parameter is that of the first stage."""
    stages = [{"0.w": tensor(2, 3), "tied": tensor(2)}, {"1.w": tensor(3), "tied": tensor(2)}]
    write_shards(tmp_path, stages, stages=2)
    state = loaded(tmp_path)
    assert state["model.0.w"].equal(tensor(2, 3))
    assert state["model.1.w"].equal(tensor(3))
    assert state["model.tied"].equal(tensor(2))


def test_an_alias_on_one_rank_never_replaces_what_another_rank_has_stored(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"0.w": tensor(3)}, {"1.w": tensor(3) + 7}], stages=2)
    for rank in range(2):
        file = tmp_path / f"mp_rank_{rank:02}_model_states.pt"
        state = torch.load(file, weights_only=False)
        state["module"] = {"1.buffer": torch.arange(2)} if rank else {}
        state["shared_params"] = {} if rank else {"1.w": "0.w", "1.buffer": "0.w", "tied": "0.w"}
        torch.save(state, file)
    state = loaded(tmp_path)
    assert state["model.1.w"].equal(tensor(3) + 7)
    assert state["model.1.buffer"].equal(torch.arange(2))
    assert state["model.tied"].equal(state["model.0.w"])


def test_the_files_of_each_rank_are_needed(tmp_path: Path) -> None:
    write_shards(tmp_path, [{"w": part} for part in tensor(6, 3).chunk(3)], info=INFO)
    for file in tmp_path.glob("*mp_rank_02*"):
        file.unlink()
    with pytest.raises(errors.NotFoundError, match=r"3 model-parallel ranks .* files of 2"):
        FastReader(tmp_path).read_metadata()
    for file in tmp_path.glob("*mp_rank_00*"):
        file.unlink()
    with pytest.raises(errors.NotFoundError, match="model-parallel rank 0"):
        FastReader(tmp_path).read_metadata()


def test_rules_need_a_checkpoint_of_shards(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(errors.UnsupportedError, match="not a checkpoint of DeepSpeed"):
        FastReader(tmp_path / "x.pt", rules="w unique").read_metadata()
    write(tmp_path / "saved", 3)
    with pytest.raises(errors.MismatchError, match=r"no rule matches 'up\.weight'"):
        FastReader(tmp_path / "saved", rules="w unique").read_metadata()
