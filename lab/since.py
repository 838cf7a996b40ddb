"""Try the old names of book/old_names.py on the releases between which they changed.

Each release is a part, installed by uv in an environment of its own. The page takes its
column of releases from the record, and is not built if a line did not change there.
"""

import json
import os
import subprocess
from collections.abc import Iterator

from old_names import EVERY
from record import ROOT

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
# Flax reads what is private to JAX, so each release needs the JAX of its time.
JAX_FOR_FLAX = {
    "0.11.0": "0.7.0",
    "0.11.2": "0.7.2",
    "0.12.0": "0.8.3",
    "0.12.1": "0.8.3",
}


def requirements(release: str) -> list[str]:
    """What to install for a release such as "0.5.3" (of JAX) or "flax 0.11.2"."""
    package, number = release.split() if " " in release else ("jax", release)
    if package == "flax":
        jax = JAX_FOR_FLAX[number]
        return [f"flax=={number}", f"jax=={jax}", f"jaxlib=={jax}"]
    wanted = [f"jax=={number}", f"jaxlib<={number}"]
    if tuple(map(int, number.split("."))) < (0, 4, 26):
        wanted += ["numpy<2", "scipy<1.13"]  # as they were then
    return wanted


def fates(release: str) -> dict[str, str]:
    """What becomes of each old line on a release, by a program run in its place."""
    uv = [os.environ.get("UV", "uv"), "run", "--no-project", "--isolated", "--quiet"]
    python = "3.12" if release.startswith(("0.11", "0.12")) else "3.11"
    wanted = [part for name in requirements(release) for part in ("--with", name)]
    command = [*uv, "--python", python, *wanted, "python", "book/old_names.py"]
    found = subprocess.run(
        command, stdout=subprocess.PIPE, env=os.environ | EIGHT, cwd=ROOT, check=True
    )
    return json.loads(found.stdout.splitlines()[-1])


def measure(*wanted: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Try the rows that name a release on it: these releases, or all."""
    rows = [row for row in EVERY if row.until]
    for release in wanted or sorted({name for row in rows for name in row[2:4]}):
        print(f"trying {release}", flush=True)
        every = fates(release)
        yield release, {r.old: every[r.old] for r in rows if release in r[2:4]}


def files(release: str) -> list[str]:
    return ["book/old_names.py"]


def versions() -> dict[str, str]:
    return {}  # a part is a release, and named so
