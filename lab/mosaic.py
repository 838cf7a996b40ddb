"""Compile chapter 33's kernels for absent TPUs: `nox -s lab -- mosaic`.

The chapter's function `programs(mesh)` returns the programs. The only part is the
chapter; nothing runs on a chip. For each program and chip, the part has the number of
kernels and collectives in the compiled text, or the compiler's error message.
"""

import re
from collections.abc import Iterator

import aot
import jax
from record import Part, installed

CHAPTER = "33_kernels"
CHIPS = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
REASONS = (  # the part of a long error message that is recorded
    "cannot be automatically partitioned",
    "collective_id has to be unspecified or None",
    "divisible by 8 and 128",
    r"would exceed memory \(size=\d+\)",
    "Bad lhs type",
    "Custom emitter for CustomSPMDPartitioning not found",
)


def verdict(program, arguments: tuple) -> str:
    """Compile a program; return its kernel and collective counts, or the error."""
    try:
        text = program.lower(*arguments).compile().as_text()
    except Exception as error:
        reason = re.search("|".join(REASONS), str(error))
        return f"refused: {reason[0] if reason else error}"
    kernels = text.count('custom_call_target="tpu_custom_call"')
    collectives = len(re.findall(rf" ({COLLECTIVES})\S*\(", text))
    return f"compiles: kernels {kernels}, collectives {collectives}"


def measure(*parts: str) -> Iterator[tuple[str, dict]]:
    """Compile the kernels for eight devices of each kind."""
    names, names_27 = aot.run_cells(CHAPTER), aot.run_cells(aot.CHAPTER_27)
    found = {}
    for chip in CHIPS:
        devices = names_27["devices_of"](chip)
        mesh = jax.make_mesh(
            (8,), ("x",), devices=devices, axis_types=names["mesh"].axis_types
        )
        for name, (program, *arguments) in names["programs"](mesh).items():
            structs = [aot.on_devices(x, [*mesh.devices.flat]) for x in arguments]
            found.setdefault(name, {})[chip] = verdict(program, structs)
            print(name, chip, found[name][chip], flush=True)
    yield CHAPTER, found


def files(part: str) -> list[str]:
    """Return the notebook of the chapter."""
    return [f"notebooks/{CHAPTER}.ipynb"]


def versions() -> dict[str, str]:
    """Return the versions of the compiler."""
    return installed("jax", "libtpu")


def cell(parts: dict[str, Part]) -> str:
    """Return a cell with what the chapter shows of the record."""
    part = parts[CHAPTER]
    made_with = {"date": part["recorded"]} | part["versions"]
    return f"""# @title Recorded verdicts
recorded_with = {made_with}
# Program: chip: the result of compilation.
recorded_verdicts = {part["found"]}
"""
