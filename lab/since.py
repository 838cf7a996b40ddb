"""Try the old names of book/old_names.py on the releases between which they changed.

Run by `nox -s since`. Each release is installed by uv in an environment of its own; the
results go into book/measured/since.json, from which the page takes its column of
releases. A row whose line does not change between its two releases is an error, and
nothing is recorded.
"""

import json
import os
import subprocess
import sys

from record import record
from old_names import EVERY, Row
from pair import ROOT

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


def python(release: str) -> str:
    """A Python for which that release was made."""
    return "3.12" if release.startswith(("0.11", "0.12")) else "3.11"


def fates(release: str) -> dict[str, str]:
    """What becomes of each old line on a release, by a program run in its place."""
    uv = [os.environ.get("UV", "uv"), "run", "--no-project", "--isolated", "--quiet"]
    wanted = [part for name in requirements(release) for part in ("--with", name)]
    command = [*uv, "--python", python(release), *wanted, "python", "old_names.py"]
    found = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | EIGHT,
        cwd=ROOT / "book",
    )
    if found.returncode:
        raise SystemExit(f"{release} could not be tried:\n{found.stderr}")
    return json.loads(found.stdout.splitlines()[-1])


def contradictions(rows: list[Row], found: dict[str, dict[str, str]]) -> list[str]:
    """The rows whose line does not become what it is today between its releases."""
    wrong = []
    for row in rows:
        before, after = found[row.until][row.old], found[row.since][row.old]
        if before == row.fate or after != row.fate:
            wrong.append(f"{row.old}: {before} on {row.until}, {after} on {row.since}")
    return wrong


def main() -> str | None:
    """Try every row that names two releases; complain of what does not hold."""
    rows = [row for row in EVERY if row.until]
    found = {}
    for release in sorted({release for row in rows for release in row[2:4]}):
        print(f"trying {release}", flush=True)
        every = fates(release)
        found[release] = {
            row.old: every[row.old] for row in rows if release in row[2:4]
        }
    if wrong := contradictions(rows, found):
        return "\n".join(wrong)
    record("since", {"fates": found})


if __name__ == "__main__":
    sys.exit(main())
