"""Notebooks of made-up clones are found, drawn, run and judged as they should be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import field
import pytest

PARALLEL = "import jax\nf = jax.pmap(lambda x: x)\n"
IDLE = f"if False:\n    {PARALLEL.splitlines()[0]}  # pmap\n"  # starts at once


def cell(source: str, tags: list[str] = [], outputs: list[dict] = []) -> dict:
    """A code cell of a notebook."""
    return {
        "cell_type": "code",
        "source": source,
        "metadata": {"tags": tags},
        "outputs": outputs,
    }


def clone(folder: Path, name: str, **notebooks: str | list[dict]) -> Path:
    """A repository in folder with notebooks, by stem, last changed on 5 March 2024."""
    place = folder / name.replace("/", "+")
    place.mkdir(parents=True)
    for stem, cells in notebooks.items():
        cells = [cell(cells)] if isinstance(cells, str) else cells
        (place / f"{stem}.ipynb").write_text(json.dumps({"cells": cells}))
    day = "2024-03-05T12:00:00"
    env = os.environ | {"GIT_AUTHOR_DATE": day, "GIT_COMMITTER_DATE": day}
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    for words in (
        ["init", "-q"],
        ["remote", "add", "origin", f"https://example.org/{name}.git"],
        ["add", "."],
        ["commit", "-q", "-m", "Add notebooks"],
    ):
        subprocess.run(["git", *who, *words], cwd=place, env=env, check=True)
    return place


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Two releases, for both of which this Python stands in, and an empty folder."""
    monkeypatch.setattr(field, "STATE", tmp_path / "state")
    monkeypatch.setattr(field, "RELEASES", {"new": [], "old": []})
    monkeypatch.setattr(field, "environment", lambda release: Path(sys.executable))
    for release in field.RELEASES:
        (tmp_path / "state" / release).mkdir(parents=True)
    return tmp_path / "clones"


def outcomes(folder: Path) -> dict[str, list[str]]:
    """What becomes of each notebook in folder, by release."""
    rows = field.survey(field.find(folder), [*field.RELEASES])
    return {
        Path(row["path"]).stem: [run["outcome"] for run in row["results"].values()]
        for row in rows
    }


def test_notebooks_on_parallel_jax_are_found_once(here):
    place = clone(
        here,
        "ann/one",
        a=PARALLEL,
        again=PARALLEL,
        mesh="import jax\nfrom jax.sharding import PartitionSpec, Mesh",
        other_mesh="import jax\nfrom trimesh import Mesh",
        no_jax="pmap = 1",
        alone="import jax",
    )
    (place / "broken.ipynb").write_text("not JSON")
    (place / "untracked.ipynb").write_text((place / "mesh.ipynb").read_text())
    clone(here, "bob/two", copied=PARALLEL)
    found = field.find(here)
    assert [notebook.path for notebook in found] == ["a.ipynb", "mesh.ipynb"]
    assert found[0].repository == "ann/one"
    assert found[0].edited == "2024-03-05"
    assert found[0].commit == field.git(place, "rev-parse", "HEAD")


def test_of_a_large_repository_the_same_two_are_drawn(here):
    clone(here, "ann/many", **{f"n{i}": f"{PARALLEL}{i}" for i in range(9)})
    clone(here, "bob/few", n=f"{PARALLEL}bob")
    drawn = field.draw(field.find(here))
    assert [notebook.repository for notebook in drawn] == 2 * ["ann/many"] + ["bob/few"]
    assert drawn == field.draw(field.find(here)[::-1][::-1])


@pytest.mark.parametrize(
    "error, expected",
    [
        (None, "passes"),
        ("AttributeError: module 'jax' has no attribute 'tree_map'", "jax.tree_map"),
        ("AttributeError: Module flax.nnx has no attribute 'a'", "flax.nnx.a"),
        (
            "ImportError: cannot import name 'maps' from 'jax.experimental' (x.py)",
            "jax.experimental.maps",
        ),
        (
            "ModuleNotFoundError: No module named 'jax.experimental.maps'",
            "jax.experimental.maps",
        ),
        ("ModuleNotFoundError: No module named 'google.colab'", "Colab"),
        ("ModuleNotFoundError: No module named 'torch'", "another package"),
        ("RuntimeError: Unknown backend tpu", "an accelerator"),
        (
            "ValueError: cannot reshape array of size 8 into shape (2,2)",
            "another number of devices",
        ),
        ("URLError: <urlopen error [Errno 111]>", "the network"),
        ("FileNotFoundError: [Errno 2] 'a.npz'", "a file"),
        ("TimeoutError: over 300 seconds", "more time"),
        ("AttributeError: module 'numpy' has no attribute 'bool'", "fails"),
        ("ValueError: shapes differ\nand more", "fails"),
    ],
)
def test_an_error_is_judged(error, expected):
    judged = field.judge(error)
    assert judged.get("absent", judged.get("by", judged["outcome"])) == expected
    assert "\n" not in judged.get("error", "")


def test_a_notebook_runs_on_eight_devices_and_leaves_its_clone_alone(here):
    place = clone(
        here,
        "ann/one",
        eight=f"{PARALLEL}open('new', 'x')\nopen('/tmp/new of a test', 'x')\n"
        "assert jax.device_count() == 8",
        seven=f"{PARALLEL}assert jax.device_count() == 7",
    )
    assert outcomes(here) == {"eight": 2 * ["passes"], "seven": 2 * ["fails"]}
    assert not (place / "new").exists()


def test_what_may_fail_and_what_installs_is_passed_over(here):
    ended = [{"output_type": "error"}]
    clone(
        here,
        "ann/one",
        tagged=[cell(IDLE), cell("0 / 0", tags=["raises-exception"])],
        saved=[cell(IDLE), cell("1 / 0", outputs=ended)],
        fails=[cell(IDLE), cell("2 / 0"), cell("assert 2")],
        installs=f"{IDLE}!pip -V > new\n!pip3 -V > new\n!python -m pip -V > new\n"
        "import os; assert not os.path.exists('new')",
    )
    found = outcomes(here)
    assert found.pop("fails") == 2 * ["fails"]
    assert found == dict.fromkeys(("installs", "saved", "tagged"), 2 * ["passes"])


def test_what_takes_too_long_is_blocked(here, monkeypatch):
    monkeypatch.setattr(field, "PATIENCE", 5)
    clone(here, "ann/one", sleeps=f"{IDLE}import time\ntime.sleep(60)")
    assert outcomes(here) == {"sleeps": ["blocked"]}
    [run] = json.loads((field.STATE / "new/results.json").read_text()).values()
    assert run["error"] == "TimeoutError: over 5 seconds"


def test_what_works_too_much_or_asks_the_network_is_blocked(here, monkeypatch):
    monkeypatch.setattr(field, "SECONDS", 6)  # enough to start, on a loaded machine too
    clone(
        here,
        "ann/one",
        works=f"{IDLE}while True: pass",
        asks=f"{IDLE}import urllib.request\nurllib.request.urlopen('https://example.org')",
    )
    assert outcomes(here) == dict.fromkeys(("asks", "works"), ["blocked"])
    kept = json.loads((field.STATE / "new/results.json").read_text())
    errors = {key.split()[-1]: run["error"] for key, run in kept.items()}
    assert "refused" in errors["asks.ipynb"]
    assert "over 6 seconds" in errors["works.ipynb"]


def test_a_survey_that_was_cut_off_goes_on(here, monkeypatch):
    clone(here, "ann/one", **{f"n{i}": f"{IDLE}{i}" for i in range(3)})
    tried = []

    def attempt(release, notebook):
        """Pass, but the third time be interrupted."""
        tried.append(notebook.path)
        if len(tried) == 3:
            raise KeyboardInterrupt
        return None, 1.0

    monkeypatch.setattr(field, "attempt", attempt)
    with pytest.raises(KeyboardInterrupt):
        outcomes(here)
    assert len(outcomes(here)) == 3
    assert tried == ["n0.ipynb", "n1.ipynb", "n2.ipynb", "n2.ipynb"] + [
        f"n{i}.ipynb" for i in range(3)
    ]


@pytest.mark.parametrize(
    "words, told",
    [
        ([], "has no clones"),
        (["--record", "--only", "new"], "nothing is recorded"),
    ],
)
def test_what_cannot_be_surveyed_or_recorded_is_refused(here, monkeypatch, words, told):
    monkeypatch.setattr(sys, "argv", ["field.py", str(here), *words])
    assert told in field.main()


def test_clones_without_notebooks_are_refused(here, monkeypatch):
    clone(here, "ann/one", alone="import jax")
    monkeypatch.setattr(sys, "argv", ["field.py", str(here)])
    assert "no notebooks on parallel JAX" in field.main()


def test_a_machine_without_uv_is_told(monkeypatch):
    monkeypatch.setenv("UV", "/nowhere/uv")
    with pytest.raises(SystemExit, match="no uv"):
        field.uv("--version")


def test_a_whole_survey_is_recorded(here, monkeypatch):
    clone(here, "ann/one", n=PARALLEL)
    for release in field.RELEASES:
        (field.STATE / release / "installed.json").write_text('{"jax": "1.0"}')
    kept = {}
    monkeypatch.setattr(field, "attempt", lambda release, notebook: (None, 1.0))
    monkeypatch.setattr(field, "record", lambda name, rows: kept.update({name: rows}))
    monkeypatch.setattr(sys, "argv", ["field.py", str(here), "--record"])
    assert field.main() is None
    found = json.loads(json.dumps(kept))["field"]
    assert found["releases"] == dict.fromkeys(("new", "old"), {"jax": "1.0"})
    passes = dict.fromkeys(("new", "old"), {"outcome": "passes"})
    assert [row["results"] for row in found["notebooks"]] == [passes]
    assert found["notebooks"][0]["repository"] == "ann/one"


def test_how_a_process_died_is_told():
    assert "Check failed: n" in field.last_words("F0 Check failed: n\nstack", -6)
    assert field.last_words("", -9).startswith("exit -9")
    with pytest.raises(SystemExit, match="could not be run"):
        field.last_words("Traceback", 1)
