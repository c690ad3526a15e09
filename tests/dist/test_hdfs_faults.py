"""Bad days of HDFS: ranks, the NameNode and the DataNode killed, jobs against each other."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from forks import Forks
from store_kills import RaceCampaign, save_on_a_rank
from support.hdfs_server import Hdfs
from support.store_campaigns import LARGE, SMALL, assert_only_one, cause_of, loaded, save, state_of

import torch_ckpt
from torch_ckpt import FastReader, FastWriter
from torch_ckpt.errors import StorageError
from torch_ckpt.filesystems.hdfs_client import HdfsClient
from torch_ckpt.filesystems.location import PENDING, Location
from torch_ckpt.process_state import PROCESS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

START_S = 60.0
SAVE_S = 120.0
