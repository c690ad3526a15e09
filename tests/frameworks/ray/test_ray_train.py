"""Ray Train's workers save and restore through RayTrainRun, with the real Ray on CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.store_server import StoreServer

import torch_ckpt
from torch_ckpt.filesystems.location import Location
from torch_ckpt.ladder.failures import PromotionFailures
from torch_ckpt.ladder.lineage import Lineage
from torch_ckpt.ladder.promotion import OldSteps, Promotion
from torch_ckpt.ladder.promotion_steps import StepsOfOnePlace
from torch_ckpt.ladder.retention import Retention
from torch_ckpt.ladder.step_directories import StepDirectories

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = Path(__file__).with_name("ray_programs.py")
RUN_TIMEOUT_S = 900  # Ray starts several processes, of which each imports torch.

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1000),
    pytest.mark.framework("ray"),
]


def listed_by_ray(program: str, path: Path, *arguments: str) -> list[dict[str, Any]]:
    """Runs a program; returns what it prints of the checkpoints that Ray lists."""
    environment = {
        "PYTHONPATH": f"{ROOT}:{ROOT}/tests:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.3",
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "0.5",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # In place of 15: workers would starve beside other tests.
    }
    done = subprocess.run(
        [
            sys.executable,
            str(PROGRAMS),
            program,
            path,
            *arguments,
        ],
        cwd=path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    lines = done.stdout.splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"newest"')]


def events(path: Path, *names: str) -> list[tuple[Any, ...]]:
    """The events of a log with these names: step, number of workers, digest of the state."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(e["step"], e["workers"], e["digest"]) for e in lines if e["event"] in names]


def steps_in(run: Path) -> list[int]:
    return sorted(int(each.name.removeprefix("step-")) for each in run.glob("step-*"))


@pytest.mark.parametrize(("stop", "loader"), [(8, "prepared"), (6, "own")])
def test_each_sample_is_used_once_over_a_kill_and_on_fewer_workers(
    tmp_path: Path, stop: int, loader: str
) -> None:
    """On two workers, an epoch has 6 steps. The page on the state of ranks has the recipe."""
    listed_by_ray("data", tmp_path, str(stop), loader)
    logs = sorted((tmp_path / "samples-data").iterdir())
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    assert {log.name for log in logs} == {"0", "1"}
    used = sorted((epoch, sample) for _, epoch, samples in lines for sample in samples)
    assert used == [(epoch, sample) for epoch in range(2) for sample in range(24)]


def test_iterators_of_ray_data_have_no_position() -> None:
    """What the page says of Ray. If this fails, a later version may have one."""
    import ray.data

    assert not hasattr(ray.data.DataIterator, "state_dict")


def test_killed_workers_go_on_bit_for_bit_and_on_fewer_workers(tmp_path: Path) -> None:
    whole, killed, fewer = listed_by_ray("restarts", tmp_path)
    saved = {step: digest for step, _, digest in events(tmp_path / "whole.log", "saved")}
    assert sorted(saved) == [2, 4, 6, 8, 10, 12]
    assert "UnsupportedError: cannot discard" in (tmp_path / "whole.log").read_text()
    first, second, third = events(tmp_path / "killed.log", "restored")
    assert first == (None, 2, None)
    assert second[0] in (4, 6)  # The last save in the background may have ended before the kill.
    assert second == (second[0], 2, saved[second[0]])
    assert third == (12, 1, saved[12])  # The same bits on one worker.
    ends = events(tmp_path / "killed.log", "ended")
    assert ends[0] == (12, 2, saved[12])
    assert ends[1][:2] == (15, 1)

    for name, found, steps in (
        ("whole", whole, sorted(saved)),
        ("killed", killed, [10, 12]),
        ("killed", fewer, [12, 14]),  # Ray removes steps, also one of a former fit().
    ):
        paths = [f"{tmp_path}/{name}/step-{step}" for step in steps]
        assert [path for path, _ in found["listed"]] == paths
        assert found["newest"] == paths[-1]
        assert all(metrics["loss"] > 0 for _, metrics in found["listed"])
    assert steps_in(tmp_path / "whole") == sorted(saved)
    assert steps_in(tmp_path / "killed") == [12, 14]
    # Ray has copied nothing: all data files are those of the steps, and there are no others.
    for run in (tmp_path / "whole", tmp_path / "killed"):
        files = [path for path in run.rglob("*") if path.is_file() and path.stat().st_size > 3000]
        assert {path.parent.name for path in files if path.suffix == ".distcp"} == {
            f"step-{step}" for step in steps_in(run)
        }
        assert {path.name for path in run.iterdir() if not path.name.startswith("step-")} == {
            ".validate_storage_marker",
            "checkpoint_manager_snapshot.json",
            "events.jsonl",
        }
    # What Ray lists is a checkpoint of DCP.
    name = "training.model.0.weight"
    ours, stock = {name: torch.zeros(16, 8)}, {name: torch.zeros(16, 8)}
    torch_ckpt.load(ours, checkpoint_id=fewer["newest"])
    dcp.load(stock, checkpoint_id=fewer["newest"])
    assert torch.equal(ours[name], stock[name])
    assert ours[name].any()


def test_a_preemption_is_saved_and_training_goes_on_with_the_workers_left(tmp_path: Path) -> None:
    (found,) = listed_by_ray("preempted", tmp_path, "30", "20_000")
    ((step, workers, digest),) = events(tmp_path / "preempted.log", "saved")
    (reported,) = re.findall(
        '"saved".*"reported": "(.*?)"', (tmp_path / "preempted.log").read_text()
    )
    assert reported == found["newest"] == f"{tmp_path}/preempted/step-{step}"
    assert workers == 2
    assert step < 200  # Nothing but the preemption requires a save.
    first, second = events(tmp_path / "preempted.log", "restored")
    assert first == (None, 2, None)
    assert second == (step, 1, digest)
    assert events(tmp_path / "preempted.log", "ended")[0][:2] == (200, 1)


def test_a_promotion_that_outlasts_the_preempted_node_is_reported_after_the_restart(
    tmp_path: Path,
) -> None:
    (found,) = listed_by_ray("preempted", tmp_path, "10", "1_000")
    lines = map(json.loads, (tmp_path / "preempted.log").read_text().splitlines())
    (saved,) = [line for line in lines if line["event"] == "saved"]
    assert saved["reported"] is None
    assert abs(saved["time"] - float((tmp_path / "deadline").read_text())) < 3
    assert found["newest"] == f"{tmp_path}/preempted/step-{saved['step']}"
    assert [metrics["loss"] > 0 for _, metrics in found["listed"]] == [True]
    _, second = events(tmp_path / "preempted.log", "restored")
    assert second == (saved["step"], 1, saved["digest"])
    assert events(tmp_path / "preempted.log", "ended")[0][:2] == (200, 1)


def test_steps_are_promoted_to_a_store_where_ray_removes_them(
    tmp_path: Path, store_server: StoreServer, store_url: str
) -> None:
    endpoint = store_server.endpoint.removeprefix("http://")
    storage = f"{store_url}?scheme=http&region=us-east-1&endpoint_override={endpoint}"
    (found,) = listed_by_ray("store", tmp_path, storage)
    prefix = f"{store_url}/store".removeprefix("s3://")
    assert [path for path, _ in found["listed"]] == [f"{prefix}/step-10", f"{prefix}/step-12"]
    run = torch_ckpt.Run(f"{store_url}/store")
    assert run.latest_step() == 12
    for step in (10, 12):
        state = {"training.model.0.weight": torch.zeros(16, 8)}
        torch_ckpt.load(state, checkpoint_id=f"{store_url}/store/step-{step}")
        assert state["training.model.0.weight"].any()
    with pytest.raises(torch_ckpt.CheckpointError), run.lease(4):
        pass


def test_a_step_is_reported_once_and_a_failed_one_never(tmp_path: Path) -> None:
    (found,) = listed_by_ray("again", tmp_path)
    run = tmp_path / "again"
    assert steps_in(run) == [2, 6]
    assert [path for path, _ in found["listed"]] == [f"{run}/step-2", f"{run}/step-6"]
    assert found["listed"][1][1]["w"] == 4.0
    for step, value in ((2, 5.0), (6, 4.0)):
        state = {"w": torch.zeros(1_000_000)}
        torch_ckpt.load(state, checkpoint_id=run / f"step-{step}")
        assert torch.equal(state["w"], torch.full((1_000_000,), value))


def test_a_step_that_is_saved_again_is_reported_once_with_the_metrics_of_what_is_committed(
    tmp_path: Path,
) -> None:
    for found in listed_by_ray("resaved", tmp_path):
        name = Path(found["newest"]).parent.name
        values = {2: 1.0, 4: 2.0, 6: 4.0, 8: 6.0}  # The second save of step 4 failed.
        assert [(path, metrics["w"]) for path, metrics in found["listed"]] == [
            (f"{tmp_path}/{name}/step-{step}", value) for step, value in values.items()
        ]
        for step, value in values.items():
            state = {"w": torch.zeros(1_000_000)}
            torch_ckpt.load(state, checkpoint_id=tmp_path / name / f"step-{step}")
            assert torch.equal(state["w"], torch.full((1_000_000,), value))


def test_a_step_waits_for_the_promotion_of_older_ones(tmp_path: Path) -> None:
    from torch_ckpt.frameworks.ray.train_run import RayTrainRun

    run = object.__new__(RayTrainRun)
    paths = [tmp_path / name for name in ("local", "shared")]
    local, shared = paths
    run._disks = [StepDirectories(Location(path)) for path in paths]
    run._saves = SimpleNamespace(is_busy=False)
    run._unreported, run._last = {2, 4, 6, 8}, 8
    failures = PromotionFailures(run._disks[1].directory, "raise", 3)
    steps = StepsOfOnePlace(run._disks[0], Retention())
    lineage = Lineage(run._disks, Retention())
    old = OldSteps(
        *(run._disks[0], run._disks[1], lineage, Retention(), steps),
        keep=1,
        run_id="",
        tie=lambda: None,
    )
    run._promotion = Promotion(*run._disks, lineage, steps, old, failures)

    def commit(step: Path) -> None:
        step.mkdir(parents=True, exist_ok=True)
        (step / ".metadata").touch()
        (step / "metrics.json").write_text('{"loss": 0.5}')

    loss = {"loss": 0.5}
    for step in (shared / "step-2", local / "step-4", shared / "step-6"):
        commit(step)
    assert run._finished() == ({2: loss}, [])
    commit(shared / "step-4")  # The newest step is promoted first.
    run._promotion._steps.promoted(4)
    assert run._finished() == ({2: loss, 4: loss, 6: loss}, [])
    run._promotion._steps.choose([4])  # It was saved again.
    assert run._finished() == ({2: loss}, [])
    run._promotion._steps.promoted(4)
    (shared / "step-6/.metadata").unlink()  # Step 8 is still being saved, and 6 is not any more.
    assert run._finished() == ({2: loss, 4: loss}, [6])
    commit(shared / "step-8")
    assert run._finished() == ({2: loss, 4: loss, 8: loss}, [6])
    run._saves.is_busy = True  # Step 8 is being saved again.
    assert run._finished() == ({2: loss, 4: loss}, [6])


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    listed_by_ray("refused", tmp_path)
    outside, local, *workers = [
        (tmp_path / "errors").read_text().splitlines()[i : i + 2] for i in range(0, 8, 2)
    ]
    retention = (
        "UnsupportedError: cannot use keep_last, keep_every with Ray Train: all workers save"
    )
    for errors in (outside, local, *workers):
        assert errors[1].startswith(retention)
    assert outside[0].startswith("RuntimeError: `get_context` cannot be used outside")
    assert local[0] == "UnsupportedError: ScalingConfig(num_workers=0) has no storage: pass 1"
    for errors in workers:
        assert errors[0].startswith("UnsupportedError: torch.distributed has 1 ranks, and Ray")
