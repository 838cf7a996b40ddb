"""Change each chapter in one place at a time, and check that a cell fails.

Run by `nox -s lab -- mutants [CHAPTER ...]`. A mutant is a chapter with one change: a
collective removed, a mean instead of a sum, another mesh, axis or layout, a key used
twice, a mask or a case removed. A mutant is caught if a cell fails. Survivors are
printed: either a check is missing, or the change makes no difference.
"""

import ast
import multiprocessing
import os
import re
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from checks import calls, chapters, shared_names, syntax, tags
from IPython.core.interactiveshell import InteractiveShell
from nbformat import NotebookNode
from pair import ROOT
from traitlets.config import Config

MIN_CHAPTER, MIN_BOOK = 0.75, 0.9  # minimum share of mutants that must be caught
WORKERS = 2
SERVER = multiprocessing.get_context("forkserver")
SURVIVED, CHECKED, RAISED = 0, 1, 2  # exit statuses; negative after a signal
SETTINGS = {
    "PYTHONPATH": str(Path(__file__).parent),  # where the server finds this module
    "OPENBLAS_NUM_THREADS": "1",  # forking is safe only without other threads
    "MPLBACKEND": "Agg",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}

REDUCE = {"psum", "pmean", "pmax", "pmin"}
MOVE = {"all_gather", "psum_scatter", "all_to_all", "ppermute", "pbroadcast", "pcast"}
PLACE = {"device_put", "reshard", "with_sharding_constraint", "with_logical_constraint"}
DROP = REDUCE | MOVE | PLACE  # f(x, ...) becomes x
DROP |= {"mark_varying", "fold_in", "stop_gradient"}
SPEC = {"with_partitioning", "with_logical_partitioning", "with_logical_constraint"}
ALONG = REDUCE | MOVE | {"axis_index"}
OPTIONS = {"in_shardings", "out_shardings", "donate_argnums", "where"}
SWAP = {"psum": "pmean", "pmean": "psum", "pmax": "pmin", "pmin": "pmax"}
SWAP |= {"mean": "sum", "sum": "mean"}
CHECKS = r"^(on_cpu|check|reject|judge)$|\.testing\."  # names of functions that check


Edits = Iterator[tuple[ast.AST, ast.AST]]  # a node to replace, and its replacement


class Mutant(NamedTuple):
    """A code cell with one change."""

    cell: int  # index among the code cells, from 0
    line: int  # line number in the cell, from 1
    before: str  # that line
    after: str
    source: str  # of the changed cell


def last_name(node: ast.AST) -> str:
    return getattr(node, "attr", getattr(node, "id", ""))


def aliases(tree: ast.AST) -> dict[str, str]:
    """Map the aliases that a program assigns to the names that they stand for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            sides = (getattr(s, "elts", [s]) for s in (node.targets[0], node.value))
            found |= {last_name(new): last_name(old) for new, old in zip(*sides)}
    return found


def other_axes(tree: ast.AST) -> dict[str, str]:
    """Map each axis to another axis of its mesh, taken from a tuple with both names."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Tuple([ast.Constant(str(first)), ast.Constant(str(second))]):
                found = {first: second, second: first} | found
    return found


def other_shardings(tree: ast.AST) -> dict[str, str]:
    """Map the name of each sharding to that of another one in the program."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign([target, *_], ast.Call(func)):
                found |= {last_name(target): last_name(func)}
    names = [name for name, func in found.items() if func == "NamedSharding"]
    return dict(zip(names, names[1:] + names[:1])) if len(names) > 1 else {}


def mutable(tree: ast.AST, wrong: set[str]) -> Iterator[ast.AST]:
    """Walk over a program, except checks, f-strings, and the functions named in
    `wrong`, which are wrong on purpose."""
    match tree:
        case ast.FunctionDef(name) if name in wrong:
            return
        case ast.Call(func) if re.search(CHECKS, ast.unparse(func)):
            return
        case ast.Assert() | ast.JoinedStr():
            return
    yield tree
    for child in ast.iter_child_nodes(tree):
        yield from mutable(child, wrong)


def layouts(entries: list[ast.expr]) -> Iterator[list[ast.expr]]:
    """Yield specs with an entry removed, two entries swapped, or a tuple reversed."""
    for i, entry in enumerate(entries):
        before, after = entries[:i], entries[i + 1 :]
        if ast.unparse(entry) != "None":
            yield [*before, ast.Constant(None), *after]
        if isinstance(entry, ast.Tuple):
            yield [*before, ast.Tuple(entry.elts[::-1]), *after]
        if before and ast.unparse(entry) != ast.unparse(before[-1]):
            yield [*before[:-1], entry, before[-1], *after]


def edits(node: ast.AST, full_names: dict, other: dict) -> Edits:
    """Yield the changes of one node; `other` has replacements of axes and shardings."""
    match node:
        case ast.Attribute(value, attr) if attr in SWAP:
            yield node, ast.Attribute(value, SWAP[attr])
        case ast.BinOp(ast.BinOp(a, ast.Add() | ast.Sub() as sign, b), ast.Mod(), n):
            opposite = ast.Sub() if isinstance(sign, ast.Add) else ast.Add()
            yield node, ast.BinOp(ast.BinOp(a, opposite, b), ast.Mod(), n)
        case ast.BinOp(a, ast.Mult(), b):
            sides = (a, b), (b, a)
            yield from ((node, x) for x, m in sides if "mask" in last_name(m))
        case ast.BinOp(a, ast.Div(), b) if not re.search("['\"]", ast.unparse(b)):
            yield node, a
        case ast.Assign(value=ast.Dict([_, _, *_] as keys, values) as cases):
            for i in range(len(keys) if None not in keys else 0):
                rest = [part[:i] + part[i + 1 :] for part in (keys, values)]
                yield cases, ast.Dict(*rest)
        case ast.List(rules):
            for rule in rules:
                match rule:
                    case ast.Tuple([ast.Constant(str()) as name, _]):
                        yield rule, ast.Tuple([name, ast.Constant(None)])
        case ast.Call(func):
            name = full_names.get(last_name(func)) or last_name(func)
            yield from call_edits(node, name, other)


def call_edits(call: ast.Call, name: str, other: dict) -> Edits:
    """Yield the changes of a call of the function with this full name."""
    func, args, keywords = call.func, call.args, call.keywords
    if name in DROP and args and not isinstance(args[0], ast.Starred):
        yield call, args[0]
    if name == "where" and len(args) == 3:
        yield call, args[1]
    if name == "axis_index":
        yield call, ast.Constant(0)
    match args:
        case [ast.Tuple([first, second] as sides), *_] if name == "make_mesh":
            if ast.unparse(first) != ast.unparse(second):
                yield args[0], ast.Tuple(sides[::-1])
        case [_, ast.Name(layout)] if name in PLACE and layout in other:
            yield args[1], ast.Name(other[layout])
    if name == "split" and "random" in ast.unparse(func):
        count = args[1] if len(args) > 1 else ast.Constant(2)
        yield call, ast.Call(ast.Name("jnp.broadcast_to"), [args[0], count], [])
    if name in ("P", "PartitionSpec"):
        yield from ((call, ast.Call(func, new, [])) for new in layouts(args))
    for arg in (*args, *(keyword.value for keyword in keywords)):
        match arg:
            case ast.Constant(axis) if name in ALONG and axis in other:
                yield arg, ast.Constant(other[axis])
            case ast.Tuple([ast.Constant(), ast.Constant()] as axes) if name in ALONG:
                yield from ((arg, ast.Tuple([axis])) for axis in axes)
            case ast.Tuple(entries) if name in SPEC:
                yield from ((arg, ast.Tuple(new)) for new in layouts(entries))
    for keyword in keywords:
        if keyword.arg in OPTIONS:
            yield call, ast.Call(func, args, [k for k in keywords if k is not keyword])


def replaced(source: str, node: ast.AST, new: ast.AST) -> str:
    """Return the source with one node replaced; ast counts columns in bytes."""
    text = ast.unparse(new)
    if isinstance(new, ast.BinOp | ast.Lambda | ast.UnaryOp | ast.IfExp):
        text = f"({text})"
    code = source.encode()
    lines = code.splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (code[:start] + text.encode() + code[end:]).decode()


def is_excluded(cell: NotebookNode) -> bool:
    """Return whether a cell is a stub, a check, a drawing, or a folded shared cell,
    which has its own tests."""
    if {"exercise", "check"} & {*tags(cell)}:
        return True
    draws = re.search(r"\bplt\.|\bdraw_", cell.source)
    return "hide-input" in tags(cell) and bool(draws or shared_names(cell))


def mutants(cells: list[NotebookNode]) -> Iterator[Mutant]:
    """Yield the mutants of a notebook with these code cells."""
    program = ast.Module([syntax(cell.source) for cell in cells], [])
    full_names, other = aliases(program), other_axes(program) | other_shardings(program)
    for index, cell in enumerate(cells):
        if is_excluded(cell):
            continue
        wrong = {arguments[-1] for arguments in calls(cell, "reject")}
        tree = syntax(cell.source)
        seen = {ast.dump(tree)}
        for node in mutable(tree, wrong):
            for old, new in edits(node, full_names, other):
                source = replaced(cell.source, old, new)
                mutant = ast.dump(syntax(source))
                if mutant not in seen:
                    seen.add(mutant)
                    before, after = (
                        text.splitlines()[old.lineno - 1].strip()
                        for text in (cell.source, source)
                    )
                    yield Mutant(index, old.lineno, before, after, source)


def execute(sources: list[str], seconds: float) -> None:
    """Run cells and end this process, with SIGALRM if they take too long."""
    status = RAISED
    try:
        signal.alarm(round(seconds))
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        from matplotlib_inline.config import InlineBackend  # imports NumPy

        quiet = Config(HistoryManager={"enabled": False})
        shell = InteractiveShell.instance(config=quiet)
        shell.configurables.append(InlineBackend.instance(parent=shell))
        shell.showtraceback = lambda *_, **__: None
        for source in sources:
            shell.run_cell(source, store_history=True).raise_error()
        status = SURVIVED
    except AssertionError:
        status = CHECKED
    finally:
        os._exit(status)


def run_all(programs: list[list[str]], seconds: float) -> list[int]:
    """Run each list of cells in its own process; return the exit statuses."""

    def run(sources: list[str]) -> int:
        process = SERVER.Process(target=execute, args=(sources, seconds))
        process.start()
        process.join()
        return process.exitcode

    with ThreadPoolExecutor(WORKERS) as pool:
        return [*pool.map(run, programs)]


def report(path: Path, cells: list[NotebookNode]) -> dict[str, int]:
    """Run a chapter and its mutants, print the survivors, and return the counts."""
    name, text, start = path.stem, path.read_text(), time.perf_counter()
    sources = [cell.source for cell in cells]
    if run_all([sources], 600) != [SURVIVED]:
        raise SystemExit(f"{name} fails without a change: fix the chapter first")
    limit = 30 + 10 * (time.perf_counter() - start)
    found = [*mutants(cells)]
    programs = [[*sources[: m.cell], m.source, *sources[m.cell + 1 :]] for m in found]
    statuses = run_all(programs, limit)
    for m, status in zip(found, statuses):
        if status == SURVIVED:
            line = text[: text.index(sources[m.cell])].count("\n") + m.line
            print(f"survived: {path.name}:{line}, code cell {m.cell + 1}")
            print(f"  - {m.before}\n  + {m.after}")
    caught = len(found) - statuses.count(SURVIVED)
    seconds = time.perf_counter() - start
    print(f"{name}: {caught} of {len(found)} caught in {seconds:.0f} s", flush=True)
    checked = statuses.count(CHECKED)
    return {"broken": len(found), "caught": caught, "by a check": checked}


def share_caught(*parts: dict[str, int]) -> float:
    """Return the share of these chapters' mutants that are caught."""
    total, caught = (sum(part[key] for part in parts) for key in ("broken", "caught"))
    return caught / max(1, total)


def measure(*wanted: str) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield the counts of these chapters, or all; SystemExit if too few caught."""
    book = {name: code for name, _, code, _ in chapters(ROOT)}
    if unknown := {*wanted} - {*book}:
        raise SystemExit(f"unknown chapters {unknown}; known are {[*book]}")
    text = "\n".join(cell.source for code in book.values() for cell in code)
    modules = {*re.findall(r"^(?:from|import) ([\w.]+)", text, re.MULTILINE)}
    SERVER.set_forkserver_preload([__name__, *modules])  # once, for all processes
    found = {}
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        cache = {"JAX_COMPILATION_CACHE_DIR": folder}
        for name in wanted or book:
            with patch.dict(os.environ, SETTINGS | cache):
                found[name] = report(ROOT / f"notebooks/{name}.md", book[name])
            yield name, found[name]
    weak = [n for n, part in found.items() if share_caught(part) < MIN_CHAPTER]
    if weak:
        raise SystemExit(f"fewer than {MIN_CHAPTER:.0%} caught: {', '.join(weak)}")
    if not wanted and share_caught(*found.values()) < MIN_BOOK:
        raise SystemExit(f"fewer than {MIN_BOOK:.0%} caught in all chapters together")


def files(chapter: str) -> list[str]:
    return [f"notebooks/{chapter}.ipynb"]


def versions() -> dict[str, str]:
    return {"jax": version("jax")}
