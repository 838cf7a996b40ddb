"""Compile the book's main programs for chips that are not here: run by `nox -s aot`.

The programs are the chapters' own, and nothing is run on a chip. Those of chapter 27
stand in its cells tagged `recorded`. Those of other chapters are expressions, evaluated
where the chapter has ended: it runs on eight emulated devices, `jax.export` takes the
program out with its shardings, and another compiler gets it for eight of its devices.

The record is book/measured/aot.json, and book/cells/recorded_programs.py is what
chapters 26 and 27 read of it. With each program goes a digest of the definitions that
it reaches, so that a test, which needs no compiler, finds a program that was edited
after it was recorded. Without `--record` all is compiled again and must be as recorded,
to the byte.
"""

import ast
import contextlib
import datetime
import hashlib
import io
import json
import os
import symtable
import sys
import textwrap
import tokenize
from collections.abc import Callable
from importlib.metadata import distributions, version

import nbformat
from record import earlier, record
from pair import ROOT

CHAPTER = "27_compiling_for_tpus"
CELL = ROOT / "book/cells/recorded_programs.py"
COMPILERS = ("jax", "libtpu", "jax-cuda12-plugin")
EVERYWHERE = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x", "H100")
IN_A_PLANE = "v5p:2x4x1"  # the eight chips that "TPU v5p" has in a box
CHIPS = ("TPU v5e", "H100")
HERE_TOO = ("CPU", *CHIPS)  # for the programs of other chapters
MADE_IN_27 = {
    "data_parallel": EVERYWHERE,
    "fully_sharded": (*EVERYWHERE, IN_A_PLANE),
    "data_parallel_wide": EVERYWHERE,
    "fully_sharded_wide": (*EVERYWHERE, IN_A_PLANE),
    "fully_sharded_auto": CHIPS,
    "tensor_parallel": CHIPS,
    "experts": CHIPS,
    "ring_attention": CHIPS,
    "ring_attention_unrolled": CHIPS,
    "ten_columns": CHIPS,
}
TWO, THREE = "argnums=(0, 1)))", "argnums=(0, 1, 2)))"
LAYER = "jax.jit(jax.value_and_grad(mean_square"
# Chapter: name of a program: what is compiled and its arguments, where it has ended.
PROGRAMS = {
    "06_data_parallel_regression": {
        "jit": "step_one, (copied, xs, ys)",
        "shard_map": "step_shard, (copied, xs, ys)",
    },
    "10_automatic_parallelism": {
        "ten times in a loop": "ten_times, (h, w)",
        "a poor choice": "jax.jit(network), (request, w1, w2)",
        "steered": "jax.jit(by_columns, out_shardings=rows), (request, w1, w2)",
    },
    "14_logical_axes": {
        "tensor": "launched['tensor'][2], (launched['tensor'][0],"
        " *jax.device_put(first, launched['tensor'][1]))",
        "fsdp": "launched['fsdp'][2], (launched['fsdp'][0],"
        " *jax.device_put(first, launched['fsdp'][1]))",
    },
    "16_fsdp": {
        "data parallel": "step, (w_copied, moments_copied, xs, ys)",
        "split, by the compiler": "step, (w_cut, moments_cut, xs, ys)",
        "gather and keep": "fsdp_gradient, (w_cut, xs, ys)",
        "digits, FSDP": "digits_step, (digits_state, *first_batch)",
    },
    "17_tensor_parallel": {
        "jit": f"{LAYER}(block), {TWO}, (laid_params, laid_x)",
        "fork and join": f"{LAYER}(forked), {TWO}, (laid_params, laid_x)",
        "gather and scatter": f"{LAYER}(sequence), {TWO}, (laid_params, cut_x)",
        "gather, waiting": f"{LAYER}(waiting_mlp), {THREE}, ring_laid",
        "gather, ring": f"{LAYER}(ring_mlp), {THREE}, ring_laid",
    },
    "20_long_context": {
        "ring": "step_of(ring), data",
        "gather": "step_of(gather), data",
        "by heads": "step_of(by_heads), data",
    },
    "22_transformer_3d": {
        name: f"jax.jit(jax.value_and_grad(loss_at(settings[{name!r}]))),"
        f" arguments_at(settings[{name!r}])"
        for name in (
            "data 8, cut",
            "tensor 8",
            "seq 8",
            "pipe 4, data 2",
            "pipe, data, tensor",
        )
    },
}
DOCUMENTED = (ast.FunctionDef, ast.ClassDef)
IN_MESH = ("14_logical_axes",)  # whose programs are traced with their mesh set
AS_IT_IS = contextlib.nullcontext()


def made_in_27(program: str) -> str:
    """The expression of one of chapter 27's programs, and of what reads it."""
    return f"compile_for({program}, chip), what_it_wrote"


def code_cells(chapter: str) -> list:
    """The code cells of a chapter."""
    path = ROOT / f"notebooks/{chapter}.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    return [cell for cell in cells if cell.cell_type == "code"]


def tags(cell) -> list[str]:
    """The tags of a cell."""
    return cell.metadata.get("tags", [])


def for_the_record(cells: list) -> list:
    """Of chapter 27's cells the Setup and those tagged `recorded`."""
    return [cells[0], *(cell for cell in cells[1:] if "recorded" in tags(cell))]


# ------------------------------------------------------------------ what was edited


def bound_by(statement: ast.stmt) -> set[str]:
    """Names that a statement gives a value to, or puts something into."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {name.asname or name.name.split(".")[0] for name in statement.names}
    names = set()
    for node in ast.walk(statement):
        if isinstance(node, (ast.Subscript, ast.Attribute, ast.Name)):
            stored = isinstance(node.ctx, ast.Store)
            while stored and not isinstance(node, ast.Name):
                node = getattr(node, "value", None)
                stored = isinstance(node, (ast.Subscript, ast.Attribute, ast.Name))
            if stored:
                names.add(node.id)
    return names


def read_by(code: str) -> set[str]:
    """Names that code reads from around it, not those of its functions' own."""
    tables, names = [symtable.symtable(code, "cell", "exec")], set()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for name in table.get_symbols():
            outer = name.is_global() or table.get_type() == "module"
            if name.is_referenced() and outer:
                names.add(name.get_name())
    return names


def plain(code: str) -> str:
    """Code without its comments, docstrings and empty lines."""
    lines = code.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node):
            for row in range(node.body[0].lineno, node.body[0].end_lineno + 1):
                lines[row - 1] = ""
    return "\n".join(line for line in lines if line)


def reached(code: str, expression: str) -> str:
    """The statements of a program's code that an expression needs, in their order."""
    statements = ast.parse(code).body
    lines = code.splitlines()
    texts = []
    for statement in statements:
        decorators = getattr(statement, "decorator_list", [])
        first = min(node.lineno for node in (statement, *decorators))
        texts.append(plain("\n".join(lines[first - 1 : statement.end_lineno])))
    needed = read_by(expression)
    kept = set()
    while True:
        more = {
            number
            for number, statement in enumerate(statements)
            if bound_by(statement) & needed
        }
        if more == kept:
            break
        kept = more
        for number in kept:
            needed |= read_by(texts[number])
    return "\n".join(texts[number] for number in sorted(kept))


def digest(chapter: str, expression: str) -> str:
    """A digest of what an expression of a chapter reaches, without its comments."""
    left_out = {"check", "exercise", "solution"}
    cells = [cell for cell in code_cells(chapter) if not left_out & set(tags(cell))]
    if chapter == CHAPTER:
        cells = for_the_record(cells)
    code = "\n".join(cell.source for cell in cells)
    text = f"{reached(code, expression)}\n{expression}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# ------------------------------------------------------------------ other compilers


def run_cells(cells: list) -> dict:
    """Run cells one after the other, quietly; return the names that they leave."""
    names = {"__name__": "__main__"}
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for cell in cells:
            exec(compile(cell.source, "cell", "exec"), names)
    return names


def of_chapter_27() -> dict:
    """The names of chapter 27 that a record needs."""
    return run_cells(for_the_record(code_cells(CHAPTER)))


def moved(x, devices):
    """Describe an array of a chapter as it would lie on other devices."""
    import jax
    import numpy as np

    if not isinstance(x.sharding, jax.sharding.NamedSharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    mesh = x.sharding.mesh
    places = np.array(devices[: mesh.size]).reshape(mesh.devices.shape)
    there = jax.sharding.Mesh(places, mesh.axis_names, axis_types=mesh.axis_types)
    sharding = jax.sharding.NamedSharding(there, x.sharding.spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def elsewhere(exported, arguments) -> Callable:
    """An exported step as a program in the sense of chapter 27."""
    import jax

    def program(devices):
        described = jax.tree.map(lambda x: moved(x, devices), arguments)
        return jax.jit(exported.call), described

    return program


def row(chapter: str, program: str, chip: str, expression: str, written) -> dict:
    """What the record says of a program and a chip."""
    sent = written.collectives
    if not isinstance(sent, str):
        sent = {f"{kind} of {n}": list(cost) for (kind, n), cost in sent.items()}
    return {
        "chapter": chapter,
        "program": program,
        "chip": chip,
        "digest": digest(chapter, expression),
        "sent": sent,
        "given": written.given,
        "scratch": written.scratch,
        "peak": written.peak,
    }


def compile_all() -> tuple[list[dict], dict]:
    """Compile every program; return the rows, and what was written of chapter 27's."""
    import jax
    from jax.export import export

    names = of_chapter_27()
    platforms = {chip: platform for chip, (platform, _) in names["chips"].items()}
    rows, made = [], {}
    for program, chips in MADE_IN_27.items():
        for chip in chips:
            print(CHAPTER, program, chip, flush=True)
            compiled = names["compile_for"](names[program], chip)
            found = names["what_it_wrote"](compiled)
            made[program, chip] = found
            rows.append(row(CHAPTER, program, chip, made_in_27(program), found))
    for chapter, programs in PROGRAMS.items():
        ended = run_cells(code_cells(chapter))
        for program, expression in programs.items():
            with jax.set_mesh(ended["mesh"]) if chapter in IN_MESH else AS_IT_IS:
                step, arguments = eval(expression, ended)
                steps = {
                    platform: export(step, platforms=[platform])(*arguments)
                    for platform in ("cpu", "tpu", "cuda")
                }
            for chip in HERE_TOO:
                print(chapter, program, chip, flush=True)
                step = elsewhere(steps[platforms.get(chip, "cpu")], arguments)
                found = names["what_it_wrote"](names["compile_for"](step, chip))
                rows.append(row(chapter, program, chip, expression, found))
    return rows, made


# ------------------------------------------------------------------ the record


def literal(value) -> str:
    """A value as Python on one line, with the quotes that ruff gives it."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, dict):
        pairs = (f"{literal(key)}: {literal(part)}" for key, part in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(literal, value))
        return f"({inside})" if isinstance(value, tuple) else f"[{inside}]"
    return repr(value)


def written(start: str, value, indent: int = 0) -> list[str]:
    """A value that follows `start`, in the lines that ruff gives it."""
    space = " " * indent
    flat = f"{space}{start}{literal(value)},"
    if len(flat) <= 88:
        return [flat]
    if isinstance(value, str):
        parts = [value]
        if len(f"{space}    {literal(value)}") > 88:
            parts = textwrap.wrap(value, 70 - indent, drop_whitespace=False)
        lines = [f"{space}    {literal(part)}" for part in parts]
        return [f"{space}{start}(", *lines, f"{space}),"]
    if isinstance(value, dict):
        pairs = [(f"{literal(key)}: ", part) for key, part in value.items()]
        opening, closing = "{}"
    else:
        pairs = [("", part) for part in value]
        opening, closing = "[]"
    lines = [line for pair in pairs for line in written(*pair, indent + 4)]
    return [f"{space}{start}{opening}", *lines, f"{space}{closing},"]


def cell_text(now: str, made: dict, found: dict) -> str:
    """The cell of the record: its head, which is written by hand, and what was made."""
    lines = [now[: now.index("recorded_with = ")] + "recorded_with = {"]
    for name, value in made.items():
        lines += written(f"{literal(name)}: ", value, 4)
    lines += ["}", "recorded = {"]
    for key, one in found.items():
        lines.append(f"    {literal(key)}: Written(")
        for name, value in one._asdict().items():
            lines += written(f"{name}=", value, 8)
        lines.append("    ),")
    return "\n".join([*lines, "}"]) + "\n"


def differences(before: list[dict], now: list[dict]) -> list[str]:
    """What is not as it was recorded; memory may differ by a fiftieth."""
    found = []
    named = {(row["chapter"], row["program"], row["chip"]): row for row in before}
    for row in now:
        key = (row["chapter"], row["program"], row["chip"])
        old = named.pop(key, None)
        if old is None:
            found.append(f"{key} is not in the record")
            continue
        for fact in ("digest", "sent"):
            if old[fact] != row[fact]:
                found.append(f"{key}: {fact} was {old[fact]}, is {row[fact]}")
        for fact in ("given", "scratch", "peak"):
            if abs(row[fact] - old[fact]) > 0.02 * old[fact]:
                found.append(f"{key}: {fact} was {old[fact]}, is {row[fact]}")
    return found + [f"{key} is only in the record" for key in named]


def main() -> str | None:
    """Compile all; record it, or say what is not as recorded."""
    if absent := [name for name in COMPILERS if not list(distributions(name=name))]:
        return f"{', '.join(absent)}: not installed. Run this as  nox -s aot"
    rows, found = compile_all()
    made = {name: version(name) for name in COMPILERS}
    if "--record" not in sys.argv:
        old = earlier("aot")
        told = []
        if old["made with"] != made:
            told = [f"recorded with {old['made with']}, compiled with {made}"]
        return "\n".join(told + differences(old["programs"], rows)) or None
    record("aot", {"made with": made, "programs": rows})
    date = {"date": f"{datetime.date.today()}"}
    CELL.write_text(cell_text(CELL.read_text(), date | made, found))
    return None


if __name__ == "__main__":
    sys.exit(main())
