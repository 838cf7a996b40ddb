"""Train a small network on all devices of all processes, and restart where it stopped.

python train.py                 on the devices that JAX finds
python train.py --emulate 8     on eight devices that the CPU emulates
python train.py --distributed   as one of the processes that a launcher starts

It needs lifecycle.py in the same folder, which documents the exit statuses.
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

SETTINGS = ("steps", "batch", "rate", "seed", "data")  # they determine all losses
COMMON = (*SETTINGS, "save_every", "log_every")  # equal in all processes of a start


def at_least(minimum: int) -> Callable[[str], int]:
    """Return a function that parses an integer and rejects smaller ones."""

    def parse(text: str) -> int:
        if int(text) < minimum:
            raise argparse.ArgumentTypeError(f"{text} is less than {minimum}")
        return int(text)

    parse.__name__ = "integer"  # for argparse's messages
    return parse


def positive(text: str) -> float:
    """Parse a finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return float(text)


def read_options() -> argparse.Namespace:
    """Return the options of the command line; exit with status 2 if one is invalid."""
    parser = argparse.ArgumentParser(
        usage="python train.py [options]",
        description="Train a network on all devices, and restart where it stopped.",
        epilog="Exit statuses: 0 complete; 2 invalid option; 75, 76 stopped by a "
        "signal, start it again; 78 do not restart.",
        allow_abbrev=False,
    )
    count, seconds = at_least(1), positive

    def option(group, name, metavar, kind, default, text):
        text += f" (default: {default})" if default is not None else ""
        group.add_argument(name, metavar=metavar, type=kind, default=default, help=text)

    group = parser.add_argument_group("training")
    option(group, "--steps", "N", count, 960, "number of training steps")
    option(group, "--batch", "N", count, 64, "examples per step, over all devices")
    option(group, "--rate", "X", positive, 3e-3, "maximum learning rate")
    option(group, "--seed", "N", at_least(0), 0, "seed of weights and data order")
    loaders, text = ("numpy", "grain"), "data loader (default: numpy)"
    group.add_argument("--data", choices=loaders, default="numpy", help=text)
    option(group, "--log-every", "N", count, 80, "steps between printed losses")

    group = parser.add_argument_group("checkpoints and restarts")
    option(group, "--folder", "DIR", Path, Path("checkpoints"), "checkpoint folder")
    option(group, "--save-every", "N", count, 240, "steps between checkpoints")
    option(group, "--step-limit", "S", seconds, 600, "maximum seconds for a step")
    option(group, "--save-limit", "S", seconds, 45, "maximum seconds for a save")
    option(group, "--tries", "N", count, 3, "maximum starts without a new save")
    option(group, "--wait", "S", count, 1, "seconds to wait for another run's lock")

    group = parser.add_argument_group("devices and processes")
    option(group, "--emulate", "N", count, None, "emulate N devices on the CPU")
    text = "connect to the processes of a launcher"
    group.add_argument("--distributed", action="store_true", help=text)
    option(group, "--coordinator", "HOST:PORT", str, None, "address of process 0")
    option(group, "--processes", "N", count, None, "number of processes")
    option(group, "--process", "I", at_least(0), None, "index of this process, from 0")
    option(
        group, "--heartbeat", "S", count, 100, "maximum silence of a process in seconds"
    )
    options = parser.parse_args()
    options.folder = options.folder.resolve()  # Orbax requires an absolute path
    if options.data == "grain" and not importlib.util.find_spec("grain"):
        parser.error("--data grain needs Grain: pip install grain")
    if options.coordinator and not re.fullmatch(r".+:\d+", options.coordinator):
        parser.error(f"--coordinator {options.coordinator} is not HOST:PORT")
    if None not in (options.process, options.processes):
        if options.process >= options.processes:
            parser.error(
                f"--process {options.process} is not below --processes "
                f"{options.processes}"
            )
    return options


if __name__ == "__main__":
    options = read_options()  # before the imports below, which take seconds

import jax
import jax.numpy as jnp
import lifecycle
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding
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


class Batch(NamedTuple):
    """Images of digits and their labels."""

    images: np.ndarray  # f32[n, 64]
    labels: np.ndarray  # i32[n]


def load_data() -> tuple[Batch, Batch]:
    """Return 1,536 examples for training and 261 for testing."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = np.float32(digits.data[order] / 16)
    labels = np.int32(digits.target[order])
    return Batch(images[:1536], labels[:1536]), Batch(images[1536:], labels[1536:])


@functools.lru_cache(maxsize=1)  # shuffling a million examples takes a while
def epoch_order(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return the order of all examples in an epoch: i64[count]."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def local_indices(batch_sharding: NamedSharding, batch: int) -> np.ndarray:
    """Return which examples of a batch belong to this process: i64[local]."""
    slices = batch_sharding.addressable_devices_indices_map((batch,)).values()
    return np.unique([np.arange(batch)[index] for index in slices])


def train_batch(train: Batch, seed: int, step: int, batch: int, local) -> Batch:
    """Return these examples of a step's batch, which depends on seed and step only."""
    count = len(train.labels)
    epoch, index = divmod(step, count // batch)  # drops an incomplete batch
    chosen = epoch_order(count, seed, epoch)[index * batch + local]
    return Batch(train.images[chosen], train.labels[chosen])


def numpy_batches(
    train: Batch, seed: int, batch: int, local, step: int
) -> Iterator[Batch]:
    """Yield this process's part of each batch, starting with that of a step."""
    while True:
        yield train_batch(train, seed, step, batch, local)
        step += 1


def grain_batches(
    train: Batch, seed: int, batch: int, local, step: int
) -> Iterator[Batch]:
    """Yield the same in Grain's order; its threads read ahead."""
    import grain

    def load(indices):
        own = indices[local]
        return Batch(train.images[own], train.labels[own])

    indices = grain.MapDataset.range(len(train.labels)).seed(seed).shuffle()
    batches = indices.batch(batch, drop_remainder=True).repeat()
    iterator = iter(batches.map(load).to_iter_dataset())
    iterator.set_state({"next_index": step})
    return iterator


def test_batch(test: Batch, first: int, batch: int, local) -> tuple[Batch, np.ndarray]:
    """Return these examples of a padded test batch, and which are real: bool[local]."""
    images = test.images[first : first + batch]
    labels = test.labels[first : first + batch]
    count = len(labels)
    images = np.pad(images, [(0, batch - count), (0, 0)])
    labels = np.pad(labels, (0, batch - count))
    real = np.arange(batch) < count
    return Batch(images[local], labels[local]), real[local]


def make_global(tree, batch_sharding: NamedSharding):
    """Return global arrays, of which each process has its part of the batch."""
    make = functools.partial(jax.make_array_from_process_local_data, batch_sharding)
    return jax.tree.map(make, tree)


class State(NamedTuple):
    """What a checkpoint stores."""

    step: jax.Array  # i32[]
    params: dict
    opt_state: optax.OptState


def init_params(key: jax.Array) -> dict:
    """Return the parameters of a network with one hidden layer."""
    keys, init = jax.random.split(key), jax.nn.initializers.lecun_normal()
    return {
        "hidden": {"kernel": init(keys[0], (64, 128)), "bias": jnp.zeros(128)},
        "output": {"kernel": init(keys[1], (128, 10)), "bias": jnp.zeros(10)},
    }


def apply(params: dict, images: jax.Array) -> jax.Array:
    """Return the logits f32[n, 10] of images f32[n, 64]."""
    hidden, output = params["hidden"], params["output"]
    x = jax.nn.relu(images @ hidden["kernel"] + hidden["bias"])
    return x @ output["kernel"] + output["bias"]


def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    """Return Adam, whose learning rate rises for a tenth of the steps, then falls."""
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 10, steps))


def init_state(seed: int, optimizer: optax.GradientTransformation) -> State:
    """Return the state before the first step."""
    params = init_params(jax.random.key(seed))
    return State(jnp.int32(0), params, optimizer.init(params))


def state_shardings(shapes: State, mesh: Mesh) -> State:
    """Return the sharding of each array of a state: over its first dimension, or
    replicated if the number of devices does not divide that."""

    def sharding(leaf):
        divides = leaf.ndim > 0 and leaf.shape[0] % mesh.size == 0
        return NamedSharding(mesh, P("data") if divides else P())

    return jax.tree.map(sharding, shapes)


cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def train_step(
    optimizer: optax.GradientTransformation, state: State, batch: Batch
) -> tuple[State, jax.Array]:
    """Return the state after a step on a global batch, and the mean loss f32[]."""

    def mean_loss(params):
        return cross_entropy(apply(params, batch.images), batch.labels).mean()

    loss, grads = jax.value_and_grad(mean_loss)(state.params)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    return State(state.step + 1, params, opt_state), loss


def test_step(state: State, batch: Batch, real: jax.Array) -> jax.Array:
    """Return the sums f32[2] of losses and correct predictions on real examples."""
    logits = apply(state.params, batch.images)
    loss = cross_entropy(logits, batch.labels)
    correct = logits.argmax(-1) == batch.labels
    return jnp.where(real, jnp.stack([loss, correct]), 0).sum(axis=1)


def evaluate(
    test_step: Callable, state: State, test: Batch, batch: int, batch_sharding, local
) -> str:
    """Return a line with the mean loss and the correct predictions on the test set."""
    count = len(test.labels)
    sums = np.zeros(2)
    for first in range(0, count, batch):
        padded = test_batch(test, first, batch, local)
        sums += test_step(state, *make_global(padded, batch_sharding))
    loss, correct = sums
    return f"test loss {loss / count:.6f}, {correct:.0f} of {count} correct"


def main(options: argparse.Namespace) -> None:
    """Train from the newest good checkpoint, or from the start."""
    set_deadline("the next step", options.step_limit + options.wait)
    lifecycle.exit_if_stopped(received)
    if options.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.emulate)
    lifecycle.connect(options)
    settings = {name: getattr(options, name) for name in SETTINGS}
    common = {name: getattr(options, name) for name in COMMON}
    lifecycle.claim_run(common, options)
    train, test = load_data()

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    if options.batch % mesh.size or options.batch > len(train.labels):
        exit_all(
            NO_RESTART,
            f"--batch {options.batch} is not a multiple of the {mesh.size} devices, or "
            f"more than the {len(train.labels)} training examples",
        )
    kind = jax.devices()[0].device_kind
    log(f"{mesh.size} {kind} devices, {options.batch // mesh.size} examples on each")

    optimizer = make_optimizer(options.rate, options.steps)
    init = functools.partial(init_state, options.seed, optimizer)
    shapes = jax.eval_shape(init)
    state_sharding = state_shardings(shapes, mesh)
    batch_sharding = NamedSharding(mesh, P("data"))
    replicated = NamedSharding(mesh, P())
    jit_train_step = jax.jit(
        functools.partial(train_step, optimizer),
        in_shardings=(state_sharding, batch_sharding),
        out_shardings=(state_sharding, replicated),
        donate_argnums=0,
    )
    jit_test_step = jax.jit(
        test_step,
        in_shardings=(state_sharding, batch_sharding, batch_sharding),
        out_shardings=replicated,
    )
    must_wait = kind == "cpu" and jax.__version_info__ < (0, 12)  # emulated, and old

    local = local_indices(batch_sharding, options.batch)
    score = functools.partial(
        evaluate,
        jit_test_step,
        test=test,
        batch=options.batch,
        batch_sharding=batch_sharding,
        local=local,
    )
    make_batches = {"numpy": numpy_batches, "grain": grain_batches}[options.data]
    target = jax.tree.map(
        lambda leaf, sharding: leaf.update(sharding=sharding), shapes, state_sharding
    )
    with Checkpoints(options.folder, settings, options.save_limit) as checkpoints:
        first, state = checkpoints.restore(target)
        if first:
            log_step(first, "restored")
            log_step(first, score(state))
        else:
            state = jax.jit(init, out_shardings=state_sharding)()
        if jax.process_count() == 1:
            lifecycle.exit_if_stopped(received)
        batches = make_batches(train, options.seed, options.batch, local, first)
        step, stopping = first, False
        losses = []  # pairs of step and loss, not yet printed
        while step < options.steps and not stopping:
            set_deadline("the next step", options.step_limit)
            batch = make_global(next(batches), batch_sharding)
            state, loss = jit_train_step(state, batch)
            if must_wait:
                loss.block_until_ready()
            step += 1
            # Ask only once per step, so that every stop is preceded by a save.
            stop = lifecycle.should_stop(received, step - first)
            stopping = stop and step < options.steps
            if step % options.log_every == 0:
                log_losses(losses, options.log_every)  # the devices have queued steps
            losses.append((step, loss))
            checkpoints.check_save()
            if step % options.save_every == 0 or step == options.steps or stopping:
                log_losses(losses, options.log_every)
                checkpoints.save(step, state)
                if not stopping:
                    log_step(step, score(state))

        set_deadline("the next step", math.inf)  # a save has a deadline of its own
    if stopping:
        exit_all(SAVED, f"stopped: run the same command to continue after step {step}")
    lifecycle.reset_starts()


if __name__ == "__main__":
    lifecycle.run(main, options, received)
