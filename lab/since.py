"""Run the old lines of book/old_names.py on the releases between which they changed.

Each release is a part; uv installs it in its own environment. The page reads its column
of releases from the record, and the build fails if a line did not change there.
"""

import json
import os
import subprocess
from collections.abc import Iterator

from old_names import EVERY
from record import ROOT

EIGHT = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
# Flax uses private parts of JAX, so each release needs the JAX of its time.
JAX_FOR_FLAX = {
    "0.11.0": "0.7.0",
    "0.11.2": "0.7.2",
    "0.12.0": "0.8.3",
    "0.12.1": "0.8.3",
}


def requirements(release: str) -> list[str]:
    """Return the packages of a release such as "0.5.3" (of JAX) or "flax 0.11.2"."""
    package, number = release.split() if " " in release else ("jax", release)
    if package == "flax":
        jax = JAX_FOR_FLAX[number]
        return [f"flax=={number}", f"jax=={jax}", f"jaxlib=={jax}"]
    packages = [f"jax=={number}", f"jaxlib<={number}"]
    if tuple(map(int, number.split("."))) < (0, 4, 26):
        packages += ["numpy<2", "scipy<1.13"]  # releases of that time
    return packages


def outcomes(release: str) -> dict[str, str]:
    """Return for each old line whether it fails, warns or runs on a release."""
    uv = [os.environ.get("UV", "uv"), "run", "--no-project", "--isolated", "--quiet"]
    python = "3.12" if release.startswith(("0.11", "0.12")) else "3.11"
    packages = [part for name in requirements(release) for part in ("--with", name)]
    command = [*uv, "--python", python, *packages, "python", "book/old_names.py"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=os.environ | EIGHT, cwd=ROOT, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(*releases: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Run the rows that name a release, on these releases or on all."""
    rows = [row for row in EVERY if row.until]
    for release in releases or sorted({name for row in rows for name in row[2:4]}):
        print(f"running {release}", flush=True)
        found = outcomes(release)
        yield release, {r.old: found[r.old] for r in rows if release in r[2:4]}


def files(release: str) -> list[str]:
    return ["book/old_names.py"]


def versions() -> dict[str, str]:
    return {}  # the name of a part is its version
