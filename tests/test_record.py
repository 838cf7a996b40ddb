"""Test that records are marked as older when the measured code has changed."""

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

jax.config.update("jax_num_cpu_devices", 8)  # as on the status page

PROGRAM = '''def double(x):
    """Twice x."""
    return 2 * x
'''
EDITS = {  # name: old text, new text, whether the program is the same
    "hints and comments": ("(x):", "(x: float) -> float:  # twice", True),
    "docstrings": ("Twice x.", "Two times x.", True),
    "layout": ("2 * x", "2*x", True),
    "another program": ("2 * x", "x * 2", False),
}


@pytest.mark.parametrize("suffix", [".py", ".ipynb"])
@pytest.mark.parametrize("old, new, same", EDITS.values(), ids=EDITS)
def test_digest_depends_only_on_what_runs(tmp_path, suffix, old, new, same):
    digests = []
    for number, text in enumerate([PROGRAM, PROGRAM.replace(old, new)]):
        if suffix == ".ipynb":
            cells = [nbformat.v4.new_code_cell(text)]
            text = nbformat.writes(nbformat.v4.new_notebook(cells=cells))
        path = tmp_path / f"{number}{suffix}"
        path.write_text(text)
        digests.append(record.digest(path))
    assert (digests[0] == digests[1]) == same


def test_save_keeps_the_other_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "RECORDS", tmp_path)
    for number, part in enumerate(["one", "two"]):
        record.save("trial", part, number, ["README.md"], {"jax": "0.0.1"})
    parts = record.read("trial")
    assert [part["found"] for part in parts.values()] == [0, 1]
    assert {"recorded", "commit", "on"} < {*parts["one"]}
    assert "Older" not in record.describe(parts)
    parts["two"]["of"]["README.md"] = "another text"
    older = " **Older than the present version of:** README.md."
    assert record.describe(parts).endswith(older)


def test_deleted_program_is_linked_at_its_commit():
    about = {"recorded": "2026-11-26", "commit": "abcdef0", "on": "Linux"}
    part = about | {"versions": {}, "of": {"lab/deleted.py": "its digest"}}
    text = record.describe({"one": part}, "lab/deleted.py")
    assert "/blob/abcdef0/lab/deleted.py)" in text and "Older" not in text


def test_footer_ignores_records_of_changed_chapters():
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
    """Run the status page; return the lines of its Markdown outputs."""
    shell, lines = InteractiveShell.instance(), []
    for cell in twin((ROOT / "book/status.md").read_text()).cells:
        if cell.cell_type == "code":
            result = shell.run_cell(cell.source)
            assert result.success, cell.source
            lines += getattr(result.result, "data", "").splitlines()
    return lines


def test_status_page_marks_older_records(monkeypatch):
    monkeypatch.chdir(ROOT / "book")
    monkeypatch.setattr(record, "older", lambda part: [])
    assert "(older)" not in "".join(status_page())
    chapter = versions.chapters()[5]
    monkeypatch.setattr(record, "older", lambda part: [f"notebooks/{chapter}.ipynb"])
    marks = [line.count("(older)") for line in status_page() if chapter in line]
    assert marks == [len(record.read("versions")), 1]  # seconds and mutants


CELLS = sorted((ROOT / "book/cells").glob("recorded_*.py"))
RETIRED = {"hosts": "RECORDED", "kills": "KILLS"}  # name in the cell, by record


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.stem)
def test_cell_equals_its_record(cell):
    name = cell.stem.removeprefix("recorded_")
    parts = record.read(name)
    if name == "gpu":  # seconds in the record, rounded milliseconds in the cell
        values = runpy.run_path(str(cell))

        def in_ms(recorded: dict) -> dict:
            return {
                int(key): in_ms(value)
                if isinstance(value, dict)
                # rounded as in the cell
                else pytest.approx(1e3 * value, abs=0.06)
                for key, value in recorded.items()
            }

        for part in ("decode", "decode_int8", "prefill"):
            assert values[f"recorded_{part}"] == in_ms(parts[part]["found"]["found"])
    elif name in RETIRED:
        found = {name: part["found"] for name, part in parts.items()}
        assert runpy.run_path(str(cell))[RETIRED[name]] == found
    else:
        expected = importlib.import_module(name).cell(parts)
        assert record.normal_form(cell.read_text()) == record.normal_form(expected)
