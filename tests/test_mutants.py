"""Test that mutants are generated as intended and that a weak chapter is reported."""

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
MUTANTS = {  # a line: all its mutants
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


def mutants_of(source: str, *tags: str) -> list[mutants.Mutant]:
    cell = new_code_cell(source, metadata={"tags": tags})
    return [*mutants.mutants([new_code_cell(START), cell])]


@pytest.mark.parametrize("line", MUTANTS)
def test_line_has_these_mutants(line):
    found = mutants_of(f"v = w\n{line}\n")
    assert sorted(m.after for m in found) == sorted(MUTANTS[line])
    assert {(m.cell, m.line, m.before) for m in found} <= {(1, 2, line)}
    assert all(m.source == f"v = w\n{m.after}\n" for m in found)


def test_stubs_checks_drawings_and_wrong_answers_have_no_mutants():
    for tags in ["exercise"], ["check"], ["shared-sum", "hide-input"]:
        assert not mutants_of("v.sum()", *tags)
    assert mutants_of("v.sum()", "hide-input")
    assert not mutants_of("plt.plot(v.sum())", "hide-input")
    wrong = "def total(v):\n    return v.mean() + 1\nreject(check, total)\n"
    assert not mutants_of(wrong, "solution")


def test_exit_status_shows_how_a_program_ended():
    programs = ["1", "assert False", "1 / 0", "import os; os.kill(os.getpid(), 9)"]
    statuses = mutants.run_all([[program] for program in programs], 60)
    assert statuses == [SURVIVED, CHECKED, RAISED, -9]
    [timed_out] = mutants.run_all([["while True: pass"]], 1)
    assert timed_out < 0
    with pytest.raises(SystemExit, match="fails without a change"):
        mutants.report(Path(__file__), [new_code_cell("1 / 0")])


BEFORE = "right = [(i + 1) % 4 for i in range(4)]"
AFTER = "right = [((i - 1) % 4) for i in range(4)]"
CELL = "```{{code-cell}} ipython3\n{}\n```\n"


def test_weak_chapter_is_reported(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "notebooks").mkdir()
    weak, strong = (tmp_path / f"notebooks/0{n}_a.md" for n in (1, 2))
    weak.write_text(CELL.format(BEFORE))
    strong.write_text(CELL.format(BEFORE) + CELL.format("assert right == [1, 2, 3, 0]"))
    found = mutants.measure()
    assert next(found) == ("01_a", {"broken": 1, "caught": 0, "by a check": 0})
    survived = f"survived: 01_a.md:2, code cell 1\n  - {BEFORE}\n  + {AFTER}\n"
    assert survived in capfd.readouterr().out
    assert next(found) == ("02_a", {"broken": 1, "caught": 1, "by a check": 1})
    with pytest.raises(SystemExit, match="fewer than 75% caught: 01_a$"):
        next(found)


def test_enough_mutants_are_caught_in_the_record():
    recorded = json.loads((ROOT / "book/measured/mutants.json").read_text())
    found = [part["found"] for part in recorded.values()]
    assert min(map(mutants.share_caught, found)) >= mutants.MIN_CHAPTER
    assert mutants.share_caught(*found) >= mutants.MIN_BOOK
