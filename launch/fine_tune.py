"""Fine-tune a Llama or Qwen3 model, as downloaded, on all devices there are.

python fine_tune.py FOLDER DATA --out OUT          adapters (LoRA), as PEFT saves them
python fine_tune.py FOLDER DATA --out OUT --full   all weights, saved as FOLDER is

DATA has one JSON object on each line, {"prompt": "text", "answer": "text"} or
{"tokens": [1, 15], "answer": [7, 9]}; only the tokens of answers count for the loss.
It needs adapters.py, decoder.py, generate.py and lifecycle.py beside it, JAX, Optax,
Orbax, and for text the package tokenizers. What it will not do it says in one sentence,
with status 2, before it loads a weight. Stopped or killed, the same command goes on
from the newest checkpoint; lifecycle.py says what its other statuses mean.
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
import json
import math
import os
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import adapters
import decoder
import generate
import jax
import jax.numpy as jnp
import lifecycle
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from lifecycle import (
    BAD_INPUT,
    NO_RESTART,
    SAVED,
    exit_all,
    log,
    log_step,
    set_deadline,
)

SETTINGS = ("full", "rank", "alpha", "rate", "clip", "steps", "batch", "seed")
TOGETHER = ("out", "save_every", "log_every")  # equal in all processes of a start, too
PIECE = 128  # positions whose logits exist at a time
BESIDE = ("*token*", "vocab*", "merges*", "chat_*", "generation_config.json")

# ----------------------------------------------------------------------------- options


def read_options() -> argparse.Namespace:
    """The options of the command line, or their defaults."""
    what, _, more = __doc__.partition("\n\n")
    how = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    parser = generate.Parser(description=what, epilog=more, **how)
    option, count = parser.add_argument, generate.count
    natural, positive = generate.reader(int, 0), generate.reader(float, 1e-12, 1e12)
    option("model", type=Path, metavar="FOLDER", help="has config.json, *.safetensors")
    option("data", type=Path, metavar="DATA", help="rows to train on, one on a line")
    option("--out", type=Path, required=True, help="a new folder, for the result")
    option("--eval", type=Path, metavar="FILE", help="rows to score on, as DATA's")
    option("--full", action="store_true", help="train all weights, and no adapters")
    option("--rank", type=count, help="of the adapters (16)")
    option("--alpha", type=positive, help="their scale is alpha / rank (32)")
    option("--rate", type=positive, help="the highest learning rate (2e-4; full 1e-5)")
    option("--clip", type=positive, default=1.0, help="longest gradient (%(default)s)")
    option("--epochs", type=positive, help="how often to see each row (1)")
    option("--steps", type=count, help="training steps in all, in place of --epochs")
    option("--batch", type=count, default=8, help="rows a step (%(default)s)")
    option("--length", type=count, help="most tokens of a row (as many as needed)")
    kinds = ("float32", "bfloat16")
    option("--dtype", choices=kinds, help="else float32 on a CPU, or as the files have")
    option("--seed", type=natural, default=0, help="of adapters and order")
    option("--folder", type=Path, help="where checkpoints go (OUT.checkpoints)")
    option("--save-every", type=count, default=100, help="steps from save to save")
    option("--log-every", type=count, default=10, help="steps from line to line")
    option("--step-limit", type=positive, default=1800, help="seconds without a step")
    option("--save-limit", type=positive, default=600, help="seconds for a save")
    option("--tries", type=count, default=3, help="starts that may save nothing new")
    option("--wait", type=count, default=1, help="seconds for another job to end")
    option("--devices", type=count, help="how many to use (all)")
    option("--emulate", type=count, help="devices for the CPU of a process to play")
    option("--distributed", action="store_true", help="be one of several processes")
    option("--coordinator", metavar="HOST:PORT", help="address of process 0")
    option("--processes", type=count, help="how many processes there are")
    option("--process", type=natural, help="the number of this one, from 0")
    option("--heartbeat", type=count, default=100, help="seconds to wait for a sign")
    options = parser.parse_args()
    if options.full and (options.rank or options.alpha):
        parser.error("--rank and --alpha are of adapters, and --full trains none")
    if options.steps and options.epochs:
        parser.error("give --steps or --epochs, not both")
    generate.check_processes(parser, options)
    if not options.full:
        options.rank, options.alpha = options.rank or 16, options.alpha or 32.0
    options.rate = options.rate or (1e-5 if options.full else 2e-4)
    options.out = options.out.resolve()
    folder = options.folder or Path(f"{options.out}.checkpoints")
    options.folder = folder.resolve()  # Orbax asks for an absolute path
    return options


# -------------------------------------------------------------------------------- rows


class Row(NamedTuple):
    """A prompt and its answer."""

    tokens: list[int]  # of both
    start: int  # where the answer begins


class Batch(NamedTuple):
    """Rows of one length t."""

    tokens: np.ndarray  # i32[batch, t], filled up with zeros
    targets: np.ndarray  # i32[batch, t]: the next token if it is of an answer, or -1


def end_of_answers(folder: Path, tokenizer: Any) -> list[int]:
    """The token to put after an answer that is a text, or none: the one that
    tokenizer_config.json names, or else the only one of config.json."""
    path = folder / "tokenizer_config.json"
    name = json.loads(path.read_text()).get("eos_token") if path.exists() else None
    name = name.get("content") if isinstance(name, dict) else name
    if name is None or isinstance(tokenizer, str):
        stop = json.loads((folder / "config.json").read_text()).get("eos_token_id")
        return [stop] if type(stop) is int else []
    if (stop := tokenizer.token_to_id(name)) is None:
        raise ValueError(f"{path}: its eos_token {name!r} is not in tokenizer.json")
    return [stop]


def read_row(said: Any, model: generate.Model, stop: list[int], most: float) -> Row:
    """A line's row; ValueError if it has no answer, or more tokens than most."""
    if not isinstance(said, dict) or ("prompt" in said) == ("tokens" in said):
        raise ValueError('it is no object with either "prompt" or "tokens"')
    if unknown := said.keys() - {"prompt", "tokens", "answer", "id"}:
        raise ValueError(f"it has {sorted(unknown)}, which mean nothing here")
    if "answer" not in said:
        raise ValueError('it has no "answer"')
    is_text, read = "prompt" in said, generate.read_tokens
    how = (model.tokenizer, model.config.vocab_size, is_text)
    if not is_text and not isinstance(said["answer"], list):
        raise ValueError("its answer is no list of tokens, and its prompt is one")
    prompt = read("prompt", said["prompt" if is_text else "tokens"], *how)
    answer = read("answer", said["answer"], *how, special=False) + stop * is_text
    if (size := len(prompt) + len(answer)) > most:
        raise ValueError(f"it has {size} tokens with its answer, and may have {most}")
    return Row(prompt + answer, len(prompt))


def read_rows(
    path: Path, model: generate.Model, stop: list[int], most: float
) -> list[Row]:
    """The rows of a file; ValueError, with the place, for one that will not do."""
    rows = []
    for where, line in generate.read_lines(path):
        said = generate.read_json(where, line)
        try:
            rows.append(read_row(said, model, stop, most))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no row")
    return rows


@functools.lru_cache(maxsize=2)  # a batch may be of two epochs
def order_of(count: int, seed: int, epoch: int) -> np.ndarray:
    """The order of all rows in an epoch: i64[count]."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def rows_of_step(rows: list[Row], seed: int, step: int, batch: int) -> list[Row]:
    """The rows of a step, the same whenever they are asked for: epochs follow each
    other without a gap."""
    places = [divmod(step * batch + i, len(rows)) for i in range(batch)]
    return [rows[order_of(len(rows), seed, epoch)[place]] for epoch, place in places]


def bucket(size: int, longest: int) -> int:
    """The length of a batch whose longest row has size tokens, where the longest row of
    all has longest: a power of two, or the last length, so that few are compiled."""
    unit = PIECE if longest > PIECE else 16
    return min(max(16, 1 << (size - 1).bit_length()), math.ceil(longest / unit) * unit)


def make_batch(rows: list[Row], batch: int, longest: int) -> Batch:
    """These rows, and empty ones up to a batch."""
    t = bucket(max(len(row.tokens) for row in rows), longest)
    tokens, targets = np.zeros((batch, t), np.int32), np.full((batch, t), -1, np.int32)
    for number, (said, start) in enumerate(rows):
        tokens[number, : len(said)] = said
        targets[number, start - 1 : len(said) - 1] = said[start:]
    return Batch(tokens, targets)


# ------------------------------------------------------------------------------- model


class State(NamedTuple):
    """What is trained, and what the optimizer remembers of it."""

    params: Any  # adapters, or weights: float32
    memory: Any


Place = Callable[[Any, Mesh], NamedSharding]  # of what has a shape


def spread(x: Any, mesh: Mesh) -> NamedSharding:
    """Cut along the first axis that divides, as in FSDP; small is what has one axis."""
    for axis, size in enumerate(x.shape):
        if size % mesh.size == 0 and len(x.shape) > 1:
            return NamedSharding(mesh, P(*[None] * axis, "data"))
    return NamedSharding(mesh, P())


def whole(x: Any, mesh: Mesh) -> NamedSharding:
    """Copied to each device."""
    return NamedSharding(mesh, P())


def gather(tree: Any, dtype: np.dtype, mesh: Mesh, place: Place) -> Any:
    """The same arrays in this type, whole on each device; their gradients are summed
    into where they lie."""

    @jax.custom_vjp
    def one(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x.astype(dtype), whole(x, mesh))

    def back(_: None, g: jax.Array) -> tuple[jax.Array]:
        g = g.astype(np.float32)
        return (jax.lax.with_sharding_constraint(g, place(g, mesh)),)

    one.defvjp(lambda x: (one(x), None), back)
    return jax.tree.map(one, tree)


def sum_losses(
    weights: dict, batch: Batch, c: decoder.Config, gather: Callable
) -> tuple[jax.Array, jax.Array]:
    """The losses of all tokens of answers, added up, f32[], and how many there are.

    Of a layer only the input is kept: the rest is computed again on the way back."""
    b, t = batch.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))

    @partial(jax.checkpoint, static_argnums=2)
    def layer(x: jax.Array, w: dict, config: decoder.Config) -> jax.Array:
        x, w = jax.lax.optimization_barrier(
            (x, w)
        )  # gather no weight before x is there
        return decoder.decoder_layer(x, gather(w), config, positions, None)[0]

    tables = gather({name: w for name, w in weights.items() if name != "layers"})
    x = tables["embed_tokens"][batch.tokens] * c.embed_scale
    for index, w in enumerate(weights["layers"]):
        x = layer(x, w, c.of_layer(index))
    x = decoder.rms_norm(x, tables["norm"], c.rms_norm_eps, c.norm_offset)

    @jax.checkpoint
    def losses(piece: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = piece
        scores, known = decoder.compute_logits(tables, x, c), jnp.maximum(targets, 0)
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, known)
        return jnp.where(targets < 0, 0, loss).sum()

    def cut(x: jax.Array) -> jax.Array:  # [b, t, ...] -> [pieces, b, positions, ...]
        return x.reshape(b, -1, math.gcd(t, PIECE), *x.shape[2:]).swapaxes(0, 1)

    total = jax.lax.map(losses, (cut(x), cut(batch.targets))).sum()
    return total, (batch.targets >= 0).sum()


# ------------------------------------------------------------------- what is asked for


class Job(NamedTuple):
    """All that is known before there is a device."""

    model: generate.Model
    rows: list[Row]
    held_out: list[Row]
    longest: int  # tokens of a row
    steps: int
    lora: adapters.LoraConfig | None  # None: all weights are trained
    trained: Any  # a tree of decoder.Tensor


def read_job(options: argparse.Namespace) -> Job:
    """What is asked for; ValueError or OSError with the reason why that cannot be."""
    if options.out.exists():
        raise ValueError(f"{options.out} exists: nothing is written over it")
    model = generate.read_model(options.model)
    most = options.length or model.positions
    if most > model.positions:
        raise ValueError(f"--length {most}: the model was made for {model.positions}")
    try:
        stop = end_of_answers(options.model, model.tokenizer)
    except (AttributeError, TypeError, json.JSONDecodeError) as error:
        why = f"tokenizer_config.json is not as it should be: {error}"
        raise ValueError(f"{options.model}: {why}") from None
    rows = read_rows(options.data, model, stop, most)
    held_out = read_rows(options.eval, model, stop, most) if options.eval else []
    longest = max(len(row.tokens) for row in rows + held_out)
    steps = math.ceil((options.epochs or 1) * len(rows) / options.batch)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(options.out.parent, os.W_OK):
        raise ValueError(f"{options.out.parent} cannot be written to")
    lora, trained = None, decoder.model_tensors(model.config)
    if not options.full:
        lora = adapters.LoraConfig(options.rank, options.alpha)
        trained = adapters.adapter_tensors(model.config, lora)
    return Job(model, rows, held_out, longest, options.steps or steps, lora, trained)


def settings_of(options: argparse.Namespace, job: Job, dtype: np.dtype) -> dict:
    """What decides the numbers of a run; of the model, the first row of each tensor."""
    files = job.model.files
    firsts = b"".join(files[name][:1].tobytes() for name in sorted(files))
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= {"steps": job.steps, "dtype": str(dtype)}
    for name, told in (("model", firsts), ("data", repr(job.rows).encode())):
        settings[name] = f"checksum {zlib.crc32(told):08x}"
    return settings


def check_memory(
    options: argparse.Namespace, job: Job, mesh: Mesh, dtype: np.dtype
) -> None:
    """ValueError if a step on the longest rows is too much for a device. It is an
    estimate: a compiler may need more, or less."""

    def held(tree: Any, place: Place) -> int:
        shapes = [place(x, mesh).shard_shape(x.shape) for x in jax.tree.leaves(tree)]
        return sum(map(math.prod, shapes))

    c, t, wide = job.model.config, bucket(job.longest, job.longest), dtype.itemsize
    tree, rows = decoder.model_tensors(c), options.batch // mesh.size
    used = held(tree | {"layers": tree["layers"][0]}, whole)
    layer = (
        4 * c.hidden_size
        + 2 * (c.num_heads + c.num_kv_heads) * c.head_dim
        + 3 * c.intermediate_size
    )
    parts = {
        "weights": held(tree, spread) * wide if job.lora else 0,
        "state": 16 * held(job.trained, whole if job.lora else spread),
        "gathered": used * (wide if job.lora else wide + 4) * (mesh.size > 1),
        "inputs of layers": rows * t * c.num_layers * c.hidden_size * wide,
        "a layer": 2 * rows * t * (layer * wide + 2 * c.num_heads * t * 4),
        "logits": rows * math.gcd(t, PIECE) * c.vocab_size * 8,
    }
    del parts[min("a layer", "logits", key=parts.get)]  # these are not there together
    less = "a smaller --batch, a shorter --length or more devices"
    generate.check_room(parts, mesh, less)


def choose_devices(options: argparse.Namespace, job: Job) -> tuple[Mesh, np.dtype]:
    """The mesh, and the type to compute in; it ends all processes together if that
    cannot be in one of them, which says why."""
    devices = jax.devices()
    use, why = options.devices or len(devices), ""
    kind = next(iter(job.model.files.values())).dtype
    if devices[0].platform == "cpu" or kind != jnp.bfloat16:
        kind = np.float32  # a CPU is slow with others, gradients vanish in float16
    dtype = jnp.dtype(options.dtype or kind)
    mesh = Mesh(np.array(devices[:use]), ("data",), axis_types=(AxisType.Auto,))
    if use > len(devices) or (jax.process_count() > 1 and use < len(devices)):
        why = f"--devices {use}: there are {len(devices)} in all processes"
    elif options.batch % use:
        why = f"--batch {options.batch} has to be a multiple of the {use} devices"
    else:
        try:
            check_memory(options, job, mesh, dtype)
        except ValueError as error:
            why = str(error)
    refused = np.ravel(multihost_utils.process_allgather(np.bool_(why != "")))
    if refused.any():
        if jax.process_index() == refused.argmax():
            print(why, file=sys.stderr, flush=True)
        lifecycle.ignore_signals()
        sys.exit(BAD_INPUT)
    return mesh, dtype


# ----------------------------------------------------------------------------- the run


class Run:
    """What lies on the devices beside the state, and two programs, each of which is
    compiled once for each length of a batch."""

    def __init__(
        self, options: argparse.Namespace, job: Job, mesh: Mesh, dtype: np.dtype
    ) -> None:
        self.options, self.job, self.mesh = options, job, mesh
        self.place = whole if job.lora else spread
        rate, warm = options.rate, job.steps // 10
        rates = optax.warmup_cosine_decay_schedule(0.0, rate, warm, job.steps)
        clip = optax.clip_by_global_norm(options.clip)
        self.adam = adam = optax.chain(clip, optax.adam(rates))
        self.base = self.load(dtype) if job.lora else {}
        bring = partial(gather, dtype=dtype, mesh=mesh, place=self.place)

        def score(params: Any, base: dict, batch: Batch) -> tuple[jax.Array, jax.Array]:
            if job.lora:
                params = adapters.with_adapters(base, params, job.lora.scale)
            return sum_losses(params, batch, job.model.config, bring)

        def step(state: State, base: dict, batch: Batch) -> tuple[State, jax.Array]:
            def mean_loss(params: Any) -> jax.Array:
                total, count = score(params, base, batch)
                return total / count

            loss, grads = jax.value_and_grad(mean_loss)(state.params)
            updates, memory = adam.update(grads, state.memory)
            return State(optax.apply_updates(state.params, updates), memory), loss

        copied = NamedSharding(mesh, P())
        cut = jax.tree.map(lambda x: x.sharding, self.like())
        self.step = jax.jit(step, out_shardings=(cut, copied), donate_argnums=0)
        self.score = jax.jit(score, out_shardings=copied)

    def load(self, dtype: object) -> dict:
        """The model's weights, spread over the devices."""
        model = self.job.model
        return decoder.load_model(model.files, model.config, self.mesh, dtype, spread)

    def like(self) -> State:
        """Shapes, types and places of a state."""

        def one(x: decoder.Tensor) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, np.float32)

        def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return x.update(sharding=self.place(x, self.mesh))

        params = jax.tree.map(one, self.job.trained)
        memory = jax.eval_shape(self.adam.init, params)
        return jax.tree.map(placed, State(params, memory))

    def begin(self) -> State:
        """The state before the first step."""
        if self.job.lora:
            key, c = jax.random.key(self.options.seed), self.job.model.config
            params = adapters.init_adapters(key, c, self.job.lora, self.mesh, whole)
        else:
            params = self.load(np.float32)
        cut = jax.tree.map(lambda x: x.sharding, self.like().memory)
        return State(params, jax.jit(self.adam.init, out_shardings=cut)(params))

    def put(self, rows: list[Row]) -> Batch:
        """A batch of these rows, each device's on that device."""
        split = NamedSharding(self.mesh, P("data"))

        def one(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(x.shape, split, x.__getitem__)

        return jax.tree.map(one, make_batch(rows, self.options.batch, self.job.longest))

    def evaluate(self, state: State) -> str:
        """The mean loss of a token of the answers that were held out, in words."""
        rows, size, sums = self.job.held_out, self.options.batch, np.zeros(2)
        for first in range(0, len(rows), size):
            batch = self.put(rows[first : first + size])
            sums += jax.device_get(self.score(state.params, self.base, batch))
        return f"eval loss {sums[0] / sums[1]:.6f} a token, of {sums[1]:.0f} tokens"


def train(run: Run, settings: dict) -> Any:
    """The params after all steps, from the newest checkpoint that is whole, if there is
    one; told to stop, it saves and ends the program."""
    options, job, log_losses = run.options, run.job, lifecycle.log_losses
    on_cpu = run.mesh.devices.flat[0].platform == "cpu"
    must_wait = on_cpu and jax.__version_info__ < (0, 12)  # emulated, and old
    limits = options.folder, settings, options.save_limit
    with lifecycle.Checkpoints(*limits) as checkpoints:
        begun, state = checkpoints.restore(run.like())
        if begun:
            log_step(begun, "restored")
        else:
            state = run.begin()
        if job.held_out:
            log_step(begun, run.evaluate(state))
        if jax.process_count() == 1:
            lifecycle.exit_if_stopped(received)
        done, stopping = begun, False
        late = []  # steps with their losses, to be looked at later
        while done < job.steps and not stopping:
            set_deadline("the next step", options.step_limit)
            rows = rows_of_step(job.rows, options.seed, done, options.batch)
            state, loss = run.step(state, run.base, run.put(rows))
            if must_wait:
                loss.block_until_ready()
            done += 1
            # Looked at once a step: no stop without a save.
            stop = lifecycle.should_stop(received, done - begun)
            stopping = stop and done < job.steps
            if done % options.log_every == 0:
                log_losses(late, options.log_every)  # the interval is queued behind
            late.append((done, loss))
            checkpoints.check_save()
            if done % options.save_every == 0 or done == job.steps or stopping:
                log_losses(late, options.log_every)
                checkpoints.save(done, state)
                if job.held_out and not stopping:
                    log_step(done, run.evaluate(state))
        set_deadline(
            "the next step", math.inf
        )  # there is none, and a save has its own limit
    if stopping:
        exit_all(SAVED, f"stopped: the same command goes on after step {done}")
    return state.params


def save_result(options: argparse.Namespace, job: Job, params: Any) -> None:
    """Write what was trained into --out. Where that fails, nothing is left of it, and
    all processes end together."""
    what, c = f"the save of {options.out}", job.model.config
    set_deadline(what, options.save_limit)
    try:
        if job.lora:
            base = str(options.model)
            adapters.save_adapters(options.out, params, c, job.lora, base)
        else:
            kind = next(iter(job.model.files.values())).dtype
            cuts = jax.tree.map(lambda x: x.sharding, params)
            narrow = partial(jax.tree.map, lambda x: x.astype(kind))
            params = jax.jit(narrow, out_shardings=cuts)(params)
            if not lifecycle.checksums(params)[1]:
                exit_all(
                    NO_RESTART, f"as {kind} not all weights are finite: not written"
                )
            beside = {path for name in BESIDE for path in options.model.glob(name)}
            config = options.model / "config.json"
            decoder.save_model(options.out, params, c, config, 5 * 10**9, tuple(beside))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        exit_all(
            NO_RESTART,
            f"{options.out} is not written: {why}; what was trained is in "
            f"{options.folder}, and the same command writes it once it can",
        )
    set_deadline(what, math.inf)
    log(f"{options.out} is written")


def main(options: argparse.Namespace) -> None:
    """Fine-tune, and write the result."""
    set_deadline("the next step", options.step_limit)
    lifecycle.exit_if_stopped(received)
    try:
        job = read_job(options)
    except (OSError, ValueError) as error:
        why = str(error)
        if isinstance(error, OSError):
            why = f"{error.filename}: {error.strerror}"
        print(" ".join(why.split()), file=sys.stderr)
        sys.exit(BAD_INPUT)
    if options.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.emulate)
    lifecycle.connect(options)
    mesh, dtype = choose_devices(options, job)
    if dtype == np.float32:  # a TPU's products would be rounded
        jax.config.update("jax_default_matmul_precision", "highest")
    settings = settings_of(options, job, dtype)
    together = {name: str(getattr(options, name)) for name in TOGETHER}
    lifecycle.claim_run(settings | together | {"eval": job.held_out}, options)

    numbers = sum(math.prod(x.shape) for x in jax.tree.leaves(job.trained))
    answers = sum(len(row.tokens) - row.start for row in job.rows)
    log(f"{len(job.rows)} rows with {answers} tokens of answers, {job.steps} steps")
    kind = mesh.devices.flat[0].device_kind
    log(f"{numbers:,} numbers to train, in {dtype} on {mesh.size} {kind} devices")
    save_result(options, job, train(Run(options, job, mesh, dtype), settings))
    lifecycle.reset_starts()


if __name__ == "__main__":
    lifecycle.run(main, read_options(), received)
