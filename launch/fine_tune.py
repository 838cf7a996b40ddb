"""Fine-tune a Llama, Qwen3 or Gemma 3 model from a folder, on all devices.

  python fine_tune.py MODEL DATA --out OUT              train LoRA adapters, as of PEFT
  python fine_tune.py MODEL DATA --out OUT --full       train all weights
  python fine_tune.py MODEL --merge ADAPTERS --out OUT  merge adapters into MODEL

DATA is a JSONL file; each line is one of
  {"messages": [{"role": "user", "content": "..."}, ...]}   loss on assistant messages
  {"prompt": "text", "answer": "text"}                      loss on the answer
  {"text": "text"}                                          loss on all of it
  {"tokens": [1, 15], "answer": [7, 9]}                     loss on the answer

It needs adapters.py, decoder.py, generate.py and lifecycle.py next to it, JAX, Optax
and Orbax; for text the package tokenizers, and for messages jinja2. Bad input ends it
with one line on stderr and status 2. Repeat the same command to resume from the newest
checkpoint; lifecycle.py lists the other statuses.
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
import math
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
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
from lifecycle import NO_RESTART, exit_all, log, log_step, set_deadline

SETTINGS = ("full", "rank", "alpha", "target_modules", "int8", "batch", "seed")
SETTINGS += ("learning_rate", "weight_decay", "max_grad_norm")  # fixed for a run
ROLES = "system", "developer", "user", "assistant", "tool"
SHARED = ("out", "save_every", "log_every", "accumulate")  # equal in all processes
LOGITS_CHUNK = 128  # positions of each sequence whose logits exist at a time
COPIED = ("*token*", "vocab*", "merges*", "chat_*", "generation_config.json")

# ----------------------------------------------------------------------------- options


def read_options() -> argparse.Namespace:
    """Parse the command line."""
    description, _, epilog = __doc__.partition("\n\n")
    style = {"formatter_class": argparse.RawDescriptionHelpFormatter}
    style["usage"] = "%(prog)s MODEL [DATA] --out OUT [options]"
    parser = generate.Parser(description=description, epilog=epilog, **style)
    count = generate.count
    natural, positive = generate.reader(int, 0), generate.reader(float, 1e-12, 1e12)
    decay = generate.reader(float, 0, 1e12)
    option = parser.add_argument
    option("model", type=Path, metavar="MODEL", help="folder with *.safetensors")
    option("data", type=Path, nargs="?", metavar="DATA", help="examples to train on")
    option("--out", type=Path, required=True, metavar="DIR", help="new result folder")
    option("--eval", type=Path, metavar="FILE", help="held-out examples, as in DATA")
    option("--merge", type=Path, metavar="DIR", help="merge adapters DIR into MODEL")
    option("--full", action="store_true", help="train all weights instead of adapters")
    groups = {
        "adapters": (
            ("--rank", count, None, "N", "LoRA rank (default: 16)"),
            ("--alpha", positive, None, "X", "LoRA alpha (default: 32)"),
        ),
        "training": (
            ("--epochs", positive, None, "X", "passes over DATA (default: 1)"),
            ("--steps", count, None, "N", "optimizer steps, instead of --epochs"),
            ("--batch", count, 8, "N", "sequences per optimizer step"),
            ("--accumulate", count, 1, "N", "split each batch into N micro-batches"),
            ("--max-length", count, None, "N", "maximum tokens (default: the model's)"),
            ("--learning-rate", positive, None, "X", "peak (default: 2e-4, full 1e-5)"),
            ("--warmup", natural, None, "N", "warm-up steps (default: a tenth of all)"),
            ("--weight-decay", decay, 0.0, "X", "AdamW's decay, only of matrices"),
            ("--max-grad-norm", positive, 1.0, "X", "clip gradients to this norm"),
            ("--seed", natural, 0, "N", "seed of adapters and shuffling"),
        ),
        "checkpoints and logging": (
            ("--folder", Path, None, "DIR", "checkpoints (default: OUT.checkpoints)"),
            ("--save-every", count, 100, "N", "steps between checkpoints"),
            ("--eval-every", count, 100, "N", "steps between evaluations"),
            ("--log-every", count, 10, "N", "steps between progress lines"),
            ("--step-limit", positive, 1800, "S", "maximum seconds for a step"),
            ("--save-limit", positive, 600, "S", "maximum seconds for a save"),
            ("--tries", count, 3, "N", "maximum starts without a new checkpoint"),
            ("--wait", count, 1, "S", "seconds to wait for another job to end"),
        ),
        "devices and processes": (
            ("--devices", count, None, "N", "devices to use (default: all)"),
            ("--emulate", count, None, "N", "emulate N devices on the CPU"),
            ("--coordinator", str, None, "HOST:PORT", "address of process 0"),
            ("--processes", count, None, "N", "number of processes"),
            ("--process", natural, None, "N", "index of this process, from 0"),
            ("--heartbeat", count, 100, "S", "maximum silence of a process in seconds"),
        ),
    }
    for title, rows in groups.items():
        group = parser.add_argument_group(title).add_argument
        for name, read, default, metavar, text in rows:
            text += "" if default is None else " (default: %(default)s)"
            group(name, type=read, default=default, metavar=metavar, help=text)
        groups[title] = group
    modules = {"nargs": "+", "choices": adapters.TARGETS, "metavar": "NAME"}
    text = f"projections that get adapters (default: {' '.join(adapters.TARGETS)})"
    groups["adapters"]("--target-modules", **modules, help=text)
    text = "store the frozen projections in int8"
    groups["adapters"]("--int8", action="store_true", help=text)
    text = "make one example of each assistant message and those before it"
    groups["training"]("--split-turns", action="store_true", help=text)
    text = "dtype to compute in (default: bfloat16 if MODEL has it, but not on CPUs)"
    groups["training"]("--dtype", choices=("float32", "bfloat16"), help=text)
    text = "join the processes that a launcher has started"
    groups["devices and processes"]("--distributed", action="store_true", help=text)

    options = parser.parse_args()
    if (options.data is None) == (options.merge is None):
        parser.error("give either DATA to train on, or --merge ADAPTERS")
    of_lora = options.rank, options.alpha, options.target_modules, options.int8
    if options.full and any(of_lora):
        names = "--rank, --alpha, --target-modules and --int8"
        parser.error(f"{names} are for adapters, and --full trains none")
    if options.steps and options.epochs:
        parser.error("--steps and --epochs exclude each other")
    generate.check_processes(parser, options)
    if not options.full:
        options.rank, options.alpha = options.rank or 16, options.alpha or 32.0
        modules = options.target_modules or adapters.TARGETS
        options.target_modules = [n for n in adapters.TARGETS if n in modules]
    options.learning_rate = options.learning_rate or (1e-5 if options.full else 2e-4)
    options.out = options.out.resolve()
    folder = options.folder or Path(f"{options.out}.checkpoints")
    options.folder = folder.resolve()  # Orbax needs an absolute path
    return options


# ---------------------------------------------------------------------------- examples


class Example(NamedTuple):
    """A sequence of tokens, and the spans of it that are trained on."""

    tokens: list[int]
    spans: list[tuple[int, int]]  # start >= 1, and stop


class Batch(NamedTuple):
    """Sequences, padded to the same length t."""

    tokens: np.ndarray  # i32[batch, t], padded with zeros
    targets: np.ndarray  # i32[batch, t]: the next token if it is trained on, else -1


def read_stop_tokens(folder: Path, tokenizer: Any) -> list[int]:
    """Return the token that ends an answer or a text, in a list, or an empty list.

    It is the eos_token of tokenizer_config.json, or else config.json's only one."""
    path = folder / "tokenizer_config.json"
    name = generate.read_optional(path).get("eos_token")
    name = name.get("content") if isinstance(name, dict) else name
    if not isinstance(name, str) or isinstance(tokenizer, str):
        stop = generate.read_optional(folder / "config.json").get("eos_token_id")
        return [stop] if type(stop) is int else []
    if (stop := tokenizer.token_to_id(name)) is None:
        raise ValueError(f"{path}: eos_token {name!r} is not in tokenizer.json")
    return [stop]


def split_prefix(prompt: list[int], tokens: list[int], hint: str) -> tuple[int, int]:
    """Return the span of tokens after a prompt; raise ValueError if it is no prefix."""
    if tokens[: len(prompt)] != prompt:
        raise ValueError(f"followed by its answer, the prompt changes tokens: {hint}")
    return max(len(prompt), 1), len(tokens)


def read_messages(
    messages: Any, model: generate.Model, options: argparse.Namespace
) -> list[Example]:
    """Return one example of a conversation, or with --split-turns one for each answer.

    Each answer's span is found by encoding the conversation before it and with it."""

    def encode(count: int, prompt: bool) -> list[int]:
        text = generate.read_chat_template(options.model)(messages[:count], prompt)
        args = model.tokenizer, model.config.vocab_size, True
        return generate.read_tokens("messages", text, *args, special=False)

    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages is not a list of objects")
    examples, tokens, spans = [], [], []
    for index, message in enumerate(messages):
        if (role := message.get("role")) not in ROLES:
            known = ", ".join(ROLES)
            raise ValueError(f"message {index} has the role {role!r}; known: {known}")
        if not (message.get("content") or message.get("tool_calls")):
            raise ValueError(f"message {index} has no content")
        if role != "assistant":
            continue
        prompt, answered = encode(index, True), encode(index + 1, False)
        hint = f"message {index} does not begin with the template's generation prompt"
        span = split_prefix(prompt, answered, hint)
        if options.split_turns:
            examples.append(Example(answered, [span]))
        elif prompt[: len(tokens)] != tokens:
            raise ValueError(
                f"the chat template renders the messages before message {index} "
                "differently once it follows: use --split-turns"
            )
        tokens = answered
        spans.append(span)
    if not spans:
        raise ValueError("messages has no message of the role assistant")
    return examples or [Example(tokens, spans)]


def read_examples_of(
    data: Any, model: generate.Model, stop: list[int], options: argparse.Namespace
) -> list[Example]:
    """Return the examples of one line; raise ValueError if it is malformed."""
    kinds = ("messages", "text", "prompt", "tokens")
    kind = [name for name in kinds if isinstance(data, dict) and name in data]
    if len(kind) != 1:
        raise ValueError(
            'not an object with one "messages", "text", "prompt" or "tokens"'
        )
    (kind,) = kind
    has_answer = {"answer"} if kind in ("prompt", "tokens") else set()
    if unknown := data.keys() - {kind, "id"} - has_answer:
        raise ValueError(f"unknown keys in a {kind} row: {', '.join(sorted(unknown))}")
    if missing := has_answer - data.keys():
        raise ValueError(f"{kind} without {', '.join(missing)}")
    if kind == "messages":
        return read_messages(data[kind], model, options)

    def encode(name: str, value: Any) -> list[int]:
        args = model.tokenizer, model.config.vocab_size, kind != "tokens"
        return generate.read_tokens(name, value, *args)

    if kind == "tokens":
        prompt, answer = encode("tokens", data[kind]), encode("answer", data["answer"])
        return [Example(prompt + answer, [(len(prompt), len(prompt + answer))])]
    prompt, text = [], data[kind]
    if kind == "prompt":
        prompt = encode("prompt", text)
        if not isinstance(data["answer"], str):
            raise ValueError("the answer is not text")
        text += data["answer"]
    tokens = encode(kind, text)
    hint = "move the space between them to the answer"
    span = split_prefix(prompt, tokens + stop, hint)
    if len(tokens) == len(prompt) or span[0] == span[1]:
        raise ValueError("no token to train on: the text or answer is empty")
    return [Example(tokens + stop, [span])]


def read_examples(
    path: Path, model: generate.Model, stop: list[int], options: argparse.Namespace
) -> list[Example]:
    """Read a JSONL file; raise ValueError, with the line, for a bad example."""
    examples = []
    longest = min(options.max_length or math.inf, model.positions)
    for place, line in generate.read_lines(path):
        data = generate.read_json(place, line)
        try:
            added = read_examples_of(data, model, stop, options)
            if (size := max(len(one.tokens) for one in added)) > longest:
                source = "--max-length" if options.max_length else "the model"
                raise ValueError(f"{size:,} tokens, but {source} allows {longest:,}")
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        examples += added
    if not examples:
        raise ValueError(f"{path} has no examples")
    return examples


@functools.lru_cache(maxsize=2)  # a batch may contain examples of two epochs
def order_of_epoch(count: int, seed: int, epoch: int) -> np.ndarray:
    """Return a permutation of all examples: i64[count]."""
    return np.random.default_rng([seed, epoch]).permutation(count)


def examples_of_step(
    examples: list[Example], seed: int, step: int, batch: int
) -> list[Example]:
    """Return the batch of a step, which depends on nothing else: epochs follow each
    other without a gap."""
    places = [divmod(step * batch + i, len(examples)) for i in range(batch)]
    count = len(examples)
    return [examples[order_of_epoch(count, seed, epoch)[i]] for epoch, i in places]


def bucket(size: int, longest: int) -> int:
    """Return the padded length of a batch whose longest example has size tokens.

    It is a power of two, at most the longest example of all, rounded up, so that few
    lengths are compiled."""
    unit = LOGITS_CHUNK if longest > LOGITS_CHUNK else 16
    return min(max(16, 1 << (size - 1).bit_length()), math.ceil(longest / unit) * unit)


def make_batch(examples: list[Example], batch: int, longest: int) -> Batch:
    """Return a batch of these examples, filled up with empty ones."""
    t = bucket(max(len(one.tokens) for one in examples), longest)
    tokens, targets = np.zeros((batch, t), np.int32), np.full((batch, t), -1, np.int32)
    for i, (sequence, spans) in enumerate(examples):
        tokens[i, : len(sequence)] = sequence
        for start, stop in spans:
            targets[i, start - 1 : stop - 1] = sequence[start:stop]
    return Batch(tokens, targets)


# ------------------------------------------------------------------------------- model


class Best(NamedTuple):
    """The trained parameters with the lowest evaluation loss so far."""

    params: Any  # as they are exported
    loss: jax.Array  # f32[]
    step: jax.Array  # i32[]


class State(NamedTuple):
    """Everything that a checkpoint stores."""

    params: Any  # adapters, or all weights: float32
    opt_state: Any
    best: Best | None  # None without --eval


ShardingOf = Callable[[Any, Mesh], NamedSharding]  # of anything that has a shape


def fsdp_sharding(x: Any, mesh: Mesh) -> NamedSharding:
    """Shard the first axis that divides, as in FSDP; replicate vectors."""
    for axis, size in enumerate(x.shape):
        if size % mesh.size == 0 and len(x.shape) > 1:
            return NamedSharding(mesh, P(*[None] * axis, "data"))
    return NamedSharding(mesh, P())


def replicated(x: Any, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def gather(tree: Any, dtype: np.dtype, mesh: Mesh, sharding_of: ShardingOf) -> Any:
    """All-gather arrays in this dtype (int8 stays int8). In the backward pass their
    gradients are reduced, in float32, to the sharding of the parameters."""

    @jax.custom_vjp
    def gather_one(x: jax.Array) -> jax.Array:
        x = x if x.dtype == jnp.int8 else x.astype(dtype)
        return jax.lax.with_sharding_constraint(x, replicated(x, mesh))

    def backward(_: None, g: jax.Array) -> tuple[jax.Array]:
        g = g.astype(np.float32)
        return (jax.lax.with_sharding_constraint(g, sharding_of(g, mesh)),)

    gather_one.defvjp(lambda x: (gather_one(x), None), backward)
    return jax.tree.map(gather_one, tree)


def sum_losses(
    weights: dict, batch: Batch, config: decoder.Config, gather: Callable
) -> tuple[jax.Array, jax.Array]:
    """Return the sum f32[] of the losses of all trained tokens, and their number.

    Only the input of each layer is stored; the backward pass recomputes the rest."""
    b, t = batch.tokens.shape
    positions = jnp.broadcast_to(jnp.arange(t), (b, t))

    @partial(jax.checkpoint, static_argnums=2)
    def layer(x: jax.Array, w: dict, config: decoder.Config) -> jax.Array:
        x, w = jax.lax.optimization_barrier((x, w))  # do not gather w before x exists
        return decoder.decoder_layer(x, gather(w), config, positions, None)[0]

    top = gather({name: w for name, w in weights.items() if name != "layers"})
    x = top["embed_tokens"][batch.tokens] * config.embed_scale
    for i, w in enumerate(weights["layers"]):
        x = layer(x, w, config.of_layer(i))
    x = decoder.rms_norm(x, top["norm"], config.rms_norm_eps, config.norm_offset)

    @jax.checkpoint
    def chunk_loss(chunk: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, targets = chunk
        logits, labels = decoder.compute_logits(top, x, config), jnp.maximum(targets, 0)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(targets < 0, 0, loss).sum()

    def chunks(x: jax.Array) -> jax.Array:  # [b, t, ...] -> [n, b, t / n, ...]
        return x.reshape(b, -1, math.gcd(t, LOGITS_CHUNK), *x.shape[2:]).swapaxes(0, 1)

    total = jax.lax.map(chunk_loss, (chunks(x), chunks(batch.targets))).sum()
    return total, (batch.targets >= 0).sum()


# --------------------------------------------------------------------------------- job


class Job(NamedTuple):
    """Everything that is known before devices are used."""

    model: generate.Model
    examples: list[Example]
    held_out: list[Example]
    longest: int  # tokens of an example
    steps: int
    warmup: int
    lora: adapters.LoraConfig | None  # None: all weights are trained
    trained: Any  # a tree of decoder.Tensor


def check_out(options: argparse.Namespace) -> None:
    """Raise ValueError or OSError unless --out can be written."""
    if options.out.exists():
        raise ValueError(f"{options.out} exists: choose another --out, or remove it")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(options.out.parent, os.W_OK):
        raise ValueError(f"{options.out.parent} is not writable")


def read_job(options: argparse.Namespace) -> Job:
    """Read and check all input but the weights; raise ValueError or OSError."""
    model = generate.read_model(options.model)
    config = model.config
    if (n := options.max_length or 0) > model.positions:
        raise ValueError(f"--max-length {n}: the model supports {model.positions}")
    stop = read_stop_tokens(options.model, model.tokenizer)
    files = [options.data, options.eval] if options.eval else [options.data]
    examples, *held_out = (read_examples(f, model, stop, options) for f in files)
    held_out = held_out[0] if held_out else []
    longest = max(len(one.tokens) for one in examples + held_out)
    steps = math.ceil((options.epochs or 1) * len(examples) / options.batch)
    steps = options.steps or steps
    warmup = steps // 10 if options.warmup is None else options.warmup
    if warmup >= steps:
        raise ValueError(f"--warmup {warmup} is not below the {steps} steps of the run")
    lora, trained = None, decoder.model_tensors(config)
    if not options.full:
        modules = tuple(options.target_modules)
        lora = adapters.LoraConfig(options.rank, options.alpha, modules)
        trained = adapters.adapter_tensors(config, lora)
    check_out(options)
    return Job(model, examples, held_out, longest, steps, warmup, lora, trained)


def settings_of(options: argparse.Namespace, job: Job, dtype: np.dtype) -> dict:
    """Return what determines the result of a run; of the model, each tensor's first
    row is checked."""
    files = job.model.files
    first_rows = b"".join(files[name][:1].tobytes() for name in sorted(files))
    settings = {name: getattr(options, name) for name in SETTINGS}
    settings |= {"steps": job.steps, "warmup": job.warmup, "dtype": str(dtype)}
    settings["eval_every"] = options.eval_every if job.held_out else None
    for name, content in (
        ("model", first_rows),
        ("data", repr(job.examples).encode()),
        ("eval", repr(job.held_out).encode()),
    ):
        settings[name] = f"checksum {zlib.crc32(content):08x}"
    return settings


def check_memory(
    options: argparse.Namespace, job: Job, mesh: Mesh, dtype: np.dtype
) -> None:
    """Raise ValueError if a step on the longest examples does not fit on a device.

    It is an estimate: compiled programs may need more, or less."""

    def size(tree: Any, sharding_of: ShardingOf) -> int:
        leaves = jax.tree.leaves(tree)
        shapes = [sharding_of(x, mesh).shard_shape(x.shape) for x in leaves]
        return sum(map(math.prod, shapes))

    config, t = job.model.config, bucket(job.longest, job.longest)
    tree, b = decoder.model_tensors(config), options.batch // options.accumulate
    b, width = b // mesh.size, dtype.itemsize
    layers, h = tree["layers"], config.hidden_size
    top = {name: x for name, x in tree.items() if name != "layers"}
    layer_width = 1 if options.int8 else width
    qkv = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    activations = (4 * h + qkv + 3 * config.intermediate_size) * width
    activations += 2 * config.num_heads * t * 4  # attention scores in float32
    frozen = size(top, fsdp_sharding) * width
    frozen += size(layers, fsdp_sharding) * layer_width
    gathered = size(top, replicated) * width
    gathered += size(layers[0], replicated) * layer_width
    if not job.lora:
        gathered += size(top | {"layers": layers[0]}, replicated) * 4  # gradients
    bytes_per_param = 16 + (4 if options.accumulate > 1 else 0)
    bytes_per_param += (4 if job.lora else 2) if job.held_out else 0  # the best
    trained = size(job.trained, replicated if job.lora else fsdp_sharding)
    parts = {
        "weights": frozen if job.lora else 0,
        "state": bytes_per_param * trained,
        "gathered": gathered * (mesh.size > 1),
        "inputs of layers": b * t * config.num_layers * h * width,
        "a layer": 2 * b * t * activations,
        "logits": b * math.gcd(t, LOGITS_CHUNK) * config.vocab_size * 8,
    }
    del parts[min("a layer", "logits", key=parts.get)]  # not needed at the same time
    less = "a higher --accumulate, a shorter --max-length or more devices"
    generate.check_room(parts, mesh, less)


def choose_devices(options: argparse.Namespace, job: Job) -> tuple[Mesh, np.dtype]:
    """Return the mesh and the dtype to compute in.

    Where that fails in one process, all exit, and that one says why."""
    devices = jax.devices()
    use, error = options.devices or len(devices), ""
    dtype = file_dtype(job.model)
    if devices[0].platform == "cpu" or dtype != jnp.bfloat16:
        dtype = np.float32  # CPUs are slow with others; gradients underflow in float16
    dtype = jnp.dtype(options.dtype or dtype)
    mesh = Mesh(np.array(devices[:use]), ("data",), axis_types=(AxisType.Auto,))
    if use > len(devices) or (jax.process_count() > 1 and use < len(devices)):
        error = f"--devices {use}: there are {len(devices)} in all processes"
    elif options.batch % (use * options.accumulate):
        error = f"--batch {options.batch} is not a multiple of the {use} devices"
        if options.accumulate > 1:
            error += f" times --accumulate {options.accumulate}"
    else:
        try:
            check_memory(options, job, mesh, dtype)
        except ValueError as exception:
            error = str(exception)
    failed = np.ravel(multihost_utils.process_allgather(np.bool_(error != "")))
    if failed.any():
        if jax.process_index() == failed.argmax():
            print(error, file=sys.stderr, flush=True)
        lifecycle.ignore_signals()
        sys.exit(lifecycle.BAD_INPUT)
    return mesh, dtype


# ----------------------------------------------------------------------------- the run


def file_dtype(model: generate.Model) -> np.dtype:
    return next(iter(model.files.values())).dtype


def load_weights(model: generate.Model, mesh: Mesh, dtype: object) -> dict:
    """Load a model's weights, sharded as in FSDP; exit if one is not finite."""
    try:
        return decoder.load_model(model.files, model.config, mesh, dtype, fsdp_sharding)
    except ValueError as error:
        exit_all(lifecycle.BAD_INPUT, str(error))


class Run:
    """What is on the devices besides the state, and two jitted functions, each compiled
    once for each padded length."""

    def __init__(
        self, options: argparse.Namespace, job: Job, mesh: Mesh, dtype: np.dtype
    ) -> None:
        self.options, self.job, self.mesh = options, job, mesh
        self.sharding_of = replicated if job.lora else fsdp_sharding
        peak, decay = options.learning_rate, options.weight_decay
        schedule = optax.warmup_cosine_decay_schedule(0.0, peak, job.warmup, job.steps)
        matrices = partial(jax.tree.map, lambda x: x.ndim > 1)
        adamw = optax.adamw(schedule, weight_decay=decay, mask=matrices)
        clip = optax.clip_by_global_norm(options.max_grad_norm)
        self.optimizer = optimizer = optax.chain(clip, adamw)
        self.export_dtype = np.dtype(np.float32) if job.lora else file_dtype(job.model)
        self.base = load_weights(job.model, mesh, dtype) if job.lora else {}
        if options.int8:  # one layer at a time, whose old weights are freed
            layers, quantize = self.base["layers"], jax.jit(adapters.quantize_layers)
            for i in range(len(layers)):
                (layers[i],) = quantize({"layers": [layers[i]]})["layers"]
        args = {"dtype": dtype, "mesh": mesh, "sharding_of": self.sharding_of}
        gather_all = partial(gather, **args)

        def score(params: Any, base: dict, batch: Batch) -> tuple[jax.Array, jax.Array]:
            if job.lora:
                params = adapters.with_adapters(base, params, job.lora.scale)
            return sum_losses(params, batch, job.model.config, gather_all)

        def step(state: State, base: dict, batch: Batch) -> tuple[State, jax.Array]:
            def add_micro_batch(sums: Any, batch: Batch) -> tuple[Any, None]:
                grad = jax.value_and_grad(score, has_aux=True)
                (total, count), grads = grad(state.params, base, batch)
                return jax.tree.map(jnp.add, sums, (total, count, grads)), None

            zeros = jax.tree.map(jnp.zeros_like, state.params)
            sums = jnp.float32(0), jnp.int32(0), zeros
            (total, count, grads), _ = jax.lax.scan(add_micro_batch, sums, batch)
            grads = jax.tree.map(lambda g: g / count, grads)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            return State(params, opt_state, state.best), total / count

        def best(params: Any, loss: jax.Array, step: jax.Array) -> Best:
            export = jax.tree.map(lambda x: x.copy().astype(self.export_dtype), params)
            return Best(export, loss, step)

        scalar = NamedSharding(mesh, P())
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state())
        self.step = jax.jit(step, out_shardings=(shardings, scalar), donate_argnums=0)
        self.score = jax.jit(score, out_shardings=scalar)
        self.best = jax.jit(best, out_shardings=shardings.best)

    def abstract_state(self) -> State:
        """Return the shapes, dtypes and shardings of a state."""

        def make() -> State:
            params = jax.tree.map(lambda x: jnp.zeros(x.shape), self.job.trained)
            export = jax.tree.map(lambda x: x.astype(self.export_dtype), params)
            best = Best(export, jnp.float32(0), jnp.int32(0))
            opt_state = self.optimizer.init(params)
            return State(params, opt_state, best if self.job.held_out else None)

        def with_sharding(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return x.update(sharding=self.sharding_of(x, self.mesh))

        return jax.tree.map(with_sharding, jax.eval_shape(make))

    def init_state(self) -> State:
        """Return the state before the first step."""
        job = self.job
        if job.lora:
            args = job.model.config, job.lora, self.mesh, replicated
            params = adapters.init_adapters(jax.random.key(self.options.seed), *args)
        else:
            params = load_weights(job.model, self.mesh, np.float32)
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state().opt_state)
        opt_state = jax.jit(self.optimizer.init, out_shardings=shardings)(params)
        largest = np.finfo(np.float32).max  # a checkpoint with inf is not saved
        best = self.best(params, largest, np.int32(0)) if job.held_out else None
        return State(params, opt_state, best)

    def put(self, examples: list[Example], micro_batches: int) -> Batch:
        """Return micro-batches [n, batch / accumulate, t], sharded over sequences."""
        sharding = NamedSharding(self.mesh, P(None, "data"))
        size = self.options.batch // self.options.accumulate * micro_batches

        def put_one(x: np.ndarray) -> jax.Array:
            x = x.reshape(micro_batches, -1, x.shape[1])
            return jax.make_array_from_callback(x.shape, sharding, x.__getitem__)

        return jax.tree.map(put_one, make_batch(examples, size, self.job.longest))

    def evaluate(self, state: State, done: int) -> float:
        """Log and return the mean loss per trained token of the held-out examples."""
        held_out, sums = self.job.held_out, np.zeros(2)
        size = self.options.batch // self.options.accumulate
        for first in range(0, len(held_out), size):
            batch = self.put(held_out[first : first + size], 1)
            batch = jax.tree.map(lambda x: x[0], batch)
            sums += jax.device_get(self.score(state.params, self.base, batch))
        loss = sums[0] / sums[1]
        if not np.isfinite(loss):
            exit_all(NO_RESTART, f"the eval loss of step {done} is {loss}")
        log_step(done, f"eval loss {loss:.6f}")
        return loss


def train(run: Run, settings: dict) -> Any:
    """Train from the newest intact checkpoint, if there is one, and return the
    parameters to export. If told to stop, save and exit."""
    options, job, log_losses = run.options, run.job, lifecycle.log_losses
    on_cpu = run.mesh.devices.flat[0].platform == "cpu"
    must_wait = on_cpu and jax.__version_info__ < (0, 12)  # old emulated devices
    args = options.folder, settings, options.save_limit
    with lifecycle.Checkpoints(*args) as checkpoints:
        begun, state = checkpoints.restore(run.abstract_state())
        if begun:
            log_step(begun, "restored")
        else:
            state = run.init_state()
        if job.held_out:
            run.evaluate(state, begun)
        if jax.process_count() == 1:
            lifecycle.exit_if_stopped(received)
        done, stopping = begun, False
        losses = []  # of steps that are still running, to be logged later
        speed, tokens, since = "", 0, None
        log_every = min(options.log_every, job.steps)  # print at least the last loss
        while done < job.steps and not stopping:
            set_deadline("the next step", options.step_limit)
            batch = examples_of_step(job.examples, options.seed, done, options.batch)
            state, loss = run.step(state, run.base, run.put(batch, options.accumulate))
            if must_wait:
                loss.block_until_ready()
            done += 1
            tokens += sum(len(one.tokens) for one in batch)
            # Asked once a step: no stop without a save.
            stop = lifecycle.should_stop(received, done - begun)
            stopping = stop and done < job.steps
            if done % log_every == 0:
                log_losses(losses, log_every, speed)  # waits for the steps before
                now = time.monotonic()
                if since:
                    left = (job.steps - done) * (now - since) / log_every
                    speed = f"  {tokens / (now - since):,.0f} tokens/s"
                    speed += f"  {timedelta(seconds=round(left))} left"
                since, tokens = now, 0
            losses.append((done, loss))
            checkpoints.check_save()
            evaluating = done % options.eval_every == 0 or done == job.steps
            if job.held_out and evaluating:
                log_losses(losses, log_every, speed)
                loss = run.evaluate(state, done)
                if loss < state.best.loss:
                    args = np.float32(loss), np.int32(done)
                    state = state._replace(best=run.best(state.params, *args))
            if done % options.save_every == 0 or done == job.steps or stopping:
                log_losses(losses, log_every, speed)
                checkpoints.save(done, state)
        set_deadline("the next step", math.inf)  # a save has a deadline of its own
    if stopping:
        exit_all(
            lifecycle.SAVED, f"stopped at step {done}: the same command resumes from it"
        )
    if not job.held_out:
        return state.params
    log(f"best eval loss {state.best.loss:.6f}, at step {state.best.step}")
    return state.best.params


def save_result(options: argparse.Namespace, job: Job, params: Any) -> None:
    """Write the result to --out; if that fails, exit all processes."""
    if job.lora:
        args = job.model.config, job.lora, str(options.model)
        save = partial(adapters.save_adapters, options.out, params, *args)
    else:
        dtype = file_dtype(job.model)
        shardings = jax.tree.map(lambda x: x.sharding, params)
        cast = partial(jax.tree.map, lambda x: x.astype(dtype))
        params = jax.jit(cast, out_shardings=shardings)(params)
        if not lifecycle.checksums(params)[1]:
            why = f"the weights overflow in {dtype}"
            exit_all(NO_RESTART, f"{options.out} is not written: {why}")
        save = partial(save_weights, options, job.model, params)
    advice = f"the weights are in {options.folder}; free space and repeat the command"
    write(options, save, advice)


def save_weights(
    options: argparse.Namespace, model: generate.Model, params: Any
) -> None:
    """Write a model folder, with the tokenizer and other small files of MODEL."""
    small_files = {path for name in COPIED for path in options.model.glob(name)}
    config = options.model / "config.json"
    args = params, model.config, config, 5 * 10**9, tuple(small_files)
    decoder.save_model(options.out, *args)


def write(options: argparse.Namespace, save: Callable, advice: str) -> None:
    """Call save within --save-limit; where it fails, exit all processes."""
    what = f"the save of {options.out}"
    set_deadline(what, options.save_limit)
    try:
        save()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", error)
        exit_all(NO_RESTART, f"{options.out} is not written: {why}; {advice}")
    set_deadline(what, math.inf)
    log(f"{options.out} is written")


def merge(options: argparse.Namespace) -> None:
    """Write MODEL with adapters merged into it, in the dtype of its files."""
    model = generate.read_model(options.model)
    adapters.read_lora_config(options.merge)  # before it connects
    check_out(options)
    connect(options)
    devices = np.array(jax.devices()[: options.devices])
    mesh = Mesh(devices, ("data",), axis_types=(AxisType.Auto,))
    args = options.merge, model.config, mesh, replicated
    pairs, lora = adapters.load_adapters(*args)
    dtype = file_dtype(model)
    weights = load_weights(model, mesh, dtype)
    shardings = jax.tree.map(lambda x: x.sharding, weights)
    add = partial(adapters.merge_adapters, scale=lora.scale, dtype=dtype)
    add = jax.jit(add, out_shardings=shardings, donate_argnums=0)
    merged = add(weights, pairs)
    write(options, partial(save_weights, options, model, merged), "repeat the command")


def connect(options: argparse.Namespace) -> None:
    """Configure JAX, and join the other processes, if any."""
    if options.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.emulate)
    lifecycle.connect(options)


def main(options: argparse.Namespace) -> None:
    """Fine-tune or merge, and write the result."""
    set_deadline("the next step", options.step_limit + options.wait)
    lifecycle.exit_if_stopped(received)
    try:
        if options.merge:
            return merge(options)
        job = read_job(options)
    except (OSError, ValueError) as error:
        message = str(error)
        if isinstance(error, OSError):
            message = f"{error.filename}: {error.strerror}"
        print(" ".join(message.split()), file=sys.stderr)
        sys.exit(lifecycle.BAD_INPUT)
    connect(options)
    mesh, dtype = choose_devices(options, job)
    if dtype == np.float32:  # TPUs would round the products to bfloat16
        jax.config.update("jax_default_matmul_precision", "highest")
    settings = settings_of(options, job, dtype)
    shared = {name: str(getattr(options, name)) for name in SHARED}
    lifecycle.claim_run(settings | shared, options)

    params = sum(math.prod(x.shape) for x in jax.tree.leaves(job.trained))
    spans = [span for one in job.examples for span in one.spans]
    tokens = sum(stop - start for start, stop in spans)
    log(f"{len(job.examples)} examples, {tokens:,} trained tokens, {job.steps} steps")
    kind = mesh.devices.flat[0].device_kind
    log(f"{params:,} trained parameters, {dtype}, {mesh.size} x {kind}")
    save_result(options, job, train(Run(options, job, mesh, dtype), settings))
    lifecycle.reset_starts()


if __name__ == "__main__":
    lifecycle.run(main, read_options(), received)
