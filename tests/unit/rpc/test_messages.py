"""Messages may be decoded for the first time by several threads at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROCESSES = 20
"""Without the tables made at import about every tenth ends with SIGSEGV."""

CODE = """
import sys, threading
import msgspec
from tieredckpt.rpc.messages import agent as m
from tieredckpt.rpc.messages import peer as pm
sys.setswitchinterval(1e-6)
host = m.HostEntry(host_id="a", incarnation="0" * 32, addresses=("x:1",))
told = m.SetPeers(session_id="s", run="1" * 32, leader="a", hosts=(host,))
sync = pm.Sync(manifests=(), records=(), attempts=())
calls = [
    lambda data=msgspec.json.encode(told): msgspec.json.decode(data, type=m.SetPeers),
    lambda data=msgspec.msgpack.encode(sync): msgspec.msgpack.decode(data, type=pm.Sync),
] * 3
barrier = threading.Barrier(len(calls))
def first(call):
    barrier.wait()
    call()
threads = [threading.Thread(target=first, args=(call,)) for call in calls]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.full
def test_the_first_decode_is_safe_in_threads():
    ends = [
        subprocess.run([sys.executable, "-c", CODE], cwd=ROOT, timeout=60, check=False).returncode
        for _ in range(PROCESSES)
    ]
    assert ends == [0] * PROCESSES
