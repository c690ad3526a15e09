"""Exports of a record: Chrome's trace format, Prometheus, OpenTelemetry."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from command import run_command
from events import BEGAN, event, save, write_record

from torch_ckpt.records.calls import Call, calls_of
from torch_ckpt.records.exports import chrome_trace, export_spans, prometheus_text


def test_a_trace_has_machines_as_processes_and_ranks_as_threads(tmp_path: Path) -> None:
    events = save(16)
    events += [event(9, "message", 1, 5), event(9, "write", 9, 5, background=True, waited=2.5)]
    run = write_record(tmp_path / "run", events)
    assert run_command("report", run, "--trace", tmp_path / "trace.json")[0] == 0
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {each["pid"]: each["args"]["name"] for each in found if each["name"] == "process_name"}
    assert names == {1: "host-0", 2: "host-1"}
    threads = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert len(threads) == 18
    assert {"rank 9", "rank 9 messages", "rank 9 background"} <= set(threads.values())
    spans = [each for each in found if each["ph"] == "X"]
    assert len(spans) == len(events)
    assert spans[-1]["args"] == {"step": 400, "background": True, "waited": 2.5}
    assert (spans[-1]["ts"], spans[-1]["dur"]) == (9e6, 5e6)
    for tid in threads:  # Viewers need this.
        own = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["tid"] == tid)
        assert all(one[1] <= two[0] + 1 for one, two in itertools.pairwise(own))


def test_odd_details_do_not_break_a_trace() -> None:
    odd = event(0, "write", 0, 1, waited=float("nan"), ranks=[1, float("inf")], error=None)
    (span,) = (
        each
        for each in json.loads(chrome_trace(Call([odd])), parse_constant=pytest.fail)["traceEvents"]
        if each["ph"] == "X"
    )
    assert span["args"]["waited"] == "nan"


def test_gauges_are_of_the_newest_save_and_load(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    run = tmp_path / 'r"u\\n'
    failed = event(1, "write", 90, 1, call="7", error="no")
    load = event(0, "read", 200, 2.5, kind="load", call="3", step=500, bytes=10**9)
    write_record(
        run, [*save(4), *save(4, number=2, start=100, step=500, write_2=6.0), failed, load]
    )
    file = tmp_path / "torch_ckpt.prom"
    file.write_text("old")
    assert run_command("report", run, "--prometheus", file)[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {run.name, file.name}
    found = {}
    for family in parser.text_string_to_metric_families(file.read_text()):
        assert family.documentation.endswith(".")
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("run") == str(run)
            found[sample.name.removeprefix("torch_ckpt_"), *labels.values()] = sample.value
    assert found["phase_seconds", "save", "write"] == pytest.approx(6)
    assert found["phase_seconds", "load", "read"] == pytest.approx(2.5)
    assert found["blocked_seconds", "save"] == pytest.approx(6.384)
    assert found["durable_seconds", "save"] == pytest.approx(6.484)
    assert ("durable_seconds", "load") not in found
    assert found["bytes", "load"] == 10**9
    assert (found["failures", "save"], found["failures", "load"]) == (1, 0)
    assert (found["ok", "save"], found["step", "save"]) == (1, 500)
    assert found["start_time_seconds", "save"] == BEGAN + 100


def test_gauges_of_a_save_that_is_not_durable_lack_its_duration() -> None:
    text = prometheus_text(calls_of(save()[:-1]), "run")
    assert "torch_ckpt_blocked_seconds{" in text
    assert "torch_ckpt_durable_seconds{" not in text


def test_spans_have_the_names_of_megatron_and_the_times_of_events() -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    load = event(0, "read", 200, 2.5, kind="load", call="3", step=None, odd=[1])
    open_write = event(1, "write", 0, 1, unfinished=True)
    failed = event(1, "write", 90, 1, call="7", error="no space left")
    with provider.get_tracer("training").start_as_current_span("step"):
        export_spans([open_write, *save(2), failed, load], provider)
    *spans, training = exporter.get_finished_spans()
    roots = [span for span in spans if span.parent is None]
    assert [span.name for span in roots] == [
        "megatron.checkpoint.save",
        "megatron.checkpoint.save",
        "megatron.checkpoint.load",
    ]
    assert len({span.context.trace_id for span in [*spans, training]}) == 4
    of_save = [s for s in spans if s.parent and s.context.trace_id == roots[0].context.trace_id]
    assert len(of_save) == 9
    prefix = "megatron.checkpoint.save."
    assert {span.name.removeprefix(prefix) for span in of_save} == {
        "begin",
        "stage",
        "plan",
        "io_write",
        "finalize",
    }
    assert of_save[0].attributes["dl.rank"] == 0
    assert of_save[0].attributes["host.name"] == "host-0"
    assert of_save[0].attributes["megatron.iteration"] == 400
    assert of_save[0].start_time == round(BEGAN * 1e9)
    assert roots[0].end_time - roots[0].start_time == pytest.approx(2.652e9, rel=1e-6)
    assert roots[1].status.description == "no space left"
    (read,) = (span for span in spans if span.name == "megatron.checkpoint.load.io_read")
    assert "megatron.iteration" not in read.attributes
    assert read.attributes["torch_ckpt.odd"] == "[1]"
