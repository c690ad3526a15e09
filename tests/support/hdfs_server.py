"""HDFS for the tests: a real NameNode and a real DataNode on this machine."""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Self

from support.store_server import START_S, StoreServer, answers, program

__all__ = ["Hdfs"]

DOWNLOADS = Path.home() / ".cache" / "torch-ckpt-tests"
DOWNLOAD_S = 300
# Hadoop 2.7.3 is a part of this package.
SPARK = "pyspark==2.4.8"
JARS = re.compile(
    r"(commons-(cli|codec|collections|configuration|io|lang|logging)|guava|hadoop-(annotations|auth"
    r"|common|hdfs)|htrace-core|jackson-(core|mapper)-asl|javax\.(servlet|ws\.rs)-api|jetty|jetty-util|jsp"
    r"-api|leveldbjni-all|log4j|netty|netty-all|protobuf-java|slf4j-(api|log4j12)|xercesImpl"
    r"|xmlenc)-[0-9][^/]*\.jar"
)
# What Hadoop's web servers need, and neither that package nor today's Java has.
DEBIAN = (
    *("libactivation-java", "libjaxb-api-java", "libjaxb-java"),
    *("libjersey1-core-java", "libjersey1-server-java", "libjersey1-servlet-java"),
)
OPENED = ("java.lang", "java.util", "java.io", "java.net", "java.nio")
CLIENT_CALLS = frozenset(
    {
        *("Create", "AddBlock", "Fsync", "Complete", "Rename2", "Delete", "Mkdirs"),
        *("GetFileInfo", "GetListing", "GetBlockLocations", "GetServerDefaults"),
    }
)
BLOCK_NBYTES = 8 << 20  # So that files of the tests have several.


def _download(folder: Path) -> None:
    """Downloads Hadoop and what it needs."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        new = Path(made) / "new"
        new.mkdir()
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
        _run([*pip, "--no-build-isolation", SPARK], Path(made))
        (archive,) = Path(made).glob("pyspark-*.tar.gz")
        with tarfile.open(archive) as files:
            for member in files:
                name = Path(member.name).name
                if "/jars/" in member.name and JARS.fullmatch(name):
                    with (new / name).open("wb") as target:
                        shutil.copyfileobj(files.extractfile(member), target)  # type: ignore[arg-type]
        _run(["apt-get", "download", "-q", *DEBIAN], Path(made))
        for package in Path(made).glob("*.deb"):
            _run(["dpkg-deb", "-x", package.name, "debian"], Path(made))
        for jar in (Path(made) / "debian/usr/share/java").glob("*.jar"):
            if not jar.is_symlink():
                shutil.copy(jar, new)
        with contextlib.suppress(OSError):  # Another process was faster.
            new.rename(folder)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=DOWNLOAD_S, check=False
    )
    if done.returncode:
        raise OSError(f"{command[0]}: {done.stderr.strip()[-300:]}")


@functools.cache
def _jars() -> tuple[Path | None, str]:
    """The folder with the jars of Hadoop, or why there is none."""
    folder = DOWNLOADS / "hadoop-2.7.3"
    try:
        if program("java") is None:
            raise OSError("java is missing: apt-get install default-jre-headless")
        if not folder.exists():
            DOWNLOADS.mkdir(parents=True, exist_ok=True)
            _download(folder)
    except (OSError, ValueError, subprocess.SubprocessError, tarfile.TarError) as error:
        return None, f"HDFS cannot be downloaded: {error}"
    return folder, ""


class _Node(StoreServer):
    """A process of HDFS."""

    PROGRAM = "java"
    PORTS = 3
    MAIN = ""

    def __init__(self, folder: Path, conf: Path) -> None:
        super().__init__(folder)
        self._conf = conf

    def run(self, main: str, *arguments: str) -> None:
        """Runs a program of Hadoop to its end."""
        with self.log.open("ab") as log:
            subprocess.run(
                [*self._java(), main, *arguments],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=START_S,
            )

    def _command(self) -> list[str]:
        return [*self._java(), self.MAIN]

    def _java(self) -> list[str]:
        jars, _ = _jars()
        return [
            *(program("java") or "java", "-Xmx256m", "-XX:+UseSerialGC"),
            *("-XX:TieredStopAtLevel=1", "-Xshare:auto", "-Djava.net.preferIPv4Stack=true"),
            *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in OPENED),
            *("-cp", f"{self._conf}:{self._conf.parent}:{jars}/*"),
        ]


class _NameNode(_Node):
    MAIN = "org.apache.hadoop.hdfs.server.namenode.NameNode"

    def _is_ready(self) -> bool:
        return answers(f"http://127.0.0.1:{self.ports[1]}/jmx?qry=none:a=b")


class _DataNode(_Node):
    MAIN = "org.apache.hadoop.hdfs.server.datanode.DataNode"

    def __init__(self, folder: Path, conf: Path, name_node: _NameNode) -> None:
        super().__init__(folder, conf)
        self._name_node = name_node

    def _is_ready(self) -> bool:
        return self.takes_blocks()

    def takes_blocks(self) -> bool:
        """Whether the NameNode gives blocks to it."""
        bean = _bean(self._name_node.ports[1], "NameNodeInfo")
        own = f":{self.ports[0]}"
        nodes = json.loads(bean.get("LiveNodes") or "{}").values()
        # The NameNode counts one that was killed among the living, for minutes.
        is_live = any(own in node["xferaddr"] and node["lastContact"] <= 1 for node in nodes)
        return (
            is_live
            and not bean.get("Safemode")
            and answers(f"http://127.0.0.1:{self.ports[1]}/jmx")
        )


def _bean(http: int, name: str) -> dict[str, str]:
    """A bean of a NameNode; empty if it does not answer."""
    url = f"http://127.0.0.1:{http}/jmx?qry=Hadoop:service=NameNode,name={name}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            beans = json.load(answer)["beans"]
    except OSError:
        return {}
    return dict(beans[0]) if beans else {}


class Hdfs:
    """A NameNode and a DataNode, which keep all they have in one folder.

    They end with the process that made them. Either may be killed and started again at the same
    address: what was synced is there again.

    Attributes:
        endpoint: Address of the NameNode, such as "hdfs://127.0.0.1:21007".
        bucket: Where tests write: the address, and a directory.
        conf: The folder of the configuration, for clients as well.
    """

    def __init__(self, folder: Path, *, block_nbytes: int = BLOCK_NBYTES) -> None:
        self.folder, self.conf = folder.resolve(), folder.resolve() / "conf"
        self._block_nbytes = block_nbytes
        self.conf.mkdir(parents=True)
        self.name_node = _NameNode(self.folder / "name", self.conf)
        self.data_node = _DataNode(self.folder / "data", self.conf, self.name_node)
        address = f"127.0.0.1:{self.name_node.ports[0]}"
        self.endpoint, self.bucket = f"hdfs://{address}", f"{address}/tests"
        self._write_configuration()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    @staticmethod
    def what_is_missing() -> str:
        """Why no server can be started here; empty if one can."""
        return _jars()[1]

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """The variables by which clients reach the server."""
        return {"HADOOP_CONF_DIR": str(self.conf), "HADOOP_USER_NAME": getpass.getuser()}

    def start(self) -> None:
        """Starts both, and waits until they take data."""
        if not (self.folder / "names").exists():
            self.name_node.run(_NameNode.MAIN, "-format", "-nonInteractive")
        self.name_node.start()
        self.data_node.start()

    def kill(self) -> None:
        """Ends both as a crash does. Nothing happens if they do not run."""
        self.data_node.kill()
        self.name_node.kill()

    def restart(self, node: str) -> None:
        """Kills one of both, starts it again, and waits until they take data.

        Args:
            node: ``"name_node"`` or ``"data_node"``.
        """
        killed: _Node = getattr(self, node)
        killed.kill()
        killed.start()
        deadline = time.monotonic() + START_S
        while not self.data_node.takes_blocks():
            assert time.monotonic() < deadline, f"{node} takes no data"
            time.sleep(0.02)

    def set_safe_mode(self, what: str) -> None:
        """Lets the NameNode enter or leave safe mode, in which it is read-only.

        Args:
            what: ``"enter"`` or ``"leave"``.
        """
        self.name_node.run("org.apache.hadoop.hdfs.tools.DFSAdmin", "-safemode", what)

    def calls(self) -> Counter[str]:
        """How often clients have called each method of the NameNode.

        The NameNode counts with a delay of a second.
        """
        time.sleep(2.5)
        port, http = self.name_node.ports[:2]
        bean = _bean(http, f"RpcDetailedActivityForPort{port}")
        counted = {
            name.removesuffix("NumOps"): int(value)
            for name, value in bean.items()
            if name.endswith("NumOps")
        }
        return Counter({name: n for name, n in counted.items() if name in CLIENT_CALLS})

    def _write_configuration(self) -> None:
        name, data = self.name_node.ports, self.data_node.ports
        core = {
            "fs.defaultFS": self.endpoint,
            "fs.viewfs.mounttable.table.link./linked": f"{self.endpoint}/tests",
            "fs.viewfs.mounttable.table.linkFallback": f"{self.endpoint}/",
            "hadoop.tmp.dir": f"{self.folder}/tmp",
        }
        hdfs = {
            "dfs.blocksize": self._block_nbytes,
            "dfs.datanode.address": f"127.0.0.1:{data[0]}",
            "dfs.datanode.data.dir": f"{self.folder}/blocks",
            "dfs.datanode.http.address": f"127.0.0.1:{data[1]}",
            "dfs.datanode.ipc.address": f"127.0.0.1:{data[2]}",
            "dfs.heartbeat.interval": 1,
            "dfs.namenode.http-address": f"127.0.0.1:{name[1]}",
            "dfs.namenode.name.dir": f"{self.folder}/names",
            "dfs.namenode.safemode.extension": 0,
            "dfs.replication": 1,
        }
        for file, values in (("core-site", core), ("hdfs-site", hdfs)):
            properties = "".join(
                f"<property><name>{key}</name><value>{value}</value></property>\n"
                for key, value in values.items()
            )
            text = f"<configuration>\n{properties}</configuration>\n"
            (self.conf / f"{file}.xml").write_text(text)
        (self.conf / "hadoop-metrics2.properties").write_text("*.period=1\n")
        layout = "log4j.appender.A.layout=org.apache.log4j.PatternLayout\n"
        pattern = "log4j.appender.A.layout.ConversionPattern=%d %p %c: %m%n\n"
        appender = "log4j.rootLogger=INFO,A\nlog4j.appender.A=org.apache.log4j.ConsoleAppender\n"
        (self.conf / "log4j.properties").write_text(appender + layout + pattern)
        for page in ("hdfs", "datanode", "static"):
            web = self.folder / "webapps" / page / "WEB-INF"
            web.mkdir(parents=True)
            (web / "web.xml").write_text("<web-app/>\n")
