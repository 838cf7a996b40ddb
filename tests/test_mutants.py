"""The mutants are what they are meant to be, and a weak chapter lets them pass."""

from pathlib import Path

import mutants
import pytest
from nbformat.v4 import new_code_cell
from test_checks import HEAD, code

AXES = 'axes = "x", "y"\n'
LAYOUTS = "rows = NamedSharding(mesh, p)\ncolumns = NamedSharding(mesh, q)\n"
ALIASES = "constrain, named = lax.with_sharding_constraint, nn.with_partitioning\n"
BROKEN = {  # a line, and everything that it may become
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
    "jnp.where(real, v, 0)": ["v"],
    "v * mask": ["v"],
    "v.max(where=real)": ["v.max()"],
    "[(i, (i + 1) % n)]": ["[(i, ((i - 1) % n))]"],
    "total / (n + 1)": ["total"],
    "jax.jit(f, out_shardings=rows)": ["jax.jit(f)"],
    '"é", lax.pmax(v, "z")': ['"é", v', '"é", lax.pmin(v, "z")'],
    "assert lax.psum(v, 'x') == v.mean()": [],
    "np.testing.assert_allclose(v.sum(), lax.psum(v, 'x'))": [],
    "on_cpu(lax.psum(v, 'x'), 8)": [],
    'print(f"{v.mean()}")': [],
    'folder / "name"': [],
}


def broken(source: str, *tags: str) -> list[mutants.Mutant]:
    start = new_code_cell(f"%config x = 1\n{AXES}{ALIASES}{LAYOUTS}")
    cell = new_code_cell(source, metadata={"tags": tags})
    return [*mutants.mutants([start, cell])]


@pytest.mark.parametrize("line", BROKEN)
def test_line_is_broken_in_every_way(line):
    found = broken(f"v = w\n{line}\n")
    assert sorted(m.now for m in found) == sorted(BROKEN[line])
    assert {(m.cell, m.line, m.was) for m in found} <= {(1, 2, line)}
    assert all(m.source == f"v = w\n{m.now}\n" for m in found)


def test_stubs_checks_drawings_and_wrong_answers_are_left_alone():
    for tags in ["exercise"], ["check"], ["shared-sum", "hide-input"]:
        assert not broken("v.sum()", *tags)
    assert broken("v.sum()", "hide-input")
    assert not broken("plt.plot(v.sum())", "hide-input")
    wrong = "def total(v):\n    return v.mean() + 1\nreject(check, total)\n"
    assert not broken(wrong, "solution")


WAS = "right = [(i + 1) % 4 for i in range(4)]"
NOW = "right = [((i - 1) % 4) for i in range(4)]"
CHECK = "assert right == [1, 2, 3, 0]"


@pytest.fixture
def book(tmp_path: Path, monkeypatch) -> Path:
    """A book of two chapters, of which only the second checks what it says."""
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    for folder in ("notebooks", "tools"):
        (tmp_path / folder).mkdir()
    ring = HEAD + code(f"%config x = 1\n{WAS}")
    (tmp_path / "notebooks/01_weak.md").write_text(ring)
    (tmp_path / "notebooks/02_strong.md").write_text(ring + code(CHECK))
    (tmp_path / "tools/equivalent_mutants.txt").touch()
    return tmp_path


def test_what_a_weak_chapter_lets_pass_is_told(book, capfd):
    found = mutants.measure()
    assert next(found) == ("01_weak", {"broken": 1, "caught": 0, "by a check": 0})
    survived = f"survived: 01_weak.md:11, code cell 1\n    was {WAS}\n    now {NOW}\n"
    assert survived in capfd.readouterr().out
    assert next(found) == ("02_strong", {"broken": 1, "caught": 1, "by a check": 1})
    with pytest.raises(SystemExit, match="fewer than 95% caught: 01_weak$"):
        next(found)


def test_what_is_waived_is_not_run_and_must_exist(book):
    waived = book / "tools/equivalent_mutants.txt"
    waived.write_text(f"01_weak | {WAS} | {NOW} | it only shows the syntax\n")
    assert dict(mutants.measure("01_weak"))["01_weak"]["broken"] == 0
    waived.write_text("01_weak | right = 2 | right = 3 | why\n")
    with pytest.raises(SystemExit, match=r"no longer there:\n01_weak \| right = 2"):
        next(mutants.measure())


def test_how_a_program_ends():
    programs = ["1", "assert False", "1 / 0", "import os; os.kill(os.getpid(), 9)"]
    statuses = mutants.run_all([[program] for program in programs], 60)
    assert statuses == [mutants.SURVIVED, mutants.CHECKED, mutants.RAISED, -9]
    assert mutants.run_all([["while True: pass"]], 1) == [mutants.TIMED_OUT]
    with pytest.raises(SystemExit, match="fails before anything is broken"):
        mutants.report(Path(__file__), [new_code_cell("1 / 0")], [])


def test_the_books_waivers_hold():
    assert mutants.break_book()
