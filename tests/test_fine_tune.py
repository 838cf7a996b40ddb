"""launch/fine_tune.py: its numbers are those of a plain loop on any number of devices,
and what stops it loses nothing.

What it rejects is in test_rejected_inputs.py, faults of checkpoints are in
test_train_faults.py.
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
    SLOWLY,
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
    write_model,
    write_rows,
)

STEPS, SAVE, LOG, SEED = 24, 10, 8, 7
SHORT = ["model", "data.jsonl", "--eval", "held.jsonl", "--steps", STEPS]
SHORT += ["--save-every", SAVE, "--log-every", LOG, "--seed", SEED]
LORA = ["--rank", 4, "--alpha", 8, "--rate", 1e-2]
T = 32  # at least the tokens of any row


def some_rows(seed: int, count: int) -> list[dict]:
    """Return rows of consecutive tokens, from the longest to the shortest."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(count):
        start, size, more = rng.integers([2, 2, 1], [280, 12, 21])
        tokens = [int(start + i) for i in range(size + more)]
        rows.append({"tokens": tokens[:size], "answer": tokens[size:]})
    return sorted(rows, key=lambda row: -len(row["tokens"] + row["answer"]))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model and its rows."""
    with model_in(tmp_path_factory.mktemp("fine_tune")) as place:
        write_rows(place / "data.jsonl", some_rows(0, 30))
        write_rows(place / "held.jsonl", some_rows(1, 13))
        yield place


def read_adapters(place: Path, name: str) -> list:
    c = decoder.read_config(place / "model")
    mesh = decoder.model_mesh(c, jax.devices()[:1])
    params, lora = adapters.load_adapters(place / name, c, mesh)
    assert lora == adapters.Lora(4, 8.0)
    return params


def same_bits(one: Path, other: Path) -> None:
    """Compare the files of two folders."""
    for path in one.iterdir():
        assert path.read_bytes() == (other / path.name).read_bytes(), path.name


def close(found: object, due: object, **tolerance: float) -> None:
    """Compare two trees of arrays."""
    jax.tree.map(partial(np.testing.assert_allclose, **tolerance), found, due)


# ------------------------------------------------------------------- the plain loop


def added(weights: dict, params: list, scale: float) -> dict:
    """Add adapters to plain weights."""
    layers = []
    for w, pairs in zip(weights["layers"], params, strict=True):
        new = {name: w[name] + scale * pair.b @ pair.a for name, pair in pairs.items()}
        layers.append(w | new)
    return weights | {"layers": layers}


def plain_run(place: Path, full: bool, rate: float) -> tuple[dict, object]:
    """Return what the program should print and what it should train.

    The loop has one device, one length, full logits, and a schedule in NumPy."""
    weights, c = plain_weights(place / "model")
    model = generate.read_model(place / "model")
    paths = place / "data.jsonl", place / "held.jsonl"
    train, held = (fine_tune.read_rows(path, model, [], T) for path in paths)
    epochs = [np.random.default_rng([SEED, n]).permutation(30) for n in range(9)]
    order = np.concatenate(epochs)
    warm = np.arange(2) / 2
    cool = (1 + np.cos(np.pi * np.arange(STEPS - 2) / (STEPS - 2))) / 2
    rates = jnp.array(rate * np.concatenate([warm, cool]))
    adam = optax.adam(lambda count: rates[count])

    def mean_loss(params, batch):
        w = params if full else added(weights, params, 2.0)
        places = jnp.broadcast_to(jnp.arange(T), batch.tokens.shape)
        x, _ = decoder.hidden(w, batch.tokens, places, c)
        logs = jax.nn.log_softmax(decoder.logits(w, x, c))
        known = batch.targets >= 0
        found = jnp.take_along_axis(logs, batch.targets[..., None], axis=2)
        return -(found[..., 0] * known).sum() / known.sum()

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
        key, lora = jax.random.key(SEED), adapters.Lora(4, 8.0)
        params = adapters.new_adapters(key, c, lora, mesh)
    opt_state, score = adam.init(params), jax.jit(mean_loss)
    held = fine_tune.make_batch(held, 13, T)
    printed = {(0, "eval loss"): score(params, held)}
    for done in range(1, STEPS + 1):
        rows = [train[row] for row in order[8 * done - 8 : 8 * done]]
        batch = fine_tune.make_batch(rows, 8, T)
        params, opt_state, loss = step(params, opt_state, batch)
        if done % LOG == 0:
            printed[done, "loss"] = loss
        if done % SAVE == 0 or done == STEPS:
            printed[done, "eval loss"] = score(params, held)
    return printed, params


def check(output: str, expected: dict, start: int = -1, stop: int = STEPS) -> None:
    """Compare what a run prints of the steps after start, from which it was restored,
    up to stop."""
    lines = re.findall(r"^step +(\d+)  (loss|eval loss) (\S+)", output, re.M)
    found = {(int(step), what): float(number) for step, what, number in lines}
    found.pop((start, "eval loss"), None)
    due = {line: expected[line] for line in expected if start < line[0] <= stop}
    assert found.keys() == due.keys(), output
    close(found, due, **TOLERANCE)


# ----------------------------------------------------------------------------- numbers


def finish(*processes) -> str:
    """Wait for processes that end well, and return what the first prints."""
    assert {*statuses([*processes])} == {0}, [run.errors for run in processes]
    return processes[0].output


@pytest.fixture(scope="module")
def whole(place):
    """The output of a run on eight devices into the folder `whole`."""
    words = [*SHORT, *LORA, "--out", "whole", "--emulate", 8]
    run = start_in(place, "fine_tune.py", *words)
    output = finish(run)
    assert run.errors == ""
    return output


@pytest.fixture(scope="module")
def expected(place):
    return plain_run(place, False, 1e-2)


def test_eight_devices_give_the_numbers_of_a_plain_loop(place, whole, expected):
    printed, params = expected
    check(whole, printed)
    assert printed[STEPS, "eval loss"] < 0.9 * printed[0, "eval loss"]  # it learns
    close(read_adapters(place, "whole"), params, rtol=1e-2, atol=1e-4)


def test_all_weights_can_be_trained(place):
    """Into a folder that loads, in the type of the model."""
    words = [*SHORT, "--full", "--rate", 1e-3, "--out", "full"]
    (place / "model" / "generation_config.json").write_text('{"eos_token_id": 3}')
    output = finish(start_in(place, "fine_tune.py", *words, "--emulate", 8))
    printed, params = plain_run(place, True, 1e-3)
    check(output, printed)
    found, c = plain_weights(place / "full")
    assert c == decoder.read_config(place / "model")
    close(found, params, rtol=2**-7, atol=1e-3)
    files = decoder.open_folder(place / "full")
    assert {x.dtype.name for x in files.values()} == {"bfloat16"}
    kept = {path.name for path in (place / "full").iterdir()}
    assert kept >= {"tokenizer.json", "generation_config.json", "config.json"}
    (place / "model" / "generation_config.json").unlink()


# ------------------------------------------------------------------------------- stops


def test_two_processes_stop_and_one_device_goes_on(place, expected):
    words = [*SHORT, *LORA, "--out", "stopped"]
    two = start_two(place, "fine_tune.py", words, words, code=SLOWLY)
    output = read_until(two[0], f"step {SAVE:5}  eval loss")
    two[1].send_signal(signal.SIGTERM)
    assert statuses(two) == [75, 75], two[0].errors + two[1].errors
    start = int(re.search(r"^stopped: .* step (\d+)$", two[0].output, re.M)[1])
    assert SAVE < start < STEPS
    check(output + two[0].output, expected[0], stop=start)
    assert "step" not in two[1].output
    assert not (place / "stopped").exists()
    output = finish(start_in(place, "fine_tune.py", *words, "--emulate", 1))
    check(output, expected[0], start)
    assert f"step {start:5}  restored" in output
    close(read_adapters(place, "stopped"), expected[1], rtol=1e-2, atol=1e-4)


def copied(place: Path, folder: Path) -> list[object]:
    """Copy the checkpoints of `whole`; return the words of a run that goes on."""
    shutil.copytree(place / "whole.checkpoints", folder)
    return [*SHORT, *LORA, "--folder", folder]


@linux_root
def test_a_full_disk_at_the_end_and_the_same_bits_after_it(place, tmp_path, whole):
    words = copied(place, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / str(STEPS))  # as if killed before its save ended
    with small_disk(tmp_path / "disk", "1m") as disk:
        words += ["--out", disk / "out", "--emulate", 8]
        ballast = fill(disk, leave=20_000)  # enough for the small file
        run = start_in(place, "fine_tune.py", *words)
        assert statuses([run]) == [78]
        assert f"step {2 * SAVE:5}  restored" in run.output
        assert run.output.splitlines()[-2:] == whole.splitlines()[-3:-1]
        assert str(disk / "out") in run.errors
        assert "No space left on device" in run.errors
        assert [*disk.iterdir()] == [ballast]
        ballast.unlink()
        finish(start_in(place, "fine_tune.py", *words))
        same_bits(place / "whole", disk / "out")


@linux_root
def test_no_room_for_a_small_file_leaves_nothing(tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk:
        ballast = fill(disk, leave=0)
        with pytest.raises(OSError, match="No space left on device"):
            decoder.save_folder(disk / "out", {"config.json": "{}"}, {})
        assert [*disk.iterdir()] == [ballast]


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


def test_what_one_process_cannot_write_ends_both(place, tmp_path, whole):
    words = [*copied(place, tmp_path / "run"), "--out", tmp_path / "out"]
    two = start_two(place, "fine_tune.py", words, words, code=ONE_CANNOT)
    assert statuses(two) == [78, 78], two[0].errors + two[1].errors
    assert "Input/output error (in process 1)" in two[0].errors
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    finish(*start_two(place, "fine_tune.py", words, words))
    same_bits(place / "whole", tmp_path / "out")


def test_a_loss_that_is_nan_ends_it(
    place, tmp_path, monkeypatch, capsys, keep_lifecycle
):
    load = decoder.load
    spoil = partial(jax.tree.map, lambda x: x * np.nan)
    monkeypatch.setattr(decoder, "load", lambda *words: spoil(load(*words)))
    words = [place / "model", place / "data.jsonl", "--out", tmp_path / "out"]
    with pytest.raises(SystemExit, match="^78$"):
        fine_tune.main(options_of(fine_tune, *words, "--devices", 1))
    assert "the loss of step 1 is nan" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------ the adapters


def test_generate_answers_as_with_merged_weights(place, whole):
    engine, requests, _ = prepared(place, "--adapters", place / "whole")
    found = answers(engine, requests)
    weights, c = plain_weights(place / "model")
    merged = added(weights, read_adapters(place, "whole"), 2.0)
    assert found == plain_answers(merged, c, requests)
    assert found != plain_answers(weights, c, requests)


# -------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("name", "change", "due"),
    [
        ("config.json", {}, []),
        ("config.json", {"eos_token_id": 9}, [9]),
        ("config.json", {"eos_token_id": [9, 8]}, []),
        ("tokenizer_config.json", {"eos_token": "blue"}, [53]),
        ("tokenizer_config.json", {"eos_token": {"content": "blue"}}, [53]),
    ],
)
def test_an_answer_that_is_a_text_gets_a_stop_token(place, tmp_path, name, change, due):
    folder = shutil.copytree(place / "model", tmp_path / "model")
    old = json.loads((folder / "config.json").read_text()) if name[0] == "c" else {}
    (folder / name).write_text(json.dumps(old | change))
    model = generate.read_model(folder)
    assert fine_tune.end_of_answers(folder, model.tokenizer) == due
    row = fine_tune.read_row({"prompt": "the sea", "answer": "is"}, model, due, 9)
    assert row == ([1, 15, 7, 9, *due], 3)
    row = fine_tune.read_row({"tokens": [4], "answer": [5, 6]}, model, due, 9)
    assert row == ([4, 5, 6], 1)


def test_a_batch_has_answers_as_targets_and_one_of_few_lengths():
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
    held = [len(row["tokens"] + row["answer"]) for row in some_rows(1, 13)]
    assert 32 >= held[0] > 16 >= held[8]  # the runs above score batches of two lengths


def test_what_affects_the_numbers_is_a_setting(place, monkeypatch):
    monkeypatch.chdir(place)
    write_model(place / "other", seed=1)
    write_rows(place / "fewer.jsonl", some_rows(0, 29))

    def settings(*words: object, dtype=np.float32) -> str:
        options = options_of(fine_tune, "--steps", 9, "--out", "new", *words)
        job = fine_tune.read_job(options)
        return json.dumps(fine_tune.settings_of(options, job, np.dtype(dtype)))

    usual = SHORT[:2]
    changes = ["--rank 8", "--alpha 8", "--rate 0.5", "--clip 2", "--steps 25"]
    changes += ["--batch 16", "--seed 1", "--full"]
    words = [usual, ["other", "data.jsonl"], ["model", "fewer.jsonl"]]
    words += [[*usual, *change.split()] for change in changes]
    found = [settings(*usual, dtype=jnp.bfloat16), *[settings(*one) for one in words]]
    assert len({*found}) == len(found) == 12
    same = ["--save-every", 3, "--log-every", 2, "--eval", "data.jsonl", "--length", 99]
    assert settings(*usual, *same) == settings(*usual)
