"""The mutants are what they are meant to be, and a weak chapter lets them pass."""

from pathlib import Path

import checks
import mutants
import pytest
from nbformat.v4 import new_code_cell
from pair import ROOT
from test_checks import HEAD, code

AXES = 'axes = "x", "y"\n'
LAYOUTS = "rows = NamedSharding(mesh, p)\ncolumns = NamedSharding(mesh, q)\n"
BROKEN = {  # a line, and everything that it may become
    'lax.psum(a + b, "x") * 2': [
        "(a + b) * 2",
        "lax.psum(a + b, 'y') * 2",
        'lax.pmean(a + b, "x") * 2',
    ],
    'lax.all_gather(v, ("x", "y"))': [
        "v",
        "lax.all_gather(v, ('x',))",
        "lax.all_gather(v, ('y',))",
    ],
    'lax.pcast(v, "z", to="varying")': ["v"],
    'lax.axis_index("y")': ["0", "lax.axis_index('x')"],
    "(v - w).mean(0)": ["(v - w).sum(0)"],
    'P("x", None)': ["P(None, None)", "P(None, 'x')"],
    'P(("x", "y"))': ["P(None)", "P(('y', 'x'))"],
    "constrain(v @ w, rows) ** 2": ["(v @ w) ** 2", "constrain(v @ w, columns) ** 2"],
    "jax.device_put(v, rows)": ["v", "jax.device_put(v, columns)"],
    'jax.make_mesh((2, 4), ("x", "y"))': ['jax.make_mesh((4, 2), ("x", "y"))'],
    "jax.make_mesh((8,), names)": [],
    "cases = {'f': f, 'g': g}": ["cases = {'g': g}", "cases = {'f': f}"],
    "cases = {name: f}": [],
    "show({'f': f, 'g': g})": [],
    'named(init, ("a", "b"))': [
        "named(init, (None, 'b'))",
        "named(init, ('a', None))",
        "named(init, ('b', 'a'))",
    ],
    'rules = [("batch", both), ("embed", None)]': [
        "rules = [('batch', None), (\"embed\", None)]"
    ],
    "k, m = jax.random.split(key)": ["k, m = jnp.broadcast_to(key, 2)"],
    "jax.random.split(key, n)": ["jnp.broadcast_to(key, n)"],
    "jax.random.fold_in(key, 3)": ["key"],
    "jnp.where(real, v, 0)": ["v"],
    "v * mask": ["v"],
    "v.max(where=real)": ["v.max()"],
    "[(i, (i + 1) % n)]": ["[(i, ((i - 1) % n))]"],
    "total / (n + 1)": ["total"],
    "jax.jit(f, out_shardings=rows)": ["jax.jit(f)"],
    '"é", lax.pmax(v, "z")': ['"é", v', '"é", lax.pmin(v, "z")'],
    "assert lax.psum(v, 'x') / 8 == v.mean()": [],
    "np.testing.assert_allclose(v.sum(), lax.psum(v, 'x'))": [],
    "on_cpu(lax.psum(v, 'x'), 8)": [],
    'print(f"{v.mean()}")': [],
    "text.split(key)": [],
    'folder / "name"': [],
    "'%d' % n": [],
}
ALIASES = "constrain, named = lax.with_sharding_constraint, nn.with_partitioning\n"


def broken(source: str, **metadata: object) -> list[mutants.Mutant]:
    start = new_code_cell(f"%config x = 1\n{AXES}{ALIASES}{LAYOUTS}")
    cell = new_code_cell(source, metadata=metadata)
    return [*mutants.mutants([start, cell])]


@pytest.mark.parametrize("line", BROKEN)
def test_line_is_broken_in_every_way(line):
    found = broken(f"v = w\n{line}\n")
    assert sorted(m.now for m in found) == sorted(BROKEN[line])
    assert {(m.cell, m.line, m.was) for m in found} <= {(1, 2, line)}
    assert all(m.source == f"v = w\n{m.now}\n" for m in found)


@pytest.mark.parametrize(
    "tag, counts",
    [
        ("exercise", [0, 0]),
        ("check", [0, 0]),
        ("hide-input", [1, 0]),
        ("shared-sum", [1, 1]),
    ],
)
def test_stubs_checks_and_hidden_drawings_are_left_alone(tag, counts):
    lines = "v.sum()", "plt.plot(v.sum())"
    assert [len(broken(line, tags=[tag])) for line in lines] == counts


def test_folded_shared_cell_is_left_alone():
    assert broken("v.sum()", tags=["shared-sum", "hide-input"]) == []


def test_wrong_answers_are_left_alone():
    solution = (
        "def answer(v):\n    return v.mean()\n"
        "def total(v):\n    return v.mean() + 1\n"
        "check(answer)\nreject(check, total)\n"
    )
    found = broken(solution, tags=["solution", "hide-cell"])
    assert [(m.line, m.now) for m in found] == [(2, "return v.sum()")]


WAS = "right = [(i + 1) % 4 for i in range(4)]"
RING = "%config x = 1\n" + WAS
CHECK = "assert right == [1, 2, 3, 0]"
NOW = "right = [((i - 1) % 4) for i in range(4)]"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A book of two chapters, of which only the second checks what it says."""
    for folder in ("notebooks", "tools"):
        (tmp_path / folder).mkdir()
    (tmp_path / "tools/equivalent_mutants.txt").write_text("")
    (tmp_path / "notebooks/01_weak.md").write_text(HEAD + code(RING))
    (tmp_path / "notebooks/02_strong.md").write_text(HEAD + code(RING) + code(CHECK))
    return tmp_path


def test_weak_chapter_is_found(book, capfd):
    assert mutants.main(["01_weak"], book) == "fewer than 95% caught"
    printed = capfd.readouterr().out
    assert f"survived: 01_weak.md:11, code cell 1\n    was {WAS}" in printed
    assert f"now {NOW}\n01_weak: 0 of 1 caught" in printed


def test_strong_chapter_passes(book, capfd):
    assert mutants.main(["02_strong"], book) is None
    assert "02_strong: 1 of 1 caught, 1 by checks" in capfd.readouterr().out


def test_waived_mutant_is_not_run(book, capfd):
    waiver = f"01_weak | {WAS} | {NOW} | it only shows the syntax\n"
    (book / "tools/equivalent_mutants.txt").write_text(waiver)
    assert mutants.main([], book) is None
    assert "100.0% of 1 caught; waived: 1" in capfd.readouterr().out


def test_waiver_of_nothing_is_an_error(book):
    (book / "tools/equivalent_mutants.txt").write_text(
        "01_weak | right = 2 | right = 3 | why\n"
    )
    with pytest.raises(
        SystemExit, match=r"no longer exists:\n01_weak \| right = 2 \| right = 3$"
    ):
        mutants.main([], book)


def test_failing_chapter_is_refused(book):
    (book / "notebooks/01_weak.md").write_text(HEAD + code("1 / 0"))
    with pytest.raises(SystemExit, match="01_weak fails before anything is broken"):
        mutants.main(["01_weak"], book)


def test_unknown_chapter_is_named(book):
    assert mutants.main(["03_third"], book) == "no such chapter: 03_third"


def test_how_a_program_ends():
    programs = ["1", "assert False", "1 / 0", "import os; os.kill(os.getpid(), 9)"]
    statuses = mutants.run_all([[program] for program in programs], 60)
    assert statuses == [mutants.SURVIVED, mutants.CHECKED, mutants.RAISED, -9]
    assert mutants.run_all([["while True: pass"]], 1) == [mutants.TIMED_OUT]


def test_the_books_waivers_hold():
    assert mutants.break_book(ROOT).keys() == {
        name for name, *_ in checks.chapters(ROOT)
    }
