"""Test launch/train.py under faults: it always ends, and loses no checkpoint.

Each test causes a real fault, waits until the run ends, and starts it again; the losses
must then equal those of a run without faults. Tests that take minutes are marked `slow`
and run in `nox -s faults`.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path

import jax
import lifecycle
import numpy as np
import psutil
import pytest
from jax.sharding import SingleDeviceSharding
from runs import (
    HANGS_IN_SAVE,
    HANGS_IN_STEP,
    SLOW_STEPS,
    TIMEOUT,
    contents,
    coordinator_options,
    fill,
    linux_root,
    small_disk,
)

PAIRED = pytest.param(2, marks=pytest.mark.slow)
alone_and_paired = pytest.mark.parametrize("processes", [1, PAIRED])
one_and_two = pytest.mark.parametrize("processes", [1, 2])

# ------------------------------------------------------------------------------ numbers

NAN = """
import numpy as np, sklearn.datasets
digits = sklearn.datasets.load_digits()
order = np.random.default_rng(0).permutation(1797)
batch = np.random.default_rng([0, 0]).permutation(1536)[21 * 64 : 22 * 64]
digits.data[order[batch[7]]] = np.nan  # a row of step 22
sklearn.datasets.load_digits = lambda: digits
"""


@alone_and_paired
def test_state_with_a_nan_loss_is_not_saved(start_run, processes):
    run = start_run(processes=processes, code=NAN)
    assert run.end() == [78] * processes
    assert "the loss of step 22 is nan" in run.errors[0]
    assert run.names() == ["20"]
    start_run().check_losses(start=20)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_state_that_is_not_finite_is_not_saved(tmp_path, capsys, keep_lifecycle, wrong):
    with checkpoints_in(tmp_path) as checkpoints:
        with pytest.raises(SystemExit, match="78"):
            checkpoints.save(7, {"w": np.float32([1, wrong]), "n": np.int32(3)})
    assert "the state after step 7 is not finite" in capsys.readouterr().err
    assert not contents(tmp_path)


# ------------------------------------------------------------------------- checkpoints

W = np.random.default_rng(0).normal(size=(64, 64))  # in a file next to Orbax's index
STATE = {"w": W.astype(np.float32), "n": np.int32(5)}
# Process 1 cannot read the checkpoint of step 48.
CANNOT_READ = """
import jax, orbax.checkpoint as ocp
restore = ocp.Checkpointer.restore

def fail(self, path, *args, **options):
    if path.name == "48" and jax.process_index():
        raise OSError("no such disk")
    return restore(self, path, *args, **options)

ocp.Checkpointer.restore = fail
"""
KINDS = "float32 bfloat16 float8_e4m3fn int8 uint16 int32 bool key".split()


def state_of(step: int) -> dict:
    return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(step), STATE)


def checkpoints_in(folder: Path) -> lifecycle.Checkpoints:
    return lifecycle.Checkpoints(folder, {"rate": 0.003}, seconds=TIMEOUT)


@pytest.fixture
def saved(tmp_path, monkeypatch) -> Path:
    """Return a folder with the states after steps 20 and 40."""
    monkeypatch.setattr(lifecycle, "RETRY_PAUSES", (0, 0, 0))
    with checkpoints_in(tmp_path / "run") as checkpoints:
        for step in (20, 40):
            checkpoints.save(step, state_of(step))
    return tmp_path / "run"


def restored(folder: Path) -> int:
    """Restore the newest good checkpoint, check its state, and return its step."""
    here = SingleDeviceSharding(jax.devices()[0])
    like = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, STATE))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=here), like)
    with checkpoints_in(folder) as checkpoints:
        step, state = checkpoints.restore(like)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
    return step


def flip(path: Path, rng: random.Random) -> None:
    """Flip one random bit of a file."""
    text = bytearray(path.read_bytes())
    text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    path.write_bytes(text)


def test_flipped_bit_is_detected_or_has_no_effect(saved, capsys):
    """In each file of the newest checkpoint. If detected, the older one is restored."""
    printed = ""
    files = contents(saved / "40")
    largest = max(files, key=lambda path: len(files[path]))
    for seed, path in enumerate([*files, *[largest] * 8]):
        copy = shutil.copytree(saved, saved.parent / str(seed))
        flip(copy / path.relative_to(saved), random.Random(seed))
        step = restored(copy)
        output = capsys.readouterr().out
        assert ("checkpoint 40 " in output) == (step == 20), path
        printed += output
    assert printed.count("; renamed to 40.") >= 3
    assert "it has a wrong checksum" in printed  # Orbax restored it without an error


def truncate(checkpoint: Path) -> None:
    files = contents(checkpoint)
    largest = max(files, key=lambda path: len(files[path]))
    os.truncate(largest, len(files[largest]) // 2)


def empty_files(checkpoint: Path) -> None:
    for path in contents(checkpoint):
        os.truncate(path, 0)


def empty_folder(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def change_settings(checkpoint: Path) -> None:
    """Replace a number in the settings by one of the same length."""
    path = checkpoint / "settings/metadata"
    path.write_text(path.read_text().replace("0.003", "0.004"))


def remove_state(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "state")


@pytest.mark.parametrize(
    ("damage", "name"),
    [
        (truncate, "40.unreadable-"),
        (empty_files, "40.unreadable-"),
        (empty_folder, "40.unreadable-"),
        (change_settings, "40.damaged-"),
        (remove_state, "40.unreadable-"),
    ],
)
def test_damaged_checkpoint_is_renamed_and_the_one_before_restored(
    saved, capsys, damage, name
):
    damage(saved / "40")
    assert restored(saved) == 20
    assert name in capsys.readouterr().out
    with checkpoints_in(saved) as checkpoints:
        checkpoints.save(40, state_of(40))  # the name is free
    assert restored(saved) == 40


@pytest.mark.parametrize(("failures", "step"), [(2, 40), (3, 20)])
def test_reading_is_tried_three_times(saved, monkeypatch, capsys, failures, step):
    attempts, read = itertools.count(1), lifecycle.Checkpoints.read_alone

    def fail_at_first(*args):
        if next(attempts) <= failures:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(*args)

    monkeypatch.setattr(lifecycle.Checkpoints, "read_alone", fail_at_first)
    assert restored(saved) == step
    message = "checkpoint 40 cannot be read (OSError: [Errno 5] Input/output error)"
    assert (message in capsys.readouterr().out) == (step == 20)


def test_progress_after_a_fall_back_counts(saved, keep_lifecycle):
    truncate(saved / "40")
    for step in (20, 25, 30):
        assert lifecycle.claim_folder(saved, 0, tries=1) == ""
        assert restored(saved) == step
        with checkpoints_in(saved) as checkpoints:
            checkpoints.save(step + 5, state_of(step + 5))
        os.close(lifecycle.claimed[0])


def test_foreign_files_are_left_alone_and_never_count(saved, capsys, keep_lifecycle):
    for name in ("7", "60", "0050", "20.bak", " 51", "1_0", "²", "9" * 20, "best"):
        (saved / name).mkdir()
        (saved / name / "note").write_text("precious")
    (saved / "80").write_text("precious")
    (saved / "90").symlink_to(saved / "best")
    foreign = {path: text for path, text in contents(saved).items() if len(text) == 8}
    assert len(foreign) == 10
    assert lifecycle.claim_folder(saved, 0, tries=1) == ""
    assert lifecycle.claimed[1] == restored(saved) == 40
    with checkpoints_in(saved) as checkpoints:
        for step in (41, 42, 43):  # only the newest three are kept
            checkpoints.save(step, state_of(step))
        with pytest.raises(SystemExit, match="78"):
            checkpoints.save(60, state_of(60))
    assert f"{saved / '60'} is not a checkpoint" in capsys.readouterr().err
    assert restored(saved) == 43
    assert foreign.items() <= contents(saved).items()


@pytest.mark.parametrize("kind", KINDS)
def test_checksum_depends_on_values_and_their_order(kind):
    zeros = jax.numpy.zeros((4, 6), kind if kind != "key" else "uint32")
    ones = zeros.at[3, 2].set(zeros.dtype.type(1))
    if kind == "key":
        zeros, ones = map(jax.random.wrap_key_data, (zeros[:, :2], ones[:, 1:3]))
    sums = [lifecycle.checksums({"x": x})[0][0] for x in (zeros, ones, ones[::-1])]
    assert len({*map(int, sums)}) == 3


def test_without_a_good_checkpoint_no_file_changes(saved, capsys, keep_lifecycle):
    for step in ("20", "40"):
        truncate(saved / step)
    before = contents(saved)
    with pytest.raises(SystemExit, match="78"):
        restored(saved)
    assert f"mv '{saved}' '{saved}.damaged'" in capsys.readouterr().err
    assert contents(saved) == before


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"-1 -1", 20 * b"7 ", b"9" * 99, "²".encode()]
)
def test_damaged_count_of_starts_is_reset(tmp_path, keep_lifecycle, content):
    (tmp_path / "²").mkdir()
    (tmp_path / "starts").write_bytes(content)
    errors = []
    for _ in range(3):
        errors.append(lifecycle.claim_folder(tmp_path, 0, tries=2))
        os.close(lifecycle.claimed[0])
    assert [bool(error) for error in errors] == [False, False, True]
    (tmp_path / "other").write_text("precious")
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").symlink_to(tmp_path / "other")
    assert "cannot use the folder" in lifecycle.claim_folder(tmp_path, 0, tries=2)
    assert (tmp_path / "other").read_text() == "precious"


@pytest.mark.slow
def test_two_processes_fall_back_together(start_run, tmp_path):
    start_run(processes=2).finish()
    truncate(tmp_path / "checkpoints/48")
    restarted = start_run(processes=2)
    restarted.check_losses(start=40)
    assert "checkpoint 48 cannot be read" in restarted.output[0]


@pytest.mark.slow
def test_two_processes_fall_back_if_one_cannot_read(start_run):
    """And then they save, which orbax.checkpoint.v1 would not."""
    start_run(processes=2).finish()
    restarted = start_run(processes=2, code=CANNOT_READ)
    restarted.end()
    assert "checkpoint 48 cannot be read (by another process)" in restarted.output[0]
    assert "cannot read checkpoint 48: OSError: no such disk" in restarted.errors[1]
    assert restarted.names()[:3] == ["20", "40", "48"]
    start_run().check_losses(start=48)


# ----------------------------------------------------------------------------- the disk

# In process 1, writing fails after 24 steps.
FILE_LIMIT = "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))"
CANNOT_WRITE = (
    SLOW_STEPS
    + f"""
import resource
slowly, steps = lifecycle.set_deadline, itertools.count()

def fail(what, *rest):
    slowly(what, *rest)
    if what == "the next step" and next(steps) == 24 and lifecycle.jax.process_index():
        {FILE_LIMIT}

lifecycle.set_deadline = fail
"""
)

SKIP_SPACE_CHECK = """
import lifecycle, shutil, types
usage = shutil.disk_usage("/")
lifecycle.shutil = types.SimpleNamespace(disk_usage=lambda path: usage)
"""


@linux_root
@alone_and_paired
@pytest.mark.parametrize("checks", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_full_disk_ends_all_processes(start_run, tmp_path, processes, checks):
    """Also if the check of free space passes before another program fills the disk."""
    with small_disk(tmp_path / "disk", "20m") as disk:
        code = SLOW_STEPS + ("" if checks else SKIP_SPACE_CHECK)
        run = start_run(folder="disk/run", processes=processes, code=code)
        run.wait_for(20)
        ballast = fill(disk, leave=40_000)
        codes = run.end()
        if checks:
            assert codes == [78] * processes
        else:
            assert not {0, 75, 76} & {*codes}
        assert str(disk / "run") in "".join(run.errors)
        assert run.complete() == [20]
        ballast.unlink()
        start_run(folder="disk/run").check_losses(start=20)


@pytest.mark.slow
def test_each_process_ends_if_one_cannot_write(start_run):
    """Orbax logs the error. If process 0 ends first, JAX's log follows in process 1."""
    run = start_run("--save-limit", 20, processes=2, code=CANNOT_WRITE)
    assert not {0, 75, 76} & {*run.end()}
    assert run.complete() == [20]
    assert "File too large" in run.errors[1]
    assert "that of the other processes" in run.errors[0].splitlines()[-1]
    start_run().check_losses(start=20)


@pytest.mark.slow
def test_failing_process_ends_with_its_error(start_run):
    fault = 'raise OSError("no such disk")'
    run = start_run(processes=2, code=CANNOT_WRITE.replace(FILE_LIMIT, fault))
    assert not {0, 75, 76} & {*run.end()}
    assert run.errors[1].endswith("\nerror: OSError: no such disk\n")


# ------------------------------------------------------------------------------- limits


def test_run_ends_if_nothing_reads_its_output(start_run):
    reader, full = os.pipe()
    os.set_blocking(full, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(full, b" " * 4096):
            pass
    os.set_blocking(full, True)
    popen = {"stdout": full, "stderr": full}
    run = start_run("--step-limit", 5, popen=popen)
    assert run.processes[0].wait(TIMEOUT) == 1
    os.close(reader)
    os.close(full)


@pytest.mark.slow
def test_two_processes_wait_for_a_lock(start_run, tmp_path):
    """For longer than the 30 seconds in which Gloo's processes must connect."""
    (tmp_path / "checkpoints").mkdir()
    with open(tmp_path / "checkpoints/starts", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = start_run("--wait", 600, processes=2)
        run.read_until("process 0 of 2")
        time.sleep(60)
    run.check_losses()


@pytest.mark.slow
@one_and_two
@pytest.mark.parametrize(
    ("code", "limits", "message"),
    [
        (HANGS_IN_STEP, ["--step-limit", 60], "the next step has not ended in time"),
        (HANGS_IN_SAVE, ["--save-limit", 20], "the save of step 40 in /"),
    ],
)
def test_hanging_run_ends(start_run, processes, code, limits, message):
    run = start_run(*limits, processes=processes, code=code)
    assert not {0, 75, 76} & {*run.end()}
    errors = "".join(run.errors)
    assert message in errors and "most recent call first" in errors
    assert run.complete() == [20]
    start_run().check_losses(start=20)


# -------------------------------------------------------------------------------- stops


def test_stop_before_training_has_its_own_status(capsys):
    with pytest.raises(SystemExit, match="76"):
        lifecycle.exit_if_stopped([signal.SIGTERM])
    assert capsys.readouterr().out == "stopped: nothing new is saved\n"


def test_nohup_ignores_a_closed_terminal(start_run):
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    run = start_run(devices=1, code=ignore + SLOW_STEPS)
    run.read_until("step     8")
    run.send(signal.SIGHUP)
    run.finish()


def test_closed_terminal_stops_a_run(start_run):
    """The kernel sends SIGHUP, and every later line is an I/O error."""
    ours, terminal = os.openpty()
    popen = dict.fromkeys(["stdin", "stdout", "stderr"], terminal)
    control = "import fcntl, signal, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    control += "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # tests may ignore it
    run = start_run(devices=1, code=control + SLOW_STEPS, popen=popen)
    os.close(terminal)
    output = b""
    while b"step     8" not in output:
        output += os.read(ours, 4096)
    os.close(ours)
    assert run.processes[0].wait(TIMEOUT) == 75
    [saved] = run.complete()
    start_run().check_losses(start=saved)


@alone_and_paired
def test_closed_pipe_stops_a_run(start_run, processes):
    run = start_run(processes=processes, code=SLOW_STEPS)
    run.read_until("step     8")
    run.processes[0].stdout.close()  # as head does
    assert run.end() == [75] * processes
    start_run().check_losses(start=run.complete()[-1])


@pytest.mark.slow
def test_two_processes_are_stopped_several_times(start_run):
    """By Ctrl-C, before a first step, and after a save, when Orbax would check for
    signals. The processes listen only at the coordinator's address."""
    two = {"processes": 2, "code": SLOW_STEPS}
    saved = start_run(**two).stop("step     8", signal.SIGINT, to_all=True)
    saved = start_run(**two).stop(f"step {saved:5}  restored", *[signal.SIGTERM] * 20)
    run = start_run(**two)
    run.read_until(f"step {saved:5}  restored")
    listening = [
        line.laddr.ip.removeprefix("::ffff:")
        for process in run.processes
        for line in psutil.Process(process.pid).net_connections("inet")
        if line.status == psutil.CONN_LISTEN
    ]
    assert listening and {*listening} == {"127.0.0.1"}
    saved = run.stop("step    40  test loss")
    start_run().check_losses(start=saved)


@pytest.mark.slow
def test_single_process_of_a_launcher_stops(start_run):
    """JAX handles its signals, as with several processes."""
    saved = start_run(*coordinator_options(1), 0, code=SLOW_STEPS).stop("step     8")
    start_run().check_losses(start=saved)


@pytest.mark.slow
@one_and_two
def test_signals_at_thirty_times_around_a_save(start_run, processes):
    """From before the save of step 20 until after it, SIGTERM and SIGKILL alternate."""
    for trial in range(30):
        folder = f"run{trial}"
        run = start_run(folder=folder, processes=processes, code=SLOW_STEPS)
        run.read_until("step    16")
        time.sleep(0.4 + trial * 0.025)
        if trial % 2:
            run.send(signal.SIGKILL)
            assert not {0, 75, 76} & {*run.end()}, trial
            assert run.complete() in ([], [20]), trial
            start = 20 * len(run.complete())
        else:
            run.send()
            start = run.stopped()
        start_run(folder=folder).check_losses(start)
