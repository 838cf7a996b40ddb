"""Kill one of two processes, and see whether the other one hears of it.

Both run lab/kills_worker.py on this machine, with some emulated CPU devices each, and
repeat one collective over all devices; after 30 steps process 1 kills itself. Process 0
hears of it by a Python exception within 5 seconds, or it hangs until the coordination
service ends it for want of a heartbeat. Each case happens three times on each release,
which is a part and has an environment in _build/kills, made by uv.
"""

import contextlib
import io
import math
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import record

WORKER = record.ROOT / "lab/kills_worker.py"
STATE = record.ROOT / "_build/kills"
RELEASES = "0.7.2", "0.10.2", "0.12.0.1"  # on each the book's own chapters run, too
TIMES = 3
HEARTBEAT = 10  # seconds
SOON = 5  # seconds in which an exception counts
DEVICES = {  # of each process; "in turn": 0, 4, 1, 5, ... in the mesh, not 0, 1, 2, ...
    "1": {"devices": 1},
    "2": {"devices": 2},
    "4": {"devices": 4},
    "4 in turn": {"devices": 4, "IN_TURN": 1},
}
# At the kill process 0 has not begun the next step, or it waits in it, because process
# 1 is late.
COLLECTIVES = {
    "all-reduce": {"COLLECTIVE": "all-reduce", "LATE": 0},
    "all-gather": {"COLLECTIVE": "all-gather", "LATE": 0},
    "ppermute": {"COLLECTIVE": "ppermute", "LATE": 0},
    "ppermute, waiting": {"COLLECTIVE": "ppermute", "LATE": 1},
}
launch = runpy.run_path(str(record.ROOT / "book/cells/launch.py"))["launch"]


def environment(release: str) -> Path:
    """The Python of an environment with a release of JAX."""
    place = STATE / release
    make = ["venv", "--allow-existing", "--python", "3.12", place]
    fill = ["pip", "install", "--python", place / "bin/python", "numpy"]
    for words in (make, [*fill, f"jax=={release}", f"jaxlib=={release}"]):
        subprocess.run([os.environ.get("UV", "uv"), *words, "--quiet"], check=True)
    return place / "bin/python"


def happen(python: Path, **settings: object) -> tuple[float | None, float]:
    """Let process 1 kill itself: seconds until process 0 hears, and to its end."""
    with (
        mock.patch.object(sys, "executable", str(python)),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        survivor, dead = launch(WORKER, patience=60, HEARTBEAT=HEARTBEAT, **settings)
        over = time.time()
    if "killed" not in (dead.result or {}) or not survivor.status:
        sys.exit(f"{settings}: not so: {survivor} {dead}")
    killed = dead.result["killed"]
    heard = survivor.result.get("heard", math.inf) - killed
    if heard < SOON:
        return round(heard, 2), round(over - killed, 1)
    if "stopped sending heartbeats" not in survivor.output:
        sys.exit(f"{settings}: it did not end so: {survivor.output}")
    return None, round(over - killed, 1)


def measure(*releases: str) -> Iterator[tuple[str, dict]]:
    """Let each case happen TIMES times on these releases, or on all."""
    for release in releases or RELEASES:
        python, found = environment(release), {}
        for devices, of_each in DEVICES.items():
            found[devices] = {}
            for collective, what in COLLECTIVES.items():
                runs = [happen(python, **of_each, **what) for _ in range(TIMES)]
                case = dict(zip(("heard", "end"), map(list, zip(*runs))))
                found[devices][collective] = case
                print(f"{release}, {devices}, {collective}: {case}", flush=True)
        yield release, found


def files(release: str) -> list[str]:
    return ["lab/kills_worker.py"]


def versions() -> dict[str, str]:
    return {}  # a part is a release, and named so


def same(kept: dict, found: dict) -> bool:
    """Whether the kill was heard as often as before; seconds differ by chance."""

    def unheard(of: dict) -> list[int]:
        return [c["heard"].count(None) for every in of.values() for c in every.values()]

    return unheard(kept) == unheard(found)


def cell(parts: dict[str, dict]) -> str:
    """The record as a cell of chapter 25."""
    dates = " and ".join(sorted({part["recorded"] for part in parts.values()}))
    kills = {name: parts[name]["found"] for name in RELEASES if name in parts}
    about = {"date": dates, "heartbeat": HEARTBEAT, "soon": SOON}
    return f"{HEAD}KILLS_ON = {about}\nKILLS = {kills}\n"


HEAD = """\
# @title Recorded kills
# Written by `nox -s lab -- kills --record`: KILLS[release][devices][collective] of
# two processes, one of which is killed, three times.
#   heard   seconds until the other one gets an exception: None, none soon
#   end     seconds until it ends
"""
