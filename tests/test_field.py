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
KEEP = """git init -q && git remote add origin https://example.org/ann/$0.git &&
git add . && git -c user.name=a -c user.email=a@b commit -q -m Add"""


def cell(source: str, tags: list[str] = [], outputs: list[dict] = []) -> dict:
    """A code cell of a notebook."""
    about = {"metadata": {"tags": tags}, "outputs": outputs}
    return {"cell_type": "code", "source": source} | about


def clone(folder: Path, name: str, **notebooks: str | list[dict]) -> Path:
    """A repository in folder with notebooks, by stem, last changed on 5 March 2024."""
    place = folder / name
    place.mkdir()
    for stem, cells in notebooks.items():
        cells = [cell(cells)] if isinstance(cells, str) else cells
        (place / f"{stem}.ipynb").write_text(json.dumps({"cells": cells}))
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_COMMITTER_DATE": "2024-03-05T12:00:00"}
    subprocess.run(
        ["sh", "-c", KEEP, name], cwd=place, env=os.environ | own, check=True
    )
    return place


def test_notebooks_on_parallel_jax_are_found_once_and_drawn(tmp_path):
    clone(
        tmp_path,
        "one",
        a=PARALLEL,
        mesh="import jax\nfrom jax.sharding import PartitionSpec, Mesh",
        other_mesh="import jax\nfrom trimesh import Mesh",
        no_jax="pmap = 1",
    )
    many = {f"n{i}": f"{PARALLEL}{i}" for i in range(5)}
    clone(tmp_path, "two", copied=PARALLEL, **many)
    found = field.find(tmp_path)
    assert [n.path for n in found[:2]] == ["a.ipynb", "mesh.ipynb"]
    assert (found[0].edited, len(found)) == ("2024-03-05", 7)
    drawn = field.draw(found)
    assert [n.repository for n in drawn] == 2 * ["ann/one"] + 2 * ["ann/two"]
    assert drawn == field.draw(field.find(tmp_path))


@pytest.mark.parametrize(
    "error, expected",
    [
        (None, "passes"),
        ("AttributeError: module 'jax' has no attribute 'tree_map'", "jax.tree_map"),
        ("ImportError: cannot import name 'pjit' from 'jax' (x.py)", "jax.pjit"),
        ("ModuleNotFoundError: No module named 'jax.maps'", "jax.maps"),
        ("AttributeError: jax.tree_map was removed in JAX v0.6.0", "jax.tree_map"),
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


def test_a_notebook_runs_on_eight_devices_and_leaves_its_clone_alone(
    tmp_path, monkeypatch
):
    """In two releases, for both of which this Python stands in."""
    monkeypatch.setattr(field, "STATE", tmp_path)
    monkeypatch.setattr(field, "RELEASES", {"new": [], "old": []})
    monkeypatch.setattr(field, "environment", lambda _: (Path(sys.executable), []))
    monkeypatch.setattr(field, "OF_EACH", 9)
    for name in ("new", "old", "clones"):
        (tmp_path / name).mkdir()
    place = clone(
        tmp_path / "clones",
        "one",
        eight=f"{PARALLEL}open('new', 'x')\nopen('/tmp/new of a test', 'x')\n"
        "assert jax.device_count() == 8",
        seven=f"{PARALLEL}assert jax.device_count() == 7",
        may_fail=[
            cell(IDLE),
            cell("0 / 0", tags=["raises-exception"]),
            cell("1 / 0", outputs=[{"output_type": "error"}]),
        ],
        installs=f"{IDLE}!pip -V > new\n!python -m pip -V > new\n"
        "import os; assert not os.path.exists('new')",
        asks=f"{IDLE}import urllib.request as u\nu.urlopen('https://example.org')",
    )
    outcomes = {}
    for _, part in field.measure(tmp_path / "clones"):
        for row in part["notebooks"]:
            outcomes.setdefault(Path(row["path"]).stem, []).append(row["outcome"])
    passes = dict.fromkeys(("eight", "installs", "may_fail"), 2 * ["passes"])
    assert outcomes == passes | {"seven": 2 * ["fails"], "asks": ["blocked"]}
    assert not (place / "new").exists()
