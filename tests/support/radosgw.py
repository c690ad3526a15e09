"""The object gateway of Ceph for the tests: a cluster of one monitor and one disk, and radosgw."""

from __future__ import annotations

import subprocess
import urllib.request
import uuid
from datetime import timedelta
from pathlib import Path

import obstore
import pytest
from obstore.store import S3Store
from support.store_server import (
    ACCESS_KEY,
    SECRET_KEY,
    SeaweedFS,
    StoreServer,
    answers,
    program,
)

__all__ = ["RadosGateway", "on_servers"]

STEP_S = 60
CONFIGURATION = """
[global]
fsid = {fsid}
mon_host = v2:127.0.0.1:{monitor}
public_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
log_to_stderr = true
log_file =
mon_cluster_log_file =
admin_socket =
run_dir = .
mon_data = monitor
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
osd_data = disk
osd_objectstore = bluestore
osd_memory_target = 939524096
bluestore_block_size = 53687091200
osd_crush_chooseleaf_type = 0
osd_crush_initial_weight = 1
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
rgw_frontends = beast endpoint=127.0.0.1:{gateway}
rgw_run_sync_thread = false
rgw_gc_obj_min_wait = 60
rgw_gc_processor_period = 60
"""


class RadosGateway(StoreServer):
    """radosgw, with the monitor and the daemon of the disk that it needs.

    A bucket that does not exist is an error, as on S3. All three processes are killed together.
    """

    PROGRAM = "radosgw"
    INSTALLED_BY = "apt-get install ceph-mon ceph-osd radosgw"
    PORTS = 2

    def __init__(self, folder: Path, *, bucket: str = "checkpoints") -> None:
        super().__init__(folder, bucket=bucket)
        self._below: list[subprocess.Popen[bytes]] = []

    @classmethod
    def is_installed(cls) -> bool:
        """Whether its programs are here: those of ceph-mon, ceph-osd and radosgw."""
        return all(program(name) for name in ("ceph", "ceph-mon", "ceph-osd", cls.PROGRAM))

    def create_bucket(self, name: str) -> None:
        """Makes a bucket. Nothing happens if there is one."""
        variables = self.environment()
        store = S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=variables["AWS_ACCESS_KEY_ID"],
            secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
            region=variables["AWS_REGION"],
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, "PUT", "", timedelta(minutes=1))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=STEP_S):
            pass

    def remove_bucket(self, name: str) -> None:
        """Removes a bucket with all that is in it."""
        self._call("radosgw-admin", "bucket", "rm", f"--bucket={name}", "--purge-objects")

    def start(self) -> None:
        try:
            self._start()
        except BaseException:
            self.kill()
            raise

    def _start(self) -> None:
        is_new = not (self.folder / "ceph.conf").exists()
        if is_new:
            self._configure()
            address = f"v2:127.0.0.1:{self.ports[1]}"
            self._call("monmaptool", "--create", "--addv", "a", f"[{address}]", "monitors")
            map_, nobody = ("--monmap", "monitors"), ("--keyring", "/dev/null")
            self._call("ceph-mon", "--mkfs", "-i", "a", *map_, *nobody)
        self._below = [self._started(self._of("ceph-mon", "-i", "a", "-f"))]
        if is_new:
            disk = str(uuid.uuid4())
            self._call("ceph", "osd", "new", disk)
            self._call("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", disk)
        self._below.append(self._started(self._of("ceph-osd", "-i", "0", "-f")))
        if is_new:
            keys = f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}"
            names = "--uid=tests", "--display-name=tests"
            self._call("radosgw-admin", "user", "create", *names, *keys)
        super().start()
        if is_new:
            self.create_bucket(self.bucket)

    def kill(self) -> None:
        super().kill()
        for process in self._below:
            process.kill()
            process.wait()
        self._below = []

    def _configure(self) -> None:
        (self.folder / "disk").mkdir()
        gateway, monitor = self.ports
        text = CONFIGURATION.format(fsid=uuid.uuid4(), gateway=gateway, monitor=monitor)
        (self.folder / "ceph.conf").write_text(text)

    def _of(self, name: str, *words: str) -> list[str]:
        return [program(name) or name, "-c", "ceph.conf", *words]

    def _call(self, name: str, *words: str) -> None:
        """Runs a program of Ceph to its end."""
        with self.log.open("ab") as log:
            subprocess.run(
                self._of(name, *words),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                check=True,
                timeout=STEP_S,
            )

    def _command(self) -> list[str]:
        return self._of(self.PROGRAM, "-n", "client.rgw", "-f")

    def _is_ready(self) -> bool:
        return answers(self.endpoint)


on_servers = pytest.mark.parametrize(
    "store_server", [SeaweedFS, pytest.param(RadosGateway, marks=pytest.mark.slow)], indirect=True
)
"""Runs a test that has the fixture ``store_server`` on each server."""
