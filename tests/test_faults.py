"""The script of book/script.md under faults: it loses nothing, and it always ends.

A test causes its fault for real, waits for the end within a limit, and starts the run
again: from then on it has to repeat the run that nobody disturbed. What takes minutes
is marked `slow`, for `nox -s faults`.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import lifecycle
import numpy as np
import psutil
import pytest
from jax.sharding import SingleDeviceSharding
from runs import ENVIRONMENT, HANGS_IN_SAVE, LAUNCH, SLOWLY, contents, read_until

linux_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux and root"
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
def test_a_number_that_is_none_is_not_saved(begin, processes):
    run = begin(processes=processes, code=NAN)
    assert run.end(120) == [78] * processes
    assert "the loss of step 22 is nan" in run.complaints[0]
    assert run.names() == ["20"]
    begin().repeats(start=20)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, capsys, quiet, wrong):
    with checkpoints_in(tmp_path) as checkpoints:
        with pytest.raises(SystemExit, match="78"):
            checkpoints.save(7, {"w": np.float32([1, wrong]), "n": np.int32(3)})
    assert "the state after step 7 is not finite" in capsys.readouterr().err
    assert not contents(tmp_path)


# ------------------------------------------------------------------------- checkpoints

W = np.random.default_rng(0).normal(size=(64, 64))  # in a file beside Orbax's index
STATE = {"w": W.astype(np.float32), "n": np.int32(5)}
KINDS = "float32 bfloat16 float8_e4m3fn int8 uint16 int32 bool key".split()
SETTINGS = {"rate": 0.003}


def state_of(done: int) -> dict:
    return jax.tree.map(lambda leaf: leaf + leaf.dtype.type(done), STATE)


def checkpoints_in(folder: Path, settings: dict = SETTINGS) -> lifecycle.Checkpoints:
    return lifecycle.Checkpoints(folder, settings, seconds=60)


@pytest.fixture
def saved(tmp_path) -> Path:
    """A folder with the states after 20 and after 40 steps."""
    with checkpoints_in(tmp_path / "run") as checkpoints:
        for done in (20, 40):
            checkpoints.save(done, state_of(done))
    return tmp_path / "run"


def restored(folder: Path, settings: dict = SETTINGS) -> int:
    """The step of the checkpoint that is taken, which has to hold its state."""
    here = SingleDeviceSharding(jax.devices()[0])
    like = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, STATE))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=here), like)
    with checkpoints_in(folder, settings) as checkpoints:
        done, state = checkpoints.restore(like)
    jax.tree.map(np.testing.assert_array_equal, state, state_of(done))
    return done


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit of a file."""
    text = bytearray(path.read_bytes())
    text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    path.write_bytes(text)


def test_any_changed_byte_is_found_or_changes_nothing(saved, capsys):
    """In each file of the newest checkpoint; the one before it is taken."""
    told = ""
    files = contents(saved / "40")
    numbers = max(files, key=lambda path: len(files[path]))
    for number, path in enumerate([*files, *[numbers] * 8]):
        copy = shutil.copytree(saved, saved.parent / str(number))
        flip(copy / path.relative_to(saved), random.Random(number))
        done = restored(copy)
        said = capsys.readouterr().out
        assert ("CHECKPOINT 40 IS DAMAGED" in said) == (done == 20), path
        told += said
    assert told.count("IS DAMAGED") >= 3
    assert told.count("its checksum is another") >= 1  # restored without a word


def cut(checkpoint: Path) -> None:
    files = contents(checkpoint)
    largest = max(files, key=lambda path: len(files[path]))
    os.truncate(largest, len(files[largest]) // 2)


def empty_all(checkpoint: Path) -> None:
    for path in contents(checkpoint):
        os.truncate(path, 0)


def other_number(checkpoint: Path) -> None:
    """Another number in the settings, of the same length."""
    path = checkpoint / "settings/metadata"
    path.write_text(path.read_text().replace("0.003", "0.004"))


BROKEN = {
    "half a file": cut,
    "empty files": empty_all,
    "an empty folder": lambda checkpoint: (
        shutil.rmtree(checkpoint),
        checkpoint.mkdir(),
    ),
    "another number": other_number,
    "no settings": lambda checkpoint: shutil.rmtree(checkpoint / "settings"),
    "no state": lambda checkpoint: shutil.rmtree(checkpoint / "state"),
    "no index": lambda checkpoint: (checkpoint / "state/manifest.ocdbt").unlink(),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_what_is_torn_is_named_and_the_one_before_is_taken(saved, capsys, damage):
    damage(saved / "40")
    assert restored(saved) == 20
    words = "CHECKPOINT 40 IS DAMAGED, and now named 40.damaged-"
    assert words in capsys.readouterr().out
    with checkpoints_in(saved) as checkpoints:
        checkpoints.save(40, state_of(40))  # the place is free
    assert restored(saved) == 40


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_of_any_kind_has_its_share_in_the_sum(kind):
    zeros = jax.numpy.zeros((4, 6), kind if kind != "key" else "uint32")
    ones = zeros.at[3, 2].set(zeros.dtype.type(1))
    if kind == "key":
        zeros, ones = map(jax.random.wrap_key_data, (zeros[:, :2], ones[:, 1:3]))
    sums = [lifecycle.checksums({"x": x})[0][0] for x in (zeros, ones, ones[::-1])]
    assert len({*map(int, sums)}) == 3


def test_without_a_whole_one_nothing_is_touched(saved, capsys, quiet):
    for done in ("20", "40"):
        cut(saved / done)
    before = contents(saved)
    with pytest.raises(SystemExit, match="78"):
        restored(saved)
    said = capsys.readouterr().err
    assert "no checkpoint in" in said and f"mv '{saved}' '{saved}.damaged'" in said
    assert contents(saved) == before


def test_a_setting_more_or_less_is_another_run(saved, capsys, quiet):
    before = contents(saved)
    with pytest.raises(SystemExit, match="78"):
        restored(saved, SETTINGS | {"width": 128})
    assert "begun with --width None, not with 128: ask" in capsys.readouterr().err
    assert contents(saved) == before


HOSTILE = [b"", b"\xff\xfe", b"-1 -1", 20 * b"7 ", b"9" * 5000, "²".encode()]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_a_count_that_is_none_is_counted_anew(tmp_path, monkeypatch, content):
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
def test_two_processes_fall_back_together(begin, tmp_path):
    begin(processes=2).finish()
    cut(tmp_path / "checkpoints/48")
    again = begin(processes=2)
    again.repeats(start=40)
    assert "CHECKPOINT 48 IS DAMAGED" in again.said[0]


# ----------------------------------------------------------------------------- the disk


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of so many bytes in a folder; what was there is copied."""
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder]
    subprocess.run(["mount", *options], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder: Path, leave: int) -> Path:
    """A file that takes all bytes of a disk but so many."""
    path = folder / "ballast"
    path.write_bytes(bytes(shutil.disk_usage(folder).free - leave))
    return path


BLIND = """
import lifecycle, shutil, types
usage = shutil.disk_usage("/")
lifecycle.shutil = types.SimpleNamespace(disk_usage=lambda path: usage)
"""


@linux_root
@alone_and_paired
@pytest.mark.parametrize("sees", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_full_disk_ends_all_within_a_minute(begin, tmp_path, processes, sees):
    """Also where the check of the room there is sees nothing: another may fill it."""
    with small_disk(tmp_path / "disk", "20m") as disk:
        code = SLOWLY if sees else SLOWLY + BLIND
        options = {"folder": "disk/run", "processes": processes, "code": code}
        run = begin("--save-limit", 20, **options)
        run.wait_for(20)
        ballast = fill(disk, leave=40_000)
        ended = run.end(60)
        if sees:
            assert ended == [78] * processes
        else:
            assert not {0, 75, 76} & {*ended}
        assert str(disk / "run") in "".join(run.complaints)
        assert run.names()[0] == "20"
        ballast.unlink()
        begin(folder="disk/run").repeats(start=20)


# ------------------------------------------------------------------------------- limits

# After 24 steps, the next one never ends.
HANGS_IN_STEP = """
import lifecycle, time
asked, count = lifecycle.limit, iter(range(10**6))

def limit(what, seconds):
    asked(what, seconds)
    if what == "the next step" and next(count) == 25:
        time.sleep(600)

lifecycle.limit = limit
"""


@pytest.mark.slow
@one_and_two
@pytest.mark.parametrize(
    ("code", "limits", "words"),
    [
        (HANGS_IN_STEP, ["--step-limit", 20], "the next step has not ended in time"),
        (HANGS_IN_SAVE, ["--save-limit", 10], "the save of step 40 into /"),
    ],
)
def test_what_hangs_is_ended(begin, processes, code, limits, words):
    run = begin(*limits, processes=processes, code=code)
    assert not {0, 75, 76, None} & {*run.end(90)}
    told = "".join(run.complaints)
    assert words in told and "most recent call first" in told
    assert [name for name in run.names() if name.isdigit()] == ["20"]
    begin().repeats(start=20)


# -------------------------------------------------------------------------------- stops


MEET = "--coordinator 127.0.0.1:29377 --process 0 --processes"


@pytest.mark.parametrize(
    "meet", ["", pytest.param(f"{MEET} 2", marks=pytest.mark.slow)]
)
def test_a_stop_before_anything_is_saved_says_so(begin, meet):
    """While it imports JAX, or waits for another process."""
    run = begin(*meet.split())
    if meet:
        run.read_until("process 0 of 2 waits")
    time.sleep(0.5)  # Python has begun
    run.send()
    assert run.end(60) == [76]
    assert (run.said, run.complaints) == (["stopped: nothing new is saved\n"], [""])
    assert not run.folder.exists()


@pytest.mark.slow
def test_two_processes_are_stopped_again_and_again(begin):
    """By Ctrl-C, before a first step, and after a save, in which Orbax would ask; and
    as long as they train, they listen at the coordinator's address only."""
    how = {"processes": 2, "code": SLOWLY}
    saved = begin(**how).stop("step     8", signal.SIGINT, everyone=True)
    saved = begin(**how).stop(f"step {saved:5}  restored", *[signal.SIGTERM] * 20)
    run = begin(**how)
    run.read_until(f"step {saved:5}  restored")
    listening = [
        line.laddr.ip.removeprefix("::ffff:")
        for process in run.processes
        for line in psutil.Process(process.pid).net_connections("inet")
        if line.status == psutil.CONN_LISTEN
    ]
    assert listening and {*listening} == {"127.0.0.1"}
    saved = run.stop("step    40  test loss")
    begin().repeats(start=saved)


@pytest.mark.slow
def test_one_process_of_a_launcher_stops_too(begin):
    """JAX takes its signals, as it does in several."""
    saved = begin(*f"{MEET} 1".split(), code=SLOWLY).stop("step     8")
    begin().repeats(start=saved)


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
        assert outer.wait(60) == 75
        assert "\nstopped: the same command goes on after step " in outer.stdout.read()
    finally:
        outer.kill()
        outer.communicate()


@pytest.mark.slow
@one_and_two
def test_thirty_moments_of_a_save(begin, processes):
    """From before the save of step 20 until after it, SIGTERM and SIGKILL in turn."""
    for moment in range(30):
        folder = f"run{moment}"
        run = begin(folder=folder, processes=processes, code=SLOWLY)
        run.read_until("step    16")
        time.sleep(0.6 + moment * 0.025)
        if moment % 2:
            run.send(signal.SIGKILL)
            assert not {0, 75, 76} & {*run.end(60)}, moment
            kept = [name for name in run.names() if name.isdigit()]
            assert kept in ([], ["20"]), moment
            start = 20 * len(kept)
        else:
            run.send()
            start = run.stopped()
        begin(folder=folder).repeats(start)


# --------------------------------------------------------------------- starts and jobs

CRASH = "import lifecycle; del lifecycle.Checkpoints.save"


@pytest.mark.slow
@one_and_two
def test_starts_that_save_nothing_new_are_counted(begin, processes):
    for _ in range(3):
        assert 78 not in begin(processes=processes, code=CRASH).end(90)
    run = begin(processes=processes)
    assert run.end(90) == [78] * processes
    words = "the last 3 starts have saved nothing after step 0 in /"
    assert words in run.complaints[0]
    begin("--tries", 4).repeats()
    for _ in range(4):  # done, it may be started as often as one likes
        assert "step    48  restored" in begin().finish()


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--steps 0", "--steps: 0 is less than 1"),
        ("--emulate 0", "--emulate: 0 is less than 1"),
        ("--seed -1", "--seed: -1 is less than 0"),
        ("--rate nan", "--rate: nan is no finite number above 0"),
        ("--rate -1", "--rate: -1 is no finite number above 0"),
        ("--save-limit inf", "--save-limit: inf is no finite number above 0"),
        ("--batch many", "--batch: invalid read value: 'many'"),
        ("--coordinator node1", "--coordinator node1 is not of the form HOST:PORT"),
        ("--processes 2 --process 2", "--process counts from 0: to 1"),
        ("--allow-nan", "unrecognized arguments: --allow-nan"),
    ],
)
def test_senseless_options_are_refused_before_jax_starts(tmp_path, option, complaint):
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX was imported')")
    command = [sys.executable, LAUNCH / "train.py", *option.split()]
    own = {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=own, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].endswith(complaint)


# --------------------------------------------------------------------------------- soak


@pytest.mark.slow
def test_forty_faults_in_a_row(begin):
    """Killed, stopped, torn, on other devices: at the end it is the same loss."""
    rng = random.Random(25)
    steps, happened = ["--steps", 480, "--save-every", 7, "--tries", 40], []
    whole = begin(*steps, folder="whole").finish()
    for _ in range(40):
        processes = rng.choice([1, 1, 2])
        run = begin(*steps, processes=processes, code=SLOWLY)
        time.sleep(rng.uniform(4, 9))
        fault = rng.choice(["kill", "term", "tear", "flip", "second", "twice"])
        victim = rng.choice(run.processes)
        if fault == "second":
            run.read_until("step")
            assert begin(*steps).end(60) == [78]
        number = signal.SIGTERM if fault in ("term", "twice") else signal.SIGKILL
        victim.send_signal(number)
        if fault == "twice":
            time.sleep(rng.uniform(0, 0.5))
            victim.terminate()
        try:
            ended = run.end(40)
        except subprocess.TimeoutExpired:  # as where one waits for another to start
            run.kill()  # as a launcher does
            ended = run.end(10)
        assert 0 not in ended
        kept = [name for name in run.names() if name.isdigit()]
        newest = run.folder / kept[-1] if len(kept) > 1 else None
        if newest and fault == "tear":
            cut(newest)
        if newest and fault == "flip":
            flip(rng.choice([*contents(newest)]), rng)
        happened.append((fault, processes, kept[-1:], ended))
    last = begin(*steps).finish()
    line = r"step +480  test loss (\S+), (\d+) of 261 right\n$"
    found, expected = (float(re.search(line, said)[1]) for said in (last, whole))
    assert abs(found / expected - 1) < 1e-4, happened
