"""Generate text with a Llama, Qwen3 or Gemma 3 model on all available devices.

examples:
  python generate.py FOLDER --prompt "The sea is"
  python generate.py FOLDER --chat --prompt "Why is the sea blue?" --stream
  python generate.py FOLDER --prompts requests.jsonl > answers.jsonl

FOLDER is a model in Hugging Face's layout. A line of the file of requests is an object
with "prompt", "messages" (for the chat template) or "tokens"; it may also have "id",
"max_tokens", "temperature", "top_k", "top_p", "seed", "stop" and
"chat_template_kwargs". Each answer is one JSON line on stdout, in the order in which
the answers are finished.

It needs decoder.py in the same folder, adapters.py for --adapters, JAX, tokenizers for
text, and Jinja2 for chat templates. The exit status is 2 for invalid input.
"""

import argparse
import difflib
import importlib.util
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

BAD_INPUT, PIPE_CLOSED = 2, 128 + signal.SIGPIPE  # as a shell reports that signal
ROWS = 4  # maximum number of chunks of prompts in one prefill step

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C exits without a traceback


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, which is plural unless the number is 1."""
    return f"{number:,} {noun}" + "s" * (number != 1)


def exit_now(status: int, message: str = "") -> NoReturn:
    """Exit this process at once; JAX's exit handlers would wait for other processes."""
    if message:
        print(" ".join(message.split()), file=sys.stderr, flush=True)
    os._exit(status)


# ----------------------------------------------------------------------------- options


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        exit_now(BAD_INPUT, f"{message} (see --help)")


def reader(kind: type, least: float, most: float = 2**31 - 1) -> Callable[[str], Any]:
    """Return a function that reads a number from least to most; it raises
    ArgumentTypeError for other texts."""

    def read(text: str) -> int | float:
        try:
            if least <= kind(text) <= most:
                return kind(text)
        except ValueError:
            pass
        name = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(
            f"{text[:40]} is not {name} from {least} to {most}"
        )

    return read


count = reader(int, 1)
READERS = {  # options that a request may set, too
    "max_tokens": count,
    "temperature": reader(float, 0, 1000),
    "top_k": reader(int, 0),
    "top_p": reader(float, 1e-6, 1),
    "seed": reader(int, 0),
}
DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}  # if the model has no others


def check_processes(parser: Parser, options: argparse.Namespace) -> None:
    """Report options that do not identify this process."""
    manual = options.coordinator, options.processes, options.process
    if manual.count(None) not in (0, 3):
        parser.error("--coordinator, --processes and --process need each other")
    if options.processes and options.process >= options.processes:
        parser.error(f"--process {options.process} is not below --processes")
    if options.coordinator and not re.fullmatch(r".+:\d+", options.coordinator):
        parser.error(f"--coordinator {options.coordinator} is not HOST:PORT")


def check_modules(parser: Parser, options: argparse.Namespace) -> None:
    """Report modules of this program that were not copied with it."""
    for name in ["decoder"] + ["adapters"] * bool(options.adapters):
        if importlib.util.find_spec(name) is None:
            folder = Path(__file__).resolve().parent
            parser.error(f"{name}.py is missing; copy it into {folder}")


def read_options() -> argparse.Namespace:
    """Return the options of the command line, or their defaults."""
    title, _, details = __doc__.partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(description=title, epilog=details, formatter_class=raw)
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="folder of the model")
    add("--adapters", type=Path, metavar="DIR", help="LoRA adapters in PEFT's layout")
    dtypes = "float32", "bfloat16", "float16"
    about = "dtype of weights and cache (default: float32 on CPUs, else the files')"
    add("--dtype", choices=dtypes, help=about)

    add = parser.add_argument_group("requests").add_argument
    about = "text to continue; may be repeated"
    add("--prompt", action="append", default=[], metavar="TEXT", help=about)
    add("--prompts", metavar="FILE", help="JSONL file of requests; - reads stdin")
    add("--chat", action="store_true", help="apply the chat template to each prompt")
    add("--stream", action="store_true", help="print new text while it is generated")
    add("--logprobs", action="store_true", help="print the tokens' log-probabilities")
    about = "end an answer before this text; may be repeated"
    add("--stop", action="append", default=[], metavar="TEXT", help=about)

    add = parser.add_argument_group("generation").add_argument
    about = "maximum number of tokens to generate (default: 128)"
    add("--max-tokens", type=count, default=128, metavar="N", help=about)
    for name, metavar, about in (
        ("temperature", "T", "sampling temperature; 0 takes the highest-scoring token"),
        ("top_k", "K", "sample from the K highest-scoring tokens; 0 means all"),
        ("top_p", "P", "sample from the fewest tokens with this total probability"),
    ):
        option = f"--{name.replace('_', '-')}"
        about += f" (default: the model's, or {DEFAULTS[name]:g})"
        add(option, type=READERS[name], metavar=metavar, help=about)
    about = "seed of the first request; the second has N + 1 (default: 0)"
    add("--seed", type=READERS["seed"], default=0, metavar="N", help=about)

    add = parser.add_argument_group("devices").add_argument
    about = "answers generated at the same time (default: 8)"
    add("--slots", type=count, default=8, metavar="N", help=about)
    about = "maximum tokens of prompt and answer together (default: as needed)"
    add("--length", type=count, metavar="N", help=about)
    about = "number of devices to use (default: all)"
    add("--devices", type=count, metavar="N", help=about)
    about = "run on the CPU, as N devices per process"
    add("--emulate", type=count, metavar="N", help=about)
    about = "join the processes that a launcher known to JAX has started"
    add("--distributed", action="store_true", help=about)
    about = "address of process 0, if there is no such launcher"
    add("--coordinator", metavar="HOST:PORT", help=about)
    add("--processes", type=count, metavar="N", help="number of processes")
    about = "index of this process, from 0"
    add("--process", type=reader(int, 0), metavar="I", help=about)
    options = parser.parse_args()
    check_processes(parser, options)
    check_modules(parser, options)
    if not options.prompt and not options.prompts:
        parser.error("no requests: give --prompt or --prompts")
    return options


if __name__ == "__main__":
    options = read_options()  # before the slow imports

import json

import decoder
import jax
import jax.numpy as jnp
import numpy as np
from decoder import read_json
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# ------------------------------------------------------------------------------- model


class Model(NamedTuple):
    """A folder whose weights are not read yet."""

    config: decoder.Config
    positions: float  # maximum sequence length
    stop_tokens: set[int]
    sampling: dict[str, Any]  # default temperature, top_k and top_p
    tokenizer: Any  # or a str that says why there is none
    files: decoder.Files


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, or a str that says why there is none."""
    path = folder / "tokenizer.json"
    if not path.exists():
        return f"{folder} has no tokenizer.json"
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return "the package tokenizers is missing (pip install tokenizers)"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # it has no class of its own
        raise ValueError(f"{path} is not a tokenizer: {error}") from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def read_optional(path: Path) -> dict:
    """Return the object of a JSON file, or {} if there is no such file."""
    data = read_json(path, path.read_bytes()) if path.exists() else {}
    if not isinstance(data, dict):
        raise ValueError(f"{path} is not a JSON object")
    return data


def read_generation(folder: Path) -> tuple[float, set[int], dict[str, Any]]:
    """Return the maximum sequence length, the stop tokens, and sampling defaults."""
    config = read_optional(folder / "config.json")
    path = folder / "generation_config.json"
    generation = read_optional(path)
    stop = generation.get("eos_token_id", config.get("eos_token_id"))
    sampling = {}
    if generation.get("do_sample"):
        sampling = {"temperature": 1.0}
        for name in DEFAULTS.keys() & generation.keys():
            try:
                sampling[name] = READERS[name](json.dumps(generation[name]))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{path}: {name}: {error}") from None
    positions = config.get("max_position_embeddings") or math.inf
    stop_tokens = {*stop} if isinstance(stop, list) else {stop} - {None}
    return positions, stop_tokens, sampling


def read_model(folder: Path) -> Model:
    """Return what a folder contains; raise ValueError or OSError if it is unusable."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; download the model first")
    try:
        config = decoder.read_config(folder)
        generation = read_generation(folder)
        tokenizer = read_tokenizer(folder)
        files = decoder.open_model(folder)
        decoder.check_tensors(files, decoder.model_tensors(config), config)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder} has a malformed file: {error!r}") from None
    return Model(config, *generation, tokenizer, files)


@cache
def read_chat_template(folder: Path) -> Callable[..., str]:
    """Return render(messages, add_generation_prompt=True, **variables), which applies
    the chat template of a folder as Transformers does, in a sandbox.

    Raise ValueError, as render does, where that is impossible."""
    config = read_optional(folder / "tokenizer_config.json")
    source, path = config.get("chat_template"), folder / "chat_template.jinja"
    if path.exists():
        source = path.read_text(encoding="utf-8")
    elif isinstance(source, list):  # several, by name
        source = {each["name"]: each["template"] for each in source}.get("default")
    if not isinstance(source, str):
        raise ValueError(f"{folder} has no chat template")
    try:
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("chat templates need jinja2 (pip install jinja2)") from None
    tokens = {}  # bos_token, eos_token and others that templates use
    for name, token in config.items():
        token = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(token, str):
            tokens[name] = token

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # marks what the assistant says; it renders as its body

        def parse(self, parser: Any) -> list:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> NoReturn:
        raise ValueError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, Generation],
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = time.strftime
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"{folder}: malformed chat template: {error}") from None

    def render(
        messages: list[dict], add_generation_prompt: bool = True, **variables: object
    ) -> str:
        variables = {"tools": None, "documents": None} | variables
        variables |= {"messages": messages}
        variables["add_generation_prompt"] = add_generation_prompt
        try:
            return template.render(tokens | variables)
        except Exception as error:  # a template can raise anything
            raise ValueError(f"the chat template fails: {error}") from None

    return render


# ---------------------------------------------------------------------------- requests


@dataclass
class Request:
    """A prompt, its generation parameters, and its answer so far."""

    name: str | int
    prompt: list[int]
    stop: list[str]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scheduled: int = 0  # tokens generated, or being computed
    finish_reason: str = ""  # "stop" or "length", at the end
    text: str = ""  # of the answer, if it is streamed or has stop strings
    streamed: int = 0  # characters of it that are printed

    def decode(self, tokenizer: Any) -> str:
        """Return the answer's text. It is decoded after the end of the prompt, because
        some tokenizers drop the space before the first token of a text."""
        before = tokenizer.decode(self.prompt[-16:])
        text = tokenizer.decode(self.prompt[-16:] + self.generated)
        if text.startswith(before):
            return text[len(before) :]
        return tokenizer.decode(self.generated)  # the prompt ends within a character

    def append(self, token: int, stop_tokens: set[int], tokenizer: Any) -> None:
        """Add a token to the answer, and set finish_reason if it is the last one."""
        self.generated.append(token)
        if token in stop_tokens:
            self.finish_reason = "stop"
        elif len(self.generated) == self.max_tokens:
            self.finish_reason = "length"
        if tokenizer is not None:
            self.text = self.decode(tokenizer)
            found = [self.text.find(stop) for stop in self.stop if stop in self.text]
            if found:
                self.text, self.finish_reason = self.text[: min(found)], "stop"

    def new_text(self) -> str:
        """Return text that is not printed yet and cannot change any more."""
        end = len(self.text)
        if not self.finish_reason:
            end = len(self.text.rstrip("\ufffd"))  # an incomplete character
            end -= max([len(stop) - 1 for stop in self.stop], default=0)
        start, self.streamed = self.streamed, max(end, self.streamed)
        return self.text[start : self.streamed]

    def as_json(self, tokenizer: Any, logprobs: bool) -> str:
        """Return the line to print."""
        line = {"id": self.name, "prompt_tokens": len(self.prompt)}
        line["tokens"] = self.generated
        if logprobs:
            line["logprobs"] = [round(value, 6) for value in self.logprobs]
        if not isinstance(tokenizer, str):
            stopped = self.stop and self.finish_reason
            line["text"] = self.text if stopped else self.decode(tokenizer)
        line |= {"finish_reason": self.finish_reason, "seed": self.seed}
        return json.dumps(line, ensure_ascii=False)


def read_tokens(
    what: str, data: Any, tokenizer: Any, size: int, is_text: bool, special: bool = True
) -> list[int]:
    """Return the tokens of a text or list; raise ValueError if it is neither.

    size is vocab_size; special: add the tokenizer's special tokens, such as BOS."""
    if is_text:
        if isinstance(tokenizer, str):
            raise ValueError(f"text needs a tokenizer, and {tokenizer}")
        try:
            data = tokenizer.encode(data, add_special_tokens=special).ids
        except (TypeError, UnicodeError):
            raise ValueError(f"{what} is not Unicode text") from None
    if not isinstance(data, list) or not data:
        raise ValueError(f"{what} needs at least one token")
    for token in data:
        if type(token) is not int or not 0 <= token < size:
            raise ValueError(f"{str(token)[:40]} is not a token (0 to {size - 1})")
    return data


def read_request(
    data: Any, index: int, options: argparse.Namespace, model: Model
) -> Request:
    """Return one request; raise ValueError if it is invalid."""
    kinds, tokenizer = ("prompt", "messages", "tokens"), model.tokenizer
    kind = [name for name in kinds if isinstance(data, dict) and name in data]
    if not kind:
        raise ValueError('not an object with one of "prompt", "messages" and "tokens"')
    if len(kind) > 1:
        found = '" and "'.join(kind)
        raise ValueError(f'has "{found}": give only one')
    (kind,) = kind
    known = [kind, "id", "stop", "chat_template_kwargs", *READERS]
    if unknown := sorted(data.keys() - known):
        close = difflib.get_close_matches(unknown[0], known, 1)
        hint = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(f"unknown key {unknown[0][:40]}{hint}")
    name = data.get("id", index)
    if type(name) not in (str, int):
        raise ValueError(f"id {str(name)[:40]} is neither a string nor an integer")
    values = {key: getattr(options, key) for key in READERS}
    values["seed"] = (options.seed + index) % 2**31
    for key in READERS:
        if values[key] is None:
            values[key] = model.sampling.get(key, DEFAULTS[key])
        if key in data:
            try:
                values[key] = READERS[key](json.dumps(data[key]))
            except argparse.ArgumentTypeError as error:
                raise ValueError(f"{key}: {error}") from None
    stop = data.get("stop", options.stop)
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(s, str) and s for s in stop):
        raise ValueError("stop is neither a string nor a list of strings")
    if (stop or options.stream) and isinstance(tokenizer, str):
        raise ValueError(f"--stop and --stream need a tokenizer, and {tokenizer}")
    content = data[kind]
    chat = kind == "messages" or (kind == "prompt" and options.chat)
    if chat:
        if kind == "prompt":
            content = [{"role": "user", "content": content}]
        variables = data.get("chat_template_kwargs", {})
        if not isinstance(variables, dict):
            raise ValueError("chat_template_kwargs is not an object")
        if not isinstance(content, list) or not all(
            isinstance(m, dict) for m in content
        ):
            raise ValueError("messages is not a list of objects")
        content = read_chat_template(options.folder)(content, **variables)
    size = model.config.vocab_size
    prompt = read_tokens(kind, content, tokenizer, size, kind != "tokens", not chat)
    return Request(name, prompt, stop, *values.values())


def read_lines(path: str | Path) -> Iterator[tuple[str, bytes]]:
    """Yield each line of a file that is not empty, after its place; - is stdin."""
    name = "stdin" if str(path) == "-" else path
    data = sys.stdin.buffer.read() if name == "stdin" else Path(path).read_bytes()
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"{name}, line {number}", line


def read_requests(options: argparse.Namespace, model: Model) -> list[Request]:
    """Return all requests; raise ValueError, with the line, for an invalid one."""
    lines = [("--prompt", json.dumps({"prompt": text})) for text in options.prompt]
    if options.prompts:
        lines.extend(read_lines(options.prompts))
    requests, names = [], set()
    for index, (place, line) in enumerate(lines):
        data = read_json(place, line)
        try:
            request = read_request(data, index, options, model)
            if request.name in names:
                raise ValueError(f"id {request.name!r} is not unique")
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        names.add(request.name)
        requests.append(request)
    if not requests:
        raise ValueError(f"{options.prompts} has no requests")
    return requests


# -------------------------------------------------------------------- compiled programs


class Sampling(NamedTuple):
    """The parameters of each sequence: [b]."""

    seeds: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array


class Slots(NamedTuple):
    """What the devices keep for each slot besides its cache: [slots]."""

    tokens: jax.Array  # the newest token, whose keys and values are not cached yet
    logprobs: jax.Array  # its log-probability
    positions: jax.Array  # its position
    sampling: Sampling


class Chunks(NamedTuple):
    """Chunks of prompts for one prefill step; several may belong to one slot."""

    tokens: np.ndarray  # i32[rows, chunk]
    slots: np.ndarray  # the slot of each chunk: i32[rows], like the rest
    start: np.ndarray  # its first position
    count: np.ndarray  # its number of tokens; 0 in an unused row
    ends: np.ndarray  # its slot if it ends a prompt, else the number of slots
    sampling: Sampling


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Return logits f32[b, vocab_size] with -inf for all but the top_k tokens, and of
    these all but the fewest tokens whose total probability is at least top_p."""
    scaled = logits / jnp.maximum(sampling.temperature, 1e-6)[:, None]
    ordered = jnp.sort(scaled, descending=True)
    rank = jnp.arange(logits.shape[-1])
    k = jnp.where(sampling.top_k > 0, sampling.top_k, len(rank))[:, None]
    ordered = jnp.where(rank < k, ordered, -jnp.inf)
    probabilities = jax.nn.softmax(ordered)
    before = probabilities.cumsum(-1) - probabilities
    kept = (before < sampling.top_p[:, None]) & (rank < k)
    lowest = jnp.where(kept, ordered, jnp.inf).min(-1, keepdims=True)
    return jnp.where(scaled >= lowest, logits, -jnp.inf)


def next_tokens(
    logits: jax.Array, positions: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """Return the next token of each sequence and its log-probability before sampling
    parameters apply. Sorting and sampling are skipped while no sequence needs them."""
    seeds, temperature, top_k, top_p = sampling
    sampled = temperature > 0
    filtered = sampled & ((top_k > 0) | (top_p < 1))

    def draw() -> jax.Array:
        some = jax.lax.cond(
            filtered.any(), filter_logits, lambda x, _: x, logits, sampling
        )
        return decoder.sample(some, seeds, positions, temperature)

    tokens = jax.lax.cond(sampled.any(), draw, lambda: logits.argmax(-1))
    logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, None], 1)
    return tokens, logprobs[:, 0]


def prefill(
    weights: dict, caches: list, slots: Slots, chunks: Chunks, config: decoder.Config
) -> tuple[list, Slots]:
    """Process chunks of prompts; a slot whose prompt ends gets its first token."""
    length = caches[0][0].shape[1]
    offsets = jnp.arange(chunks.tokens.shape[1])
    valid = offsets < chunks.count[:, None]
    positions = jnp.where(valid, chunks.start[:, None] + offsets, length)  # or dropped

    def attention_fn(q, k, v, cache, positions, window=None):
        at = chunks.slots[:, None], positions
        keys = cache[0].at[at].set(k, mode="drop")
        values = cache[1].at[at].set(v, mode="drop")
        mask = jnp.arange(length) <= positions[:, :, None]
        if window:
            mask &= jnp.arange(length) > positions[:, :, None] - window
        y = decoder.attention(q, keys[chunks.slots], values[chunks.slots], mask)
        return y, (keys, values)

    x, caches = decoder.hidden_states(
        weights, chunks.tokens, positions, config, caches, attention_fn
    )
    x = x[jnp.arange(len(x)), jnp.maximum(chunks.count - 1, 0)]
    logits = decoder.compute_logits(weights, x, config)
    end = chunks.start + chunks.count
    new = Slots(*next_tokens(logits, end, chunks.sampling), end, chunks.sampling)

    def update(old: jax.Array, new: jax.Array) -> jax.Array:
        return old.at[chunks.ends].set(new, mode="drop")

    return caches, jax.tree.map(update, slots, new)


def attention_without_matmul(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cache: decoder.Cache,
    positions: jax.Array,
    window: int | None = None,
) -> tuple[jax.Array, decoder.Cache]:
    """Like decoder.cached_attention for one token each, in float32 and without a matrix
    product, for which XLA's CPU compiler would copy and transpose both caches."""
    at = jnp.arange(len(q))[:, None], positions
    cache = tuple(old.at[at].set(new, mode="drop") for old, new in zip(cache, (k, v)))
    query, keys, values = (x.astype(jnp.float32) for x in (q, *cache))
    scores = (query * keys[:, :, :, None]).sum(-1) * q.shape[-1] ** -0.5
    mask = jnp.arange(keys.shape[1]) <= positions  # [b, length]
    if window:
        mask &= jnp.arange(keys.shape[1]) > positions - window
    scores = jnp.where(mask[:, :, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=1)[..., None]
    y = (weights * values[:, :, :, None]).sum(1, keepdims=True)
    return y.astype(q.dtype), cache


def decode(
    weights: dict,
    caches: list,
    slots: Slots,
    config: decoder.Config,
    attention_fn: Callable,
) -> tuple[list, Slots]:
    """Process the newest token of each slot, and generate the next. Free slots do the
    same: their next prompt overwrites what they write before it is attended to."""
    x, caches = decoder.hidden_states(
        weights,
        slots.tokens[:, None],
        slots.positions[:, None],
        config,
        caches,
        attention_fn,
    )
    logits = decoder.compute_logits(weights, x[:, 0], config)
    after = slots.positions + 1
    new = next_tokens(logits, after, slots.sampling)
    return caches, Slots(*new, after, slots.sampling)


Chunk = tuple[Request, int, int]  # a request, its slot, the chunk's first token


class Shape(NamedTuple):
    """The sizes for which the two programs are compiled."""

    slots: int
    length: int
    rows: int
    chunk: int
    dtype: np.dtype

    def chunks(self, chunks: list[Chunk]) -> Chunks:
        """Return the arguments of a prefill step on at most `rows` chunks."""
        tokens = np.zeros((self.rows, self.chunk), np.int32)
        slots, start, count, ends, seeds, top_k = np.zeros((6, self.rows), np.int32)
        temperature, top_p = np.zeros((2, self.rows), np.float32)
        ends[:] = self.slots
        for row, (request, slot, begin) in enumerate(chunks):
            part = request.prompt[begin : begin + self.chunk]
            tokens[row, : len(part)] = part
            slots[row], start[row], count[row] = slot, begin, len(part)
            seeds[row], temperature[row] = request.seed, request.temperature
            top_k[row], top_p[row] = request.top_k, request.top_p
            if begin + len(part) == len(request.prompt):
                ends[row] = slot
        sampling = Sampling(seeds, temperature, top_k, top_p)
        return Chunks(tokens, slots, start, count, ends, sampling)


class Engine:
    """The weights, the caches, and the two programs, which are compiled once."""

    def __init__(
        self, weights: dict, config: decoder.Config, mesh: Mesh, shape: Shape
    ) -> None:
        replicated = NamedSharding(mesh, P())
        by_position = NamedSharding(mesh, P(None, "group", "kv"))
        sizes = shape.slots, shape.length, shape.dtype
        self.weights, self.shape = weights, shape
        on_cpu = mesh.devices.flat[0].platform == "cpu"
        self.must_wait = on_cpu and mesh.size > 1 and jax.__version_info__ < (0, 12)
        init = partial(decoder.init_cache, config, *sizes)
        self.caches = jax.jit(init, out_shardings=by_position)()
        i, f = np.zeros(shape.slots, np.int32), np.zeros(shape.slots, np.float32)
        self.slots = jax.device_put(Slots(i, f, i, Sampling(i, f, i, f)), replicated)
        shardings = jax.tree.map(lambda x: x.sharding, weights), by_position, replicated

        def compile_program(program: Callable, *chunks: Chunks) -> Callable:
            jitted = jax.jit(
                program,
                in_shardings=(*shardings, *(replicated for _ in chunks)),
                out_shardings=(by_position, replicated),
                donate_argnums=1,
            )
            return jitted.lower(weights, self.caches, self.slots, *chunks).compile()

        attention_fn = attention_without_matmul if on_cpu else decoder.cached_attention
        self.prefill = compile_program(
            partial(prefill, config=config), shape.chunks([])
        )
        self.decode = compile_program(
            partial(decode, config=config, attention_fn=attention_fn)
        )

    def step(self, chunks: Chunks | None) -> Slots:
        """Process these chunks, or generate a token in each slot; return the slots,
        which are still being computed."""
        program, more = (self.prefill, (chunks,)) if chunks else (self.decode, ())
        self.caches, self.slots = program(self.weights, self.caches, self.slots, *more)
        if self.must_wait:
            self.slots.tokens.block_until_ready()
        return self.slots


def serve(
    engine: Engine,
    requests: list[Request],
    stop_tokens: set[int],
    tokenizer: Any = None,
    stream: bool = False,
) -> Iterator[Request]:
    """Yield a request after each token of its answer; finish_reason is set at the end.

    A free slot takes the next request at once. The devices are one step ahead: while
    they compute a step, the tokens of the step before are examined."""
    shape, waiting = engine.shape, deque(requests)
    busy, chunks, running = {}, deque(), deque()  # busy: slot -> request
    while waiting or busy or running:
        for slot in range(shape.slots):
            if waiting and slot not in busy:
                busy[slot] = request = waiting.popleft()
                starts = range(0, len(request.prompt), shape.chunk)
                chunks.extend((request, slot, start) for start in starts)
        if busy:
            active, step_chunks = busy.copy(), None
            if chunks:  # prefill first, so that the decode steps after it are full
                some = [chunks.popleft() for _ in range(min(shape.rows, len(chunks)))]
                step_chunks = shape.chunks(some)
                active = {slot: busy[slot] for slot in step_chunks.ends if slot in busy}
            running.append((engine.step(step_chunks), active))
            for slot, request in active.items():
                request.scheduled += 1
                if request.scheduled == request.max_tokens:
                    del busy[slot]  # free while its last token is computed
        if len(running) > 1 or not busy:
            slots, active = running.popleft()
            tokens, logprobs = np.asarray(slots.tokens), np.asarray(slots.logprobs)
            for slot, request in active.items():
                if request.finish_reason:
                    continue  # it had stopped while this step was queued
                request.logprobs.append(float(logprobs[slot]))
                needs_text = request.stop or stream
                request.append(
                    int(tokens[slot]), stop_tokens, tokenizer if needs_text else None
                )
                if request.finish_reason and busy.get(slot) is request:
                    del busy[slot]
                yield request


# ---------------------------------------------------------- processes, memory, messages


def connect(options: argparse.Namespace) -> None:
    """Connect to the other processes, if any; raise ValueError if that fails."""
    manual = options.coordinator, options.processes, options.process
    if not options.distributed and manual == (None, None, None):
        for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"):
            if int(os.environ.get(name) or 1) > 1:
                raise ValueError(
                    f"{name} is {os.environ[name]}, so each process would answer every "
                    "request; use --distributed, or --coordinator and its companions"
                )
        return
    try:
        jax.distributed.initialize(  # listens at this address only
            *manual, coordinator_bind_address=options.coordinator
        )
    except ValueError as error:
        if "coordinator_address should be defined" not in str(error):
            raise
        raise ValueError(
            "--distributed: no launcher found; use --coordinator, --processes and "
            "--process"
        ) from None
    except RuntimeError as error:
        raise ValueError(f"cannot connect to the other processes: {error}") from None
    # JAX's preemption service catches SIGTERM for programs that save. This one ends.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def check_same(*values: object) -> None:
    """Raise ValueError in all processes unless the values are the same in all."""
    checksum = np.int32(zlib.crc32(repr(values).encode()) >> 1)
    checksums = multihost_utils.process_allgather(checksum)
    if (checksums != checksums[0]).any():
        raise ValueError("all processes need the same model, options and prompts")


def fitting_sharding(tensor: decoder.Tensor, mesh: Mesh) -> NamedSharding:
    """Return decoder.tensor_sharding if the tensor is divisible, else replicate it."""
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
    """Return the sizes that these requests need, and reduce max_tokens where the cache
    ends. Raise ValueError if a prompt does not fit."""
    needed = max(len(request.prompt) + request.max_tokens for request in requests)
    length = options.length or int(min(needed, positions))
    if length > positions:
        raise ValueError(f"--length {length}: the model supports at most {positions}")
    for request in requests:
        size = len(request.prompt)
        if size >= length:
            raise ValueError(
                f"prompt of {request.name!r} has {counted(size, 'token')}; prompt and "
                f"answer together may have at most {length:,}"
            )
    short = [r for r in requests if r.max_tokens > length - len(r.prompt)]
    for request in short:
        request.max_tokens = length - len(request.prompt)
    if short:
        log(
            f"{counted(len(short), 'answer')} may end early, after {length:,} "
            f"positions: that of {short[0].name!r} after "
            f"{counted(short[0].max_tokens, 'token')}"
        )
    sizes = [len(request.prompt) for request in requests]
    chunk = min(max(sizes), 16 if mesh.devices.flat[0].platform == "cpu" else 128)
    rows = min(ROWS, sum(math.ceil(size / chunk) for size in sizes))
    group = mesh.shape["group"]
    length = math.ceil(length / group) * group  # the cache is sharded over positions
    return Shape(min(options.slots, len(requests)), length, rows, chunk, dtype)


def check_room(parts: dict[str, int], mesh: Mesh, less: str) -> None:
    """Raise ValueError if parts, in bytes, exceed a device's memory; less names what
    would need less."""
    devices = mesh.local_devices
    available = (devices[0].memory_stats() or {}).get("bytes_limit")
    if not available and (table := Path("/proc/meminfo")).exists():
        found = re.search(r"MemAvailable: +(\d+) kB", table.read_text())
        available = int(found[1]) * 1024 // len(devices)
    if available and available < sum(parts.values()):
        sizes = ", ".join(f"{name} {size / 2**30:,.2f}" for name, size in parts.items())
        raise ValueError(
            f"too little memory: a device needs {sum(parts.values()) / 2**30:,.2f} GiB "
            f"({sizes}) and has {available / 2**30:,.2f}; {less} need less"
        )


def check_memory(config: decoder.Config, mesh: Mesh, shape: Shape) -> None:
    """Raise ValueError if weights, cache and logits would not fit on a device of this
    process; temporary memory is not counted."""
    itemsize = shape.dtype.itemsize
    blocks = [
        math.prod(fitting_sharding(tensor, mesh).shard_shape(tensor.shape))
        for tensor in jax.tree.leaves(decoder.model_tensors(config))
    ]
    cache = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    parts = {
        "weights": sum(blocks) * itemsize,
        "cache": cache * shape.slots * shape.length * itemsize // mesh.size,
        "logits": max(shape.slots, shape.rows) * config.vocab_size * 4,
    }
    check_room(parts, mesh, "fewer --slots, a shorter --length or more devices")


def log(text: str) -> None:
    """Print progress on stderr, in process 0."""
    if jax.process_index() == 0:
        print(text, file=sys.stderr, flush=True)


def prepare(options: argparse.Namespace) -> tuple[Engine, list[Request], Model]:
    """Return all that is needed to generate; raise ValueError or OSError if something
    is invalid, which is checked before weights are read where that is possible."""
    model = read_model(options.folder)
    requests = read_requests(options, model)
    config, lora = model.config, None
    if options.adapters:
        import adapters

        try:
            lora = adapters.read_lora_config(options.adapters)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{options.adapters} is malformed: {error!r}") from None

    if options.emulate:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.emulate)
    connect(options)
    devices = jax.devices()
    use = options.devices or len(devices)
    if jax.process_count() > 1 and use != len(devices):
        raise ValueError(f"--devices {use}: all processes have {len(devices)} together")
    if use > len(devices):
        there = "is" if len(devices) == 1 else "are"
        found = counted(len(devices), "device")
        raise ValueError(f"--devices {use}: there {there} only {found}")
    mesh = decoder.model_mesh(config, devices[:use])
    dtype = next(iter(model.files.values())).dtype
    if devices[0].platform == "cpu":
        dtype = np.float32  # CPUs are slow in others
    dtype = jnp.dtype(options.dtype or dtype)
    if dtype == np.float32:  # TPUs would round the operands of matrix products
        jax.config.update("jax_default_matmul_precision", "highest")
    shape = plan(options, requests, model.positions, mesh, dtype)
    check_memory(config, mesh, shape)
    if jax.process_count() > 1:
        check_same(requests, shape, sorted(model.stop_tokens), lora)
    if lora:
        added, _ = adapters.load_adapters(
            options.adapters, config, mesh, fitting_sharding
        )

    if model.sampling:
        defaults = ", ".join(f"{name} {x:g}" for name, x in model.sampling.items())
        log(f"defaults of generation_config.json: {defaults}")
    log(
        f"{counted(len(requests), 'prompt')}, {shape.slots} at a time, {dtype}, on "
        f"{counted(mesh.size, f'{devices[0].device_kind} device')}"
    )
    start = time.monotonic()
    weights = decoder.load_model(model.files, config, mesh, dtype, fitting_sharding)
    if lora:
        weights = adapters.with_adapters(weights, added, lora.scale)
    loaded = time.monotonic()
    engine = Engine(weights, config, mesh, shape)
    compiled = time.monotonic()
    log(f"loaded in {loaded - start:.1f} s, compiled in {compiled - loaded:.1f} s")
    return engine, requests, model


def main(options: argparse.Namespace) -> None:
    """Answer all requests, each on a line of stdout when it is finished."""
    try:
        # Libraries print, too: what they write to stdout goes to stderr.
        stdout = open(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
        os.dup2(2, 1)
        engine, requests, model = prepare(options)
    except OSError as error:
        exit_now(BAD_INPUT, f"{error.filename or 'stdout'}: {error.strerror}")
    except ValueError as error:
        exit_now(BAD_INPUT, str(error))
    tokenizer, stop_tokens = model.tokenizer, model.stop_tokens
    start = reported = time.monotonic()
    finished = shown = 0
    for request in serve(engine, requests, stop_tokens, tokenizer, options.stream):
        lines = []
        if options.stream and (text := request.new_text()):
            line = {"id": request.name, "new_text": text}
            lines.append(json.dumps(line, ensure_ascii=False))
        if request.finish_reason:
            finished += 1
            lines.append(request.as_json(tokenizer, options.logprobs))
        if lines and jax.process_index() == 0:
            try:
                print(*lines, sep="\n", file=stdout, flush=True)
            except BrokenPipeError:  # the reader has ended
                exit_now(PIPE_CLOSED)
            except OSError as error:
                exit_now(1, f"cannot write the answers: {error.strerror}")
        if finished > shown and time.monotonic() > reported + 1:
            reported, shown = time.monotonic(), finished
            log(f"{finished} of {counted(len(requests), 'answer')}")
    seconds = time.monotonic() - start
    tokens = sum(len(request.generated) for request in requests)
    rate = f"{tokens / seconds:.1f} tokens/s"
    log(f"{counted(tokens, 'token')} in {seconds:.1f} s, {rate}")


if __name__ == "__main__":
    main(options)
