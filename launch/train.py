"""Train a small network on all devices of all processes, and go on where it stopped.

python train.py                 on the devices that JAX finds
python train.py --emulate 8     on eight devices, played by the CPU
python train.py --distributed   as one of the processes that a launcher starts

It needs lifecycle.py beside it, which says what its exit status means.
"""

import faulthandler
import signal

received = []  # signals: from here on they are noted and end nothing

if __name__ == "__main__":
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: received.append(number))
    faulthandler.dump_traceback_later(600, exit=True)  # in case an import hangs

import argparse
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

SETTINGS = ("steps", "batch", "rate", "seed", "data")  # what decides the numbers
TOGETHER = (*SETTINGS, "save_every", "log_every")  # equal in all processes of a start


def at_least(least: int) -> Callable[[str], int]:
    """What reads a whole number that is not smaller."""

    def read(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text} is less than {least}")
        return int(text)

    return read


def positive(text: str) -> float:
    """What reads a finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no finite number above 0")
    return float(text)


def read_options() -> argparse.Namespace:
    """The options of the command line, or their defaults."""
    usage = "python train.py [options], which --help explains"
    parser = argparse.ArgumentParser(usage=usage, allow_abbrev=False)
    option, count = parser.add_argument, at_least(1)
    option("--steps", type=count, default=960, help="training steps in all")
    option("--batch", type=count, default=64, help="rows a step, on all devices")
    option("--rate", type=positive, default=3e-3, help="the highest learning rate")
    option("--seed", type=at_least(0), default=0, help="of weights and order")
    option("--data", choices=("numpy", "grain"), default="numpy", help="who reads")
    option("--folder", type=Path, default=Path("checkpoints"), help="where to save")
    option("--save-every", type=count, default=240, help="steps from save to save")
    option("--log-every", type=count, default=80, help="steps from line to line")
    option("--step-limit", type=positive, default=600, help="seconds without a step")
    option("--save-limit", type=positive, default=45, help="seconds for a save")
    option("--tries", type=count, default=3, help="starts that may save nothing new")
    option("--wait", type=count, default=1, help="seconds for another job to end")
    option("--emulate", type=count, help="devices for the CPU of a process to play")
    option("--distributed", action="store_true", help="be one of several processes")
    option("--coordinator", help="address of process 0, as HOST:PORT")
    option("--processes", type=count, help="how many processes there are")
    option("--process", type=at_least(0), help="the number of this one, from 0")
    option("--heartbeat", type=count, default=100, help="seconds to wait for a sign")
    options = parser.parse_args()
    options.folder = options.folder.resolve()  # Orbax asks for an absolute path
    if options.data == "grain" and not importlib.util.find_spec("grain"):
        parser.error("--data grain needs Grain: pip install grain")
    if options.coordinator and not re.fullmatch(r".+:\d+", options.coordinator):
        parser.error(
            f"--coordinator {options.coordinator} is not of the form HOST:PORT"
        )
    if None not in (options.process, options.processes):
        if options.process >= options.processes:
            parser.error(f"--process counts from 0: to {options.processes - 1}")
    return options


if __name__ == "__main__":
    options = read_options()  # before what follows, which takes seconds

import jax
import jax.numpy as jnp
import lifecycle
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from lifecycle import (
    NO_RESTART,
    SAVED,
    Checkpoints,
    exit_all,
    log,
    log_losses,
    log_step,
    set_deadline,
)
from sklearn.datasets import load_digits


class Rows(NamedTuple):
    """Digits and what they show."""

    images: np.ndarray  # f32[n, 64]
    labels: np.ndarray  # i32[n]


def load_rows() -> tuple[Rows, Rows]:
    """1,536 rows to train on, and 261 to test on."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = np.float32(digits.data[order] / 16)
    labels = np.int32(digits.target[order])
    return Rows(images[:1536], labels[:1536]), Rows(images[1536:], labels[1536:])


@functools.lru_cache(maxsize=1)  # a million rows take a while to shuffle
def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of all rows in an epoch: i64[count]."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def places_here(split: NamedSharding, batch: int) -> np.ndarray:
    """The places in a batch that belong to devices of this process: i64[here]."""
    cuts = split.addressable_devices_indices_map((batch,)).values()
    return np.unique([np.arange(batch)[cut] for cut in cuts])


def train_batch(train: Rows, seed: int, step: int, batch: int, here) -> Rows:
    """The rows of a step at these places, the same whenever they are asked for."""
    count = len(train.labels)
    epoch, place = divmod(step, count // batch)  # the rest of an epoch is left out
    rows = order_of(count, seed, epoch)[place * batch + here]
    return Rows(train.images[rows], train.labels[rows])


def numpy_batches(
    train: Rows, seed: int, batch: int, here, step: int
) -> Iterator[Rows]:
    """This process's part of each batch, from a step on."""
    while True:
        yield train_batch(train, seed, step, batch, here)
        step += 1


def grain_batches(
    train: Rows, seed: int, batch: int, here, step: int
) -> Iterator[Rows]:
    """The same, in an order of Grain's, which reads ahead of the step by threads."""
    import grain

    def load(numbers):
        own = numbers[here]
        return Rows(train.images[own], train.labels[own])

    numbers = grain.MapDataset.range(len(train.labels)).seed(seed).shuffle()
    whole = numbers.batch(batch, drop_remainder=True)
    batches = iter(whole.repeat().map(load).to_iter_dataset())
    batches.set_state({"next_index": step})
    return batches


def test_batch(test: Rows, first: int, batch: int, here) -> tuple[Rows, np.ndarray]:
    """The rows from first on, padded to a batch, and which are real: bool[batch]; of
    both, what stands at these places."""
    images = test.images[first : first + batch]
    labels = test.labels[first : first + batch]
    count = len(labels)
    images = np.pad(images, [(0, batch - count), (0, 0)])
    labels = np.pad(labels, (0, batch - count))
    real = np.arange(batch) < count
    return Rows(images[here], labels[here]), real[here]


def put(rows, split: NamedSharding):
    """Make global arrays of what each process has of a batch."""
    make = functools.partial(jax.make_array_from_process_local_data, split)
    return jax.tree.map(make, rows)


class Net(nn.Module):
    """f32[n, 64] -> f32[n, 10] logits, through one hidden layer."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(10)(x)


def new_state(seed: int, rate: float, steps: int) -> TrainState:
    """Parameters and Adam's state before the first step."""
    net = Net()
    params = net.init(jax.random.key(seed), jnp.zeros((1, 64)))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps)
    adam = optax.adam(schedule)
    return TrainState.create(apply_fn=net.apply, params=params, tx=adam)


def lay_out(shapes, mesh: jax.sharding.Mesh):
    """Where a state of these shapes lies: cut along its rows, or else copied."""

    def place(leaf):
        divides = leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
        return NamedSharding(mesh, P("data") if divides else P())

    return jax.tree.map(place, shapes)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def train_step(state: TrainState, rows: Rows) -> tuple[TrainState, jax.Array]:
    """One step on a whole batch: the next state, and the mean loss f32[] before it."""

    def mean_loss(params):
        logits = state.apply_fn({"params": params}, rows.images)
        return cross_entropy(logits, rows.labels).mean()

    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    return state.apply_gradients(grads=grads), loss


def test_step(state: TrainState, rows: Rows, real: jax.Array) -> jax.Array:
    """The loss and the right answers, f32[2], each added up over the real rows."""
    logits = state.apply_fn({"params": state.params}, rows.images)
    loss = cross_entropy(logits, rows.labels)
    right = logits.argmax(-1) == rows.labels
    return jnp.where(real, jnp.stack([loss, right]), 0).sum(axis=1)


def evaluate(score, state: TrainState, test: Rows, batch: int, split, here) -> str:
    """The mean loss and the right answers on all test rows, in words."""
    count = len(test.labels)
    sums = np.zeros(2)
    for first in range(0, count, batch):
        rows, real = put(test_batch(test, first, batch, here), split)
        sums += score(state, rows, real)
    loss, right = sums
    return f"test loss {loss / count:.6f}, {right:.0f} of {count} right"


def main(options: argparse.Namespace) -> None:
    """Train, from the newest checkpoint that is whole, if there is one."""
    set_deadline("the next step", options.step_limit)
    lifecycle.exit_if_stopped(received)
    if options.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.emulate)
    lifecycle.connect(options)
    settings = {name: getattr(options, name) for name in SETTINGS}
    together = {name: getattr(options, name) for name in TOGETHER}
    lifecycle.claim_run(together, options)
    train, test = load_rows()

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    if options.batch % mesh.size or options.batch > len(train.labels):
        exit_all(
            NO_RESTART,
            f"--batch {options.batch} will not do: it has to be a multiple of the "
            f"{mesh.size} devices, and {len(train.labels)} at most",
        )
    kind = jax.devices()[0].device_kind
    share = options.batch // mesh.size
    log(f"{mesh.size} {kind} devices, {share} rows of a batch on each")

    fresh = functools.partial(new_state, options.seed, options.rate, options.steps)
    shapes = jax.eval_shape(fresh)
    cut = lay_out(shapes, mesh)
    split = NamedSharding(mesh, P("data"))
    copied = NamedSharding(mesh, P())
    step = jax.jit(
        train_step,
        in_shardings=(cut, split),
        out_shardings=(cut, copied),
        donate_argnums=0,
    )
    score = jax.jit(test_step, in_shardings=(cut, split, split), out_shardings=copied)
    must_wait = kind == "cpu" and jax.__version_info__ < (0, 12)  # emulated, and old

    here = places_here(split, options.batch)
    read = {"numpy": numpy_batches, "grain": grain_batches}[options.data]
    like = jax.tree.map(lambda leaf, place: leaf.update(sharding=place), shapes, cut)
    with Checkpoints(options.folder, settings, options.save_limit) as checkpoints:
        begun, state = checkpoints.restore(like)
        if not begun:
            state = jax.jit(fresh, out_shardings=cut)()
        else:
            log_step(begun, "restored")
            log_step(begun, evaluate(score, state, test, options.batch, split, here))
        if jax.process_count() == 1:
            lifecycle.exit_if_stopped(received)
        batches = read(train, options.seed, options.batch, here, begun)
        done, stopping = begun, False
        late = []  # steps with their losses, to be looked at later
        while done < options.steps and not stopping:
            set_deadline("the next step", options.step_limit)
            state, loss = step(state, put(next(batches), split))
            if must_wait:
                loss.block_until_ready()
            done += 1
            # Looked at once a step: no stop without a save.
            stop = lifecycle.should_stop(received, done - begun)
            stopping = stop and done < options.steps
            if done % options.log_every == 0:
                log_losses(late, options.log_every)  # the interval is queued behind
            late.append((done, loss))
            checkpoints.check_save()
            if done % options.save_every == 0 or done == options.steps or stopping:
                log_losses(late, options.log_every)
                checkpoints.save(done, state)
                if not stopping:
                    score_now = evaluate(score, state, test, options.batch, split, here)
                    log_step(done, score_now)

        set_deadline(
            "the next step", math.inf
        )  # there is none, and a save has its own limit
    if stopping:
        exit_all(SAVED, f"stopped: the same command goes on after step {done}")
    lifecycle.reset_starts()


if __name__ == "__main__":
    lifecycle.run(main, options, received)
