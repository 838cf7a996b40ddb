"""The judge and the other shared cells do what the chapters rely on.

PYTEST_DONT_REWRITE: the judge quotes assertions as a reader's kernel raises them.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from subprocess import PIPE

import jax
import numpy as np
import psutil
import pytest
from pair import ROOT, shared_text


@pytest.fixture
def cells(capsys):
    """The names that the judge and on_cpu define, on a CPU; and what they print."""

    class Device:
        platform, device_kind = "cpu", "cpu"

    names = {"jax": jax, "np": np, "device": Device}
    exec(shared_text(ROOT, ["judge", "on_cpu"]), names)
    names["printed"] = lambda: capsys.readouterr().out.strip()
    return names


def mean(x):
    """The mean of x."""
    raise NotImplementedError


def check(answer):
    found = answer(np.arange(4))
    assert found != 6, "a sum, not a mean"
    assert found == 1.5


def compare(answer):
    np.testing.assert_allclose(answer(np.arange(4)), 1.5, err_msg="not the mean")


def not_in_jax(x):
    """The gradient of pmax, for which JAX raises NotImplementedError of its own."""
    gradient = jax.grad(lambda v: jax.lax.pmax(v, "i"))
    return jax.vmap(gradient, axis_name="i")(x * 1.0)


@pytest.mark.parametrize(
    ("check", "answer", "verdict"),
    [
        (check, mean, r"Open\..*"),
        (check, jax.jit(mean), r"Open\..*"),
        (check, np.mean, r"Right\."),
        (check, jax.numpy.mean, r"Right\."),
        (check, partial(np.mean, axis=0), r"Right\."),
        (check, np.sum, r"Not yet\. a sum, not a mean"),
        (check, np.min, r"Not yet\. assert found == 1\.5"),
        (check, not_in_jax, r"Not yet\. NotImplementedError: .*"),
        (check, 1.5, r"Not yet\. TypeError: 'float' object is not callable"),
        (compare, np.sum, r"Not yet\. not the mean\n.*DESIRED: array\(1\.5\)"),
    ],
)
def test_verdict(cells, check, answer, verdict):
    cells["judge"](check, answer)
    assert re.fullmatch(verdict, cells["printed"](), re.DOTALL)


def test_wrong_answer_is_rejected_in_one_line(cells):
    cells["reject"](compare, np.sum)
    assert cells["printed"]() == "sum is rejected: not the mean"


def test_only_an_assertion_rejects(cells):
    """An answer that cannot even run says nothing about the check."""
    with pytest.raises(AssertionError, match="the check accepts mean"):
        cells["reject"](check, np.mean)
    with pytest.raises(TypeError, match="not callable"):
        cells["reject"](check, 1.5)


def test_cpu_facts_are_asserted_on_the_cpu_and_shown_elsewhere(cells):
    cells["on_cpu"](7, 7)
    with pytest.raises(AssertionError, match="expected 8, found 7"):
        cells["on_cpu"](7, 8)
    cells["device"].platform, cells["device"].device_kind = "gpu", "NVIDIA H100"
    cells["on_cpu"](7, 8)
    assert cells["printed"]() == "the CPU's compiler: 8\nNVIDIA H100: 7"


# ------------------------------------------------------------------ launch

WORKER = """
import os, sys, time
from pathlib import Path

print("sees", os.environ.get("XLA_FLAGS"), os.environ.get("http_proxy"))
Path(os.environ["RESULT"]).write_text(os.environ["PROCESS"])
here = Path(sys.argv[1]).parent
Path(here, os.environ["PROCESS"] + f"-{os.getpid()}").mkdir()
while len([*here.glob("?-*")]) < 2:
    time.sleep(0.05)
if os.environ["THEN"] == "fail" and os.environ["PROCESS"] == "1":
    sys.exit(3)
if os.environ["THEN"] != "end":
    time.sleep(600)
"""
KERNEL = """
import signal
import sys

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a notebook's kernel
exec(sys.argv[1])
try:
    ended = launch(sys.argv[2], limit=float(sys.argv[3]), THEN=sys.argv[4])
except KeyboardInterrupt:
    print("interrupted")
else:
    print([(process.status, process.result) for process in ended])
"""


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def comes_true(condition: Callable, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.mark.parametrize(
    ("then", "limit", "stop", "said"),
    [
        ("end", 60, None, "[(0, 0), (0, 1)]"),
        ("fail", 60, None, "[(None, 0), (3, 1)]"),
        ("sleep", 5, None, "[(None, 0), (None, 1)]"),
        ("sleep", 60, signal.SIGINT, "interrupted"),
        ("sleep", 60, signal.SIGKILL, None),
    ],
)
def test_launch_leaves_nothing(tmp_path, then, limit, stop, said):
    (tmp_path / "worker.py").write_text(WORKER)
    words = [shared_text(ROOT, ["processes"]), tmp_path / "worker.py", str(limit), then]
    command = [sys.executable, "-c", KERNEL, *words]
    settings = os.environ | {"XLA_FLAGS": "--kernel", "http_proxy": "kernel"}
    kernel = subprocess.Popen(command, stdout=PIPE, text=True, env=settings)
    assert comes_true(lambda: len([*tmp_path.glob("?-*")]) == 2, 60), "no worker"
    pids = [int(path.name[2:]) for path in tmp_path.glob("?-*")]
    if stop:
        assert all(map(runs, pids))
        kernel.send_signal(stop)
    printed = kernel.communicate(timeout=60)[0].splitlines()
    if not stop:
        assert printed[:2] == ["0: sees None None", "1: sees None None"]
    assert printed[-1:] == ([said] if said else [])
    assert comes_true(lambda: not any(map(runs, pids)), 10 if stop else 0)
