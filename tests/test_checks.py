"""Test that each rule passes a correct book and reports planted faults."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import checks
import jupyter_client
import pages
import pair
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_notebook, new_output

FIRST, SECOND = "notebooks/01_jax_for_pytorch_users", "notebooks/02_train_on_one_device"
SOURCE, TWIN, INDEX = f"{SECOND}.md", f"{SECOND}.ipynb", "book/index.md"
README = "README.md"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A copy of the first page, README, two chapters and their sources."""
    for file in f"{FIRST}.md", SOURCE, INDEX, README, "_config.yml":
        (tmp_path / file).parent.mkdir(exist_ok=True)
        shutil.copy(pair.ROOT / file, tmp_path / file)
    for folder in "book/cells", "launch":
        shutil.copytree(pair.ROOT / folder, tmp_path / folder)
    lists = {"course": {FIRST: "Begin.", SECOND: "Go on."}, "ddp": {SECOND: None}}
    toc = {"root": "book/index", "meta": lists}
    toc["parts"] = [{"chapters": [{"file": FIRST}, {"file": SECOND}]}]
    (tmp_path / "_toc.yml").write_text(yaml.safe_dump(toc))
    assert pair.pair(tmp_path) == []
    subprocess.check_call(["git", "init", "-q"], cwd=tmp_path)
    subprocess.check_call(["git", "add", "."], cwd=tmp_path)
    return tmp_path


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_correct_book_passes(book, check):
    assert list(check(book)) == []


def edit(path: Path, old: str, new: str) -> None:
    """Replace all matches of a regular expression, and fail if there is none."""
    text, found = re.subn(old, new, path.read_text())
    assert found, f"{path.name}: nothing matches {old!r}"
    path.write_text(text)


def insert(text: str) -> tuple[str, str]:
    """Replace the heading of the pitfalls by this text and that heading."""
    return "\n## Pitfalls", f"\n{text}\n\n## Pitfalls"


def code(source: str, *tags: str) -> tuple[str, str]:
    """Insert a code cell before the pitfalls."""
    head = f":tags: {json.dumps(tags)}\n\n" if tags else ""
    return insert(f"```{{code-cell}} ipython3\n{head}{source}\n```")


DENSE = "\n".join(["a, b, c = [(f(x[i]), -x[j] ** 2) for i, j in g(y) if i < j]"] * 99)
CHECK = "\n```{code-cell} ipython3\nassert True\n```"
ADDRESS = yaml.safe_load((pair.ROOT / "_config.yml").read_text())["repository"]["url"]
# Each fault: pattern, replacement, part of the message, and the file if not SOURCE.
FAULTS = {
    checks.everything_is_paired: [
        ("print", "repr", f"{TWIN} is out of date. Run: nox -s pair"),
        ("print", "repr", "02_train_on_one_device.ipynb was edited", TWIN),
        (r"\[Open in Colab\].*", "", "lacks '[Open in Colab]()'"),
        ("shared-digits", "shared-digit", "02_train_on_one_device.md: book/cells and"),
        ("url: ", "url: https://other/", f"{SOURCE} is out of date", "_config.yml"),
        ("# Train on one", "# Train on a", "book/index.md is out of date"),
        ("# Train on one", "# Train on a", "README.md is out of date"),
        (r"bout \d+ minutes", "bout ten", "lacks a title, or 'about N minutes'"),
        ("<!-- course -->", "", "README.md is not updated: it needs one", README),
        (f"{FIRST}: ", "notebooks/09_gone: ", "09_gone.md is in _toc.yml", "_toc.yml"),
        ("Begin", "Begin here", "book/index.md is out of date", "_toc.yml"),
    ],
    checks.the_address_is_written_once: [("# Parallel", ADDRESS, "names", INDEX)],
    checks.shared_cells_are_in_place: [
        ("shared-setup, shared-on_cpu", "shared-on_cpu, shared-setup", "not tagged"),
        (", shared-judge, hide-input", ", shared-judge", "folded, with hide-input"),
        (r"\[shared-digits\]", "[shared-digits, hide-input]", "digits must be open"),
    ],
    checks.folded_cells_are_one: [
        (
            *code(
                "x = 1\n```\n\n```{code-cell} ipython3\n:tags: [hide-input]\n\ny = 2",
                "hide-input",
            ),
            "the second with 'y = 2'",
        ),
    ],
    checks.chapters_have_the_skeleton: [
        ("# Train on", "# 2 Train on", "number"),
        ("\n# Train on", "\nTrain on", "title"),
        ("## Recap", "## Summary", "sections must be"),
        (*insert("## A section\n\n" * 4), "three to six"),
    ],
    checks.code_is_easy_to_read: [
        (*code("x = 1\n" * 26), "over 25 lines"),
        (*code(DENSE), "AST nodes per line, more than 12"),
    ],
    checks.lessons_have_types: [
        (*code("def f(x, n: int) -> int: ..."), "add type hints to def f"),
        (*code("async def f(self, n: int): ..."), "add type hints to def f"),
    ],
    checks.chapters_show_and_tell: [
        (*insert("word " * 3600), "words"),
        (r"(?m)^( *)(print|plt\.\w+|draw_\w+|HTML|judge|reject)\(", r"\1f(", "only 0"),
        (r"\*\*Takeaway", "**Takeout", "no paragraph starts with **Takeaway.**"),
    ],
    checks.predictions_are_left_to_the_reader: [
        (*insert(f"**Predict.** Is it?\n{CHECK}"), "after a Predict has a check"),
    ],
    checks.markdown_is_portable: [
        (*insert(":::{note}\nDone.\n:::"), "directive"),
        (*insert("{ref}`recap`"), "role"),
        (*insert("(recap)="), "label"),
        (*insert("![A mesh](mesh.svg)"), "image"),
        (*insert("Done.<br>"), "HTML"),
        (*insert("[One](01_first.md)"), "a link to a chapter's source"),
    ],
    checks.drawings_in_html_have_a_label: [
        (*code('HTML("<svg></svg>")'), "has no aria-label"),
    ],
    checks.code_is_of_today: [
        (*code("jax.tree_map(len, [])"), "out of date; use jax.tree.map"),
        (r"\[exercise\]", "[exercise, raises-exception]", "try/except"),
    ],
    checks.exercises_judge_the_reader: [
        ("### Exercise ", "### Riddle ", "two to four"),
        (r"\[check, hide-input]", "[hide-input]", "three cells must have the tags"),
        ("# @title Check", "# Check", "tagged check must start with # @title Check"),
        ("# @title Solution", "# Solution", "must start with # @title Solution"),
        ("    raise NotImplementedError\n```", "    pass\n```", "one stub"),
        (r"def check\(answer", "def check(found", "must define check(answer)"),
        (r"(def check\(answer.*\n)", r"\1    answer.twice\n", "uses answer.twice"),
        (r"judge\(check, ", "judge(answer, ", "must end with judge"),
        (
            r"(?s)(judge\(check, (\w+)\).*?# @title Solution\n)",
            r"\1def \2(): ...\n\n",
            "the solution overwrites the reader's",
        ),
        (r"\ncheck\(answer\)\n", "\n", "call check(answer)"),
        (r"reject\(check, ", "reject(judge, ", "must define a wrong answer"),
        (r"def answer\(", "def answer(first, ", "the signature of answer must be"),
    ],
    checks.the_course_builds_on_itself: [
        (f"    {FIRST}: Begin.\n", "", "is in the course of _toc.yml and", "_toc.yml"),
        (r"01_jax_\w+\.ipynb\), but", "05_a.ipynb), but", "and needs [5]"),
        ("You need", "It takes", "starts with 'You need'"),
    ],
    checks.contents_match_the_files: [
        (f"  - file: {SECOND}\n", "", f"out {SECOND}: list it", "_toc.yml"),
        (r"(.*file:.*\n)(.*file:.*\n)", r"\2\1", "in another order", "_toc.yml"),
    ],
}


def test_every_rule_has_a_planted_fault():
    assert {*FAULTS} == {*checks.CHECKS}


PLANTED = [(rule, fault) for rule, faults in FAULTS.items() for fault in faults]


@pytest.mark.parametrize(
    "rule, fault",
    PLANTED,
    ids=[f"{rule.__name__}-{fault[2]}" for rule, fault in PLANTED],
)
def test_planted_fault_is_reported(book, rule, fault):
    old, new, message, *where = fault
    edit(book / (where[0] if where else SOURCE), old, new)
    assert message in "\n".join(rule(book))


def test_missing_source_and_gap_in_numbers_are_reported(book):
    (book / SOURCE).rename(book / "notebooks/03_train.md")
    assert "02_train_on_one_device.ipynb has no source" in pair.pair(book)[0]
    assert (book / TWIN).exists()
    found = list(checks.chapters_have_the_skeleton(book))
    assert found == ["03_train: the file of chapter 2 must be 02_slug"]


def test_pairing_keeps_an_edit_of_a_notebook(book):
    edit(book / TWIN, "print", "repr")
    edited = (book / TWIN).read_text()
    assert len(pair.pair(book)) == 1
    assert (book / TWIN).read_text() == edited


def test_pairing_fills_new_chapters_and_shared_cells(book):
    text = (book / SOURCE).read_text().replace("# Train on one", "# Train on a")
    (book / SOURCE).with_stem("03_train").write_text(text)
    edit(book / "_toc.yml", "  ddp:", "    notebooks/03_train: End.\n  ddp:")
    edit(book / "book/cells/setup.py", "import time", "import time  # new")
    assert pair.pair(book) == []
    minutes = f"({pair.MINUTES.search(text)[1]} minutes)"
    for page, folder in (INDEX, "../notebooks"), (README, "notebooks"):
        line = f"- [3. Train on a device]({folder}/03_train.ipynb) {minutes}. End."
        assert line in (book / page).read_text()
    for path in (book / "notebooks").iterdir():
        assert "import time  # new" in path.read_text(), path.name
    assert len([*(book / "notebooks").iterdir()]) == 6


def test_shared_text_is_a_program_or_a_part_of_one(tmp_path):
    (tmp_path / "launch").mkdir()
    parts = "import math\n\n\n# %% one\none = 1\n\n\n# %% two\ntwo = one + 1"
    program = f'"""Add numbers.\n\nAnd more.\n"""\n\n{parts}\n'
    (tmp_path / "launch/adder.py").write_text(program)
    assert pair.shared_text(tmp_path, ["adder"]) == f"# @title Add numbers\n{parts}"
    both = pair.shared_text(tmp_path, ["adder-one", "adder-two"])
    assert both == "one = 1\n\n\ntwo = one + 1"
    for name in "adder-three", "none":
        with pytest.raises(ValueError, match=f"no source for shared-{name}"):
            pair.shared_text(tmp_path, [name])


def test_page_that_stops_early_has_a_fault():
    cells = [new_code_cell("1 / 0", execution_count=1), new_code_cell("last()")]
    page = new_notebook(cells=cells)
    assert pages.faults(page) == "stopped in this cell:\n1 / 0"
    cells[1].execution_count = 2
    assert pages.faults(page) == ""
    cells[1].outputs = [new_output("stream", name="stderr", text="a warning")]
    assert pages.faults(page) == "wrote to stderr:\na warning"


def test_kernels_listen_on_sockets(tmp_path):
    pages.mirror(tmp_path, [])
    assert (tmp_path / "conftest.py").exists()
    assert jupyter_client.AsyncKernelManager().transport == "ipc"
