"""Test that records of other compilers match the chapters, and are quoted correctly.

`nox -s lab -- aot` compiles again and compares with the record.
"""

import re
from collections import Counter

import aot
import mosaic
import nbformat
import pytest
import record
import schedules

PARTS = record.read("aot")
OTHERS = [name for name in aot.PROGRAMS if name != aot.CHAPTER_27]
SAME = {  # by chapter: programs that send the same bytes on every chip
    "06": ["jit", "shard_map"],
    "10": ["a poor choice"],
    "14": ["tensor"],
    "17": ["f and g", "ring"],
    "20": ["ring"],
    "22": ["tensor 8", "seq 8"],
}
DIFFERENT = {  # bytes sent on the CPU, a v5e and an H100
    ("10", "ten times in a loop", "all-reduce"): (286_720, 286_720, 0),
    ("10", "ten times in a loop", "all"): (286_720, 286_720, 143_360),
    ("10", "steered", "reduce-scatter"): (0, 114_688, 143_360),
    ("14", "fsdp", "all-gather"): (919_744, 919_744, 919_744),
    ("14", "fsdp", "all-reduce"): (922_061, 4_557, 77),
    ("14", "fsdp", "reduce-scatter"): (0, 458_752, 460_992),
    ("16", "split, by the compiler", "all-gather"): (458_752, 458_752, 458_752),
    ("16", "split, by the compiler", "reduce-scatter"): (0, 229_376, 229_376),
    ("16", "digits, FSDP", "all-reduce"): (77, 59_213, 77),
    ("17", "jit", "all"): (172_032, 114_688, 114_688),
    ("17", "sequence parallel", "all-gather"): (57_344, 57_344, 57_344),
    ("17", "sequence parallel", "all-reduce"): (903, 115_591, 903),
    ("20", "gather", "all-reduce"): (7, 921_095, 7),
    ("20", "gather", "reduce-scatter"): (458_752, 0, 458_752),
    ("20", "by heads", "all-to-all"): (229_376, 229_376, 229_376),
    ("22", "pipe 4 data 2", "all"): (406_474, 406_474, 406_471),
    ("22", "pipe 2 data 2 tensor 2", "all"): (1_163_656, 1_163_656, 1_163_654),
    ("22", "fsdp 8", "all-reduce"): (4_039, 147_399, 4_039),
}


def sent(chapter: str, program: str) -> list[Counter]:
    """Return the bytes sent by kind of collective, and of `all`, for each chip."""
    [part] = [part for name, part in PARTS.items() if name.startswith(chapter)]
    found = []
    for row in part["found"]:
        if row["program"] == program:
            kinds = Counter()
            for name, (_, nbytes) in row["sent"].items():
                kinds[name.partition(" ")[0]] += nbytes
            found.append(kinds + Counter(all=kinds.total()))
    return found


@pytest.mark.parametrize("chapter", aot.PROGRAMS)
def test_chapter_has_not_changed_since_it_was_recorded(chapter):
    fix = f"run: nox -s lab -- aot {chapter} --record"
    rows = PARTS[chapter]["found"]
    found = [(row["program"], row["compiled"], row["chip"]) for row in rows]
    assert found == aot.compilations(chapter), fix
    assert record.older(PARTS[chapter]) == [], fix


def test_kernels_have_not_changed_since_they_were_recorded():
    older = record.older(record.read("mosaic")[mosaic.CHAPTER])
    assert older == [], "run: nox -s lab -- mosaic --record"


@pytest.mark.parametrize("variant", schedules.VARIANTS)
def test_schedules_have_not_changed_since_they_were_recorded(variant):
    part = record.read("schedules")[variant]
    chips = tuple(row["chip"] for row in part["found"])
    fix = f"run: nox -s lab -- schedules '{variant}' --record"
    assert (chips, record.older(part)) == (schedules.VARIANTS[variant][1], []), fix


def test_new_values_in_a_record_do_not_change_the_digest(tmp_path, monkeypatch):
    """New code outside the recorded cell does."""
    [file] = aot.files(aot.CHAPTER_27)
    before, text = PARTS[aot.CHAPTER_27]["of"][file], (record.ROOT / file).read_text()
    cell = (record.ROOT / "book/cells/recorded_aot.py").read_text()
    (tmp_path / "book/cells").mkdir(parents=True)
    (tmp_path / "book/cells/recorded_aot.py").write_text(cell.replace("35651584", "0"))
    renewed, edited = tmp_path / "renewed.ipynb", tmp_path / "edited.ipynb"
    renewed.write_text(text.replace("35651584", "0"))
    edited.write_text(text.replace("D, F, TOKENS = 1024", "D, F, TOKENS = 512"))
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.digest(renewed) == before != record.digest(edited)


@pytest.mark.parametrize("chapter", OTHERS)
def test_chapter_quotes_only_recorded_values(chapter):
    [file] = aot.files(chapter)
    cells = nbformat.read(record.ROOT / file, as_version=4).cells
    prose = "\n\n".join(c.source for c in cells if c.cell_type == "markdown")
    link = "[recorded](27_compiling_for_tpus.ipynb)"
    quotes = " ".join(part for part in prose.split("\n\n") if link in part)
    recorded = set()
    for row in PARTS[chapter]["found"]:
        nbytes = [nbytes for _, nbytes in row["sent"].values()]
        recorded |= {*nbytes, sum(nbytes)}
    assert quotes, "the chapter quotes nothing from the record"
    numbers = re.findall(r"\d+(?:,\d{3})+", quotes)
    assert {int(number.replace(",", "")) for number in numbers} <= recorded


@pytest.mark.parametrize("chapter", SAME)
def test_same_programs_send_the_same_bytes(chapter):
    for program in SAME[chapter]:
        cpu, v5e, h100 = sent(chapter, program)
        assert cpu == v5e == h100, program


@pytest.mark.parametrize("chapter, program, kind", DIFFERENT)
def test_different_programs_send_these_bytes(chapter, program, kind):
    found = tuple(kinds[kind] for kinds in sent(chapter, program))
    assert found == DIFFERENT[chapter, program, kind]


def test_one_all_gather_and_four_reduce_scatters_became_loops():
    keys = [(row["program"], row["chip"]) for row in PARTS[aot.CHAPTER_27]["found"]]
    index = keys.index(("fully_sharded_auto", "TPU v5e"))
    order = PARTS[aot.CHAPTER_27]["found"][index]["order"]
    assert order.count("loop of") == 5
    assert order.index("loop of") < order.index("matmul")
