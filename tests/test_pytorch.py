"""What PyTorch found, as recorded, is of the script that the page shows; no PyTorch."""

import ast
import hashlib
import json
import re

from pair import ROOT

SCRIPT = (ROOT / "lab/pytorch.py").read_text()
PAGE = (ROOT / "book/from_pytorch_parallelism.md").read_text()
RECORDED = json.loads((ROOT / "book/measured/pytorch.json").read_text())
SHOWN, OWN = SCRIPT.split("# ---------------------------------------------------", 1)
SHOWN = ast.parse(SHOWN)


def functions(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def programs() -> set[str]:
    """The names in the dictionary PROGRAMS."""
    [value] = [
        node.value
        for node in ast.parse(SCRIPT).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "PROGRAMS"
    ]
    return {key.value for key in value.keys}


def test_the_record_is_of_this_script():
    digest = hashlib.sha256(SCRIPT.encode()).hexdigest()
    assert RECORDED["source"] == digest, "run: nox -s pytorch -- --record"
    assert {"recorded", "torch", "Python"} <= {*RECORDED}


def test_both_ranks_recorded_every_program():
    for rank in RECORDED["ranks"]:
        assert {*rank} == programs() | {"torchrun"}
    assert len(RECORDED["ranks"]) == 2


def test_the_page_shows_all_that_ran():
    calls = re.findall(r"^pytorch\((.*)\)$", PAGE, re.MULTILINE)
    shown = [name for call in calls for name in re.findall(r'"(\w+)"', call)]
    # `problem` stands on the page itself, where a check compares it.
    assert sorted([*shown, "problem"]) == sorted(functions(SHOWN))


def test_the_page_uses_every_program():
    for program in programs():
        assert re.search(rf'"{re.escape(program)}"', PAGE), program
