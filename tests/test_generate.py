"""Test that launch/generate.py answers as a plain loop does, on 1 and on 8 devices.

test_rejected_inputs.py tests the inputs that it rejects.
"""

import json
import os
import signal

import generate
import jax
import numpy as np
import pytest
from runs import statuses
from toy_model import (
    LENGTH,
    WORDS,
    answers,
    model_in,
    plain_answers,
    plain_weights,
    prepared,
    start_in,
    start_two,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    with model_in(tmp_path_factory.mktemp("generate")) as place:
        yield place


@pytest.fixture(scope="module")
def served(place):
    """Prepare three slots for nine requests."""
    return prepared(place, "--slots", 3)


@pytest.fixture(scope="module")
def plain(place, served):
    return plain_answers(*plain_weights(place / "model"), served[1])


def test_answers_equal_those_of_the_plain_loop(served, plain):
    engine, requests, _ = served
    assert engine.shape[:4] == (3, LENGTH, 4, 16)
    assert answers(engine, requests) == plain
    assert len(plain[8]) == LENGTH - 92 and requests[8].finish == "length"
    assert plain[3] == plain[5] != plain[6]  # seeds 5, 5 and 6


def test_steps_neither_compile_nor_copy_the_cache(place):
    engine, requests, stops = prepared(place, "--slots", 2, "--dtype", "bfloat16")
    compiled = []

    def note(event, seconds, **_):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    jax.jit(lambda x: x + 1)(np.arange(3))
    assert compiled  # the listener works
    compiled.clear()
    before = jax.tree.leaves(engine.caches)
    answers(engine, requests, stops)
    assert not compiled
    assert all(cache.is_deleted() for cache in before)
    size = sum(cache.nbytes for cache in jax.tree.leaves(engine.caches))
    for program in (engine.prefill, engine.decode):
        assert program.memory_analysis().alias_size_in_bytes >= size
    assert {x.dtype.name for x in jax.tree.leaves(engine.weights)} == {"bfloat16"}


def test_answers_end_at_stop_tokens(place, served, plain):
    engine, requests, stops = served
    assert stops == set()  # config.json has null
    stop = plain[0][6]
    found = answers(engine, requests, {stop})
    for request in requests:
        full = plain[request.name]
        size = full.index(stop) + 1 if stop in full else len(full)
        assert found[request.name] == full[:size]
        assert request.finish == ("stop" if stop in full else "length")
    assert len(found[0]) <= 7

    model = place / "stops"
    model.mkdir()
    for eos, more, expected in [
        (3, None, {3}),
        ([3, 4], None, {3, 4}),
        (3, {"eos_token_id": [5, 6]}, {5, 6}),
        (3, {"temperature": 1.0}, {3}),
    ]:
        (model / "config.json").write_text(json.dumps({"eos_token_id": eos}))
        if more:
            (model / "generation_config.json").write_text(json.dumps(more))
        assert generate.limits(model) == (np.inf, expected)


def test_two_processes_of_four_devices_give_the_same_answers(place, plain):
    args = ["model", "--prompts", "requests.jsonl", "--length", LENGTH + 1]
    args += ["--slots", 4, "--dtype", "float32"]
    two = start_two(place, "generate.py", args, args)
    assert statuses(two) == [0, 0], two[0].errors[-2000:]
    assert two[1].output == ""
    lines = [json.loads(line) for line in two[0].output.splitlines()]
    found = {line["id"]: line["tokens"] for line in lines}
    assert len(found[8]) == 5
    assert found | {8: found[8][:4]} == plain
    assert lines[0]["id"] == 2  # the shortest answer comes first
    names = {number: word for word, number in WORDS.items()}
    expected = {
        "id": "text",
        "prompt_tokens": 4,
        "tokens": plain["text"],
        "text": " ".join(names[n] for n in plain["text"] if n != 1),
        "finish_reason": "length",
        "seed": 7,
    }
    assert expected in lines
    assert "on 8 cpu devices" in two[0].errors and "a second" in two[0].errors


def test_output_that_cannot_be_written(place):
    """A closed pipe ends the program silently; a full disk ends it with the reason."""
    read, write = os.pipe()
    os.close(read)
    args = ["model", "--prompt", "the sea is", "--max-tokens", 2]
    with open(write, "w") as pipe, open("/dev/full", "w") as full:
        runs = [
            start_in(place, "generate.py", *args, stdout=file) for file in (pipe, full)
        ]
    assert statuses(runs) == [128 + signal.SIGPIPE, 1]
    closed, on_full = [run.errors.splitlines()[-1] for run in runs]
    assert closed.startswith("loaded in")
    assert "No space left on device" in on_full
