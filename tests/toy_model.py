"""A small Qwen3 model in a folder, requests, and a plain loop that answers them.

The loop runs on one device, without a cache and without batching.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import decoder
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair import ROOT
from runs import ENVIRONMENT, coordinator_options, options_of, start

LENGTH = 96  # of a slot
CELL = {"jnp": jnp, "np": np}
exec((ROOT / "book/cells/checkpoint.py").read_text(), CELL)
# vocab_size 321 is not divisible by 8 devices.
CONFIG = CELL["QWEN3"] | {"num_hidden_layers": 2, "vocab_size": 321}
WORDS = {"<s>": 1, "the": 15, "sea": 7, "is": 9, "blue": 53}
WORDS |= {f"w{token}": token for token in {*range(321)} - {*WORDS.values()}}
# Replaces the package tokenizers, which no session installs. It splits a text at spaces
# and puts <s> before it, as Llama's tokenizer does.
TOKENIZERS = """
import json
from types import SimpleNamespace

class Tokenizer:
    def __init__(self, words):
        self.words = words

    @classmethod
    def from_file(cls, path):
        with open(path) as file:
            return cls(json.load(file))

    def no_padding(self): pass

    no_truncation = no_padding

    def encode(self, text, add_special_tokens=True):
        if not isinstance(text, str):
            raise TypeError("not a text")
        words = [self.words.get(word, 0) for word in text.split()]
        return SimpleNamespace(ids=[1] * add_special_tokens + words)

    def token_to_id(self, word):
        return self.words.get(word)

    def decode(self, ids):
        names = {number: word for word, number in self.words.items()}
        return " ".join(names[number] for number in ids if number != 1)
"""


def prompt(seed: int, size: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 321, size).tolist()


REQUESTS = [
    {"tokens": prompt(0, 5), "max_tokens": 20},
    # The next prompt takes two prefill steps.
    {"tokens": prompt(1, 70), "max_tokens": 20, "temperature": 1.0},
    {"tokens": [7], "max_tokens": 1},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 5},
    {"tokens": prompt(3, 16), "max_tokens": 8},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 5},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 6},
    {"prompt": "the sea is", "max_tokens": 12, "id": "text"},
    {"tokens": prompt(4, 92), "max_tokens": 50},  # more than fit into a slot
]
RUNS = []


@contextmanager
def model_in(place: Path) -> Iterator[Path]:
    """Write the folder `model`, requests and the package tokenizers into a folder; at
    the end, kill processes that were started there."""
    write_model(place / "model")
    (place / "model" / "tokenizer.json").write_text(json.dumps(WORDS))
    write_rows(place / "requests.jsonl", REQUESTS)
    (place / "tokenizers.py").write_text(TOKENIZERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield place
    sys.modules.pop("tokenizers", None)
    for run in RUNS:
        run.kill()
        run.communicate()
    RUNS.clear()


def write_model(folder: Path, seed: int = 0) -> None:
    CELL["write_checkpoint"](folder, CONFIG, CELL["random_tensors"](CONFIG, seed))


def write_rows(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


def start_in(place: Path, name: str, *args: object, **popen) -> subprocess.Popen:
    """Start a program in a process that can import the package tokenizers."""
    path = f"{place}{os.pathsep}{ENVIRONMENT.get('PYTHONPATH', '')}"
    env = ENVIRONMENT | {"PYTHONPATH": path}
    RUNS.append(start(name, *args, cwd=place, env=env, **popen))
    return RUNS[-1]


def start_two(place: Path, name: str, *args: list, code: str = "") -> list:
    """Start two processes of four devices, each with its own list of arguments."""
    common = ["--emulate", 4, *coordinator_options()]
    return [
        start_in(place, name, *own, *common, index, code=code)
        for index, own in enumerate(args)
    ]


def prepared(place: Path, *args: object):
    """Return engine, requests and stop tokens of generate.py on one device."""
    more = ["--length", LENGTH, "--devices", 1, *args]
    args = [place / "model", "--prompts", place / "requests.jsonl", *more]
    return generate.prepare(options_of(generate, *args))[:3]


def answers(engine, requests, stops=frozenset()) -> dict:
    """Serve all requests; return the generated tokens by the name of the request."""
    for request in requests:
        request.said, request.asked, request.finish = [], 0, ""
    done = [one.name for one in generate.serve(engine, requests, stops) if one]
    assert sorted(map(str, done)) == sorted(str(one.name) for one in requests)
    return {request.name: request.said for request in requests}


def plain_weights(folder: Path) -> tuple[dict, decoder.Config]:
    """Load a model in float32 on one device."""
    c = decoder.read_config(folder)
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    return decoder.load_model(decoder.open_model(folder), c, mesh, np.float32), c


def plain_answers(weights: dict, c: decoder.Config, requests: list) -> dict:
    """Return the answers of the model, one request and one token at a time."""

    @jax.jit
    def next_token(weights, tokens, size, seed, temperature):
        x, _ = decoder.hidden_states(weights, tokens[None], jnp.arange(LENGTH)[None], c)
        logits = decoder.compute_logits(weights, x[0, size - 1], c)[None]
        return decoder.sample(logits, seed[None], size[None], temperature[None])[0]

    found = {}
    for request in requests:
        tokens = [*request.prompt]
        draw = np.int32(request.seed), np.float32(request.heat)
        for _ in range(request.most):
            padded = np.pad(tokens, (0, LENGTH - len(tokens)))
            size = np.int32(len(tokens))
            tokens.append(int(next_token(weights, padded, size, *draw)))
        found[request.name] = tokens[len(request.prompt) :]
    return found
