"""Test that launch/fine_tune.py trains as a plain loop does and survives stops.

test_rejected_inputs.py tests the inputs that it rejects, and test_train_faults.py
faults of checkpoints.
"""

import itertools
import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace

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
from jax.sharding import Mesh
from runs import (
    SLOW_STEPS,
    TOLERANCE,
    fill,
    linux_root,
    options_of,
    read_until,
    small_disk,
    statuses,
)
from toy_model import (
    answers,
    model_in,
    plain_answers,
    plain_weights,
    prepared,
    start_in,
    start_two,
    write_gemma,
    write_model,
    write_rows,
)

STEPS, SAVE, LOG, SEED = 24, 10, 8, 7
SHORT = ["model", "data.jsonl", "--eval", "eval.jsonl", "--steps", STEPS]
SHORT += ["--save-every", SAVE, "--eval-every", SAVE, "--log-every", LOG]
SHORT += ["--seed", SEED]
LORA = ["--rank", 4, "--alpha", 8, "--learning-rate", 1e-2]
T = 32  # no example has more tokens


def some_rows(seed: int, count: int) -> list[dict]:
    """Return rows of consecutive tokens, longest first."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        start, size, more = rng.integers([2, 2, 1], [280, 12, 21])
        tokens = [int(start + i) for i in range(size + more)]
        rows.append({"tokens": tokens[:size], "answer": tokens[size:]})
    return sorted(rows, key=lambda row: -len(row["tokens"] + row["answer"]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a model and rows to train on."""
    with model_in(tmp_path_factory.mktemp("fine_tune")) as place:
        write_rows(place / "data.jsonl", some_rows(0, 30))
        write_rows(place / "eval.jsonl", some_rows(1, 13))
        yield place


def read_adapters(place: Path, name: str, modules=adapters.TARGETS) -> list:
    c = decoder.read_config(place / "model")
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    params, lora = adapters.load_adapters(place / name, c, mesh)
    assert lora == adapters.LoraConfig(4, 8.0, modules)
    return params


def same_bytes(one: Path, other: Path) -> None:
    """Check that the files of two folders are equal."""
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def close(found: object, expected: object, **tolerance: float) -> None:
    """Check that two trees of arrays are close."""
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), found, expected)


# ------------------------------------------------------------------- the plain loop


def merged(weights: dict, params: list, scale: float) -> dict:
    """Return plain weights with adapters merged into them."""
    layers = []
    for w, pairs in zip(weights["layers"], params, strict=True):
        new = {name: w[name] + scale * pair.b @ pair.a for name, pair in pairs.items()}
        layers.append(w | new)
    return weights | {"layers": layers}


def plain_run(
    place: Path,
    rate: float,
    full: bool = False,
    modules: tuple = adapters.TARGETS,
    warmup: int = 2,
    decay: float = 0.0,
    int8: bool = False,
) -> tuple[dict, object]:
    """Return the losses that the program should print, and the parameters with the
    lowest evaluation loss.

    The loop has one device, one length, full logits, and a schedule in NumPy."""
    weights, c = plain_weights(place / "model")
    if int8:
        for w, name in itertools.product(weights["layers"], adapters.TARGETS):
            scale = jnp.abs(w[name]).max(axis=1, keepdims=True) / 127
            w[name] = jnp.round(w[name] / scale) * scale
    model = generate.read_model(place / "model")
    options = options_of(fine_tune, *SHORT, "--out", "new")
    paths = place / "data.jsonl", place / "eval.jsonl"
    read = partial(fine_tune.read_examples, model=model, stop=[], options=options)
    train, evaluation = map(read, paths)
    epochs = [np.random.default_rng([SEED, n]).permutation(30) for n in range(9)]
    order = np.concatenate(epochs)
    steps = STEPS - warmup
    cosine = (1 + np.cos(np.pi * np.arange(steps) / steps)) / 2
    rates = rate * np.concatenate([np.arange(warmup) / max(warmup, 1), cosine])
    rates = jnp.array(rates)

    def mask(params):  # norms do not decay
        return jax.tree.map(lambda x: x.ndim == 2, params)

    adam = optax.adamw(lambda count: rates[count], weight_decay=decay, mask=mask)

    def mean_loss(params, batch):
        w = params if full else merged(weights, params, 2.0)
        positions = jnp.broadcast_to(jnp.arange(T), batch.tokens.shape)
        x, _ = decoder.hidden_states(w, batch.tokens, positions, c)
        logprobs = jax.nn.log_softmax(decoder.compute_logits(w, x, c))
        mask = batch.targets >= 0
        picked = jnp.take_along_axis(logprobs, batch.targets[..., None], axis=2)
        return -(picked[..., 0] * mask).sum() / mask.sum()

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(mean_loss)(params, batch)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
        updates, opt_state = adam.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    params = weights
    if not full:
        mesh = decoder.model_mesh(c, jax.devices()[:1])
        key, lora = jax.random.key(SEED), adapters.LoraConfig(4, 8.0, modules)
        params = adapters.init_adapters(key, c, lora, mesh)
    opt_state, score = adam.init(params), jax.jit(mean_loss)
    evaluation = fine_tune.make_batch(evaluation, 13, T)
    printed = {(0, "eval loss"): score(params, evaluation)}
    lowest = np.inf
    for done in range(1, STEPS + 1):
        examples = [train[i] for i in order[8 * done - 8 : 8 * done]]
        batch = fine_tune.make_batch(examples, 8, T)
        params, opt_state, loss = step(params, opt_state, batch)
        if done % LOG == 0:
            printed[done, "loss"] = loss
        if done % SAVE == 0 or done == STEPS:
            printed[done, "eval loss"] = loss = score(params, evaluation)
            if loss < lowest:
                lowest, best = loss, params
    return printed, best


def check(output: str, expected: dict, start: int = -1, stop: int = STEPS) -> None:
    """Compare the losses that a run prints with `expected`, after step `start`, from
    which it was restored, and up to step `stop`."""
    lines = re.findall(r"^step +(\d+)  (loss|eval loss) (\S+)", output, re.M)
    found = {(int(step), what): float(number) for step, what, number in lines}
    found.pop((start, "eval loss"), None)
    expected = {key: expected[key] for key in expected if start < key[0] <= stop}
    assert found.keys() == expected.keys(), output
    close(found, expected, **TOLERANCE)


# ----------------------------------------------------------------------------- numbers


def finish(*processes) -> str:
    """Wait for processes, check that they succeed, and return the first output."""
    assert {*statuses([*processes])} == {0}, [run.errors for run in processes]
    return processes[0].output


@pytest.fixture(scope="module")
def full_run(place):
    """Return the output of a run on eight devices into the folder `full_run`."""
    args = [*SHORT, *LORA, "--out", "full_run", "--emulate", 8]
    run = start_in(place, "fine_tune.py", *args)
    output = finish(run)
    assert run.errors == ""
    return output


@pytest.fixture(scope="module")
def expected(place):
    return plain_run(place, 1e-2)


def test_eight_devices_match_the_plain_loop(place, full_run, expected):
    printed, params = expected
    check(full_run, printed)
    assert printed[STEPS, "eval loss"] < 0.9 * printed[0, "eval loss"]  # it learns
    progress = r"^step +16  loss \S+  [\d,]+ tokens/s  \d:\d\d:\d\d left$"
    assert re.search(progress, full_run, re.M)
    close(read_adapters(place, "full_run"), params, rtol=1e-2, atol=1e-4)


def test_all_weights_can_be_trained(place):
    """The saved folder can be loaded and has the model's dtype."""
    args = [*SHORT, "--full", "--learning-rate", 1e-3, "--weight-decay", 10]
    args += ["--out", "full"]
    (place / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    output = finish(start_in(place, "fine_tune.py", *args, "--emulate", 8))
    printed, params = plain_run(place, 1e-3, full=True, decay=10)
    check(output, printed)
    found, c = plain_weights(place / "full")
    assert c == decoder.read_config(place / "model")
    close(found, params, rtol=2**-7, atol=1e-3)
    files = decoder.open_model(place / "full")
    assert {x.dtype.name for x in files.values()} == {"bfloat16"}
    saved = {path.name for path in (place / "full").iterdir()}
    assert saved >= {"tokenizer.json", "generation_config.json", "config.json"}
    (place / "model" / "generation_config.json").unlink()


def test_training_options_match_the_plain_loop(place):
    modules = "q_proj", "down_proj"
    args = [*SHORT, *LORA, "--int8", "--weight-decay", 10, "--warmup", 9]
    args += ["--target-modules", *modules[::-1], "--out", "options", "--emulate", 2]
    output = finish(start_in(place, "fine_tune.py", *args))
    kinds = {"modules": modules, "warmup": 9, "decay": 10.0, "int8": True}
    printed, params = plain_run(place, 1e-2, **kinds)
    check(output, printed)
    found = read_adapters(place, "options", modules)
    close(found, params, rtol=1e-2, atol=1e-4)


def test_parameters_with_the_lowest_evaluation_loss_are_exported(place):
    """The held-out answers have none of the trained tokens: their loss rises."""
    write_rows(place / "same.jsonl", 8 * [{"tokens": [2], "answer": 30 * [9]}])
    rng = np.random.default_rng(5)
    rows = [{"tokens": [2], "answer": rng.integers(10, 321, 30).tolist()} for _ in "ab"]
    write_rows(place / "random.jsonl", rows)
    args = ["model", "same.jsonl", "--eval", "random.jsonl", *LORA, "--emulate", 1]
    args += ["--steps", 12, "--eval-every", 3, "--out", "best"]
    output = finish(start_in(place, "fine_tune.py", *args))
    losses = [float(loss) for loss in re.findall(r"  eval loss (\S+)$", output, re.M)]
    assert len(losses) == 5 and min(losses[1:]) < losses[-1]
    weights, c = plain_weights(place / "model")
    weights = merged(weights, read_adapters(place, "best"), 2.0)
    tokens = np.array([[2, *row["answer"]] for row in rows])
    positions = jnp.broadcast_to(jnp.arange(31), tokens.shape)
    x, _ = decoder.hidden_states(weights, tokens, positions, c)
    logprobs = jax.nn.log_softmax(decoder.compute_logits(weights, x, c))[:, :-1]
    loss = -np.take_along_axis(logprobs, tokens[:, 1:, None], axis=2).mean()
    close(loss, min(losses[1:]), **TOLERANCE)


# ------------------------------------------------------------------------------- stops


def test_two_processes_stop_and_one_device_continues(place, expected):
    """It continues with micro-batches, whose counts of trained tokens differ."""
    args = [*SHORT, *LORA, "--out", "stopped"]
    two = start_two(place, "fine_tune.py", args, args, code=SLOW_STEPS)
    output = read_until(two[0], f"step {SAVE:5}  eval loss")
    two[1].send_signal(signal.SIGTERM)
    assert statuses(two) == [75, 75], two[0].errors + two[1].errors
    start = int(re.search(r"^stopped at step (\d+): ", two[0].output, re.M)[1])
    assert SAVE < start < STEPS
    check(output + two[0].output, expected[0], stop=start)
    assert "step" not in two[1].output
    assert not (place / "stopped").exists()
    args += ["--emulate", 1, "--accumulate", 4]
    output = finish(start_in(place, "fine_tune.py", *args))
    check(output, expected[0], start)
    assert f"step {start:5}  restored" in output
    close(read_adapters(place, "stopped"), expected[1], rtol=1e-2, atol=1e-4)


def copied(place: Path, folder: Path) -> list[object]:
    """Copy the checkpoints of `full_run`; return arguments of a run that continues."""
    shutil.copytree(place / "full_run.checkpoints", folder)
    return [*SHORT, *LORA, "--folder", folder]


@linux_root
def test_run_continues_after_a_full_disk_at_its_end(place, tmp_path, full_run):
    args = copied(place, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / str(STEPS))  # as if killed before its save ended
    with small_disk(tmp_path / "disk", "1m") as disk:
        args += ["--out", disk / "out", "--emulate", 8]
        ballast = fill(disk, leave=20_000)  # enough for the small file
        run = start_in(place, "fine_tune.py", *args)
        assert statuses([run]) == [78]
        assert f"step {2 * SAVE:5}  restored" in run.output
        assert run.output.splitlines()[-2:] == full_run.splitlines()[-3:-1]
        assert str(disk / "out") in run.errors
        assert "No space left on device" in run.errors
        assert [*disk.iterdir()] == [ballast]
        ballast.unlink()
        finish(start_in(place, "fine_tune.py", *args))
        same_bytes(place / "full_run", disk / "out")


def test_two_processes_write_what_one_writes(place, tmp_path, full_run):
    args = [*copied(place, tmp_path / "run"), "--out", tmp_path / "out"]
    finish(*start_two(place, "fine_tune.py", args, args))
    same_bytes(place / "full_run", tmp_path / "out")


# ------------------------------------------------------------------------ the adapters


def test_generate_with_adapters_equals_merged_weights(place, full_run):
    engine, requests, _ = prepared(place, "--adapters", place / "full_run")
    found = answers(engine, requests)
    weights, c = plain_weights(place / "model")
    adapted = merged(weights, read_adapters(place, "full_run"), 2.0)
    assert found == plain_answers(adapted, c, requests)
    assert found != plain_answers(weights, c, requests)


def test_merged_model_equals_merged_weights(place, full_run):
    args = ["model", "--merge", "full_run", "--out", "merged", "--emulate", 2]
    finish(start_in(place, "fine_tune.py", *args))
    weights, _ = plain_weights(place / "model")
    expected = merged(weights, read_adapters(place, "full_run"), 2.0)
    close(plain_weights(place / "merged")[0], expected, rtol=2**-8, atol=1e-6)
    assert (place / "merged" / "tokenizer.json").exists()


def test_weights_that_are_not_finite_are_named(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lifecycle, "ignore_signals", lambda: None)
    folder = shutil.copytree(place / "model", tmp_path / "model")
    files = decoder.open_model(folder)
    path = files["model.norm.weight"].filename
    weight = np.memmap(path, np.uint16, "r+", files["model.norm.weight"].offset, (1,))
    weight[:] = 0x7FC0  # NaN in bfloat16
    weight.flush()
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    with pytest.raises(SystemExit, match="^2$"):
        fine_tune.load_weights(generate.read_model(folder), mesh, np.float32)
    assert capsys.readouterr().err.startswith("error: model.norm.weight has NaN")


# ---------------------------------------------------------------------------- examples


def read(place: Path, data: dict, model=None, stop=(), *args: str) -> list:
    """Return the examples of one line of a JSONL file."""
    options = options_of(fine_tune, place / "model", "data", "--out", "new", *args)
    model = model or generate.read_model(place / "model")
    return fine_tune.read_examples_of(data, model, [*stop], options)


@pytest.mark.parametrize(
    ("name", "change", "stop"),
    [
        ("config.json", {"eos_token_id": 9}, [9]),
        ("config.json", {"eos_token_id": [9, 8]}, []),
        ("tokenizer_config.json", {"eos_token": "blue"}, [53]),
    ],
)
def test_stop_token_follows_answers_and_texts(place, tmp_path, name, change, stop):
    folder = shutil.copytree(place / "model", tmp_path / "model")
    old = json.loads((folder / "config.json").read_text()) if name[0] == "c" else {}
    (folder / name).write_text(json.dumps(old | change))
    model = generate.read_model(folder)
    assert fine_tune.read_stop_tokens(folder, model.tokenizer) == stop
    ids = [1, 15, 7, 9, *stop]
    answer = {"prompt": "the sea", "answer": " is"}
    assert read(place, answer, model, stop) == [(ids, [(3, len(ids))])]
    assert read(place, {"text": "the sea is"}, model, stop) == [(ids, [(1, len(ids))])]
    row = {"tokens": [4], "answer": [5, 6]}
    assert read(place, row, model, stop) == [([4, 5, 6], [(1, 3)])]


class Llama2Tokenizer:
    """It puts a space before a text, and has each word with the space before it."""

    words = ["", "▁", "▁the", "▁sea", "▁is"]

    def encode(self, text, add_special_tokens=True):
        pieces = re.findall("▁[a-z]+|▁", "▁" + text.replace(" ", "▁"))
        return SimpleNamespace(ids=[self.words.index(piece) for piece in pieces])


def test_prompt_and_answer_are_encoded_together(place):
    model = generate.read_model(place / "model")._replace(tokenizer=Llama2Tokenizer())
    row = {"prompt": "the sea", "answer": " is"}
    assert read(place, row, model) == [([2, 3, 4], [(2, 3)])]  # not [2, 3, 1, 4]
    with pytest.raises(ValueError, match="move the space"):
        read(place, {"prompt": "the sea ", "answer": "is"}, model)


MESSAGES = [
    ("user", "the"),
    ("assistant", "sea"),
    ("user", "is"),
    ("assistant", "blue"),
]
MESSAGES = [{"role": role, "content": content} for role, content in MESSAGES]
CHAT = (
    "{% for m in messages %}{{ 'w20 ' if m.role == 'user' else 'w21 ' }}"
    "{{ thought if m.role != 'user' and loop.last }}{{ m.content }} w22 {% endfor %}"
    "{{ 'w21 ' if add_generation_prompt }}"
)


def test_every_assistant_message_is_trained_on(place):
    """Without the thought, which is of the last message only, each conversation begins
    with the tokens of the one before; with it, --split-turns is needed."""
    path = place / "model" / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": CHAT}))
    generate.read_chat_template.cache_clear()
    row = {"messages": MESSAGES}
    ids = [20, 15, 22, 21, 7, 22, 20, 9, 22, 21, 53, 22]
    assert read(place, row) == [(ids, [(4, 6), (10, 12)])]
    thinking = CHAT.replace("thought", "'w30 '")
    path.write_text(json.dumps({"chat_template": thinking}))
    generate.read_chat_template.cache_clear()
    with pytest.raises(ValueError, match="before message 3 .* --split-turns"):
        read(place, row)
    first = [20, 15, 22, 21, 30, 7, 22], [(4, 7)]
    ids.insert(10, 30)
    assert read(place, row, None, (), "--split-turns") == [first, (ids, [(10, 13)])]
    path.write_text(json.dumps({"chat_template": CHAT.replace("{{ 'w21", "{{ 'w23")}))
    generate.read_chat_template.cache_clear()
    with pytest.raises(ValueError, match="message 1 does not begin with the template"):
        read(place, row)
    path.unlink()
    generate.read_chat_template.cache_clear()


def test_batch_has_spans_as_targets_and_one_of_few_lengths():
    examples = [([4, 5, 6], [(1, 3)]), ([7, 8, 9, 10], [(1, 2), (3, 4)])]
    examples = [fine_tune.Example(*one) for one in examples]
    batch = fine_tune.make_batch(examples, 3, longest=40)
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    targets = np.full((3, 16), -1)
    targets[0, :2], targets[1, :3] = [5, 6], [8, -1, 10]
    np.testing.assert_array_equal(batch.targets, targets)
    np.testing.assert_array_equal(batch.tokens[1, :5], [7, 8, 9, 10, 0])


def test_settings_have_everything_that_affects_the_result(place, monkeypatch):
    monkeypatch.chdir(place)
    write_model(place / "other", seed=1)
    write_rows(place / "fewer.jsonl", some_rows(0, 29))
    rows = some_rows(0, 30)  # the same tokens, with answers that begin one earlier
    for row in rows:
        row["answer"].insert(0, row["tokens"].pop())
    write_rows(place / "longer.jsonl", rows)

    def settings(*args: object, dtype=np.float32) -> str:
        options = options_of(fine_tune, "--steps", 9, "--out", "new", *args)
        job = fine_tune.read_job(options)
        return json.dumps(fine_tune.settings_of(options, job, np.dtype(dtype)))

    usual = SHORT[:2]
    changes = ["--rank 8", "--alpha 8", "--learning-rate 0.5", "--max-grad-norm 2"]
    changes += ["--steps 8", "--batch 16", "--seed 1", "--full", "--warmup 5"]
    changes += ["--weight-decay 1", "--target-modules q_proj", "--int8"]
    changes += ["--eval data.jsonl", "--eval data.jsonl --eval-every 9"]
    cases = [usual, ["other", "data.jsonl"], ["model", "fewer.jsonl"]]
    cases += [["model", "longer.jsonl"], [*usual, "--eval", "longer.jsonl"]]
    cases += [[*usual, *change.split()] for change in changes]
    found = [settings(*usual, dtype=jnp.bfloat16), *[settings(*one) for one in cases]]
    assert len({*found}) == len(found) == 20
    same = ["--save-every", 3, "--log-every", 2, "--eval-every", 5, "--accumulate", 2]
    assert settings(*usual, *same, "--max-length", 99) == settings(*usual)


def test_losses_of_gemma3(tmp_path):
    """They are those of the decoder's forward pass, which scales embeddings, has two
    bases of RoPE, and layers that attend to 10 of 24 positions."""
    write_gemma(tmp_path / "model")
    weights, config = plain_weights(tmp_path / "model")
    tokens = np.random.default_rng(9).integers(2, 321, (2, 25), np.int32)
    batch = fine_tune.Batch(tokens[:, :-1], tokens[:, 1:])
    total, count = fine_tune.sum_losses(weights, batch, config, lambda tree: tree)
    positions = np.broadcast_to(np.arange(24), (2, 24))
    x, _ = decoder.hidden_states(weights, batch.tokens, positions, config)
    logits = decoder.compute_logits(weights, x, config)
    labels = jax.nn.one_hot(batch.targets, 321)
    expected = optax.softmax_cross_entropy(logits, labels).sum()
    np.testing.assert_allclose(total, expected, rtol=1e-6)
    assert count == 48
