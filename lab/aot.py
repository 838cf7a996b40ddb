"""Compile the book's main programs for absent chips: `nox -s lab -- aot`.

Each part is a chapter; nothing runs on a chip. Chapter 27 defines its programs in cells
tagged `recorded`. Programs of other chapters are expressions, evaluated at the end of
the chapter on eight emulated devices: `jax.export` exports each with its shardings, and
the compiler of another platform compiles it for eight devices.
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

CHAPTER_27 = "27_compiling_for_tpus"
ALL_CHIPS = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x", "H100")
FLAT_V5P = "v5p:2x4x1"  # eight chips in a plane; "TPU v5p" has them in a box
CHIPS = ("TPU v5e", "H100")
PLATFORMS = {"CPU": "cpu", "TPU v5e": "tpu", "H100": "cuda"}  # for other chapters
PROGRAMS_27 = {  # the chips, and what chapters 26 and 27 show besides bytes sent
    "data_parallel": (ALL_CHIPS, "numbers, order, lines"),
    "fully_sharded": ((*ALL_CHIPS, FLAT_V5P), "numbers, order"),
    "data_parallel_wide": (ALL_CHIPS, "numbers, order"),
    "fully_sharded_wide": ((*ALL_CHIPS, FLAT_V5P), "order"),
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
    " jax.device_put(np.zeros((64, 920), np.float32), by_rows), *one_batch)"
)
SUMS = ("sum_in_bfloat16", "sum_in_float32")
# Chapter: program: its function and arguments, as an expression in the chapter's names.
PROGRAMS = {
    "06_data_parallel_regression": {
        "jit": "train_step, (start, *batch)",
        "shard_map": "sharded_step, (start, *batch)",
    },
    "10_automatic_parallelism": {
        "ten times in a loop": "ten_times, (h, w)",
        "a poor choice": "jax.jit(mlp), (tokens, w1, w2)",
        "steered": "jax.jit(mlp_by_columns, out_shardings=rows), (tokens, w1, w2)",
    },
    "14_logical_axes": {
        name: f"launched['{name}'][2], (launched['{name}'][0],"
        f" *jax.device_put(first, launched['{name}'][1]))"
        for name in ("tensor", "fsdp")
    },
    "16_fsdp": {
        "data parallel": "train_step, (*initial_state(replicated), *batch)",
        "split, by the compiler": "train_step, (*initial_state(by_rows), *batch)",
        "gather and keep": "gather_and_keep, (initial_state(by_rows)[0], *batch)",
        "digits, FSDP": "digits_step, (digits_state, *first_batch)",
    },
    "17_tensor_parallel": {
        "jit": f"{LAYER}(layer), {TWO}, (sharded_params, replicated_x)",
        "f and g": f"{LAYER}(with_f), {TWO}, (sharded_params, replicated_x)",
        "sequence parallel": f"{LAYER}(sequence_parallel), {TWO},"
        " (sharded_params, x_by_tokens)",
        "gather first": f"{LAYER}(gather_mlp), {THREE}, ring_args",
        "ring": f"{LAYER}(ring_mlp), {THREE}, ring_args",
    },
    "20_long_context": {
        "ring": "step_of(ring_attention), data",
        "gather": "step_of(gather_attention), data",
        "by heads": "step_of(ulysses_attention), data",
    },
    "22_transformer_3d": {
        name: f"jax.jit(jax.value_and_grad(loss_at(layouts[{name!r}]))),"
        f" arguments_at(layouts[{name!r}])"
        for name in (
            "fsdp 8",
            "tensor 8",
            "seq 8",
            "pipe 4 data 2",
            "pipe 2 data 2 tensor 2",
        )
    },
    "31_fine_tune": {
        name: f"gradient_program(*methods[{name!r}])"
        for name in ("LoRA, bf16, sharded", "LoRA, int8, sharded")
    },
    "32_fewer_bits": {
        f"{way}, {name}": f"{way}, (to_send['{name}'],)"
        for way in ("gather", "gather_bits", "add")
        for name in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
    }
    | {name: f"{name}, (weights, *one_batch)" for name in SUMS}
    | {
        f"average, {kind}": f"make_step(codecs['{kind}'], True, sgd), {STATE}"
        for kind in ("int8", "one bit")
    },
    CHAPTER_27: {name: name for name in PROGRAMS_27},
}
IN_MESH = ["14_logical_axes"]  # chapters whose programs are traced with a mesh set


def compilations(chapter: str) -> list[tuple[str, str, str]]:
    """Return the name, the expression and the chip of each program of a chapter."""
    return [
        (name, expression, chip)
        for name, expression in PROGRAMS[chapter].items()
        for chip in (PROGRAMS_27[name][0] if chapter == CHAPTER_27 else PLATFORMS)
    ]


def run_cells(chapter: str) -> dict:
    """Run the cells of a chapter, or Setup and the cells tagged `recorded`, if any;
    return the names that they define."""
    path = ROOT / f"notebooks/{chapter}.ipynb"
    cells = nbformat.read(path, as_version=4).cells
    first, *rest = [cell for cell in cells if cell.cell_type == "code"]
    tagged = [cell for cell in rest if "recorded" in cell.metadata.get("tags", [])]
    names = {"__name__": "__main__"}
    with redirect_stdout(io.StringIO()):
        for cell in (first, *(tagged or rest)):
            exec(compile(cell.source, "cell", "exec"), names)
    jax.config.update("jax_disable_most_optimizations", False)  # set by Setup for CPUs
    return names


def on_devices(x, devices) -> jax.ShapeDtypeStruct:
    """Return the shape and type of an array, with its sharding over other devices."""
    sharding = None
    if isinstance(x.sharding, NamedSharding):
        mesh = x.sharding.mesh
        places = np.array(devices[: mesh.size]).reshape(mesh.devices.shape)
        there = Mesh(places, mesh.axis_names, axis_types=mesh.axis_types)
        sharding = NamedSharding(there, x.sharding.spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def exported_program(step, arguments, platform: str) -> Callable:
    """Export a step for a platform; return it in the form of chapter 27's programs."""
    exported = export(step, platforms=[platform])(*arguments)

    def program(devices):
        structs = jax.tree.map(lambda x: on_devices(x, devices), arguments)
        return jax.jit(exported.call), structs

    return program


def measure(*chapters: str) -> Iterator[tuple[str, list[dict]]]:
    """Compile the programs of these chapters, or of all."""
    names_27 = run_cells(CHAPTER_27)
    for chapter in chapters or PROGRAMS:
        names = names_27 if chapter == CHAPTER_27 else run_cells(chapter)
        rows = []
        for name, expression, chip in compilations(chapter):
            print(chapter, name, chip, flush=True)
            program = eval(expression, names)
            if chapter != CHAPTER_27:
                in_mesh = chapter in IN_MESH
                with jax.set_mesh(names["mesh"]) if in_mesh else nullcontext():
                    program = exported_program(*program, PLATFORMS[chip])
            compiled = names_27["compile_for"](program, chip)
            facts = names_27["what_it_wrote"](compiled)._asdict()
            sent = facts.pop("collectives")
            sent = {f"{kind} of {n}": [*cost] for (kind, n), cost in sent.items()}
            row = {"program": name, "compiled": expression, "chip": chip, "sent": sent}
            rows.append(row | facts if chapter == CHAPTER_27 else row)
        yield chapter, rows


def files(chapter: str) -> list[str]:
    """Return the notebook of a chapter."""
    return [f"notebooks/{chapter}.ipynb"]


def versions() -> dict[str, str]:
    """Return the versions of the compilers."""
    return installed("jax", "libtpu", "jax-cuda12-plugin")


def cell(parts: dict[str, Part]) -> str:
    """Return a cell with the tables that chapters 26 and 27 show."""
    part, sent, numbers, orders, lines = parts[CHAPTER_27], [], {}, "", {}
    wrap = textwrap.TextWrapper(88, subsequent_indent="  ", break_on_hyphens=False)
    for row in part["found"]:
        key, read = (row["program"], row["chip"]), PROGRAMS_27[row["program"]][1]
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
# Program, chip, kind of collective, group size, lines in the text, times run, bytes.
recorded_sent = {sent}
# Argument memory, temporary memory and peak memory in bytes; FLOPs.
recorded_numbers = {numbers}
# Lines that show communication, and arguments that are stored column by column.
recorded_lines = {lines}
# Matmuls and collectives of the ENTRY computation, in the order of the text.
recorded_orders = """
{orders}"""
'''
