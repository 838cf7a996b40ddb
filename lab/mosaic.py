"""Compile chapter 33's kernels for TPUs that are not here: `nox -s lab -- mosaic`.

Its `programs(mesh)` names them. The part is the chapter, and nothing is run on a chip:
of each program and chip it holds what the compiler said, or how many kernels and
collectives it wrote.
"""

import re
from collections.abc import Iterator

import aot
import jax
from record import Part, installed

CHAPTER = "33_kernels"
CHIPS = ("TPU v5e", "TPU v5p", "TPU v6e", "TPU7x")
COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
REASONS = (  # what of a long message is kept
    "cannot be automatically partitioned",
    "collective_id has to be unspecified or None",
    "divisible by 8 and 128",
    r"would exceed memory \(size=\d+\)",
    "Bad lhs type",
    "Custom emitter for CustomSPMDPartitioning not found",
)


def verdict(program, arguments: tuple) -> str:
    """What a compiler makes of a program, in a few words."""
    try:
        text = program.lower(*arguments).compile().as_text()
    except Exception as refused:
        known = re.search("|".join(REASONS), str(refused))
        return f"refused: {known[0] if known else refused}"
    kernels = text.count('custom_call_target="tpu_custom_call"')
    collectives = len(re.findall(rf" ({COLLECTIVES})\S*\(", text))
    return f"compiles: kernels {kernels}, collectives {collectives}"


def measure(*parts: str) -> Iterator[tuple[str, dict]]:
    """Compile the kernels for eight devices of each kind."""
    names, last = aot.run_cells(CHAPTER), aot.run_cells(aot.LAST)
    found = {}
    for chip in CHIPS:
        devices = last["devices_of"](chip)
        mesh = jax.make_mesh(
            (8,), ("x",), devices=devices, axis_types=names["mesh"].axis_types
        )
        for name, (program, *arguments) in names["programs"](mesh).items():
            there = [aot.moved(x, [*mesh.devices.flat]) for x in arguments]
            found.setdefault(name, {})[chip] = verdict(program, there)
            print(name, chip, found[name][chip], flush=True)
    yield CHAPTER, found


def files(part: str) -> list[str]:
    """The notebook of the chapter."""
    return [f"notebooks/{CHAPTER}.ipynb"]


def versions() -> dict[str, str]:
    """The versions of the compiler."""
    return installed("jax", "libtpu")


def cell(parts: dict[str, Part]) -> str:
    """What the chapter shows of the record."""
    part = parts[CHAPTER]
    made_with = {"date": part["recorded"]} | part["versions"]
    return f"""# @title Recorded verdicts
recorded_with = {made_with}
# Program: chip: what the compiler made of it.
recorded_verdicts = {part["found"]}
"""
