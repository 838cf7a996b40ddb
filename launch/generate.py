"""Generate text with a Llama or Qwen3 model, as downloaded, on all devices there are.

python generate.py FOLDER --prompt "The sea is"     --prompt may be given many times
python generate.py FOLDER --prompts requests.jsonl  one JSON object on each line

A line is {"prompt": "text"} or {"tokens": [1, 15, 7]}; it may have "max_tokens",
"temperature", "seed" and "id". Each answer is one line of JSON on stdout, printed as
soon as it is whole. It needs decoder.py beside it, for adapters adapters.py too, JAX,
and for text the package tokenizers. What it will not do it says in one sentence, and
ends with status 2.
"""

import argparse
import json
import math
import os
import re
import signal
import sys
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

REFUSED, PIPE_CLOSED = 2, 128 + signal.SIGPIPE  # as a shell says of who dies of it
ROWS = 4  # pieces of prompts that are read in one step, at most

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, without a traceback


def end(status: int, sentence: str = "") -> NoReturn:
    """End this process. JAX's own exit would wait for the other processes."""
    if sentence:
        print(" ".join(sentence.split()), file=sys.stderr, flush=True)
    os._exit(status)


# ----------------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """One that complains in one sentence."""

    def error(self, message: str) -> NoReturn:
        end(REFUSED, f"{message} (--help explains all options)")


def reader(kind: type, least: int, most: int = 2**31 - 1) -> Callable[[str], Any]:
    """What reads a number from least to most, or raises an ArgumentTypeError."""

    def read(text: str) -> int | float:
        try:
            if least <= kind(text) <= most:
                return kind(text)
        except ValueError:
            pass
        name = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text} is no {name} from {least} to {most}")

    return read


count = reader(int, 1)
READERS = {  # of what a line may say for itself
    "max_tokens": count,
    "temperature": reader(float, 0, 1000),
    "seed": reader(int, 0),
}


def check_processes(parser: Parser, options: argparse.Namespace) -> None:
    """Complain of options that do not say which process this is."""
    by_hand = (options.coordinator, options.processes, options.process)
    if by_hand.count(None) not in (0, 3):
        parser.error("--coordinator, --processes and --process go together")
    if options.processes and options.process >= options.processes:
        parser.error(f"--process counts from 0: to {options.processes - 1}")
    if options.coordinator and not re.fullmatch(r".+:\d+", options.coordinator):
        parser.error(f"--coordinator {options.coordinator} is not HOST:PORT")


def read_options() -> argparse.Namespace:
    """The options of the command line, or their defaults."""
    what, _, more = __doc__.partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=what, epilog=more, formatter_class=raw)
    option = parser.add_argument
    option("folder", type=Path, help="with config.json and *.safetensors")
    option("--prompt", action="append", default=[], help="a text to go on from")
    option("--prompts", type=Path, metavar="FILE", help="requests, one a line")
    option("--adapters", type=Path, metavar="DIR", help="LoRA, as PEFT or we saved it")
    for name, read, default, about in (
        ("--max-tokens", READERS["max_tokens"], 128, "of an answer, at most"),
        ("--temperature", READERS["temperature"], 0.0, "0: the likeliest, 1: a draw"),
        ("--seed", READERS["seed"], 0, "of the first request, and then one more each"),
        ("--slots", count, 8, "answers at a time"),
        ("--length", count, None, "tokens that a slot has room for; None: as needed"),
        ("--devices", count, None, "how many to use; None: all"),
        ("--emulate", count, None, "how many the CPU shall play; None: what there is"),
        ("--processes", count, None, "how many there are, if no launcher says"),
        ("--process", reader(int, 0), None, "which one this is, from 0"),
    ):
        option(name, type=read, default=default, help=f"{about} (%(default)s)")
    option("--coordinator", metavar="HOST:PORT", help="where process 0 is")
    option(
        "--distributed", action="store_true", help="be one of a launcher's processes"
    )
    kinds = ("float32", "bfloat16", "float16")
    option("--dtype", choices=kinds, help="else float32 on a CPU, or as the files have")
    options = parser.parse_args()
    check_processes(parser, options)
    if not options.prompt and not options.prompts:
        parser.error("there is nothing to answer: give --prompt or --prompts")
    return options


if __name__ == "__main__":
    options = read_options()  # before what follows, which takes a second

import decoder
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# ---------------------------------------------------------------------------- requests


@dataclass
class Request:
    """A prompt, how it is to be answered, and what has been said so far."""

    name: str | int
    prompt: list[int]
    most: int  # tokens of the answer
    heat: float
    seed: int
    said: list[int] = field(default_factory=list)
    asked: int = 0  # tokens that are said, or being computed
    finish: str = ""  # "stop" or "length", once it is answered

    def as_json(self, tokenizer: Any) -> str:
        """The line that is printed; a tokenizer that is a str stands for none."""
        line = {"id": self.name, "prompt_tokens": len(self.prompt), "tokens": self.said}
        if not isinstance(tokenizer, str):
            line["text"] = tokenizer.decode(self.said)
        line |= {"finish_reason": self.finish, "seed": self.seed}
        return json.dumps(line, ensure_ascii=False)


def read_tokenizer(folder: Path) -> Any:
    """What turns text into tokens and back, or a str that says why there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return f"{folder} has no tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return "the package tokenizers is missing (pip install tokenizers)"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it has no kind of its own
        raise ValueError(f"{path} is no tokenizer: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@cache
def read_chat_template(folder: Path) -> Callable[[list[dict], bool], str]:
    """Return render(messages, add_generation_prompt), which applies the chat template
    of a folder as Transformers does.

    Raise ValueError, as render does, where that is impossible."""
    path, config = folder / "tokenizer_config.json", {}
    try:
        if path.exists():
            config = json.loads(path.read_text())
        own = folder / "chat_template.jinja"
        source = own.read_text() if own.exists() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {one["name"]: one["template"] for one in source}.get("default")
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is malformed: {error!r}") from None
    if not isinstance(source, str):
        raise ValueError(f"{folder} has no chat template")
    try:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need jinja2 (pip install jinja2)") from None

    def fail(message: str) -> NoReturn:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = fail
    environment.globals["strftime_now"] = time.strftime
    tokens = {}  # bos_token, eos_token and others that templates use
    for name in (name for name in config if name.endswith("_token")):
        token = config[name]
        token = token.get("content") if isinstance(token, dict) else token
        tokens |= {name: token} if isinstance(token, str) else {}

    def render(messages: list[dict], add_generation_prompt: bool) -> str:
        try:
            return environment.from_string(source).render(
                messages=messages, add_generation_prompt=add_generation_prompt, **tokens
            )
        except Exception as error:  # a template can raise anything
            raise ValueError(f"the chat template fails: {error}") from None

    return render


def read_tokens(
    what: str, said: Any, tokenizer: Any, size: int, is_text: bool, special: bool = True
) -> list[int]:
    """The tokens of a text, or of a list of them; ValueError if it is none.

    size is of the vocabulary; special: with what the tokenizer puts around a text."""
    if is_text:
        if isinstance(tokenizer, str):
            raise ValueError(f"a text needs a tokenizer, and {tokenizer}")
        try:
            said = tokenizer.encode(said, add_special_tokens=special).ids
        except (TypeError, UnicodeError):
            raise ValueError(f"its {what} is no Unicode text") from None
    if not isinstance(said, list) or not said:
        raise ValueError(f"its {what} needs at least one token")
    for token in said:
        if type(token) is not int or not 0 <= token < size:
            raise ValueError(f"{token!r} is no token: these go from 0 to {size - 1}")
    return said


def read_request(
    asked: Any, index: int, options: argparse.Namespace, tokenizer: Any, size: int
) -> Request:
    """One request; ValueError if it cannot be answered. size is of the vocabulary."""
    if not isinstance(asked, dict) or ("prompt" in asked) == ("tokens" in asked):
        raise ValueError('it is no object with either "prompt" or "tokens"')
    if unknown := asked.keys() - {"prompt", "tokens", "id", *READERS}:
        raise ValueError(f"it has {sorted(unknown)}, which mean nothing here")
    name = asked.get("id", index)
    if type(name) not in (str, int):
        raise ValueError(f"its id {name!r} is no text and no whole number")
    values = {key: getattr(options, key) for key in READERS}
    values["seed"] = (options.seed + index) % 2**31
    for key in [key for key in READERS if key in asked]:
        try:
            values[key] = READERS[key](json.dumps(asked[key]))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{key}: {error}") from None
    is_text = "prompt" in asked
    said = asked["prompt" if is_text else "tokens"]
    tokens = read_tokens("prompt", said, tokenizer, size, is_text)
    return Request(name, tokens, *values.values())


def read_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """Each line of a file that is not empty, after the place where it stands."""
    for place, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            yield f"{path}, line {place}", line


def read_json(where: str, line: str | bytes) -> Any:
    """What a line says; ValueError, with the place, if it is not JSON."""
    try:
        return json.loads(line)
    except ValueError as error:
        why = getattr(error, "msg", error)
        raise ValueError(f"{where}: it is not JSON ({why})") from None


def read_requests(
    options: argparse.Namespace, c: decoder.Config, tokenizer: Any
) -> list[Request]:
    """All requests; ValueError, with the place, for one that cannot be answered."""
    lines = [("--prompt", json.dumps({"prompt": text})) for text in options.prompt]
    if options.prompts:
        lines.extend(read_lines(options.prompts))
    requests, names = [], set()
    for index, (where, line) in enumerate(lines):
        asked = read_json(where, line)
        try:
            request = read_request(asked, index, options, tokenizer, c.vocab_size)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if request.name in names:
            raise ValueError(f"{where}: the id {request.name!r} was there before")
        names.add(request.name)
        requests.append(request)
    if not requests:
        raise ValueError(f"{options.prompts} asks for nothing")
    return requests


def limits(folder: Path) -> tuple[float, set[int]]:
    """How many positions the model was made for, and the tokens that end an answer."""
    said = json.loads((folder / "config.json").read_text())
    positions = said.get("max_position_embeddings") or math.inf
    path = folder / "generation_config.json"
    stop = said.get("eos_token_id")
    if path.exists():
        stop = json.loads(path.read_text()).get("eos_token_id", stop)
    return positions, {*stop} if isinstance(stop, list) else {stop} - {None}


class Model(NamedTuple):
    """A folder, of which no weight is read yet."""

    config: decoder.Config
    positions: float  # how many it was made for
    stops: set[int]  # tokens that end an answer
    tokenizer: Any  # or a str that says why there is none
    files: decoder.Files


def read_model(folder: Path) -> Model:
    """What there is in a folder; ValueError or OSError if it will not do."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder: download the model first")
    try:
        c = decoder.read_config(folder)
        positions, stops = limits(folder)
        tokenizer = read_tokenizer(folder)
        files = decoder.open_model(folder)
        decoder.check_tensors(files, decoder.model_tensors(c), c)
    except json.JSONDecodeError as error:
        raise ValueError(f"a file of {folder} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} is not as it should be: {error!r}") from None
    return Model(c, positions, stops, tokenizer, files)


# ------------------------------------------------------------------------ two programs


class Slots(NamedTuple):
    """What the devices keep of each slot, one number each."""

    said: jax.Array  # the newest token, which is not yet read
    positions: jax.Array  # its position
    seeds: jax.Array
    heat: jax.Array


class Rows(NamedTuple):
    """Pieces of prompts for one step, a row each; several may be of one slot."""

    tokens: np.ndarray  # i32[rows, chunk]
    slots: np.ndarray  # whose it is: i32[rows], as the rest
    start: np.ndarray  # its first position
    count: np.ndarray  # its tokens; 0 in a row that is not used
    ends: np.ndarray  # its slot if it ends the prompt, else a number past all slots
    seeds: np.ndarray
    heat: np.ndarray


def pick(
    scores: jax.Array, seeds: jax.Array, positions: jax.Array, heat: jax.Array
) -> jax.Array:
    """decoder.sample, which draws nothing while no row asks for it."""
    return jax.lax.cond(
        (heat > 0).any(),
        decoder.sample,
        lambda scores, *_: scores.argmax(-1),
        *(scores, seeds, positions, heat),
    )


def prefill(
    weights: dict, caches: list, slots: Slots, rows: Rows, c: decoder.Config
) -> tuple[list, Slots]:
    """Read pieces of prompts; who has read all of its prompt says its first token."""
    length = caches[0][0].shape[1]
    offsets = jnp.arange(rows.tokens.shape[1])
    positions = rows.start[:, None] + offsets
    positions = jnp.where(
        offsets < rows.count[:, None], positions, length
    )  # or nowhere

    def attend(
        q, k, v, cache, positions
    ):  # as decoder.cached_attention, over each row's slot
        at = rows.slots[:, None], positions
        keys = cache[0].at[at].set(k, mode="drop")
        values = cache[1].at[at].set(v, mode="drop")
        visible = jnp.arange(length) <= positions[:, :, None]
        y = decoder.attention(q, keys[rows.slots], values[rows.slots], visible)
        return y, (keys, values)

    x, caches = decoder.hidden_states(
        weights, rows.tokens, positions, c, caches, attend
    )
    x = x[jnp.arange(len(x)), jnp.maximum(rows.count - 1, 0)]
    scores, after = decoder.compute_logits(weights, x, c), rows.start + rows.count
    new = pick(scores, rows.seeds, after, rows.heat), after, rows.seeds, rows.heat
    pairs = zip(slots, new, strict=True)
    return caches, Slots(*(old.at[rows.ends].set(x, mode="drop") for old, x in pairs))


def attend_by_sums(
    q: jax.Array, k: jax.Array, v: jax.Array, cache: decoder.Cache, positions: jax.Array
) -> tuple[jax.Array, decoder.Cache]:
    """Like decoder.cached_attention for one token each, in float32 and without a matrix
    product, for which XLA's CPU compiler would copy and transpose both caches."""
    at = jnp.arange(len(q))[:, None], positions
    cache = tuple(old.at[at].set(new, mode="drop") for old, new in zip(cache, (k, v)))
    query, keys, values = (x.astype(jnp.float32) for x in (q, *cache))
    scores = (query * keys[:, :, :, None]).sum(-1) * q.shape[-1] ** -0.5
    visible = jnp.arange(keys.shape[1]) <= positions  # [b, length]
    scores = jnp.where(visible[:, :, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=1)[..., None]
    y = (weights * values[:, :, :, None]).sum(1, keepdims=True)
    return y.astype(q.dtype), cache


def decode(
    weights: dict, caches: list, slots: Slots, c: decoder.Config, attend: Callable
) -> tuple[list, Slots]:
    """Each slot reads its newest token and says the next. One that is free does so
    too, for nobody: what it writes, its next prompt writes over before it looks."""
    at = slots.positions[:, None]
    x, caches = decoder.hidden_states(
        weights, slots.said[:, None], at, c, caches, attend
    )
    scores, after = decoder.compute_logits(weights, x[:, 0], c), slots.positions + 1
    said = pick(scores, slots.seeds, after, slots.heat)
    return caches, slots._replace(said=said, positions=after)


Piece = tuple[Request, int, int]  # whose prompt, its slot, the first token to read


class Shape(NamedTuple):
    """The sizes for which the two programs are compiled."""

    slots: int
    length: int
    rows: int
    chunk: int
    dtype: np.dtype

    def rows_of(self, pieces: list[Piece]) -> Rows:
        """What a step needs to know of these pieces."""
        tokens = np.zeros((self.rows, self.chunk), np.int32)
        slots, start, count, ends, seeds = np.zeros((5, self.rows), np.int32)
        heat = np.zeros(self.rows, np.float32)
        ends[:] = self.slots
        for row, (request, slot, begin) in enumerate(pieces):
            part = request.prompt[begin : begin + self.chunk]
            tokens[row, : len(part)] = part
            slots[row], start[row], count[row] = slot, begin, len(part)
            seeds[row], heat[row] = request.seed, request.heat
            if begin + len(part) == len(request.prompt):
                ends[row] = slot
        return Rows(tokens, slots, start, count, ends, seeds, heat)


class Engine:
    """The weights, the caches, and the two programs, compiled once."""

    def __init__(
        self, weights: dict, c: decoder.Config, mesh: Mesh, shape: Shape
    ) -> None:
        whole = NamedSharding(mesh, P())
        cuts = NamedSharding(mesh, P(None, "group", "kv"))
        make = partial(decoder.init_cache, c, shape.slots, shape.length, shape.dtype)
        integers = np.zeros((4, shape.slots), np.int32)
        self.weights, self.shape = weights, shape
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.must_wait = on_cpu and mesh.size > 1 and jax.__version_info__ < (0, 12)
        self.caches = jax.jit(make, out_shardings=cuts)()
        zeros = Slots(*integers[:3], np.float32(integers[3]))
        self.slots = jax.device_put(zeros, whole)
        places = jax.tree.map(lambda x: x.sharding, weights), cuts, whole

        def compile_it(program: Callable, *rows: Rows) -> Callable:
            jitted = jax.jit(
                program,
                in_shardings=(*places, *(whole for _ in rows)),
                out_shardings=(cuts, whole),
                donate_argnums=1,
            )
            return jitted.lower(weights, self.caches, self.slots, *rows).compile()

        attend = attend_by_sums if on_cpu else decoder.cached_attention
        self.prefill = compile_it(partial(prefill, c=c), shape.rows_of([]))
        self.decode = compile_it(partial(decode, c=c, attend=attend))

    def step(self, rows: Rows | None) -> jax.Array:
        """Read these pieces, or let all slots say one token: the newest of each slot,
        which is still being computed."""
        program, more = (self.decode, ()) if rows is None else (self.prefill, (rows,))
        self.caches, self.slots = program(self.weights, self.caches, self.slots, *more)
        if self.must_wait:
            self.slots.said.block_until_ready()
        return self.slots.said


def serve(
    engine: Engine, requests: list[Request], stops: set[int]
) -> Iterator[Request | None]:
    """Each request as soon as it is answered, and None after any other step.

    A free slot takes the next request at once. The devices are a step ahead: while
    they compute one, the tokens of the one before are looked at."""
    shape, waiting = engine.shape, deque(requests)
    busy, pieces, under_way = {}, deque(), deque()  # busy: slot -> request
    while waiting or busy or under_way:
        for slot in range(shape.slots):
            if waiting and slot not in busy:
                busy[slot] = request = waiting.popleft()
                starts = range(0, len(request.prompt), shape.chunk)
                pieces.extend((request, slot, start) for start in starts)
        if busy:
            asked, rows = busy.copy(), None
            if pieces:  # prompts first, so that many slots speak in the steps after
                rows = shape.rows_of(
                    [pieces.popleft() for _ in range(min(shape.rows, len(pieces)))]
                )
                asked = {slot: busy[slot] for slot in rows.ends if slot in busy}
            under_way.append((engine.step(rows), asked))
            for slot, request in asked.items():
                request.asked += 1
                if request.asked == request.most:
                    del busy[slot]  # free for the next, while its last word is computed
        if len(under_way) > 1 or not busy:
            said, asked = under_way.popleft()
            said = np.asarray(said)
            for slot, request in asked.items():
                if request.finish:
                    continue  # it had stopped while this step was queued
                request.said.append(int(said[slot]))
                if request.said[-1] in stops:
                    request.finish = "stop"
                    if busy.get(slot) is request:
                        del busy[slot]
                elif len(request.said) == request.most:
                    request.finish = "length"
                if request.finish:
                    yield request
            yield None


# ------------------------------------------------------------- processes, memory, lines


def meet(options: argparse.Namespace) -> None:
    """Meet the other processes, if there are any; ValueError if that cannot be."""
    by_hand = (options.coordinator, options.processes, options.process)
    if not options.distributed and by_hand == (None, None, None):
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
            if int(os.environ.get(name) or 1) > 1:
                raise ValueError(
                    f"{name} is {os.environ[name]}: without --distributed, or "
                    "--coordinator and its like, each process would answer everything"
                )
        return
    try:
        jax.distributed.initialize(  # which listens at this address, and at no other
            *by_hand, coordinator_bind_address=options.coordinator
        )
    except RuntimeError as error:
        raise ValueError(f"cannot join the other processes: {error}") from None


def agree(*what: object) -> None:
    """ValueError in all processes if they would not take the same steps."""
    told = repr(what).encode()
    sums = multihost_utils.process_allgather(np.int32(zlib.crc32(told) >> 1))
    if (sums != sums[0]).any():
        raise ValueError("all processes need the same model, options and prompts")


def fitting_sharding(tensor: decoder.Tensor, mesh: Mesh) -> NamedSharding:
    """A tensor cut as decoder says if that divides, and otherwise whole everywhere."""
    try:
        return decoder.tensor_sharding(tensor, mesh)
    except ValueError:
        return NamedSharding(mesh, P())


def plan(
    options: argparse.Namespace,
    requests: list[Request],
    positions: float,
    mesh: Mesh,
    dtype: np.dtype,
) -> Shape:
    """The sizes that these requests need; it lets no answer go on past the cache.

    positions is how many the model was made for. ValueError if a prompt does not fit.
    """
    needed = max(len(request.prompt) + request.most for request in requests)
    length = options.length or int(min(needed, positions))
    if length > positions:
        raise ValueError(f"--length {length}: the model was made for {positions}")
    for request in requests:
        size = len(request.prompt)
        if size >= length:
            raise ValueError(
                f"the prompt of {request.name!r} has {size} tokens, and with one of "
                f"an answer it has to fit into {length} positions"
            )
    short = [r for r in requests if r.most > length - len(r.prompt)]
    if short:
        told = f"that of {short[0].name!r} after {length - len(short[0].prompt)} tokens"
        say(f"{len(short)} answers end where {length} positions are full: {told}")
    for request in short:
        request.most = length - len(request.prompt)
    sizes = [len(request.prompt) for request in requests]
    chunk = min(max(sizes), 16 if mesh.devices.flat[0].platform == "cpu" else 128)
    rows = min(ROWS, sum(math.ceil(size / chunk) for size in sizes))
    group = mesh.shape["group"]
    length = math.ceil(length / group) * group  # so that the cut divides
    return Shape(min(options.slots, len(requests)), length, rows, chunk, dtype)


def check_room(parts: dict[str, int], mesh: Mesh, less: str) -> None:
    """ValueError if parts, in bytes, are too much for a device of this process."""
    here = mesh.local_devices
    room = (here[0].memory_stats() or {}).get("bytes_limit")
    if not room and (table := Path("/proc/meminfo")).exists():
        available = re.search(r"MemAvailable: +(\d+) kB", table.read_text())
        room = int(available[1]) * 1024 // len(here)
    if room and room < sum(parts.values()):
        told = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in parts.items())
        raise ValueError(
            f"too little memory: a device needs {sum(parts.values()) / 2**30:,.2f} GiB "
            f"({told}) and has {room / 2**30:,.2f}; {less} need less"
        )


def check_memory(c: decoder.Config, mesh: Mesh, shape: Shape) -> None:
    """ValueError if weights, cache and logits would not fit on a device of this
    process; of what is computed in between it knows nothing."""
    wide, tree = shape.dtype.itemsize, jax.tree.leaves(decoder.model_tensors(c))
    cuts = [fitting_sharding(tensor, mesh).shard_shape(tensor.shape) for tensor in tree]
    cache = 2 * c.num_layers * shape.slots * shape.length * c.num_kv_heads * c.head_dim
    parts = {
        "weights": sum(map(math.prod, cuts)) * wide,
        "cache": cache * wide // mesh.size,
        "logits": max(shape.slots, shape.rows) * c.vocab_size * 4,
    }
    check_room(parts, mesh, "fewer --slots, a shorter --length or more devices")


def say(text: str) -> None:
    """Tell who looks on how far it is: process 0 does, on stderr."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def prepare(
    options: argparse.Namespace,
) -> tuple[Engine, list[Request], set[int], Any]:
    """All that is needed to answer, or ValueError or OSError with the reason why not.

    What can be refused is refused before any weight is read."""
    c, positions, stops, tokenizer, files = read_model(options.folder)
    requests = read_requests(options, c, tokenizer)
    lora = None
    if options.adapters:
        import adapters

        try:
            lora = adapters.read_lora_config(options.adapters)
        except (KeyError, TypeError, AttributeError) as error:
            why = f"{options.adapters} is not as it should be: {error!r}"
            raise ValueError(why) from None

    if options.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.emulate)
    meet(options)
    devices = jax.devices()
    use = options.devices or len(devices)
    if use > len(devices) or (jax.process_count() > 1 and use < len(devices)):
        raise ValueError(f"--devices {use}: there are {len(devices)} in all processes")
    mesh = decoder.model_mesh(c, devices[:use])
    kind = next(iter(files.values())).dtype
    if devices[0].platform == "cpu":
        kind = np.float32  # with others it is slow
    dtype = jnp.dtype(options.dtype or kind)
    if dtype == np.float32:  # a TPU's products would be rounded
        jax.config.update("jax_default_matmul_precision", "highest")
    shape = plan(options, requests, positions, mesh, dtype)
    check_memory(c, mesh, shape)
    if jax.process_count() > 1:
        agree(requests, shape, sorted(stops), lora)
    if lora:
        added, _ = adapters.load_adapters(options.adapters, c, mesh, fitting_sharding)

    told = f"{len(requests)} prompts, {shape.slots} at a time, {dtype}"
    say(f"{told}, on {mesh.size} {devices[0].device_kind} devices")
    begun = time.monotonic()
    weights = jax.block_until_ready(
        decoder.load_model(files, c, mesh, dtype, fitting_sharding)
    )
    if lora:
        weights = adapters.with_adapters(weights, added, lora.scale)
    loaded = time.monotonic()
    engine = Engine(weights, c, mesh, shape)
    compiled = time.monotonic()
    say(f"loaded in {loaded - begun:.1f} s, compiled in {compiled - loaded:.1f} s")
    return engine, requests, stops, tokenizer


def main(options: argparse.Namespace) -> None:
    """Answer all requests, each on a line of stdout as soon as it is whole."""
    try:
        # Libraries print too: what they write to stdout goes to stderr.
        lines = open(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
        os.dup2(2, 1)
        engine, requests, stops, tokenizer = prepare(options)
    except OSError as error:
        end(REFUSED, f"{error.filename or 'stdout'}: {error.strerror}")
    except ValueError as error:
        end(REFUSED, str(error))
    begun = told = time.monotonic()
    done = 0
    for request in serve(engine, requests, stops):
        done += request is not None
        if request and jax.process_index() == 0:
            try:
                print(request.as_json(tokenizer), file=lines, flush=True)
            except BrokenPipeError:  # nobody reads on
                end(PIPE_CLOSED)
            except OSError as error:
                end(1, f"cannot print the answers: {error.strerror}")
        if time.monotonic() > told + 1:
            told = time.monotonic()
            say(f"{done} of {len(requests)} answers")
    tokens, seconds = sum(len(r.said) for r in requests), time.monotonic() - begun
    say(f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} a second")


if __name__ == "__main__":
    main(options)
