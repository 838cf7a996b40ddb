"""Start, stop, checkpoint and restart a training run of one or more processes.

train.py and fine_tune.py use it. They exit with one of these statuses:

0    the run is complete
2    an option or an input file is invalid
75   stopped by a signal after saving something new: start it again
76   stopped by a signal before there was anything new to save: start it again
78   do not restart: one line on stderr names the cause

Any other status is a crash.
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
from typing import NoReturn, TextIO

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

BAD_INPUT, SAVED, UNSAVED, NO_RESTART = 2, 75, 76, 78
CONNECTING = "connecting to the other processes"
RETRY_PAUSES = (5, 5, 0)  # seconds after each attempt to read a checkpoint

# -------------------------------------------------------------------- output and exit


def write_line(text: str, file: TextIO) -> None:
    """Print a line; if that fails, continue without output.

    If the reader of a pipe has ended, as `head` does, save and stop as on SIGTERM.
    """
    try:
        print(text, file=file, flush=True)
    except OSError as error:  # also: a closed terminal, a full disk
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())
        if isinstance(error, BrokenPipeError):
            os.kill(os.getpid(), signal.SIGTERM)


def log(text: str) -> None:
    """Print a line from process 0."""
    if jax.process_index() == 0:
        write_line(text, sys.stdout)


def log_step(step: int, text: str) -> None:
    """Print a line about a step, or about the state after it."""
    log(f"step {step:5}  {text}")


def log_losses(losses: list[tuple[int, jax.Array]], every: int, note: str = "") -> None:
    """Print the loss f32[] of every `every`-th step in a list, and clear the list.

    A note is printed after each loss.

    Exit with status 78 if a loss is not finite.
    """
    for step, loss in jax.device_get(losses):
        if not np.isfinite(loss):
            exit_all(NO_RESTART, f"the loss of step {step} is {loss}; not saved")
        if step % every == 0:
            log_step(step, f"loss {loss:.6f}{note}")
    losses.clear()


def exit_all(status: int, message: str) -> NoReturn:
    """Exit all processes, which call this together; process 0 prints the message."""
    if jax.process_index() == 0:
        if status == NO_RESTART and claimed:
            write_starts(*claimed)  # this start does not count as a failed one
        set_deadline("printing the last message", 60)
        if status in (BAD_INPUT, NO_RESTART):
            write_line(f"error: {message}", sys.stderr)
        else:
            write_line(message, sys.stdout)
        deadlines.pop("printing the last message")
    ignore_signals()
    sys.exit(status)


def exit_now(status: int, message: str, print_trace: Callable) -> NoReturn:
    """Exit this process without any cleanup, even if nothing reads its output.

    If printing blocks, faulthandler exits from a thread of its own, with status 1. That
    thread needs neither Python's lock nor a signal, which a container's first process
    would not get.
    """
    faulthandler.dump_traceback_later(10, exit=True, file=open(os.devnull, "w"))
    try:
        print_trace()
        print(message, file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def ignore_signals() -> None:
    """Ignore signals from now on, since one would change the exit status."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


# -------------------------------------------------------------------------- deadlines

deadlines = {}  # name of an operation: (time limit, function: is it still running?)


def set_deadline(
    name: str, seconds: float, is_running: Callable = lambda: True
) -> None:
    """Exit this process unless the operation ends, or gets a new deadline, in time."""
    deadlines[name] = (time.monotonic() + seconds, is_running)


def watch_deadlines(received: list[int], wakeup: int) -> None:
    """Exit this process after a missed deadline, or at a signal while it connects.

    Args:
      received: signals noted by Python's handlers.
      wakeup: file descriptor that becomes readable at a signal.
    """
    while True:
        before = time.monotonic()
        time.sleep(0.5)
        late = time.monotonic() - before - 0.5
        for name, (end, is_running) in list(deadlines.items()):
            if late > 5:  # the machine or this process was suspended
                deadlines[name] = (end + late, is_running)
            elif time.monotonic() > end and is_running():
                message = f"error: {name} has not ended in time; see the output above"
                if jax.distributed.is_initialized():
                    message += " and that of the other processes"
                exit_now(1, message, faulthandler.dump_traceback)
        if CONNECTING in deadlines:
            if received or select.select([wakeup], [], [], 0)[0]:
                exit_now(UNSAVED, "stopped: nothing new is saved", lambda: None)


def run(main: Callable, options: argparse.Namespace, received: list[int]) -> None:
    """Call main(options) while a thread watches the deadlines.

    If one of several processes fails, it exits at once, so that the others notice.
    """
    faulthandler.cancel_dump_traceback_later()  # set before the imports
    # Python's handlers wait until a blocking call returns; this pipe does not.
    wakeup, written = os.pipe()
    os.set_blocking(written, False)
    signal.set_wakeup_fd(written)
    thread = threading.Thread(
        target=watch_deadlines, args=(received, wakeup), daemon=True
    )
    thread.start()
    try:
        main(options)
        ignore_signals()
    except Exception as error:
        if jax.process_count() == 1:
            raise
        # A normal exit would wait for the other processes, and they for this one.
        message = f"error: {type(error).__name__}: {error}"
        message = " ".join([message, *getattr(error, "__notes__", [])])
        exit_now(1, " ".join(message.split()), traceback.print_exc)


# -------------------------------------------------------------------------- processes


def connect(options: argparse.Namespace) -> None:
    """Connect to the other processes that the launcher or the options name, if any."""
    by_hand = (options.coordinator, options.processes, options.process)
    if not options.distributed and by_hand == (None, None, None):
        check_single_process()
        return
    if None not in by_hand:
        print(
            f"process {options.process} of {options.processes} connects to "
            f"{options.coordinator} and waits up to 300 s for the others",
            flush=True,
        )
    set_deadline(CONNECTING, 600)  # JAX gives up after 300 seconds
    try:
        jax.distributed.initialize(
            *by_hand,
            coordinator_bind_address=options.coordinator,  # JAX's default: any
            heartbeat_timeout_seconds=options.heartbeat,
        )
    except ValueError as error:
        print(
            f"error: cannot connect to the other processes: {error} Use a launcher "
            "that JAX supports, or pass --coordinator, --processes and --process",
            file=sys.stderr,
        )
        sys.exit(NO_RESTART)
    deadlines.pop(CONNECTING)


def check_single_process() -> None:
    """Exit with status 78 if a launcher has started several processes."""
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        if int(os.environ.get(name, 1)) > 1:
            exit_all(
                NO_RESTART,
                f"{name} is {os.environ[name]}, but --distributed is missing (under "
                "torchrun: --coordinator, --processes and --process), so each process "
                "would train alone and save into the same folder",
            )


def any_process(flag: bool) -> bool:
    """Return whether the flag is set in any process. All processes call this."""
    return bool(np.any(multihost_utils.process_allgather(np.bool_(flag))))


def claim_run(common: dict, options: argparse.Namespace) -> None:
    """Lock the folder, and check that all processes agree. All processes call this.

    Exit with status 78 if another run uses the folder, if too many starts have failed,
    or if the processes differ in `common`, in the folder or in how many devices each
    of them has.
    """
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        exit_all(
            NO_RESTART,
            "all processes need the same number of devices, but have "
            f"{[*counts.values()]}",
        )
    any_process(False)  # Gloo connects here within 30 s; later, --wait would delay it
    folder = options.folder
    error = ""
    if jax.process_index() == 0:
        error = claim_folder(folder, options.wait, options.tries)
    if any_process(error != ""):
        exit_all(NO_RESTART, error)
    if jax.process_count() == 1:
        return
    number = multihost_utils.broadcast_one_to_all(np.int32(time.time() % 2**31))
    token = folder / f"shared-{number}"
    if jax.process_index() == 0:
        token.touch()
    multihost_utils.sync_global_devices("process 0 has created the token")
    own = np.int32([zlib.crc32(repr(common).encode()) >> 1, token.exists()])
    gathered = multihost_utils.process_allgather(own)  # i32[processes, 2]
    token.unlink(missing_ok=True)
    if (gathered[:, 0] != gathered[0, 0]).any():
        names = ", ".join(f"--{name.replace('_', '-')}" for name in common)
        exit_all(NO_RESTART, f"the processes differ in one of {names}")
    if not gathered[:, 1].all():
        exit_all(
            NO_RESTART, f"--folder {folder} is not on a disk that all processes share"
        )


def exit_if_stopped(received: list[int]) -> None:
    """Exit with status 76 if a signal came before training. Each process decides alone,
    so several connected processes must not call this."""
    if received:
        write_line("stopped: nothing new is saved", sys.stdout)
        sys.exit(UNSAVED)


def should_stop(received: list[int], count: int) -> bool:
    """Return whether to stop after this step; all processes get the same answer.

    Args:
      received: signals noted by Python's handlers.
      count: number of steps of this start. JAX counts from 1 too: with the step itself,
        a run that continues from step 40 would miss an earlier signal.
    """
    if jax.process_count() == 1:  # JAX handles SIGTERM if it was initialized
        return bool(received) or multihost_utils.reached_preemption_sync_point(count)
    if received:  # JAX handles SIGTERM; pass on the others, and what came before
        received.clear()
        os.kill(os.getpid(), signal.SIGTERM)
    return multihost_utils.reached_preemption_sync_point(count)


# ------------------------------------------------------------------------- the folder


claimed = ()  # in process 0: lock, newest good step, starts before this one


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is one of our checkpoints, perhaps a damaged one."""
    if not re.fullmatch(r"[1-9]\d{0,8}", path.name, re.ASCII) or path.is_symlink():
        return False
    if not path.is_dir():
        return False
    names = {child.name for child in path.iterdir()}
    return not names or bool(names & {"_CHECKPOINT_METADATA", "settings", "state"})


def claim_folder(folder: Path, seconds: float, tries: int) -> str:
    """Lock a folder until this process ends, and count this start.

    Args:
      folder: folder of the checkpoints; it is created if it is missing.
      seconds: how long to wait for another run's lock.
      tries: maximum number of starts that save nothing new.

    Returns:
      "", or why the folder cannot be used.
    """
    global claimed
    try:
        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        lock = os.open(folder / "starts", flags, 0o644)
        if not acquire_lock(lock, seconds):
            return f"another run uses {folder}; wait for it, or choose another --folder"
        steps = [int(path.name) for path in folder.iterdir() if is_checkpoint(path)]
        newest = max(steps, default=0)
        found = re.match(rb" *(\d{1,12}) +(\d{1,12})\n", os.pread(lock, 26, 0))
        best, starts = map(int, found.groups()) if found else (0, 0)
        if newest > best:
            best, starts = newest, 0
        if starts >= tries:
            return (
                f"the last {starts} starts have saved nothing after step {best} in "
                f"{folder}; find the cause, then start once with --tries {starts + 1}"
            )
        write_starts(lock, best, starts + 1)
    except OSError as error:
        return f"cannot use the folder {folder}: {error.strerror}"
    claimed = (lock, best, starts)
    return ""


def acquire_lock(lock: int, seconds: float) -> bool:
    """Lock an open file within so many seconds; return whether that succeeded."""
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
    """Write the newest good step, and the starts since then. The file never grows,
    since the disk may be full."""
    os.pwrite(lock, b"%12d %12d\n" % (best, starts), 0)


def set_best(best: int) -> None:
    """Compare later starts with this step, to which this start has fallen back."""
    global claimed
    if claimed:
        lock, _, starts = claimed
        claimed = (lock, best, starts)
        write_starts(lock, best, starts + 1)


def reset_starts() -> None:
    """Forget failed starts when a run is complete."""
    if claimed:
        write_starts(*claimed[:2], 0)


# ------------------------------------------------------------------------ checkpoints


@jax.jit
def checksums(state) -> tuple[list[jax.Array], jax.Array]:
    """Return a checksum u32[] of each array, and whether all values are finite.

    A checksum is a sum of integers, one for each byte, which depends on its value and
    position. It does not depend on the number of devices.
    """
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


def json_checksum(*values: object) -> int:
    """Return a checksum of values that JSON can store."""
    return zlib.crc32(json.dumps(values, sort_keys=True).encode())


class StepNames(ocp.path.step.NameFormat):
    """Orbax's names of checkpoints, without files and folders that are not ours."""

    standard = ocp.path.step.standard_name_format()

    def build_name(self, step: int) -> str:
        return self.standard.build_name(step)

    def find_all(self, base_path) -> Iterator:
        found = self.standard.find_all(base_path)
        return (one for one in found if is_checkpoint(Path(one.path)))

    def find_step(self, base_path, step: int):
        return self.standard.find_step(base_path, step)


class Manager(ocp.CheckpointManager):
    """Orbax's manager, which leaves signals to the training loop."""

    def reached_preemption(self, step: int) -> bool:
        return False


# This is Orbax 0.12's first API. With orbax.checkpoint.v1 of 0.12.8, a checkpoint that
# only one process fails to read makes the next save time out in all processes, and the
# manager's request to stop cannot be overridden. Move to v1 once both are solved.
class Checkpoints:
    """The newest three checkpoints of a run, each with its settings and checksums.

    Use it in a `with` statement: a program that ends during a save without closing the
    manager may hang.
    """

    def __init__(self, folder: Path, settings: dict, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        self.settings = json.loads(json.dumps(settings, default=str))  # as it is read
        self.saving = ""  # deadline of the save in progress
        options = ocp.CheckpointManagerOptions(
            max_to_keep=3,
            step_name_format=StepNames(),
            cleanup_tmp_directories=True,
            # Longer than the deadline of the save, whose message says more.
            async_options=ocp.AsyncOptions(timeout_secs=math.ceil(seconds) + 60),
        )
        self.manager = Manager(folder, options=options)
        # Reading may fail in one process only, so it must not wait for the others.
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
                self.manager.close()  # waits for the save in progress
            deadlines.pop(self.saving, None)

    @contextlib.contextmanager
    def naming_folder(self) -> Iterator[None]:
        """Add the folder and its free space to an error."""
        try:
            yield
        except Exception as error:
            free = shutil.disk_usage(self.folder).free
            error.add_note(f"while saving in {self.folder}; free there: {free:,} bytes")
            raise

    def read_alone(self, step: int, target) -> tuple[dict, list[int], object]:
        """Return the settings, checksums and state of a checkpoint, without waiting for
        other processes. The state is None if the settings are not those of this run.

        Raises any error of Orbax, and ValueError if the settings are damaged.
        """
        path = self.folder / str(step)
        args = ocp.args.Composite(settings=ocp.args.JsonRestore())
        about = self.reader.restore(path, args=args).settings
        saved, sums = about["settings"], about["sums"]
        if about["sum"] != json_checksum(saved, sums):
            raise ValueError("its settings have a wrong checksum")
        if saved != self.settings:
            return saved, sums, None
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        return saved, sums, self.reader.restore(path, args=args).state

    def read(self, step: int, target) -> tuple[object, str]:
        """Return the state of a checkpoint and "", or None and what is wrong with it.

        All processes call this, and get the same outcome. Exit with status 78 if the
        settings are not those of this run.
        """
        for pause in RETRY_PAUSES:  # a network file system may fail for a moment
            saved, sums, state, error = self.settings, [], None, ""
            try:
                saved, sums, state = self.read_alone(step, target)
            except Exception as cause:
                error = textwrap.shorten(f"{type(cause).__name__}: {cause}", 80)
                if jax.process_index():  # its output is nowhere else
                    print(f"cannot read checkpoint {step}: {error}", file=sys.stderr)
            flags = np.bool_([saved != self.settings, error != ""])
            flags = multihost_utils.process_allgather(flags)  # bool[processes, 2]
            other, failed = np.reshape(flags, (-1, 2)).any(axis=0)
            if other or not failed:
                break
            time.sleep(pause)
        if other:
            now = self.settings
            changes = [
                f"--{name.replace('_', '-')} {saved.get(name)!r}, not {now.get(name)!r}"
                for name in {**now, **saved}
                if saved.get(name) != now.get(name)
            ]
            exit_all(
                NO_RESTART,
                f"the run in {self.folder.name} was started with {'; '.join(changes)}; "
                "use the same value, or another --folder",
            )
        if failed:
            return None, f"cannot be read ({error or 'by another process'})"
        found, _ = jax.device_get(checksums(state))
        if [int(one) for one in found] != sums:
            return None, "is damaged: it has a wrong checksum"
        return state, ""

    def restore(self, target) -> tuple[int, object]:
        """Return the step and state of the newest good checkpoint, or 0 and None.

        A newer checkpoint that is damaged or cannot be read is renamed. Exit with
        status 78 if there are checkpoints, but no good one.

        Args:
          target: tree of jax.ShapeDtypeStruct with the shardings to restore into.
        """
        jax.eval_shape(checksums, target)  # raises for types that it does not support
        bad = {}
        steps = sorted(self.manager.all_steps(), reverse=True)[:10]
        steps = np.int32(steps + [-1] * (10 - len(steps)))
        if jax.process_count() > 1:  # another machine may see an older list
            steps = multihost_utils.broadcast_one_to_all(steps)
        for step in [int(step) for step in steps if step >= 0]:
            state, error = self.read(step, target)
            if not error:
                break
            bad[step] = error
        else:
            if not bad:
                return 0, None
            errors = "; ".join(f"{step} {error}" for step, error in bad.items())
            exit_all(
                NO_RESTART,
                f"no checkpoint in {self.folder} can be restored: {errors}; to begin "
                f"again: mv '{self.folder}' '{self.folder}.damaged'",
            )
        for old, error in bad.items():
            kind = "damaged" if "checksum" in error else "unreadable"
            name = f"{old}.{kind}-{time.time():.0f}"
            if jax.process_index() == 0:
                (self.folder / str(old)).rename(self.folder / name)
            log(f"checkpoint {old} {error}; renamed to {name}")
        if bad:
            log(f"falling back to step {step}")
            set_best(step)
            multihost_utils.sync_global_devices("bad checkpoints are renamed")
            self.manager.reload()
        return step, state

    def save(self, step: int, state) -> None:
        """Start to save the state after a step, in the background.

        Exit with status 78 if a value is not finite, the disk is full, or the name of
        the checkpoint is taken.
        """
        sums, finite = jax.device_get(checksums(state))
        if not finite:
            exit_all(
                NO_RESTART, f"the state after step {step} is not finite; not saved"
            )
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self.folder).free
        if any_process(free < 1.1 * size + 2**20):
            exit_all(
                NO_RESTART,
                f"step {step} is not saved: {self.folder} has {free:,} bytes free, and "
                f"a checkpoint needs more than {size:,}",
            )
        path = self.folder / str(step)
        if any_process(os.path.lexists(path) and not is_checkpoint(path)):
            exit_all(
                NO_RESTART,
                f"step {step} is not saved: {path} is not a checkpoint; rename it",
            )
        sums = [int(one) for one in sums]
        about = {"settings": self.settings, "sums": sums}
        about["sum"] = json_checksum(self.settings, sums)
        args = ocp.args.Composite(
            settings=ocp.args.JsonSave(about), state=ocp.args.StandardSave(state)
        )
        with self.naming_folder():
            self.manager.wait_until_finished()  # its own deadline still holds
            deadlines.pop(self.saving, None)
            self.saving = f"the save of step {step} in {self.folder}"
            set_deadline(self.saving, self.seconds)
            if not self.manager.save(step, args=args):
                raise RuntimeError(f"Orbax has not saved step {step}")
        end, _ = deadlines[self.saving]
        deadlines[self.saving] = (end, self.manager.is_saving_in_progress)

    def check_save(self) -> None:
        """Raise an error of the save in progress; drop its deadline once it is done."""
        with self.naming_folder():
            self.manager.check_for_errors()
        if not self.manager.is_saving_in_progress():
            deadlines.pop(self.saving, None)
