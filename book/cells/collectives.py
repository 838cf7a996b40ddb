# @title Count the collectives of a compiled program, and the bytes they send
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

RING = {  # bytes a device sends in a group of n, per byte of the result
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,  # its result is 1/n of its operand
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}
UNCOUNTED = ("ragged-all-to-all", "collective-broadcast", "send", "recv")


class Line(NamedTuple):
    """One parsed line of a compiled program."""

    name: str
    type: str
    operation: str
    operands: list[str]
    text: str


def cannot_count(why: str, line: Line):
    """Raise a ValueError that quotes the line."""
    raise ValueError(f"cannot count: {why}: {line.text[:300]}")


def read_line(text: str) -> Line | None:
    """Parse  %name = type operation(operands), attributes."""
    parts = re.match(r"(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*?)\)", text)
    if parts is None:
        return None
    name, type_, operation, inside = parts.groups()
    operands = re.findall(r"%([\w.-]+)", inside) or [inside]  # constant(5) has "5"
    return Line(name, type_, operation, operands, text)


def read_program(text: str) -> tuple[dict[str, dict[str, Line]], str]:
    """Return every computation's lines by name, and the name of the ENTRY."""
    program, entries = {}, []
    for row in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) \(.*{$", row):
            lines = program[head[2]] = {}
            if head[1]:
                entries.append(head[2])
        elif program and (line := read_line(row.strip())):
            lines[line.name] = line
    if len(entries) != 1:
        raise ValueError(f"cannot count: {len(entries)} ENTRY computations, not one")
    return program, entries[0]


def result_bytes(line: Line) -> int:
    """Return the bytes of a line's result: 2,052 for (f32[16,32], s32[])."""
    total = 0
    for name, sizes in re.findall(r"(\w+)\[(.*?)\]", line.type):
        bits = re.match(r"[a-z]+(\d+)", name.replace("pred", "u8"))
        if not bits or not re.fullmatch(r"[\d,]*", sizes):
            cannot_count(f"{name}[{sizes}] has no known size", line)
        elements = math.prod(int(size) for size in re.findall(r"\d+", sizes))
        total += math.ceil(int(bits[1]) * elements / 8)
    return total


def group_size(line: Line) -> int:
    """Return the size of one group; for a permute, how many devices send to another."""
    if pairs := re.search(r"source_target_pairs=([\d,{}]+)", line.text):
        return sum(a != b for a, b in re.findall(r"{(\d+),(\d+)}", pairs[1]))
    if named := re.search(r"replica_groups=mesh\[(.*?)\].*? {(.*?)}", line.text):
        sizes = dict(re.findall(r"'(.*?)'=(\d+)", named[1]))  # mesh['x'=2,'y'=4] {'y'}
        axes = re.findall(r"'(.*?)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]<=", line.text):
        return int(iota[1])  # [2,4]<=[8]
    listed = re.search(r"replica_groups=([\d,{}]+)", line.text)
    groups = re.findall(r"{([\d,]+)}", listed[1]) if listed else []  # {{0,1},{2,3}}
    if len({group.count(",") for group in groups}) != 1:
        cannot_count("its groups are not listed, or differ in size", line)
    return groups[0].count(",") + 1


def read_collective(
    line: Line, lines: dict[str, Line], within: str
) -> tuple[str, int, int]:
    """Return kind, group size and the bytes that each device sends in one run."""
    kind = line.operation.removesuffix("-start")
    of_replicas = "channel_id" in line.text and "use_global_device" not in line.text
    if kind in ("all-reduce", "all-gather", "reduce-scatter") and of_replicas:
        cannot_count("its groups are of replicas, not of devices", line)
    if kind in UNCOUNTED or "slice_sizes" in line.text:
        cannot_count("its bytes are not known", line)
    result = line
    if line.operation != kind:  # only -done prints the result alone
        ends = [end for end in lines.values() if end.operation == f"{kind}-done"]
        ends = [end for end in ends if line.name in end.operands]
        if not ends:
            cannot_count(f"no {kind}-done takes its result", line)
        result = ends[0]
    n, size = group_size(line), result_bytes(result)
    if kind == "all-reduce" and within.startswith("all-reduce-scatter"):
        kind, size = "reduce-scatter", size / n  # how a TPU's compiler writes one
    return kind, n, round(RING[kind](n) * size)


def loop_value(name: str, lines: dict[str, Line]) -> str:
    """Return a value of a loop as text: 5, or index=0 for its variable, or a sum."""
    line = lines[name]
    if line.operation == "copy":
        return loop_value(line.operands[0], lines)
    if line.operation == "add":
        return " + ".join(loop_value(operand, lines) for operand in line.operands)
    if line.operation == "get-tuple-element":
        variable = lines[line.operands[0]].operation == "parameter"
        return re.search(r"index=\d+", line.text)[0] if variable else name
    return line.operands[0] if line.operation == "constant" else name


def trip_count(loop: Line, lines: dict[str, Line], program: dict) -> int:
    """Return a loop's trip count, printed or derived from its text; 0 if unknown."""
    if printed := re.search(r'known_trip_count":{"n":"(\d+)', loop.text):
        return int(printed[1])
    named = dict(re.findall(r"\b(condition|body)=%?([\w.-]+)", loop.text))
    try:  # to read it as  for index in range(first, last, step)
        condition, body = program[named["condition"]], program[named["body"]]
        [test] = [line for line in condition.values() if line.text.startswith("ROOT")]
        [after] = [line for line in body.values() if line.text.startswith("ROOT")]
        before = lines[loop.operands[0]]
        operations = [line.operation for line in (test, before, after)]
        if operations != ["compare", "tuple", "tuple"]:
            return 0
        if "direction=LT" not in test.text:
            return 0
        index, last = [loop_value(operand, condition) for operand in test.operands]
        position = int(index.removeprefix("index="))
        first = loop_value(before.operands[position], lines)
        step = loop_value(after.operands[position], body).removeprefix(f"{index} + ")
        return len(range(int(first), int(last), int(step)))
    except (KeyError, ValueError):
        return 0


def called_by(line: Line, lines: dict[str, Line], program: dict) -> list[tuple]:
    """Return the computations that a line calls, each with its runs; 0 if unknown."""
    if line.operation.endswith(("-update", "-done")):
        return []  # its -start makes the call
    found = []
    by = r"\b(calls|to_apply|body|condition|\w+_computations?)=({.*?}|%?[\w.-]+)"
    for role, names in re.findall(by, line.text):
        times = 1 if role in ("calls", "to_apply") else 0  # 0: a branch or a condition
        if role == "body":
            times = trip_count(line, lines, program)
        found += [(name, times) for name in re.findall(r"[\w.-]+", names)]
    return [(name, times) for name, times in found if name in program]


def all_runs(name: str, runs: int, program: dict) -> Iterator[tuple[str, int]]:
    """Yield the name and runs of a computation and of all computations it calls."""
    yield name, runs
    for line in program[name].values():
        for called, times in called_by(line, program[name], program):
            yield from all_runs(called, runs * times, program)


def chain_of(line: Line) -> str:
    """Return the id of an asynchronous collective that a TPU runs in several parts."""
    chain = re.search(r'chain_id="?(\d+)', line.text)
    return chain[1] if chain else "unnamed"


def collectives(compiled) -> dict[tuple[str, int], tuple[int, int]]:
    """Map (kind, group size) to (times run, bytes each device sends on a ring).

    (0, 0) means that collectives of this kind exist, but their runs are not known.
    """
    program, entry = read_program(compiled.as_text())
    visited = list(all_runs(entry, 1, program))
    for name in program.keys() - dict(visited).keys():
        visited.append((name, 0))  # its caller is not known
    found, unknown, started, partial = {}, set(), set(), {}
    for name, runs in visited:
        lines = program[name]
        starts = [line for line in lines.values() if "CollectiveStart" in line.text]
        for line in lines.values():
            kind = line.operation.removesuffix("-start")
            if kind not in (*RING, *UNCOUNTED) or "is_host_transfer=true" in line.text:
                continue
            if "async_collective_fusion_config" in line.text:
                if not any(line.name in start.operands for start in starts):
                    partial[chain_of(line)] = line  # another line starts it
                    continue
                started.add(chain_of(line))
            kind, n, sent = read_collective(line, lines, name)
            if n == 0 or (n == 1 and kind != "collective-permute"):
                continue  # each device would send to itself
            times, total = found.get((kind, n), (0, 0))
            found[kind, n] = times + runs, total + runs * sent
            if runs == 0:
                unknown.add((kind, n))
    for chain in partial.keys() - started:
        cannot_count("no line starts it", partial[chain])
    return {key: (0, 0) if key in unknown else found[key] for key in sorted(found)}
