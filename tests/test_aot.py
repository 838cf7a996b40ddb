"""The record of other compilers is of the programs as they stand, and says so.

No compiler but the CPU's is needed: what they write is compared by `nox -s aot`.
"""

import json
import re
import subprocess
import sys

import aot
import nbformat
import pytest
from pair import ROOT

RECORD = json.loads((ROOT / "book/measured/aot.json").read_text())
ROWS = RECORD["programs"]
EXPRESSIONS = {
    (aot.CHAPTER, program): aot.made_in_27(program) for program in aot.MADE_IN_27
} | {
    (chapter, program): expression
    for chapter, programs in aot.PROGRAMS.items()
    for program, expression in programs.items()
}
CODE = """
import math
SIZE = 8

def helper(x):
    'Eight times x.'
    return x * SIZE

def step(x):
    y = helper(x)
    return y

def other(x):
    return math.sin(x)

made = {}
for name in "ab":
    made[name] = step
"""


def test_every_program_is_recorded_for_its_chips():
    found = [(row["chapter"], row["program"], row["chip"]) for row in ROWS]
    due = [
        (aot.CHAPTER, program, chip)
        for program, chips in aot.MADE_IN_27.items()
        for chip in chips
    ]
    due += [
        (chapter, program, chip)
        for chapter, programs in aot.PROGRAMS.items()
        for program in programs
        for chip in aot.HERE_TOO
    ]
    assert found == due, "run: nox -s aot -- --record"


@pytest.mark.parametrize("key", EXPRESSIONS, ids=" ".join)
def test_no_program_was_edited_since_it_was_recorded(key):
    rows = [row for row in ROWS if (row["chapter"], row["program"]) == key]
    now = aot.digest(key[0], EXPRESSIONS[key])
    assert {row["digest"] for row in rows} == {now}, "run: nox -s aot -- --record"


def test_the_cell_is_what_was_recorded():
    names = {}
    exec(aot.CELL.read_text(), names)
    made = dict(names["recorded_with"])
    assert made.pop("date") == RECORD["recorded"]
    assert made == RECORD["made with"]
    rows = [row for row in ROWS if row["chapter"] == aot.CHAPTER]
    again = [
        aot.row(aot.CHAPTER, program, chip, aot.made_in_27(program), written)
        for (program, chip), written in names["recorded"].items()
    ]
    assert again == rows
    now, recorded = names["recorded_with"], names["recorded"]
    assert aot.cell_text(aot.CELL.read_text(), now, recorded) == aot.CELL.read_text()


def quotes(chapter: str) -> list[str]:
    """The paragraphs of a chapter that quote the record."""
    cells = nbformat.read(ROOT / f"notebooks/{chapter}.ipynb", as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    named = "[recorded](27_compiling_for_tpus.ipynb)"
    return [part for part in text.split("\n\n") if named in part]


@pytest.mark.parametrize("chapter", aot.PROGRAMS)
def test_a_chapter_quotes_the_record_and_nothing_else(chapter):
    rows = [row for row in ROWS if row["chapter"] == chapter]
    known = {nbytes for row in rows for _, nbytes in row["sent"].values()}
    known |= {sum(nbytes for _, nbytes in row["sent"].values()) for row in rows}
    assert quotes(chapter), "it quotes nothing"
    numbers = re.findall(r"\d+(?:,\d{3})+", " ".join(quotes(chapter)))
    assert {int(number.replace(",", "")) for number in numbers} <= known


def sent(chapter: str, program: str) -> list[dict]:
    """Bytes by kind that a program sends on the CPU, a v5e and an H100."""
    found = []
    for chip in aot.HERE_TOO:
        kinds = {}
        [row] = [
            row
            for row in ROWS
            if row["chapter"].startswith(chapter)
            and (row["program"], row["chip"]) == (program, chip)
        ]
        for name, (_, nbytes) in row["sent"].items():
            kind = name.partition(" ")[0]
            kinds[kind] = kinds.get(kind, 0) + nbytes
        found.append(kinds)
    return found


SAME_EVERYWHERE = [
    ("06", "jit"),
    ("06", "shard_map"),
    ("10", "a poor choice"),
    ("14", "tensor"),
    ("16", "data parallel"),
    ("16", "gather and keep"),
    ("17", "fork and join"),
    ("17", "gather, ring"),
    ("20", "ring"),
    ("22", "tensor 8"),
    ("22", "seq 8"),
]


@pytest.mark.parametrize("key", SAME_EVERYWHERE, ids=" ".join)
def test_what_is_said_to_be_the_same_everywhere_is(key):
    cpu, v5e, h100 = sent(*key)
    assert cpu == v5e == h100


def test_what_chapters_say_of_the_differences():
    cpu, v5e, h100 = sent("10", "ten times in a loop")
    assert v5e == cpu == {"all-reduce": 286_720}
    assert h100 == {"reduce-scatter": 143_360}
    _, v5e, h100 = sent("10", "steered")
    assert "reduce-scatter" in v5e and "reduce-scatter" in h100
    cpu, v5e, h100 = sent("14", "fsdp")
    assert cpu["all-gather"] == v5e["all-gather"] == h100["all-gather"] == 919_744
    assert (cpu["all-reduce"], v5e["all-reduce"], h100["all-reduce"]) == (
        922_061,
        4_557,
        77,
    )
    cpu, v5e, h100 = sent("16", "split, by the compiler")
    assert v5e == h100
    assert cpu["all-gather"] == v5e["all-gather"] == 458_752
    assert v5e["reduce-scatter"] == 229_376
    cpu, v5e, h100 = sent("16", "digits, FSDP")
    assert cpu == h100
    assert v5e["all-reduce"] == 59_213
    cpu, v5e, h100 = sent("17", "jit")
    assert cpu == {"all-reduce": 172_032}
    assert v5e == h100 == {"all-reduce": 114_688}
    _, v5e, _ = sent("17", "gather and scatter")
    assert v5e == {"all-gather": 57_344, "all-reduce": 115_591}
    _, v5e, _ = sent("20", "gather")
    assert v5e["all-reduce"] == 921_095 and "reduce-scatter" not in v5e
    assert all(kinds["all-to-all"] == 229_376 for kinds in sent("20", "by heads"))
    for program in ("pipe 4, data 2", "pipe, data, tensor"):
        cpu, v5e, h100 = sent("22", program)
        assert cpu == v5e
        assert 0 <= sum(cpu.values()) - sum(h100.values()) < 10
    cpu, v5e, h100 = sent("22", "data 8, cut")
    assert cpu == h100
    assert (cpu["all-reduce"], v5e["all-reduce"]) == (4_039, 147_399)


def digest_of(monkeypatch, code: str, expression: str = "step, (SIZE,)") -> str:
    """The digest of an expression of a chapter with this code."""
    cells = [nbformat.v4.new_code_cell(code)]
    monkeypatch.setattr(aot, "code_cells", lambda chapter: cells)
    return aot.digest("a chapter", expression)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x * SIZE", "x + SIZE"),  # a function that the step calls
        ("SIZE = 8", "SIZE = 4"),  # a number that this function reads
        ("return y", "return -y"),
    ],
)
def test_an_edit_that_reaches_the_program_is_noticed(monkeypatch, old, new):
    before = digest_of(monkeypatch, CODE)
    assert digest_of(monkeypatch, CODE.replace(old, new)) != before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("math.sin", "math.cos"),  # another function
        ("Eight times", "Many times"),  # a docstring
        ("    y = helper(x)", "    y = helper(x)  # a comment"),
        ("import math", "import math, os"),
    ],
)
def test_an_edit_of_something_else_is_not(monkeypatch, old, new):
    before = digest_of(monkeypatch, CODE)
    assert digest_of(monkeypatch, CODE.replace(old, new)) == before


def test_what_is_put_into_a_table_belongs_to_it(monkeypatch):
    before = digest_of(monkeypatch, CODE, "made['a']")
    other = CODE.replace("made[name] = step", "made[name] = helper")
    assert digest_of(monkeypatch, other, "made['a']") != before


def test_cells_of_exercises_and_checks_do_not_count(monkeypatch):
    more = nbformat.v4.new_code_cell("SIZE = 9", metadata={"tags": ["check"]})
    cells = [nbformat.v4.new_code_cell(CODE)]
    monkeypatch.setattr(aot, "code_cells", lambda chapter: cells)
    before = aot.digest("a chapter", "step")
    cells.append(more)
    assert aot.digest("a chapter", "step") == before


def changed(**facts) -> list[dict]:
    """The first row of the record with other facts, and the rest as it is."""
    return [ROWS[0] | facts, *ROWS[1:]]


def test_bytes_must_be_equal_and_memory_nearly():
    assert aot.differences(ROWS, ROWS) == []
    kind, (times, nbytes) = next(iter(ROWS[0]["sent"].items()))
    [said] = aot.differences(ROWS, changed(sent={kind: [times, nbytes + 1]}))
    assert "sent was" in said and str(nbytes + 1) in said
    [said] = aot.differences(ROWS, changed(digest="0"))
    assert "digest" in said
    peak = ROWS[0]["peak"]
    assert aot.differences(ROWS, changed(peak=int(1.01 * peak))) == []
    assert len(aot.differences(ROWS, changed(peak=int(1.05 * peak)))) == 1


def test_a_row_too_many_or_too_few_is_told():
    assert "only in the record" in aot.differences(ROWS, ROWS[1:])[0]
    assert "not in the record" in aot.differences(ROWS[1:], ROWS)[0]


def test_without_a_compiler_it_says_what_is_missing():
    tool = [sys.executable, ROOT / "lab/aot.py"]
    ended = subprocess.run(tool, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "nox -s aot" in ended.stderr
    assert "libtpu" in ended.stderr
