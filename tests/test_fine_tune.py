"""Test that launch/fine_tune.py trains as a plain loop does and survives stops.

test_rejected_inputs.py tests the inputs that it rejects, and test_train_faults.py
faults of checkpoints.
"""

import json
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import adapters
import decoder
import fine_tune
import generate
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
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
SHORT += ["--save-every", SAVE, "--log-every", LOG, "--seed", SEED]
LORA = ["--rank", 4, "--alpha", 8, "--rate", 1e-2]
T = 32  # no row has more tokens


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


def read_adapters(place: Path, name: str) -> list:
    c = decoder.read_config(place / "model")
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    params, lora = adapters.load_adapters(place / name, c, mesh)
    assert lora == adapters.LoraConfig(4, 8.0)
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


def plain_run(place: Path, full: bool, rate: float) -> tuple[dict, object]:
    """Return the losses that the program should print, and the trained parameters.

    The loop has one device, one length, full logits, and a schedule in NumPy."""
    weights, c = plain_weights(place / "model")
    model = generate.read_model(place / "model")
    paths = place / "data.jsonl", place / "eval.jsonl"
    train, evaluation = (fine_tune.read_rows(path, model, [], T) for path in paths)
    epochs = [np.random.default_rng([SEED, n]).permutation(30) for n in range(9)]
    order = np.concatenate(epochs)
    warmup = np.arange(2) / 2
    cosine = (1 + np.cos(np.pi * np.arange(STEPS - 2) / (STEPS - 2))) / 2
    rates = jnp.array(rate * np.concatenate([warmup, cosine]))
    adam = optax.adam(lambda count: rates[count])

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
        updates, opt_state = adam.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, loss

    params = weights
    if not full:
        mesh = decoder.model_mesh(c, jax.devices()[:1])
        key, lora = jax.random.key(SEED), adapters.LoraConfig(4, 8.0)
        params = adapters.init_adapters(key, c, lora, mesh)
    opt_state, score = adam.init(params), jax.jit(mean_loss)
    evaluation = fine_tune.make_batch(evaluation, 13, T)
    printed = {(0, "eval loss"): score(params, evaluation)}
    for done in range(1, STEPS + 1):
        rows = [train[row] for row in order[8 * done - 8 : 8 * done]]
        batch = fine_tune.make_batch(rows, 8, T)
        params, opt_state, loss = step(params, opt_state, batch)
        if done % LOG == 0:
            printed[done, "loss"] = loss
        if done % SAVE == 0 or done == STEPS:
            printed[done, "eval loss"] = score(params, evaluation)
    return printed, params


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
    return plain_run(place, False, 1e-2)


def test_eight_devices_match_the_plain_loop(place, full_run, expected):
    printed, params = expected
    check(full_run, printed)
    assert printed[STEPS, "eval loss"] < 0.9 * printed[0, "eval loss"]  # it learns
    close(read_adapters(place, "full_run"), params, rtol=1e-2, atol=1e-4)


def test_all_weights_can_be_trained(place):
    """The saved folder can be loaded and has the model's dtype."""
    args = [*SHORT, "--full", "--rate", 1e-3, "--out", "full"]
    (place / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    output = finish(start_in(place, "fine_tune.py", *args, "--emulate", 8))
    printed, params = plain_run(place, True, 1e-3)
    check(output, printed)
    found, c = plain_weights(place / "full")
    assert c == decoder.read_config(place / "model")
    close(found, params, rtol=2**-7, atol=1e-3)
    files = decoder.open_model(place / "full")
    assert {x.dtype.name for x in files.values()} == {"bfloat16"}
    saved = {path.name for path in (place / "full").iterdir()}
    assert saved >= {"tokenizer.json", "generation_config.json", "config.json"}
    (place / "model" / "generation_config.json").unlink()


# ------------------------------------------------------------------------------- stops


def test_two_processes_stop_and_one_device_continues(place, expected):
    args = [*SHORT, *LORA, "--out", "stopped"]
    two = start_two(place, "fine_tune.py", args, args, code=SLOW_STEPS)
    output = read_until(two[0], f"step {SAVE:5}  eval loss")
    two[1].send_signal(signal.SIGTERM)
    assert statuses(two) == [75, 75], two[0].errors + two[1].errors
    start = int(re.search(r"^stopped: .* step (\d+)$", two[0].output, re.M)[1])
    assert SAVE < start < STEPS
    check(output + two[0].output, expected[0], stop=start)
    assert "step" not in two[1].output
    assert not (place / "stopped").exists()
    output = finish(start_in(place, "fine_tune.py", *args, "--emulate", 1))
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


# -------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("name", "change", "stop"),
    [
        ("config.json", {"eos_token_id": 9}, [9]),
        ("config.json", {"eos_token_id": [9, 8]}, []),
        ("tokenizer_config.json", {"eos_token": "blue"}, [53]),
    ],
)
def test_text_answers_end_with_a_stop_token(place, tmp_path, name, change, stop):
    folder = shutil.copytree(place / "model", tmp_path / "model")
    old = json.loads((folder / "config.json").read_text()) if name[0] == "c" else {}
    (folder / name).write_text(json.dumps(old | change))
    model = generate.read_model(folder)
    assert fine_tune.end_of_answers(folder, model.tokenizer) == stop
    row = fine_tune.read_row({"prompt": "the sea", "answer": "is"}, model, stop, 9)
    assert row == ([1, 15, 7, 9, *stop], 3)
    row = fine_tune.read_row({"tokens": [4], "answer": [5, 6]}, model, stop, 9)
    assert row == ([4, 5, 6], 1)


def test_batch_has_answers_as_targets_and_one_of_few_lengths():
    rows = [fine_tune.Row([4, 5, 6], 1), fine_tune.Row([7, 8, 9, 10], 3)]
    batch = fine_tune.make_batch(rows, 3, longest=40)
    assert batch.tokens.shape == batch.targets.shape == (3, 16)
    targets = np.full((3, 16), -1)
    targets[0, :2], targets[1, 2] = [5, 6], 10
    np.testing.assert_array_equal(batch.targets, targets)
    np.testing.assert_array_equal(batch.tokens[1, :5], [7, 8, 9, 10, 0])


def test_settings_have_everything_that_affects_the_losses(place, monkeypatch):
    monkeypatch.chdir(place)
    write_model(place / "other", seed=1)
    write_rows(place / "fewer.jsonl", some_rows(0, 29))

    def settings(*args: object, dtype=np.float32) -> str:
        options = options_of(fine_tune, "--steps", 9, "--out", "new", *args)
        job = fine_tune.read_job(options)
        return json.dumps(fine_tune.settings_of(options, job, np.dtype(dtype)))

    usual = SHORT[:2]
    changes = ["--rank 8", "--alpha 8", "--rate 0.5", "--clip 2", "--steps 25"]
    changes += ["--batch 16", "--seed 1", "--full"]
    cases = [usual, ["other", "data.jsonl"], ["model", "fewer.jsonl"]]
    cases += [[*usual, *change.split()] for change in changes]
    found = [settings(*usual, dtype=jnp.bfloat16), *[settings(*one) for one in cases]]
    assert len({*found}) == len(found) == 12
    same = ["--save-every", 3, "--log-every", 2, "--eval", "data.jsonl", "--length", 99]
    assert settings(*usual, *same) == settings(*usual)


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
