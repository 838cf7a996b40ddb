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
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "vocab_size": 321,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
    "sliding_window": 10,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 256,
    "eos_token_id": None,
}
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
    {"tokens": prompt(5, 6), "max_tokens": 12, "temperature": 2.0, "top_k": 3},
    {"tokens": [7], "temperature": 3.0, "max_tokens": 12, "top_k": 90, "top_p": 0.6},
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


def write_gemma(folder: Path) -> None:
    """Write a Gemma 3 model with random weights, whose norms scale by 1 + weight."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(GEMMA3))
    rng, tensors = np.random.Generator(np.random.Philox(3)), {}
    for tensor in jax.tree.leaves(decoder.model_tensors(decoder.read_config(folder))):
        scale = 0.3 if len(tensor.shape) == 1 else 1.5 / tensor.shape[-1] ** 0.5
        tensors[tensor.name] = (scale * rng.normal(size=tensor.shape)).astype(
            jnp.bfloat16
        )
    CELL["write_checkpoint"](folder, GEMMA3, tensors)


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
    """Return engine, requests and model of generate.py on one device."""
    more = ["--length", LENGTH, "--devices", 1, *args]
    args = [place / "model", "--prompts", place / "requests.jsonl", *more]
    return generate.prepare(options_of(generate, *args))


def answers(engine, requests, stops=frozenset(), tokenizer=None) -> dict:
    """Serve all requests; return the generated tokens by the name of the request."""
    for request in requests:
        request.generated, request.logprobs, request.scheduled = [], [], 0
        request.finish_reason, request.text, request.streamed = "", "", 0
    after_each = [*generate.serve(engine, requests, stops, tokenizer)]
    assert {one.name for one in after_each} == {one.name for one in requests}
    assert len(after_each) == sum(len(one.generated) for one in requests)
    return {request.name: request.generated for request in requests}


def plain_weights(folder: Path) -> tuple[dict, decoder.Config]:
    """Load a model in float32 on one device."""
    config = decoder.read_config(folder)
    mesh = decoder.model_mesh(config, jax.devices()[:1])
    return decoder.load_model(
        decoder.open_model(folder), config, mesh, np.float32
    ), config


def filtered(logits: np.ndarray, request: generate.Request) -> np.ndarray:
    """Return logits [vocab_size] without the tokens that top_k and top_p exclude."""
    order = np.argsort(-logits)[: request.top_k or None]
    p = np.exp(logits[order] / request.temperature - logits.max())
    size = 1 + int((p.cumsum() / p.sum() < request.top_p).sum())
    kept = np.full_like(logits, -np.inf)
    kept[order[:size]] = logits[order[:size]]
    return kept


def plain_answers(weights: dict, config: decoder.Config, requests: list) -> dict:
    """Return the answers of the model, one request and one token at a time."""
    results = plain_results(weights, config, requests)
    return {name: tokens for name, (tokens, _) in results.items()}


def plain_results(weights: dict, config: decoder.Config, requests: list) -> dict:
    """Return the answers, each with the log-probabilities of its tokens."""

    @jax.jit
    def next_logits(weights, tokens, size):
        positions = jnp.arange(LENGTH)[None]
        x, _ = decoder.hidden_states(weights, tokens[None], positions, config)
        return decoder.compute_logits(weights, x[0, size - 1], config)

    found = {}
    for request in requests:
        tokens, logprobs = [*request.prompt], []
        temperature = np.float32(request.temperature)
        for _ in range(request.max_tokens):
            padded, size = np.pad(tokens, (0, LENGTH - len(tokens))), len(tokens)
            logits = np.asarray(next_logits(weights, padded, np.int32(size)))
            some = filtered(logits, request) if request.temperature else logits
            args = np.int32([request.seed]), np.int32([size]), temperature[None]
            tokens.append(int(decoder.sample(some[None], *args)[0]))
            logprobs.append(jax.nn.log_softmax(logits)[tokens[-1]])
        found[request.name] = tokens[len(request.prompt) :], logprobs
    return found
