"""What a run needs beside its training: processes that meet, a folder of its own,
checkpoints that are whole, limits of time, and an end that says what it was.

train.py and fine_tune.py use it, and end with one of these statuses.

0    the run is done
75   told to stop, and something new is saved: start it again
76   told to stop, and nothing new is saved
78   stay down: somebody has to look first (2, if it is at the command line)
     Any other is a crash.
"""

import argparse
import contextlib
import faulthandler
import fcntl
import json
import math
import os
import re
import select
import shutil
import signal
import sys
import textwrap
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

BAD_INPUT, SAVED, UNSAVED, NO_RESTART = 2, 75, 76, 78
CONNECTING = "connecting to the other processes"

# ------------------------------------------------------------------ lines and the end


def log(text: str) -> None:
    """Print a line, from one process only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def log_step(done: int, text: str) -> None:
    """Print a line about a step, or about the state after it."""
    log(f"step {done:5}  {text}")


def exit_all(status: int, text: str) -> NoReturn:
    """End the run: all processes call this together, and one says why."""
    if jax.process_index() == 0:
        if status == NO_RESTART and claimed:
            write_starts(*claimed)  # it is no start in vain: nobody repeats it
        file = sys.stderr if status in (BAD_INPUT, NO_RESTART) else sys.stdout
        print(text, file=file, flush=True)
    ignore_signals()
    sys.exit(status)


def log_losses(losses: list[tuple[int, jax.Array]], every: int, note: str = "") -> None:
    """Look at losses f32[] that were put aside with their steps, print some, and drop
    them; one that is not finite ends the run."""
    for done, loss in jax.device_get(losses):
        if not np.isfinite(loss):
            exit_all(
                NO_RESTART,
                f"the loss of step {done} is {loss}: not saved from there on",
            )
        if done % every == 0:
            log_step(done, f"loss {loss:.6f}{note}")
    losses.clear()


def ignore_signals() -> None:
    """Ignore signals from now on: at the very end one would change the status."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


# ------------------------------------------------------------------------------ limits

deadlines = {}  # of what is under way: when it has to be over, and whether it still is


def set_deadline(
    what: str, seconds: float, is_under_way: Callable = lambda: True
) -> None:
    """End this process unless `what` is over, or set anew, in so many seconds."""
    deadlines[what] = (time.monotonic() + seconds, is_under_way)


def watch_deadlines(received: list[int], signals: int) -> None:
    """Look after the limits, for ever; and after signals, while processes meet."""
    while True:
        before = time.monotonic()
        time.sleep(0.5)
        late = time.monotonic() - before - 0.5
        for what, (end, is_under_way) in list(deadlines.items()):
            if late > 5:  # the machine slept, or this process was suspended
                deadlines[what] = (end + late, is_under_way)
            elif time.monotonic() > end and is_under_way():
                try:
                    print(f"{what} has not ended in time", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(all_threads=True)
                finally:  # also where nothing can be printed
                    os._exit(1)
        told = received or select.select([signals], [], [], 0)[0]
        if told and CONNECTING in deadlines:
            try:
                print("stopped: nothing new is saved", flush=True)
            finally:
                os._exit(UNSAVED)


def run(main: Callable, options: argparse.Namespace, received: list[int]) -> None:
    """Run the program to its end; of several processes, one that fails ends at once."""
    faulthandler.cancel_dump_traceback_later()  # of the imports
    # Python calls a handler between two of its lines, and those who wait have none.
    signals, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    threading.Thread(
        target=watch_deadlines, args=(received, signals), daemon=True
    ).start()
    try:
        main(options)
        ignore_signals()
    except Exception:
        if jax.process_count() == 1:
            raise
        try:
            traceback.print_exc()
        finally:  # JAX's own exit would wait for the others, and they for this one
            os._exit(1)


# --------------------------------------------------------------------------- processes


def connect(options: argparse.Namespace) -> None:
    """Meet the other processes, if there are any, where the launcher or you say."""
    by_hand = (options.coordinator, options.processes, options.process)
    if not options.distributed and by_hand == (None, None, None):
        check_single_process()
        return
    if None not in by_hand:
        who = f"process {options.process} of {options.processes}"
        where = f"at {options.coordinator}, 300 seconds at most"
        print(f"{who} waits for the others {where}", flush=True)
    set_deadline(CONNECTING, 600)  # JAX gives up after 300 seconds
    try:
        jax.distributed.initialize(
            *by_hand,
            coordinator_bind_address=options.coordinator,  # and at no other
            heartbeat_timeout_seconds=options.heartbeat,
        )
    except ValueError as error:
        print(
            f"cannot join the other processes: {error} A launcher that JAX knows says "
            "all this; otherwise give --coordinator, --processes, --process",
            file=sys.stderr,
        )
        sys.exit(NO_RESTART)
    deadlines.pop(CONNECTING)


def check_single_process() -> None:
    """End a process that a launcher has started beside others."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        if int(os.environ.get(name, 1)) > 1:
            exit_all(
                NO_RESTART,
                f"{name} is {os.environ[name]}: without --distributed (or, under "
                "torchrun, --coordinator, --processes and --process) each of these "
                "processes would train alone, and all save into one folder",
            )


def any_process(flag: bool) -> bool:
    """Whether it is so in any process: all ask together."""
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def claim_run(settings: dict, options: argparse.Namespace) -> None:
    """End the run unless the folder is free, and all processes have the same settings,
    as many devices as each other, and that folder."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        numbers = [*counts.values()]
        exit_all(
            NO_RESTART, f"processes need equal numbers of devices, and have {numbers}"
        )
    folder = options.folder
    why_not = ""
    if jax.process_index() == 0:
        why_not = claim_folder(folder, options.wait, options.tries)
    if any_process(why_not != ""):
        exit_all(NO_RESTART, why_not)
    if jax.process_count() == 1:
        return
    number = multihost_utils.broadcast_one_to_all(np.int32(time.time() % 2**31))
    token = folder / f"shared-{number}"
    if jax.process_index() == 0:
        token.touch()
    multihost_utils.sync_global_devices("the token is there")
    own = np.int32([zlib.crc32(repr(settings).encode()) >> 1, token.exists()])
    all_of_them = multihost_utils.process_allgather(own)  # i32[processes, 2]
    token.unlink(missing_ok=True)
    if (all_of_them[:, 0] != all_of_them[0, 0]).any():
        exit_all(NO_RESTART, f"all processes need the same {', '.join(settings)}")
    if not all_of_them[:, 1].all():
        exit_all(NO_RESTART, "--folder has to be on a disk that all processes share")


def exit_if_stopped(received: list[int]) -> None:
    """End a process that has been told to stop before it has met others, if any."""
    if received:
        print("stopped: nothing new is saved", flush=True)
        sys.exit(UNSAVED)


def should_stop(received: list[int], count: int) -> bool:
    """Whether to stop after this step, the count-th of this start: on this, all
    processes agree. (JAX counts from 1 too: it would miss a signal that comes before
    the first step of a run that goes on from step 40, if this began with 41.)"""
    if jax.process_count() == 1:  # JAX hears SIGTERM where it was initialized
        return bool(received) or multihost_utils.reached_preemption_sync_point(count)
    if received:  # Ctrl-C, or what came before they met: JAX itself listens to SIGTERM
        received.clear()
        os.kill(os.getpid(), signal.SIGTERM)
    return multihost_utils.reached_preemption_sync_point(count)


# -------------------------------------------------------------------------- the folder


claimed = ()  # a lock, the newest checkpoint ever, and the starts before this one


def claim_folder(folder: Path, seconds: float, tries: int) -> str:
    """Take the folder for as long as this process lives, and count this start: why not,
    or nothing. A lock that another job holds may be waited for."""
    global claimed
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names = [path.name for path in folder.iterdir()]
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(folder / "starts", flags, 0o644)
        if not acquire_lock(lock, seconds):
            return f"another job trains in {folder}: wait, or take another --folder"
        newest = max([int(name) for name in names if name.isdecimal()], default=0)
        known = re.match(rb" *(\d{1,12}) +(\d{1,12})\n", os.pread(lock, 26, 0))
        best, starts = map(int, known.groups()) if known else (0, 0)
        if newest > best:
            best, starts = newest, 0
        if starts >= tries:
            return (
                f"the last {starts} starts have saved nothing after step {best} in "
                f"{folder}: see why, and then start it once with --tries {starts + 1}"
            )
        write_starts(lock, best, starts + 1)
    except OSError as error:
        return f"cannot use the folder {folder}: {error.strerror}"
    claimed = (lock, best, starts)
    return ""


def acquire_lock(lock: int, seconds: float) -> bool:
    """Whether the lock of an open file could be had in so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        time.sleep(1)


def write_starts(lock: int, best: int, starts: int) -> None:
    """Note the newest checkpoint ever, and the starts since: in place, since the disk
    may be full."""
    os.pwrite(lock, b"%12d %12d\n" % (best, starts), 0)


def reset_starts() -> None:
    """Count no start of a run that is done."""
    if claimed:
        write_starts(*claimed[:2], 0)


# ------------------------------------------------------------------------- checkpoints


@jax.jit
def checksums(state) -> tuple[list[jax.Array], jax.Array]:
    """A checksum u32[] of each array, and whether all numbers are finite. Each byte
    counts by its value and its place, in integers: another byte gives another sum, and
    another number of devices the same."""
    sums, finite = [], jnp.bool_(True)
    for leaf in jax.tree.leaves(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if leaf.dtype == bool:
            leaf = leaf.astype(jnp.uint8)
        bits = jax.lax.bitcast_convert_type(leaf, jnp.uint8).astype(jnp.uint32)
        odd = 2 * jnp.arange(bits.size, dtype=jnp.uint32).reshape(bits.shape) + 1
        sums.append((bits * odd).sum(dtype=jnp.uint32))
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            finite &= jnp.isfinite(leaf).all()
    return sums, finite


def checksum_of(*values: object) -> int:
    """A checksum of settings and checksums."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


class Manager(ocp.CheckpointManager):
    """Orbax's, but it does not ask whether to stop, which the loop does."""

    def reached_preemption(self, step: int) -> bool:
        return False


class Checkpoints:
    """The checkpoints of a run in its folder: the newest three, each with the settings
    of the run and with checksums. Used with `with`."""

    def __init__(self, folder: Path, settings: dict, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.settings = json.loads(json.dumps(settings, default=str))  # as it is read
        self.saving = ""  # what is being saved
        options = ocp.CheckpointManagerOptions(
            max_to_keep=3,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(timeout_secs=math.ceil(seconds)),
        )
        self.manager = Manager(folder, options=options)
        # Reading may fail in one process only: it waits for no other.
        me = jax.process_index()
        alone = ocp.options.MultiprocessingOptions(
            primary_host=me, active_processes={me}, barrier_sync_key_prefix=str(me)
        )
        self.reader = ocp.Checkpointer(
            ocp.CompositeCheckpointHandler(), multiprocessing_options=alone
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if kind in (None, SystemExit) or jax.process_count() == 1:
            with self.naming_folder():
                self.manager.close()  # when the save under way is over
            deadlines.pop(self.saving, None)

    @contextlib.contextmanager
    def naming_folder(self) -> Iterator[None]:
        """Let an error name the folder."""
        try:
            yield
        except Exception as error:
            free = shutil.disk_usage(self.folder).free
            error.add_note(f"while saving in {self.folder}; free there: {free:,} bytes")
            raise

    def read(self, done: int, target) -> tuple[object, str]:
        """The state after so many steps and no words, or what is wrong with it. All
        processes call it, and find the same; other settings end the run."""
        path, saved, sums = self.folder / str(done), {}, []
        state, why = None, ""
        try:
            args = ocp.args.Composite(settings=ocp.args.JsonRestore())
            about = self.reader.restore(path, args=args).settings
            saved, sums = about["settings"], about["sums"]
            if about["sum"] != checksum_of(saved, sums):
                saved = {}
                raise ValueError("a byte of its settings has changed")
            if saved == self.settings:
                args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
                state = self.reader.restore(path, args=args).state
        except Exception as error:
            why = textwrap.shorten(f"{type(error).__name__}: {error}", 80)
        other = saved not in ({}, self.settings)
        anywhere = multihost_utils.process_allgather(np.bool_([other, bool(why)]))
        other, damaged = np.reshape(anywhere, (-1, 2)).any(axis=0)
        if other:
            now = self.settings
            told = [
                f"--{name} {saved.get(name)!r}, not with {now.get(name)!r}"
                for name in {**now, **saved}
                if saved.get(name) != now.get(name)
            ]
            exit_all(
                NO_RESTART,
                f"the run in {self.folder.name} was begun with {'; '.join(told)}: ask "
                "for the same again, or for another --folder",
            )
        if damaged:
            return None, why or "another process cannot read it"
        found, _ = jax.device_get(checksums(state))
        if [int(one) for one in found] != sums:
            return None, "a byte of it has changed: its checksum is another"
        return state, ""

    def restore(self, target) -> tuple[int, object]:
        """The newest state that is whole, laid out as target, and its step; or 0 and
        nothing in an empty folder. Checkpoints that are damaged get another name."""
        jax.eval_shape(checksums, target)  # what it cannot take, it says now
        damaged = {}
        steps = sorted(self.manager.all_steps(), reverse=True)[:10]
        steps = np.int32(steps + [-1] * (10 - len(steps)))
        if jax.process_count() > 1:  # another machine may see an older list
            steps = multihost_utils.broadcast_one_to_all(steps)
        for done in [int(step) for step in steps if step >= 0]:
            state, why = self.read(done, target)
            if not why:
                break
            damaged[done] = why
        else:
            if not damaged:
                return 0, None
            exit_all(
                NO_RESTART,
                f"no checkpoint in {self.folder} is whole: {damaged}. To begin anew: "
                f"mv '{self.folder}' '{self.folder}.damaged'",
            )
        for bad, why in damaged.items():
            name = f"{bad}.damaged-{time.time():.0f}"
            if jax.process_index() == 0:
                (self.folder / str(bad)).rename(self.folder / name)
            log(f"CHECKPOINT {bad} IS DAMAGED, and now named {name}:\n    {why}")
        if damaged:
            log(f"GOING BACK to step {done}")
            multihost_utils.sync_global_devices("damaged checkpoints have other names")
            self.manager.reload()
        return done, state

    def save(self, done: int, state) -> None:
        """Begin to save the state after so many steps, unless it is not finite or the
        disk is full, which ends the run."""
        sums, finite = jax.device_get(checksums(state))
        if not finite:
            exit_all(
                NO_RESTART, f"the state after step {done} is not finite, and not saved"
            )
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.folder).free
        if any_process(free < 1.1 * size + 2**20):
            exit_all(
                NO_RESTART,
                f"step {done} is not saved: of {self.folder} only {free:,} bytes are "
                f"free, and a checkpoint takes {size:,} and more",
            )
        sums = [int(one) for one in sums]
        about = {"settings": self.settings, "sums": sums}
        args = ocp.args.Composite(
            settings=ocp.args.JsonSave(
                about | {"sum": checksum_of(self.settings, sums)}
            ),
            state=ocp.args.StandardSave(state),
        )
        with self.naming_folder():
            self.manager.wait_until_finished()  # the save before: its limit holds
            deadlines.pop(self.saving, None)
            self.saving = f"the save of step {done} into {self.folder}"
            set_deadline(self.saving, self.seconds)
            if not self.manager.save(done, args=args):
                raise RuntimeError(f"Orbax has not saved step {done}")
        deadlines[self.saving] = (
            deadlines[self.saving][0],
            self.manager.is_saving_in_progress,
        )

    def check_save(self) -> None:
        """Raise the error of the save under way; when it is over, drop its limit."""
        with self.naming_folder():
            self.manager.check_for_errors()
        if not self.manager.is_saving_in_progress():
            deadlines.pop(self.saving, None)
