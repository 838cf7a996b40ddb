"""The record of other compilers is of the chapters as they stand, and they quote it.

What those compilers write today, `nox -s lab -- aot` holds against the record.
"""

import re

import aot
import mosaic
import nbformat
import pytest
import record

PARTS = record.read("aot")


@pytest.mark.parametrize("chapter", aot.PROGRAMS)
def test_no_chapter_was_edited_since_it_was_recorded(chapter):
    cure = f"run: nox -s lab -- aot {chapter} --record"
    rows = PARTS[chapter]["found"]
    found = [(row["program"], row["compiled"], row["chip"]) for row in rows]
    assert found == aot.due(chapter), cure
    assert record.older(PARTS[chapter]) == [], cure


def test_a_record_does_not_age_itself(tmp_path, monkeypatch):
    """Another number in a record and in the cell that shows it is no other program."""
    notebook, cell = aot.files(aot.LAST)[0], "book/cells/recorded_aot.py"
    for file in (notebook, cell):
        text = (record.ROOT / file).read_text().replace("35651584", "0")
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    other = tmp_path / "other.ipynb"
    text = (tmp_path / notebook).read_text()
    other.write_text(text.replace("D, F, TOKENS = 1024", "D, F, TOKENS = 512"))
    now = PARTS[aot.LAST]["of"][notebook]
    monkeypatch.setattr(record, "ROOT", tmp_path)
    assert record.digest(tmp_path / notebook) == now != record.digest(other)


def sent(chapter: str, program: str) -> list[dict]:
    """Bytes by kind that a program sends on the CPU, a v5e and an H100."""
    [part] = [part for name, part in PARTS.items() if name.startswith(chapter)]
    found = []
    for row in part["found"]:
        if row["program"] == program:
            kinds = {}
            for name, (_, nbytes) in row["sent"].items():
                kind = name.partition(" ")[0]
                kinds[kind] = kinds.get(kind, 0) + nbytes
            found.append(kinds)
    return found


def quotes(chapter: str) -> str:
    """The paragraphs of a chapter that quote the record."""
    path = record.ROOT / aot.files(chapter)[0]
    cells = nbformat.read(path, as_version=4).cells
    text = "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    named = "[recorded](27_compiling_for_tpus.ipynb)"
    return " ".join(part for part in text.split("\n\n") if named in part)


@pytest.mark.parametrize("chapter", [name for name in aot.PROGRAMS if name != aot.LAST])
def test_a_chapter_quotes_the_record_and_nothing_else(chapter):
    known = set()
    for row in PARTS[chapter]["found"]:
        nbytes = [nbytes for _, nbytes in row["sent"].values()]
        known |= {*nbytes, sum(nbytes)}
    assert quotes(chapter), "it quotes nothing"
    numbers = re.findall(r"\d+(?:,\d{3})+", quotes(chapter))
    assert {int(number.replace(",", "")) for number in numbers} <= known


def test_what_chapters_say_is_the_same_everywhere():
    said = {
        "06": ["jit", "shard_map"],
        "10": ["a poor choice"],
        "14": ["tensor"],
        "17": ["fork and join", "gather, ring"],
        "20": ["ring"],
        "22": ["tensor 8", "seq 8"],
        "30": ["rows, swap"],
    }
    for chapter, programs in said.items():
        for program in programs:
            cpu, v5e, h100 = sent(chapter, program)
            assert cpu == v5e == h100, (chapter, program)


def test_what_chapters_say_of_the_differences():
    cpu, v5e, h100 = sent("10", "ten times in a loop")
    assert cpu == v5e == {"all-reduce": 286_720}
    assert h100 == {"reduce-scatter": 143_360}
    _, v5e, h100 = sent("10", "steered")
    assert 0 < v5e["reduce-scatter"] < h100["reduce-scatter"]
    chips = sent("14", "fsdp")
    assert {kinds["all-gather"] for kinds in chips} == {919_744}
    assert [kinds["all-reduce"] for kinds in chips] == [922_061, 4_557, 77]
    cpu, v5e, h100 = sent("16", "split, by the compiler")
    assert cpu["all-gather"] == v5e["all-gather"] == 458_752
    assert v5e == h100 and v5e["reduce-scatter"] == 229_376
    cpu, v5e, h100 = sent("16", "digits, FSDP")
    assert cpu == h100 and v5e["all-reduce"] == 59_213
    cpu, v5e, h100 = sent("17", "jit")
    assert cpu == {"all-reduce": 172_032}
    assert v5e == h100 == sent("17", "fork and join")[1] == {"all-reduce": 114_688}
    _, v5e, _ = sent("17", "gather and scatter")
    assert v5e == {"all-gather": 57_344, "all-reduce": 115_591}
    _, v5e, _ = sent("20", "gather")
    assert v5e["all-reduce"] == 921_095 and "reduce-scatter" not in v5e
    assert {kinds["all-to-all"] for kinds in sent("20", "by heads")} == {229_376}
    cpu, v5e, h100 = sent("30", "positions, flash")
    assert cpu == h100 and "reduce-scatter" not in v5e
    for program in ("pipe 4, data 2", "pipe, data, tensor"):
        cpu, v5e, h100 = sent("22", program)
        assert cpu == v5e
        assert 0 <= sum(cpu.values()) - sum(h100.values()) < 10
    cpu, v5e, h100 = sent("22", "data 8, cut")
    assert cpu == h100
    assert (cpu["all-reduce"], v5e["all-reduce"]) == (4_039, 147_399)


def test_a_gather_and_four_scatters_became_loops():
    keys = [(row["program"], row["chip"]) for row in PARTS[aot.LAST]["found"]]
    place = keys.index(("fully_sharded_auto", "TPU v5e"))
    order = PARTS[aot.LAST]["found"][place]["order"]
    assert order.count("loop of") == 5
    assert order.index("loop of") < order.index("matmul")


def test_the_kernels_are_those_that_were_recorded():
    older = record.older(record.read("mosaic")[mosaic.CHAPTER])
    assert older == [], "run: nox -s lab -- mosaic --record"
