"""A record in the formats of other tools: Chrome's trace viewer, Prometheus, OpenTelemetry."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch_ckpt.records.calls import Call, calls_of
from torch_ckpt.records.event import Event

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

__all__ = ["chrome_trace", "export_spans", "prometheus_text"]

_LANES = {"": 0, "background": 1, "messages": 2}
"""Threads of a rank in a trace: events of one thread must not overlap."""

_SPANS = {
    ("save", "write"): "io_write",
    ("save", "persist"): "io_write",
    ("save", "commit"): "finalize",
    ("load", "read"): "io_read",
}
"""Equivalent spans of Megatron-Core. Spans of other phases have the phase's name."""


def chrome_trace(call: Call) -> str:
    """Returns a call as JSON for Perfetto and chrome://tracing.

    Machines are shown as processes, and ranks as threads.
    """
    pids = {host: number for number, host in enumerate(dict.fromkeys(call.hosts.values()), 1)}
    lanes: dict[int, tuple[str, str]] = {}
    spans = []
    for event in call.events:
        lane = _lane(event)
        tid = event.rank * len(_LANES) + _LANES[lane] + 1
        lanes[tid] = (event.host, f"rank {event.rank} {lane}".strip())
        spans.append(
            {
                "ph": "X",
                "name": event.phase,
                "cat": event.kind,
                "pid": pids[event.host],
                "tid": tid,
                "ts": round(1e6 * (event.start - call.start), 3),
                "dur": round(1e6 * event.seconds, 3),
                "args": {"step": event.step, **_details(event)},
            }
        )
    names = [_name("process", host, pid, 0) for host, pid in pids.items()]
    for tid, (host, text) in sorted(lanes.items()):
        names.append(_name("thread", text, pids[host], tid))
        sort = {"sort_index": tid}
        names.append(names[-1] | {"name": "thread_sort_index", "args": sort})
    return json.dumps({"traceEvents": names + spans, "displayTimeUnit": "ms"}) + "\n"


def _details(event: Event) -> dict[str, str | float]:
    """Returns the details of an event as numbers and texts, which every format supports."""
    return {
        name: value if isinstance(value, int | str) or _is_finite(value) else str(value)
        for name, value in event.details.items()
    }


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def _lane(event: Event) -> str:
    if event.phase == "message":
        return "messages"
    return "background" if event.details.get("background") else ""


def _name(what: str, text: str, pid: int, tid: int) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": text}}


def prometheus_text(calls: Sequence[Call], run: str) -> str:
    """Returns gauges of the newest save and the newest load in Prometheus' text format.

    Args:
        calls: All calls of a record.
        run: Value of the label ``run``: several runs may be in one directory of node_exporter.
    """
    newest = {call.kind: call for call in calls}
    failed = {kind: sum(c.kind == kind and c.error is not None for c in calls) for kind in newest}
    metrics: list[tuple[str, str, list[tuple[dict[str, str], float | None]]]] = [
        (
            "phase_seconds",
            "Seconds of the slowest rank in a phase.",
            [
                ({"kind": kind, "phase": phase}, max(part.seconds for part in parts.values()))
                for kind, call in newest.items()
                for phase, parts in call.parts.items()
            ],
        ),
        *(
            (name, help_text, [({"kind": kind}, value(call)) for kind, call in newest.items()])
            for name, help_text, value in _GAUGES
        ),
        (
            "failures",
            "Saves or loads in the record that failed.",
            [({"kind": kind}, number) for kind, number in failed.items()],
        ),
    ]
    lines = []
    for name, help_text, values in metrics:
        lines += [f"# HELP torch_ckpt_{name} {help_text}", f"# TYPE torch_ckpt_{name} gauge"]
        for labels, value in values:
            if value is not None:
                shown = ",".join(f'{k}="{_escaped(v)}"' for k, v in {"run": run, **labels}.items())
                lines.append(f"torch_ckpt_{name}{{{shown}}} {float(value)!r}")
    return "\n".join(lines) + "\n"


_GAUGES = (
    ("blocked_seconds", "Seconds in which training stood still.", lambda call: call.blocked_s),
    ("durable_seconds", "Seconds until the commit.", lambda call: call.durable_s),
    ("bytes", "Bytes that all ranks wrote or read.", lambda call: call.nbytes),
    (
        "ok",
        "1 if it ended without an error, else 0.",
        lambda call: float(not (call.error or call.unfinished)),
    ),
    ("step", "Step that was saved or loaded.", lambda call: call.step),
    ("start_time_seconds", "When it began, since 1970.", lambda call: call.start),
)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def export_spans(events: Iterable[Event], tracer_provider: TracerProvider) -> None:
    """Exports each call as a trace: a span of the call, and a span of each event within it.

    If Megatron-Core has a span for a phase, the name is the same: ``megatron.checkpoint.save``,
    ``megatron.checkpoint.save.io_write``, and so on. Requires ``torch-ckpt[otel]``.

    Args:
        events: All events of each call to export.
        tracer_provider: Provider of the tracer, such as a ``TracerProvider`` of
            ``opentelemetry.sdk.trace``.

    Example::

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        export_spans(read_events(Location("runs/gpt")), provider)
    """
    from opentelemetry import trace

    tracer = tracer_provider.get_tracer("torch_ckpt")
    for call in calls_of(events):
        whole = f"megatron.checkpoint.{call.kind}"
        end = max(event.end for event in call.events)
        facts: dict[str, Any] = {"torch_ckpt.call": call.name, "torch_ckpt.ranks": len(call.hosts)}
        root = tracer.start_span(
            whole,
            context=trace.set_span_in_context(trace.INVALID_SPAN),  # A new trace.
            start_time=_ns(call.start),
            attributes=facts | _iteration(call.step),
        )
        if call.error is not None:
            root.set_status(trace.StatusCode.ERROR, call.error)
        for event in call.events:
            span_name = _SPANS.get((call.kind, event.phase), event.phase)
            facts = {"dl.rank": event.rank, "host.name": event.host, **_iteration(event.step)}
            facts |= {f"torch_ckpt.{name}": value for name, value in _details(event).items()}
            span = tracer.start_span(
                f"{whole}.{span_name}",
                context=trace.set_span_in_context(root),
                start_time=_ns(event.start),
                attributes=facts,
            )
            if error := event.details.get("error"):
                span.set_status(trace.StatusCode.ERROR, str(error))
            span.end(_ns(event.start + event.seconds))
        root.end(_ns(end))


def _iteration(step: int | None) -> dict[str, int]:
    return {} if step is None else {"megatron.iteration": step}


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)
