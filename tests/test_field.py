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
    about = {"metadata": {"tags": tags}, "outputs": outputs}
    return {"cell_type": "code", "source": source} | about


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
    python = Path(sys.executable), ["jax==1.0"]
    monkeypatch.setattr(field, "STATE", tmp_path)
    monkeypatch.setattr(field, "RELEASES", {"new": [], "old": []})
    monkeypatch.setattr(field, "environment", lambda release: python)
    monkeypatch.setattr(field, "OF_EACH", 9)
    for release in field.RELEASES:
        (tmp_path / release).mkdir()
    return tmp_path / "clones"


def outcomes(folder: Path) -> dict[str, list[str]]:
    """What becomes of each notebook in folder, by release."""
    found = {}
    for _, part in field.measure(str(folder)):
        for row in part["notebooks"]:
            found.setdefault(Path(row["path"]).stem, []).append(row["outcome"])
    return found


def test_notebooks_on_parallel_jax_are_found_once_and_drawn(here, monkeypatch):
    place = clone(
        here,
        "ann/one",
        a=PARALLEL,
        again=PARALLEL,
        mesh="import jax\nfrom jax.sharding import PartitionSpec, Mesh",
        other_mesh="import jax\nfrom trimesh import Mesh",
        no_jax="pmap = 1",
    )
    (place / "a.ipynb").with_name("untracked.ipynb").write_text('{"cells": []}')
    clone(
        here,
        "bob/many",
        copied=PARALLEL,
        **{f"n{i}": f"{PARALLEL}{i}" for i in range(5)},
    )
    found = field.find(here)
    assert [notebook.path for notebook in found[:2]] == ["a.ipynb", "mesh.ipynb"]
    assert found[0][:2] == ("ann/one", field.git(place, "rev-parse", "HEAD"))
    assert found[0].edited == "2024-03-05"
    assert len(found) == 7
    monkeypatch.setattr(field, "OF_EACH", 2)
    drawn = field.draw(found)
    assert [notebook.repository for notebook in drawn] == ["ann/one"] * 2 + [
        "bob/many"
    ] * 2
    assert drawn == field.draw(field.find(here))


@pytest.mark.parametrize(
    "error, expected",
    [
        (None, "passes"),
        ("AttributeError: module 'jax' has no attribute 'tree_map'", "jax.tree_map"),
        (
            "ImportError: cannot import name 'maps' from 'jax.experimental' (x.py)",
            "jax.experimental.maps",
        ),
        (
            "ModuleNotFoundError: No module named 'jax.experimental.maps'",
            "jax.experimental.maps",
        ),
        ("ModuleNotFoundError: No module named 'torch'", "another package"),
        ("RuntimeError: Unknown backend tpu", "an accelerator"),
        ("URLError: <urlopen error [Errno 111]>", "the network"),
        ("TimeoutError: over 300 seconds", "more time"),
        ("AttributeError: module 'numpy' has no attribute 'bool'", "fails"),
    ],
)
def test_an_error_is_judged(error, expected):
    judged = field.judge(error)
    assert judged.get("absent", judged.get("by", judged["outcome"])) == expected


def test_a_notebook_runs_on_eight_devices_and_leaves_its_clone_alone(here):
    place = clone(
        here,
        "ann/one",
        eight=f"{PARALLEL}open('new', 'x')\nopen('/tmp/new of a test', 'x')\n"
        "assert jax.device_count() == 8",
        seven=f"{PARALLEL}assert jax.device_count() == 7",
        tagged=[cell(IDLE), cell("0 / 0", tags=["raises-exception"])],
        saved=[cell(IDLE), cell("1 / 0", outputs=[{"output_type": "error"}])],
        installs=f"{IDLE}!pip -V > new\n!python -m pip -V > new\n"
        "import os; assert not os.path.exists('new')",
        asks=f"{IDLE}import urllib.request as u\nu.urlopen('https://example.org')",
    )
    passes = dict.fromkeys(("eight", "installs", "saved", "tagged"), 2 * ["passes"])
    also = {"seven": 2 * ["fails"], "asks": ["blocked"]}
    assert outcomes(here) == passes | also
    assert not (place / "new").exists()
