"""An HTTP proxy between a client and an object store, which records requests and makes faults."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal, Self
from urllib.parse import parse_qs, urlsplit

from support.store_server import free_ports

__all__ = ["Fault", "Request", "StoreProxy"]

BUFFER_BYTES = 1 << 20
BURST_S = 0.02  # What a link makes up for, if a thread was late.
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: a close discards what is unsent, and resets.
CODES = {400: "ExpiredToken", 403: "AccessDenied", 404: "NoSuchKey", 429: "SlowDown"}
CODES |= {409: "ConditionalRequestConflict", 500: "InternalError", 501: "NotImplemented"}
CODES |= {503: "SlowDown"}

Kind = Literal[
    "delay",  # The request waits for `seconds` before it goes to the server.
    "status",  # The client gets `status`; the server gets nothing.
    "reset",  # The connection is reset; the server gets nothing.
    "lose",  # The server has done it, and the connection is reset in place of its answer.
    "stall",  # `seconds` pass in the middle of the answer's body, or before an empty one.
    "cut",  # The connection is reset in the middle of the answer's body.
    "truncate",  # The connection is closed, not reset, in the middle of the answer's body.
    "shorten",  # The answer's body ends early, and Content-Length states the shorter length.
    "flip",  # One bit of the answer's body is another.
]
IN_THE_BODY = ("stall", "cut", "truncate", "shorten", "flip")


@dataclasses.dataclass
class Request:
    """One request, as it was recorded.

    Attributes:
        method: Of HTTP.
        path: Path with the bucket, without the query.
        query: What stands behind the path's "?".
        range: Value of the header, such as "bytes=0-99"; "" without one.
        kind: "get", "head", "put", "part", "create", "complete", "abort", "copy", "list",
            "delete", or "delete many". The first write of a multipart upload is its "create".
        status: Of the answer; 0 if the client got none.
        sent: Bytes of the request's body.
        received: Bytes of the answer's body that went to the client.
        faults: Kinds of the faults that it met.
        condition: Value of If-Match or If-None-Match; "" without one.
    """

    method: str
    path: str
    query: str
    range: str
    kind: str
    condition: str
    status: int = 0
    sent: int = 0
    received: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Fault:
    """A rule: which requests meet which fault.

    Which ones of a share meet it depends on the seed of the proxy, the request without its random
    ids, and how often an equal one came before: not on the order in which others arrive.

    Attributes:
        kind: What happens.
        requests: Kinds of requests (``Request.kind``); all by default.
        path: A regular expression that the request's path contains.
        share: Of the requests that match.
        skip: How many requests that match pass before it begins.
        times: How many requests meet it at most; any number by default.
        seconds: Duration of "delay" and "stall".
        status: Of "status": 429 and 503 come with the S3 error SlowDown.
        code: The S3 error of "status", in place of the usual one.
        at: Where in the answer's body, as a fraction of its length.
        when: Any other condition.
    """

    kind: Kind
    requests: tuple[str, ...] = ()
    path: str = ""
    share: float = 1.0
    skip: int = 0
    times: int | None = None
    seconds: float = 0.0
    status: int = 503
    code: str = ""
    at: float = 0.5
    when: Callable[[Request], bool] = lambda request: True
    met: int = 0

    def matches(self, request: Request) -> bool:
        """Whether it may happen to this request, were the share and numbers not."""
        return (
            (not self.requests or request.kind in self.requests)
            and re.search(self.path, request.path) is not None
            and self.when(request)
        )


class Broken(Exception):
    """The connection ends here."""


class Stream:
    """One direction of HTTP messages: a socket, and what was read ahead."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.ahead = b""
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def read_head(self) -> bytes | None:
        """First line and headers, with the empty line; None at the end of the connection."""
        while (end := self.ahead.find(b"\r\n\r\n")) < 0:
            if not (more := self.socket.recv(1 << 16)):
                return None
            self.ahead += more
        head, self.ahead = self.ahead[: end + 4], self.ahead[end + 4 :]
        return head

    def read_line(self) -> bytes:
        """One line, with its end."""
        while (end := self.ahead.find(b"\n")) < 0:
            if not (more := self.socket.recv(1 << 16)):
                raise Broken
            self.ahead += more
        line, self.ahead = self.ahead[: end + 1], self.ahead[end + 1 :]
        return line

    def pieces(self, length: int) -> Iterator[memoryview]:
        """That many bytes; a piece is valid until the next one is asked for."""
        if self.ahead:
            piece, self.ahead = self.ahead[:length], self.ahead[length:]
            length -= len(piece)
            yield memoryview(bytearray(piece))
        while length:
            count = self.socket.recv_into(self._buffer[:length])
            if not count:
                raise Broken
            length -= count
            yield self._buffer[:count]

    def body(self, length: int | None) -> Iterator[tuple[memoryview, bool]]:
        """The bytes of a body, and whether they are content; ``None`` for a chunked one."""
        if length is not None:
            yield from ((piece, True) for piece in self.pieces(length))
            return
        size = -1
        while size:
            line = self.read_line()
            size = int(line.split(b";")[0], 16)
            yield memoryview(line), False
            yield from ((piece, True) for piece in self.pieces(size))
            if size:
                yield memoryview(self.read_line()), False
        while True:  # The trailer.
            line = self.read_line()
            yield memoryview(line), False
            if not line.strip():
                return


def header(head: bytes, name: str) -> str:
    """The value of a header; "" if there is none."""
    found = re.search(rb"\r\n%s:[ \t]*([^\r]*)" % name.encode(), head, re.IGNORECASE)
    return found[1].decode().strip() if found else ""


def length_of(head: bytes) -> int | None:
    """Length of the body after this head; None if it comes in chunks."""
    if "chunked" in header(head, "Transfer-Encoding").lower():
        return None
    return int(header(head, "Content-Length") or 0)


def parsed(head: bytes) -> Request:
    """What is recorded of a request."""
    method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
    parts = urlsplit(target)
    names = parse_qs(parts.query, keep_blank_values=True).keys()
    has_key = parts.path.strip("/").count("/") > 0
    if "uploadId" in names:
        kind = {"PUT": "part", "POST": "complete", "DELETE": "abort"}.get(method, "list")
    elif method == "POST":
        kind = "create" if "uploads" in names else "delete many"
    elif method == "PUT" and header(head, "x-amz-copy-source"):
        kind = "copy"
    elif method == "GET" and not has_key:
        kind = "list"
    else:
        kind = method.lower()
    condition = header(head, "If-Match") or header(head, "If-None-Match")
    return Request(method, parts.path, parts.query, header(head, "Range"), kind, condition)


class StoreProxy:
    """Relays HTTP from a port of 127.0.0.1 to a server; a thread for each connection.

    Heads are relayed as they are, so that signatures of S3 remain valid. Thread-safe.

    Attributes:
        endpoint: Its address.
        requests: What was recorded, in the order of arrival.
        faults: The rules. The first that answers in the server's place ends a request.
        bytes_per_s: How fast all bodies together go in each direction; ``None`` for no limit.
    """

    def __init__(self, server: str, *, seed: int = 0, faults: tuple[Fault, ...] = ()) -> None:
        parts = urlsplit(server)
        self._server = (parts.hostname, parts.port)
        self._seed = seed
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._seen: Counter[str] = Counter()
        self._listener: socket.socket | None = None
        self.requests: list[Request] = []
        self.faults = list(faults)
        self.bytes_per_s: float | None = None
        self._free_s = {"up": 0.0, "down": 0.0}  # When each direction has sent all before.
        self._port = free_ports(1)[0]
        self.endpoint = f"http://127.0.0.1:{self._port}"
        self.up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.down()

    def up(self) -> None:
        """Accepts connections again after ``down``."""
        self._listener = socket.create_server(("127.0.0.1", self._port), backlog=256)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def down(self) -> None:
        """Ends all connections, and refuses new ones."""
        with self._lock:
            listener, self._listener = self._listener, None
            ended = list(self._open)
        for connection in [*ended, *([listener] if listener else [])]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if listener:
            listener.close()

    def down_for(self, seconds: float) -> None:
        """Is down for a while, and returns at once."""
        self.down()
        timer = threading.Timer(seconds, self.up)
        timer.daemon = True
        timer.start()

    def add(self, *faults: Fault) -> None:
        """Adds rules."""
        with self._lock:
            self.faults += faults

    def forget(self) -> None:
        """Removes all records and rules."""
        with self._lock:
            self.requests, self.faults = [], []
            self._seen.clear()

    def counts(self, path: str = "") -> Counter[str]:
        """Number of requests of each kind, of those whose path contains a regular expression."""
        with self._lock:
            return Counter(r.kind for r in self.requests if re.search(path, r.path))

    def bytes_read(self, path: str = "") -> int:
        """Bytes of all answers to "get" whose path contains a regular expression."""
        with self._lock:
            found = [r for r in self.requests if r.kind == "get" and re.search(path, r.path)]
        return sum(request.received for request in found)

    def bytes_written(self, path: str = "") -> int:
        """Bytes of objects that clients sent, whose path contains a regular expression."""
        with self._lock:
            found = [r for r in self.requests if r.kind in ("put", "part")]
        return sum(request.sent for request in found if re.search(path, request.path))

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # When it is closed.
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        """Relays one client's requests, one after another, over one connection to the server."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(client)
            with self._lock:
                if self._listener is None:
                    return
                self._open.add(client)
            stack.callback(self._open.discard, client)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            asked, answered = Stream(client), None
            try:
                while (head := asked.read_head()) is not None:
                    if answered is None or has_ended(answered.socket):
                        server = stack.enter_context(socket.create_connection(self._server))
                        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                        answered = Stream(server)
                    self._relay(head, asked, answered)
            except (OSError, Broken):
                with contextlib.suppress(OSError):
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)

    def _relay(self, head: bytes, asked: Stream, answered: Stream) -> None:
        """Relays one request and its answer, with the faults that it meets."""
        request = parsed(head)
        faults = {fault.kind: fault for fault in self._record(request)}
        if "reset" in faults:
            raise Broken
        if header(head, "Expect"):
            asked.socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "status" in faults:
            for piece, is_content in asked.body(length_of(head)):
                request.sent += len(piece) * is_content
            request.status = faults["status"].status
            asked.socket.sendall(refusal(request.status, faults["status"].code))
            return
        if "delay" in faults:
            time.sleep(faults["delay"].seconds)
        answered.socket.sendall(head)
        for piece, is_content in asked.body(length_of(head)):
            request.sent += len(piece) * is_content
            self._pace("up", len(piece))
            answered.socket.sendall(piece)
        answer = answered.read_head()
        while answer is not None and answer.split(b" ", 2)[1].startswith(b"1"):
            answer = answered.read_head()  # 100 Continue, which the client has already.
        if answer is None:
            raise Broken
        if "lose" in faults:
            raise Broken
        status = int(answer.split(b" ", 2)[1])
        has_body = request.method != "HEAD" and status not in (204, 304)
        length = length_of(answer) if has_body else 0
        request.status = status
        self._send(answer, length, request, faults, asked.socket, answered)

    def _send(
        self,
        head: bytes,
        length: int | None,
        request: Request,
        faults: dict[Kind, Fault],
        client: socket.socket,
        answered: Stream,
    ) -> None:
        """Sends an answer to the client, with the faults of its body."""
        fault = next((faults[kind] for kind in IN_THE_BODY if kind in faults), None)
        at = -1 if fault is None else int((length or 0) * fault.at)
        if fault and fault.kind == "shorten" and length:
            head = re.sub(rb"(?i)(\r\nContent-Length:)[^\r]*", rb"\g<1> %d" % at, head)
        client.sendall(head)
        if fault and fault.kind == "shorten" and length is None:  # It ends before its first chunk.
            for _ in answered.body(None):
                pass
            client.sendall(b"0\r\n\r\n")
            return
        if fault and not length:
            self._disturb(fault, client)
        for piece, is_content in answered.body(length):
            if is_content and fault and request.received <= at < request.received + len(piece):
                before = at - request.received
                if fault.kind == "flip":
                    piece[before] ^= 1 << (self._seed + at) % 8
                else:
                    request.received += before
                    client.sendall(piece[:before])
                    piece = piece[before:]
                    if fault.kind == "shorten":
                        for _ in answered.pieces((length or 0) - at - len(piece)):
                            pass
                        return
                    self._disturb(fault, client)
            request.received += len(piece) * is_content  # Before the client can know.
            self._pace("down", len(piece))
            client.sendall(piece)

    def _pace(self, direction: str, nbytes: int) -> None:
        """Waits as long as the link needs for so many bytes."""
        if self.bytes_per_s is None:
            return
        with self._lock:
            begin = max(self._free_s[direction], time.monotonic() - BURST_S)
            self._free_s[direction] = end = begin + nbytes / self.bytes_per_s
        time.sleep(max(end - time.monotonic(), 0))

    def _disturb(self, fault: Fault, client: socket.socket) -> None:
        """What happens in the middle of an answer."""
        if fault.kind == "stall":
            time.sleep(fault.seconds)
        elif fault.kind == "truncate":
            client.shutdown(socket.SHUT_WR)
            client.settimeout(5)
            while client.recv(BUFFER_BYTES):  # Else the close would be a reset.
                pass
            raise Broken
        elif fault.kind == "cut":
            raise Broken

    def _record(self, request: Request) -> list[Fault]:
        """Records a request; returns the faults that it meets."""
        with self._lock:
            self.requests.append(request)
            key = f"{request.method} {request.path}?{request.query} {request.range}"
            key = re.sub(r"uploadId=[^&]*|[0-9a-f-]{16,}", "*", key)  # Drawn by servers and saves.
            self._seen[key] += 1
            found = []
            for number, fault in enumerate(self.faults):
                if not fault.matches(request):
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                draw = f"{self._seed} {number} {key} {self._seen[key]}".encode()
                drawn = int.from_bytes(hashlib.blake2b(draw, digest_size=4).digest()) / 2**32
                if drawn < fault.share and (fault.times is None or fault.met < fault.times):
                    fault.met += 1
                    request.faults.append(fault.kind)
                    found.append(fault)
            return found


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed a connection on which nothing is due."""
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def refusal(status: int, code: str = "") -> bytes:
    """An answer of S3 that is an error."""
    code = code or CODES.get(status, "InternalError")
    body = (
        f"<Error><Code>{code}</Code><Message>By the proxy of the tests</Message></Error>".encode()
    )
    return (
        f"HTTP/1.1 {status} {code}\r\nContent-Type: application/xml\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode() + body
