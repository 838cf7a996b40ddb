"""The script of book/script.md: equal numbers on 1, 2 and 8 devices, and after stops.

Every run is one process or two. What it prints is held against one plain loop in this
file, which knows neither devices nor processes nor checkpoints.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from pair import ROOT
from sklearn.datasets import load_digits

LAUNCH = ROOT / "launch"
sys.path.append(str(LAUNCH))
import train  # noqa: E402

# JAX would not reach its own processes through a proxy, and says so.
ENVIRONMENT = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
SHORT = ["--steps", "48", "--save-every", "20", "--log-every", "8"]
# On several devices sums are taken in another order. That moves the seventh digit of a
# loss, 48 steps of Adam may make it the sixth, and six decimals are printed. Each fault
# that was planted moved the first, the second or the third digit.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-6}

SLOWLY = """
import time, train
batch_of = train.train_batch

def train_batch(*arguments):
    time.sleep(0.2)
    return batch_of(*arguments)

train.train_batch = train_batch
train.main()
"""
# The second save waits for a line when half of its arrays are written.
SAVED_HALF_OF_40 = """
import jax, logging, sys, train
from orbax.checkpoint import type_handlers

class Half(type_handlers.ArrayHandler):
    async def serialize(self, values, infos, args=None):
        half = len(values) // 2
        for write in await super().serialize(values[:half], infos[:half], args[:half]):
            write.result()
        print("waiting", flush=True)
        sys.stdin.readline()

begin_to_save = train.save

def save(manager, done, *more):
    if done == 40:
        manager.wait_until_finished()
        logging.getLogger("absl").setLevel("ERROR")  # it warns of the next line
        type_handlers.register_type_handler(jax.Array, Half(), override=True)
    begin_to_save(manager, done, *more)

train.save = save
train.main()
"""


@pytest.fixture
def begin(tmp_path):
    """A function that begins a run; all runs of a test have one folder."""
    runs = []

    def begin(devices: int, *more: str, code: str = "") -> subprocess.Popen:
        what = ["-c", code] if code else [str(LAUNCH / "train.py")]
        run = subprocess.Popen(
            [sys.executable, *what, "--emulate", str(devices), *SHORT, *more],
            env=ENVIRONMENT | {"PYTHONPATH": str(LAUNCH)},
            cwd=tmp_path,
            start_new_session=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
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
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_any_number_of_devices_gives_the_same_numbers(begin, devices):
    said = finish(begin(devices))
    assert said.startswith(f"{devices} cpu devices, {64 // devices} rows of a batch")
    check(said)


@pytest.mark.parametrize(
    ("number", "before", "after"), [(signal.SIGINT, 8, 2), (signal.SIGTERM, 1, 8)]
)
def test_a_stop_saves_and_a_restart_goes_on(begin, tmp_path, number, before, after):
    run = begin(before, code=SLOWLY)
    read_until(run, "step     8")
    run.send_signal(number)
    said, complaints = end(run)
    assert (run.returncode, complaints) == (128 + number, "")
    [saved] = names(tmp_path / "checkpoints")
    assert said.endswith(f"stopped: the same command goes on after step {saved}\n")
    check(finish(begin(after)), start=int(saved))


def test_a_kill_during_a_save_leaves_the_save_before(begin, tmp_path):
    run = begin(8, code=SAVED_HALF_OF_40)
    read_until(run, "waiting")
    run.kill()
    end(run)
    whole, half = names(tmp_path / "checkpoints")
    assert whole == "20" and half.startswith("40.orbax-checkpoint-tmp")
    check(finish(begin(1)), start=20)
    assert names(tmp_path / "checkpoints") == ["20", "40", "48"]


def begin_two(
    begin, *more: str, code: str = "", each: list[list[str]] = ([], [])
) -> list[subprocess.Popen]:
    """Two processes of four devices, which meet here; each has options of its own."""
    with socket.socket() as probe:  # a port that nobody uses
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    meet = ["--coordinator", address, "--processes", "2", "--heartbeat", "10"]
    return [
        begin(4, *meet, "--process", str(n), *more, *own, code=code)
        for n, own in enumerate(each)
    ]


@pytest.mark.parametrize("data", ["numpy", "grain"])
def test_two_processes_give_the_same_numbers(begin, data):
    run, other = begin_two(begin, "--data", data)
    said, _ = end(run)
    quiet, _ = end(other)
    assert (run.returncode, other.returncode) == (0, 0)
    assert "8 cpu devices, 8 rows of a batch on each\n" in said
    assert "step" not in quiet and "devices" not in quiet
    if data == "numpy":
        check(said)
        return
    alone, _ = end(begin(8, "--data", data, "--folder", "alone"))  # Grain may warn
    lines = r"^step +(\d+) .*?loss ([\d.]+)"
    found = np.float64(re.findall(lines, said, re.M))
    expected = np.float64(re.findall(lines, alone, re.M))
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    assert abs(expected[0, 1] - reference()[0][7]) > 1e-3  # an order of its own


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_of_two_is_stopped_or_killed(begin, tmp_path, number):
    run, other = begin_two(begin, code=SLOWLY)
    read_until(run, "step    20")
    while not (tmp_path / "checkpoints" / "20").exists():  # it gets its name when whole
        time.sleep(0.1)
    other.send_signal(number)
    said, _ = end(run)
    end(other)
    newest = names(tmp_path / "checkpoints")[-1]
    if number == signal.SIGTERM:
        assert (run.returncode, other.returncode) == (143, 143)
        assert said.endswith(f"goes on after step {newest}\n") and newest != "20"
    else:
        assert run.returncode not in (0, None) and newest == "20"
    check(finish(begin(2)), start=int(newest))


ALONE = [
    ("--emulate 3", "--batch 64 will not do: it has to be a multiple of the 3 devices"),
    ("--distributed", "cannot join the other processes: coordinator_address"),
    ("--processes 2 --process 0", "cannot join the other processes: "),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS is 2: without --distributed (or, "),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE is 2: without --distributed (or, "),
    ("WORLD_SIZE", "WORLD_SIZE is 2: without --distributed (or, under torchrun, --c"),
]


@pytest.mark.parametrize(("given", "complaint"), ALONE)
def test_a_process_is_refused(begin, tmp_path, monkeypatch, given, complaint):
    if given.startswith("--"):
        run = begin(8, *given.split())
    else:  # what a launcher says to each of two processes
        monkeypatch.setitem(ENVIRONMENT, given, "2")
        run = begin(8)
    said, complaints = end(run)
    assert (run.returncode, said) == (1, "")
    assert complaints.startswith(complaint)
    assert not names(tmp_path)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([["--rate", "0.01"], []], "all processes need the same steps, batch, rate"),
        ([["--save-every", "70"], []], "all processes need the same steps, batch"),
        ([["--folder", "own"], []], "--folder has to be on a disk that all"),
        ([["--emulate", "2"], []], "processes need equal numbers of devices, and have"),
    ],
)
def test_processes_that_differ_are_refused(begin, tmp_path, options, complaint):
    runs = begin_two(begin, each=options)
    complaints = [end(run)[1] for run in runs]
    assert [run.returncode for run in runs] == [1, 1]
    assert complaint in complaints[0]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_other_settings_are_refused_and_nothing_is_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train.signal, "signal", lambda *_: None)  # leave pytest's alone
    folder = tmp_path / "checkpoints"

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    as_begun = ["train.py", "--folder", str(folder), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", as_begun)
    train.main()
    score = capsys.readouterr().out.splitlines()[-1]
    saved = contents()

    changes = {"steps": 3, "batch": 128, "rate": 0.01, "seed": 1, "data": "grain"}
    assert [*changes] == [*train.SETTINGS]
    for name, new in changes.items():
        monkeypatch.setattr(sys, "argv", [*as_begun, f"--{name}", str(new)])
        words = rf"begun with --{name} \S+, not with {new}: ask for the same again"
        with pytest.raises(SystemExit, match=words):
            train.main()
    assert contents() == saved

    monkeypatch.setattr(sys, "argv", as_begun)
    capsys.readouterr()
    train.main()
    assert capsys.readouterr().out.splitlines()[1:] == ["step     2  restored", score]


def test_the_page_shows_every_line_once():
    """Its parts of the script, one after the other, are the script but for gaps."""
    code = pytest.importorskip("sphinx.directives.code")
    config = SimpleNamespace(source_encoding="utf-8")
    page = (ROOT / "book" / "script.md").read_text()
    shown, included = "", r"(?ms)^```{literalinclude} ../launch/train.py\n(.*?)^```$"
    for part in re.findall(included, page):
        options = dict(re.findall(r"(?m)^:([\w-]+): (.*)$", part))
        reader = code.LiteralIncludeReader(LAUNCH / "train.py", options, config)
        shown += reader.read()[0]
    script = (LAUNCH / "train.py").read_text()
    assert re.findall(".+", shown) == re.findall(".+", script)
