"""Start the programs of launch/, and train the digits in a plain loop for comparison.

The loop runs on one device in one process, without checkpoints.
"""

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import optax
import pytest
import train
from launchers import TOLERANCE, losses
from pair import ROOT
from sklearn.datasets import load_digits

LAUNCH = ROOT / "launch"
# JAX warns if a proxy is set, because its processes cannot connect through one. A
# restore that Orbax rejects sometimes leaves a coroutine that is never awaited.
ENVIRONMENT = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
ENVIRONMENT["PYTHONWARNINGS"] = "ignore:coroutine:RuntimeWarning"
TIMEOUT = 600  # seconds until a process counts as hanging; it needs at most 60
# Printed by Orbax if a busy machine saves slowly.
SLOW_SAVE = re.compile(r"WARNING:absl:Waiting for previous save .*\n")
SHORT = ["--steps", "48", "--save-every", "20", "--log-every", "8"]
# Run a program under its own name after code that changes it.
CHANGED = """
import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv[0] = {name!r}
{code}
runpy.run_path({path!r}, run_name="__main__")
"""
# After ten steps, sleep before each step, so that signals arrive before the last.
SLOW_STEPS = """
import itertools, lifecycle, time
set_deadline, calls = lifecycle.set_deadline, itertools.count()

def slow(what, *rest):
    set_deadline(what, *rest)
    if what == "the next step" and next(calls) > 10:
        time.sleep(0.5)

lifecycle.set_deadline = slow
"""
# After 24 steps, sleep for an hour.
HANGS_IN_STEP = SLOW_STEPS.replace("> 10", "> 24").replace("0.5", "3600")
# Print a line during the save of step 40, and never finish the save.
HANGS_IN_SAVE = """
import asyncio, orbax.checkpoint as ocp
path = ocp.path.atomicity.AtomicRenameTemporaryPath
finalize = path.finalize

async def slow(self):
    if self.get_final().name == "40":
        print("waiting", flush=True)
        await asyncio.sleep(3600)
    await finalize(self)

path.finalize = slow
"""

linux_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux and root"
)


def start(name: str, *args: object, code: str = "", **popen) -> subprocess.Popen:
    """Start a program of launch/, after `code` that changes it."""
    path = str(LAUNCH / name)
    lines = CHANGED.format(folder=str(LAUNCH), name=name, code=code, path=path)
    command = [sys.executable, *(["-c", lines] if code else [path]), *map(str, args)]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    return subprocess.Popen(command, text=True, **{"env": ENVIRONMENT} | pipes | popen)


def read_until(process: subprocess.Popen, prefix: str) -> str:
    """Return the output of a process up to a line that begins with `prefix`."""
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(prefix):
            return output
    raise AssertionError(f"the process ended: {output}{process.stderr.read()}")


def statuses(processes: list[subprocess.Popen]) -> list[int]:
    """Wait for processes and return their exit statuses. Set `output` and `errors` of
    each to its stdout and its stderr, without warnings about slow saves."""
    deadline = time.monotonic() + TIMEOUT
    for process in processes:
        pipes = process.communicate(timeout=deadline - time.monotonic())
        process.output, process.errors = pipes[0], SLOW_SAVE.sub("", pipes[1])
    return [process.returncode for process in processes]


def coordinator_options(processes: int = 2) -> list[str]:
    """Return the options by which processes connect; each appends its index."""
    while True:
        port = random.randrange(20000, 30000)  # not assigned by the kernel
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            address = f"127.0.0.1:{port}"
            break
    return ["--coordinator", address, "--processes", str(processes), "--process"]


def options_of(program: ModuleType, *args: object) -> argparse.Namespace:
    """Return the options that a program reads from these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", *map(str, args)])
        return program.read_options()


class Run:
    """One process of launch/train.py, or several that train together."""

    def __init__(
        self,
        place: Path,
        *args: object,
        folder: str = "checkpoints",
        devices: int = 8,
        processes: int = 1,
        first: list[str] = [],  # options of process 0 alone
        code: str = "",  # changes the script
        popen: dict = {},  # how to start it
    ) -> None:
        self.folder = place / folder
        args = [*SHORT, "--folder", folder, "--emulate", devices // processes, *args]
        own = [[]]
        if processes > 1:
            args += ["--heartbeat", 10, *coordinator_options(processes)]
            own = [[index] for index in range(processes)]
        own[0] += first
        options = {"code": code, "cwd": place, "start_new_session": True} | popen
        self.processes = [start("train.py", *args, *more, **options) for more in own]

    def read_until(self, prefix: str) -> str:
        return read_until(self.processes[0], prefix)

    def wait_for(self, step: int) -> None:
        """Wait until the checkpoint of a step is complete, when it gets its name."""
        deadline = time.monotonic() + TIMEOUT
        while not (self.folder / str(step)).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def send(self, *signals: int, to_all: bool = False) -> None:
        """Send signals, by default SIGTERM, to the last process or to all."""
        for number in signals or [signal.SIGTERM]:
            for process in self.processes if to_all else self.processes[-1:]:
                process.send_signal(number)
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill all running processes and their children."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def end(self) -> list[int]:
        """Wait for all processes, check that their children have ended, and return the
        exit statuses. Set `output` and `errors` to lists."""
        found = statuses(self.processes)
        self.output = [process.output for process in self.processes]
        self.errors = [process.errors for process in self.processes]
        for process in self.processes:
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)  # looks up the group without sending a signal
        return found

    def finish(self) -> str:
        """Wait for a run, check that it succeeds, and return process 0's output."""
        assert self.end() == [0] * len(self.processes), self.errors
        if len(self.processes) == 1:
            assert self.errors == [""], self.errors
        return self.output[0]

    def check_losses(self, start: int = 0, data: str = "numpy") -> None:
        """Compare the losses that a run prints from step `start` with plain_loop."""
        output, (training, scores) = self.finish(), plain_loop(data)
        steps = [step for step in range(8, 49, 8) if step > start]
        expected = {f"step {step} loss": (training[step - 1], 0) for step in steps}
        saves = [step for step in (start, 20, 40, 48) if step and step >= start]
        expected |= {f"step {step} test loss": scores[step] for step in saves}
        found = losses(output)
        assert found.keys() == expected.keys()
        values = [found[line] for line in expected]
        np.testing.assert_allclose(values, [*expected.values()], **TOLERANCE)
        assert (f"step {start:5}  restored\n" in output) == bool(start)

    def stop(self, prefix: str, *signals: int, to_all: bool = False) -> int:
        """Send signals after a line with this prefix; return the step saved."""
        self.read_until(prefix)
        self.send(*signals, to_all=to_all)
        return self.stopped()

    def stopped(self) -> int:
        """Wait for a run that was stopped by a signal; return the step it saved."""
        assert self.end() == [75] * len(self.processes), self.errors
        newest = self.complete()[-1]
        assert re.search(rf"^stopped: .* step {newest}\n\Z", self.output[0], re.M)
        return newest

    def names(self) -> list[str]:
        """Return names in the folder except `starts`; shorter names come first."""
        found = [path.name for path in self.folder.iterdir() if path.name != "starts"]
        return sorted(found, key=lambda name: (len(name), name))

    def complete(self) -> list[int]:
        """Return the steps of the complete checkpoints."""
        return [int(name) for name in self.names() if name.isdigit()]


def contents(folder: Path) -> dict[Path, bytes]:
    """Return the bytes of all files below a folder, except `starts`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != "starts"}


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size at a new folder."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    subprocess.run(["mount", *options], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Write a file that fills a disk but for `leave` bytes; return its path."""
    path = folder / "ballast"
    path.write_bytes(bytes(shutil.disk_usage(folder).free - leave))
    return path


@cache
def plain_loop(data: str) -> tuple[list[float], dict[int, tuple[float, int]]]:
    """Return the loss before each of 48 steps, and (test loss, correct) after each."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(1797)
    images, labels = digits.data[order] / 16, digits.target[order]
    epochs = [np.random.default_rng([0, n]).permutation(1536) for n in range(2)]
    batches = np.reshape(epochs, (48, 64))
    if data == "grain":
        import grain

        dataset = grain.MapDataset.range(1536).seed(0).shuffle().batch(64)
        batches = np.array([*dataset.repeat(2)])
    warmup = np.arange(4) / 4
    cosine = (1 + np.cos(np.pi * np.arange(44) / 44)) / 2
    rates = jax.numpy.array(3e-3 * np.concatenate([warmup, cosine]))
    adam = optax.adam(lambda count: rates[count])

    def forward(params, x, y):
        first, second = params["hidden"], params["output"]
        hidden = jax.nn.relu(x @ first["kernel"] + first["bias"])
        logits = hidden @ second["kernel"] + second["bias"]
        losses = -jax.nn.log_softmax(logits)[np.arange(len(y)), y]
        return losses.mean(), (logits.argmax(-1) == y).sum()

    @jax.jit
    def step(params, opt_state, x, y):
        (loss, _), grads = jax.value_and_grad(forward, has_aux=True)(params, x, y)
        updates, opt_state = adam.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = train.init_params(jax.random.key(0))
    opt_state = adam.init(params)
    training, scores = [], {}
    for done, rows in enumerate(batches, start=1):
        params, opt_state, loss = step(params, opt_state, images[rows], labels[rows])
        training.append(float(loss))
        loss, correct = forward(params, images[1536:], labels[1536:])
        scores[done] = float(loss), int(correct)
    return training, scores
