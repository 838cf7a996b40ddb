"""Compile chapter 28's programs for absent chips: `nox -s lab -- schedules`.

The chapter's function `programs(mesh)` returns the programs and their arguments. Each
part is a program, with or without compiler options; nothing runs on a chip. For each
chip, the part has the schedule: matmuls and collectives in the order of the compiled
text.
"""

import textwrap
from collections.abc import Iterator

import aot
import jax
from record import Part

CHAPTER = "28_profiling"
SCHEDULER = "enable_latency_hiding_scheduler"
FUSION = "xla_tpu_enable_async_collective_fusion"
VARIANTS = {  # program and variant: compiler options by platform, and the chips
    "forward": ({}, aot.ALL_CHIPS),
    "forward, scheduler off": (
        {
            "tpu": {f"xla_tpu_{SCHEDULER}": False},
            "cuda": {f"xla_gpu_{SCHEDULER}": False},
        },
        aot.ALL_CHIPS,
    ),
    "forward, fusion off": ({"tpu": {FUSION: False}}, ("TPU v5e", "TPU7x")),
    "ordered": ({}, ("TPU v5e", "TPU7x", "H100")),
    "backward": ({}, ("TPU v5e", "TPU7x")),
    "backward, started": ({}, ("TPU v5e", "TPU7x")),
    "backward, started, ordered": ({}, ("TPU7x",)),
}
SHOWN = ("TPU v5e", "H100")  # chips whose lines of "forward" the chapter prints
HIDDEN = ("parameter", "get-tuple-element", "copy", "copy-start", "copy-done")


def lines_of(text: str, names_27: dict) -> list[str]:
    """Return the name and operation of each line of ENTRY that computes or sends."""
    program, entry = names_27["read_program"](text)
    lines = [line for line in program[entry].values() if line.operation not in HIDDEN]
    return [f"{line.name} = {line.operation}" for line in lines]


def measure(*parts: str) -> Iterator[tuple[str, list[dict]]]:
    """Compile the programs for eight devices of each kind."""
    names, names_27 = aot.run_cells(CHAPTER), aot.run_cells(aot.CHAPTER_27)
    for variant in parts or VARIANTS:
        (options, chips), rows = VARIANTS[variant], []
        for chip in chips:
            devices = names_27["devices_of"](chip)
            mesh = jax.make_mesh(
                (8,), ("data",), devices=devices, axis_types=names["mesh"].axis_types
            )
            name = variant.removesuffix(", scheduler off").removesuffix(", fusion off")
            program, arguments = names["programs"](mesh)[name]
            platform = aot.PLATFORMS.get(chip, "tpu")
            compiled = program.lower(*arguments).compile(options.get(platform))
            row = {"chip": chip, "order": names_27["what_it_wrote"](compiled).order}
            if variant == "forward" and chip in SHOWN:
                row["lines"] = lines_of(compiled.as_text(), names_27)
            print(variant, *row.values(), sep=": ", flush=True)
            rows.append(row)
        yield variant, rows


def files(part: str) -> list[str]:
    """Return the notebook of the chapter."""
    return [f"notebooks/{CHAPTER}.ipynb"]


versions = aot.versions


def cell(parts: dict[str, Part]) -> str:
    """Return a cell with the schedules that the chapter shows."""
    orders, lines = "", {}
    wrap = textwrap.TextWrapper(88, subsequent_indent="  ", break_on_hyphens=False)
    for variant in VARIANTS:
        for row in parts[variant]["found"]:
            orders += wrap.fill(f"{variant} on {row['chip']}: {row['order']}") + "\n"
            if "lines" in row:
                lines[row["chip"]] = row["lines"]
    part = parts["forward"]
    made_with = {"date": part["recorded"]} | part["versions"]
    return f'''# @title Recorded schedules
recorded_with = {made_with}
# Chip: names and operations of the compiled program "forward".
recorded_lines = {lines}
# Matmuls and collectives in the order of the compiled text.
recorded_orders = """
{orders}"""
recorded_schedules = {{}}
for row in recorded_orders.strip().replace("\\n  ", " ").splitlines():
    key, _, schedule = row.partition(": ")
    recorded_schedules[tuple(key.split(" on "))] = schedule
'''
