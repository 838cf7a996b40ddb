"""launch/generate.py: its answers are those of a loop that knows no cache, no batch and
no other device, and what it will not do it refuses in a sentence.
"""

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import decoder
import generate
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pair import ROOT

PROGRAM = ROOT / "launch" / "generate.py"
# JAX would not reach its own processes through a proxy, and says so.
ENVIRONMENT = {k: v for k, v in os.environ.items() if "_proxy" not in k.lower()}
CACHE = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
LENGTH = 96  # of a slot
CELL = {"jnp": jnp, "np": np}
exec((ROOT / "book/cells/checkpoint.py").read_text(), CELL)
# Eight devices cannot share 321 rows of a table, nor four of them 99 of a slot.
CONFIG = CELL["QWEN3"] | {"num_hidden_layers": 2, "vocab_size": 321}
# Splits at blanks, and puts <s> before a text, as Llama's own does.
WORDS = {"<s>": 1, "the": 15, "sea": 7, "is": 9, "blue": 53}
WORDS |= {f"w{token}": token for token in {*range(321)} - {*WORDS.values()}}
TOKENIZER = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [
        {
            "id": 1,
            "content": "<s>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    ],
    "normalizer": None,
    "pre_tokenizer": {"type": "WhitespaceSplit"},
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    },
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": WORDS, "unk_token": "w0"},
}
# Stands in for the package where it is not installed; it reads such a file alone.
STAND_IN = """
import json
from types import SimpleNamespace

class Tokenizer:
    @classmethod
    def from_file(cls, path):
        tokenizer = cls()
        with open(path) as file:
            tokenizer.words = json.load(file)["model"]["vocab"]
        return tokenizer

    def no_padding(self): pass

    def no_truncation(self): pass

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
    {
        "tokens": prompt(1, 70),
        "max_tokens": 20,
        "temperature": 1.0,
    },  # two steps to read
    {"tokens": [7], "max_tokens": 1},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 5},
    {"tokens": prompt(3, 16), "max_tokens": 8},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 5},
    {"tokens": prompt(2, 33), "max_tokens": 30, "temperature": 0.7, "seed": 6},
    {"prompt": "the sea is", "max_tokens": 12, "id": "text"},
    {"tokens": prompt(4, 92), "max_tokens": 50},  # for which there is no room
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the folder `model`, its prompts, and perhaps the stand-in."""
    place = tmp_path_factory.mktemp("generate")
    tensors = CELL["random_tensors"](CONFIG, seed=0)
    CELL["write_checkpoint"](place / "model", CONFIG, tensors)
    (place / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    lines = "\n\n".join(map(json.dumps, REQUESTS))
    (place / "requests.jsonl").write_text(lines + "\n")
    if importlib.util.find_spec("tokenizers") is None:
        (place / "tokenizers.py").write_text(STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield place
    sys.modules.pop("tokenizers", None)


def options_of(*words: object):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["generate.py", *map(str, words)])
        return generate.read_options()


def prepared(place: Path, *words: object):
    """What the program has before its first step, in this process, on one device."""
    more = ["--length", LENGTH, "--devices", 1, *words]
    asked = options_of(place / "model", "--prompts", place / "requests.jsonl", *more)
    engine, requests, stops, _ = generate.prepare(asked)
    return engine, requests, stops


def answers(engine, requests, stops=frozenset()) -> dict:
    """What is said to each, by name, once all are answered."""
    for request in requests:
        request.said, request.asked, request.finish = [], 0, ""
    done = [one.name for one in generate.serve(engine, requests, stops) if one]
    assert sorted(map(str, done)) == sorted(str(one.name) for one in requests)
    return {request.name: request.said for request in requests}


@pytest.fixture(scope="module")
def served(place):
    """Three slots for nine requests."""
    return prepared(place, "--slots", 3)


@pytest.fixture(scope="module")
def plain(place, served):
    """The tokens that the whole model says, one request and one token at a time."""
    c = decoder.read_config(place / "model")
    files = decoder.open_folder(place / "model")
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    weights = decoder.load(files, c, mesh, jnp.float32)

    @jax.jit
    def say(tokens, size, seed, heat):
        x, _ = decoder.hidden(weights, tokens[None], jnp.arange(LENGTH)[None], c)
        scores = decoder.logits(weights, x[0, size - 1], c)
        said = decoder.choose(scores[None], seed[None], size[None], heat[None])
        return said[0]

    said = {}
    for request in served[1]:
        text = [*request.prompt]
        for _ in range(request.most):
            padded = np.pad(text, (0, LENGTH - len(text)))
            numbers = np.int32(len(text)), np.int32(request.seed)
            text.append(int(say(padded, *numbers, np.float32(request.heat))))
        said[request.name] = text[len(request.prompt) :]
    return said


def run(place: Path, *words: object, **how) -> subprocess.Popen:
    """The program in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    env = CACHE | {"JAX_COMPILATION_CACHE_DIR": str(place / "cache")} | ENVIRONMENT
    also = ENVIRONMENT.get("PYTHONPATH", "")
    env |= {"PYTHONPATH": f"{place}{os.pathsep}{also}"}
    command = [sys.executable, str(PROGRAM), *map(str, words)]
    return subprocess.Popen(command, cwd=place, env=env, text=True, **pipes | how)


def end(*runs: subprocess.Popen) -> list[tuple[str, str]]:
    """What each has printed and told; none is left."""
    try:
        return [one.communicate(timeout=300) for one in runs]
    finally:
        for one in runs:
            one.kill()


def run_two(place: Path, *each: list[object]) -> list[subprocess.Popen]:
    """Two processes of four devices, each with words of its own."""
    with socket.socket() as probe:  # a port that nobody uses
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    meet = ["--emulate", 4, "--coordinator", address, "--processes", 2, "--process"]
    return [run(place, *words, *meet, n) for n, words in enumerate(each)]


# ----------------------------------------------------------------------------- answers


def test_answers_are_those_of_the_plain_loop(served, plain):
    engine, requests, _ = served
    assert engine.shape[:4] == (3, LENGTH, 4, 16)
    assert answers(engine, requests) == plain
    assert len(plain[8]) == LENGTH - 92 and requests[8].finish == "length"
    assert plain[3] == plain[5] != plain[6]  # seeds 5, 5 and 6


def test_one_by_one_they_are_the_same(place, plain):
    assert answers(*prepared(place, "--slots", 1)) == plain


def test_no_step_compiles_and_none_copies_the_cache(place, monkeypatch):
    compiled, later = [], []
    compile_it = jax.stages.Lowered.compile

    def count(lowered):
        compiled.append(lowered)
        return compile_it(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", count)
    engine, requests, stops = prepared(place, "--slots", 2, "--dtype", "bfloat16")
    assert len(compiled) == 2

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


def test_eight_devices_and_two_processes_say_the_same(place, plain):
    words = ["model", "--prompts", "requests.jsonl", "--length", LENGTH + 1]
    words += ["--slots", 4, "--dtype", "float32"]
    for runs in ([run(place, *words, "--emulate", 8)], run_two(place, words, words)):
        told = end(*runs)
        assert [one.returncode for one in runs] == [0] * len(runs), told[-1][1][-2000:]
        lines = [json.loads(line) for line in told[0][0].splitlines()]
        assert [said for said, _ in told[1:]] == [""] * (len(runs) - 1)
        said = {line["id"]: line["tokens"] for line in lines}
        assert len(said[8]) == 5
        assert said | {8: said[8][:4]} == plain
        assert lines[0]["id"] == 2  # the shortest is told first
        [text] = [line for line in lines if line["id"] == "text"]
        names = {number: word for word, number in WORDS.items()}
        due = {
            "id": "text",
            "prompt_tokens": 4,
            "tokens": plain["text"],
            "text": " ".join(names[n] for n in plain["text"] if n != 1),
            "finish_reason": "length",
            "seed": 7,
        }
        assert text == due
        assert "on 8 cpu devices" in told[0][1] and "a second" in told[0][1]


def test_a_tensor_that_does_not_divide_is_held_whole(place):
    c = decoder.read_config(place / "model")
    mesh = jax.sharding.AbstractMesh((2, 4), decoder.AXES)
    tree = decoder.tensors(c)
    table, rows = tree["embed_tokens"], tree["layers"][0]["q_proj"]
    assert generate.fitted(table, mesh).shard_shape(table.shape) == table.shape
    assert generate.fitted(rows, mesh).shard_shape(rows.shape) == (16, 64)


# ---------------------------------------------------------------------------- refusals


def sentence(place: Path, *words: object) -> str:
    """Why the program refuses, before it loads anything."""

    def end(status: int, sentence: str = ""):
        assert status == generate.REFUSED
        raise ValueError(sentence)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "end", end)
        patch.setattr(generate.decoder, "load", lambda *_: pytest.fail("it loads"))
        patch.chdir(place)
        with pytest.raises((ValueError, OSError)) as refused:
            generate.prepare(options_of(*words))
    return f"{refused.value}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "asks for what is not here: model_type 'gpt2'"),
        ({"quantization_config": {"bits": 4}}, "not here: quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "not here: rope of type 'yarn'"),
        ({"vocab_size": 99}, "embed_tokens.weight is (321, 64) in the files, not (99,"),
        ({"tie_word_embeddings": True}, "ties the two tables, and they differ"),
        (
            {"num_hidden_layers": 3},
            "missing in the files: model.layers.2.input_layernorm.weight",
        ),
        (
            {"num_hidden_layers": 1},
            "not of this model: model.layers.1.input_layernorm.weight",
        ),
        ({"num_attention_heads": "8"}, "num_attention_heads is '8', no number above 0"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads is 'two', no number"),
        ({"rope_theta": None}, "asks for what is not here: rope_theta None"),
    ],
)
def test_another_model_is_refused(place, tmp_path, change, reason):
    shutil.copytree(place / "model", tmp_path / "model")
    text = json.dumps(CONFIG | change)
    (tmp_path / "model" / "config.json").write_text(text)
    line = [tmp_path / "model", "--prompts", "requests.jsonl"]
    assert reason in sentence(place, *line)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def give(text: bytes):
    return lambda path: path.write_bytes(text)


def make_int8(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I8"  ', 1))


WEIGHTS = "model-00002-of-00003.safetensors"


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        (WEIGHTS, cut, "bytes; its header asks for"),
        (WEIGHTS, Path.unlink, f"{WEIGHTS} is missing"),
        (WEIGHTS, give(b"version https://git-lfs"), "is a pointer of Git LFS"),
        (WEIGHTS, give(b"<!doctype html>" * 9), "is no safetensors file"),
        (WEIGHTS, make_int8, "is of type I8, not"),
        ("model.safetensors.index.json", cut, "index.json is no index of tensors"),
        ("config.json", cut, "config.json is not JSON: "),
        ("config.json", Path.unlink, "No such file or directory: "),
        ("config.json", give(b"[]"), "config.json is no JSON object"),
        ("tokenizer.json", give(b"no"), "tokenizer.json is no tokenizer: "),
        ("tokenizer.json", Path.unlink, "needs a tokenizer, and"),
    ],
)
def test_a_torn_folder_is_refused(place, tmp_path, name, damage, reason):
    shutil.copytree(place / "model", tmp_path / "model")
    damage(tmp_path / "model" / name)
    assert reason in sentence(place, tmp_path / "model", "--prompt", "the sea")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"tokens": [1, 2', "it is not JSON (Expecting ',' delimiter)"),
        (b"\xff", "it is not JSON ('utf-8' codec"),
        ("[1, 2]", 'it is no object with either "prompt" or "tokens"'),
        ('{"tokens": [1], "prompt": "sea"}', "it is no object with either"),
        ('{"tokens": [1], "max_token": 5}', "it has ['max_token'], which mean nothing"),
        ('{"tokens": [1], "id": [1]}', "its id [1] is no text and no whole number"),
        ('{"tokens": [1, 321]}', "321 is no token: these go from 0 to 320"),
        ('{"tokens": [1, true]}', "True is no token"),
        ('{"tokens": []}', "its prompt needs at least one token"),
        ('{"prompt": 5}', "its prompt is no Unicode text"),
        ('{"tokens": [1], "max_tokens": 0}', "max_tokens: 0 is no whole number from 1"),
        ('{"tokens": [1], "max_tokens": 2.5}', "max_tokens: 2.5 is no whole number"),
        ('{"tokens": [1], "seed": "5"}', 'seed: "5" is no whole number from 0 to'),
        ('{"tokens": [1], "temperature": NaN}', "temperature: NaN is no number from"),
        ('{"tokens": [1], "temperature": -1}', "temperature: -1 is no number from 0"),
    ],
)
def test_a_bad_line_is_refused_and_named(place, tmp_path, line, reason):
    file = tmp_path / "bad.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(b'{"tokens": [1]}\n\n' + line + b"\n")
    assert f"{file}, line 3: {reason}" in sentence(place, "model", "--prompts", file)


ONE = ["model", "--prompt", "the sea is"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere", *ONE[1:]], "nowhere is no folder"),
        (["model"], "there is nothing to answer"),
        (
            [*ONE, "--max-tokens", 0],
            "argument --max-tokens: 0 is no whole number from 1",
        ),
        (
            [*ONE, "--process", 1],
            "--coordinator, --processes and --process go together",
        ),
        ([*ONE, "--coordinator", "here"], "go together"),
        (
            [*ONE, *"--coordinator here --processes 2 --process 1".split()],
            "--coordinator here is not HOST:PORT",
        ),
        (
            [*ONE, *"--coordinator a:1 --processes 2 --process 2".split()],
            "--process counts from 0: to 1",
        ),
        (
            ["model", "--prompts", "none.jsonl"],
            "No such file or directory: 'none.jsonl'",
        ),
        (["model", "--prompts", os.devnull], f"{os.devnull} asks for nothing"),
        (
            [*ONE, "--length", 4],
            "0 has 4 tokens, and with one of an answer it has to fit",
        ),
        ([*ONE, "--length", 257], "--length 257: the model was made for 256"),
        ([*ONE, "--devices", 999], "--devices 999: there are "),
    ],
)
def test_what_cannot_be_is_refused(place, words, reason):
    assert reason in sentence(place, *words)


def test_too_little_memory_is_refused(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    text = json.dumps(CONFIG | {"max_position_embeddings": None})
    (tmp_path / "model" / "config.json").write_text(text)
    words = [tmp_path / "model", *ONE[1:], "--devices", 1, "--length", 2**31 - 1]
    words += ["--dtype", "float16"]
    # Two layers with keys and values of two heads of 16, two bytes each: 512 GiB.
    needs = (
        "a device needs 512.00 GiB (weights 0.00, cache 512.00, logits 0.00) and has"
    )
    assert f"too little memory: {needs}" in sentence(place, *words)


def test_one_of_many_that_was_not_told_is_refused(place, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert "each process would answer everything" in sentence(place, *ONE)


def test_without_tokenizers_a_text_is_refused(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    missing = "a text needs a tokenizer, and the package tokenizers is missing"
    assert missing in sentence(place, *ONE)


def test_a_refusal_is_one_line_and_status_2(place):
    (place / "two.jsonl").write_text('{"tokens": [1]}\n{"tokens": [1, 2}\n')
    runs = {
        "two.jsonl, line 2: it is not JSON": run(
            place, "model", "--prompts", "two.jsonl"
        ),
        "unrecognized arguments: --top-k 5": run(place, *ONE, "--top-k", 5),
        "none.jsonl: No such file": run(place, "model", "--prompts", "none.jsonl"),
    }
    for (reason, one), (said, told) in zip(runs.items(), end(*runs.values())):
        assert (one.returncode, said, told.count("\n")) == (2, "", 1)
        assert told.startswith(reason)


def test_processes_that_differ_are_refused(place):
    runs = run_two(place, ONE, ["model", "--prompt", "the sea was"])
    told = end(*runs)
    assert [(one.returncode, said) for one, (said, _) in zip(runs, told)] == [
        (2, "")
    ] * 2
    assert "all processes need the same model, options and prompts" in told[0][1]


def test_answers_that_nobody_takes(place):
    """A closed pipe ends it in silence, a full disk with the reason."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        closed = run(place, *ONE, "--max-tokens", 2, stdout=pipe)
    [(_, told)] = end(closed)
    with open("/dev/full", "w") as full:
        on_full = run(place, *ONE, "--max-tokens", 2, stdout=full)
    [(_, told_why)] = end(on_full)
    assert closed.returncode == 128 + signal.SIGPIPE
    assert told.splitlines()[-1].startswith("loaded in")
    assert on_full.returncode == 1
    why = "cannot print the answers: No space left on device"
    assert told_why.splitlines()[-1] == why
