"""A record is marked as soon as what it measured would run otherwise."""

import importlib
import json
from pathlib import Path

import jax
import nbformat
import pytest
import record
import selfcontained
import versions
from IPython.core.interactiveshell import InteractiveShell
from pair import ROOT, twin

jax.config.update("jax_num_cpu_devices", 8)  # as the status page asks, in any order

PROGRAM = '''def double(x):
    """Twice x."""
    return 2 * x
'''


def notebook(code: str) -> str:
    cells = [nbformat.v4.new_markdown_cell("A."), nbformat.v4.new_code_cell(code)]
    return nbformat.writes(nbformat.v4.new_notebook(cells=cells))


@pytest.mark.parametrize("suffix, text", [(".py", str), (".ipynb", notebook)])
@pytest.mark.parametrize(
    "code, same",
    [
        (PROGRAM.replace("(x):", "(x: float) -> float:  # twice"), True),
        (PROGRAM.replace("Twice x.", "Two times x."), True),
        (PROGRAM.replace("2 * x", "2*x"), True),
        (PROGRAM.replace("2 * x", "x * 2"), False),
    ],
    ids=["hints and comments", "docstrings", "layout", "another program"],
)
def test_only_what_runs_counts(tmp_path, suffix, text, code, same):
    paths = [tmp_path / f"{name}{suffix}" for name in ("before", "after")]
    for path, program in zip(paths, (PROGRAM, code)):
        path.write_text(text(program))
    assert (record.digest(paths[0]) == record.digest(paths[1])) == same


@pytest.fixture
def kept(tmp_path, monkeypatch) -> Path:
    """Records of one's own: all chapters pass, as they stand, on JAX 0.0.1, and those
    that were broken on purpose were broken as they stand."""
    monkeypatch.setattr(record, "KEPT", tmp_path)
    monkeypatch.setattr(versions, "versions", lambda: {"jax": "0.0.1"})
    for path in (ROOT / "book/measured").glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    parts = record.read("mutants")
    for part in parts.values():
        part["of"] = {file: record.digest(ROOT / file) for file in part["of"]}
    (tmp_path / "mutants.json").write_text(json.dumps(parts))
    found = dict.fromkeys(versions.chapters(), 1.0)
    (tmp_path / "versions.json").unlink()
    record.keep("versions", "tests", found, versions.files("tests"), {"jax": "0.0.1"})
    return tmp_path


def plant(kept: Path, name: str) -> str:
    """Make the record of one chapter older, and return the chapter's name."""
    parts = record.read(name)
    chapter = versions.chapters()[5]
    for part in parts.values():
        for file in part["of"]:
            if chapter in file:
                part["of"][file] = "another program"
    (kept / f"{name}.json").write_text(json.dumps(parts))
    return chapter


def test_a_part_is_kept_beside_the_others(kept):
    record.keep("trial", "one", {"bytes": 8}, ["README.md"], {"jax": "0.0.1"})
    record.keep("trial", "two", {"bytes": 9}, ["README.md"], {"jax": "0.0.1"})
    parts = record.read("trial")
    assert [part["found"]["bytes"] for part in parts.values()] == [8, 9]
    assert {"recorded", "commit", "on"} < {*parts["one"]}
    assert record.older(parts["one"]) == []
    assert "Older" not in record.told(parts)
    parts["two"]["of"]["README.md"] = "another text"
    assert record.told(parts).endswith("**Older than what it measured:** README.md.")


def test_a_footer_claims_what_the_records_of_this_text_say(kept):
    passed = versions.passed_on(record.read("versions"))
    assert selfcontained.passes("book/index", passed) == (
        " Every chapter passes on JAX 0.0.1."
    )
    old = plant(kept, "versions")
    passed = versions.passed_on(record.read("versions"))
    assert selfcontained.passes("book/index", passed) == ""
    assert selfcontained.passes(f"notebooks/{old}", passed) == ""
    other = f"notebooks/{versions.chapters()[0]}"
    assert selfcontained.passes(other, passed) == " This chapter passes on JAX 0.0.1."


def shown(page: str) -> str:
    """The tables that a page of book/ shows, by running its cells here."""
    shell = InteractiveShell.instance()
    cells = twin((ROOT / f"book/{page}.md").read_text()).cells
    texts = []
    for cell in cells:
        if cell.cell_type == "code":
            result = shell.run_cell(cell.source)
            assert result.success, cell.source
            texts.append(getattr(result.result, "data", ""))
    return "\n".join(texts)


@pytest.mark.parametrize("name", ["versions", "mutants"])
def test_the_status_page_marks_what_is_older(kept, monkeypatch, name):
    monkeypatch.chdir(ROOT / "book")
    chapter = versions.chapters()[5]
    before = shown("status").count("(older)")
    assert plant(kept, name) == chapter
    assert shown("status").count("(older)") > before


CELLS = sorted((ROOT / "book/cells").glob("recorded_*.py"))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.stem)
def test_a_cell_is_what_was_recorded(cell):
    name = cell.stem.removeprefix("recorded_")
    made = importlib.import_module(name).cell(record.read(name))
    assert record.meaning(cell.read_text()) == record.meaning(made)
