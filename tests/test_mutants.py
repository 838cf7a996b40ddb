"""The mutants are what they are meant to be, and a weak chapter is reported."""

import json
from pathlib import Path

import mutants
import pytest
from mutants import CHECKED, RAISED, SURVIVED
from nbformat.v4 import new_code_cell
from pair import ROOT

START = """%config x = 1
axes = "x", "y"
constrain, named = lax.with_sharding_constraint, nn.with_partitioning
rows = NamedSharding(mesh, p)
columns = NamedSharding(mesh, q)
"""
MUTANTS = {  # a line, and everything that it may become
    'lax.psum(v, "x")': ["v", "lax.psum(v, 'y')", 'lax.pmean(v, "x")'],
    'lax.pcast(v, ("x", "y"))': ["v", "lax.pcast(v, ('x',))", "lax.pcast(v, ('y',))"],
    'lax.axis_index("y")': ["0", "lax.axis_index('x')"],
    'P("x", None)': ["P(None, None)", "P(None, 'x')"],
    'P(("x", "y"))': ["P(None)", "P(('y', 'x'))"],
    "constrain(v @ w, rows) ** 2": ["(v @ w) ** 2", "constrain(v @ w, columns) ** 2"],
    'jax.make_mesh((2, 4), ("x", "y"))': ['jax.make_mesh((4, 2), ("x", "y"))'],
    "cases = {'f': f, 'g': g}": ["cases = {'g': g}", "cases = {'f': f}"],
    'named(f, ("a", None))': ["named(f, (None, None))", "named(f, (None, 'a'))"],
    'rules = [("n", x), ("m", None)]': ["rules = [('n', None), (\"m\", None)]"],
    "jax.random.split(key, n)": ["jnp.broadcast_to(key, n)"],
    "jnp.where(real, v * mask, 0)": ["(v * mask)", "jnp.where(real, v, 0)"],
    "[(i, (i + 1) % n)]": ["[(i, ((i - 1) % n))]"],
    '"é", v.max(where=real) / n': ['"é", v.max() / n', '"é", v.max(where=real)'],
    "assert lax.psum(v, 'x') == v.mean()": [],
    "np.testing.assert_allclose(v.sum(), lax.psum(v, 'x'))": [],
    "on_cpu(lax.psum(v, 'x'), 8)": [],
    'print(f"{v.mean()}", folder / "name")': [],
}


def broken(source: str, *tags: str) -> list[mutants.Mutant]:
    cell = new_code_cell(source, metadata={"tags": tags})
    return [*mutants.mutants([new_code_cell(START), cell])]


@pytest.mark.parametrize("line", MUTANTS)
def test_line_is_broken_in_every_way(line):
    found = broken(f"v = w\n{line}\n")
    assert sorted(m.now for m in found) == sorted(MUTANTS[line])
    assert {(m.cell, m.line, m.was) for m in found} <= {(1, 2, line)}
    assert all(m.source == f"v = w\n{m.now}\n" for m in found)


def test_stubs_checks_drawings_and_wrong_answers_are_not_broken():
    for tags in ["exercise"], ["check"], ["shared-sum", "hide-input"]:
        assert not broken("v.sum()", *tags)
    assert broken("v.sum()", "hide-input")
    assert not broken("plt.plot(v.sum())", "hide-input")
    wrong = "def total(v):\n    return v.mean() + 1\nreject(check, total)\n"
    assert not broken(wrong, "solution")


def test_exit_status_names_how_a_program_ends():
    programs = ["1", "assert False", "1 / 0", "import os; os.kill(os.getpid(), 9)"]
    statuses = mutants.run_all([[program] for program in programs], 60)
    assert statuses == [SURVIVED, CHECKED, RAISED, -9]
    [stopped] = mutants.run_all([["while True: pass"]], 1)
    assert stopped < 0
    with pytest.raises(SystemExit, match="fails before anything is broken"):
        mutants.report(Path(__file__), [new_code_cell("1 / 0")])


WAS = "right = [(i + 1) % 4 for i in range(4)]"
NOW = "right = [((i - 1) % 4) for i in range(4)]"
CELL = "```{{code-cell}} ipython3\n{}\n```\n"


def test_weak_chapter_is_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    weak, strong = (tmp_path / f"notebooks/0{n}_a.md" for n in (1, 2))
    weak.write_text(CELL.format(WAS))
    strong.write_text(CELL.format(WAS) + CELL.format("assert right == [1, 2, 3, 0]"))
    found = mutants.measure()
    assert next(found) == ("01_a", {"broken": 1, "caught": 0, "by a check": 0})
    survived = f"survived: 01_a.md:2, code cell 1\n    was {WAS}\n    now {NOW}\n"
    assert survived in capfd.readouterr().out
    assert next(found) == ("02_a", {"broken": 1, "caught": 1, "by a check": 1})
    with pytest.raises(SystemExit, match="fewer than 75% caught: 01_a$"):
        next(found)


def test_recorded_chapters_and_the_book_reach_their_shares():
    recorded = json.loads((ROOT / "book/measured/mutants.json").read_text())
    found = [part["found"] for part in recorded.values()]
    assert min(map(mutants.share_caught, found)) >= mutants.OF_A_CHAPTER
    assert mutants.share_caught(*found) >= mutants.OF_THE_BOOK
