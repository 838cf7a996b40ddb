"""Notebooks of made-up clones are found, drawn and judged as they should be."""

import json
import os
import subprocess
from pathlib import Path

import field
import pytest

PARALLEL = "import jax\nf = jax.pmap(lambda x: x)\n"
KEEP = """git init -q && git remote add origin https://example.org/ann/$0.git &&
git add . && git -c user.name=a -c user.email=a@b commit -q -m Add"""


def clone(folder: Path, name: str, **notebooks: str) -> None:
    """A repository in folder with notebooks of one cell each, by stem, last changed on
    5 March 2024."""
    place = folder / name
    place.mkdir()
    for stem, source in notebooks.items():
        cells = [{"cell_type": "code", "source": source}]
        (place / f"{stem}.ipynb").write_text(json.dumps({"cells": cells}))
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_COMMITTER_DATE": "2024-03-05T12:00:00"}
    subprocess.run(
        ["sh", "-c", KEEP, name], cwd=place, env=os.environ | own, check=True
    )


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
