"""Start the programs of launch/, and train the digits by a plain loop for comparison.

The loop uses neither devices nor processes nor checkpoints.
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
from launchers import TOLERANCE, numbers
from pair import ROOT
from sklearn.datasets import load_digits

LAUNCH = ROOT / "launch"
# JAX would not reach its own processes through a proxy, and says so. A restore that
# Orbax rejects may leave a coroutine that nobody awaits, by chance.
ENVIRONMENT = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
ENVIRONMENT["PYTHONWARNINGS"] = "ignore:coroutine:RuntimeWarning"
HANGS = 600  # seconds after which a process is said to hang; it needs 60 at most
# What Orbax prints where a busy machine saves slowly.
SLOW_SAVE = re.compile(r"WARNING:absl:Waiting for previous save .*\n")
SHORT = ["--steps", "48", "--save-every", "20", "--log-every", "8"]
# Run a program under its own name after some lines that change it.
CHANGED = """
import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv[0] = {name!r}
{code}
runpy.run_path({path!r}, run_name="__main__")
"""
# After ten steps, wait half a second before each: a signal arrives before the last.
SLOWLY = """
import itertools, lifecycle, time
limit, calls = lifecycle.limit, itertools.count()

def slow(what, *rest):
    limit(what, *rest)
    if what == "the next step" and next(calls) > 10:
        time.sleep(0.5)

lifecycle.limit = slow
"""
# After 24 steps, wait until there is a file `go`.
HANGS_IN_STEP = """
import itertools, lifecycle, pathlib, time
limit, calls = lifecycle.limit, itertools.count()

def hang(what, *rest):
    limit(what, *rest)
    if what == "the next step" and next(calls) == 25:
        while not pathlib.Path("go").exists():
            time.sleep(0.1)

lifecycle.limit = hang
"""
# Print a line during the save of step 40, which never ends.
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


def start(name: str, *words: object, code: str = "", **how) -> subprocess.Popen:
    """Start a program of launch/, perhaps changed by some lines."""
    path = str(LAUNCH / name)
    lines = CHANGED.format(folder=str(LAUNCH), name=name, code=code, path=path)
    command = [sys.executable, *(["-c", lines] if code else [path]), *map(str, words)]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    return subprocess.Popen(command, text=True, **{"env": ENVIRONMENT} | pipes | how)


def read_until(process: subprocess.Popen, words: str) -> str:
    """Return what a process prints until a line begins with these words."""
    output = ""
    for line in process.stdout:
        output += line
        if line.startswith(words):
            return output
    raise AssertionError(f"it has ended: {output}{process.stderr.read()}")


def statuses(processes: list[subprocess.Popen], within: float = HANGS) -> list[int]:
    """Wait for processes and return their exit statuses; set `output` and `errors` of
    each, what it has written to stdout and stderr, but for slow saves."""
    deadline = time.monotonic() + within
    for process in processes:
        pipes = process.communicate(timeout=deadline - time.monotonic())
        process.output, process.errors = pipes[0], SLOW_SAVE.sub("", pipes[1])
    return [process.returncode for process in processes]


def meeting(processes: int = 2) -> list[str]:
    """Return the options by which processes connect; each appends its own number."""
    while True:
        port = random.randrange(20000, 30000)  # the kernel gives these to nobody
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            address = f"127.0.0.1:{port}"
            break
    return ["--coordinator", address, "--processes", str(processes), "--process"]


def options_of(program: ModuleType, *words: object) -> argparse.Namespace:
    """Return what a program reads from a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", *map(str, words)])
        return program.read_options()


class Run:
    """One process of launch/train.py, or several that train together."""

    def __init__(
        self,
        place: Path,
        *words: object,
        folder: str = "checkpoints",
        devices: int = 8,
        processes: int = 1,
        first: list[str] = [],  # options of process 0 alone
        code: str = "",  # that changes the script
    ) -> None:
        self.folder = place / folder
        words = [*SHORT, "--folder", folder, "--emulate", devices // processes, *words]
        own = [[]]
        if processes > 1:
            words += ["--heartbeat", 10, *meeting(processes)]
            own = [[number] for number in range(processes)]
        own[0] += first
        how = {"code": code, "cwd": place, "start_new_session": True}
        self.processes = [start("train.py", *words, *more, **how) for more in own]

    def read_until(self, words: str) -> str:
        return read_until(self.processes[0], words)

    def wait_for(self, done: int) -> None:
        """Wait for a checkpoint, which gets its name when it is complete."""
        deadline = time.monotonic() + HANGS
        while not (self.folder / str(done)).exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def send(self, *signals: int, everyone: bool = False) -> None:
        """Send signals, or SIGTERM, in turn: to the last process, or to all."""
        for number in signals or [signal.SIGTERM]:
            for process in self.processes if everyone else self.processes[-1:]:
                process.send_signal(number)
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill all processes that are left, and what they have started."""
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def end(self, within: float = HANGS) -> list[int]:
        """Wait for all processes and return their exit statuses; `output` and `errors`
        become lists. No process is left of those that they have started."""
        found = statuses(self.processes, within)
        self.output = [process.output for process in self.processes]
        self.errors = [process.errors for process in self.processes]
        for process in self.processes:
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)  # looks for its group, and sends nothing
        return found

    def finish(self) -> str:
        """Wait for a run that ends well, and return what it prints."""
        assert self.end() == [0] * len(self.processes), self.errors
        if len(self.processes) == 1:
            assert self.errors == [""], self.errors
        return self.output[0]

    def repeats(self, start: int = 0, data: str = "numpy") -> None:
        """Compare all that a run prints from a step on with the plain loop."""
        output, (losses, scores) = self.finish(), plain_loop(data)
        due = {f"step {n} loss": (losses[n - 1], 0) for n in range(8, 49, 8)}
        due = {line: loss for line, loss in due.items() if int(line.split()[1]) > start}
        ends = [done for done in (start, 20, 40, 48) if done and done >= start]
        due |= {f"step {done} test loss": scores[done] for done in ends}
        found = numbers(output)
        assert found.keys() == due.keys()
        values = [found[line] for line in due]
        np.testing.assert_allclose(values, [*due.values()], **TOLERANCE)
        assert (f"step {start:5}  restored\n" in output) == bool(start)

    def stop(self, moment: str, *signals: int, everyone: bool = False) -> int:
        """Send signals when a line begins with these words; return the step saved."""
        self.read_until(moment)
        self.send(*signals, everyone=everyone)
        return self.stopped()

    def stopped(self) -> int:
        """Wait for a run that was told to stop, and return the step that it saved."""
        assert self.end() == [75] * len(self.processes), self.errors
        newest = self.complete()[-1]
        assert re.search(rf"^stopped: .* step {newest}\n\Z", self.output[0], re.M)
        return newest

    def names(self) -> list[str]:
        """List the folder without the count of starts; shorter names come first."""
        found = [path.name for path in self.folder.iterdir() if path.name != "starts"]
        return sorted(found, key=lambda name: (len(name), name))

    def complete(self) -> list[int]:
        """List the steps of the complete checkpoints."""
        return [int(name) for name in self.names() if name.isdigit()]


def contents(folder: Path) -> dict[Path, bytes]:
    """Read all files below a folder, but the count of starts."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != "starts"}


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of so many bytes."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    subprocess.run(["mount", *options], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Write a file that takes all bytes of a disk but so many."""
    path = folder / "ballast"
    path.write_bytes(bytes(shutil.disk_usage(folder).free - leave))
    return path


@cache
def plain_loop(data: str) -> tuple[list[float], dict[int, tuple[float, int]]]:
    """Return the loss before each of 48 steps, and test loss and score after it."""
    digits = load_digits()
    known = np.random.default_rng(0).permutation(1797)
    images, labels = digits.data[known] / 16, digits.target[known]
    epochs = [np.random.default_rng([0, n]).permutation(1536) for n in range(2)]
    order = np.reshape(epochs, (48, 64))
    if data == "grain":
        import grain

        batches = grain.MapDataset.range(1536).seed(0).shuffle().batch(64)
        order = np.array([*batches.repeat(2)])
    warm = np.arange(4) / 4
    cool = (1 + np.cos(np.pi * np.arange(44) / 44)) / 2
    rates = jax.numpy.array(3e-3 * np.concatenate([warm, cool]))
    adam = optax.adam(lambda count: rates[count])

    def forward(params, x, y):
        first, second = params["Dense_0"], params["Dense_1"]
        hidden = jax.nn.relu(x @ first["kernel"] + first["bias"])
        logits = hidden @ second["kernel"] + second["bias"]
        losses = -jax.nn.log_softmax(logits)[np.arange(len(y)), y]
        return losses.mean(), (logits.argmax(-1) == y).sum()

    @jax.jit
    def step(params, opt_state, x, y):
        (loss, _), grads = jax.value_and_grad(forward, has_aux=True)(params, x, y)
        updates, opt_state = adam.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = train.new_state(seed=0, rate=0.0, steps=48).params
    opt_state = adam.init(params)
    losses, scores = [], {}
    for done, rows in enumerate(order, start=1):
        params, opt_state, loss = step(params, opt_state, images[rows], labels[rows])
        losses.append(float(loss))
        loss, right = forward(params, images[1536:], labels[1536:])
        scores[done] = float(loss), int(right)
    return losses, scores
