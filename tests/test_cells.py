"""The judge and the other shared cells do what the chapters rely on.

PYTEST_DONT_REWRITE: the judge quotes assertions as a reader's kernel raises them.
"""

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
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


def right(x):
    return x.mean()


def summed(x):
    return x.sum()


def first(x):
    return x[0]


def crash(x):
    return x / "four"


def not_in_jax(x):
    """The gradient of pmax, for which JAX raises NotImplementedError of its own."""
    gradient = jax.grad(lambda v: jax.lax.pmax(v, "i"))
    return jax.vmap(gradient, axis_name="i")(x * 1.0)


def test_stub_is_open(cells):
    cells["judge"](check, mean)
    assert cells["printed"]().startswith("Open.")


@pytest.mark.parametrize(
    "answer",
    [right, np.mean, lambda x: sum(x) / 4, functools.partial(np.mean, axis=0)],
    ids=["def", "library", "lambda", "partial"],
)
def test_right_answer_of_any_form_is_right(cells, answer):
    cells["judge"](check, answer)
    assert cells["printed"]() == "Right."


def test_compiled_answer_is_judged_and_a_compiled_stub_is_open(cells):
    cells["judge"](check, jax.jit(right))
    assert cells["printed"]() == "Right."
    cells["judge"](check, jax.jit(mean))
    assert cells["printed"]().startswith("Open.")


def test_wrong_answer_is_told_why(cells):
    cells["judge"](check, summed)
    assert cells["printed"]() == "Not yet. a sum, not a mean"


def test_assertion_without_words_shows_its_line(cells):
    cells["judge"](check, first)
    assert cells["printed"]() == "Not yet. assert found == 1.5"


def test_numbers_that_differ_are_shown(cells):
    def compare(answer):
        np.testing.assert_allclose(answer(np.arange(4)), 1.5, err_msg="not the mean")

    cells["judge"](compare, summed)
    said = cells["printed"]()
    assert said.startswith("Not yet. not the mean\n")
    assert "DESIRED: array(1.5)" in said


def test_crash_is_named_and_ends_nothing(cells):
    cells["judge"](check, crash)
    assert cells["printed"]().startswith("Not yet. TypeError: ufunc 'divide'")


def test_what_jax_does_not_implement_is_not_an_open_stub(cells):
    cells["judge"](check, not_in_jax)
    assert cells["printed"]().startswith("Not yet. NotImplementedError:")


def test_an_answer_that_is_no_function_is_not_yet_one(cells):
    cells["judge"](check, 1.5)
    assert cells["printed"]() == "Not yet. TypeError: 'float' object is not callable"


def test_wrong_answer_is_rejected(cells):
    cells["reject"](check, summed)
    assert cells["printed"]() == "summed is turned down: a sum, not a mean"


def test_rejection_of_numbers_is_one_line_in_words(cells):
    def compare(answer):
        np.testing.assert_allclose(answer(np.arange(4)), 1.5, err_msg="not the mean")

    cells["reject"](compare, summed)
    assert cells["printed"]() == "summed is turned down: not the mean"


def test_accepting_a_wrong_answer_is_a_failure(cells):
    with pytest.raises(AssertionError, match="the check accepts right"):
        cells["reject"](check, right)


def test_a_crash_rejects_nothing(cells):
    """A wrong answer that cannot even run says nothing about the check."""
    with pytest.raises(TypeError, match="divide"):
        cells["reject"](check, crash)


def test_cpu_facts_are_asserted_on_the_cpu(cells):
    cells["on_cpu"](7, 7)
    assert cells["printed"]() == ""
    with pytest.raises(AssertionError, match="expected 8, found 7"):
        cells["on_cpu"](7, 8)


@pytest.mark.parametrize("found", [7, 8])
def test_cpu_facts_are_shown_elsewhere(cells, found):
    cells["device"].platform, cells["device"].device_kind = "gpu", "NVIDIA H100"
    cells["on_cpu"](found, 8)
    assert cells["printed"]() == f"the CPU's compiler: 8\nNVIDIA H100: {found}"


# ------------------------------------------------------------------ launch

WORKER = """
import os, sys, time
from pathlib import Path

print("sees", os.environ.get("XLA_FLAGS"), os.environ.get("http_proxy"))
Path(os.environ["RESULT"]).write_text(os.environ["PROCESS"])
here = Path(sys.argv[1]).parent
note = here / os.environ["PROCESS"]
note.with_suffix(".part").write_text(str(os.getpid()))
note.with_suffix(".part").rename(note)  # whole, or not there
while not all((here / name).exists() for name in "01"):
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
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def start_kernel(folder: Path, then: str, limit: float) -> subprocess.Popen:
    """A process that plays the notebook's kernel and launches the worker."""
    (folder / "worker.py").write_text(WORKER)
    words = [shared_text(ROOT, ["launch"]), folder / "worker.py", str(limit), then]
    environment = os.environ | {"XLA_FLAGS": "--kernel", "http_proxy": "kernel"}
    return subprocess.Popen(
        [sys.executable, "-c", KERNEL, *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


def workers(folder: Path) -> list[int]:
    """The process ids of both workers, as soon as they have met."""
    deadline = time.monotonic() + 60
    while not all((folder / name).exists() for name in "01"):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.05)
    return [int((folder / name).read_text()) for name in "01"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("then", "limit", "said"),
    [
        ("end", 60, "[(0, 0), (0, 1)]"),
        ("fail", 60, "[(None, 0), (3, 1)]"),
        ("sleep", 5, "[(None, 0), (None, 1)]"),
    ],
)
def test_launch_leaves_nothing(tmp_path, then, limit, said):
    kernel = start_kernel(tmp_path, then, limit)
    printed = kernel.communicate(timeout=60)[0].splitlines()
    assert printed == ["0: sees None None", "1: sees None None", said]
    assert not any(map(runs, workers(tmp_path)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGKILL])
def test_launch_leaves_nothing_when_the_kernel_is_stopped(tmp_path, by):
    kernel = start_kernel(tmp_path, "sleep", 60)
    pids = workers(tmp_path)
    assert all(map(runs, pids))
    kernel.send_signal(by)
    printed = kernel.communicate(timeout=30)[0]
    deadline = time.monotonic() + 10
    while any(map(runs, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, pids))
    assert ("interrupted" in printed) == (by == signal.SIGINT)
