"""A record is marked as older as soon as what it measured would run differently."""

import importlib
import runpy

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
EDITS = {  # each with whether the program is still the same
    "hints and comments": ("(x):", "(x: float) -> float:  # twice", True),
    "docstrings": ("Twice x.", "Two times x.", True),
    "layout": ("2 * x", "2*x", True),
    "another program": ("2 * x", "x * 2", False),
}


@pytest.mark.parametrize("suffix", [".py", ".ipynb"])
@pytest.mark.parametrize("old, new, same", EDITS.values(), ids=EDITS)
def test_only_what_runs_counts(tmp_path, suffix, old, new, same):
    digests = []
    for number, text in enumerate([PROGRAM, PROGRAM.replace(old, new)]):
        if suffix == ".ipynb":
            cells = [nbformat.v4.new_code_cell(text)]
            text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
        path = tmp_path / f"{number}{suffix}"
        path.write_text(text)
        digests.append(record.digest(path))
    assert (digests[0] == digests[1]) == same


def test_a_part_is_kept_with_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "KEPT", tmp_path)
    for number, part in enumerate(["one", "two"]):
        record.keep("trial", part, number, ["README.md"], {"jax": "0.0.1"})
    parts = record.read("trial")
    assert [part["found"] for part in parts.values()] == [0, 1]
    assert {"recorded", "commit", "on"} < {*parts["one"]}
    assert "Older" not in record.told(parts)
    parts["two"]["of"]["README.md"] = "another text"
    assert record.told(parts).endswith(" **Older than what it measured:** README.md.")


def test_a_retired_program_is_linked_at_its_commit():
    about = {"recorded": "2026-11-26", "commit": "abcdef0", "on": "Linux"}
    part = about | {"versions": {}, "of": {"lab/retired.py": "its digest"}}
    told = record.told({"one": part}, "lab/retired.py")
    assert "/blob/abcdef0/lab/retired.py)" in told and "Older" not in told


def test_a_footer_claims_only_what_is_recorded_of_this_text():
    of = {file: record.digest(ROOT / file) for file in versions.files("colab")}
    found = dict.fromkeys(versions.chapters(), 1.0)
    part = {"versions": {"jax": "0.0.1"}, "of": of, "found": found}

    def passes(page: str) -> str:
        return selfcontained.passes(page, versions.passed_on({"colab": part}))

    assert passes("book/index") == " Every chapter passes on JAX 0.0.1."
    old, other = [f"notebooks/{name}" for name in versions.chapters()[:2]]
    of[f"{old}.ipynb"] = "another program"
    assert passes("book/index") == passes(old) == ""
    assert passes(other) == " This chapter passes on JAX 0.0.1."


def status_page() -> list[str]:
    """Run the status page, and return the lines that its cells show."""
    shell, lines = InteractiveShell.instance(), []
    for cell in twin((ROOT / "book/status.md").read_text()).cells:
        if cell.cell_type == "code":
            result = shell.run_cell(cell.source)
            assert result.success, cell.source
            lines += getattr(result.result, "data", "").splitlines()
    return lines


def test_the_status_page_marks_what_is_older(monkeypatch):
    monkeypatch.chdir(ROOT / "book")
    monkeypatch.setattr(record, "older", lambda part: [])
    assert "(older)" not in "".join(status_page())
    chapter = versions.chapters()[5]
    monkeypatch.setattr(record, "older", lambda part: [f"notebooks/{chapter}.ipynb"])
    marks = [line.count("(older)") for line in status_page() if chapter in line]
    assert marks == [len(record.read("versions")), 1]  # its seconds, and its mutants


CELLS = sorted((ROOT / "book/cells").glob("recorded_*.py"))
RETIRED = {"hosts": "RECORDED", "kills": "KILLS"}  # by name, what the cell defines


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.stem)
def test_a_cell_is_what_was_recorded(cell):
    name = cell.stem.removeprefix("recorded_")
    parts = record.read(name)
    if name in RETIRED:
        found = {part: about["found"] for part, about in parts.items()}
        assert runpy.run_path(str(cell))[RETIRED[name]] == found
    else:
        made = importlib.import_module(name).cell(parts)
        assert record.meaning(cell.read_text()) == record.meaning(made)
