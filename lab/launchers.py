"""Start launch/train.py with Open MPI and Slurm, and compare with one process.

launchers.sh starts all runs, as root on Debian or Ubuntu, and prints their durations.
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
# Several devices add in another order. That changes the seventh digit of a loss, and
# perhaps the sixth after 48 steps of Adam. Planted faults changed one of the first 3.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}


class Run(NamedTuple):
    """A run of launchers.sh, whose losses must equal those of a run of one process."""

    processes: int
    devices: int  # per process
    file: str  # in launch/, starts the run
    reference: str  # name of the run of one process
    since: int = 0  # step of the checkpoint that it restores


ONE, LONGER = "one process", "one process, longer"
RUNS = {
    ONE: Run(1, 8, "train.py", ONE),
    LONGER: Run(1, 8, "train.py", LONGER),
    "Open MPI": Run(2, 4, "mpirun.sh", ONE),
    "Open MPI, restarted": Run(4, 2, "mpirun.sh", ONE, since=20),
    "Open MPI, stopped": Run(2, 4, "mpirun.sh", LONGER),
    "Open MPI, one process killed": Run(2, 4, "mpirun.sh", LONGER),
    "Slurm": Run(2, 4, "job.sbatch", ONE),
    "Slurm, restarted": Run(4, 2, "job.sbatch", ONE, since=20),
    "Slurm, stopped and requeued": Run(2, 4, "job.sbatch", LONGER),
    "Slurm, one process killed": Run(2, 4, "job.sbatch", LONGER),
}


def files(part: str) -> set[str]:
    """Return the training script and the file that starts it."""
    return {"launch/train.py", "launch/lifecycle.py", f"launch/{RUNS[part].file}"}


def versions() -> dict[str, str]:
    """Return the versions of both launchers and JAX."""
    found = {}
    for name, program in (("Open MPI", "mpirun"), ("Slurm", "slurmctld")):
        text = subprocess.check_output([program, "-V"], text=True)
        found[name] = re.search(r"\d+\.[\d.]+", text)[0]
    return found | record.installed("jax")


def losses(output: str) -> dict[str, list[float]]:
    """Return [loss, correct predictions or 0] for each line of output with a loss."""
    line = r"^step +(\d+)  (loss|test loss) ([\d.]+)(?:, (\d+) of 261 correct)?$"
    return {
        f"step {step} {kind}": [float(loss), int(correct or 0)]
        for step, kind, loss, correct in re.findall(line, output, re.M)
    }


def matches(output: str, reference: str, since: int = 0) -> bool:
    """Return whether a run, restored from step `since`, prints the same losses."""
    # A run that was stopped prints the step after which it continues.
    stops = [str(since)] if since else re.findall(r"^stopped: .* (\d+)$", output, re.M)
    restored = re.findall(r"^step +(\d+)  restored$", output, re.M)
    found, expected = losses(output), losses(reference)
    names = [name for name in expected if int(name.split()[1]) >= since]
    return restored == stops and np.allclose(
        [found.get(name, [np.nan] * 2) for name in names],
        [expected[name] for name in names],
        **TOLERANCE,
    )


def runs() -> Iterator[tuple[str, int, str]]:
    """Yield name, seconds and output of each run as soon as it ends."""
    command = ["setpriv", "--pdeathsig", "TERM", "bash", str(SCRIPT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    output = ""
    try:
        for line in process.stdout:
            if ended := re.fullmatch(r"== (.+): (\d+) s\n", line):
                yield ended[1], int(ended[2]), output
                output = ""
            else:
                output += line
        if status := process.wait():
            sys.exit(f"{output}{SCRIPT.name} exited with status {status}")
    finally:
        process.terminate()
        process.communicate(timeout=10)  # waits until all started processes have ended


def measure(*parts: str) -> Iterator[tuple[str, dict]]:
    """Start all runs, compare each with one process, and yield these parts, or all."""
    logs = {}
    for part, seconds, output in runs():
        run = RUNS[part]
        logs[part] = output
        found = {"processes": run.processes, "devices": run.devices, "seconds": seconds}
        if not matches(output, logs[run.reference], run.since):
            sys.exit(f"{output}{part}: losses differ from\n{logs[run.reference]}")
        found["loss"] = [*losses(output).values()][-1][0]
        print(f"{part}: {seconds} s", flush=True)
        if part in (parts or RUNS):
            yield part, found


def same(old: dict, new: dict) -> bool:
    """Return whether two runs end with the same loss; their seconds always differ."""
    return np.allclose(old.get("loss", 0), new.get("loss", 0), **TOLERANCE)
