"""launch/generate.py: its answers are those of a loop that knows no cache, no batch and
no other device, and what it will not do it refuses in a sentence.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import decoder
import generate
import jax
import jax.numpy as jnp
import lifecycle
import numpy as np
import pytest
from pair import ROOT
from runs import ENVIRONMENT, meeting, start, statuses

LENGTH = 96  # of a slot
CELL = {"jnp": jnp, "np": np}
exec((ROOT / "book/cells/checkpoint.py").read_text(), CELL)
# Eight devices cannot share 321 rows of a table, nor four of them 99 of a slot.
CONFIG = CELL["QWEN3"] | {"num_hidden_layers": 2, "vocab_size": 321}
WORDS = {"<s>": 1, "the": 15, "sea": 7, "is": 9, "blue": 53}
WORDS |= {f"w{token}": token for token in {*range(321)} - {*WORDS.values()}}
# Stands in for the package, which no session installs: it splits at blanks, and puts
# <s> before a text, as Llama's own does.
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
    # It takes two steps to read the next.
    {"tokens": prompt(1, 70), "max_tokens": 20, "temperature": 1.0},
    {"tokens": [7], "max_tokens": 1},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 5},
    {"tokens": prompt(3, 16), "max_tokens": 8},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 5},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 6},
    {"prompt": "the sea is", "max_tokens": 12, "id": "text"},
    {"tokens": prompt(4, 92), "max_tokens": 50},  # for which there is no room
]
RUNS = []


@contextmanager
def model_in(place: Path) -> Iterator[Path]:
    """A folder with the folder `model`, its requests, and the stand-in; at the end no
    process is left that has begun there."""
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


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with model_in(tmp_path_factory.mktemp("generate")) as place:
        yield place


def write_model(folder: Path, seed: int = 0) -> None:
    CELL["write_checkpoint"](folder, CONFIG, CELL["random_tensors"](CONFIG, seed))


def write_rows(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows))


def begin(place: Path, name: str, *words: object, **how) -> subprocess.Popen:
    """A program in a process of its own, which finds the stand-in."""
    path = f"{place}{os.pathsep}{ENVIRONMENT.get('PYTHONPATH', '')}"
    env = ENVIRONMENT | {"PYTHONPATH": path}
    RUNS.append(start(name, *words, cwd=place, env=env, **how))
    return RUNS[-1]


def begin_two(place: Path, name: str, *each: list, code: str = "") -> list:
    """Two processes of four devices, each with words of its own."""
    meet = ["--emulate", 4, *meeting()]
    return [
        begin(place, name, *words, *meet, n, code=code) for n, words in enumerate(each)
    ]


def options_of(program: ModuleType, *words: object):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["program.py", *map(str, words)])
        return program.read_options()


def prepared(place: Path, *words: object):
    """What the program has before its first step, in this process, on one device."""
    more = ["--length", LENGTH, "--devices", 1, *words]
    words = [place / "model", "--prompts", place / "requests.jsonl", *more]
    return generate.prepare(options_of(generate, *words))[:3]


def answers(engine, requests, stops=frozenset()) -> dict:
    """What is said to each, by name, once all are answered."""
    for request in requests:
        request.said, request.asked, request.finish = [], 0, ""
    done = [one.name for one in generate.serve(engine, requests, stops) if one]
    assert sorted(map(str, done)) == sorted(str(one.name) for one in requests)
    return {request.name: request.said for request in requests}


def plain_weights(folder: Path) -> tuple[dict, decoder.Config]:
    """A model on one device, in float32."""
    c = decoder.read_config(folder)
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    return decoder.load(decoder.open_folder(folder), c, mesh, np.float32), c


def plain_answers(weights: dict, c: decoder.Config, requests: list) -> dict:
    """The tokens that the whole model says, one request and one token at a time."""

    @jax.jit
    def say(weights, tokens, size, seed, heat):
        x, _ = decoder.hidden(weights, tokens[None], jnp.arange(LENGTH)[None], c)
        scores = decoder.logits(weights, x[0, size - 1], c)
        said = decoder.choose(scores[None], seed[None], size[None], heat[None])
        return said[0]

    said = {}
    for request in requests:
        text = [*request.prompt]
        for _ in range(request.most):
            padded = np.pad(text, (0, LENGTH - len(text)))
            numbers = np.int32(len(text)), np.int32(request.seed)
            text.append(int(say(weights, padded, *numbers, np.float32(request.heat))))
        said[request.name] = text[len(request.prompt) :]
    return said


@pytest.fixture(scope="module")
def served(place):
    """Three slots for nine requests."""
    return prepared(place, "--slots", 3)


@pytest.fixture(scope="module")
def plain(place, served):
    return plain_answers(*plain_weights(place / "model"), served[1])


# ----------------------------------------------------------------------------- answers


def test_answers_are_those_of_the_plain_loop(served, plain):
    engine, requests, _ = served
    assert engine.shape[:4] == (3, LENGTH, 4, 16)
    assert answers(engine, requests) == plain
    assert len(plain[8]) == LENGTH - 92 and requests[8].finish == "length"
    assert plain[3] == plain[5] != plain[6]  # seeds 5, 5 and 6


def test_no_step_compiles_and_none_copies_the_cache(place):
    engine, requests, stops = prepared(place, "--slots", 2, "--dtype", "bfloat16")
    later = []

    def note(event, seconds, **_):
        if "compile" in event:
            later.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    heard = jax.jit(lambda x: x + 1)(np.arange(3)).sum()
    assert heard == 6 and later  # it hears of those that there are
    later.clear()
    begun = jax.tree.leaves(engine.caches)
    answers(engine, requests, stops)
    assert not later
    assert all(cache.is_deleted() for cache in begun)
    kept = sum(cache.nbytes for cache in jax.tree.leaves(engine.caches))
    for program in (engine.prefill, engine.decode):
        assert program.memory_analysis().alias_size_in_bytes >= kept
    assert {x.dtype.name for x in jax.tree.leaves(engine.weights)} == {"bfloat16"}


def test_an_answer_ends_at_a_token_that_ends_answers(place, served, plain):
    engine, requests, stops = served
    assert stops == set()  # config.json has null
    stop = plain[0][6]
    said = answers(engine, requests, {stop})
    for request in requests:
        whole = plain[request.name]
        most = whole.index(stop) + 1 if stop in whole else len(whole)
        assert said[request.name] == whole[:most]
        assert request.finish == ("stop" if stop in whole else "length")
    assert len(said[0]) <= 7

    model = place / "stops"
    model.mkdir()
    for eos, more, due in [
        (3, None, {3}),
        ([3, 4], None, {3, 4}),
        (3, {"eos_token_id": [5, 6]}, {5, 6}),
        (3, {"temperature": 1.0}, {3}),
    ]:
        (model / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        if more:
            (model / "generation_config.json").write_text(json.dumps(more))
        assert generate.limits(model) == (np.inf, due)


def test_two_processes_of_four_devices_say_the_same(place, plain):
    words = ["model", "--prompts", "requests.jsonl", "--length", LENGTH + 1]
    words += ["--slots", 4, "--dtype", "float32"]
    two = begin_two(place, "generate.py", words, words)
    assert statuses(two, 300) == [0, 0], two[0].complaints[-2000:]
    assert two[1].said == ""
    lines = [json.loads(line) for line in two[0].said.splitlines()]
    said = {line["id"]: line["tokens"] for line in lines}
    assert len(said[8]) == 5
    assert said | {8: said[8][:4]} == plain
    assert lines[0]["id"] == 2  # the shortest is told first
    names = {number: word for word, number in WORDS.items()}
    due = {
        "id": "text",
        "prompt_tokens": 4,
        "tokens": plain["text"],
        "text": " ".join(names[n] for n in plain["text"] if n != 1),
        "finish_reason": "length",
        "seed": 7,
    }
    assert due in lines
    told = two[0].complaints
    assert "on 8 cpu devices" in told and "a second" in told


def test_a_tensor_that_does_not_divide_is_held_whole(place):
    c = decoder.read_config(place / "model")
    mesh = jax.sharding.AbstractMesh((2, 4), decoder.AXES)
    tree = decoder.tensors(c)
    table, rows = tree["embed_tokens"], tree["layers"][0]["q_proj"]
    assert generate.fitted(table, mesh).shard_shape(table.shape) == table.shape
    assert generate.fitted(rows, mesh).shard_shape(rows.shape) == (16, 64)


# ---------------------------------------------------------------------------- refusals


def sentence(place: Path, program: ModuleType, *words: object) -> str:
    """The one line in which a program refuses, before it loads anything."""
    told, printed = io.StringIO(), io.StringIO()

    def go_on(*_):
        pytest.fail("it goes on")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", sys.exit)
        patch.setattr(os, "dup2", lambda *_: None)
        patch.setattr(lifecycle, "hear_no_more", lambda: None)
        patch.setattr(lifecycle, "agree", go_on)
        patch.setattr(decoder, "load", go_on)
        patch.chdir(place)
        with redirect_stderr(told), redirect_stdout(printed):
            with pytest.raises(SystemExit, match="^2$"):
                program.main(options_of(program, *words))
    assert told.getvalue().count("\n") == 1 and not printed.getvalue()
    return told.getvalue()


def damaged(place: Path, folder: Path, name: str, damage: Callable) -> Path:
    """A copy of the model in which a file is damaged."""
    copy = shutil.copytree(place / "model", folder / "model")
    damage(copy / name)
    return copy


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def give(text: bytes) -> Callable:
    return lambda path: path.write_bytes(text)


def make_int8(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I8"  ', 1))


def say(**change: object) -> Callable:
    """What changes a file that holds a JSON object, if it is there."""

    def write(path: Path) -> None:
        said = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(said | change))

    return write


CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
WEIGHTS = "model-00002-of-00003.safetensors"
QUANTIZED = {"quantization_config": {"bits": 4}}


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (CONFIG_FILE, say(model_type="gpt2"), "is not here: model_type 'gpt2'"),
        (CONFIG_FILE, say(**QUANTIZED), "is not here: quantization_config"),
        (CONFIG_FILE, say(rope_scaling={"type": "yarn"}), "rope of type 'yarn'"),
        (CONFIG_FILE, say(vocab_size=99), "is (321, 64) in the files, not (99,"),
        (CONFIG_FILE, say(tie_word_embeddings=True), "ties the two tables, and they"),
        (CONFIG_FILE, say(num_hidden_layers=3), "missing in the files: model.layers.2"),
        (CONFIG_FILE, say(num_hidden_layers=1), "not of this model: model.layers.1"),
        (CONFIG_FILE, say(num_attention_heads="8"), "heads is '8', no number above 0"),
        (CONFIG_FILE, say(num_key_value_heads="two"), "heads is 'two', no number"),
        (CONFIG_FILE, say(rope_theta=None), "is not here: rope_theta None"),
        (CONFIG_FILE, cut, "config.json is not JSON: "),
        (CONFIG_FILE, Path.unlink, "config.json: No such file or directory"),
        (CONFIG_FILE, give(b"[]"), "config.json is no JSON object"),
        (WEIGHTS, cut, "bytes; its header asks for"),
        (WEIGHTS, Path.unlink, f"{WEIGHTS} is missing"),
        (WEIGHTS, give(b"version https://git-lfs"), "is a pointer of Git LFS"),
        (WEIGHTS, give(b"<!doctype html>" * 9), "is no safetensors file"),
        (WEIGHTS, make_int8, "is of type I8, not"),
        ("model.safetensors.index.json", cut, "index.json is no index of tensors"),
        (TOKENIZER_FILE, give(b"no"), "tokenizer.json is no tokenizer: "),
        (TOKENIZER_FILE, Path.unlink, "needs a tokenizer, and"),
    ],
)
def test_a_folder_that_will_not_do_is_refused(place, tmp_path, name, damage, reason):
    folder = damaged(place, tmp_path, name, damage)
    assert reason in sentence(place, generate, folder, "--prompt", "the sea")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"tokens": [1, 2', "it is not JSON (Expecting ',' delimiter)"),
        (b"\xff", "it is not JSON ('utf-8' codec"),
        (b"[1, 2]", 'it is no object with either "prompt" or "tokens"'),
        (b'{"tokens": [1], "prompt": "sea"}', "it is no object with either"),
        (
            b'{"tokens": [1], "max_token": 5}',
            "it has ['max_token'], which mean nothing",
        ),
        (b'{"tokens": [1], "id": [1]}', "its id [1] is no text and no whole number"),
        (b'{"tokens": [1, 321]}', "321 is no token: these go from 0 to 320"),
        (b'{"tokens": [1, true]}', "True is no token"),
        (b'{"tokens": []}', "its prompt needs at least one token"),
        (b'{"prompt": 5}', "its prompt is no Unicode text"),
        (
            b'{"tokens": [1], "max_tokens": 0}',
            "max_tokens: 0 is no whole number from 1",
        ),
        (b'{"tokens": [1], "max_tokens": 2.5}', "max_tokens: 2.5 is no whole number"),
        (b'{"tokens": [1], "seed": "5"}', 'seed: "5" is no whole number from 0 to'),
        (b'{"tokens": [1], "temperature": NaN}', "temperature: NaN is no number from"),
        (b'{"tokens": [1], "temperature": -1}', "temperature: -1 is no number from 0"),
    ],
)
def test_a_bad_line_is_refused_and_named(place, tmp_path, line, reason):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"tokens": [1]}\n\n' + line + b"\n")
    said = sentence(place, generate, "model", "--prompts", file)
    assert said.startswith(f"{file}, line 3: {reason}")


ONE = ["model", "--prompt", "the sea is"]
MEET = [*ONE, "--processes", 2, "--process"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere", *ONE[1:]], "nowhere is no folder"),
        (["model"], "there is nothing to answer"),
        ([*ONE, "--max-tokens", 0], "--max-tokens: 0 is no whole number from 1"),
        ([*ONE, "--top-k", 5], "unrecognized arguments: --top-k 5"),
        ([*ONE, "--process", 1], "--coordinator, --processes and --process go"),
        ([*ONE, "--coordinator", "here"], "go together"),
        ([*MEET, 1, "--coordinator", "here"], "--coordinator here is not HOST:PORT"),
        ([*MEET, 2, "--coordinator", "a:1"], "--process counts from 0: to 1"),
        (["model", "--prompts", "none.jsonl"], "none.jsonl: No such file"),
        (["model", "--prompts", os.devnull], f"{os.devnull} asks for nothing"),
        ([*ONE, "--length", 4], "0 has 4 tokens, and with one of an answer it has to"),
        ([*ONE, "--length", 257], "--length 257: the model was made for 256"),
        ([*ONE, "--devices", 999], "--devices 999: there are "),
    ],
)
def test_what_cannot_be_is_refused(place, words, reason):
    assert reason in sentence(place, generate, *words)


def test_too_little_memory_is_refused(place, tmp_path):
    folder = damaged(place, tmp_path, CONFIG_FILE, say(max_position_embeddings=None))
    words = [folder, *ONE[1:], "--devices", 1, "--length", 2**31 - 1]
    said = sentence(place, generate, *words, "--dtype", "float16")
    # Two layers with keys and values of two heads of 16, two bytes each: 512 GiB.
    parts = "(weights 0.00, cache 512.00, logits 0.00)"
    assert f"too little memory: a device needs 512.00 GiB {parts} and has" in said


def test_one_of_many_that_was_not_told_is_refused(place, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert "each process would answer everything" in sentence(place, generate, *ONE)


def test_without_tokenizers_a_text_is_refused(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    missing = "a text needs a tokenizer, and the package tokenizers is missing"
    assert missing in sentence(place, generate, *ONE)


def test_processes_that_differ_are_refused(place):
    two = begin_two(place, "generate.py", ONE, ["model", "--prompt", "the sea was"])
    assert statuses(two, 300) == [2, 2]
    assert [run.said for run in two] == ["", ""]
    why = "all processes need the same model, options and prompts"
    assert why in two[0].complaints


def test_answers_that_nobody_takes(place):
    """A closed pipe ends it in silence, a full disk with the reason."""
    read, write = os.pipe()
    os.close(read)
    words = [place, "generate.py", *ONE, "--max-tokens", 2]
    with open(write, "w") as pipe, open("/dev/full", "w") as full:
        runs = [begin(*words, stdout=file) for file in (pipe, full)]
    assert statuses(runs, 300) == [128 + signal.SIGPIPE, 1]
    closed, on_full = [run.complaints.splitlines()[-1] for run in runs]
    assert closed.startswith("loaded in")
    assert on_full == "cannot print the answers: No space left on device"
