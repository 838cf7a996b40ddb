"""The recorded faults are what chapter 25 needs, and causing them leaves nothing."""

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

import hosts
import psutil
import pytest
import record

CELL = record.ROOT / "book/cells/recorded_hosts.py"
KEPT = record.read("hosts")


def test_every_fault_is_recorded_without_addresses():
    assert {*KEPT} == {*hosts.BY_NAME}, "run: nox -s lab -- hosts --record"
    assert "192.0.2." not in CELL.read_text()  # addresses differ from run to run


@pytest.mark.parametrize("fault", hosts.FAULTS, ids=hosts.BY_NAME)
def test_what_is_recorded_of_a_fault_is_that_fault(fault):
    found = KEPT[fault.name]["found"]
    assert hosts.shows(fault, found)
    turned = [None if words else "Ow" for words in found["message"]]
    assert not hosts.shows(fault, found | {"message": turned})
    for other in hosts.FAULTS:
        if other.ends != fault.ends:
            assert not hosts.shows(fault, KEPT[other.name]["found"]), other.name


SURVIVOR = """\
100.000 initialized
1000000000.100 step 0 0.0010
1000000000.300 step 1 2.5000
E0909 01:46:41.500000 7 a.cc:2] Polled an error
F0909 01:46:47.700000    6992 client.h:86] Terminating process because of it. \
absl::Status: DEADLINE_EXCEEDED: Deadline Exceeded

RPC: /xla.coordination.CoordinationService/Heartbeat
=== Source Location Trace: ===
external/util.cc:64
"""
COMPLAINED = (
    "1000000001.250 complaint ValueError: UNKNOWN: Gloo all-reduce failed: "
    "[external/tcp/pair.cc:547] Connection closed by peer [192.0.2.2]:17066\n"
)


def test_a_timeline_is_made_of_what_the_processes_printed():
    fault = hosts.Fault("slow", 40, ("fails", "fails"), slow=True, work=hosts.SAVE)
    texts = [SURVIVOR, SURVIVOR + COMPLAINED]
    assert hosts.timeline(fault, 1_000_000_000.2, texts) == {
        "first_word": [7.5, 1.0],
        "message": [
            "Deadline Exceeded RPC: Heartbeat",
            "ValueError: Gloo all-reduce failed: Connection closed by peer host 1",
        ],
        "steps_after": [1, 1],
        "watched": 40,
        "step_before": [0.001, 0.001],
        "slowest_step": [2.5, 2.5],
        "last_step": [1, 1],
    }


def started(tool: psutil.Process) -> list[psutil.Process]:
    """All that the tool has started, once both processes are in their hosts."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = tool.children(recursive=True)
            if sum(str(hosts.WORKER) in process.cmdline() for process in below) == 2:
                return below
    raise TimeoutError


def on_the_machine() -> list[str]:
    """What a stage would change if it were not alone there."""
    return [Path("/etc/hosts").read_text(), *map(str, Path("/run").glob("[hn]*/*"))]


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("nft"),
    reason="two hosts on one machine need Linux, root and nftables",
)
def test_whoever_kills_it_finds_nothing_left():
    before = on_the_machine()
    command = [sys.executable, "lab", "hosts", "link down"]
    tool = psutil.Popen(command, cwd=record.ROOT)
    below = started(tool)
    tool.kill()
    assert tool.wait(10) != 0
    assert psutil.wait_procs(below, timeout=10)[1] == []
    assert on_the_machine() == before
