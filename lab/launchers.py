"""Start launch/train.py by Open MPI and by Slurm, and compare it with one process.

launchers.sh starts everything, as root on Debian or Ubuntu, and says how long it took.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import record

SCRIPT = Path(__file__).with_suffix(".sh")
# On several devices sums are taken in another order. That moves the seventh digit of a
# loss, 48 steps of Adam may make it the sixth, and six decimals are printed. Each fault
# that was planted moved the first, the second or the third digit.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


class Run(NamedTuple):
    """A run of launchers.sh, and which run of one process it has to repeat."""

    processes: int
    devices: int  # of each process
    file: str  # that starts it
    like: str
    since: int = 0  # the step from whose checkpoint it goes on


ONE, LONGER = "one process", "one process, longer"
RUNS = {
    ONE: Run(1, 8, "train.py", ONE),
    LONGER: Run(1, 8, "train.py", LONGER),
    "Open MPI": Run(2, 4, "mpirun.sh", ONE),
    "Open MPI, restarted": Run(4, 2, "mpirun.sh", ONE, since=20),
    "Open MPI, told to stop": Run(2, 4, "mpirun.sh", LONGER),
    "Open MPI, one process killed": Run(2, 4, "mpirun.sh", LONGER),
    "Slurm": Run(2, 4, "job.sbatch", ONE),
    "Slurm, restarted": Run(4, 2, "job.sbatch", ONE, since=20),
    "Slurm, stopped and requeued": Run(2, 4, "job.sbatch", LONGER),
    "Slurm, one process killed": Run(2, 4, "job.sbatch", LONGER),
}


def files(part: str) -> set[str]:
    """The script, and the file that starts it."""
    return {"launch/train.py", "launch/lifecycle.py", f"launch/{RUNS[part].file}"}


def versions() -> dict[str, str]:
    """The versions of both launchers and of JAX."""

    def ask(*words: str) -> str:
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        return re.search(r"\d+\.[\d.]+", said)[0]

    launchers = {"Open MPI": ask("mpirun", "-V"), "Slurm": ask("slurmctld", "-V")}
    return launchers | record.installed("jax")


def numbers(said: str) -> dict[str, list[float]]:
    """What a run tells, by its line: a loss, or a test's loss and right answers."""
    line = r"^step +(\d+)  (loss|test loss) ([\d.]+)(?:, (\d+) of 261 right)?$"
    return {
        f"step {step} {kind}": [float(loss), int(right or 0)]
        for step, kind, loss, right in re.findall(line, said, re.M)
    }


def repeats(said: str, whole: str, since: int = 0) -> bool:
    """Whether a run that goes on after a step repeats the run that never stopped."""
    # What was told to stop half-way says itself after which step it goes on.
    stops = [str(since)] if since else re.findall(r"^stopped: .* (\d+)$", said, re.M)
    restored = re.findall(r"^step +(\d+)  restored$", said, re.M)
    found, expected = numbers(said), numbers(whole)
    due = [name for name in expected if int(name.split()[1]) >= since]
    return restored == stops and np.allclose(
        [found.get(name, [np.nan] * 2) for name in due],
        [expected[name] for name in due],
        **TOLERANCE,
    )


def runs() -> Iterator[tuple[str, int, str]]:
    """Each run as it ends: its name, its seconds and what it has printed."""
    words = ["setpriv", "--pdeathsig", "TERM", "bash", str(SCRIPT)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    said = ""
    try:
        for line in process.stdout:
            if ended := re.fullmatch(r"== (.+): (\d+) s\n", line):
                yield ended[1], int(ended[2]), said
                said = ""
            else:
                said += line
        if status := process.wait():
            sys.exit(f"{said}{SCRIPT.name} ended with {status}")
    finally:
        process.terminate()
        process.communicate(timeout=10)  # all that was started holds the pipe open


def measure(*parts: str) -> Iterator[tuple[str, dict]]:
    """Start all runs, compare each with one process, and yield those asked for."""
    logs = {}
    for part, seconds, said in runs():
        run = RUNS[part]
        logs[part] = said
        found = {"processes": run.processes, "devices": run.devices, "seconds": seconds}
        if not repeats(said, logs[run.like], run.since):
            sys.exit(f"{said}{part}: it does not repeat\n{logs[run.like]}")
        found["loss"] = [*numbers(said).values()][-1][0]
        print(f"{part}: {seconds} s", flush=True)
        if part in (parts or RUNS):
            yield part, found


def same(kept: dict, found: dict) -> bool:
    """Whether two runs end alike; how long they take is another thing each time."""
    return np.allclose(kept.get("loss", 0), found.get("loss", 0), **TOLERANCE)
