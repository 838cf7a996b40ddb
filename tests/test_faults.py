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
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import lifecycle
import numpy as np
import psutil
import pytest
from jax.sharding import SingleDeviceSharding
from runs import (
    ENVIRONMENT,
    LAUNCH,
    SLOWLY,
    begin_two,
    check,
    end,
    finish,
    names,
    read_until,
)

linux_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="needs Linux and root"
)


def begin_as(begin, processes: int, *more: str, code: str = "") -> list:
    """A run of one process with eight devices, or of two with four each."""
    if processes == 1:
        return [begin(8, *more, code=code)]
    return begin_two(begin, *more, code=code)


def statuses(runs: list, within: float) -> list[int]:
    """How the processes of a run end, all of them, within so many seconds."""
    deadline = time.monotonic() + within
    for run in runs:
        run.said, run.complaints = run.communicate(timeout=deadline - time.monotonic())
    return [run.returncode for run in runs]


PAIRED = pytest.param(2, marks=pytest.mark.slow)
alone_and_paired = pytest.mark.parametrize("processes", [1, PAIRED])

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
def test_a_number_that_is_none_is_not_saved(begin, tmp_path, processes):
    runs = begin_as(begin, processes, code=NAN)
    assert statuses(runs, 120) == [78] * processes
    assert "the loss of step 22 is nan" in runs[0].complaints
    assert names(tmp_path / "checkpoints") == ["20"]
    check(finish(begin(8)), start=20)


@pytest.fixture
def quiet(monkeypatch) -> None:
    """Leaves pytest its signals where a run ends in this process."""
    monkeypatch.setattr(lifecycle, "hear_no_more", lambda: None)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, capsys, quiet, wrong):
    with lifecycle.Checkpoints(tmp_path, {}, 60) as checkpoints:
        with pytest.raises(SystemExit, match="78"):
            checkpoints.save(7, {"w": np.float32([1, wrong]), "n": np.int32(3)})
    assert "the state after step 7 is not finite" in capsys.readouterr().err
    assert names(tmp_path) == []


# ------------------------------------------------------------------------- checkpoints

W = np.random.default_rng(0).normal(size=(64, 64))  # in a file beside Orbax's index
STATE = {"w": W.astype(np.float32), "n": np.int32(5)}
KINDS = "float32 bfloat16 float8_e4m3fn int8 uint16 int32 bool".split()
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


def restored(folder: Path) -> tuple[int, dict]:
    here = SingleDeviceSharding(jax.devices()[0])
    like = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, STATE))
    like = jax.tree.map(lambda leaf: leaf.update(sharding=here), like)
    with checkpoints_in(folder) as checkpoints:
        return checkpoints.restore(like)


def same(state: dict, done: int) -> bool:
    return jax.tree.all(jax.tree.map(np.array_equal, state, state_of(done)))


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def flip(path: Path, rng: random.Random) -> None:
    """Change one bit of a file."""
    text = bytearray(path.read_bytes())
    text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
    path.write_bytes(text)


def test_any_changed_byte_is_found_or_changes_nothing(saved, capsys):
    """In each file of the newest checkpoint; the one before it is taken."""
    told = ""
    files = files_of(saved / "40")
    numbers = max(files, key=lambda path: path.stat().st_size)
    for number, path in enumerate([*files, *[numbers] * 8]):
        copy = saved.parent / str(number)
        shutil.copytree(saved, copy)
        flip(copy / path.relative_to(saved), random.Random(number))
        done, state = restored(copy)
        assert same(state, done), path
        said = capsys.readouterr().out
        assert ("CHECKPOINT 40 IS DAMAGED" in said) == (done == 20)
        told += said
    assert told.count("IS DAMAGED") >= 3
    assert told.count("its checksum is another") >= 1  # restored without a word


def cut(checkpoint: Path) -> None:
    largest = max(files_of(checkpoint), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def remove(part: str, checkpoint: Path) -> None:
    path = checkpoint / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def empty_all(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        os.truncate(path, 0)


def other_number(checkpoint: Path) -> None:
    """Another number in the settings, of the same length."""
    [path] = (checkpoint / "settings").glob("metadata")
    path.write_text(path.read_text().replace("0.003", "0.004"))


BROKEN = [
    cut,
    empty,
    empty_all,
    other_number,
    partial(remove, "settings"),
    partial(remove, "state"),
    partial(remove, "state/manifest.ocdbt"),
]


def in_words(damage: Callable) -> str:
    if isinstance(damage, partial):
        return f"{damage.func.__name__} {damage.args[0]}"
    return damage.__name__


@pytest.mark.parametrize("damage", BROKEN, ids=in_words)
def test_what_is_torn_is_named_and_the_one_before_is_taken(saved, capsys, damage):
    damage(saved / "40")
    done, state = restored(saved)
    assert (done, same(state, 20)) == (20, True)
    assert (
        "CHECKPOINT 40 IS DAMAGED, and now named 40.damaged-" in capsys.readouterr().out
    )
    with checkpoints_in(saved) as checkpoints:
        checkpoints.save(40, state_of(40))  # the place is free
    assert restored(saved)[0] == 40


@pytest.mark.parametrize("kind", [*KINDS, "key"])
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
    before = [(path, path.read_bytes()) for path in files_of(saved)]
    with pytest.raises(SystemExit, match="78"):
        restored(saved)
    said = capsys.readouterr().err
    assert "no checkpoint in" in said and f"mv '{saved}' '{saved}.damaged'" in said
    assert [(path, path.read_bytes()) for path in files_of(saved)] == before


def test_a_setting_more_or_less_is_another_run(saved, capsys, quiet):
    with checkpoints_in(saved, SETTINGS | {"width": 128}) as checkpoints:
        with pytest.raises(SystemExit, match="78"):
            checkpoints.restore(STATE)
    assert "begun with --width None, not with 128: ask" in capsys.readouterr().err
    assert names(saved) == ["20", "40"]


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
    begun = begin_two(begin)
    assert statuses(begun, 120) == [0, 0]
    for run in tmp_path.glob("checkpoints/48"):
        cut(run)
    again = begin_two(begin)
    assert statuses(again, 120) == [0, 0]
    assert "CHECKPOINT 48 IS DAMAGED" in again[0].said
    check(again[0].said[again[0].said.index("step    40  restored") :], start=40)


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
    with open(path, "wb") as file:
        file.write(bytes(shutil.disk_usage(folder).free - leave))
    return path


BLIND = """
import lifecycle, shutil
usage = shutil.disk_usage
class Blind:
    def __getattr__(self, name): return getattr(shutil, name)
    def disk_usage(self, path): return usage("/")
lifecycle.shutil = Blind()
"""


@linux_root
@alone_and_paired
@pytest.mark.parametrize("sees", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_full_disk_ends_all_within_a_minute(begin, tmp_path, processes, sees):
    """Also where the check of the room there is sees nothing: another may fill it."""
    with small_disk(tmp_path / "disk", "20m") as disk:
        options = ["--folder", str(disk / "run"), "--save-limit", "20"]
        runs = begin_as(begin, processes, *options, code=SLOWLY + BLIND * (not sees))
        read_until(runs[0], "step    20  test loss")
        while not (disk / "run/20").exists():
            time.sleep(0.05)
        ballast = fill(disk, leave=40_000)
        ended = statuses(runs, 60)
        if sees:
            assert ended == [78] * processes
        else:
            assert not {0, 75, 76} & {*ended}
        told = "".join(run.complaints for run in runs)
        assert str(disk / "run") in told
        assert names(disk / "run")[0] == "20"
        ballast.unlink()
        check(finish(begin(8, "--folder", str(disk / "run"))), start=20)


# ------------------------------------------------------------------------------- limits

# What happens in process 0 alone, after 24 steps or in the save of step 40.
HANG_IN_STEP = """
import lifecycle, os, time
asked, count = lifecycle.limit, iter(range(10**6))

def limit(what, seconds):
    asked(what, seconds)
    if what == "the next step" and next(count) == 25 and os.environ.get("HANG"):
        time.sleep(600)

lifecycle.limit = limit
"""
HANG_IN_SAVE = """
import asyncio, orbax.checkpoint as ocp
path = ocp.path.atomicity.AtomicRenameTemporaryPath
finalize = path.finalize

async def slow(self):
    if self.get_final().name == "40":
        await asyncio.sleep(600)
    await finalize(self)

path.finalize = slow
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize(
    ("code", "limits", "words"),
    [
        (HANG_IN_STEP, ["--step-limit", "20"], "the next step has not ended in time"),
        (HANG_IN_SAVE, ["--save-limit", "10"], "the save of step 40 into /"),
    ],
)
def test_what_hangs_is_ended(
    begin, monkeypatch, tmp_path, processes, code, limits, words
):
    monkeypatch.setitem(ENVIRONMENT, "HANG", "yes")
    runs = begin_as(begin, processes, *limits, code=code)
    assert not {0, 75, 76, None} & {*statuses(runs, 90)}
    told = "".join(run.complaints for run in runs)
    assert words in told and "most recent call first" in told
    whole = [name for name in names(tmp_path / "checkpoints") if name.isdigit()]
    assert whole == ["20"]
    check(finish(begin(8)), start=20)


# -------------------------------------------------------------------------------- stops

STOPPED = "stopped: the same command goes on after step "


def test_a_stop_before_anything_is_saved_says_so(begin, tmp_path):
    run = begin(8)
    time.sleep(0.5)  # Python has begun, and imports JAX
    run.terminate()
    assert end(run) == ("stopped: nothing new is saved\n", "")
    assert run.returncode == 76
    assert not (tmp_path / "checkpoints").exists()


@alone_and_paired
def test_a_second_signal_loses_nothing(begin, tmp_path, processes):
    runs = begin_as(begin, processes, code=SLOWLY)
    read_until(runs[0], "step     8")
    for _ in range(20):
        runs[-1].terminate()
        time.sleep(0.05)
    assert statuses(runs, 60) == [75] * processes
    [saved] = names(tmp_path / "checkpoints")
    assert f"{STOPPED}{saved}\n" in runs[0].said
    check(finish(begin(8)), start=int(saved))


@pytest.mark.slow
def test_one_process_of_a_launcher_stops_too(begin, tmp_path):
    """JAX takes its signals, as it does in several."""
    meet = "--coordinator 127.0.0.1:29377 --processes 1 --process 0"
    run = begin(8, *meet.split(), code=SLOWLY)
    read_until(run, "step     8")
    run.terminate()
    assert statuses([run], 60) == [75]
    [saved] = names(tmp_path / "checkpoints")
    check(finish(begin(8)), start=int(saved))


@pytest.mark.slow
def test_a_stop_while_processes_meet_is_heeded(begin):
    meet = "--coordinator 127.0.0.1:29378 --processes 2 --process 0"
    run = begin(8, *meet.split())
    read_until(run, "process 0 of 2 waits")
    time.sleep(1)
    run.terminate()
    assert statuses([run], 10) == [76]


@pytest.mark.slow
def test_ctrl_c_saves_in_two_processes_too(begin, tmp_path):
    runs = begin_two(begin, code=SLOWLY)
    read_until(runs[0], "step     8")
    for run in runs:
        run.send_signal(signal.SIGINT)
    assert statuses(runs, 60) == [75, 75]
    [saved] = names(tmp_path / "checkpoints")
    check(finish(begin(8)), start=int(saved))


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["step    20  restored", "step    40  test loss"])
def test_a_signal_of_two_that_go_on(begin, tmp_path, moment):
    """Before their first step, and after their first save, in which Orbax would ask."""
    first = begin(8, code=SLOWLY)
    read_until(first, "step    20  test loss")
    first.terminate()
    end(first)
    runs = begin_two(begin, code=SLOWLY)
    read_until(runs[0], moment)
    runs[1].terminate()
    assert statuses(runs, 60) == [75, 75]
    saved = int(names(tmp_path / "checkpoints")[-1])
    check(finish(begin(8)), start=saved)


@pytest.mark.slow
@linux_root
def test_as_the_first_process_of_a_container(tmp_path):
    """Where the kernel drops a signal without a handler."""
    script = ["python", str(LAUNCH / "train.py"), "--emulate", "8", "--steps", "100000"]
    inside = ["unshare", "--pid", "--fork", "--kill-child", *script]
    outer = subprocess.Popen(
        inside, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    try:
        read_until(outer, "step   160")
        [first] = psutil.Process(outer.pid).children()
        first.terminate()
        assert outer.wait(60) == 75
        assert f"\n{STOPPED}" in outer.stdout.read()
    finally:
        outer.kill()
        outer.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_thirty_moments_of_a_save(begin, tmp_path, processes):
    """From before the save of step 20 until after it, SIGTERM and SIGKILL in turn."""
    for moment in range(30):
        folder = f"run{moment}"
        runs = begin_as(begin, processes, "--folder", folder, code=SLOWLY)
        read_until(runs[0], "step    16")
        time.sleep(0.6 + moment * 0.025)
        number = [signal.SIGTERM, signal.SIGKILL][moment % 2]
        runs[-1].send_signal(number)
        ended = statuses(runs, 60)
        kept = [n for n in names(tmp_path / folder) if n.isdigit()]
        if number == signal.SIGTERM:
            assert ended == [75] * processes, moment
            assert f"{STOPPED}{kept[-1]}\n" in runs[0].said
        else:
            assert not {0, 75, 76} & {*ended}, moment
            assert kept in ([], ["20"]), moment
        start = max(map(int, kept), default=0)
        check(finish(begin(8, "--folder", folder)), start=start)


# --------------------------------------------------------------------- starts and jobs


def test_a_second_job_is_refused_and_a_dead_one_is_no_hindrance(begin, tmp_path):
    first = begin(8, code=SLOWLY)
    read_until(first, "step    20  test loss")
    while not (tmp_path / "checkpoints/20").exists():
        time.sleep(0.05)
    first.send_signal(signal.SIGSTOP)
    second = begin(8, "--rate", "0.01")
    said, complaints = end(second)
    assert (second.returncode, said) == (78, "")
    assert complaints.startswith("another job trains in /")
    first.kill()
    end(first)
    check(finish(begin(8)), start=20)


CRASH = """
import lifecycle

def save(*_):
    raise RuntimeError("a damaged row")

lifecycle.Checkpoints.save = save
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_starts_that_save_nothing_new_are_counted(begin, processes):
    for _ in range(3):
        assert 78 not in statuses(begin_as(begin, processes, code=CRASH), 90)
    runs = begin_as(begin, processes)
    assert statuses(runs, 90) == [78] * processes
    assert (
        "the last 3 starts have saved nothing after step 0 in /" in runs[0].complaints
    )
    check(finish(begin(8, "--tries", "4")))
    for _ in range(4):  # done, it may be started as often as one likes
        assert "step    48  restored" in finish(begin(8))


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


@pytest.mark.slow
def test_it_listens_at_the_coordinators_address_only(begin):
    runs = begin_two(begin, code=SLOWLY)
    read_until(runs[0], "step     8")
    listening = [
        line.laddr.ip.removeprefix("::ffff:")
        for run in runs
        for line in psutil.Process(run.pid).net_connections("inet")
        if line.status == psutil.CONN_LISTEN
    ]
    assert listening and {*listening} == {"127.0.0.1"}


# --------------------------------------------------------------------------------- soak


def as_a_launcher(runs: list) -> list[int]:
    """Wait for one to end, and 20 seconds later end the others: how all ended."""
    deadline = time.monotonic() + 60
    while all(run.poll() is None for run in runs):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    deadline = time.monotonic() + 20
    while any(run.poll() is None for run in runs) and time.monotonic() < deadline:
        time.sleep(0.05)
    for run in runs:
        run.kill()
    return statuses(runs, 10)


@pytest.mark.slow
def test_forty_faults_in_a_row(begin, tmp_path):
    """Killed, stopped, torn, on other devices: at the end it is the same loss."""
    rng = random.Random(25)
    folder = tmp_path / "checkpoints"
    steps, happened = ["--steps", "480", "--save-every", "7", "--tries", "40"], []
    whole = finish(begin(8, *steps, "--folder", "whole"))
    for _ in range(40):
        processes = rng.choice([1, 1, 2])
        runs = begin_as(begin, processes, *steps, code=SLOWLY)
        time.sleep(rng.uniform(4, 9))
        fault = rng.choice(["kill", "term", "tear", "flip", "second", "twice"])
        victim = rng.choice(runs)
        if fault == "second":
            read_until(runs[0], "step")
            second = begin(8, *steps)
            assert statuses([second], 60) == [78]
        if fault in ("term", "twice"):
            victim.terminate()
            if fault == "twice":
                time.sleep(rng.uniform(0, 0.5))
                victim.terminate()
        else:
            victim.kill()
        ended = as_a_launcher(runs)
        assert 0 not in ended
        kept = sorted(
            int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()
        )
        if fault in ("tear", "flip") and len(kept) > 1:
            newest = folder / str(kept[-1])
            if fault == "tear":
                cut(newest)
            else:
                flip(rng.choice(files_of(newest)), rng)
        happened.append((fault, processes, kept[-1:], ended))
    last = finish(begin(8, *steps))
    line = r"step +480  test loss (\S+), (\d+) of 261 right\n$"
    found, expected = (float(re.search(line, said)[1]) for said in (last, whole))
    assert abs(found / expected - 1) < 1e-4, happened
