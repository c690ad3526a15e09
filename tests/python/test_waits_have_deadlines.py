"""Every wait has a deadline, or a row in this table that says what ends it and what it names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

# Methods that wait for ever unless they have a timeout, and functions that wait for a process.
METHODS = {"accept", "communicate", "exception", "join", "recv", "result", "select", "wait"}
FUNCTIONS = {"check_call", "check_output", "flock", "lockf", "waitpid"}
EXECUTORS = {"ThreadPoolExecutor", "ProcessPoolExecutor"}


class Wait(NamedTuple):
    """A wait without a timeout of its own."""

    ended_by: str
    names: str  # What an error or log line names when it lasts too long.


LOCAL = "work of this process, which is in progress"
DISK = "the disk: a request in flight cannot be interrupted"
CALL = "the call's deadline on the other ranks, which name this rank"
CHANNEL = "the timeout of the channel"

PYTHON = {
    "agent/memory.py _try_lock fcntl.flock": Wait("at once: LOCK_NB", "the caller"),
    "agent/messages.py _read connection.recv": Wait("the end of either process", "the caller"),
    "agent/persist.py write_shares with ThreadPoolExecutor": Wait(DISK, "agent.log"),
    "agent/process.py Agent._accept listener.accept": Wait("the end of the agent", "no rank waits"),
    "api.py _end_of.end staged.exception": Wait("at once: it is done", "the future"),
    "conversion/pieces.py Source.take future.result": Wait(DISK, "the piece"),
    "coordination/background.py Order.carry_out state.result": Wait(LOCAL, CALL),
    "coordination/background.py _SaveProcess.save state.result": Wait(LOCAL, CALL),
    "coordination/background.py _SaveProcess._reply self._connection.recv": Wait(
        "the end of the save process, or that of the save", CALL
    ),
    "coordination/background.py _serve connection.recv": Wait(
        "the end of the rank", "no rank waits"
    ),
    "coordination/connect.py _dial dialled.recv": Wait("_DIAL_S: the socket's", "the parent"),
    "coordination/group.py Call._exchange result_of": Wait(
        "the communication thread, by the deadlines of all ranks", "the ranks that are late"
    ),
    "coordination/group.py Call._exchange node.answer(self.number, number, values).result": Wait(
        "the communication thread, which does not block", "the call"
    ),
    "coordination/listeners.py Listeners._accept listener.accept": Wait(
        "at once: it does not block", "no rank waits"
    ),
    "coordination/listeners.py Listeners._read connection.recv": Wait(
        "at once: it does not block", "no rank waits"
    ),
    "coordination/loop.py Loop._run_posted self._woken.recv": Wait("at once", "no rank waits"),
    "coordination/orchestrate.py save.write writes.wait": Wait(DISK, CALL),
    "coordination/orchestrate.py load.read "
    "reader.read_data(chosen.finish_plan(planned), chosen).wait": Wait(DISK, CALL),
    "formats/deepspeed_parallel.py unite united.result": Wait("at once", "no rank waits"),
    "formats/megatron.py _payloads with ThreadPoolExecutor": Wait(DISK, CALL),
    "integrations/megatron_queues.py BackgroundSave.finalize self.future.result": Wait(
        "the deadlines of the save", "the late rank"
    ),
    "integrations/trainer.py RunCallback.on_train_end self.run.wait": Wait(
        "the timeout of the run", "the step"
    ),
    "coordination/background.py SaveFuture.report self.exception": Wait(
        "at once: it is done", "the path"
    ),
    "runs/background/save.py BackgroundSave.__init__.end done.result": Wait("at once", "the step"),
    "runs/background/save.py BackgroundSave.settle self._ended.exception": Wait(
        "at once: it is done", "the step"
    ),
    "runs/background/save.py BackgroundSave.settle self._ended.result": Wait(
        "at once: it is done", "the step"
    ),
    "runs/step_files.py lease thread.join": Wait("at once: it was told to end", "no rank waits"),
    "staging/copied_state.py CopiedState._copy x.wait": Wait(
        "the collective of torch that makes the tensor", "torch"
    ),
    "staging/stager.py SnapshotStager.wait_staged copying.result": Wait(LOCAL, CALL),
    "storage/exchange.py _connect connection.made.result": Wait("at once: it is done", CALL),
    "storage/exchange.py _check_threads thread.join": Wait("at once: it was told to end", CALL),
    "storage/progress.py progress_bar thread.join": Wait("at once: it was told to end", CALL),
    "storage/safetensors_writer.py SafetensorsWriter._write with ThreadPoolExecutor": Wait(
        DISK, CALL
    ),
    "storage/stored_values.py StoredValues._read "
    "self._reader.read_data(LoadPlan(items), planner).wait": Wait(DISK, "the file"),
    "storage/writer.py FastWriter._write_files with ThreadPoolExecutor": Wait(DISK, CALL),
}

CPP = {
    "base/niceness.h ).join": Wait(LOCAL, CALL),
    "base/parallel_for.h other.join": Wait(LOCAL, CALL),
    "bindings/peers.cc work_->wait": Wait(CHANNEL, "the peer"),
    "engine/exchange/assembly.cc of_buffer.wait": Wait("the device", CALL),
    "engine/exchange/exchange_stream.cc changed_.wait": Wait(
        "a transfer, a read, or the failure of one", "the peer"
    ),
    "engine/exchange/exchange_stream.cc end.wait": Wait(
        "the end or the loss of a peer", "the peer"
    ),
    "engine/exchange/exchange_stream.cc in_flight(piece).incoming->wait": Wait(CHANNEL, "the peer"),
    "engine/exchange/exchange_stream.cc own.outgoing->wait": Wait(CHANNEL, "the peer"),
    "engine/exchange/exchange_stream.cc own.unpacking.wait": Wait("the device", CALL),
    "engine/exchange/exchange_stream.cc send->wait": Wait(CHANNEL, "the peer"),
    "engine/exchange/exchange_stream.cc thread.join": Wait("the end of the run", "the peer"),
    "engine/exchange/exchange_stream.cc watched.thread.join": Wait("an abort", "the peer"),
    "engine/exchange/node_peers.cc copied_->wait": Wait(CHANNEL, "the peer"),
    "engine/exchange/node_peers.cc offer_->wait": Wait(CHANNEL, "the peer"),
    "engine/exchange/node_peers.cc transfer->wait": Wait(CHANNEL, "the peer"),
    "engine/load/load_batch.cc reading.join": Wait(DISK, CALL),
    "engine/read_stream.cc lane.queue->wait": Wait(DISK, CALL),
    "engine/read_stream.cc queue_.wait": Wait(DISK, CALL),
    "engine/read_stream.cc read.unpacking.wait": Wait("the device", CALL),
    "engine/read_stream.cc thread.join": Wait(DISK, CALL),
    "engine/save/file_job.cc queue_->wait": Wait(DISK, CALL),
    "engine/save/snapshot.cc packed->wait": Wait("the device", CALL),
    "engine/unpacking.cc event->wait": Wait("the device", CALL),
    "engine/unpacking.cc pending.event->wait": Wait("the device", CALL),
    "io/file_system.cc queue.wait": Wait(DISK, CALL),
    "io/thread_queue.cc news_.wait": Wait(DISK, CALL),
    "io/thread_queue.cc thread.join": Wait(DISK, CALL),
    "io/thread_queue.cc work_.wait": Wait("the end of the queue", "no rank waits"),
}


def python_waits() -> Iterator[str]:
    for path in sorted((ROOT / "torch_ckpt").rglob("*.py")):
        tree = ast.parse(path.read_text())
        name = path.relative_to(ROOT / "torch_ckpt").as_posix()
        yield from (f"{name} {where}" for where in waits_in(tree, ""))


def waits_in(node: ast.AST, scope: str) -> Iterator[str]:
    """Yields ``Class.function receiver.method`` for each wait without a timeout."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from waits_in(child, f"{scope}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.With):
            for item in child.items:
                called = item.context_expr
                if isinstance(called, ast.Call) and ast.unparse(called.func) in EXECUTORS:
                    yield f"{scope} with {ast.unparse(called.func)}"
        if isinstance(child, ast.Call) and is_wait(child):
            yield f"{scope} {ast.unparse(child.func)}"
        yield from waits_in(child, scope)


def is_wait(call: ast.Call) -> bool:
    """Whether a call may wait for ever. A socket's ``recv`` has its timeout elsewhere."""
    function = call.func
    if isinstance(function, ast.Name):
        is_bounded = any(word.arg == "timeout_s" for word in call.keywords)
        return function.id in FUNCTIONS or (function.id == "result_of" and not is_bounded)
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in FUNCTIONS:
        return True
    if function.attr not in METHODS or any(word.arg == "timeout" for word in call.keywords):
        return False
    return not call.args or function.attr == "recv"


CPP_WAIT = re.compile(r"([\w>\-.()\[\]*]+(?:\.|->)(?:wait|join))\(")
CPP_MACRO = re.compile(r"^(\(?void\)|RETURN_IF_ERROR\()")


def cpp_waits() -> Iterator[str]:
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu"}:
            continue
        for line in path.read_text().splitlines():
            code = line.partition("//")[0]
            for found in CPP_WAIT.finditer(code):
                name = CPP_MACRO.sub("", found[1]).lstrip("(")
                yield f"{path.relative_to(ROOT / 'csrc').as_posix()} {name}"


def test_every_wait_of_python_has_a_deadline_or_a_row() -> None:
    assert set(python_waits()) == set(PYTHON)


def test_every_wait_of_the_engine_has_a_row() -> None:
    assert set(cpp_waits()) == set(CPP)


def test_a_wait_without_a_deadline_is_found() -> None:
    text = "def f(a, b):\n a.wait()\n a.wait(1)\n b.result(timeout=2)\n b.join()\n ', '.join(a)\n"
    text += " with ThreadPoolExecutor(1) as c:\n  os.waitpid(1, 0)\n"
    found = list(waits_in(ast.parse(text), ""))
    assert found == ["f a.wait", "f b.join", "f with ThreadPoolExecutor", "f os.waitpid"]


def test_every_row_says_what_ends_the_wait() -> None:
    for where, wait in {**PYTHON, **CPP}.items():
        assert wait.ended_by, where
        assert wait.names, where
