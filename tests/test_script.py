"""The script of book/script.md: equal numbers on 1, 2 and 8 devices, and after stops.

What goes wrong beside is in test_faults.py.
"""

import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import lifecycle
import numpy as np
import pytest
from pair import ROOT
from runs import (
    ENVIRONMENT,
    LAUNCH,
    SLOWLY,
    TOLERANCE,
    begin_two,
    check,
    end,
    finish,
    names,
    read_until,
    reference,
    train,
)

# The second save waits for a line when half of its arrays are written.
SAVED_HALF_OF_40 = """
import jax, lifecycle, logging
from orbax.checkpoint import type_handlers

class Half(type_handlers.ArrayHandler):
    async def serialize(self, values, infos, args=None):
        half = len(values) // 2
        for write in await super().serialize(values[:half], infos[:half], args[:half]):
            write.result()
        print("waiting", flush=True)
        sys.stdin.readline()

begin_to_save = lifecycle.Checkpoints.save

def save(checkpoints, done, state):
    if done == 40:
        checkpoints.manager.wait_until_finished()
        logging.getLogger("absl").setLevel("ERROR")  # it warns of the next line
        type_handlers.register_type_handler(jax.Array, Half(), override=True)
    begin_to_save(checkpoints, done, state)

lifecycle.Checkpoints.save = save
"""


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_any_number_of_devices_gives_the_same_numbers(begin, devices):
    said = finish(begin(devices))
    assert said.startswith(f"{devices} cpu devices, {64 // devices} rows of a batch")
    check(said)


@pytest.mark.parametrize(
    ("number", "before", "after"), [(signal.SIGINT, 8, 2), (signal.SIGTERM, 1, 8)]
)
def test_a_stop_saves_and_a_restart_goes_on(begin, tmp_path, number, before, after):
    run = begin(before, code=SLOWLY)
    read_until(run, "step     8")
    run.send_signal(number)
    said, complaints = end(run)
    assert (run.returncode, complaints) == (75, "")
    [saved] = names(tmp_path / "checkpoints")
    assert said.endswith(f"stopped: the same command goes on after step {saved}\n")
    check(finish(begin(after)), start=int(saved))


def test_a_kill_during_a_save_leaves_the_save_before(begin, tmp_path):
    run = begin(8, code=SAVED_HALF_OF_40)
    read_until(run, "waiting")
    run.kill()
    end(run)
    whole, half = names(tmp_path / "checkpoints")
    assert whole == "20" and half.startswith("40.orbax-checkpoint-tmp")
    check(finish(begin(1)), start=20)
    assert names(tmp_path / "checkpoints") == ["20", "40", "48"]


@pytest.mark.parametrize("data", ["numpy", "grain"])
def test_two_processes_give_the_same_numbers(begin, data):
    run, other = begin_two(begin, "--data", data)
    said, _ = end(run)
    quiet, _ = end(other)
    assert (run.returncode, other.returncode) == (0, 0)
    assert "8 cpu devices, 8 rows of a batch on each\n" in said
    assert "step" not in quiet and "devices" not in quiet
    if data == "numpy":
        check(said)
        return
    alone, _ = end(begin(8, "--data", data, "--folder", "alone"))  # Grain may warn
    lines = r"^step +(\d+) .*?loss ([\d.]+)"
    found = np.float64(re.findall(lines, said, re.M))
    expected = np.float64(re.findall(lines, alone, re.M))
    np.testing.assert_allclose(found, expected, **TOLERANCE)
    assert abs(expected[0, 1] - reference()[0][7]) > 1e-3  # an order of its own


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_one_of_two_is_stopped_or_killed(begin, tmp_path, number):
    run, other = begin_two(begin, code=SLOWLY)
    read_until(run, "step    20")
    while not (tmp_path / "checkpoints" / "20").exists():  # it gets its name when whole
        time.sleep(0.1)
    other.send_signal(number)
    said, _ = end(run)
    end(other)
    newest = names(tmp_path / "checkpoints")[-1]
    if number == signal.SIGTERM:
        assert (run.returncode, other.returncode) == (75, 75)
        assert said.endswith(f"goes on after step {newest}\n") and newest != "20"
    else:
        assert run.returncode not in (0, None) and newest == "20"
    check(finish(begin(2)), start=int(newest))


ALONE = [
    ("--emulate 3", "--batch 64 will not do: it has to be a multiple of the 3 devices"),
    ("--distributed", "cannot join the other processes: coordinator_address"),
    ("--processes 2 --process 0", "cannot join the other processes: "),
    ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_TASKS is 2: without --distributed (or, "),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE is 2: without --distributed (or, "),
    ("WORLD_SIZE", "WORLD_SIZE is 2: without --distributed (or, under torchrun, --c"),
]


@pytest.mark.parametrize(("given", "complaint"), ALONE)
def test_a_process_is_refused(begin, tmp_path, monkeypatch, given, complaint):
    if given.startswith("--"):
        run = begin(8, *given.split())
    else:  # what a launcher says to each of two processes
        monkeypatch.setitem(ENVIRONMENT, given, "2")
        run = begin(8)
    said, complaints = end(run)
    assert (run.returncode, said) == (78, "")
    assert complaints.startswith(complaint)
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert files in ([], ["starts"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ([["--rate", "0.01"], []], "all processes need the same steps, batch, rate"),
        ([["--save-every", "70"], []], "all processes need the same steps, batch"),
        ([["--folder", "own"], []], "--folder has to be on a disk that all"),
        ([["--emulate", "2"], []], "processes need equal numbers of devices, and have"),
    ],
)
def test_processes_that_differ_are_refused(begin, tmp_path, options, complaint):
    runs = begin_two(begin, each=options)
    complaints = [end(run)[1] for run in runs]
    assert [run.returncode for run in runs] == [78, 78]
    assert complaint in complaints[0]
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert files in ([], ["starts"])


def test_other_settings_are_refused_and_nothing_is_lost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(lifecycle.fcntl, "flock", lambda *_: None)  # of this process
    monkeypatch.setattr(
        lifecycle, "hear_no_more", lambda: None
    )  # the signals, pytest's
    folder = tmp_path / "checkpoints"

    def contents() -> dict[Path, bytes]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path: path.read_bytes() for path in files if path.name != "starts"}

    as_begun = ["train.py", "--folder", str(folder), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", as_begun)
    train.main(train.read_options())
    score = capsys.readouterr().out.splitlines()[-1]
    saved = contents()

    changes = {"steps": 3, "batch": 128, "rate": 0.01, "seed": 1, "data": "grain"}
    assert [*changes] == [*train.SETTINGS]
    for name, new in changes.items():
        monkeypatch.setattr(sys, "argv", [*as_begun, f"--{name}", str(new)])
        with pytest.raises(SystemExit, match="78"):
            train.main(train.read_options())
        words = rf"begun with --{name} \S+, not with '?{new}'?: ask for the same again"
        assert re.search(words, capsys.readouterr().err)
    assert contents() == saved

    monkeypatch.setattr(sys, "argv", as_begun)
    capsys.readouterr()
    train.main(train.read_options())
    assert capsys.readouterr().out.splitlines()[1:] == ["step     2  restored", score]


@pytest.mark.parametrize("name", ["train.py", "lifecycle.py"])
def test_the_page_shows_every_line_once(name):
    """Its parts of a file, one after the other, are the file but for gaps."""
    code = pytest.importorskip("sphinx.directives.code")
    config = SimpleNamespace(source_encoding="utf-8")
    page = (ROOT / "book" / "script.md").read_text()
    shown, included = "", rf"(?ms)^```{{literalinclude}} ../launch/{name}\n(.*?)^```$"
    for part in re.findall(included, page):
        options = dict(re.findall(r"(?m)^:([\w-]+): '?(.*?)'?$", part))
        reader = code.LiteralIncludeReader(LAUNCH / name, options, config)
        shown += reader.read()[0]
    script = (LAUNCH / name).read_text()
    assert re.findall(".+", shown) == re.findall(".+", script)
