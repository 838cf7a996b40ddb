"""The script of book/script.md under faults: it loses nothing, and it always ends.

A test causes its fault for real, waits for the end, and starts the run again: from
then on it must repeat the run without faults. What takes minutes is marked `slow`, for
`nox -s faults`.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import jax
import lifecycle
import numpy as np
import psutil
import pytest
from jax.sharding import SingleDeviceSharding
from runs import (
    ENVIRONMENT,
    HANGS,
    HANGS_IN_SAVE,
    HANGS_IN_STEP,
    LAUNCH,
    SLOWLY,
    contents,
    fill,
    linux_root,
    meeting,
    read_until,
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
def test_a_loss_that_is_nan_is_not_saved(start_run, processes):
    run = start_run(processes=processes, code=NAN)
    assert run.end() == [78] * processes
    assert "the loss of step 22 is nan" in run.errors[0]
    assert run.names() == ["20"]
    start_run().repeats(start=20)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_not_saved(
    tmp_path, capsys, keep_lifecycle, wrong
):
    with checkpoints_in(tmp_path) as checkpoints:
        with pytest.raises(SystemExit, match="78"):
            checkpoints.save(7, {"w": np.float32([1, wrong]), "n": np.int32(3)})
    assert "the state after step 7 is not finite" in capsys.readouterr().err
    assert not contents(tmp_path)


# ------------------------------------------------------------------------- checkpoints

W = np.random.default_rng(0).normal(size=(64, 64))  # in a file beside Orbax's index
STATE = {"w": W.astype(np.float32), "n": np.int32(5)}
KINDS = "float32 bfloat16 float8_e4m3fn int8 uint16 int32 bool key".split()


def state_of(done: int) -> dict:
    return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(done), STATE)


def checkpoints_in(folder: Path) -> lifecycle.Checkpoints:
    return lifecycle.Checkpoints(folder, {"rate": 0.003}, seconds=HANGS)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with the states after 20 and after 40 steps."""
    with checkpoints_in(tmp_path / "run") as checkpoints:
        for done in (20, 40):
            checkpoints.save(done, state_of(done))
    return tmp_path / "run"


def restored(folder: Path) -> int:
    """Restore a checkpoint, compare its state, and return its step."""
    here = SingleDeviceSharding(jax.devices()[0])
    like = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, STATE))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=here), like)
    with checkpoints_in(folder) as checkpoints:
        done, state = checkpoints.restore(like)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(done))
    return done


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit of a file."""
    text = bytearray(path.read_bytes())
    text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    path.write_bytes(text)


def test_any_changed_byte_is_found_or_has_no_effect(saved, capsys):
    """In each file of the newest checkpoint; the one before it is restored."""
    found = ""
    files = contents(saved / "40")
    numbers = max(files, key=lambda path: len(files[path]))
    for number, path in enumerate([*files, *[numbers] * 8]):
        copy = shutil.copytree(saved, saved.parent / str(number))
        flip(copy / path.relative_to(saved), random.Random(number))
        done = restored(copy)
        output = capsys.readouterr().out
        assert ("CHECKPOINT 40 IS DAMAGED" in output) == (done == 20), path
        found += output
    assert found.count("IS DAMAGED") >= 3
    assert "its checksum is another" in found  # Orbax restored it without an error


def cut(checkpoint: Path) -> None:
    files = contents(checkpoint)
    largest = max(files, key=lambda path: len(files[path]))
    os.truncate(largest, len(files[largest]) // 2)


def empty_all(checkpoint: Path) -> None:
    for path in contents(checkpoint):
        os.truncate(path, 0)


def empty_folder(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def other_number(checkpoint: Path) -> None:
    """Write another number of the same length into the settings."""
    path = checkpoint / "settings/metadata"
    path.write_text(path.read_text().replace("0.003", "0.004"))


def no_state(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "state")


def no_index(checkpoint: Path) -> None:
    (checkpoint / "state/manifest.ocdbt").unlink()


@pytest.mark.parametrize(
    "damage", [cut, empty_all, empty_folder, other_number, no_state, no_index]
)
def test_a_damaged_checkpoint_is_renamed_and_the_one_before_restored(
    saved, capsys, damage
):
    damage(saved / "40")
    assert restored(saved) == 20
    assert "40.damaged-" in capsys.readouterr().out
    with checkpoints_in(saved) as checkpoints:
        checkpoints.save(40, state_of(40))  # the name is free
    assert restored(saved) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_the_checksum_depends_on_each_byte_of_any_type(kind):
    zeros = jax.numpy.zeros((4, 6), kind if kind != "key" else "uint32")
    ones = zeros.at[3, 2].set(zeros.dtype.type(1))
    if kind == "key":
        zeros, ones = map(jax.random.wrap_key_data, (zeros[:, :2], ones[:, 1:3]))
    sums = [lifecycle.checksums({"x": x})[0][0] for x in (zeros, ones, ones[::-1])]
    assert len({*map(int, sums)}) == 3


def test_without_a_complete_checkpoint_no_file_changes(saved, capsys, keep_lifecycle):
    for done in ("20", "40"):
        cut(saved / done)
    before = contents(saved)
    with pytest.raises(SystemExit, match="78"):
        restored(saved)
    assert f"mv '{saved}' '{saved}.damaged'" in capsys.readouterr().err
    assert contents(saved) == before


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"-1 -1", 20 * b"7 ", b"9" * 99, "²".encode()]
)
def test_a_damaged_count_of_starts_begins_anew(tmp_path, keep_lifecycle, content):
    (tmp_path / "²").mkdir()
    (tmp_path / "starts").write_bytes(content)
    why_not = []
    for _ in range(3):
        why_not.append(lifecycle.claim(tmp_path, 0, tries=2))
        os.close(lifecycle.claimed[0])
    assert [bool(words) for words in why_not] == [False, False, True]
    (tmp_path / "other").write_text("precious")
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").symlink_to(tmp_path / "other")
    assert "cannot use the folder" in lifecycle.claim(tmp_path, 0, tries=2)
    assert (tmp_path / "other").read_text() == "precious"


@pytest.mark.slow
def test_two_processes_fall_back_together(start_run, tmp_path):
    start_run(processes=2).finish()
    cut(tmp_path / "checkpoints/48")
    again = start_run(processes=2)
    again.repeats(start=40)
    assert "CHECKPOINT 48 IS DAMAGED" in again.output[0]


# ----------------------------------------------------------------------------- the disk

BLIND = """
import lifecycle, shutil, types
usage = shutil.disk_usage("/")
lifecycle.shutil = types.SimpleNamespace(disk_usage=lambda path: usage)
"""


@linux_root
@alone_and_paired
@pytest.mark.parametrize("sees", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_full_disk_ends_all(start_run, tmp_path, processes, sees):
    """Also where the check of free space misses it: another program may fill it."""
    with small_disk(tmp_path / "disk", "20m") as disk:
        code = HANGS_IN_STEP if sees else HANGS_IN_STEP + BLIND
        run = start_run(folder="disk/run", processes=processes, code=code)
        run.wait_for(20)
        ballast = fill(disk, leave=40_000)
        (tmp_path / "go").touch()
        ended = run.end()
        if sees:
            assert ended == [78] * processes
        else:
            assert not {0, 75, 76} & {*ended}
        assert str(disk / "run") in "".join(run.errors)
        assert run.complete() == [20]
        ballast.unlink()
        start_run(folder="disk/run").repeats(start=20)


# ------------------------------------------------------------------------------- limits


@pytest.mark.slow
@one_and_two
@pytest.mark.parametrize(
    ("code", "limits", "words"),
    [
        (HANGS_IN_STEP, ["--step-limit", 60], "the next step has not ended in time"),
        (HANGS_IN_SAVE, ["--save-limit", 20], "the save of step 40 into /"),
    ],
)
def test_a_run_that_hangs_ends(start_run, processes, code, limits, words):
    run = start_run(*limits, processes=processes, code=code)
    assert not {0, 75, 76} & {*run.end()}
    errors = "".join(run.errors)
    assert words in errors and "most recent call first" in errors
    assert run.complete() == [20]
    start_run().repeats(start=20)


# -------------------------------------------------------------------------------- stops


# Print a line when the handlers of signals are set, before JAX is imported.
HANDLERS_SET = """
import faulthandler
begin = faulthandler.dump_traceback_later

def begin_and_print(*words, **more):
    begin(*words, **more)
    print("handlers are set", flush=True)

faulthandler.dump_traceback_later = begin_and_print
"""


@pytest.mark.parametrize("waits", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_stop_before_anything_is_saved(start_run, waits):
    """While it imports JAX, or waits for another process."""
    run = start_run(*([*meeting(2), 0] if waits else []), code=HANDLERS_SET)
    run.read_until("process 0 of 2 waits" if waits else "handlers are set")
    run.send()
    assert run.end() == [76]
    assert (run.output, run.errors) == (["stopped: nothing new is saved\n"], [""])
    assert not run.folder.exists()


@pytest.mark.slow
def test_two_processes_are_stopped_again_and_again(start_run):
    """By Ctrl-C, before a first step, and after a save, where Orbax would look for
    signals; meanwhile they listen at the coordinator's address only."""
    how = {"processes": 2, "code": SLOWLY}
    saved = start_run(**how).stop("step     8", signal.SIGINT, everyone=True)
    saved = start_run(**how).stop(f"step {saved:5}  restored", *[signal.SIGTERM] * 20)
    run = start_run(**how)
    run.read_until(f"step {saved:5}  restored")
    listening = [
        line.laddr.ip.removeprefix("::ffff:")
        for process in run.processes
        for line in psutil.Process(process.pid).net_connections("inet")
        if line.status == psutil.CONN_LISTEN
    ]
    assert listening and {*listening} == {"127.0.0.1"}
    saved = run.stop("step    40  test loss")
    start_run().repeats(start=saved)


@pytest.mark.slow
def test_one_process_of_a_launcher_stops_too(start_run):
    """JAX handles its signals, as it does in several."""
    saved = start_run(*meeting(1), 0, code=SLOWLY).stop("step     8")
    start_run().repeats(start=saved)


@pytest.mark.slow
@linux_root
def test_as_the_first_process_of_a_container(tmp_path):
    """Where the kernel drops a signal without a handler."""
    script = ["python", LAUNCH / "train.py", "--emulate", "8", "--steps", "100000"]
    inside = ["unshare", "--pid", "--fork", "--kill-child", *script]
    outer = subprocess.Popen(
        inside, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        read_until(outer, "step   160")
        [first] = psutil.Process(outer.pid).children()
        first.terminate()
        assert outer.wait(HANGS) == 75
        assert "\nstopped: the same command goes on after step " in outer.stdout.read()
    finally:
        outer.kill()
        outer.communicate()


@pytest.mark.slow
@one_and_two
def test_thirty_moments_of_a_save(start_run, processes):
    """From before the save of step 20 until after it, SIGTERM and SIGKILL in turn."""
    for moment in range(30):
        folder = f"run{moment}"
        run = start_run(folder=folder, processes=processes, code=SLOWLY)
        run.read_until("step    16")
        time.sleep(0.4 + moment * 0.025)
        if moment % 2:
            run.send(signal.SIGKILL)
            assert not {0, 75, 76} & {*run.end()}, moment
            assert run.complete() in ([], [20]), moment
            start = 20 * len(run.complete())
        else:
            run.send()
            start = run.stopped()
        start_run(folder=folder).repeats(start)


# --------------------------------------------------------------------- starts and jobs

CRASH = "import lifecycle; del lifecycle.Checkpoints.save"


@pytest.mark.slow
@one_and_two
def test_starts_that_save_nothing_new_are_counted(start_run, processes):
    for _ in range(3):
        assert 78 not in start_run(processes=processes, code=CRASH).end()
    run = start_run(processes=processes)
    assert run.end() == [78] * processes
    assert "--tries 4" in run.errors[0]
    start_run("--tries", 4).repeats()
    for _ in range(4):  # done, it may be started as often as one likes
        assert "step    48  restored" in start_run().finish()


# --------------------------------------------------------------------------------- soak


@pytest.mark.slow
def test_forty_faults_in_a_row(start_run):
    """Killed, stopped, torn, on other devices: at the end it is the same loss."""
    rng = random.Random(25)
    steps, happened = ["--steps", 480, "--save-every", 7, "--tries", 40], []
    undisturbed = start_run(*steps, folder="undisturbed").finish()
    for _ in range(40):
        processes = rng.choice([1, 1, 2])
        run = start_run(*steps, processes=processes, code=SLOWLY)
        time.sleep(rng.uniform(4, 9))
        fault = rng.choice(["kill", "term", "tear", "flip", "second", "twice"])
        victim = rng.choice(run.processes)
        if fault == "second":
            run.read_until("step")
            assert start_run(*steps).end() == [78]
        number = signal.SIGTERM if fault in ("term", "twice") else signal.SIGKILL
        victim.send_signal(number)
        if fault == "twice":
            time.sleep(rng.uniform(0, 0.5))
            victim.terminate()
        try:
            ended = run.end(60)
        except subprocess.TimeoutExpired:  # one may wait for another to start
            run.kill()  # as a launcher does
            ended = run.end()
        assert 0 not in ended
        kept = run.complete()
        newest = run.folder / str(kept[-1]) if len(kept) > 1 else None
        if newest and fault == "tear":
            cut(newest)
        if newest and fault == "flip":
            flip(rng.choice([*contents(newest)]), rng)
        happened.append((fault, processes, kept[-1:], ended))
    last = start_run(*steps).finish()
    line = "step +480  test loss ([^,]+), "
    found, due = (float(re.search(line, text)[1]) for text in (last, undisturbed))
    assert abs(found / due - 1) < 1e-4, happened
