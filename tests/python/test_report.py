"""`torch-ckpt report`: the record of a run, what it adds up to, and what is printed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from command import run_command
from events import event, save, write_record

from torch_ckpt import Run
from torch_ckpt.errors import NotFoundError
from torch_ckpt.filesystems.location import Location
from torch_ckpt.records.calls import Call, calls_of
from torch_ckpt.records.event import PHASES
from torch_ckpt.records.reading import read_events
from torch_ckpt.records.summary import trend


def test_the_record_is_read_from_both_files_without_torn_and_foreign_lines(tmp_path: Path) -> None:
    older, newer = save(2, number=1), save(2, number=2, start=60)
    run = write_record(tmp_path / "run", newer, older)
    for name in ("events.jsonl", "events.1.jsonl"):
        with (run / name).open("ab") as file:
            file.write(b'\n[]\n7\n{"call": "1"}\n\xff\xfe\n' + b"[" * 50_000 + b"\n")
            file.write(newer[0].line().replace('"rank":0', '"rank":"0"').encode())
            file.write(newer[0].line().replace('"end":', '"end":NaN,"x":').encode())
            file.write(newer[0].line().replace('"step":', '"step":1' + "0" * 400).encode())
            file.write(newer[0].line().replace('"end":', '"end":1' + "0" * 400).encode())
            file.write(newer[0].line().encode()[:-9])
    assert read_events(Location(run)) == older + newer


def test_a_record_that_is_rotated_while_it_is_read_has_each_event_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save(2, number=1), save(2, number=2, start=60)
    run = write_record(tmp_path / "run", first)
    read = Location.read

    def read_and_rotate(location: Location) -> bytes:
        contents = read(location)
        if not (run / "events.1.jsonl").exists():
            (run / "events.jsonl").rename(run / "events.1.jsonl")
            write_record(run, second)
        return contents

    monkeypatch.setattr(Location, "read", read_and_rotate)
    assert read_events(Location(run)) == first + second


def test_the_record_of_a_run_on_a_store_is_read(store_url: str) -> None:
    run = Location(store_url)
    assert run_command("report", run)[0] == 3
    lines = "".join(each.line() for each in save(2, write_1=9.0))
    (run / "events.jsonl").write(lines.encode(), sync=False)
    status, printed = run_command("report", run, "--html", f"{store_url}/page.html")
    assert status == 0
    assert printed.startswith("Rank 1 on host-0 wrote at 0.22 GB/s, the other at 1.")
    assert b"<!doctype html>" in (run / "page.html").read()


def test_a_run_without_a_record_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="record=False"):
        read_events(Location(tmp_path))
    status, printed = run_command("report", tmp_path)
    assert (status, "record=False" in printed) == (3, True)
    write_record(tmp_path, [])
    assert "nothing was saved" in run_command("report", tmp_path)[1]
    write_record(tmp_path, save())
    status, printed = run_command("report", tmp_path, "--step", 7)
    assert (status, "no save or load of step 7" in printed) == (3, True)


def test_an_unfinished_phase_is_superseded_by_a_later_line_of_the_same_phase() -> None:
    open_write = event(1, "write", 0, 5, unfinished=True)
    still_open = event(1, "write", 0, 9, unfinished=True)
    done = event(1, "write", 0, 12)
    assert Call([open_write, still_open]).events == [still_open]
    assert Call([open_write, done]).events == [done]
    assert Call([done, still_open]).events == [done, still_open]
    other = event(0, "write", 0, 1)
    assert Call([open_write, other]).events == [open_write, other]


def test_phases_that_occur_twice_are_added_up() -> None:
    twice = [event(0, "plan", 0, 1, bytes=5), event(0, "plan", 3, 2, bytes=6)]
    (part,) = Call(twice).of("plan")
    assert (part.seconds, part.nbytes, part.end - part.start) == (3, 11, 5)


def test_blocked_and_durable_time_leave_out_what_they_should() -> None:
    call = Call(
        [
            event(0, "stage", 0, 2),
            event(0, "plan", 1, 2),  # Overlaps.
            event(0, "write", 3, 10, background=True, bytes=30e9),
            event(1, "stage", 0, 1),
            event(0, "commit", 13, 2, background=True),
            event(0, "promote", 20, 50, background=True, bytes=30e9),
        ]
    )
    assert (call.blocked_s, call.durable_s, call.seconds) == (3, 15, 15)
    assert (call.nbytes, call.rate) == (30e9, 2e9)
    assert call.fraction("write") == 10 / 15
    assert call.fraction("promote") is None


def test_a_save_is_durable_only_if_it_was_committed_without_an_error() -> None:
    assert Call(save()[:-1]).durable_s is None
    assert Call([*save(), event(1, "write", 2, 1, error="no")]).durable_s is None
    assert Call([*save(), event(1, "persist", 2, 9)]).durable_s == 11
    assert Call([event(0, "read", 0, 1, kind="load")]).durable_s is None


def test_a_save_without_a_commit_is_not_called_ok() -> None:
    killed, sound, failed = save(), save(number=2), [event(0, "write", 0, 1, call="3", error="no")]
    load = [event(0, "read", 0, 1, call="4", kind="load")]
    calls = [Call(events) for events in (killed[:-1], sound, failed, load)]
    assert [call.result for call in calls] == ["not durable", "ok", "failed", "ok"]
    assert [line["durable_s"] is None for line in trend(calls)] == [True, False, True, False]


def test_phases_that_this_version_does_not_know_are_shown_last(tmp_path: Path) -> None:
    events = [event(0, "compress", 0, 0.5, novel=[1]), *save()]
    assert list(Call(events).parts)[-1] == "compress"
    status, printed = run_command("report", write_record(tmp_path, events))
    assert status == 0
    assert "compress" in printed


def test_details_of_odd_types_are_ignored() -> None:
    (part,) = Call([event(0, "write", 0, 1, bytes="many", waited=True, requests=10**400)]).of(
        "write"
    )
    assert (part.nbytes, part.waited, part.requests) == (None, None, None)


def test_the_report_fits_into_80_columns_whatever_its_names_and_numbers(tmp_path: Path) -> None:
    host = "ip-10-0-123-231-with-a-long-name.us-west-2.compute.internal\x1b[31m"
    events = [
        event(rank, phase, start * 1e6, 123_456.7, step=123_456_789, bytes=9e17, host=host)
        for rank in (0, 65_535)
        for start, phase in enumerate((*PHASES, "a-phase-of-a-later-version"))
    ]
    status, printed = run_command(
        "report", write_record(tmp_path, [*events, *save(number=2, start=-9)])
    )
    assert status == 0
    assert "0 ip-10-..-long-name  " in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "\x1b" not in printed


def test_a_wide_terminal_gets_whole_names_and_longer_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = "training-worker-of-a-long-name-0017.us-west-2.compute.internal"
    events = [each._replace(host=host) for each in save(write_3=9.0)]
    run = write_record(tmp_path, events)
    for columns in (80, 120, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        printed = run_command("report", run)[1]
        lines = printed.partition("phase")[0].splitlines()
        assert columns - 25 < max(map(len, lines)) <= columns
        assert ("3 training-worker-of-a-long-name-0017 " in printed) == (columns == 120)
        assert "-0017  " in printed


def test_no_text_of_a_record_controls_the_terminal(tmp_path: Path) -> None:
    evil = "\x1b[2J"
    details = {"kind": f"save{evil}", "host": f"a{evil}", "error": f"no{evil}"}
    events = [event(0, "write", 0, 1, **details), event(0, f"b{evil}", 0, 1, **details)]
    status, printed = run_command("report", write_record(tmp_path, events))
    assert (status, "\x1b" in printed) == (0, False)


def test_the_report_begins_with_a_sentence_and_has_a_row_for_each_phase(tmp_path: Path) -> None:
    run = write_record(tmp_path, [*save(16, write_11=20.0), *save(number=2, step=500, start=60)])
    status, printed = run_command("report", run, "--step", 400)
    assert status == 0
    lines = printed.splitlines()
    assert lines[0] == "Rank 11 on host-1 wrote at 0.1 GB/s, the others at 0.91."
    assert lines[2].startswith("Save of step 400: 16 ranks on 2 machines, ")
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert rows["write"][1:] == ["2.000", "2.200", "20.0", "11", "host-1", "98", "%", "1.60"]
    assert list(rows)[1:6] == ["begin", "stage", "plan", "write", "commit"]
    assert lines[-2].split()[:2] == ["save", "400"]
    assert lines[-1].split()[-4:] == ["2.884", "60.0", "2.77", "ok"]
    assert run_command("report", run)[1].startswith("Nothing stands out")


def test_the_report_as_json_has_the_numbers_in_seconds_and_bytes(tmp_path: Path) -> None:
    run = write_record(tmp_path, [*save(16, write_11=20.0), *save(number=2, step=500, start=60)])
    status, printed = run_command("report", run, "--step", 400, "--json")
    facts = json.loads(printed)
    assert (status, facts["kind"], facts["step"], facts["ranks"]) == (0, "save", 400, 16)
    assert facts["sentence"] == "rank 11 on host-1 wrote at 0.1 GB/s, the others at 0.91"
    write = next(row for row in facts["phases"] if row["phase"] == "write")
    assert (write["max_s"], write["slowest_rank"], write["slowest_host"]) == (20.0, 11, "host-1")
    assert write["bytes"] == 16 * 2e9
    assert [line["step"] for line in facts["trend"]] == [400, 500]


def test_the_report_of_a_step_is_of_its_newest_save_rather_than_of_a_load(tmp_path: Path) -> None:
    load = event(0, "read", 90, 1, kind="load", call="3")
    run = write_record(tmp_path, [*save(), *save(number=2, start=30), load])
    assert "Save of step 400" in run_command("report", run, "--step", 400)[1]
    assert "Load of step 400" in run_command("report", run)[1]
    write_record(tmp_path, [load])
    assert "Load of step 400" in run_command("report", run, "--step", 400)[1]


def test_4096_ranks_are_reported_within_2_seconds(tmp_path: Path) -> None:
    run = write_record(tmp_path, save(4096))
    began = time.process_time()
    status, printed = run_command("report", run)
    assert status == 0
    assert "4096 ranks on 512 machines" in printed
    assert time.process_time() - began < 2


def test_the_command_imports_no_torch(tmp_path: Path, run_new_python: Callable[..., str]) -> None:
    run = write_record(tmp_path / "run", save())
    script = (
        "import sys; from torch_ckpt.cli.main import main; status = main(sys.argv[1:]);"
        "print('torch' in sys.modules, status)"
    )
    files = ["--html", "page.html", "--trace", "trace.json", "--prometheus", "run.prom"]
    assert run_new_python(script, "report", run, *files).splitlines()[-1] == "False 0"


def test_calls_are_in_the_order_in_which_they_began() -> None:
    events = save(number=2, start=60) + save(number=1)
    assert [call.name for call in calls_of(events)] == ["1", "2"]


class _Refusing:
    """Refuses what it is given."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"w": torch.ones(100_000)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        raise RuntimeError("another size")


@pytest.mark.filterwarnings("ignore:step 2 is passed over")
def test_a_restore_that_fails_after_it_has_passed_over_a_step_counts_as_failed(
    tmp_path: Path,
) -> None:
    with Run(tmp_path, reuse="off") as run:
        for step in (1, 2):
            run.save(step, {"m": _Refusing()})
        (damaged,) = (tmp_path / "step-2").glob("*.distcp")
        with open(damaged, "r+b") as file:
            file.seek(damaged.stat().st_size // 2)
            file.write(b"damage")
        with pytest.raises(RuntimeError, match="another size"):
            run.restore({"m": _Refusing()})
    *_, load = calls_of(read_events(Location(tmp_path)))
    assert load.kind == "load"
    assert load.result == "failed"
    assert "another size" in str(load.error)
