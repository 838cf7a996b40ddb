"""Runs of launch/train.py, and the one plain loop that they are held against.

The loop knows neither devices nor processes nor checkpoints.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import train
from launchers import TOLERANCE, numbers
from pair import ROOT
from sklearn.datasets import load_digits

LAUNCH = ROOT / "launch"
# JAX would not reach its own processes through a proxy, and says so.
ENVIRONMENT = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
SHORT = ["--steps", "48", "--save-every", "20", "--log-every", "8"]
# What runs a program after some lines that change it, under its own name.
CHANGED = """
import runpy, sys
sys.path.insert(0, {folder!r})
sys.argv[0] = {name!r}
{code}
runpy.run_path({path!r}, run_name="__main__")
"""
SLOWLY = """
import lifecycle, time
limit = lifecycle.limit  # which is asked once a step
lifecycle.limit = lambda *words: limit(*words) or time.sleep(0.2)
"""
# The save of step 40 says so, and never ends.
HANGS_IN_SAVE = """
import asyncio, orbax.checkpoint as ocp
path = ocp.path.atomicity.AtomicRenameTemporaryPath
finalize = path.finalize

async def slow(self):
    if self.get_final().name == "40":
        print("waiting", flush=True)
        await asyncio.sleep(600)
    await finalize(self)

path.finalize = slow
"""


def start(name: str, *words: object, code: str = "", **how) -> subprocess.Popen:
    """A program of launch/ in a process of its own, perhaps changed by some lines."""
    path = str(LAUNCH / name)
    lines = CHANGED.format(folder=str(LAUNCH), name=name, code=code, path=path)
    command = [sys.executable, *(["-c", lines] if code else [path]), *map(str, words)]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    return subprocess.Popen(command, text=True, **{"env": ENVIRONMENT} | pipes | how)


def read_until(process: subprocess.Popen, words: str) -> str:
    """What a process prints, until a line begins so."""
    said = ""
    for line in process.stdout:
        said += line
        if line.startswith(words):
            return said
    raise AssertionError(f"it has ended: {said}{process.stderr.read()}")


def statuses(processes: list[subprocess.Popen], within: float) -> list[int]:
    """How processes end, all of them within so many seconds. What one has `said` and
    its `complaints` are its attributes."""
    deadline = time.monotonic() + within
    for process in processes:
        pipes = process.communicate(timeout=deadline - time.monotonic())
        process.said, process.complaints = pipes
    return [process.returncode for process in processes]


def meeting() -> list[str]:
    """Options by which two processes meet here; what follows is the number of one."""
    with socket.socket() as probe:  # a port that nobody uses
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return ["--coordinator", address, "--processes", "2", "--process"]


class Run:
    """Processes of launch/train.py that train together: one, or several that meet."""

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
            words += ["--heartbeat", 10, *meeting()]
            own = [[number] for number in range(processes)]
        own[0] += first
        how = {"code": code, "cwd": place, "start_new_session": True}
        self.processes = [start("train.py", *words, *more, **how) for more in own]

    def read_until(self, words: str) -> str:
        return read_until(self.processes[0], words)

    def wait_for(self, done: int) -> None:
        """Wait for a checkpoint, which gets its name when it is whole."""
        deadline = time.monotonic() + 120
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

    def end(self, within: float = 300) -> list[int]:
        """How all processes end within so many seconds, and leave no other. What each
        has `said` and its `complaints` are lists."""
        found = statuses(self.processes, within)
        self.said = [process.said for process in self.processes]
        self.complaints = [process.complaints for process in self.processes]
        for process in self.processes:
            with pytest.raises(ProcessLookupError):
                os.killpg(process.pid, 0)  # asks for its group, and sends nothing
        return found

    def finish(self) -> str:
        """What it prints that ends well."""
        assert self.end() == [0] * len(self.processes), self.complaints
        if len(self.processes) == 1:
            assert self.complaints == [""], self.complaints
        return self.said[0]

    def repeats(self, start: int = 0, data: str = "numpy") -> None:
        """Hold against the reference what it prints from a step on."""
        check(self.finish(), start, data)

    def stop(self, moment: str, *signals: int, everyone: bool = False) -> int:
        """Tell it to stop, once a line begins so: the step that it has saved then."""
        self.read_until(moment)
        self.send(*signals, everyone=everyone)
        return self.stopped()

    def stopped(self) -> int:
        """The step after which a run goes on that was told to stop."""
        assert self.end(60) == [75] * len(self.processes), self.complaints
        newest = self.names()[-1]
        words = f"stopped: the same command goes on after step {newest}\n"
        assert self.said[0].endswith(words)
        return int(newest)

    def names(self) -> list[str]:
        """What is in the folder, but the count of starts: shorter names come first."""
        found = [path.name for path in self.folder.iterdir() if path.name != "starts"]
        return sorted(found, key=lambda name: (len(name), name))


def contents(folder: Path) -> dict[Path, bytes]:
    """All files below a folder, but the count of starts."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path: path.read_bytes() for path in files if path.name != "starts"}


def order(data: str) -> np.ndarray:
    """The rows of each step: i64[48, 64]."""
    if data == "numpy":
        epochs = [np.random.default_rng([0, n]).permutation(1536) for n in range(2)]
        return np.reshape(epochs, (48, 64))
    import grain

    batches = grain.MapDataset.range(1536).seed(0).shuffle().batch(64)
    return np.array([*batches.repeat(2)])


@cache
def reference(data: str) -> tuple[list[float], dict[int, tuple[float, int]]]:
    """The loss before each of 48 steps, and after it the test's loss and score."""
    digits = load_digits()
    known = np.random.default_rng(0).permutation(1797)
    images, labels = digits.data[known] / 16, digits.target[known]
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
    def step(params, memory, x, y):
        (loss, _), grads = jax.value_and_grad(forward, has_aux=True)(params, x, y)
        updates, memory = adam.update(grads, memory)
        return optax.apply_updates(params, updates), memory, loss

    params = train.new_state(seed=0, rate=0.0, steps=48).params
    memory = adam.init(params)
    found, scores = [], {}
    for done, rows in enumerate(order(data), start=1):
        params, memory, loss = step(params, memory, images[rows], labels[rows])
        found.append(float(loss))
        loss, right = forward(params, images[1536:], labels[1536:])
        scores[done] = float(loss), int(right)
    return found, scores


def check(said: str, start: int = 0, data: str = "numpy") -> None:
    """Compare all that a run prints from a step on with the reference."""
    losses, scores = reference(data)
    due = {f"step {n} loss": (losses[n - 1], 0) for n in range(8, 49, 8) if n > start}
    ends = [done for done in (start, 20, 40, 48) if done and done >= start]
    due |= {f"step {done} test loss": scores[done] for done in ends}
    found = numbers(said)
    assert found.keys() == due.keys()
    np.testing.assert_allclose(
        [found[line] for line in due], [*due.values()], **TOLERANCE
    )
    assert (f"step {start:5}  restored\n" in said) == bool(start)
