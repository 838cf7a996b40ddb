"""Train a small network on all devices of all processes, and go on where it stopped.

python train.py                 on the devices that JAX finds
python train.py --emulate 8     on eight devices, played by the CPU
python train.py --distributed   as one of the processes that a launcher starts
"""

import argparse
import functools
import importlib.util
import os
import signal
import sys
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sklearn.datasets import load_digits

SETTINGS = ("steps", "batch", "rate", "seed", "data")  # what decides the numbers


def read_options() -> argparse.Namespace:
    """The options of the command line, or their defaults."""
    parser = argparse.ArgumentParser(description="Train on all devices.")
    option = parser.add_argument
    option("--steps", type=int, default=960, help="training steps in all")
    option("--batch", type=int, default=64, help="rows a step, on all devices together")
    option("--rate", type=float, default=3e-3, help="the highest learning rate")
    option("--seed", type=int, default=0, help="of the weights and of the order")
    option("--data", choices=("numpy", "grain"), default="numpy", help="who reads")
    option("--folder", type=Path, default="checkpoints", help="where to save")
    option("--save-every", type=int, default=240, help="steps from save to save")
    option("--log-every", type=int, default=80, help="steps from line to line")
    option("--emulate", type=int, help="devices for the CPU of a process to play")
    option("--distributed", action="store_true", help="be one of several processes")
    option("--coordinator", help="address of process 0, as HOST:PORT")
    option("--processes", type=int, help="how many processes there are")
    option("--process", type=int, help="the number of this one, from 0")
    option("--heartbeat", type=int, default=100, help="seconds to wait for the silent")
    return parser.parse_args()


def start(options: argparse.Namespace) -> None:
    """Meet the other processes, if there are any, where the launcher or you say."""
    if options.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.emulate)
    by_hand = (options.coordinator, options.processes, options.process)
    if options.distributed or by_hand != (None, None, None):
        if None not in by_hand:
            who = f"process {options.process} of {options.processes}"
            where = f"at {options.coordinator}, 300 seconds at most"
            print(f"{who} waits for the others {where}", flush=True)
        try:
            jax.distributed.initialize(
                *by_hand, heartbeat_timeout_seconds=options.heartbeat
            )
        except ValueError as error:
            sys.exit(
                f"cannot join the other processes: {error} A launcher that JAX knows "
                "says all this; otherwise give --coordinator, --processes, --process"
            )
        return
    for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
        if int(os.environ.get(name, 1)) > 1:
            sys.exit(
                f"{name} is {os.environ[name]}: without --distributed (or, under "
                "torchrun, --coordinator, --processes and --process) each of these "
                "processes would train alone, and all save into one folder"
            )


def fail(text: str) -> None:
    """End the program; of several processes, one says why."""
    sys.exit(text if jax.process_index() == 0 else 1)


def agree(settings: dict, folder: Path) -> None:
    """Fail unless all processes have the same settings, as many devices as each other,
    and one folder."""
    if jax.process_count() == 1:
        return
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        fail(f"processes need equal numbers of devices, and have {[*counts.values()]}")
    number = multihost_utils.broadcast_one_to_all(np.int32(time.time() % 2**31))
    token = folder / f"shared-{number}"
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        token.touch()
    multihost_utils.sync_global_devices("the token is there")
    own = np.int32([zlib.crc32(repr(settings).encode()) >> 1, token.exists()])
    all_of_them = multihost_utils.process_allgather(own)  # i32[processes, 2]
    token.unlink(missing_ok=True)
    if (all_of_them[:, 0] != all_of_them[0, 0]).any():
        fail(f"all processes need the same {', '.join(settings)}")
    if not all_of_them[:, 1].all():
        fail("--folder has to be on a disk that all processes share")


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


def save(manager: ocp.CheckpointManager, done: int, state, settings: dict) -> None:
    """Begin to save the state after so many steps, and the settings with it."""
    state = ocp.args.StandardSave(state)
    settings = ocp.args.JsonSave(settings)
    manager.save(done, args=ocp.args.Composite(state=state, settings=settings))


def restore(manager: ocp.CheckpointManager, done: int, target, settings: dict):
    """The state after so many steps, laid out as target; other settings end the run."""
    args = ocp.args.Composite(settings=ocp.args.JsonRestore())
    saved = manager.restore(done, args=args).settings
    for name, value in settings.items():
        if saved.get(name) != value:
            fail(
                f"the run in {manager.directory.name} was begun with --{name} "
                f"{saved.get(name)}, not with {value}: ask for the same again, or for "
                "another --folder"
            )
    args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
    return manager.restore(done, args=args).state


def listen() -> list[int]:
    """A list to which SIGINT and SIGTERM add their numbers; sent again, they kill."""
    heard = []

    def note(number, frame):
        heard.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGINT, note)
    signal.signal(signal.SIGTERM, note)
    return heard


def told_to_stop(heard: list[int], done: int) -> bool:
    """Whether to stop after this step: on this, all processes agree."""
    if jax.process_count() == 1:
        return bool(heard)
    return multihost_utils.reached_preemption_sync_point(done)


def say(text: str) -> None:
    """Print a line, from one process only."""
    if jax.process_index() == 0:
        print(text, flush=True)


def tell(done: int, text: str) -> None:
    """Print a line about a step, or about the state after it."""
    say(f"step {done:5}  {text}")


def tell_losses(late: list[tuple[int, jax.Array]]) -> None:
    """Print the losses f32[] that were put aside with their steps, and drop them."""
    for done, loss in late:
        tell(done, f"loss {float(loss):.6f}")
    late.clear()


def main() -> None:
    """Train, from the newest checkpoint in the folder if there is one."""
    options = read_options()
    start(options)
    if min(options.batch, options.log_every, options.save_every) < 1:
        fail("--batch, --log-every and --save-every have to be 1 or more")
    if options.data == "grain" and not importlib.util.find_spec("grain"):
        fail("--data grain needs Grain: pip install grain")
    settings = {name: getattr(options, name) for name in SETTINGS}
    folder = options.folder.resolve()  # Orbax asks for an absolute path
    agree({**settings, "save_every": options.save_every}, folder)
    train, test = load_rows()

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    if options.batch % mesh.size or options.batch > len(train.labels):
        fail(
            f"--batch {options.batch} will not do: it has to be a multiple of the "
            f"{mesh.size} devices, and {len(train.labels)} at most"
        )
    kind = jax.devices()[0].device_kind
    share = options.batch // mesh.size
    say(f"{mesh.size} {kind} devices, {share} rows of a batch on each")

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
    keep = ocp.CheckpointManagerOptions(max_to_keep=3, cleanup_tmp_directories=True)
    with ocp.CheckpointManager(folder, options=keep) as manager:
        done = manager.latest_step()
        if done is None:
            done = 0
            state = jax.jit(fresh, out_shardings=cut)()
        else:
            target = jax.tree.map(
                lambda leaf, place: leaf.update(sharding=place), shapes, cut
            )
            state = restore(manager, done, target, settings)
            tell(done, "restored")
            tell(done, evaluate(score, state, test, options.batch, split, here))

        batches = read(train, options.seed, options.batch, here, done)
        heard = listen() if jax.process_count() == 1 else []
        stopping = False
        late = []  # steps with their losses, to be printed later
        while done < options.steps and not stopping:
            state, loss = step(state, put(next(batches), split))
            if must_wait:
                loss.block_until_ready()
            done += 1
            # Looked at once a step: no stop without a save.
            stopping = told_to_stop(heard, done) and done < options.steps
            if done % options.log_every == 0:
                tell_losses(late)  # of the line before; an interval is queued behind
                late.append((done, loss))
            if done % options.save_every == 0 or done == options.steps or stopping:
                save(manager, done, state, settings)
                tell_losses(late)
                if not stopping:
                    score_now = evaluate(score, state, test, options.batch, split, here)
                    tell(done, score_now)

    if stopping:
        say(f"stopped: the same command goes on after step {done}")
        sys.exit(128 + (heard[0] if heard else signal.SIGTERM))


if __name__ == "__main__":
    try:
        main()
    except (Exception, KeyboardInterrupt):
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        os._exit(1)  # JAX's own exit would wait for the others, and they for this one
