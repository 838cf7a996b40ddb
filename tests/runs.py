"""Runs of launch/train.py, and the one plain loop that they are held against.

The loop knows neither devices nor processes nor checkpoints.
"""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
import train
from pair import ROOT
from sklearn.datasets import load_digits

LAUNCH = ROOT / "launch"
# JAX would not reach its own processes through a proxy, and says so.
ENVIRONMENT = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
SHORT = ["--steps", "48", "--save-every", "20", "--log-every", "8"]
# On several devices sums are taken in another order. That moves the seventh digit of a
# loss, 48 steps of Adam may make it the sixth, and six decimals are printed. Each fault
# that was planted moved the first, the second or the third digit.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}
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


def start(name: str, *words: object, code: str = "", **how) -> subprocess.Popen:
    """A program of launch/ in a process of its own, perhaps changed by some lines."""
    path = str(LAUNCH / name)
    lines = CHANGED.format(folder=str(LAUNCH), name=name, code=code, path=path)
    command = [sys.executable, *(["-c", lines] if code else [path]), *map(str, words)]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    return subprocess.Popen(command, text=True, **{"env": ENVIRONMENT} | pipes | how)


def beginning(folder: Path) -> Iterator[Callable]:
    """A function that begins a run in a folder, perhaps of a script that some lines
    have changed; at the end none is left. It is the fixture `begin`."""
    runs = []

    def begin(devices: int, *more: str, code: str = "") -> subprocess.Popen:
        words = ["--emulate", devices, *SHORT, *more]
        own = {"cwd": folder, "start_new_session": True}
        run = start("train.py", *words, code=code, **own)
        runs.append(run)
        return run

    yield begin
    for run in runs:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()


def end(run: subprocess.Popen) -> tuple[str, str]:
    """What a run has printed and what it has complained; no process of it is left."""
    said, complaints = run.communicate("\n", timeout=300)
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)  # asks for a process of its group, and sends nothing
    return said, complaints


def finish(run: subprocess.Popen) -> str:
    """What a run prints that ends well."""
    said, complaints = end(run)
    assert (run.returncode, complaints) == (0, "")
    return said


def read_until(run: subprocess.Popen, words: str) -> str:
    """What a run prints, until a line begins so."""
    said = ""
    for line in run.stdout:
        said += line
        if line.startswith(words):
            return said
    raise AssertionError(f"it has ended: {said}{run.stderr.read()}")


@cache
def reference() -> tuple[list[float], dict[int, tuple[float, int]]]:
    """The loss before each of 48 steps, and after it the test's loss and score."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(1797)
    images, labels = digits.data[order] / 16, digits.target[order]
    epochs = [np.random.default_rng([0, n]).permutation(1536) for n in range(2)]
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
    for done, rows in enumerate(np.reshape(epochs, (48, 64)), start=1):
        params, memory, loss = step(params, memory, images[rows], labels[rows])
        found.append(float(loss))
        loss, right = forward(params, images[1536:], labels[1536:])
        scores[done] = float(loss), int(right)
    return found, scores


def check(said: str, start: int = 0) -> None:
    """Compare all that a run prints from a step on with the reference."""
    losses, scores = reference()
    found = re.findall(r"^step +(\d+)  loss (\S+)$", said, re.M)
    due = range(8 + start // 8 * 8, 49, 8)
    expected = [(done, losses[done - 1]) for done in due]
    np.testing.assert_allclose(np.float64(found), expected, **TOLERANCE)

    line = r"^step +(\d+)  test loss (\S+), (\d+) of 261 right$"
    found = np.float64(re.findall(line, said, re.M))
    due = [start] * bool(start) + [done for done in (20, 40, 48) if done > start]
    expected = np.float64([(done, *scores[done]) for done in due])
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    assert (found[:, [0, 2]] == expected[:, [0, 2]]).all()
    assert (f"step {start:5}  restored\n" in said) == bool(start)


def names(folder: Path) -> list[str]:
    """What is in a folder of checkpoints, but the count of starts."""
    return sorted(path.name for path in folder.iterdir() if path.name != "starts")


def meeting() -> list[str]:
    """Options by which two processes meet here; what follows is the number of one."""
    with socket.socket() as probe:  # a port that nobody uses
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return ["--coordinator", address, "--processes", "2", "--process"]


def begin_two(
    begin, *more: str, code: str = "", each: list[list[str]] = ([], [])
) -> list[subprocess.Popen]:
    """Two processes of four devices, which meet; each has options of its own."""
    meet = ["--heartbeat", "10", *meeting()]
    return [
        begin(4, *more, *own, *meet, str(n), code=code) for n, own in enumerate(each)
    ]
