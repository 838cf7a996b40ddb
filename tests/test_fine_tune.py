"""launch/fine_tune.py: its numbers are those of a plain loop on any number of devices,
what stops it loses nothing, and what it will not do it refuses in a sentence.

Faults of checkpoints themselves are in test_faults.py: lifecycle.py keeps them.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import adapters
import decoder
import fine_tune
import generate
import jax
import jax.numpy as jnp
import lifecycle
import numpy as np
import optax
import pytest
from runs import SLOWLY, TOLERANCE, read_until
from test_faults import linux_root, small_disk
from test_generate import CACHE, CELL, CONFIG, ENVIRONMENT, STAND_IN, TOKENIZER, WORDS

LAUNCH = fine_tune.__file__
STEPS, SAVE, LOG = 24, 10, 8
RATE = 1e-2
SHORT = ["model", "data.jsonl", "--eval", "held.jsonl", "--steps", STEPS]
SHORT += ["--save-every", SAVE, "--log-every", LOG]
LORA = ["--rank", 4, "--alpha", 8, "--rate", RATE]
T = 32  # no less than any row has
# What runs the program after some lines that change it, under its own name.
CHANGED = f"""
import runpy, sys
sys.path.insert(0, {str(Path(LAUNCH).parent)!r})
sys.argv[0] = "fine_tune.py"
{{}}
runpy.run_path({LAUNCH!r}, run_name="__main__")
"""


def some_rows(seed: int, count: int) -> list[dict]:
    """Rows that count on, of unlike lengths, from the longest to the shortest."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        start, size, more = rng.integers([2, 2, 1], [280, 12, 21])
        tokens = [int(start + i) for i in range(size + more)]
        rows.append({"tokens": tokens[:size], "answer": tokens[size:]})
    return sorted(rows, key=lambda row: -len(row["tokens"] + row["answer"]))


def write_rows(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the folder `model`, its rows, and perhaps a stand-in."""
    place = tmp_path_factory.mktemp("fine_tune")
    tensors = CELL["random_tensors"](CONFIG, seed=0)
    CELL["write_checkpoint"](place / "model", CONFIG, tensors)
    (place / "model" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    write_rows(place / "data.jsonl", some_rows(0, 30))
    write_rows(place / "held.jsonl", some_rows(1, 13))
    if importlib.util.find_spec("tokenizers") is None:
        (place / "tokenizers.py").write_text(STAND_IN)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        yield place
    sys.modules.pop("tokenizers", None)


RUNS = []


def begin(place: Path, *words: object, code: str = "") -> subprocess.Popen:
    """The program in a process of its own, perhaps changed by some lines."""
    env = CACHE | {"JAX_COMPILATION_CACHE_DIR": str(place / "cache")} | ENVIRONMENT
    env |= {"PYTHONPATH": f"{place}{os.pathsep}{ENVIRONMENT.get('PYTHONPATH', '')}"}
    program = ["-c", CHANGED.format(code)] if code else [LAUNCH]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *program, *map(str, words)]
    RUNS.append(subprocess.Popen(command, cwd=place, env=env, **pipes))
    return RUNS[-1]


def begin_two(place: Path, *words: object, code: str = "") -> list[subprocess.Popen]:
    """Two processes of four devices each, which meet."""
    with socket.socket() as probe:  # a port that nobody uses
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    meet = ["--emulate", 4, "--coordinator", address, "--processes", 2]
    meet += ["--heartbeat", 10, "--process"]
    return [begin(place, *words, *meet, n, code=code) for n in range(2)]


@pytest.fixture(autouse=True)
def none_left():
    yield
    for run in RUNS:
        run.kill()
        run.communicate()
    RUNS.clear()


def statuses(*runs: subprocess.Popen, within: float = 200) -> list[int]:
    """How these end; what they have said is in them."""
    deadline = time.monotonic() + within
    for run in runs:
        run.said, run.told = run.communicate(timeout=deadline - time.monotonic())
    return [run.returncode for run in runs]


def numbers_in(said: str) -> list[tuple[int, str, float]]:
    """Each number that is printed, with its step and what it is."""
    found = re.findall(r"^step +(\d+)  (loss|eval loss) (\S+)", said, re.M)
    return [(int(step), what, float(number)) for step, what, number in found]


def saved_in(folder: Path) -> dict[str, np.ndarray]:
    return decoder.open_file(folder / "adapter_model.safetensors")


def same_bits(one: Path, other: Path) -> None:
    first, second = saved_in(one), saved_in(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert values.tobytes() == second[name].tobytes(), name


# ------------------------------------------------------------------- the plain loop


def in_arrays(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """All rows of a file: tokens i32[n, T], and where an answer stands bool[n, T]."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    tokens, answers = np.zeros((2, len(rows), T), np.int32)
    for number, row in enumerate(rows):
        both = row["tokens"] + row["answer"]
        tokens[number, : len(both)] = both
        answers[number, len(row["tokens"]) : len(both)] = 1
    return tokens, answers


def added(weights: dict, params: list, scale: float) -> dict:
    """Plain weights with adapters added to them."""
    layers = []
    for w, pairs in zip(weights["layers"], params, strict=True):
        new = {name: w[name] + scale * pair.b @ pair.a for name, pair in pairs.items()}
        layers.append(w | new)
    return weights | {"layers": layers}


@pytest.fixture(scope="module")
def plain(place):
    """A function that trains without this program: what it should print, and params.

    It has one device, one length, whole logits, and one schedule in NumPy."""
    c = decoder.read_config(place / "model")
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    files = decoder.open_folder(place / "model")
    weights = decoder.load(files, c, mesh, np.float32)
    train, held = in_arrays(place / "data.jsonl"), in_arrays(place / "held.jsonl")
    count = len(train[0])
    epochs = [np.random.default_rng([0, n]).permutation(count) for n in range(9)]
    order = np.concatenate(epochs)

    def loop(full: bool, rate: float):
        def mean_loss(params, rows):
            tokens, answers = rows
            w = params if full else added(weights, params, 2.0)
            places = jnp.broadcast_to(jnp.arange(T), tokens.shape)
            x, _ = decoder.hidden(w, tokens, places, c)
            logs = jax.nn.log_softmax(decoder.logits(w, x, c))[:, :-1]
            losses = -jnp.take_along_axis(logs, tokens[:, 1:, None], axis=2)[..., 0]
            return (losses * answers[:, 1:]).sum() / answers[:, 1:].sum()

        warm = np.arange(2) / 2
        cool = (1 + np.cos(np.pi * np.arange(STEPS - 2) / (STEPS - 2))) / 2
        rates = jnp.array(rate * np.concatenate([warm, cool]))
        adam = optax.adam(lambda count: rates[count])

        @jax.jit
        def step(params, memory, rows):
            loss, grads = jax.value_and_grad(mean_loss)(params, rows)
            norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
            grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
            updates, memory = adam.update(grads, memory)
            return optax.apply_updates(params, updates), memory, loss

        params, key, lora = weights, jax.random.key(0), adapters.Lora(4, 8.0)
        if not full:
            params = adapters.new_adapters(key, c, lora, mesh)
        memory, score = adam.init(params), jax.jit(mean_loss)
        printed = [(0, "eval loss", score(params, held))]
        for done in range(STEPS):
            rows = order[8 * done : 8 * done + 8]
            params, memory, loss = step(params, memory, [x[rows] for x in train])
            if (done + 1) % LOG == 0:
                printed.append((done + 1, "loss", loss))
            if (done + 1) % SAVE == 0 or done + 1 == STEPS:
                printed.append((done + 1, "eval loss", score(params, held)))
        return printed, params

    return loop


def check(said: str, expected: list, start: int = 0, stop: int = STEPS) -> None:
    """What a run has printed of the steps from start to stop is what was expected; of
    a state that it has restored it tells one number more."""
    due = [(n, what) for n, what, _ in expected if start < n <= stop or n == start == 0]
    found = {line[:2]: line[2] for line in numbers_in(said)}
    assert found.keys() - {(start, "eval loss")} == {*due} - {(start, "eval loss")}, (
        said
    )
    by_name = {line[:2]: float(line[2]) for line in expected}
    pairs = [(found[name], by_name[name]) for name in due]
    np.testing.assert_allclose(*zip(*pairs), **TOLERANCE)


# ----------------------------------------------------------------------------- numbers


@pytest.fixture(scope="module")
def whole(place):
    """A run on eight devices: what it has said. Its folders are `whole` and so on."""
    run = begin(place, *SHORT, *LORA, "--out", "whole", "--emulate", 8)
    assert statuses(run) == [0], run.told
    assert run.told == ""
    assert numbers_in(run.said)
    return run.said


@pytest.fixture(scope="module")
def expected(plain):
    return plain(False, RATE)


def test_eight_devices_give_the_numbers_of_a_plain_loop(place, whole, expected):
    printed, params = expected
    check(whole, printed)
    assert printed[-1][2] < 0.9 * printed[0][2]  # it learns
    files, c = saved_in(place / "whole"), decoder.read_config(place / "model")
    names = adapters.adapter_tensors(c, adapters.Lora(4, 8.0))
    for tensor, due in zip(jax.tree.leaves(names), jax.tree.leaves(params)):
        np.testing.assert_allclose(files[tensor.name], due, rtol=1e-2, atol=1e-4)


def test_all_weights_can_be_trained(place, plain):
    """And come back as a folder that loads, in its own type."""
    words = [*SHORT, "--full", "--rate", 1e-3, "--out", "full"]
    (place / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    run = begin(place, *words, "--emulate", 8)
    assert statuses(run) == [0], run.told
    printed, params = plain(True, 1e-3)
    check(run.said, printed)
    c = decoder.read_config(place / "full")
    assert c == decoder.read_config(place / "model")
    files = decoder.open_folder(place / "full")
    decoder.check_files(files, decoder.tensors(c), c)
    names = [tensor.name for tensor in jax.tree.leaves(decoder.tensors(c))]
    for name, due in zip(names, jax.tree.leaves(params), strict=True):
        assert files[name].dtype == jnp.bfloat16
        found = np.float32(files[name])
        np.testing.assert_allclose(found, due, rtol=2**-7, atol=1e-3)
    kept = {path.name for path in (place / "full").iterdir()}
    assert kept >= {"tokenizer.json", "generation_config.json", "config.json"}
    (place / "model" / "generation_config.json").unlink()


# ------------------------------------------------------------------------------- stops


def test_killed_and_begun_again_it_ends_with_the_same_bits(place, whole):
    words = [*SHORT, *LORA, "--out", "killed", "--emulate", 8]
    run = begin(place, *words, code=SLOWLY)
    read_until(run, f"step {SAVE:5}  eval loss")
    while not (place / "killed.checkpoints" / str(SAVE)).exists():
        time.sleep(0.05)
    run.kill()
    statuses(run)
    again = begin(place, *words)
    assert statuses(again) == [0], again.told
    start = int(re.search(r"^step +(\d+)  restored", again.said, re.M)[1])
    assert start in (SAVE, 2 * SAVE)
    due = [line for line in whole.splitlines() if line.startswith("step")]
    assert again.said.splitlines()[-3:-1] == due[-2:]
    same_bits(place / "whole", place / "killed")


def test_two_processes_that_are_told_to_stop_save_and_one_device_goes_on(
    place, expected
):
    words = [*SHORT, *LORA, "--out", "stopped"]
    two = begin_two(place, *words, code=SLOWLY)
    said = read_until(two[0], f"step {SAVE:5}  eval loss")
    two[1].send_signal(signal.SIGTERM)
    assert statuses(*two) == [75, 75], two[0].told + two[1].told
    [line] = [line for line in two[0].said.splitlines() if line.startswith("stopped")]
    assert line.startswith("stopped: the same command goes on after step ")
    start = int(line.split()[-1])
    assert SAVE < start < STEPS
    check(said + two[0].said, expected[0], stop=start)
    assert "step" not in two[1].said
    assert not (place / "stopped").exists()
    one = begin(place, *words, "--emulate", 1)
    assert statuses(one) == [0], one.told
    check(one.said, expected[0], start)
    assert f"step {start:5}  restored" in one.said
    files = saved_in(place / "stopped")
    for name, values in saved_in(place / "whole").items():
        np.testing.assert_allclose(files[name], values, rtol=1e-2, atol=1e-4)


def copied(place: Path, name: str) -> list[object]:
    """The words of a run that finds all of its steps done, and has to write them."""
    folder = place / f"{name}.checkpoints"
    shutil.copytree(place / "whole.checkpoints", folder)
    return [*SHORT, *LORA, "--folder", folder]


@linux_root
@pytest.mark.parametrize(("processes", "room"), [(1, 0), (2, 20_000)])
def test_a_full_disk_at_the_end_is_said_and_nothing_is_left(
    place, tmp_path, whole, processes, room
):
    """No room for the small file, or not enough for the large one."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        words = [*copied(place, f"disk {processes}"), "--out", disk / "out"]
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free - room))
        if processes == 1:
            runs = [begin(place, *words, "--emulate", 8)]
        else:
            runs = begin_two(place, *words)
        assert statuses(*runs, within=100) == [78] * processes
        [line] = [line for line in runs[0].told.splitlines() if "not written" in line]
        where = " (in process 0)" * (processes == 2)
        assert f"out is not written: No space left on device{where}; what" in line
        assert [path.name for path in disk.iterdir()] == ["ballast"]
        if processes == 1:
            ballast.unlink()
            again = begin(place, *words, "--emulate", 8)
            assert statuses(again) == [0], again.told
            same_bits(place / "whole", disk / "out")


ONE_CANNOT = """
import adapters, errno, numpy as np

def memmap(path, *rest):
    raise OSError(errno.EIO, "no", str(path))

def save(*words):
    if sys.argv[-1] == "1":
        np.memmap = memmap
    save_adapters(*words)

save_adapters, adapters.save_adapters = adapters.save_adapters, save
"""


def test_what_one_process_cannot_write_ends_both(place, whole):
    words = [*copied(place, "one cannot"), "--out", "cannot"]
    two = begin_two(place, *words, code=ONE_CANNOT)
    assert statuses(*two, within=100) == [78, 78], two[0].told + two[1].told
    assert "not written: Input/output error (in process 1); what" in two[0].told
    assert [path.name for path in place.glob("cannot*")] == []
    again = begin_two(place, *words)
    assert statuses(*again) == [0, 0], again[0].told + again[1].told
    same_bits(place / "whole", place / "cannot")


def test_a_number_that_is_none_ends_it(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    tensors = CELL["random_tensors"](CONFIG, seed=0)
    tensors["model.norm.weight"][3] = np.nan
    CELL["write_checkpoint"](tmp_path / "model", CONFIG, tensors)
    words = [tmp_path / "model", *SHORT[1:], *LORA, "--out", tmp_path / "out"]
    run = begin(place, *words, "--emulate", 1)
    assert statuses(run) == [78]
    assert "the loss of step 1 is nan" in run.told
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------ the adapters


def test_generate_answers_as_merged_weights_do(place, whole):
    c = decoder.read_config(place / "model")
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    weights = decoder.load(decoder.open_folder(place / "model"), c, mesh, np.float32)
    params, lora = adapters.load_adapters(place / "whole", c, mesh)
    assert lora == adapters.Lora(4, 8.0)
    merged = added(weights, params, 2.0)
    prompts = [[5, 6, 7], [100, 101, 102, 103], [40]]

    @jax.jit
    def say(weights, tokens, size):
        x, _ = decoder.hidden(weights, tokens[None], jnp.arange(T)[None], c)
        return decoder.logits(weights, x[0, size - 1], c).argmax()

    def greedy(weights: dict, prompt: list[int]) -> list[int]:
        text = [*prompt]
        for _ in range(12):
            text.append(int(say(weights, np.pad(text, (0, T - len(text))), len(text))))
        return text[len(prompt) :]

    write_rows(place / "prompts.jsonl", [{"tokens": prompt} for prompt in prompts])
    words = ["model", "--prompts", "prompts.jsonl", "--max-tokens", 12, "--devices", 1]
    said = {}
    for name, more in (("base", []), ("adapters", ["--adapters", "whole"])):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            patch.setattr(sys, "argv", ["generate.py", *map(str, words), *more])
            engine, requests, *_ = generate.prepare(generate.read_options())
        [*generate.serve(engine, requests, set())]
        said[name] = [request.said for request in requests]
    assert said["base"] == [greedy(weights, prompt) for prompt in prompts]
    assert said["adapters"] == [greedy(merged, prompt) for prompt in prompts]
    assert said["adapters"] != said["base"]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda said: said | {"peft_type": "IA3"}, "is of 'IA3', not of LORA"),
        (lambda said: said | {"r": 8}, "is not for this model: it differs in base_"),
        (lambda said: said | {"bias": "all"}, "asks for what is not here: bias 'all'"),
        (lambda said: said | {"layers_to_transform": [0]}, "layers_to_transform"),
        (lambda said: {"peft_type": "LORA"}, "is not as it should be: "),
        (lambda said: [], "is not as it should be: "),
    ],
)
def test_adapters_that_will_not_do_are_refused(place, whole, tmp_path, damage, reason):
    shutil.copytree(place / "whole", tmp_path / "adapters")
    path = tmp_path / "adapters" / "adapter_config.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    words = ["model", "--prompts", "prompts.jsonl", "--adapters", path.parent]
    write_rows(place / "prompts.jsonl", [{"tokens": [5]}])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(decoder, "load", lambda *_: pytest.fail("it loads"))
        patch.setattr(sys, "argv", ["generate.py", *map(str, words)])
        with pytest.raises(ValueError, match=reason):
            generate.prepare(generate.read_options())


# -------------------------------------------------------------------------------- rows


def test_a_text_becomes_tokens_and_ends_where_answers_end(place, tmp_path):
    shutil.copytree(place / "model", tmp_path / "model")
    read = partial(fine_tune.end_of_answers, tmp_path / "model")
    model = generate.read_model(tmp_path / "model")
    assert read(model.tokenizer) == []
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(CONFIG | {"eos_token_id": 9}))
    assert read(model.tokenizer) == [9]
    config.write_text(json.dumps(CONFIG | {"eos_token_id": [9, 8]}))
    assert read(model.tokenizer) == []
    about = tmp_path / "model" / "tokenizer_config.json"
    for name in ("blue", {"content": "blue"}):
        about.write_text(json.dumps({"eos_token": name}))
        assert read(model.tokenizer) == [WORDS["blue"]]
    row = fine_tune.read_row({"prompt": "the sea", "answer": "is"}, model, [53], 9)
    assert row == ([1, 15, 7, 9, 53], 3)
    row = fine_tune.read_row({"tokens": [4], "answer": [5, 6]}, model, [53], 9)
    assert row == ([4, 5, 6], 1)


def test_a_batch_has_answers_for_targets_and_few_lengths():
    rows = [fine_tune.Row([4, 5, 6], 1), fine_tune.Row([7, 8, 9, 10], 3)]
    batch = fine_tune.make_batch(rows, 3, longest=40)
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    targets = np.full((3, 16), -1)
    targets[0, :2], targets[1, 2] = [5, 6], 10
    np.testing.assert_array_equal(batch.targets, targets)
    np.testing.assert_array_equal(batch.tokens[1, :5], [7, 8, 9, 10, 0])
    for longest, due in ((40, {16, 32, 48}), (300, {16, 32, 64, 128, 256, 384})):
        sizes = range(1, longest + 1)
        assert {fine_tune.bucket(size, longest) for size in sizes} == due
        assert all(fine_tune.bucket(size, longest) >= size for size in sizes)


def test_the_runs_above_have_two_lengths(place):
    """Of batches that are scored; all that are trained on have one."""
    model = generate.read_model(place / "model")
    paths = place / "data.jsonl", place / "held.jsonl"
    rows, held = (fine_tune.read_rows(path, model, [], T) for path in paths)
    longest = max(len(row.tokens) for row in rows + held)
    steps = [fine_tune.rows_of_step(rows, 0, step, 8) for step in range(STEPS)]
    for batches, due in ((steps, {32}), ((held[:8], held[8:]), {16, 32})):
        made = [fine_tune.make_batch(batch, 8, longest) for batch in batches]
        assert {batch.tokens.shape[1] for batch in made} == due


def test_each_epoch_has_each_row_once():
    rows = list(range(5))
    steps = [fine_tune.rows_of_step(rows, 0, step, 2) for step in range(10)]
    said = np.reshape(steps, (4, 5))
    assert (np.sort(said, axis=1) == rows).all()
    assert len({*map(tuple, said.tolist())}) > 1
    other = [fine_tune.rows_of_step(rows, 1, step, 2) for step in range(10)]
    assert other != steps


# ---------------------------------------------------------------------------- refusals


@pytest.fixture
def sentence(place, monkeypatch, capsys):
    """A function that says why the program refuses, before it loads anything."""

    def end(status: int, sentence: str = ""):
        print(sentence, file=sys.stderr)
        sys.exit(status)

    monkeypatch.setattr(lifecycle, "hear_no_more", lambda: None)
    monkeypatch.setattr(generate, "end", end)
    for name, module in (("load", decoder), ("agree", lifecycle)):
        monkeypatch.setattr(module, name, lambda *_: pytest.fail("it goes on"))
    monkeypatch.chdir(place)

    def refuse(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", ["fine_tune.py", *map(str, words)])
        with pytest.raises(SystemExit, match="^2$"):
            fine_tune.main(fine_tune.read_options())
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("\n") == 1
        return said.err

    return refuse


ASK = ["model", "data.jsonl", "--out", "new", "--devices", 1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["nowhere", *ASK[1:]], "nowhere is no folder"),
        (["model", "none.jsonl", *ASK[2:]], "none.jsonl: No such file"),
        (["model", os.devnull, *ASK[2:]], "/dev/null has no row"),
        (ASK[:2], "the following arguments are required: --out"),
        ([*ASK, "--out", "model"], "model exists: nothing is written over it"),
        ([*ASK, "--out", "data.jsonl/new"], "data.jsonl: File exists"),
        ([*ASK, "--eval", "none.jsonl"], "none.jsonl: No such file"),
        ([*ASK, "--length", 8], "tokens with its answer, and may have 8"),
        ([*ASK, "--length", 257], "--length 257: the model was made for 256"),
        ([*ASK, "--devices", 999], "--devices 999: there are "),
        ([*ASK, "--rank", 0], "argument --rank: 0 is no whole number from 1"),
        ([*ASK, "--rate", "nan"], "argument --rate: nan is no number from"),
        ([*ASK, "--full", "--rank", 4], "--rank and --alpha are of adapters"),
        ([*ASK, "--steps", 4, "--epochs", 1], "give --steps or --epochs, not both"),
        ([*ASK, "--process", 1], "--coordinator, --processes and --process go"),
        ([*ASK, "--dtype", "float16"], "argument --dtype: invalid choice"),
    ],
)
def test_what_cannot_be_is_refused(sentence, words, reason):
    assert reason in sentence(*words)


def test_a_batch_that_does_not_divide_is_refused(place):
    two = begin_two(place, "model", "data.jsonl", "--out", "new", "--batch", 12)
    assert statuses(*two) == [2, 2]
    line = "--batch 12 has to be a multiple of the 8 devices"
    assert [run.told.count(line) for run in two] == [1, 0]
    assert not [*place.glob("new*")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"tokens": [1, 2', "it is not JSON (Expecting ',' delimiter)"),
        (b"\xff", "it is not JSON ('utf-8' codec"),
        (b"[1, 2]", 'it is no object with either "prompt" or "tokens"'),
        (b'{"answer": [1]}', 'it is no object with either "prompt" or "tokens"'),
        (b'{"tokens": [1]}', 'it has no "answer"'),
        (b'{"prompt": "sea"}', 'it has no "answer"'),
        (b'{"tokens": [1], "answer": []}', "its answer needs at least one token"),
        (b'{"tokens": [], "answer": [1]}', "its prompt needs at least one token"),
        (b'{"prompt": "sea", "answer": ""}', "its answer needs at least one token"),
        (b'{"prompt": "sea", "answer": [7]}', "its answer is no Unicode text"),
        (b'{"tokens": [1], "answer": "sea"}', "its answer is no list of tokens"),
        (
            b'{"tokens": [1], "answer": [321]}',
            "321 is no token: these go from 0 to 320",
        ),
        (
            b'{"tokens": [1], "answer": [1], "answers": [2]}',
            "it has ['answers'], which",
        ),
        (
            b'{"tokens": [1], "answer": [%s1]}' % (b"1, " * 60),
            "it has 62 tokens with its answer, and may have 60",
        ),
    ],
)
def test_a_bad_line_is_refused_and_named(sentence, tmp_path, line, reason):
    file = tmp_path / "bad.jsonl"
    file.write_bytes(b'{"tokens": [1], "answer": [2]}\n\n' + line + b"\n")
    said = sentence("model", file, "--out", "new", "--length", 60)
    assert f"{file}, line 3: {reason}" in said


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def make_int8(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"I8"  ', 1))


def say(**change: object):
    def write(path: Path) -> None:
        said = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(said | change))

    return write


FILE = "model-00002-of-00003.safetensors"
TEXT = [{"prompt": "the sea", "answer": "is"}]


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("config.json", say(model_type="gpt2"), "not here: model_type 'gpt2'"),
        ("config.json", say(quantization_config={"bits": 4}), "not here: quantization"),
        ("config.json", cut, "config.json is not JSON: "),
        (FILE, cut, "bytes; its header asks for"),
        (FILE, make_int8, "is of type I8, not"),
        (FILE, Path.unlink, f"{FILE} is missing"),
        ("tokenizer.json", Path.unlink, "a text needs a tokenizer, and"),
        (
            "tokenizer_config.json",
            say(eos_token="wet"),
            "its eos_token 'wet' is not in",
        ),
        ("tokenizer_config.json", say(eos_token=["wet"]), "is not as it should be: "),
    ],
)
def test_a_folder_that_will_not_do_is_refused(
    place, sentence, tmp_path, name, damage, reason
):
    shutil.copytree(place / "model", tmp_path / "model")
    damage(tmp_path / "model" / name)
    write_rows(tmp_path / "text.jsonl", TEXT)
    said = sentence(tmp_path / "model", tmp_path / "text.jsonl", "--out", "new")
    assert reason in said


def test_too_little_memory_is_refused(sentence, place, tmp_path):
    write_rows(tmp_path / "long.jsonl", [{"tokens": [1] * 250, "answer": [2]}])
    words = ["model", tmp_path / "long.jsonl", "--out", "new", "--devices", 1]
    said = sentence(*words, "--batch", 2**20)
    # Eight heads' scores of 256 tokens each with each, twice, and all of it twice.
    assert "too little memory: a device needs " in said
    assert "(weights 0.00, state 0.00, gathered 0.00, inputs of layers 128.00, " in said


def test_what_decides_the_numbers_is_a_setting(place, monkeypatch):
    monkeypatch.chdir(place)

    def settings(
        *words: object, model: str = "model", data: str = "data.jsonl", dtype=np.float32
    ) -> str:
        said = ["fine_tune.py", model, data, "--steps", 9, "--out", "new", *words]
        monkeypatch.setattr(sys, "argv", [*map(str, said)])
        options = fine_tune.read_options()
        job = fine_tune.read_job(options)
        return json.dumps(fine_tune.settings_of(options, job, np.dtype(dtype)))

    other = CELL["random_tensors"](CONFIG, seed=1)
    CELL["write_checkpoint"](place / "other", CONFIG, other)
    write_rows(place / "fewer.jsonl", some_rows(0, 29))
    changes = [["--rank", 8], ["--alpha", 8], ["--rate", 0.5], ["--clip", 2]]
    changes += [["--steps", 25], ["--batch", 16], ["--seed", 1], ["--full"]]
    different = [settings(), *[settings(*change) for change in changes]]
    different += [settings(model="other"), settings(data="fewer.jsonl")]
    different += [settings(dtype=jnp.bfloat16)]
    assert len({*different}) == len(different) == 12
    same = ["--save-every", 3, "--log-every", 2, "--eval", "data.jsonl", "--length", 99]
    assert settings(*same) == settings()
