"""Every check passes a sound book and finds the faults planted in it."""

import json
import subprocess
from pathlib import Path

import checks
import pair
import pytest

CONFIG = """\
repository:
  url: https://github.com/someone/some-book
  branch: main
"""

HEAD = """\
---
kernelspec:
  display_name: Python 3
  language: python
  name: python3
---
"""


def code(source: str, **metadata: object) -> str:
    lines = [f":{key}: {json.dumps(value)}" for key, value in metadata.items()]
    return "\n".join(["", "```{code-cell} ipython3", *lines, "", source, "```", ""])


def chapter(title: str) -> str:
    """A chapter that keeps every rule: 1,500 words in 23 code cells."""
    parts = [f"# {title}\n\n[Open in Colab]()\n\n## What you will learn\n\nTo add.\n"]
    parts += ["\n## Setup\n", code("import jax", tags=["shared-setup"])]
    for section in ("Add", "Subtract", "Multiply"):
        parts.append(f"\n## {section} two numbers\n\n" + "word " * 450 + "\n")
        parts += [code(f"assert {n} + 0 == {n}") for n in range(5)]
    alt = "\n".join(
        [
            "\n```{code-cell} ipython3",
            "---\nmystnb:\n  image:\n    alt: Two bars, the second twice as high.\n---",
            "plt.figure()\n```\n",
        ]
    )
    parts += ["\n## Pitfalls\n", alt, "\n## Exercises\n"]
    for n in (1, 2):
        stub = 'def double(x):\n    """Return 2 * x."""'
        answer = (
            f"# @title Solution\ndouble = {2}.__mul__\nassert double({n}) == {2 * n}"
        )
        parts.append(
            f"\n### Exercise {n}: double\n\nSee [the first](01_first.ipynb).\n"
        )
        parts.append(code(stub, tags=["exercise"]))
        parts.append(code(answer, tags=["solution", "hide-cell"], cellView="form"))
    return (
        HEAD
        + "".join(parts)
        + "\n## Recap\n\nDone.\n\n## Next\n\nMore "
        + "word " * 150
    )


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A small book that passes every check."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book").mkdir()
    (tmp_path / "book/index.md").write_text("# Hello\n")
    (tmp_path / "_config.yml").write_text(CONFIG)
    toc = ["format: jb-book", "root: book/index", "parts:"]
    for part in checks.PARTS:
        toc += [f'  - caption: "{part}"', "    chapters:"]
        if part == checks.PARTS[0]:
            toc += [
                "      - file: notebooks/01_first",
                "      - file: notebooks/02_second",
            ]
        else:
            page = part.split()[-1]
            (tmp_path / f"book/{page}.md").write_text(f"# {part}\n")
            toc += [f"      - file: book/{page}"]
    (tmp_path / "_toc.yml").write_text("\n".join(toc))
    (tmp_path / "README.md").write_text(
        "[One](notebooks/01_first.ipynb) [Two](notebooks/02_second.ipynb)"
    )
    (tmp_path / "notebooks/01_first.md").write_text(chapter("Add numbers"))
    (tmp_path / "notebooks/02_second.md").write_text(chapter("Add more numbers"))
    assert pair.pair(tmp_path) == []
    subprocess.check_call(["git", "init", "-q"], cwd=tmp_path)
    subprocess.check_call(["git", "add", "."], cwd=tmp_path)
    return tmp_path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_sound_book_passes(book, check):
    assert list(check(book)) == []


SOURCE, TWIN = "notebooks/02_second.md", "notebooks/02_second.ipynb"
# What a fault replaces, by what, what the complaint says; and where, if not in SOURCE.
FAULTS = {
    checks.notebooks_follow_their_sources: [
        ("1 + 0", "1 * 1", "nox -s pair"),
        ("1 + 0", "1 * 1", "nox -s pair", TWIN),
        ("Python 3", "Julia", "metadata", TWIN),
    ],
    checks.notebooks_hold_no_outputs: [
        ('"execution_count": null', '"execution_count": 3', "outputs", TWIN),
    ],
    checks.links_open_their_own_file: [
        ("02_second.ipynb", "01_first.ipynb", "do not open"),
        ("(01_first.ipynb)", "(01_frist.ipynb)", "nowhere"),
        ("(01_first.ipynb)", "(01_first.md)", "link to the notebook"),
    ],
    checks.the_address_is_written_once: [
        (
            "[One]",
            "https://github.com/someone/some-book",
            "README.md names",
            "README.md",
        ),
    ],
    checks.setup_is_the_same: [('["shared-setup"]', '["setup"]', "not tagged")],
    checks.shared_cells_agree: [("import jax", "import jax  # first", "differs")],
    checks.chapters_have_the_skeleton: [
        ("# Add more", "# 2 Add more", "number"),
        ("# Add more", "Add more", "title"),
        ("## Recap", "## Summary", "sections run"),
        ("## Subtract", "### Subtract", "three to six"),
    ],
    checks.cells_are_short: [
        ("assert 1", "x = 1\n" * 26 + "assert 1", "over 25 lines"),
        ("word " * 450, "word", "words"),
        ("".join(code(f"assert {n} + 0 == {n}") for n in range(5)), "", "20 to 36"),
    ],
    checks.markdown_is_portable: [
        ("Done.", ":::{note}\nDone.\n:::", "directive"),
        ("Done.", "{ref}`recap`", "role"),
        ("Done.", "(recap)=\n\nDone.", "label"),
        ("Done.", "![A mesh](mesh.svg)", "image"),
        ("Done.", "Done.<br>", "HTML"),
    ],
    checks.figures_have_alt_text: [
        ("alt: Two bars, the second twice as high.", "width: 90%", "without alt"),
        ("plt.figure()", 'HTML("<svg></svg>")', "without an aria-label"),
    ],
    checks.code_uses_todays_names: [
        ("assert 1 + 0", "jax.tree_map(len, [])", "jax.tree.map"),
        ("assert 1 + 0", "with mesh:", "set_mesh"),
        ('["exercise"]', '["exercise", "raises-exception"]', "try/except"),
    ],
    checks.exercises_have_checked_solutions: [
        ("assert double(1) == 2", "double(1)", "asserts nothing"),
        ('"""Return 2 * x."""', "return", "docstring"),
        ('["solution", "hide-cell"]', '["hide-cell"]', "no cell tagged"),
        ("# @title Solution", "# Solution", "@title"),
        (':cellView: "form"\n', "", "cellView"),
        ("### Exercise 2", "### Riddle 2", "two to four"),
    ],
    checks.contents_match_the_files: [
        ("02_second", "02_secnod", "does not exist", "_toc.yml"),
        ("      - file: notebooks/02_second\n", "", "folder holds", "_toc.yml"),
        ("Every parallelism", "Some parallelism", "has the parts", "_toc.yml"),
        ("02_second", "01_first", "does not link", "README.md"),
    ],
}


def test_every_check_has_a_fault():
    assert set(FAULTS) == set(checks.CHECKS)


@pytest.mark.parametrize(
    "check, fault",
    [(check, fault) for check, faults in FAULTS.items() for fault in faults],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_fault_is_found(book, check, fault):
    old, new, complaint, *file = fault
    edit(book / (file or [SOURCE])[0], old, new)
    assert complaint in "\n".join(check(book))


def test_lone_notebook_is_found(book):
    (book / "notebooks/03_third.ipynb").write_text((book / TWIN).read_text())
    (book / "notebooks/04_fourth.md").write_text(chapter("Add"))
    complaints = "\n".join(checks.notebooks_follow_their_sources(book))
    assert "03_third.ipynb has no source" in complaints
    assert "04_fourth.md has no notebook" in complaints


def test_page_outside_the_contents_is_found(book):
    (book / "book/extra.md").write_text("# Extra\n")
    assert "leaves out" in "\n".join(checks.contents_match_the_files(book))


def test_pairing_twice_changes_nothing(book):
    before = {path: path.read_bytes() for path in (book / "notebooks").iterdir()}
    assert pair.pair(book) == []
    assert before == {
        path: path.read_bytes() for path in (book / "notebooks").iterdir()
    }


def test_pairing_carries_an_edit_of_the_source(book):
    edit(book / SOURCE, "1 + 0 == 1", "1 + 1 == 2")
    assert pair.pair(book) == []
    assert "1 + 1 == 2" in (book / TWIN).read_text()


def test_pairing_follows_the_address(book):
    edit(book / "_config.yml", "someone", "someone-else")
    assert pair.pair(book) == []
    assert "github/someone-else/" in (book / SOURCE).read_text()
    assert "github/someone-else/" in (book / TWIN).read_text()


def test_pairing_keeps_an_edited_notebook(book):
    edit(book / TWIN, "1 + 0 == 1", "1 + 1 == 2")
    edited = (book / TWIN).read_text()
    assert "edited by hand in cells [" in "\n".join(pair.pair(book))
    assert (book / TWIN).read_text() == edited


def test_pairing_names_a_notebook_without_source(book):
    (book / SOURCE).unlink()
    assert "02_second.ipynb has no source" in "\n".join(pair.pair(book))
    assert (book / TWIN).exists()


def test_pairing_clears_outputs(book):
    edit(book / TWIN, '"execution_count": null', '"execution_count": 3')
    assert pair.pair(book) == []
    assert list(checks.notebooks_hold_no_outputs(book)) == []
