"""Every wait has a deadline, or a row in this table that says what ends it and what it names.

And every wait with a time limit is one round of a ``LongWait``, which logs it, or has a row in the
table of those that are short, or that no rank waits for.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Methods that wait for ever unless they have a timeout, and functions that wait for a process.
METHODS = {
    *("accept", "acquire", "communicate", "exception", "get", "join", "recv", "recv_bytes"),
    *("result", "select", "shutdown", "wait"),
}
TIMED_METHODS = {"poll", "settimeout", "sleep", "wait_for"}  # And those that always have a timeout.
SENDING = {"send_bytes", "sendall"}  # They have no timeout of their own.
FUNCTIONS = {"check_call", "check_output", "flock", "lockf", "waitpid"}
EXECUTORS = {"ThreadPoolExecutor", "ProcessPoolExecutor"}
LOCKS = {"threading.Condition()", "threading.Lock()", "threading.RLock()"}
STORE_CALL = re.compile(
    r"^(self\._)?store\."
    r"(add|check|compare_set|delete_key|get|list_keys|multi_get|multi_set|set|wait)$"
)


class Wait(NamedTuple):
    """A wait without a timeout of its own."""

    ended_by: str
    names: str  # What an error or log line names when it lasts too long.


LOCAL = "work of this process, which is in progress"
BRIEF = "the other thread, which does not block while it has the lock"
STORE = "the store, which answers or has ended. Another thread waits for it until the deadline"
DISK = "the disk: a request in flight cannot be interrupted"
CLIENT = "the client of the store: the timeouts and retries of its requests"
CALL = "the call's deadline on the other ranks, which name this rank"
CHANNEL = "the timeout of the channel"

PYTHON = {
    "agent/memory.py _try_lock fcntl.flock": Wait("at once: LOCK_NB", "the caller"),
    "agent/memory.py has_agent fcntl.flock": Wait("at once: LOCK_UN", "the caller"),
    "agent/memory.py released lock.acquire": Wait(BRIEF, "no rank waits"),
    "agent/messages.py _read connection.recv": Wait("the end of either process", "the caller"),
    "agent/process.py _Listener._accept self._socket.accept": Wait(
        "the end of the agent", "no rank waits"
    ),
    "api.py _end_of.end staged.exception": Wait("at once: it is done", "the future"),
    "conversion/pieces.py Source.take future.result": Wait(DISK, "the piece"),
    "coordination/background.py Order.carry_out state.result": Wait(LOCAL, CALL),
    "coordination/background.py _SaveProcess.save state.result": Wait(LOCAL, CALL),
    "coordination/background.py _SaveProcess._reply self._connection.recv": Wait(
        "the socket's timeout, which is that of the call", "the rank of the save process"
    ),
    "coordination/background.py _SaveProcess._send self._connection.send_bytes": Wait(
        "the socket's timeout, which is that of the call", "the rank of the save process"
    ),
    "coordination/background.py _Replies with self._lock": Wait(BRIEF, "no rank waits"),
    "coordination/background.py _Replies._live self._connection.send_bytes": Wait(
        "the rank, which reads during a save", "no rank waits"
    ),
    "coordination/background.py _Replies._live self._is_saving.wait": Wait(
        "the next save, or the end of the process", "no rank waits"
    ),
    "coordination/background.py _Replies.send self._connection.send_bytes": Wait(
        "the rank, which reads during a save", "no rank waits"
    ),
    "coordination/background.py _serve connection.send_bytes": Wait(
        "the rank, which waits for it", "no rank waits"
    ),
    "agent/manifests.py PendingFailures with self._lock": Wait(BRIEF, "no rank waits"),
    "agent/messages.py send connection.sendall": Wait(
        "the timeout of the socket, or the end of either process", "the caller"
    ),
    "agent/replica_receiver.py ReplicaReceiver with self._lock": Wait(BRIEF, "no rank waits"),
    "agent/replica_sender.py ReplicaSender._send connection.sendall": Wait(
        "the timeout of the socket", "no rank waits"
    ),
    "agent/process.py Agent with self._changed": Wait(BRIEF, "no rank waits"),
    "agent/trainer.py SnapshotAgent.close newest[1].result": Wait(
        "at once: it is done", "the save"
    ),
    "agent/trainer.py SnapshotAgent.close self._waiting.shutdown": Wait(
        "the deadlines of the agent's answers", "the save"
    ),
    "conversion/pieces.py Source.__exit__ self._thread.shutdown": Wait(DISK, "no rank waits"),
    "coordination/connect.py _Waiting store": Wait(STORE, "the store"),
    "coordination/connect.py _place_all store": Wait(STORE, "the store"),
    "coordination/connect.py connect store": Wait(STORE, "the store"),
    "integrations/replacing.py replacing with _LOCK": Wait(BRIEF, "no rank waits"),
    "planning/plan_cache.py PlanCache with self._lock": Wait(BRIEF, CALL),
    "staging/staged.py Staged with self._thread_lock": Wait(BRIEF, CALL),
    "staging/stager.py SnapshotStager with self._lock": Wait(BRIEF, CALL),
    "staging/stager.py SnapshotStager.close executor.shutdown": Wait(LOCAL, "no rank waits"),
    "storage/exchange.py _Connection store": Wait(STORE, "the store"),
    "storage/exchange.py _connect connection.made.exception": Wait("at once: it is done", CALL),
    "coordination/connections.py Connections.relay relay.connected.exception": Wait(
        "at once: it is done", CALL
    ),
    "storage/exchange.py _delete_keys store": Wait(STORE, "no rank waits"),
    "storage/exchange.py _swapped group.recv": Wait("at once: it begins a transfer", CALL),
    "storage/file_jobs.py in_threads executor.map": Wait(DISK, CALL),
    "storage/file_jobs.py in_threads with ThreadPoolExecutor": Wait(DISK, CALL),
    "storage/safetensors_streams.py copy_file_of loaded.result": Wait(CLIENT, CALL),
    "storage/safetensors_streams.py copy_file_of with ThreadPoolExecutor": Wait(CLIENT, CALL),
    "storage/writer.py FastWriter with self._writing": Wait("at once: it is idle", CALL),
    "coordination/handshake.py Dialling.__init__ connection.sendall": Wait(
        "at once: it does not block", "the parent"
    ),
    "coordination/handshake.py Dialling.advance self.connection.recv": Wait(
        "at once: it does not block", "the parent"
    ),
    "coordination/handshake.py Dialling.advance self.connection.sendall": Wait(
        "at once: it does not block", "the parent"
    ),
    "coordination/listeners.py Listeners._challenge connection.sendall": Wait(
        "at once: it does not block", "no rank waits"
    ),
    "coordination/listeners.py Listeners._read connection.sendall": Wait(
        "at once: one byte", "no rank waits"
    ),
    "coordination/background.py _serve connection.recv": Wait(
        "the end of the rank", "no rank waits"
    ),
    "coordination/group.py Call._exchange result_of": Wait(
        "the communication thread, by the deadlines of all ranks", "the ranks that are late"
    ),
    "coordination/group.py Call._exchange "
    "relay.submit(relay.answer, self.number, number, values).result": Wait(
        "the communication thread, which does not block", "the call"
    ),
    "coordination/listeners.py Listeners._accept listener.accept": Wait(
        "at once: it does not block", "no rank waits"
    ),
    "coordination/listeners.py Listeners._read connection.recv": Wait(
        "at once: it does not block", "no rank waits"
    ),
    "coordination/orchestrate.py save.write writes.wait": Wait(DISK, CALL),
    "coordination/orchestrate.py read.read_data "
    "reader.read_data(chosen.finish_plan(planned), chosen).wait": Wait(DISK, CALL),
    "filesystems/store_client.py StoreClient with self._lock": Wait(
        "the first request to a bucket, which has timeouts", CALL
    ),
    "frameworks/deepspeed/parallel.py unite united.result": Wait("at once", "no rank waits"),
    "frameworks/megatron/flattened.py _payloads with ThreadPoolExecutor": Wait(DISK, CALL),
    "frameworks/verl/versions.py VersionsCheckpointEngine.publish publisher.wait": Wait(
        "the deadline of the publisher", "the version"
    ),
    "frameworks/deepspeed/engine.py FastCheckpointEngine.wait pending.result": Wait(
        "the deadlines of the save", "the late rank"
    ),
    "frameworks/deepspeed/engine.py FastCheckpointEngine.create self.wait": Wait(
        "the deadlines of the save", "the late rank"
    ),
    "frameworks/deepspeed/engine.py FastCheckpointEngine.load self.wait": Wait(
        "the deadlines of the save", "the late rank"
    ),
    "frameworks/deepspeed/engine.py FastCheckpointEngine.cleanup self.wait": Wait(
        "the deadlines of the save", "the late rank"
    ),
    "frameworks/deepspeed/engine.py attach.load_checkpoint ours.wait": Wait(
        "the deadlines of the save", "the late rank"
    ),
    "frameworks/megatron/queues.py QueuedSave.finalize self.future.result": Wait(
        "the deadlines of the save", "the late rank"
    ),
    "frameworks/ray/train_run.py RayTrainRun.close self.wait": Wait(
        "the timeout of the run", "the step"
    ),
    "frameworks/torchtitan/checkpoints.py FastCheckpointManager._save self.run.wait": Wait(
        "the timeout of the run", "the step"
    ),
    "frameworks/torchtitan/checkpoints.py "
    "FastCheckpointManager.maybe_wait_for_saving self.run.wait": Wait(
        "the timeout of the run", "the step"
    ),
    "frameworks/transformers/trainer.py RunCallback.on_train_end self.run.wait": Wait(
        "the timeout of the run", "the step"
    ),
    "coordination/background.py BackgroundFuture.report self.exception": Wait(
        "at once: it is done", "the path"
    ),
    "runs/background/agent.py AgentBackend._drop_last ended.exception": Wait(
        "at once: it is done", "nobody"
    ),
    "runs/background/agent.py AgentBackend._saved ended.exception": Wait(
        "at once: it is done", "the step"
    ),
    "runs/background/agent.py AgentBackend.save.begin_save ended.exception": Wait(
        "at once: it is done", "the step"
    ),
    "runs/background/save.py BackgroundSave.__init__.end done.result": Wait("at once", "the step"),
    "runs/background/save.py BackgroundSave.settle self._ended.exception": Wait(
        "at once: it is done", "the step"
    ),
    "runs/background/save.py BackgroundSave.settle self._ended.result": Wait(
        "at once: it is done", "the step"
    ),
    "ladder/promotion.py OldSteps with self._changed": Wait(BRIEF, "the save"),
    "ladder/promotion.py Promotion with self._changed": Wait(BRIEF, "the save"),
    "ladder/promotion.py OldSteps with self._removing": Wait(
        "a removal of local steps: as long as the local disk takes", "the save"
    ),
    "ladder/promotion.py Promotion._work self._changed.wait": Wait(
        "the next save, or the end of the run", "no rank waits"
    ),
    "filesystems/obstore_client.py ObstoreClient._read_back reads.popleft().result": Wait(
        STORE, "the writer of the stream"
    ),
    "filesystems/obstore_client.py ObstoreClient._read_back with ThreadPoolExecutor": Wait(
        STORE, "the writer of the stream"
    ),
    "storage/host_load.py LoadFuture._finish self._reads.result": Wait(BRIEF, CALL),
    "storage/host_load.py LoadFuture.cancel self._reads.exception": Wait(BRIEF, "no rank waits"),
    "storage/host_load.py LoadFuture.cancel.end reads.exception": Wait(BRIEF, "no rank waits"),
    "commits/leases.py _held thread.join": Wait("at once: it was told to end", "no rank waits"),
    "publishing/chain.py in_threads executor.map": Wait(CLIENT, "the caller"),
    "publishing/chain.py in_threads with ThreadPoolExecutor": Wait(CLIENT, "the caller"),
    "publishing/publisher.py Publisher._settle pending.result": Wait(
        "at once: it is done", "the version"
    ),
    "staging/copied_state.py CopiedState._copy_values x.wait": Wait(
        "the collective of torch that makes the tensor", "torch"
    ),
    "staging/stager.py SnapshotStager.wait_staged copying.result": Wait(LOCAL, CALL),
    "storage/exchange.py _connect connection.made.result": Wait("at once: it is done", CALL),
    "storage/exchange.py _check_threads thread.join": Wait("at once: it was told to end", CALL),
    "storage/progress.py progress_bar thread.join": Wait("at once: it was told to end", CALL),
    "storage/rank_work.py _resolved tensor.wait": Wait(
        "the collective of torch that makes the tensor", "torch"
    ),
    "storage/stored_values.py StoredValues._read "
    "self._reader.read_data(LoadPlan(items), planner).wait": Wait(DISK, "the file"),
}

SHORT = "at most 5 s, or a poll of a loop that logs"
AGENT = "in the agent, whose ranks log that they wait for it"
NOBODY = "a thread for which no rank waits"
AWAITED = "the caller logs"

TIMED = {
    "agent/answers.py Answers.get thread.join": AGENT,
    "agent/client.py AgentClient._answer_to connection.settimeout": "of a message, not of the wait",
    "agent/client.py AgentClient._register connection.settimeout": "of a local connection",
    "agent/copies.py Copies.advance last.wait": SHORT,
    "agent/copies.py Copies.close self._changed.wait_for": SHORT,
    "agent/copies.py _Copy.wait self._changed.wait_for": SHORT,
    "agent/manifests.py PendingFailures._watch time.sleep": AGENT,
    "agent/manifests.py PendingFailures.close time.sleep": AGENT,
    "agent/memory.py agent_lock time.sleep": SHORT,
    "agent/messages.py has_arrived poll.poll": AWAITED,
    "agent/process.py _Listener._accept time.sleep": AGENT,
    "agent/process.py Agent._acquire self._changed.wait": AGENT,
    "agent/process.py Agent._persist self._changed.wait": AGENT,
    "agent/process.py Agent._register self._changed.wait_for": AGENT,
    "agent/process.py Agent.serve self._changed.wait": AGENT,
    "agent/replica_receiver.py ReplicaReceiver._replace self._serving.join": AGENT,
    "agent/replica_receiver.py ReplicaReceiver._serve connection.settimeout": AGENT,
    "agent/replica_sender.py ReplicaSender._run_all self._changed.wait": AGENT,
    "agent/replica_sender.py ReplicaSender._send pace.wait": AGENT,
    "agent/replica_sender.py _Pace.wait time.sleep": AGENT,
    "agent/replica_wire.py dial connection.settimeout": AGENT,
    "agent/replica_wire.py send_block connection.settimeout": AGENT,
    "agent/saves.py Saves._run_joint time.sleep": AGENT,
    "cli/doctor.py _within thread.join": "a probe, whose line states the time",
    "cli/follow.py _follow time.sleep": "the user, who follows",
    "cli/watch.py _new_steps time.sleep": "the user, who watches",
    "coordination/answering.py _join thread.join": SHORT,
    "coordination/background.py BackgroundFuture.exception super().exception": "OwnFuture logs",
    "coordination/background.py BackgroundFuture.result super().result": "OwnFuture logs",
    "coordination/background.py _Replies._live time.sleep": NOBODY,
    "coordination/background.py _SaveProcess._ended self._process.join": SHORT,
    "coordination/connect.py _Waiting._polls time.sleep": SHORT,
    "coordination/connect.py _dialled wait": SHORT,
    "coordination/group.py Call.fail futures.wait": SHORT,
    "coordination/methods.py method futures.wait": SHORT,
    "coordination/listeners.py Listeners.accepted self._selector.select": SHORT,
    "coordination/listeners.py Listeners.accepted time.sleep": SHORT,
    "coordination/loop.py Loop.run self._selector.select": "the thread that logs for the ranks",
    "coordination/storage_watch.py _watch time.sleep": "the thread that logs for storage",
    "filesystems/hdfs_client.py _await_calls thread.join": SHORT,
    "filesystems/hdfs_client.py HdfsClient._call future.result": CLIENT,
    "filesystems/hdfs_client.py HdfsClient._claim time.sleep": CLIENT,
    "filesystems/hdfs_client.py HdfsClient._patiently time.sleep": CLIENT,
    "filesystems/obstore_client.py _repeated time.sleep": CLIENT,
    "records/event_log.py EventLog._work self._waiting.get": NOBODY,
    "records/event_log.py EventLog.close self._thread.join": SHORT,
    "ladder/promotion_attempt.py Attempt._raise_if_stopped self._changed.wait_for": SHORT,
    "commits/leases.py _held.renew ended.wait": NOBODY,
    "storage/exchange.py _Connection._wait_for_ready time.sleep": AWAITED,
    "storage/exchange.py _swapped work.wait": AWAITED,
    "commits/late_names.py wait_on_all time.sleep": SHORT,
    "commits/terms.py take_term time.sleep": SHORT,
    "storage/exchange.py _delete_keys thread.join": "the load has ended; at most 10 s",
    "storage/host_load.py LoadFuture.result self._reads.exception": "OwnFuture logs",
    "storage/progress.py progress_bar.show ended.wait": NOBODY,
}
"""Waits with a time limit that are no rounds of a ``LongWait``, and why not."""

CPP = {
    "base/niceness.h ).join": Wait(LOCAL, CALL),
    "base/parallel_for.h other.join": Wait(LOCAL, CALL),
    'bindings/peers.cc handle(work.get()).attr("wait")': Wait(CHANNEL, "the peer"),
    'bindings/peers.cc late.attr("wait")': Wait("1 ms", "the peer"),
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
    "engine/read_stream.cc work_.counts.wait": Wait(DISK, CALL),
    "engine/read_stream.cc read.unpacking.wait": Wait("the device", CALL),
    "engine/read_stream.cc thread.join": Wait(DISK, CALL),
    "engine/save/file_job.cc counts_.wait": Wait(DISK, CALL),
    "io/io_counts.h queue.wait": Wait(DISK, CALL),
    "engine/save/snapshot.cc packed->wait": Wait("the device", CALL),
    "engine/unpacking.cc event->wait": Wait("the device", CALL),
    "io/file_system.cc queue.wait": Wait(DISK, CALL),
    "io/storage_call.cc all.has_any.wait": Wait("the next call of storage", "no rank waits"),
    "io/thread_queue.cc news_.wait": Wait(DISK, CALL),
    "io/thread_queue.cc thread.join": Wait(DISK, CALL),
    "io/thread_queue.cc work_.wait": Wait("the end of the queue", "no rank waits"),
    "io/upload.cc state.changed.wait": Wait(CLIENT, CALL),
    "io/upload.cc state_.changed.wait": Wait("the writer, or the end of the upload", CALL),
    "io/upload.cc thread_.join": Wait(CLIENT, CALL),
}


def python_waits(
    find: Callable[[ast.AST, str], Iterator[str]],
) -> Iterator[str]:
    for name, tree in sources().items():
        yield from (f"{name} {where}" for where in find(tree, ""))


@functools.cache
def sources() -> dict[str, ast.AST]:
    """The modules of the package, parsed."""
    package = ROOT / "torch_ckpt"
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package).as_posix(): ast.parse(path.read_text()) for path in paths}


def timed_waits_in(
    node: ast.AST, scope: str, rounds: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yields ``Class.function receiver.method`` for each timed wait that is no logged round.

    ``rounds`` are the variables that a loop over ``LongWait.rounds`` sets.
    """
    for child in ast.iter_child_nodes(node):
        inner, within = scope, rounds
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{scope}.{child.name}".lstrip(".")
        loops = [child] if isinstance(child, ast.For) else getattr(child, "generators", [])
        for loop in loops:
            if re.search(r"\.rounds\(", ast.unparse(loop.iter)):
                within = rounds | {ast.unparse(loop.target)}
        if isinstance(child, ast.Call) and (name := timed_wait(child, within)):
            yield f"{inner} {name}"
        yield from timed_waits_in(child, inner, within)


NO_WAIT = re.compile(  # Methods of the same name, of paths, texts, tables, loggers and sockets.
    r"(?<!thread)(?<!_serving)(?<!_process)(?<!_silent)\.join$|(?<!_waiting)\.get$"
    r"|(?<!selector)(^|\.)select$|(?<!lock)\.acquire$|_(LOG|log)\.exception$|\.shutdown$"
)


def timed_wait(call: ast.Call, rounds: frozenset[str]) -> str:
    """Returns the name of a wait that ends by itself, and is no round of a logged wait."""
    function, name = call.func, ast.unparse(call.func)
    method = function.attr if isinstance(function, ast.Attribute) else name
    if method not in {*METHODS, *TIMED_METHODS}:
        return ""
    if NO_WAIT.search(name):
        return ""
    times = [word.value for word in call.keywords if word.arg in {"timeout", "timeout_s"}]
    place = 1 if method == "wait_for" or name in {"wait", "futures.wait"} else 0
    times = (times or call.args[place:])[:1]
    if not times or is_none(times[0]) or is_wait(call):
        return ""
    if isinstance(times[0], ast.Constant) and times[0].value in (0, "", False):
        return ""
    return "" if ast.unparse(times[0]) in rounds else name


def waits_in(node: ast.AST, scope: str, locks: frozenset[str] | None = None) -> Iterator[str]:
    """Yields ``Class.function receiver.method`` for each wait without a timeout."""
    locks = locks_of(node) if locks is None else locks
    outermost = scope.partition(".")[0]
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield from waits_in(child, f"{scope}.{child.name}".lstrip("."), locks)
            continue
        if isinstance(child, ast.With):
            for item in child.items:
                name = ast.unparse(item.context_expr)
                if name.partition("(")[0] in EXECUTORS:
                    yield f"{scope} with {name.partition('(')[0]}"
                elif name in locks or name.endswith("lock"):  # One row for all uses of a lock.
                    yield f"{outermost} with {name}"
        if isinstance(child, ast.Call) and is_wait(child):
            name = ast.unparse(child.func)
            is_store = STORE_CALL.search(name)  # One row for all of a class or function.
            yield f"{outermost} store" if is_store else f"{scope} {name}"
        yield from waits_in(child, scope, locks)


def locks_of(tree: ast.AST) -> frozenset[str]:
    """Returns the names and attributes that a module sets to locks and conditions."""
    return frozenset(
        ast.unparse(target)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in LOCKS
        for target in node.targets
    )


def is_wait(call: ast.Call) -> bool:
    """Whether a call may wait for ever. A socket's ``recv`` has its timeout elsewhere."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
    receiver = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
    if name in FUNCTIONS or (receiver and name in SENDING):
        return True
    if "executor" in receiver and name == "map":
        return True
    if STORE_CALL.search(ast.unparse(function)):
        return True
    bounds = [word.value for word in call.keywords if word.arg in {"timeout", "timeout_s"}]
    if any(not is_none(bound) for bound in bounds):
        return False
    if name == "wait" and (not receiver or receiver == "futures"):  # The first argument: futures.
        return len(call.args) < 2 or is_none(call.args[1])
    if name == "result_of":
        return True
    if not receiver or name not in METHODS:
        return False
    if name in {"recv", "recv_bytes"}:
        return True
    if name == "shutdown":
        return not call.args and not any(word.arg == "wait" for word in call.keywords)
    if name == "get":
        return not call.args and re.search(r"(^|_|\.)q(ueue)?$", receiver) is not None
    if name == "join":
        return not call.args or is_none(call.args[0])
    return all(isinstance(arg, ast.List | ast.ListComp) or is_none(arg) for arg in call.args)


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


CPP_WAIT = re.compile(r"([\w>\-.()\[\]*]+(?:\.|->)(?:wait|join|attr\(\"wait\"\)))\(")
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
    assert set(python_waits(waits_in)) == set(PYTHON)


def test_every_wait_with_a_time_limit_is_logged_or_is_short_or_nobody_waits_for_it() -> None:
    assert set(python_waits(timed_waits_in)) == set(TIMED)


def test_every_wait_of_the_engine_has_a_row() -> None:
    assert set(cpp_waits()) == set(CPP)


def test_a_wait_without_a_deadline_is_found() -> None:
    text = "def f(a, b):\n a.wait()\n a.wait(1)\n b.result(timeout=2)\n b.join()\n ', '.join(a)\n"
    text += " with ThreadPoolExecutor(1) as c:\n  os.waitpid(1, 0)\n"
    found = list(waits_in(ast.parse(text), ""))
    assert found == ["f a.wait", "f b.join", "f with ThreadPoolExecutor", "f os.waitpid"]


@pytest.mark.parametrize(
    "wait",
    [
        *("wait([earlier])", "futures.wait([x])", "futures.wait([x], None)", "lock.acquire()"),
        *("q.get()", "connection.send_bytes(message)", "executor.shutdown()", "event.wait(None)"),
        *("list(executor.map(g, x))", "store.wait(['k'])", "self._store.get('k')"),
        *("result_of(f, text, timeout_s=None)", "f.result(timeout=None)", "c.recv_bytes()"),
        *("thread.join(None)", "a.wait([x for x in y])", "connection.sendall(b'')"),
    ],
)
def test_each_form_of_a_wait_is_found(wait: str) -> None:
    assert len(list(waits_in(ast.parse(wait), ""))) == 1


@pytest.mark.parametrize("lock", ["self._lock", "self._changed", "guard"])
def test_locks_are_found_by_their_name_or_type(lock: str) -> None:
    text = f"guard = threading.RLock()\nself._changed = threading.Condition()\nwith {lock}: pass"
    assert list(waits_in(ast.parse(text), "")) == [f" with {lock}"]


@pytest.mark.parametrize(
    "wait",
    [
        *("changed.wait(1)", "thread.join(wait_s)", "time.sleep(3)", "f.result(timeout=2)"),
        *("changed.wait_for(f, wait_s)", "lock.acquire(timeout=1)", "futures.wait([f], 2)"),
        "for left_s in countdown(wait_s): changed.wait(left_s)",
    ],
)
def test_a_wait_that_bypasses_the_log_is_found(wait: str) -> None:
    assert len(list(timed_waits_in(ast.parse(wait), ""))) == 1


@pytest.mark.parametrize(
    "logged",
    [
        "for pause_s in LongWait(f).rounds(wait_s): changed.wait(pause_s)",
        "any(lock.acquire(timeout=s) for s in used.rounds(wait_s))",
        "for pause_s in waiting.rounds():\n  if done:\n    changed.wait_for(f, pause_s)",
    ],
)
def test_a_round_of_a_logged_wait_is_no_breach(logged: str) -> None:
    assert not list(timed_waits_in(ast.parse(logged), ""))


@pytest.mark.parametrize(
    "bounded",
    [
        *("wait([x], 1)", "futures.wait([x], timeout=2)", "lock.acquire(timeout=1)", "d.get(k)"),
        *("q.get(timeout=1)", "executor.shutdown(wait=False)", "event.wait(1)", "f.result(2)"),
        *("', '.join(a)", "result_of(f, text, timeout_s=2)", "sock.shutdown(how)"),
    ],
)
def test_what_has_a_timeout_is_not_a_wait(bounded: str) -> None:
    assert not list(waits_in(ast.parse(bounded), ""))


def test_every_row_says_what_ends_the_wait() -> None:
    for where, wait in {**PYTHON, **CPP}.items():
        assert wait.ended_by, where
        assert wait.names, where
