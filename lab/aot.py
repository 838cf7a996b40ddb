"""Compile the book's main programs for absent chips: `nox -s lab -- aot`.

A part is a chapter, and nothing runs on a chip. Chapter 27 defines its programs in
cells tagged `recorded`. Those of other chapters are expressions, evaluated at the end
of the chapter on eight emulated devices: `jax.export` exports each program with its
shardings, and another compiler compiles it for eight of its devices.
"""

import io
import textwrap
from collections.abc import Callable, Iterator
from contextlib import nullcontext, redirect_stdout

import jax
import nbformat
import numpy as np
from jax.export import export
from jax.sharding import Mesh, NamedSharding
from record import ROOT, Part, installed

LAST = "27_compiling_for_tpus"
EVERYWHERE = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x", "H100")
IN_A_PLANE = "v5p:2x4x1"  # the eight chips that "TPU v5p" has in a box
CHIPS = ("TPU v5e", "H100")
HERE_TOO = {"CPU": "cpu", "TPU v5e": "tpu", "H100": "cuda"}  # for other chapters
MADE_IN_27 = {  # for which chips, and what chapters 26 and 27 read besides bytes sent
    "data_parallel": (EVERYWHERE, "numbers, order, lines"),
    "fully_sharded": ((*EVERYWHERE, IN_A_PLANE), "numbers, order"),
    "data_parallel_wide": (EVERYWHERE, "numbers, order"),
    "fully_sharded_wide": ((*EVERYWHERE, IN_A_PLANE), "order"),
    "fully_sharded_auto": (CHIPS, "numbers"),
    "tensor_parallel": (CHIPS, "order"),
    "experts": (CHIPS, ""),
    "ring_attention": (CHIPS, "numbers, order"),
    "ring_attention_unrolled": (CHIPS, "numbers"),
    "ten_columns": (CHIPS, "numbers, lines"),
}
TWO, THREE = "argnums=(0, 1)))", "argnums=(0, 1, 2)))"
LAYER = "jax.jit(jax.value_and_grad(mean_square"
STATE = (
    "(weights, sgd.init(weights),"
    " jax.device_put(np.zeros((64, 920), np.float32), split), *one_batch)"
)
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
        name: f"launched['{name}'][2], (launched['{name}'][0],"
        f" *jax.device_put(first, launched['{name}'][1]))"
        for name in ("tensor", "fsdp")
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
    "30_generate": {
        "positions, flash": "layer_program(by_positions, flash)",
        "rows, by hints": "layer_program(by_rows, attend)",
        "rows, swap": "layer_program(by_rows, swap)",
    },
    "31_fine_tune": {
        name: f"bill({name!r})"
        for name in ("bf16 base, cut", "int8 base, cut", "int8, gathered first")
    },
    "32_fewer_bits": {
        f"{way}, {name}": f"{way}, (to_send['{name}'],)"
        for way in ("gather", "gather_bits", "add")
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
    }
    | {name: f"{name}, (weights, *one_batch)" for name in ("short_sums", "long_sums")}
    | {
        f"average, {kind}": f"make_step(ways['{kind}'], True, sgd), {STATE}"
        for kind in ("int8", "one bit")
    },
    LAST: {name: name for name in MADE_IN_27},
}
IN_MESH = ["14_logical_axes"]  # its programs are traced with their mesh set


def due(chapter: str) -> list[tuple[str, str, str]]:
    """Return the name, the expression and the chip of each program of a chapter."""
    return [
        (name, expression, chip)
        for name, expression in PROGRAMS[chapter].items()
        for chip in (MADE_IN_27[name][0] if chapter == LAST else HERE_TOO)
    ]


def run_cells(chapter: str) -> dict:
    """Run a chapter's cells, or the Setup and those tagged `recorded` if there are any;
    return the names that they define."""
    path = ROOT / f"notebooks/{chapter}.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    first, *rest = [cell for cell in cells if cell.cell_type == "code"]
    tagged = [cell for cell in rest if "recorded" in cell.metadata.get("tags", [])]
    names = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()):
        for cell in (first, *(tagged or rest)):
            exec(compile(cell.source, "cell", "exec"), names)
    jax.config.update("jax_disable_most_optimizations", False)  # Setup asks for the CPU
    return names


def moved(x, devices):
    """Describe an array of a chapter with the same sharding over other devices."""
    sharding = None
    if isinstance(x.sharding, NamedSharding):
        mesh = x.sharding.mesh
        places = np.array(devices[: mesh.size]).reshape(mesh.devices.shape)
        there = Mesh(places, mesh.axis_names, axis_types=mesh.axis_types)
        sharding = NamedSharding(there, x.sharding.spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def elsewhere(step, arguments, platform: str) -> Callable:
    """Return a step of a chapter as a program as chapter 27 defines them."""
    exported = export(step, platforms=[platform])(*arguments)

    def program(devices):
        described = jax.tree.map(lambda x: moved(x, devices), arguments)
        return jax.jit(exported.call), described

    return program


def measure(*chapters: str) -> Iterator[tuple[str, list[dict]]]:
    """Compile the programs of these chapters, or of all."""
    last = run_cells(LAST)
    for chapter in chapters or PROGRAMS:
        ended = last if chapter == LAST else run_cells(chapter)
        rows = []
        for name, expression, chip in due(chapter):
            print(chapter, name, chip, flush=True)
            program = eval(expression, ended)
            if chapter != LAST:
                in_mesh = chapter in IN_MESH
                with jax.set_mesh(ended["mesh"]) if in_mesh else nullcontext():
                    program = elsewhere(*program, HERE_TOO[chip])
            wrote = last["what_it_wrote"](last["compile_for"](program, chip))._asdict()
            sent = wrote.pop("collectives")
            sent = {f"{kind} of {n}": [*cost] for (kind, n), cost in sent.items()}
            row = {"program": name, "compiled": expression, "chip": chip, "sent": sent}
            rows.append(row | wrote if chapter == LAST else row)
        yield chapter, rows


def files(chapter: str) -> list[str]:
    """The notebook of a chapter."""
    return [f"notebooks/{chapter}.ipynb"]


def versions() -> dict[str, str]:
    """The versions of the compilers."""
    return installed("jax", "libtpu", "jax-cuda12-plugin")


def cell(parts: dict[str, Part]) -> str:
    """Return the tables of the record that chapters 26 and 27 read."""
    part, sent, numbers, orders, lines = parts[LAST], [], {}, "", {}
    wrap = textwrap.TextWrapper(88, subsequent_indent="  ", break_on_hyphens=False)
    for row in part["found"]:
        key, read = (row["program"], row["chip"]), MADE_IN_27[row["program"]][1]
        for name, cost in row["sent"].items():
            kind, _, size = name.partition(" of ")
            printed = row["printed"].get(kind, 0)
            sent.append((*key, kind, int(size), printed, *cost))
        if "numbers" in read:
            memory = (row["arguments"], row["temporary"], row["peak"])
            numbers[key] = (*memory, row["flops"] and int(row["flops"]))
        if "order" in read:
            orders += wrap.fill(f"{', '.join(key)}: {row['order']}") + "\n"
        if "lines" in read:
            lines[key] = row["lines"]
    made_with = {"date": part["recorded"]} | part["versions"]
    return f'''# @title Recorded programs
recorded_with = {made_with}
# Program, chip, kind of collective, group size, in how many lines, times run, bytes.
recorded_sent = {sent}
# Bytes of the arguments, of temporaries, of all at the worst moment; FLOPs.
recorded_numbers = {numbers}
# How a text says that it communicates, and arguments that lie column by column.
recorded_lines = {lines}
# Matmuls and collectives of the ENTRY, in the order of the text.
recorded_orders = """
{orders}"""
'''
