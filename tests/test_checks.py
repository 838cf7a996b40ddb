"""Every check passes a sound book and finds the faults planted in it."""

import json
import subprocess
from pathlib import Path

import checks
import pair
import pytest
from faults import assert_all_planted, complaints, each, edit

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


INDEX = """\
# Hello

| First | Second | Chapter |
|---|---|---|
| ● | ● | 1. [Add](../notebooks/01_first.ipynb) |
| | ● | 2. [Subtract](../notebooks/02_second.ipynb) |
"""

EXERCISE = '''\
def double(x):
    """Return 2 * x."""
    raise NotImplementedError'''

CHECK = """\
# @title Check
def check(answer):
    assert answer(3) == 6, "not twice as much"


judge(check, double)"""

SOLUTION = '''\
# @title Solution
def answer(x):
    """Add."""
    return x + x


def square(x):
    """Right for 2."""
    return x * x


check(answer)
reject(check, square)'''

FIGURE = """
```{code-cell} ipython3
---
mystnb:
  image:
    alt: Two bars, the second twice as high.
---
plt.figure()
```
"""


def code(source: str, **metadata: object) -> str:
    lines = [f":{key}: {json.dumps(value)}" for key, value in metadata.items()]
    return "\n".join(["", "```{code-cell} ipython3", *lines, "", source, "```", ""])


def chapter(title: str) -> str:
    """A chapter that keeps every rule, in 1,500 words."""
    shared = ["shared-setup", "shared-judge", "hide-input"]
    parts = [f"# {title}\n\n[Open in Colab]()\n\n## What you will learn\n\nTo add.\n"]
    parts += ["\nYou need [the first](01_first.ipynb).\n\n## Setup\n"]
    parts += [code("", tags=shared, cellView="form")]
    for section in ("Add", "Subtract", "Multiply"):
        parts.append(f"\n## {section} two numbers\n\n" + "word " * 450 + "\n")
        parts.append("\n> **Predict.** What is it?\n")
        parts.append(code("print(1 + 0)"))
        parts.append(code("assert 1 + 0 == 1"))
    parts += ["\n## Pitfalls\n", FIGURE, "\n## Exercises\n"]
    for n in (1, 2):
        parts.append(f"\n### Exercise {n}: double\n\nWrite it.\n")
        parts.append(code(EXERCISE, tags=["exercise"]))
        parts.append(code(CHECK, tags=["check", "hide-input"], cellView="form"))
        parts.append(code(SOLUTION, tags=["solution", "hide-cell"], cellView="form"))
    parts += ["\n## Recap\n\nDone.\n\n## Next\n\nMore " + "word " * 150]
    return HEAD + "".join(parts)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A small book that passes every check."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book/cells").mkdir(parents=True)
    (tmp_path / "book/cells/setup.py").write_text("# @title Setup\nimport jax\n")
    (tmp_path / "book/cells/judge.py").write_text("# @title Judge\nimport inspect\n")
    (tmp_path / "book/index.md").write_text(INDEX)
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


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_sound_book_passes(book, check):
    assert list(check(book)) == []


SOURCE, TWIN = "notebooks/02_second.md", "notebooks/02_second.ipynb"
INDEX_PAGE = "book/index.md"
PLAIN = r"assert 1 \+ 0 == 1"
DENSE = "\n".join(["a, b, c = [(f(x[i]), -x[j] ** 2) for i, j in g(y) if i < j]"] * 9)
# What a fault replaces, by what, what the complaint says; and where, if not in SOURCE.
FAULTS = {
    checks.notebooks_follow_their_sources: [
        (r"1 \+ 0", "1 * 1", "nox -s pair"),
        (r"1 \+ 0", "1 * 1", "nox -s pair", TWIN),
        ("Python 3", "Julia", "metadata", TWIN),
    ],
    checks.notebooks_hold_no_outputs: [
        ('"execution_count": null', '"execution_count": 3', "outputs", TWIN),
    ],
    checks.links_open_their_own_file: [
        (r"02_second\.ipynb", "01_first.ipynb", "do not open"),
        (r"\(01_first\.ipynb\)", "(01_frist.ipynb)", "nowhere"),
        (r"\(01_first\.ipynb\)", "(01_first.md)", "link to the notebook"),
    ],
    checks.the_address_is_written_once: [
        (
            r"\[One]",
            "https://github.com/someone/some-book",
            "README.md names",
            "README.md",
        ),
    ],
    checks.setup_comes_first: [
        ('"shared-setup", "shared-judge"', '"shared-judge"', "not tagged"),
        ('"shared-setup", "shared-judge"', '"shared-judge", "shared-setup"', "tagged"),
    ],
    checks.shared_cells_have_one_source: [
        ("import jax", "import jax  # first", "cell 2: not as in book/cells"),
        ("import jax", "import jax, time", "nox -s pair", "book/cells/setup.py"),
        ('"shared-judge"', '"shared-jugde"', "book/cells has no ['jugde']"),
    ],
    checks.shared_cells_are_folded: [
        (', "hide-input"]', "]", "stands folded, with hide-input"),
        (':cellView: "form"\n', "", "lacks cellView: form"),
    ],
    checks.folded_cells_are_one: [
        (
            "\n## Add two numbers",
            code("x = 1", tags=["hide-input"]) + "\n## Add two numbers",
            "two folded cells in a row, the second with 'x = 1'",
        ),
    ],
    checks.chapters_have_the_skeleton: [
        ("# Add more", "# 2 Add more", "number"),
        ("# Add more", "Add more", "title"),
        ("## Recap", "## Summary", "sections run"),
        ("## Subtract", "### Subtract", "three to six"),
    ],
    checks.code_is_for_eyes: [
        (PLAIN, "x = 1\n" * 26, "over 25 lines"),
        (PLAIN, DENSE, "AST nodes a line, over 12.5"),
    ],
    checks.chapters_have_a_length: [
        ("word " * 450, "word", "words"),
        ("word " * 450, "word " * 4000, "words"),
    ],
    checks.predictions_are_left_to_the_reader: [
        (r"print\(1 \+ 0\)", "assert 1 + 0 == 1", "after a Predict checks it"),
        (r"print\(1 \+ 0\)", "np.testing.assert_equal(1, 1)", "after a Predict"),
        (r"print\(1 \+ 0\)", "on_cpu(1 + 0, 1)", "after a Predict"),
    ],
    checks.markdown_is_portable: [
        (r"Done\.", ":::{note}\nDone.\n:::", "directive"),
        (r"Done\.", "{ref}`recap`", "role"),
        (r"Done\.", "(recap)=\n\nDone.", "label"),
        (r"Done\.", "![A mesh](mesh.svg)", "image"),
        (r"Done\.", "Done.<br>", "HTML"),
    ],
    checks.figures_have_alt_text: [
        (r"alt: Two bars, the second twice as high\.", "width: 90%", "without alt"),
        (r"plt\.figure\(\)", 'HTML("<svg></svg>")', "without an aria-label"),
    ],
    checks.code_uses_todays_names: [
        (PLAIN, "jax.tree_map(len, [])", "jax.tree.map"),
        (PLAIN, "with mesh:", "set_mesh"),
        (r'\["exercise"]', '["exercise", "raises-exception"]', "try/except"),
    ],
    checks.exercises_judge_the_reader: [
        ("### Exercise 2", "### Riddle 2", "two to four"),
        (r'\["check", "hide-input"]', '["hide-input"]', "found ['exercise', 'solu"),
        (r'\["exercise"]', '["solution"]', "in this order"),
        ("# @title Check", "# Check", "'# @title Check'"),
        ("# @title Solution", "# Solution", "'# @title Solution'"),
        (r'("hide-cell"]\n):cellView: "form"\n', r"\1", "solution lacks cellView"),
        (r'("check", "hide-input"]\n):cellView: "form"\n', r"\1", "check lacks"),
        (r'\["check", "hide-input"]', '["check"]', "check is tagged hide-input"),
        (r'"solution", "hide-cell"', '"solution"', "solution is tagged hide-cell"),
        (r'    """Return 2 \* x\."""\n', "", "one stub"),
        ("    raise NotImplementedError", "    return x", "one stub"),
        (r"check\(answer\):", "check(answer, n=3):", "defines check(answer)"),
        (r"assert answer\(3\) == 6", "answer(3) == 6", "asserts nothing"),
        (r"assert answer\(3\)", "assert double(3)", "judges double, not the answer"),
        (r"answer\(3\) ==", "answer(3, 4) ==", "uses answer(3, 4), which"),
        (r"answer\(3\) ==", "answer() ==", "uses answer(), which"),
        (r"answer\(3\) ==", "answer(3, n=1) ==", "uses answer(3, n=1), which"),
        (r"answer\(3\) ==", "answer(3) == answer.twice ==", "uses answer.twice"),
        (r"judge\(check, double\)", "judge(check, check)", "ends with judge"),
        (r"judge\(check, double\)", "check(double)", "ends with judge"),
        ("def square", "def double", "overwrites the reader's double"),
        (r"check\(answer\)\nreject", "reject", "calls check(answer)"),
        (r"\nreject\(check, square\)", "", "defines a wrong answer"),
        (r"reject\(check, square\)", "reject(check, abs)", "defines a wrong answer"),
        (r"def answer\(x\)", "def answer(x, n=2)", "answer has another signature"),
        (r"def square\(x\)", "def square(y)", "square has another signature"),
    ],
    checks.compiler_facts_go_through_on_cpu: [
        (PLAIN, 'assert n == 1 or device.platform != "cpu"', "goes to on_cpu"),
    ],
    checks.contents_match_the_files: [
        ("02_second", "02_secnod", "does not exist", "_toc.yml"),
        ("      - file: notebooks/02_second\n", "", "folder holds", "_toc.yml"),
        ("Every parallelism", "Some parallelism", "has the parts", "_toc.yml"),
        ("02_second", "01_first", "does not link", "README.md"),
    ],
    checks.paths_are_complete: [
        ("● \\| ● \\| 1", "● | | 1", "'Second' has 02 without ['01']", INDEX_PAGE),
        ("2. .*\n", "", "does not list every chapter", INDEX_PAGE),
        ("Chapter", "Title", "whose last column", INDEX_PAGE),
        ("You need", "It takes", "starts with 'You need'"),
    ],
}


def test_every_check_has_a_fault():
    assert_all_planted(checks.CHECKS, FAULTS)


@each(FAULTS, file=SOURCE)
def test_planted_fault_is_found(book, rule, fault):
    assert fault.complaint in complaints(rule, book, fault)


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
    edit(book / SOURCE, r"1 \+ 0 == 1", "1 + 1 == 2")
    assert pair.pair(book) == []
    assert "1 + 1 == 2" in (book / TWIN).read_text()


def test_pairing_follows_the_address(book):
    edit(book / "_config.yml", "someone", "someone-else")
    assert pair.pair(book) == []
    assert "github/someone-else/" in (book / SOURCE).read_text()
    assert "github/someone-else/" in (book / TWIN).read_text()


def test_pairing_keeps_an_edited_notebook(book):
    edit(book / TWIN, r"1 \+ 0 == 1", "1 + 1 == 2")
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


def test_unused_shared_cell_is_found(book):
    (book / "book/cells/draw.py").write_text("# @title Draw\n")
    found = list(checks.shared_cells_have_one_source(book))
    assert found == ["no chapter or page uses book/cells/draw.py"]


def test_explained_cell_stands_open(book, monkeypatch):
    monkeypatch.setattr(checks, "EXPLAINED", {"setup": "02_second", "judge": "none"})
    assert list(checks.shared_cells_are_folded(book)) == []
    edit(book / SOURCE, '"shared-setup", "shared-judge", ', '"shared-setup", ')
    found = list(checks.shared_cells_are_folded(book))
    assert found == ["02_second: the cell shared-setup stands open"]


def test_need_of_a_range_of_chapters_is_read(book):
    text = "You need [one](01_first.ipynb) to [three](03_third.ipynb)."
    edit(book / SOURCE, "You need .*", text)
    edit(book / INDEX_PAGE, "● \\| ● \\| 1", "● | | 1")
    found = "\n".join(checks.paths_are_complete(book))
    assert "'Second' has 02 without ['01', '02', '03']" not in found
    assert "'Second' has 02 without ['01', '03']" in found


def test_one_source_fills_every_cell(book):
    edit(book / "book/cells/setup.py", "import jax", "import jax.numpy")
    assert pair.pair(book) == []
    for name in ("01_first", "02_second"):
        text = (book / f"notebooks/{name}.md").read_text()
        assert "# @title Setup\nimport jax.numpy\n\n\n# Judge\nimport inspect" in text
    assert list(checks.shared_cells_have_one_source(book)) == []


def test_pages_of_the_book_are_filled_too(book):
    (book / "book/index.md").write_text(INDEX + code("old", tags=["shared-judge"]))
    assert pair.pair(book) == []
    assert "# @title Judge\nimport inspect" in (book / "book/index.md").read_text()


def test_cell_without_a_source_is_named_and_nothing_lost(book):
    edit(book / SOURCE, '"shared-judge"', '"shared-jugde"')
    before = (book / SOURCE).read_text()
    (problem,) = pair.pair(book)
    assert "02_second.md has a cell tagged shared-jugde" in problem
    assert (book / SOURCE).read_text() == before
