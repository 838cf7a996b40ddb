"""Every check passes a sound book and finds the faults planted in it."""

import json
import subprocess
from pathlib import Path

import checks
import pair
import pytest
from faults import complaints, each, edit

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

TOC = """\
format: jb-book
root: book/index
meta:
  from_ddp: [notebooks/01_first, notebooks/02_second]
  paths:
    First: { skim: 1 }
    Second: { read: 1-2 }
parts:
  - caption: All
    chapters:
      - file: notebooks/01_first
      - file: notebooks/02_second
"""

README = """\
# Hello

| what you can do after it |
| [Add numbers](notebooks/01_first.ipynb) | add |
| [Add more numbers](notebooks/02_second.ipynb) | add more |

| Chapter |
"""

INDEX = """\
# Hello

:::{container} path
:::

| Chapter |
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

SOLUTION = """\
# @title Solution
def answer(x):
    return x + x


def square(x):
    return x * x


check(answer)
reject(check, square)"""

FIGURE = {"image": {"alt": "Two bars, the second twice as high."}}


def code(source: str, **metadata: object) -> str:
    lines = [f":{key}: {json.dumps(value)}" for key, value in metadata.items()]
    return "\n".join(["", "```{code-cell} ipython3", *lines, "", source, "```", ""])


def chapter(title: str) -> str:
    """A chapter that keeps every rule, in 1,500 words."""
    shared = ["shared-setup", "shared-judge", "hide-input"]
    parts = [f"# {title}\n\n[Open in Colab]()\n\n## What you will learn\n\nTo add.\n"]
    parts += ["\nYou need [the first](01_first.ipynb); about 5 minutes.\n\n## Setup\n"]
    parts += [code("", tags=shared, cellView="form")]
    for section in ("Add", "Subtract", "Multiply"):
        parts.append(f"\n## {section} two numbers\n\n" + "word " * 450 + "\n")
        parts.append("\n> **Predict.** What is it?\n")
        parts.append(code("print(1 + 0)"))
        parts.append(code("assert 1 + 0 == 1"))
    parts += ["\n**Takeaway.** One.\n", "\n## Pitfalls\n\n> **Pitfall.** Two.\n"]
    parts += [code("plt.figure()", mystnb=FIGURE)]
    parts += [code("print(1)"), code("print(2)"), "\n## Exercises\n"]
    for n in (1, 2):
        parts.append(f"\n### Exercise {n}: double\n\nWrite it.\n")
        parts.append(code(EXERCISE, tags=["exercise"]))
        parts.append(code(CHECK, tags=["check", "hide-input"], cellView="form"))
        parts.append(code(SOLUTION, tags=["solution", "hide-cell"], cellView="form"))
    parts += ["\n## Recap\n\nDone.\n\n## Next\n\n[More](02_second.ipynb) "]
    parts += ["word " * 150]
    return HEAD + "".join(parts)


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A small book that passes every check."""
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "book/cells").mkdir(parents=True)
    (tmp_path / "book/cells/setup.py").write_text("# @title Setup\nimport jax\n")
    (tmp_path / "book/cells/judge.py").write_text("# @title Judge\nimport inspect\n")
    (tmp_path / "book/index.md").write_text(INDEX + code("", tags=["shared-setup"]))
    (tmp_path / "_config.yml").write_text(CONFIG)
    (tmp_path / "_toc.yml").write_text(TOC)
    (tmp_path / "README.md").write_text(README)
    (tmp_path / "notebooks/01_first.md").write_text(chapter("Add numbers"))
    (tmp_path / "notebooks/02_second.md").write_text(chapter("Add more numbers"))
    assert pair.pair(tmp_path) == []
    subprocess.check_call(["git", "init", "-q"], cwd=tmp_path)
    subprocess.check_call(["git", "add", "."], cwd=tmp_path)
    return tmp_path


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_sound_book_passes(book, check):
    assert list(check(book)) == []


FIRST = "notebooks/01_first.md"
SOURCE, TWIN = "notebooks/02_second.md", "notebooks/02_second.ipynb"
PLAIN = r"assert 1 \+ 0 == 1"
DENSE = "\n".join(["a, b, c = [(f(x[i]), -x[j] ** 2) for i, j in g(y) if i < j]"] * 9)
# What a fault replaces, by what, what the complaint says; and where, if not in SOURCE.
FAULTS = {
    checks.everything_is_paired: [
        (r"1 \+ 0", "1 * 1", "02_second.ipynb is out of date. Run: nox -s pair"),
        (r"1 \+ 0", "1 * 1", "02_second.ipynb was edited by hand in cells [4]", TWIN),
        (r"\[Open in Colab\].*", "", "lacks '[Open in Colab]()'"),
        ("someone", "someone-else", "02_second.md is out of date", "_config.yml"),
        ("# Add more", "# Add many", "README.md is out of date"),
        (r"about \d", "ten", "02_second.md lacks a title, or 'about N minutes'"),
        ("container} path", "container} way", "one ':::{container} p", "book/index.md"),
        ("Chapter", "Title", "no table whose last column is 'Ch", "book/index.md"),
        (r"01_first\.ipynb\) \| add", "01_one.ipynb) | add", "of no ch", "README.md"),
    ],
    checks.the_address_is_written_once: [
        ("Hello", "https://github.com/someone/some-book", "names", "README.md"),
    ],
    checks.shared_cells_are_in_place: [
        ('"shared-setup", "shared-judge"', '"shared-judge", "shared-setup"', "tagged"),
        (', "hide-input"]', "]", "stands folded, with hide-input"),
    ],
    checks.folded_cells_are_one: [
        ("\n## Add", code("x = 1", tags=["hide-input"]) + "\n## Add", "with 'x = 1'"),
    ],
    checks.chapters_have_the_skeleton: [
        ("# Add more", "# 2 Add more", "number"),
        ("# Add more", "Add more", "title"),
        ("## Recap", "## Summary", "sections run"),
        ("## Subtract", "### Subtract", "three to six"),
    ],
    checks.code_is_for_eyes: [
        (PLAIN, "x = 1\n" * 26, "over 25 lines"),
        (PLAIN, DENSE, "AST nodes a line, over 12"),
    ],
    checks.lessons_have_types: [
        (PLAIN, "def f(x, *n: int): ...", "types to x, what it returns in def f, as"),
        (PLAIN, "async def f(self, *, n) -> int: ...", "types to n in def f, as"),
    ],
    checks.chapters_show_and_tell: [
        ("word " * 450, "word", "words"),
        (r"print\(1\)", "1", "only 9 cells print or draw"),
        (r"\*\*Takeaway", "**Takeout", "no Takeaway. Start a paragraph or a"),
    ],
    checks.predictions_are_left_to_the_reader: [
        (r"print\(1 \+ 0\)", "assert 1 + 0 == 1", "after a Predict checks it"),
    ],
    checks.markdown_is_portable: [
        (r"Done\.", ":::{note}\nDone.\n:::", "directive"),
        (r"Done\.", "{ref}`recap`", "role"),
        (r"Done\.", "(recap)=\n\nDone.", "label"),
        (r"Done\.", "![A mesh](mesh.svg)", "image"),
        (r"Done\.", "Done.<br>", "HTML"),
        (r"\(01_first\.ipynb\)", "(01_first.md)", "a link to a chapter's source"),
    ],
    checks.figures_have_alt_text: [
        ("Two bars, the second twice as high", "Bars", "without alt"),
        (r"plt\.figure\(\)", 'HTML("<svg></svg>")', "without an aria-label"),
    ],
    checks.code_is_of_today: [
        (PLAIN, "jax.tree_map(len, [])", "in place of 'jax.tree_map', jax.tree.map"),
        (r'\["exercise"]', '["exercise", "raises-exception"]', "try/except"),
    ],
    checks.exercises_judge_the_reader: [
        ("### Exercise 2", "### Riddle 2", "two to four"),
        (r'\["check", "hide-input"]', '["hide-input"]', "found ['exercise', 'solu"),
        ("# @title Check", "# Check", "# @title Check and the tag"),
        (r'"solution", "hide-cell"', '"solution"', "the tag hide-cell"),
        (r'    """Return 2 \* x\."""\n', "", "one stub"),
        (r"check\(answer\):", "check(double):", "defines check(answer)"),
        (r"answer\(3\) ==", "answer(3) == answer.twice ==", "uses answer.twice"),
        (r"judge\(check, double\)", "judge(check, check)", "ends with judge"),
        ("def square", "def double", "overwrites the reader's double"),
        (r"check\(answer\)\nreject", "reject", "calls check(answer)"),
        (r"\nreject\(check, square\)", "", "defines a wrong answer"),
        (r"def square\(x\)", "def square(y)", "square has another signature"),
    ],
    checks.paths_are_complete: [
        ("skim: 1", "skim: 2", "'First' has 2 without [1]", "_toc.yml"),
        ("1-2", "1", "chapter 2 is on none of the paths", "_toc.yml"),
        ("You need", "It takes", "starts with 'You need'"),
        ("(first.ipynb.)", r"\1 to [3](03_a.ipynb)", "'Second' has 2 without [3]"),
    ],
    checks.the_path_from_ddp_needs_no_pmap: [
        (PLAIN, "jax.pmap(len)", "on the path from DDP and calls jax.pmap"),
        (PLAIN, "@pmap(axis_name='x')\ndef f(): ...", "and calls pmap("),
        (r"01_first\.ipynb\);", "05_a.ipynb);", "and needs chapters [5]"),
        (r"\[More\].*", "", "links to 02_second, the next", FIRST),
    ],
    checks.contents_match_the_files: [
        (".*02_second\n", "", "out notebooks/02_second: list it", "_toc.yml"),
        ("(.*first\n)(.*second\n)", r"\2\1", "in another order", "_toc.yml"),
        ("add more", "…", "can do after it: [Add more numbers]", "README.md"),
    ],
}


def test_every_check_has_a_fault():
    assert {*FAULTS} == {*checks.CHECKS}


@each(FAULTS, file=SOURCE)
def test_planted_fault_is_found(book, rule, fault):
    assert fault.complaint in complaints(rule, book, fault)


def test_lone_notebook_and_gap_in_the_numbers_are_found(book):
    (book / SOURCE).rename(book / "notebooks/03_second.md")
    assert "02_second.ipynb has no source" in pair.pair(book)[0]
    assert (book / TWIN).exists()
    found = list(checks.chapters_have_the_skeleton(book))
    assert found == ["03_second: chapter 2 in the folder is named 02_slug"]


def test_pairing_keeps_what_it_cannot_place(book):
    edit(book / TWIN, r"1 \+ 0 == 1", "1 + 1 == 2")
    edit(book / "README.md", "01_first", "01_one")
    edited = (book / TWIN).read_text(), (book / "README.md").read_text()
    assert len(pair.pair(book)) == 2
    assert edited == ((book / TWIN).read_text(), (book / "README.md").read_text())


def test_pairing_makes_room_for_a_new_chapter(book):
    (book / SOURCE).rename(book / "notebooks/03_second.md")
    (book / TWIN).unlink()
    (book / SOURCE).with_stem("02_between").write_text(chapter("Add between"))
    edit(book / "_toc.yml", "1-2", "1-3")
    edit(book / "_toc.yml", "02_second]", "03_second]")
    assert pair.pair(book) == []
    assert (book / "notebooks/02_between.ipynb").exists()
    rows = (book / "README.md").read_text(), (book / "book/index.md").read_text()
    assert "| 2 | [Add between](notebooks/02_between.ipynb) | … |" in rows[0]
    assert "| 3 | [Add more numbers](notebooks/03_second.ipynb) | add more |" in rows[0]
    assert "|  | ● | 2. [Add between](../notebooks/02_between.ipynb) |" in rows[1]


def test_explained_cell_stands_open(book, monkeypatch):
    monkeypatch.setattr(checks, "EXPLAINED", {"setup": "02_second", "judge": "none"})
    assert list(checks.shared_cells_are_in_place(book)) == []
    edit(book / SOURCE, '"shared-setup", "shared-judge", ', '"shared-setup", ')
    found = list(checks.shared_cells_are_in_place(book))
    assert found == ["02_second: the cell shared-setup stands open"]


def test_one_source_fills_every_cell(book):
    edit(book / "book/cells/setup.py", "import jax", "import jax.numpy")
    assert pair.pair(book) == []
    assert "# @title Setup\nimport jax.numpy\n" in (book / "book/index.md").read_text()
    for path in (book / "notebooks").glob("*.md"):
        filled = "# @title Setup\nimport jax.numpy\n\n\n# Judge\nimport inspect"
        assert filled in path.read_text()


def test_a_cell_holds_a_program_or_a_part_of_one(book):
    (book / "launch").mkdir()
    parts = "import math\n\n\n# %% one\none = 1\n\n\n# %% two\ntwo = one + 1"
    program = f'"""Adds numbers.\n\nAnd more.\n"""\n\n{parts}\n'
    (book / "launch/adder.py").write_text(program)
    assert pair.shared_text(book, ["adder"]) == f"# @title Adds numbers\n{parts}"
    both = pair.shared_text(book, ["adder-one", "adder-two"])
    assert both == "one = 1\n\n\ntwo = one + 1"
    for name in "adder-three", "none":
        with pytest.raises(ValueError, match=f"no source for shared-{name}"):
            pair.shared_text(book, [name])
